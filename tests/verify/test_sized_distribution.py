"""Text is distributed as the target says while the size of drafts is decided in each step: trees are ragged and pruned.

Chi-square tests over the next two tokens, as in ``test_distribution``. Times of steps are made up, so that drafts pay
and what is kept depends on the probabilities of the candidates.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specmamba.draft.heads import children
from specmamba.draft.sizing.costs import StepCosts, StepTimes
from specmamba.engine import cost_measurement
from specmamba.engine.engine import Engine
from specmamba.sampling_params import SamplingParams, SpeculationParams
from tests.verify.test_distribution import (
    FAIR,
    NUM_DRAWS,
    WRONG,
    build,
    draw,
    draw_each,
    exact_pairs,
    folder,
    logits,
    p_value,
)

__all__ = ["folder", "logits"]  # fixtures

COMB: dict[str, Any] = {"speculative_num_steps": 3, "speculative_eagle_topk": 3, "speculative_num_draft_tokens": 6}
LARGEST = 250  # requests of a batch
TEMPERATURE = 1.1


class MadeUpCosts(StepCosts):
    """Costs that no measurement changes: a node takes a tenth of a root's time."""

    def observe(self, *_: Any) -> None:
        """Learn nothing."""


def made_up_costs() -> MadeUpCosts:
    times = {
        size: StepTimes({1: 0.01, 3: 0.03}, {size: 1.0 * size, 2 * size: 1.1 * size, 6 * size: 1.9 * size})
        for size in (1, LARGEST)
    }
    return MadeUpCosts(times)


def build_sized(folder: Path, monkeypatch: pytest.MonkeyPatch, **flags: Any) -> Engine:
    monkeypatch.setattr(cost_measurement, "measure_costs", lambda _: made_up_costs())
    monkeypatch.setattr(cost_measurement, "_cache_file", lambda: None)
    speculation: dict[str, Any] = {"speculative_algorithm": "mtp", "speculative_adaptive": "auto"}
    return build(folder, 0, **speculation, **COMB, **flags)


def params_of(rule: str) -> SamplingParams:
    asked = SpeculationParams(accept=rule)  # type: ignore[arg-type]
    return SamplingParams(max_tokens=3, temperature=TEMPERATURE, top_p=0.95, ignore_eos=True, speculative=asked)


def assert_ragged(engine: Engine) -> None:
    """Nodes were kept and others were left out: the sizes of trees had something to say."""
    sizer = engine.runner.sizer
    assert sizer is not None
    figures = sizer.figures
    per_request = figures.num_nodes / figures.num_requests
    assert 1.2 < per_request < 5.8
    accepted = engine.stats().spec.accepted_histogram
    assert min(accepted[0], sum(accepted[1:])) > NUM_DRAWS // 20


@pytest.mark.fast_cases("captured-rejection")
@pytest.mark.parametrize("rule", ["target", "rejection"])
@pytest.mark.parametrize("is_captured", [True, False], ids=["captured", "direct"])
def test_pruned_trees_leave_the_distribution_alone(
    folder: Path, logits: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch, rule: str, is_captured: bool
) -> None:
    graphs = {"cuda_graph_max_bs": LARGEST} if is_captured else {"disable_cuda_graph": True}
    engine, params = build_sized(folder, monkeypatch, **graphs), params_of(rule)
    assert p_value(draw(engine, params), exact_pairs(logits, params)) > FAIR
    assert_ragged(engine)


@pytest.mark.slow
def test_requests_of_both_rules_in_one_batch(
    folder: Path, logits: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build_sized(folder, monkeypatch, cuda_graph_max_bs=LARGEST)
    ways = [params_of("target"), params_of("rejection")]
    for found in draw_each(engine, *ways):
        assert p_value(found, exact_pairs(logits, ways[0])) > FAIR
    assert_ragged(engine)


def test_pruning_by_drawn_tokens_is_found_out(
    folder: Path, logits: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keeping the likeliest of the drawn tokens, as is right for chosen ones, biases the text."""
    real = children.ChildPicker.pick

    def pick(picker: children.ChildPicker, *args: Any) -> children.Children:
        picked = real(picker, *args)
        return replace(picked, place_logp=picked.token_logp)

    monkeypatch.setattr(children.ChildPicker, "pick", pick)
    engine, params = build_sized(folder, monkeypatch, disable_cuda_graph=True), params_of("rejection")
    assert p_value(draw(engine, params), exact_pairs(logits, params)) < WRONG


def test_choosing_all_nodes_after_the_draw_is_found_out(
    folder: Path, logits: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a node is verified may not depend on its token: here only rows whose first draft is token 0 to 11 are."""
    engine, params = build_sized(folder, monkeypatch, disable_cuda_graph=True), params_of("rejection")
    sizer = engine.runner.sizer
    assert sizer is not None
    real = sizer.choose

    def choose(candidates: Any, padded_size: int) -> Any:
        is_low = candidates.tokens[:, :1] < 12
        hidden = candidates.logp.masked_fill(~is_low, -torch.inf)
        return real(replace(candidates, logp=hidden), padded_size)

    monkeypatch.setattr(sizer, "choose", choose)
    assert p_value(draw(engine, params), exact_pairs(logits, params)) < WRONG
