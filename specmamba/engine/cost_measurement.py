"""Times of steps for the sizing of drafts: from a file, or measured at the start by a few steps of made-up requests."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from specmamba.cache.memory import MemoryPlan
from specmamba.config import EngineConfig
from specmamba.core import OutputDelta
from specmamba.draft.draft_plan import DraftPlan
from specmamba.draft.sizing.cost_file import FLAG, find_costs, read_costs, write_costs
from specmamba.draft.sizing.costs import Curve, StepCosts, StepTimes
from specmamba.draft.sizing.sizer import Bounds, DraftSizer
from specmamba.engine.runner import Runner
from specmamba.engine.scheduler import Scheduler
from specmamba.errors import ConfigError
from specmamba.kernels import gpu
from specmamba.kernels.native import levels, library
from specmamba.models.base import Models
from specmamba.models.checkpoint import digest_of_checkpoint
from specmamba.sampling_params import SamplingParams

logger = logging.getLogger("specmamba")
SIZES = (1, 4, 16, 64)  # numbers of requests that are measured, and the largest
CACHE_NAME = "step-costs.json"
WARM_UPS, TIMED = 5, 4  # steps of a kind: the first is run, the second recorded
MAX_TIMED_SECONDS = 0.2  # of all steps of a kind: slow steps are timed fewer times
PROMPT = 4  # tokens
GUESSED = {1: StepTimes({1: 2e-4, 2: 3e-4}, {1: 1e-3, 8: 1.5e-3})}  # where memory holds no request to time
UNKNOWN = StepCosts(GUESSED)


class TimedEngine(Protocol):
    """What this module needs of an engine."""

    config: EngineConfig
    device: torch.device
    folder: Path
    models: Models
    draft_plan: DraftPlan
    memory_plan: MemoryPlan
    runner: Runner
    scheduler: Scheduler
    vocab_size: int
    context_length: int
    num_threads: int

    @property
    def num_added(self) -> int:
        """Requests so far."""

    def forget(self, num_added: int) -> None:
        """Drop what later requests left behind."""

    def add_request(self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Queue a request."""

    def abort(self, request_id: str) -> None:
        """Remove a request."""

    def step(self) -> list[OutputDelta]:
        """Run one step."""


def bounds_of(plan: DraftPlan) -> Bounds:
    """Return what a plan allows, in the sizer's terms."""
    sizes = [plan.topk * (plan.width if depth else 1) for depth in range(plan.num_steps)]
    depths = np.array([depth for depth, size in enumerate(sizes, 1) for _ in range(size)])
    ranks = np.array([i % plan.topk for size in sizes for i in range(size)])
    return Bounds(plan.num_steps, plan.max_nodes, depths, ranks, plan.width)


def step_costs(engine: TimedEngine) -> tuple[StepCosts, str]:
    """Read or measure the times of an idle engine's steps; what measuring leaves is dropped.

    Returns:
        The times, and a line for the start-up report.

    Raises:
        ConfigError: ``--speculative-costs`` names a file that cannot be read or written, or holds no times.
    """
    given, key = engine.config.speculative_costs, engine_key(engine)
    path = given if given is not None else _cache_file()
    if path is not None:
        try:
            found = find_costs(read_costs(path), key)
        except ConfigError as error:
            if given is not None:
                raise
            logger.warning("%s; times are measured anew", str(error).removeprefix(f"{FLAG}: "))
            path, found = None, None
        if found is not None:
            return found, f"times of steps: from {path}"
    began = time.perf_counter()
    costs = measure_costs(engine)
    took = f"times of steps: measured in {time.perf_counter() - began:.1f} s"
    if path is None:
        return costs, took
    if given is not None and given.exists():
        took += f" ({given} has none of this model on this machine)"
    try:
        write_costs(path, read_costs(path), key, costs)
    except ConfigError:
        if given is not None:
            raise
        return costs, took
    return costs, f"{took}, kept in {path}"


def engine_key(engine: TimedEngine) -> dict[str, str]:
    """Return what the times of an engine's steps depend on."""
    config, plan, device = engine.config, engine.draft_plan, engine.device
    draft = config.speculative_draft_model_path
    on_gpu = device.type == "cuda"
    values = {
        "model": digest_of_checkpoint(engine.folder),
        "dtype": str(engine.models.target.cache_shape.dtype).removeprefix("torch."),
        "quantization": config.quantization,
        "drafts": f"{plan.algorithm} {plan.num_steps} {plan.topk} {plan.width} {plan.max_nodes}",
        "draft_model": "" if draft is None else f"{draft} {config.speculative_draft_model_quantization}",
        "accept": config.speculative_accept,
        "state": f"{config.speculative_state} {config.mamba_ssm_dtype}",
        "device": torch.cuda.get_device_name(device) if on_gpu else _cpu_name(),
        "kernels": "triton" if gpu.runs_on(device) else _level_name(),
        "threads": str(engine.num_threads),
        "captured": str(engine.runner.graph_runner is not None),
        "requests": str(engine.memory_plan.num_running_requests),
    }
    return {name: str(value) for name, value in values.items()}


def measure_costs(engine: TimedEngine) -> StepCosts:
    """Time steps of an idle engine."""
    sizer = engine.runner.sizer
    assert sizer is not None
    largest = engine.memory_plan.num_running_requests
    number = engine.num_added
    times = {}
    graphs = engine.runner.graph_runner
    try:
        if graphs is not None:
            graphs.is_patient = False
        for size in sorted({*SIZES, largest}):
            if size <= largest and (found := _times_of(engine, sizer, size)) is not None:
                times[size] = found
    finally:
        sizer.forced = None
        if graphs is not None:
            graphs.is_patient = True
        engine.forget(number)
    return StepCosts(times or GUESSED)


def _times_of(engine: TimedEngine, sizer: DraftSizer, size: int) -> StepTimes | None:
    """Time steps of ``size`` requests; None: memory does not hold them."""
    bounds = sizer.bounds
    largest, deepest = bounds.max_nodes, bounds.num_steps
    kinds = [(1, 2), (deepest, min(3, largest)), (deepest, min(1 + deepest, largest)), (deepest, largest)]
    longest = min(deepest, largest - 1)
    if engine.runner.drafter.drafts_chains:
        kinds += [(depth, 0) for depth in sorted({1, longest})]
    drafts: Curve = {}
    verifies: Curve = {}
    chains: Curve = {}
    for depth, nodes in [(0, 1), *dict.fromkeys(kind for kind in kinds if size == 1 or kind[1] != 3)]:
        found = _seconds(engine, sizer, size, (depth, nodes))
        if found is None:
            return None
        draft, rest = found
        if nodes == 0:
            chains[depth] = rest
            continue
        if depth:
            drafts[depth] = min(draft, drafts.get(depth, draft))
        verifies[size * nodes] = min(rest, verifies.get(size * nodes, rest))
    for depth in range(2, deepest):
        drafts[depth] = drafts[1] + (depth - 1) / (deepest - 1) * (drafts[deepest] - drafts[1])
    return StepTimes(dict(sorted(drafts.items())), dict(sorted(verifies.items())), chains)


def _seconds(engine: TimedEngine, sizer: DraftSizer, size: int, forced: tuple[int, int]) -> tuple[float, float] | None:
    """Shortest seconds of drafts and of the rest of steps with so many nodes of every request."""
    names = [f"cost-{i}" for i in range(size)]
    found, spent = [], 0.0
    try:
        if not _start(engine, sizer, names):
            return None
        sizer.forced = forced
        for i in range(WARM_UPS + TIMED):
            began = time.perf_counter()
            engine.step()
            took = time.perf_counter() - began
            if len(engine.scheduler.verifying) < size:  # they have reached the end of the context
                break
            if i >= WARM_UPS:
                found.append((engine.runner.draft_seconds, took - engine.runner.draft_seconds))
                spent += took
            if spent > MAX_TIMED_SECONDS:
                break
    finally:
        for name in names:
            engine.abort(name)
    if not found:
        return None
    return _shortest(draft for draft, _ in found), _shortest(rest for _, rest in found)


def _start(engine: TimedEngine, sizer: DraftSizer, names: Sequence[str]) -> bool:
    """Add made-up requests and run their prompts; False: memory does not hold them all."""
    length = min(PROMPT, engine.context_length - 1)
    params = SamplingParams(max_tokens=engine.context_length, temperature=0.0, ignore_eos=True)
    generator = np.random.default_rng(len(names))
    sizer.forced = 0, 1
    if len(names) > engine.config.max_queued_requests:
        return False
    for name in names:
        engine.add_request(name, generator.integers(0, engine.vocab_size, length).tolist(), params)
    for _ in range(2 * len(names)):
        if len(engine.scheduler.verifying) == len(names):
            return True
        engine.step()
    return False


def _shortest(seconds: Iterable[float]) -> float:
    return max(min(seconds), 1e-9)


def _cache_file() -> Path | None:
    try:
        return library.cache_folder() / CACHE_NAME
    except levels.NativeUnavailableError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf8").splitlines()
    except OSError:
        return platform.processor()
    found = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU part")))
    return next(found, platform.processor())


def _level_name() -> str:
    try:
        return levels.chosen_level().name
    except levels.NativeUnavailableError:
        return "pytorch"
