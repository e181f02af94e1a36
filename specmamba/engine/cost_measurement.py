"""Times of steps for the sizing of drafts: from a file, or measured at the start by a few steps of made-up requests."""

from __future__ import annotations

import logging
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from specmamba.cache.memory import MemoryPlan
from specmamba.checkpoints.checkpoint import digest_of_checkpoint
from specmamba.config import EngineConfig
from specmamba.core import OutputDelta
from specmamba.draft.draft_plan import DraftPlan
from specmamba.draft.sizing.cost_file import FLAG, find_costs, read_costs, write_costs
from specmamba.draft.sizing.costs import Curve, StepCosts, StepTimes
from specmamba.draft.sizing.rounds import Bounds, WarmUp
from specmamba.draft.sizing.sizer import DraftSizer, chain_depths
from specmamba.engine.runner import Runner
from specmamba.engine.scheduler import Scheduler
from specmamba.errors import ConfigError
from specmamba.kernels import gpu
from specmamba.kernels.native import levels, library
from specmamba.models.base import Models
from specmamba.sampling_params import SamplingParams

logger = logging.getLogger("specmamba")
SIZES = (1, 4, 16, 64)  # numbers of requests that are measured, and the largest
CACHE_NAME = "step-costs-6.json"  # with another number where times are measured in another way
ROUNDS, TIMED, MAX_STEPS = 3, 3, 200  # all kinds take turns; timed steps of a kind in a turn, and all its steps
MAX_TIMED_SECONDS = 0.015  # of all steps of a kind, after which it takes no other turn
MAX_TURN_SECONDS = 0.06  # of the timed steps of a turn: slow steps are timed fewer times
PLAIN = 0, 1
PROMPT, LONG_PROMPT = 4, 512  # tokens
KEYED_REQUESTS, KEY_ROUNDS = 4, 3  # requests behind long prompts, and turns of short and long ones
SLOW_STEP = 0.02  # seconds of a plain step from which on a long prompt, or every chain, would take long
LEAST_SECONDS = 1e-9
OUTDATED = 0.75  # a plain step that takes less of its kept time: the machine was busy when times were measured
Kind = tuple[int, int]
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
        if found is not None and (given is not None or not _is_outdated(engine, found)):
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
        "quantization": f"{config.quantization} {config.quantization_group_size}",
        "drafts": f"{plan.algorithm} {plan.num_steps} {plan.topk} {plan.width} {plan.max_nodes}",
        "draft_model": f"{draft or ''} {config.speculative_draft_model_quantization}",
        "accept": config.speculative_accept,
        "state": f"{config.speculative_state} {config.mamba_ssm_dtype}",
        **({} if config.kv_cache_dtype == "auto" else {"kv": config.kv_cache_dtype}),
        **({"arithmetic": "exact"} if config.deterministic else {}),
        "device": torch.cuda.get_device_name(device) if on_gpu else _cpu_name(),
        "kernels": " -".join(("triton", *gpu.choice().off)) if gpu.runs_on(device) else _level_name(),
        "threads": str(engine.num_threads),
        **({} if config.tp_size == 1 else {"ranks": str(config.tp_size)}),
        "captured": str(engine.runner.graph_runner is not None),
        "requests": str(engine.memory_plan.num_running_requests),
    }
    return {name: str(value) for name, value in values.items()}


def _is_outdated(engine: TimedEngine, kept: StepCosts) -> bool:
    """Whether plain steps of one request are now far faster than what is kept says.

    Other work slows some kinds of steps down more than others, so times of a busy machine are wrong in their ratios
    too. A machine that is busy now says nothing about them.
    """
    sizer, number = engine.runner.sizer, engine.num_added
    assert sizer is not None
    before = kept.times[1].verifies.get(1) if 1 in kept.times else None
    if before is None:
        return False
    try:
        found = _seconds(engine, sizer, 1, [PLAIN], PROMPT)
    finally:
        sizer.forced = None
        engine.forget(number)
    return found is not None and found[PLAIN] < OUTDATED * before


def measure_costs(engine: TimedEngine) -> StepCosts:
    """Time steps of an idle engine."""
    sizer = engine.runner.sizer
    assert sizer is not None
    largest = engine.memory_plan.num_running_requests
    number = engine.num_added
    kinds = _kinds(engine, sizer.bounds)
    times: dict[int, StepTimes] = {}
    of_key: tuple[Curve, Curve] = {}, {}
    try:
        for size in sorted({*SIZES, largest}):
            if size <= largest and (found := _seconds(engine, sizer, size, kinds, PROMPT)) is not None:
                times[size] = _separated(found, size, sizer.bounds)
                if size == min(KEYED_REQUESTS, largest):
                    of_key = _seconds_of_key(engine, sizer, size, found)
                if found[PLAIN] > SLOW_STEP:
                    kinds = _ends(kinds)
    finally:
        sizer.forced = None
        engine.forget(number)
    return StepCosts(times or GUESSED, *of_key)


def _kinds(engine: TimedEngine, bounds: Bounds) -> list[Kind]:
    """The kinds of steps that are timed, with any number of requests."""
    largest, deepest = bounds.max_nodes, bounds.num_steps
    longest = min(deepest, largest - 1)
    kinds = [PLAIN, (1, 2), (deepest, 2), (deepest, 1 + longest), (deepest, largest)]
    if engine.runner.drafter.drafts_chains:
        kinds += [(depth, 0) for depth in chain_depths(longest)]
    return [*dict.fromkeys(kinds)]


def _ends(kinds: list[Kind]) -> list[Kind]:
    """Without chains between the shortest and the longest: times between them are interpolated."""
    chains = [kind for kind in kinds if kind[1] == 0]
    return [kind for kind in kinds if kind not in chains[1:-1]]


def _separated(found: dict[Kind, float], size: int, bounds: Bounds) -> StepTimes:
    """Part the times of whole steps into drafts and verifies; only their sums are known of steps that draft.

    A second node of every request is taken to cost what each of the next ones does.
    """
    deepest, longest = bounds.num_steps, min(bounds.num_steps, bounds.max_nodes - 1)
    plain, second, chain = found[PLAIN], found[deepest, 2], found[deepest, 1 + longest]
    of_second = min(max((chain - second) / max(longest - 1, 1), 0.0), max(found[1, 2] - plain, 0.0))
    drafts = {depth: max(found[depth, 2] - plain - of_second, LEAST_SECONDS) for depth in sorted({1, deepest})}
    for depth in range(2, deepest):
        drafts[depth] = drafts[1] + (depth - 1) / (deepest - 1) * (drafts[deepest] - drafts[1])
    verifies = {size: plain, 2 * size: plain + of_second}
    for depth, nodes in found:
        if depth == deepest and nodes > 2:
            verifies[nodes * size] = max(found[depth, nodes] - drafts[deepest], plain)
    chains = {depth: seconds for (depth, nodes), seconds in found.items() if nodes == 0}
    return StepTimes(dict(sorted(drafts.items())), verifies, chains)


def _seconds_of_key(engine: TimedEngine, sizer: DraftSizer, size: int, near: dict[Kind, float]) -> tuple[Curve, Curve]:
    """Time steps behind longer prompts; empty where that would take long, or memory is too small.

    Long and short prompts take turns, since the machine's speed changes by more than what is looked for.

    Args:
        engine: is idle.
        sizer: of the engine.
        size: requests.
        near: seconds behind a short prompt, by kind.

    Returns:
        Seconds of a key by nodes: of chosen trees, and of chains.
    """
    length = min(LONG_PROMPT, engine.context_length // 2)
    largest, deepest = sizer.bounds.max_nodes, sizer.bounds.num_steps
    longest = min(deepest, largest - 1)
    kinds = [PLAIN, (deepest, largest)] + [(longest, 0)] * engine.runner.drafter.drafts_chains
    if near[PLAIN] > SLOW_STEP or length <= 2 * PROMPT:
        return {}, {}
    ratios: dict[Kind, list[float]] = {kind: [] for kind in kinds}
    for _ in range(KEY_ROUNDS):
        short, long = (_seconds(engine, sizer, size, kinds, prompt, rounds=1) for prompt in (PROMPT, length))
        if short is None or long is None:
            return {}, {}
        for kind in kinds:
            ratios[kind].append(long[kind] / short[kind])
    num_keys = size * (length - PROMPT)
    found = {kind: max(statistics.median(ratios[kind]) - 1.0, 0.0) * near[kind] / num_keys for kind in kinds}
    of_chains = {1: found[PLAIN], longest + 1: found[longest, 0]} if (longest, 0) in found else {}
    return {1: found[PLAIN], largest: found[deepest, largest]}, of_chains


def _seconds(
    engine: TimedEngine, sizer: DraftSizer, size: int, kinds: Sequence[Kind], prompt: int, rounds: int = ROUNDS
) -> dict[Kind, float] | None:
    """Typical seconds of steps of each kind, which take turns; None: memory does not hold so many requests.

    Args:
        engine: is idle.
        sizer: of the engine.
        size: requests.
        kinds: depth of a draft, and nodes of every request; 0 nodes: chains.
        prompt: tokens of a request.
        rounds: turns of all kinds.
    """
    names = [f"cost-{i}" for i in range(size)]
    turns: list[dict[Kind, float]] = []
    took = dict.fromkeys(kinds, 0.0)
    try:
        if not _start(engine, sizer, names, prompt):
            return None
        for _ in range(rounds):
            found: dict[Kind, float] = {}
            turns.append(found)
            for kind in kinds:
                if took[kind] > MAX_TIMED_SECONDS:
                    continue
                timed = _turn(engine, sizer, size, kind)
                if timed is None:  # they have reached the end of the context
                    return _typical(kinds, turns)
                if timed:
                    found[kind] = sorted(timed)[len(timed) // 4]  # other work on the machine only adds to a time
                    took[kind] += sum(timed)
    finally:
        for name in names:
            engine.abort(name)
    return _typical(kinds, turns)


def _turn(engine: TimedEngine, sizer: DraftSizer, size: int, kind: Kind) -> list[float] | None:
    """Seconds of a few steps of a kind, warm ones; None: a request has ended."""
    timed: list[float] = []
    sizer.forced, warm_up = kind, WarmUp()
    for _ in range(MAX_STEPS):
        if len(timed) == TIMED or sum(timed) > MAX_TURN_SECONDS:
            break
        engine.step()
        if len(engine.scheduler.verifying) < size:
            return None
        if sizer.last_seconds is not None and warm_up.is_over(sizer.last_seconds):
            timed.append(sizer.last_seconds)
    return timed


def _typical(kinds: Sequence[Kind], rounds: Sequence[dict[Kind, float]]) -> dict[Kind, float] | None:
    """The least time of a plain step, and those of other kinds by their ratios to it: medians of those in a round.

    The machine may be slower in one round than in another, so that only times of one round have the right ratio.
    """
    if not all(any(kind in found for found in rounds) for kind in kinds):
        return None
    plain = max(min(found[PLAIN] for found in rounds if PLAIN in found), LEAST_SECONDS)
    seconds = {}
    for kind in kinds:
        ratios = [found[kind] / found[PLAIN] for found in rounds if kind in found and PLAIN in found]
        alone = min(found[kind] for found in rounds if kind in found)
        seconds[kind] = max(plain * statistics.median(ratios) if ratios else alone, LEAST_SECONDS)
    return seconds


def _start(engine: TimedEngine, sizer: DraftSizer, names: Sequence[str], prompt: int) -> bool:
    """Add made-up requests and run their prompts; False: memory does not hold them all."""
    length = min(prompt, engine.context_length - 1)
    params = SamplingParams(max_tokens=engine.context_length, temperature=0.0, ignore_eos=True)
    generator = np.random.default_rng(len(names))
    sizer.forced = 0, 1
    if len(names) > engine.config.max_queued_requests:
        return False
    for name in names:
        engine.add_request(name, generator.integers(0, engine.vocab_size, length).tolist(), params)
    for _ in range(2 * len(names) + length):
        if len(engine.scheduler.verifying) == len(names):
            return True
        engine.step()
    return False


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
