"""Acceptance of whole trees: both rules, alone and in one batch, forced tokens, penalties, and the synthetic acceptance
of cost studies.

The target and the draft are Markov chains over a few tokens, so that every distribution is known exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, Literal, cast, get_args

import pytest
import torch
from torch import Tensor

from specmamba.config import MAX_DRAFT_TOKENS
from specmamba.core import Batch, DraftTree, TreeShape, Verdict
from specmamba.draft.drafter import chain_shape, tree_shape
from specmamba.kernels import sampling as sampling_ops
from specmamba.kernels.sampling import reference
from specmamba.sampling_params import AcceptRule, SamplingBatch, SamplingParams, SpeculationParams
from specmamba.verify import acceptance as rules
from specmamba.verify.acceptance import accept, accept_rule
from tests.pairwise import pairwise

VOCABULARY, ROOT_POSITION = 6, 9
TREES = {
    "chain": [-1, 0, 1, 2],
    "star": [-1, 0, 0, 0],
    "bushy": [-1, 0, 0, 0, 1, 1, 2, 4],
    "padded": [-1, 0, 0, 1, 1, 2, -1, -1],
    "lopsided": [-1, 0, 0, 2, 3],
}
SETTINGS = {
    "temperature 1": SamplingParams(temperature=1.0),
    "cool, top-p": SamplingParams(temperature=0.7, top_p=0.9),
    "hot, top-p": SamplingParams(temperature=1.2, top_p=0.9),
}
FAIR, WRONG = 1e-3, 1e-9  # a fair sample has a p-value above the first, a wrong one below the second
CPU = torch.device("cpu")


def transitions(seed: int) -> Tensor:
    """Logits [V, V] of the next token after each token."""
    return 1.5 * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed))


TARGET, DRAFT = transitions(1), 0.6 * transitions(1) + 0.8 * transitions(2)


def batch_of(
    params: SamplingParams | list[SamplingParams],
    size: int,
    rule: AcceptRule | list[AcceptRule] = "target",
) -> Batch:
    """Requests that differ in their seed, all with the token 0 as their root; ``rule`` of all, or of each."""
    each = params if isinstance(params, list) else [params] * size
    of_each = rule if isinstance(rule, list) else [rule] * size
    return Batch(
        rows=tuple(range(size)),
        row_index=torch.arange(size),
        root_tokens=torch.zeros(size, dtype=torch.int64),
        root_positions=torch.full((size,), ROOT_POSITION),
        max_root_position=ROOT_POSITION,
        sampling=SamplingBatch.of(each, list(range(size)), CPU, of_each),
    )


def drawn_tree(parents: list[int], batch: Batch) -> DraftTree:
    """Every node's children drawn from DRAFT's row of its token."""
    size, nodes = len(batch.rows), len(parents)
    tokens = torch.zeros(size, nodes, dtype=torch.int64)
    probs = torch.full((size, nodes, VOCABULARY), torch.nan)
    for node in range(nodes):
        children = [child for child, parent in enumerate(parents) if parent == node]
        if not children:
            continue
        probs[:, node] = DRAFT[tokens[:, node]].softmax(-1)
        ranks = torch.arange(len(children))
        counters = (batch.root_positions[:, None, None] << 20) | (node << 8) | ranks
        uniforms = sampling_ops.uniform(batch.sampling.seeds, counters, sampling_ops.DRAFT_STREAM)
        drawn, is_drawn = sampling_ops.draw_children(probs[:, node : node + 1], uniforms)
        assert bool(is_drawn.all())
        tokens[:, children] = drawn[:, 0]
    return DraftTree(tokens, shape_of(parents, size), probs)


def shape_of(parents: list[int], size: int) -> TreeShape:
    return tree_shape(torch.tensor(parents).expand(size, -1), max_children=3)


def target_logits(tree: DraftTree) -> Tensor:
    return TARGET[tree.tokens]


def p_values(verdict: Verdict, params: SamplingParams) -> list[float]:
    """For the first, second and third token of a step: is it distributed as the target says after the one before?"""
    settings = [torch.tensor([x]) for x in (params.temperature, params.top_k, params.top_p, params.min_p)]
    exact = reference.probabilities(TARGET.double()[None], *settings)[0]
    values = []
    for step in range(3):
        decided = verdict.num_accepted >= step
        if int(decided.sum()) < 200:
            break
        before = verdict.path_tokens[decided, step - 1] if step else torch.zeros(int(decided.sum()), dtype=torch.int64)
        cells = before * VOCABULARY + verdict.path_tokens[decided, step]
        observed = torch.bincount(cells, minlength=VOCABULARY**2).view(VOCABULARY, VOCABULARY).double()
        expected = exact * observed.sum(1, keepdim=True)
        if bool((observed[exact == 0] > 0).any()):
            return [0.0]
        counted = expected >= 5
        statistic = ((observed - expected).square() / expected)[counted].sum()
        freedom = counted.sum() - (counted.sum(1) > 0).sum()  # the rows' totals are given
        values.append(float(torch.special.gammaincc(freedom / 2, statistic / 2)))
    return values


@pairwise(
    pytest.mark.parametrize("rule", ["target", "rejection"]),
    pytest.mark.parametrize("setting", SETTINGS),
    pytest.mark.parametrize("tree", TREES),
)
def test_every_token_is_distributed_as_the_target_says(tree: str, setting: str, rule: AcceptRule) -> None:
    params = SETTINGS[setting]
    batch = batch_of(params, 6000, rule)
    drafts = drawn_tree(TREES[tree], batch)
    verdict = accept(drafts, target_logits(drafts), batch, None)
    values = p_values(verdict, params)
    assert len(values) == (2 if tree == "star" else 3)
    assert min(values) > FAIR
    assert bool(verdict.is_finite.all())


def test_a_chain_is_accepted_as_often_as_theory_says() -> None:
    """arXiv 2211.17192, section 3.1, and more often than by the target's own sample."""
    params = SETTINGS["temperature 1"]
    rates = {}
    for rule in get_args(AcceptRule):
        batch = batch_of(params, 6000, rule)
        drafts = drawn_tree(TREES["chain"], batch)
        rates[rule] = (accept(drafts, target_logits(drafts), batch, None).num_accepted > 0).double().mean()
    p, q = TARGET[0].softmax(-1), DRAFT[0].softmax(-1)
    tolerance = 4 * 0.5 / 6000**0.5
    assert float(rates["rejection"]) == pytest.approx(float(torch.minimum(p, q).sum()), abs=tolerance)
    assert float(rates["target"]) == pytest.approx(float((p * q).sum()), abs=tolerance)
    assert rates["rejection"] > rates["target"] + 0.2


def judged_by_another_draft(tree: DraftTree) -> DraftTree:
    assert tree.draft_probs is not None
    return replace(tree, draft_probs=tree.draft_probs.sqrt())


def out_of_order(tree: DraftTree) -> DraftTree:
    return replace(tree, tokens=tree.tokens[:, [0, 3, 2, 1]])


def only_the_likeliest(tree: DraftTree) -> DraftTree:
    """Three drafts are drawn, and the one that the draft thinks likeliest is tried first."""
    assert tree.draft_probs is not None
    likely = tree.draft_probs[:, 0].gather(1, tree.tokens[:, 1:]).argsort(1, descending=True)
    return replace(tree, tokens=torch.cat([tree.tokens[:, :1], tree.tokens[:, 1:].gather(1, likely)], 1))


@pytest.mark.parametrize("wrong", [judged_by_another_draft, out_of_order, only_the_likeliest])
def test_a_wrong_draft_is_found_out(wrong: Callable[[DraftTree], DraftTree]) -> None:
    params = SETTINGS["temperature 1"]
    batch = batch_of(params, 6000, "rejection")
    drafts = wrong(drawn_tree(TREES["star"], batch))
    verdict = accept(drafts, target_logits(drafts), batch, None)
    assert min(p_values(verdict, params)) < WRONG


def test_random_numbers_must_not_be_those_of_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong: a draft is judged by the number that it was drawn with."""

    def of_the_draft(batch: Batch, num_nodes: int) -> Tensor:
        counters = (batch.root_positions[:, None] << 20) | (torch.arange(num_nodes) - 1).clamp(min=0)
        return sampling_ops.uniform(batch.sampling.seeds, counters, sampling_ops.DRAFT_STREAM)

    monkeypatch.setattr(rules, "_accept_uniforms", of_the_draft)
    params = SETTINGS["temperature 1"]
    batch = batch_of(params, 6000, "rejection")
    drafts = drawn_tree(TREES["star"], batch)
    assert min(p_values(accept(drafts, target_logits(drafts), batch, None), params)) < WRONG


def test_every_node_of_every_step_has_its_own_number() -> None:
    """In a stream of its own, and apart from those of the neighbouring steps for trees of 64 nodes too."""
    streams = [getattr(sampling_ops, name) for name in sampling_ops.__all__ if name.endswith("_STREAM")]
    assert len(set(streams)) == len(streams) == 4
    batch = batch_of(SETTINGS["temperature 1"], 3)
    steps = [replace(batch, root_positions=batch.root_positions + step) for step in range(3)]
    numbers = torch.cat([rules._accept_uniforms(step, MAX_DRAFT_TOKENS) for step in steps], 1)
    counters = (torch.arange(3 * MAX_DRAFT_TOKENS) + ROOT_POSITION * MAX_DRAFT_TOKENS).expand(3, -1)
    assert torch.equal(numbers, sampling_ops.uniform(batch.sampling.seeds, counters, sampling_ops.ACCEPT_STREAM))


def assert_same(a: Verdict, b: Verdict, rows: slice = slice(None)) -> None:
    for name in ("path", "num_accepted", "path_tokens", "bonus", "is_finite"):
        assert torch.equal(getattr(a, name)[rows], getattr(b, name)[rows]), name


@pytest.mark.parametrize("has_probs", [True, False])
def test_greedy_rows_are_exact(has_probs: bool) -> None:
    """A batch of them, and some of them among others."""
    greedy, sampled = SamplingParams(temperature=0.0), SETTINGS["hot, top-p"]
    lone = batch_of(greedy, 200)
    mixed = batch_of([greedy] * 100 + [sampled] * 100, 200, "rejection")
    drafts = drawn_tree(TREES["bushy"], lone)
    drafts = drafts if has_probs else replace(drafts, draft_probs=None)
    want = accept(drafts, target_logits(drafts), lone, None)
    assert_same(accept(drafts, target_logits(drafts), batch_of(greedy, 200, "rejection"), None), want)
    assert_same(accept(drafts, target_logits(drafts), mixed, None), want, slice(100))
    assert int(want.num_accepted.max()) > 1


def test_without_drafts_both_rules_give_the_same_text() -> None:
    batches = [batch_of(SETTINGS["hot, top-p"], 500, rule) for rule in get_args(AcceptRule)]
    roots = DraftTree(batches[0].root_tokens[:, None], chain_shape(500, 1, CPU))
    verdicts = [accept(roots, target_logits(roots), batch, None) for batch in batches]
    assert_same(verdicts[0], verdicts[1])
    assert len(verdicts[0].bonus.unique()) > 3


# --- batches of both rules


MIXED: list[tuple[SamplingParams, AcceptRule]] = [  # rows come in this order, again and again
    (SamplingParams(temperature=0.0), "target"),
    (SETTINGS["temperature 1"], "rejection"),
    (SETTINGS["temperature 1"], "target"),
    (SETTINGS["cool, top-p"], "target"),
    (SamplingParams(temperature=0.0, top_k=2), "rejection"),
    (SamplingParams(temperature=1.2, top_k=3, min_p=0.05), "rejection"),
    (SamplingParams(temperature=1.2, top_k=3, min_p=0.05, frequency_penalty=1.0), "target"),
    (SamplingParams(temperature=0.9, repetition_penalty=1.5), "rejection"),
]


def mixed_batch(of_each: list[tuple[SamplingParams, AcceptRule]]) -> Batch:
    return batch_of([params for params, _ in of_each], len(of_each), [rule for _, rule in of_each])


def history_of(size: int) -> tuple[Tensor, Tensor]:
    """Output counts and prompt masks that differ from row to row."""
    generator = torch.Generator().manual_seed(3)
    counts = torch.randint(0, 3, (size, VOCABULARY), generator=generator, dtype=torch.int32)
    return counts, torch.rand(size, VOCABULARY, generator=generator) < 0.3


def of_rows(rows: Tensor, tree: DraftTree) -> DraftTree:
    probs = None if tree.draft_probs is None else tree.draft_probs[rows]
    return DraftTree(tree.tokens[rows], tree_shape(tree.shape.parents[rows], max_children=3), probs)


@pytest.mark.parametrize("has_probs", [True, False])
@pytest.mark.parametrize("tree", TREES)
def test_a_row_among_rows_of_the_other_rule_is_decided_as_among_its_own(tree: str, has_probs: bool) -> None:
    """Of greedy, sampled, filtered and penalized rows of both rules, with drawn drafts and with chosen ones."""
    of_each = MIXED * 60
    batch, history = mixed_batch(of_each), history_of(len(of_each))
    drafts = drawn_tree(TREES[tree], batch)
    drafts = drafts if has_probs else replace(drafts, draft_probs=None)
    together = accept(drafts, target_logits(drafts), batch, history)
    names = [field.name for field in fields(Verdict)]
    for rule in get_args(AcceptRule):
        rows = torch.tensor([row for row, (_, of_row) in enumerate(of_each) if of_row == rule])
        params = [of_each[row][0] for row in rows.tolist()]
        alone = replace(
            batch_of(params, len(rows), rule),
            sampling=SamplingBatch.of(params, rows.tolist(), CPU, [rule] * len(rows)),  # a seed is the row's number
        )
        own = of_rows(rows, drafts)
        expected = accept(own, target_logits(own), alone, (history[0][rows], history[1][rows]))
        for name in names:
            assert torch.equal(getattr(together, name)[rows], getattr(expected, name)), (rule, name)
    assert together.num_accepted.unique().tolist() == [0, 1] if tree == "star" else int(together.num_accepted.max()) > 1


def test_the_rule_of_each_row_decides_it() -> None:
    """Rows that are sampled are decided in another way under the other rule; greedy ones in the same."""
    others = {"target": "rejection", "rejection": "target"}
    batch = mixed_batch(MIXED * 60)
    swapped = mixed_batch([(params, cast(AcceptRule, others[rule])) for params, rule in MIXED * 60])
    drafts, history = drawn_tree(TREES["bushy"], batch), history_of(batch.size)
    verdicts = [accept(drafts, target_logits(drafts), each, history) for each in (batch, swapped)]
    differ = (verdicts[0].path_tokens != verdicts[1].path_tokens).any(1).view(60, len(MIXED)).sum(0)
    assert [int(count) > 0 for count in differ] == [not params.is_greedy for params, _ in MIXED]


@pytest.mark.parametrize(
    ("of_each", "rejects", "all_reject"),
    [
        (MIXED[:1] + MIXED[4:5], None, False),  # greedy rows are not sampled under either rule
        (MIXED[2:4], None, False),
        (MIXED[1:3], [True, False], False),
        (MIXED[:2], [False, True], True),
        (MIXED[4:6], [False, True], True),
        (MIXED, [False, True, False, False, False, True, False, True], False),
    ],
)
def test_a_batch_says_which_rows_are_decided_under_rejection(
    of_each: list[tuple[SamplingParams, AcceptRule]], rejects: list[bool] | None, all_reject: bool
) -> None:
    sampling = mixed_batch(of_each).sampling
    assert (None if sampling.rejects is None else sampling.rejects.tolist()) == rejects
    if rejects is not None:  # else nothing asks
        assert sampling.all_reject == all_reject


def test_a_batch_whose_rules_are_not_told_is_decided_under_target() -> None:
    sampling = SamplingBatch.of([SETTINGS["temperature 1"]] * 2, [0, 1], CPU)
    assert sampling.rejects is None


GREEDY, UNSEEDED, SEEDED = SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(seed=0)


def asks(rule: AcceptRule | None, params: SamplingParams, **others: Any) -> SamplingParams:
    return params.model_copy(update={"speculative": SpeculationParams(accept=rule, **others)})


@pytest.mark.parametrize(
    ("params", "setting", "drawing", "not_drawing"),
    [
        # the request asks for nothing
        *((GREEDY, setting, "target", "target") for setting in ("auto", "target", "rejection")),
        (UNSEEDED, "auto", "rejection", "target"),
        (UNSEEDED, "target", "target", "target"),
        (UNSEEDED, "rejection", "rejection", "rejection"),
        (SEEDED, "auto", "target", "target"),
        (SEEDED, "target", "target", "target"),
        (SEEDED, "rejection", "rejection", "rejection"),
        # it asks for a rule
        *((asks("target", UNSEEDED), setting, "target", "target") for setting in ("auto", "target", "rejection")),
        *((asks("target", SEEDED), setting, "target", "target") for setting in ("auto", "target", "rejection")),
        *((asks("rejection", UNSEEDED), setting, "rejection", "rejection") for setting in ("auto", "rejection")),
        *((asks("rejection", SEEDED), setting, "rejection", "rejection") for setting in ("auto", "rejection")),
        *((asks("rejection", GREEDY), setting, "target", "target") for setting in ("auto", "rejection")),
        # it asks for something else
        (asks(None, UNSEEDED, max_depth=2), "auto", "rejection", "target"),
        (asks(None, SEEDED, max_depth=2), "rejection", "rejection", "rejection"),
        (asks(None, SEEDED, max_depth=2), "auto", "target", "target"),
        (UNSEEDED.model_copy(update={"speculative": False}), "auto", "rejection", "target"),
    ],
)
def test_the_rule_of_a_request(
    params: SamplingParams,
    setting: Literal["auto", "target", "rejection"],
    drawing: AcceptRule,
    not_drawing: AcceptRule,
) -> None:
    """By --speculative-accept, and whether the drafter can draw."""
    assert accept_rule(setting, params, True) == drawing
    assert accept_rule(setting, params, False) == not_drawing


# --- tokens that are forced, penalties, logits that are no numbers


@pytest.mark.parametrize("rule", ["target", "rejection"])
def test_forced_tokens_overrule_the_choice(rule: AcceptRule) -> None:
    batch = batch_of(SETTINGS["temperature 1"], 300, rule)
    drafts = drawn_tree(TREES["bushy"], batch)
    forced = torch.full((300, 4), -1)
    forced[:, 0] = drafts.tokens[:, 2]
    free = accept(drafts, target_logits(drafts), batch, None)
    verdict = accept(drafts, target_logits(drafts), replace(batch, forced_output_ids=forced), None)
    assert bool((verdict.num_accepted >= 1).all())
    assert bool((verdict.path[:, 1] == 2).all())
    assert not torch.equal(free.path, verdict.path)


@pytest.mark.parametrize("rule", ["target", "rejection"])
def test_penalties_come_first(rule: AcceptRule) -> None:
    """Nearly greedy rows whose likeliest token is the one that was said already."""
    params = SamplingParams(temperature=0.01, frequency_penalty=2.0)
    batch = batch_of(params, 50, rule)
    drafts = DraftTree(torch.tensor([[0, 3, 3]]).expand(50, -1), chain_shape(50, 3, CPU))
    logits = torch.tensor([0.0, 0.0, 3.0, 4.0, 0.0, 0.0]).expand(50, 3, -1)
    history = torch.zeros(50, VOCABULARY, dtype=torch.int32), torch.zeros(50, VOCABULARY, dtype=torch.bool)
    verdict = accept(drafts, logits, batch, history)
    assert verdict.num_accepted.tolist() == [1] * 50  # the second 3 pays for the first
    assert verdict.bonus.tolist() == [2] * 50


def test_logits_that_are_no_numbers_are_unsound() -> None:
    batch = batch_of(SETTINGS["temperature 1"], 2, "rejection")
    drafts = drawn_tree(TREES["bushy"], batch)
    logits = target_logits(drafts).index_fill(0, torch.tensor([1]), torch.nan)
    verdict = accept(drafts, logits, batch, None)
    assert verdict.is_finite.tolist() == [True, False]
    assert 0 <= int(verdict.path_tokens.min()) <= int(verdict.path_tokens.max()) < VOCABULARY


def test_what_is_no_number_counts_where_the_path_goes() -> None:
    batch = batch_of(SamplingParams(temperature=0.0), 3)
    drafts = DraftTree(torch.tensor([[0, 3, 4]]).expand(3, -1), tree_shape(torch.tensor([[-1, 0, 0]]).expand(3, -1), 2))
    logits = torch.zeros(3, 3, VOCABULARY).index_fill(2, torch.tensor([3]), 1.0)  # node 1 is accepted, node 2 is not
    logits[1, 1], logits[2, 2] = torch.nan, torch.nan
    verdict = accept(drafts, logits, batch, None)
    assert verdict.num_accepted.tolist() == [1, 1, 1]
    assert verdict.is_finite.tolist() == [True, False, True]


@pytest.mark.parametrize("rule", ["target", "rejection"])
def test_forced_tokens_are_given_by_depth(rule: AcceptRule) -> None:
    forced = torch.tensor([[3, 4, 5]]).expand(20, -1)
    batch = replace(batch_of(SETTINGS["temperature 1"], 20, rule), forced_output_ids=forced)
    drafts = DraftTree(torch.tensor([[0, 3, 4]]).expand(20, -1), chain_shape(20, 3, CPU))
    verdict = accept(drafts, target_logits(drafts), batch, None)
    assert verdict.path_tokens[:, :3].tolist() == [[3, 4, 5]] * 20


# --- synthetic acceptance


@pairwise(
    pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SETTINGS["temperature 1"]]),
    pytest.mark.parametrize("rule", ["target", "rejection"]),
    pytest.mark.parametrize("tree", TREES),
)
def test_synthetic_acceptance_follows_first_children(tree: str, rule: AcceptRule, params: SamplingParams) -> None:
    batch = batch_of(params, 4000, rule)
    drafts = drawn_tree(TREES[tree], batch)
    firsts = {"chain": [0, 1, 2, 3], "star": [0, 1], "bushy": [0, 1, 4, 7], "padded": [0, 1, 3], "lopsided": [0, 1]}[
        tree
    ]
    choice = rules.choose(drafts, target_logits(drafts), batch)
    for probability in (0.0, 0.7, 1.0):
        verdict = accept(drafts, target_logits(drafts), batch, None, probability)
        assert set(verdict.path.flatten().tolist()) <= set(firsts)
        depth = len(firsts) - 1
        expected = sum(probability**step for step in range(1, depth + 1))
        assert float(verdict.num_accepted.double().mean()) == pytest.approx(expected, abs=0.08)
        if probability in (0.0, 1.0):
            assert verdict.num_accepted.unique().tolist() == [depth * probability]
        end = verdict.num_accepted[:, None]
        assert torch.equal(verdict.bonus, choice.gather(1, verdict.path.gather(1, end))[:, 0])
        taken = choice.gather(1, verdict.path[:, :1])
        assert torch.equal(verdict.path_tokens[:, :1], taken)  # the text is the target's choices, never a draft


def test_synthetic_acceptance_depends_on_seed_and_position_alone() -> None:
    batch, rejecting = (batch_of(SETTINGS["temperature 1"], 500, rule) for rule in get_args(AcceptRule))
    drafts = drawn_tree(TREES["chain"], batch)
    others = replace(drafts, tokens=drafts.tokens.flip(0), draft_probs=None)
    cases = [(drafts, batch), (others, batch), (drafts, rejecting)]
    counts = [accept(tree, target_logits(tree), each, None, 0.5).num_accepted for tree, each in cases]
    assert torch.equal(counts[0], counts[1])
    assert torch.equal(counts[0], counts[2])
    later = replace(batch, root_positions=batch.root_positions + 5)
    assert not torch.equal(accept(drafts, target_logits(drafts), later, None, 0.5).num_accepted, counts[0])
