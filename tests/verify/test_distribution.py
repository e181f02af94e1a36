"""Sampled text is distributed as the target says, whatever is drafted: chi-square tests over the next two tokens.

Every request has its own fixed seed, so a p-value is the same on every run: nothing here is flaky. CI runs each filter,
rule, tree, depth and temperature at least once, ``SPECMAMBA_TEST_FULL=1`` all of them together.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3_5ForCausalLM

from specmamba.config import EngineConfig
from specmamba.core import Batch, DraftTree, Verdict
from specmamba.draft.drafter import Drafter, tree_shape
from specmamba.draft.heads import children
from specmamba.engine.engine import Engine
from specmamba.sampling_params import SamplingParams, SpeculationParams
from specmamba.verify.acceptance import accept
from tests.exactness import run_directly
from tests.tiny import write_tiny_checkpoint

IS_FULL = os.environ.get("SPECMAMBA_TEST_FULL") == "1"
VOCABULARY = 24
MODEL_SEED, PROMPT = 6, (14, 5, 7)  # here the target agrees with the head's first guess 36 % of the time
NUM_DRAWS = 4000
MIN_EXPECTED = 8.0  # draws per bin: the chi-square approximation is good there
FAIR, WRONG = 1e-3, 1e-9  # a fair sample has a p-value above the first, a wrong one below the second


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(
        tmp_path_factory.mktemp("tiny"), seed=MODEL_SEED, vocab_size=VOCABULARY, max_position_embeddings=64
    )


@pytest.fixture(scope="module")
def logits(folder: Path) -> tuple[Tensor, Tensor]:
    """transformers' logits, float64: [V] after the prompt, [V, V] after the prompt and each token."""
    model = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts = torch.tensor([[*PROMPT, token] for token in range(VOCABULARY)])
    with torch.no_grad():
        of_all = model(texts).logits.double()
    return of_all[0, len(PROMPT) - 1], of_all[:, len(PROMPT)]


def build(folder: Path, num_steps: int, has_cache: bool = False, **flags: Any) -> Engine:
    speculation = {"speculative_algorithm": "mtp", "speculative_num_steps": num_steps}
    return Engine(
        EngineConfig(
            model=str(folder),
            dtype="float32",
            disable_radix_cache=not has_cache,  # which takes half of the time where all prompts are the same
            device="cpu",
            max_running_requests=250,
            max_queued_requests=NUM_DRAWS,
            **(speculation if num_steps else flags or {"speculative_algorithm": "none"}),
        )
    )


def draw(engine: Engine, params: SamplingParams) -> Counter[tuple[int, int]]:
    """The first two tokens of many requests that differ in their seed alone."""
    return draw_each(engine, params)[0]


def draw_each(engine: Engine, *ways: SamplingParams) -> list[Counter[tuple[int, int]]]:
    """The first two tokens with each of these settings, of many requests that take turns with them."""
    outputs: dict[str, tuple[int, ...]] = {}
    for seed in range(NUM_DRAWS):
        engine.add_request(str(seed), PROMPT, ways[seed % len(ways)].model_copy(update={"seed": seed}))
    while engine.has_unfinished_requests:
        for delta in engine.step():
            outputs[delta.request_id] = (*outputs.get(delta.request_id, ()), *delta.token_ids)
    assert len(outputs) == NUM_DRAWS
    pairs = [outputs[str(seed)][:2] for seed in range(NUM_DRAWS)]
    return [Counter((first, second) for first, second in pairs[place :: len(ways)]) for place in range(len(ways))]


def exact(logits: Tensor, params: SamplingParams) -> Tensor:
    """The distribution one token is drawn from, filter by filter, likeliest token first."""
    probs = (logits / params.temperature).softmax(-1).tolist()
    ranked = sorted(range(VOCABULARY), key=lambda token: (-probs[token], token))
    if params.top_k > 0:
        ranked = ranked[: params.top_k]
    total, mass, kept = sum(probs[token] for token in ranked), 0.0, []
    for token in ranked:
        if mass < params.top_p:
            kept.append(token)
        mass += probs[token] / total
    kept = [token for token in kept if probs[token] >= params.min_p * probs[ranked[0]]]
    result = torch.zeros(VOCABULARY, dtype=torch.float64)
    result[kept] = torch.tensor([probs[token] for token in kept], dtype=torch.float64)
    return result / result.sum()


def exact_pairs(logits: tuple[Tensor, Tensor], params: SamplingParams) -> Tensor:
    first = exact(logits[0], params)
    return first[:, None] * torch.stack([exact(after, params) for after in logits[1]])


def p_value(draws: Counter[tuple[int, int]], pairs: Tensor) -> float:
    """Chance that a fair sample is at least this far from the expectation. Rare pairs share a bin."""
    observed = torch.zeros_like(pairs)
    for pair, count in draws.items():
        observed[pair] = count
    expected = pairs * draws.total()
    if observed[expected == 0].any():
        return 0.0
    is_rare = expected < MIN_EXPECTED
    rest = torch.stack([observed[is_rare].sum(), expected[is_rare].sum()])
    bins = torch.stack([observed[~is_rare], expected[~is_rare]])
    if rest[1] >= MIN_EXPECTED:
        bins = torch.cat([bins, rest[:, None]], 1)
    statistic = ((bins[0] - bins[1]).square() / bins[1]).sum()
    return float(torch.special.gammaincc(torch.tensor((bins.shape[1] - 1) / 2.0, dtype=torch.float64), statistic / 2))


SETTINGS = {
    "temperature 1": SamplingParams(max_tokens=2, temperature=1.0, ignore_eos=True),
    "top-p": SamplingParams(max_tokens=2, temperature=0.7, top_p=0.9, ignore_eos=True),
    "top-k": SamplingParams(max_tokens=2, temperature=1.5, top_k=9, ignore_eos=True),
    "min-p": SamplingParams(max_tokens=2, temperature=1.0, min_p=0.1, ignore_eos=True),
    "all": SamplingParams(max_tokens=3, temperature=1.2, top_k=20, top_p=0.95, min_p=0.02, ignore_eos=True),
}


ALL_STEPS = [(setting, num_steps) for setting in SETTINGS for num_steps in (0, 1, 3)]
SOME_STEPS = [case for case in ALL_STEPS if case[0] in ("temperature 1", "all")]
SOME_STEPS += [("top-p", 3), ("top-k", 1), ("min-p", 3)]


@pytest.mark.fast_cases("temperature 1-1", "top-k-1")
@pytest.mark.parametrize(("setting", "num_steps"), ALL_STEPS if IS_FULL else SOME_STEPS)
def test_two_tokens_are_distributed_as_the_target_says(
    folder: Path, logits: tuple[Tensor, Tensor], setting: str, num_steps: int
) -> None:
    engine, params = build(folder, num_steps, has_cache=setting == "all"), SETTINGS[setting]
    draws = draw(engine, params)
    assert p_value(draws, exact_pairs(logits, params)) > FAIR
    if num_steps:  # drafts were accepted and were refused, both often: there was something to get wrong
        accepted = engine.stats().spec.accepted_histogram
        assert min(accepted[0], sum(accepted[1:])) > NUM_DRAWS // 10


class Siblings(Drafter):
    """Trees of likely tokens: four guesses behind the root, each with the same four behind it, in random order."""

    max_nodes = 21

    def __init__(self, logits: tuple[Tensor, Tensor]) -> None:
        self._guesses = logits[0].topk(4).indices
        self._generator = torch.Generator().manual_seed(0)

    def propose(self, batch: Batch) -> DraftTree:
        size = len(batch.rows)
        parents = torch.tensor([-1, *[0] * 4, *(node for node in range(1, 5) for _ in range(4))]).expand(size, -1)
        order = torch.rand(size, 5, 4, generator=self._generator).argsort(-1)
        tokens = torch.cat([batch.root_tokens[:, None], self._guesses[order].flatten(1)], 1)
        return DraftTree(tokens, tree_shape(parents, parents.shape[1]))


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["temperature 1", "all"])
def test_trees_with_siblings(folder: Path, logits: tuple[Tensor, Tensor], setting: str) -> None:
    engine, params = build(folder, Siblings.max_nodes - 1), SETTINGS[setting]
    engine.runner.drafter = Siblings(logits)
    draws = draw(engine, params)
    assert p_value(draws, exact_pairs(logits, params)) > FAIR
    accepted = engine.stats().spec.accepted_histogram
    assert min(accepted[:2]) > NUM_DRAWS // 40  # of two tokens that are drawn, one can have been a draft


TREES: dict[str, dict[str, Any]] = {
    "dynamic": {"speculative_num_steps": 3, "speculative_eagle_topk": 3, "speculative_num_draft_tokens": 8},
    "static": {
        "speculative_tree": {"trees": [{"parents": [-1, 0, 0, 0, 1, 1, 2, 4], "ranks": [0, 1, 0, 2, 0, 1, 0, 0]}]}
    },
    "chain": {"speculative_num_steps": 3},
}
# The chain under the target's rule is in the first test.
RULES = [("target", "dynamic"), ("target", "static"), *(("rejection", tree) for tree in TREES)]


def build_tree(folder: Path, tree: str, rule: str) -> Engine:
    flags = TREES[tree].copy()
    if "speculative_tree" in flags:
        file = folder / "tree.json"
        file.write_text(json.dumps(flags["speculative_tree"]))
        flags["speculative_tree"] = file
    return build(folder, 0, speculative_algorithm="mtp", speculative_accept=rule, **flags)


@pytest.mark.fast_cases("rejection-chain")
@pytest.mark.parametrize(
    ("rule", "tree", "temperature"),
    [
        (rule, tree, temperature)
        for i, (rule, tree) in enumerate(RULES)
        for temperature in ((0.7, 1.2) if IS_FULL else (0.7,) if i % 2 else (1.2,))
    ],
)
def test_trees_under_both_rules(
    folder: Path, logits: tuple[Tensor, Tensor], rule: str, tree: str, temperature: float
) -> None:
    params = SamplingParams(max_tokens=3, temperature=temperature, top_p=0.9, ignore_eos=True)
    engine = build_tree(folder, tree, rule)
    draws = draw(engine, params)
    assert p_value(draws, exact_pairs(logits, params)) > FAIR
    accepted = engine.stats().spec.accepted_histogram
    assert min(accepted[0], accepted[1], accepted[2]) > NUM_DRAWS // 50  # paths of every length were taken


@pytest.mark.fast_cases("chain")
@pytest.mark.parametrize("tree", TREES)
def test_both_rules_in_one_batch(folder: Path, logits: tuple[Tensor, Tensor], tree: str) -> None:
    """Requests of each rule, each with other settings; no batch has one rule only."""
    common: dict[str, Any] = {"max_tokens": 3, "ignore_eos": True}
    ways = [
        SamplingParams(temperature=0.7, top_p=0.9, speculative=SpeculationParams(accept="target"), **common),
        SamplingParams(temperature=1.2, top_k=9, speculative=SpeculationParams(accept="rejection"), **common),
    ]
    engine = build_tree(folder, tree, "auto")
    for params, draws in zip(ways, draw_each(engine, *ways), strict=True):
        assert draws.total() == NUM_DRAWS / 2
        assert p_value(draws, exact_pairs(logits, params)) > FAIR
    accepted = engine.stats().spec.accepted_histogram
    assert min(accepted[0], accepted[1], accepted[2]) > NUM_DRAWS // 50


def test_rejection_needs_the_distribution_that_drafts_were_drawn_from(
    folder: Path, logits: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts drawn at one temperature and judged by the probabilities of another are found out."""
    real = children.ChildPicker.pick

    def pick(picker: children.ChildPicker, *args: Any) -> children.Children:
        picked = real(picker, *args)
        assert picked.probs is not None
        sharper = picked.probs.square()
        return replace(picked, probs=sharper / sharper.sum(-1, keepdim=True))

    monkeypatch.setattr(children.ChildPicker, "pick", pick)
    params = SamplingParams(max_tokens=2, temperature=1.2, top_p=0.9, ignore_eos=True)
    draws = draw(build_tree(folder, "dynamic", "rejection"), params)
    assert p_value(draws, exact_pairs(logits, params)) < WRONG


def test_rejection_needs_places_that_do_not_depend_on_their_tokens(
    folder: Path, logits: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keeping the likeliest of the drawn tokens, as is right for chosen ones, is found out."""
    real = children.ChildPicker.pick

    def pick(picker: children.ChildPicker, *args: Any) -> children.Children:
        picked = real(picker, *args)
        return replace(picked, place_logp=picked.token_logp)

    monkeypatch.setattr(children.ChildPicker, "pick", pick)
    params = SamplingParams(max_tokens=2, temperature=1.2, ignore_eos=True)
    engine = build(
        folder, 0, speculative_algorithm="mtp", speculative_accept="rejection", speculative_num_steps=1,
        speculative_eagle_topk=6, speculative_num_draft_tokens=2,
    )  # fmt: skip
    assert p_value(draw(engine, params), exact_pairs(logits, params)) < WRONG


def take_the_first_draft(
    tree: DraftTree,
    logits: Tensor,
    batch: Batch,
    history: tuple[Tensor, Tensor] | None,
    *policy: Any,
) -> Verdict:
    """Wrong: the first draft is accepted whatever the target says."""
    fair = accept(tree, logits, batch, history, *policy)
    first = torch.zeros_like(tree.tokens)
    first[:, 1] = 1
    second = fair.bonus
    return Verdict(
        path=first.cummax(1).values,
        num_accepted=torch.ones_like(fair.num_accepted),
        path_tokens=torch.cat([tree.tokens[:, 1:2], second[:, None], fair.path_tokens[:, 2:]], 1),
        bonus=second,
        is_finite=fair.is_finite,
    )


def one_random_number_for_all_nodes(
    tree: DraftTree,
    logits: Tensor,
    batch: Batch,
    history: tuple[Tensor, Tensor] | None,
    *policy: Any,
) -> Verdict:
    """Wrong: a node's depth is forgotten, so both tokens of a step come from one random number."""
    flat = replace(tree.shape, depth=torch.zeros_like(tree.shape.depth))
    return accept(replace(tree, shape=flat), logits, batch, history, *policy)


def favour_the_draft(
    tree: DraftTree,
    logits: Tensor,
    batch: Batch,
    history: tuple[Tensor, Tensor] | None,
    *policy: Any,
) -> Verdict:
    """Wrong, and hardly so: a draft that was refused gets a second chance, with the random number of another place."""
    fair = accept(tree, logits, batch, history, *policy)
    again = accept(tree, logits, replace(batch, root_positions=batch.root_positions + 1000), history, *policy)
    better = again.num_accepted > fair.num_accepted
    parts = (
        torch.where(better if a.ndim == 1 else better[:, None], a, f)
        for a, f in (
            (again.path, fair.path),
            (again.num_accepted, fair.num_accepted),
            (again.path_tokens, fair.path_tokens),
            (again.bonus, fair.bonus),
        )
    )
    path, num_accepted, path_tokens, bonus = parts
    return Verdict(path, num_accepted, path_tokens, bonus, fair.is_finite)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("wrong", [take_the_first_draft, one_random_number_for_all_nodes, favour_the_draft])
def test_a_wrong_rule_is_found_out(
    folder: Path, logits: tuple[Tensor, Tensor], wrong: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above has teeth."""
    run_directly(monkeypatch)
    monkeypatch.setattr("specmamba.verify.step.accept", wrong)
    params = SETTINGS["temperature 1"]
    assert p_value(draw(build(folder, 1), params), exact_pairs(logits, params)) < WRONG


def test_p_value_of_a_fair_and_of_a_loaded_die() -> None:
    """The statistic itself, on numbers with known quantiles: chi-square 11.07 with 5 degrees of freedom is 5 %."""
    pairs = torch.full((1, 6), 1 / 6, dtype=torch.float64)
    fair = Counter({(0, face): 100 for face in range(6)})
    assert p_value(fair, pairs) == 1.0
    shift = (11.0705 * 100 / 2) ** 0.5
    loaded = Counter({(0, face): count for face, count in enumerate([100, 100, 100, 100, 100 + shift, 100 - shift])})
    assert p_value(loaded, pairs) == pytest.approx(0.05, abs=1e-4)
    assert p_value(Counter({(0, 0): 60}), torch.tensor([[0.0, 1.0]], dtype=torch.float64)) == 0.0
