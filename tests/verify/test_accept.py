"""Acceptance of whole trees: both rules, forced tokens, penalties, and the synthetic acceptance of cost studies.

The target and the draft are Markov chains over a few tokens, so that every distribution is known exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor

from specmamba.config import MAX_DRAFT_TOKENS
from specmamba.core import Batch, DraftTree, TreeShape, Verdict
from specmamba.draft.drafter import chain_shape, tree_shape
from specmamba.kernels import sampling as sampling_ops
from specmamba.kernels.sampling import reference
from specmamba.sampling_params import SamplingBatch, SamplingParams
from specmamba.verify import acceptance as rules
from specmamba.verify.acceptance import accept
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


def batch_of(params: SamplingParams | list[SamplingParams], size: int) -> Batch:
    """Requests that differ in their seed, all with the token 0 as their root."""
    each = params if isinstance(params, list) else [params] * size
    return Batch(
        rows=tuple(range(size)),
        row_index=torch.arange(size),
        root_tokens=torch.zeros(size, dtype=torch.int64),
        root_positions=torch.full((size,), ROOT_POSITION),
        max_root_position=ROOT_POSITION,
        sampling=SamplingBatch.of(each, list(range(size)), CPU),
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
def test_every_token_is_distributed_as_the_target_says(tree: str, setting: str, rule: rules.AcceptRule) -> None:
    params = SETTINGS[setting]
    batch = batch_of(params, 6000)
    drafts = drawn_tree(TREES[tree], batch)
    verdict = accept(drafts, target_logits(drafts), batch, None, rule)
    values = p_values(verdict, params)
    assert len(values) == (2 if tree == "star" else 3)
    assert min(values) > FAIR
    assert bool(verdict.is_finite.all())


def test_a_chain_is_accepted_as_often_as_theory_says() -> None:
    """arXiv 2211.17192, section 3.1, and more often than by the target's own sample."""
    params = SETTINGS["temperature 1"]
    batch = batch_of(params, 6000)
    drafts = drawn_tree(TREES["chain"], batch)
    rates = {}
    for rule in ("target", "rejection"):
        rates[rule] = (accept(drafts, target_logits(drafts), batch, None, rule).num_accepted > 0).double().mean()
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
    batch = batch_of(params, 6000)
    drafts = wrong(drawn_tree(TREES["star"], batch))
    verdict = accept(drafts, target_logits(drafts), batch, None, "rejection")
    assert min(p_values(verdict, params)) < WRONG


def test_random_numbers_must_not_be_those_of_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong: a draft is judged by the number that it was drawn with."""

    def of_the_draft(batch: Batch, num_nodes: int) -> Tensor:
        counters = (batch.root_positions[:, None] << 20) | (torch.arange(num_nodes) - 1).clamp(min=0)
        return sampling_ops.uniform(batch.sampling.seeds, counters, sampling_ops.DRAFT_STREAM)

    monkeypatch.setattr(rules, "_accept_uniforms", of_the_draft)
    params = SETTINGS["temperature 1"]
    batch = batch_of(params, 6000)
    drafts = drawn_tree(TREES["star"], batch)
    assert min(p_values(accept(drafts, target_logits(drafts), batch, None, "rejection"), params)) < WRONG


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
    mixed = batch_of([greedy] * 100 + [sampled] * 100, 200)
    drafts = drawn_tree(TREES["bushy"], lone)
    drafts = drafts if has_probs else replace(drafts, draft_probs=None)
    want = accept(drafts, target_logits(drafts), lone, None, "target")
    assert_same(accept(drafts, target_logits(drafts), lone, None, "rejection"), want)
    assert_same(accept(drafts, target_logits(drafts), mixed, None, "rejection"), want, slice(100))
    assert int(want.num_accepted.max()) > 1


def test_without_drafts_both_rules_give_the_same_text() -> None:
    batch = batch_of(SETTINGS["hot, top-p"], 500)
    roots = DraftTree(batch.root_tokens[:, None], chain_shape(500, 1, CPU))
    verdicts = [accept(roots, target_logits(roots), batch, None, rule) for rule in get_args(rules.AcceptRule)]
    assert_same(verdicts[0], verdicts[1])
    assert len(verdicts[0].bonus.unique()) > 3


@pytest.mark.parametrize("rule", ["target", "rejection"])
def test_forced_tokens_overrule_the_choice(rule: rules.AcceptRule) -> None:
    batch = batch_of(SETTINGS["temperature 1"], 300)
    drafts = drawn_tree(TREES["bushy"], batch)
    forced = torch.full((300, 4), -1)
    forced[:, 0] = drafts.tokens[:, 2]
    free = accept(drafts, target_logits(drafts), batch, None, rule)
    verdict = accept(drafts, target_logits(drafts), replace(batch, forced_output_ids=forced), None, rule)
    assert bool((verdict.num_accepted >= 1).all())
    assert bool((verdict.path[:, 1] == 2).all())
    assert not torch.equal(free.path, verdict.path)


@pytest.mark.parametrize("rule", ["target", "rejection"])
def test_penalties_come_first(rule: rules.AcceptRule) -> None:
    """Nearly greedy rows whose likeliest token is the one that was said already."""
    params = SamplingParams(temperature=0.01, frequency_penalty=2.0)
    batch = batch_of(params, 50)
    drafts = DraftTree(torch.tensor([[0, 3, 3]]).expand(50, -1), chain_shape(50, 3, CPU))
    logits = torch.tensor([0.0, 0.0, 3.0, 4.0, 0.0, 0.0]).expand(50, 3, -1)
    history = torch.zeros(50, VOCABULARY, dtype=torch.int32), torch.zeros(50, VOCABULARY, dtype=torch.bool)
    verdict = accept(drafts, logits, batch, history, rule)
    assert verdict.num_accepted.tolist() == [1] * 50  # the second 3 pays for the first
    assert verdict.bonus.tolist() == [2] * 50


def test_logits_that_are_no_numbers_are_unsound() -> None:
    batch = batch_of(SETTINGS["temperature 1"], 2)
    drafts = drawn_tree(TREES["bushy"], batch)
    logits = target_logits(drafts).index_fill(0, torch.tensor([1]), torch.nan)
    verdict = accept(drafts, logits, batch, None, "rejection")
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
def test_forced_tokens_are_given_by_depth(rule: rules.AcceptRule) -> None:
    batch = replace(batch_of(SETTINGS["temperature 1"], 20), forced_output_ids=torch.tensor([[3, 4, 5]]).expand(20, -1))
    drafts = DraftTree(torch.tensor([[0, 3, 4]]).expand(20, -1), chain_shape(20, 3, CPU))
    verdict = accept(drafts, target_logits(drafts), batch, None, rule)
    assert verdict.path_tokens[:, :3].tolist() == [[3, 4, 5]] * 20


# --- synthetic acceptance


@pairwise(
    pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SETTINGS["temperature 1"]]),
    pytest.mark.parametrize("rule", ["target", "rejection"]),
    pytest.mark.parametrize("tree", TREES),
)
def test_synthetic_acceptance_follows_first_children(tree: str, rule: rules.AcceptRule, params: SamplingParams) -> None:
    batch = batch_of(params, 4000)
    drafts = drawn_tree(TREES[tree], batch)
    firsts = {"chain": [0, 1, 2, 3], "star": [0, 1], "bushy": [0, 1, 4, 7], "padded": [0, 1, 3], "lopsided": [0, 1]}[
        tree
    ]
    choice = rules.choose(drafts, target_logits(drafts), batch, rule)
    for probability in (0.0, 0.7, 1.0):
        verdict = accept(drafts, target_logits(drafts), batch, None, rule, probability)
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
    batch = batch_of(SETTINGS["temperature 1"], 500)
    drafts = drawn_tree(TREES["chain"], batch)
    others = replace(drafts, tokens=drafts.tokens.flip(0), draft_probs=None)
    cases: list[tuple[DraftTree, rules.AcceptRule]] = [(drafts, "target"), (others, "target"), (drafts, "rejection")]
    counts = [accept(tree, target_logits(tree), batch, None, rule, 0.5).num_accepted for tree, rule in cases]
    assert torch.equal(counts[0], counts[1])
    assert torch.equal(counts[0], counts[2])
    later = replace(batch, root_positions=batch.root_positions + 5)
    assert not torch.equal(accept(drafts, target_logits(drafts), later, None, "target", 0.5).num_accepted, counts[0])
