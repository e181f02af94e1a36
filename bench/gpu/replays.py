"""What a replayed step does on the device: its kernels, by name, and the time in which none runs.

The kernels of some steps are recorded by PyTorch's profiler, which slows the host down but not the kernels; so the idle
time is that of a step which was measured without it, less the time of the kernels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from specmamba.measure.full_batch import Job, fill_batch

if TYPE_CHECKING:
    from specmamba import LLM

NUM_STEPS = 8
NUM_LONGEST = 8  # kernels that are named
MAX_NAME = 80  # characters


class Kernel(NamedTuple):
    """One run of a kernel."""

    name: str
    microseconds: float


def profile_replays(llm: LLM, jobs: Sequence[Job], step_ms: float) -> dict[str, Any]:
    """Profile steps in which all jobs decode. ``step_ms``: time of such a step without the profiler.

    Raises:
        ConfigError, RequestError: as ``fill_batch``.
    """
    names = [f"profile-{i}" for i in range(len(jobs))]
    try:
        for name, job in zip(names, jobs, strict=True):
            llm.engine.add_request(name, job.prompt, job.params)
        fill_batch(llm, len(jobs))
        kernels = _record(llm, NUM_STEPS)
    finally:
        for name in names:
            llm.engine.abort(name)
    return summary_of(kernels, NUM_STEPS, step_ms)


def _record(llm: LLM, num_steps: int) -> list[Kernel]:
    """All kernels, copies and fills of some steps."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(num_steps):
            llm.engine.step()
        torch.cuda.synchronize()
    on_device = (event for event in profiler.events() if event.device_type.name == "CUDA")
    return [Kernel(event.name, event.time_range.elapsed_us()) for event in on_device]


def summary_of(kernels: Iterable[Kernel], num_steps: int, step_ms: float) -> dict[str, Any]:
    """Per step: ``kernels_ms``, ``idle_ms``, ``launches``, and the ``longest`` kernels.

    Returns:
        ``longest`` are objects of ``name``, ``launches`` of a step and ``microseconds`` of all of these together.
    """
    by_name: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        by_name[kernel.name].append(kernel.microseconds)
    total_us = {name: sum(times) / num_steps for name, times in by_name.items()}
    kernels_ms = sum(total_us.values()) / 1e3
    longest = sorted(total_us, key=lambda name: -total_us[name])[:NUM_LONGEST]
    return {
        "kernels_ms": kernels_ms,
        "idle_ms": step_ms - kernels_ms,
        "launches": sum(map(len, by_name.values())) / num_steps,
        "longest": [
            {
                "name": name[:MAX_NAME],
                "launches": len(by_name[name]) / num_steps,
                "microseconds": total_us[name],
            }
            for name in longest
        ],
    }
