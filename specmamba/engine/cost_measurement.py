"""Measuring the times of steps at the start: a few steps of made-up requests, through the same code as all others."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from specmamba.draft.draft_plan import DraftPlan
from specmamba.draft.sizing.costs import StepCosts, StepTimes
from specmamba.draft.sizing.sizer import Bounds
from specmamba.sampling_params import SamplingParams

if TYPE_CHECKING:
    from specmamba.engine.engine import Engine

SIZES = (1, 2, 4, 8, 16, 32, 64)
WARM_UPS, TIMED = 2, 3  # steps of a kind: the first is run, the second recorded
PROMPT = 4  # tokens


def bounds_of(plan: DraftPlan) -> Bounds:
    """Return what a plan allows, in the sizer's terms."""
    sizes = [plan.topk * (plan.width if depth else 1) for depth in range(plan.num_steps)]
    depths = np.array([depth for depth, size in enumerate(sizes, 1) for _ in range(size)])
    ranks = np.array([i % plan.topk for size in sizes for i in range(size)])
    return Bounds(plan.num_steps, plan.max_nodes, depths, ranks, plan.width)


def measure_costs(engine: Engine) -> StepCosts:
    """Time steps of an idle engine; what they leave is dropped."""
    largest = engine.memory_plan.num_running_requests
    sizes = [size for size in SIZES if size < largest] + [largest]
    sizes = [size for size in sizes if size <= 16]
    times = {}
    number = engine._num_added
    try:
        for size in sizes:
            times[size] = _times_of(engine, size)
    finally:
        engine._num_added = number
        engine._spec_of.clear()
        assert engine.runner.sizer is not None
        engine.runner.sizer.forced = None
        engine.flush_cache()
    return StepCosts(times)


def _times_of(engine: Engine, size: int) -> StepTimes:
    """Time steps of ``size`` requests."""
    sizer = engine.runner.sizer
    assert sizer is not None
    sizer.costs = StepCosts({1: StepTimes({1: 1e-3}, {1: 1e-3})})
    params = SamplingParams(max_tokens=engine.context_length, temperature=0.0, ignore_eos=True)
    names = [f"cost-{i}" for i in range(size)]
    generator = np.random.default_rng(size)
    deepest = sizer.bounds.num_steps
    try:
        for name in names:
            engine.add_request(name, generator.integers(0, engine.vocab_size, PROMPT).tolist(), params)
        sizer.forced = 0, 1
        while len(engine.scheduler.verifying) < size:
            engine.step()
        drafts, verifies = {}, {}
        verifies[size] = _seconds(engine, (0, 1))[1]
        for depth, nodes in {(1, 2), (deepest, 3), (deepest, (1 + deepest)), (deepest, sizer.bounds.max_nodes)}:
            draft, verify = _seconds(engine, (depth, nodes))
            drafts[depth] = min(draft, drafts.get(depth, draft))
            verifies[size * min(nodes, sizer.bounds.max_nodes)] = verify
        for depth in range(1, deepest):
            share = (depth - 1) / max(deepest - 1, 1)
            drafts.setdefault(depth, drafts[1] + share * (drafts[deepest] - drafts[1]))
        return StepTimes(drafts, verifies)
    finally:
        for name in names:
            engine.abort(name)


def _seconds(engine: Engine, forced: tuple[int, int]) -> tuple[float, float]:
    """Median seconds of drafts and of the rest of steps of one kind."""
    runner = engine.runner
    assert runner.sizer is not None
    runner.sizer.forced = forced
    found = []
    for i in range(WARM_UPS + TIMED):
        began = time.perf_counter()
        engine.step()
        took = time.perf_counter() - began
        if i >= WARM_UPS:
            found.append((runner.draft_seconds, took - runner.draft_seconds))
    return tuple(np.median(np.array(found), 0).tolist())
