"""Sizes of drafts that are decided at random, for tests of texts that no decision may change."""

from __future__ import annotations

import numpy as np
import pytest

from specmamba import LLM
from specmamba.draft.sizing.costs import StepCosts, StepTimes
from specmamba.draft.sizing.rounds import DraftSize, SizedBatch
from specmamba.engine import cost_measurement


def without_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines start with made-up times of steps."""
    times = {size: StepTimes({1: 1e-4, 4: 2e-4}, {size: 1e-3, 8 * size: 2e-3}) for size in (1, 16)}
    monkeypatch.setattr(cost_measurement, "measure_costs", lambda _: StepCosts(times))
    monkeypatch.setattr(cost_measurement, "_cache_file", lambda: None)


def decide_at_random(llm: LLM, seed: int) -> None:
    """Draw depth, chains or chosen trees, requests that are drafted for, nodes of every tree, and steps of a round."""
    sizer = llm.engine.runner.sizer
    assert sizer is not None
    rng = np.random.default_rng(seed)

    def planned(batch: SizedBatch) -> tuple[DraftSize, int]:
        sizer._predict(batch)
        shape = sizer.times.trees.shape
        sizer.times.trees = 1 + np.cumsum(rng.random(shape) * rng.choice([0.05, 0.5]), axis=1)
        depth, drafted = int(rng.integers(0, sizer.bounds.num_steps + 1)), rng.random(len(batch.rows)) < 0.7
        number = int(rng.integers(1, 4))
        if depth == 0 or not drafted.any():
            return DraftSize(0), number
        if llm.engine.runner.drafter.drafts_chains and rng.random() < 0.3:
            return DraftSize(depth, is_chain=True), number
        return DraftSize(depth, drafted=None if drafted.all() else drafted), number

    sizer._planned = planned  # type: ignore[method-assign]
