"""Times of operators, and what the machine could do at best: its copy bandwidth and its matrix products.

On a GPU a repetition is measured by two events, behind a write to a buffer that is larger than the second-level cache,
so that nothing is found there; and behind a pause of some milliseconds in which the CPU launches it, so that what is
measured is the device's time and not the time between launches, which a CUDA graph takes away. (A form of more than
some hundred launches is still being launched when the pause is over.) On a CPU repetitions follow each other, and what
fits its caches is found there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from specmamba.bench.ops.case import Cost, Precision, Run

FLUSH_BYTES = 1 << 28  # five times the second-level cache of the largest GPUs
PAUSE_CYCLES = 5_000_000  # about three milliseconds
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}  # of the source
PRODUCT_SIZE = {"cuda": 4096, "cpu": 512}
MIN_ROUND_S = 2e-3  # on a CPU a round repeats what is shorter


@dataclass(frozen=True)
class Roofline:
    """What this machine reached in this run."""

    copy_gb_per_s: float  # read and written
    tflops: Mapping[str, float]  # of matrix products, by precision

    def seconds(self, cost: Cost) -> float:
        """The least time a case can take: that of its bytes or that of its operations."""
        return max(cost.bytes / (self.copy_gb_per_s * 1e9), cost.flops / (self.tflops[cost.precision] * 1e12))


class Clock:
    """Times functions on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        size = FLUSH_BYTES if device.type == "cuda" else 0
        self._buffer = torch.empty(size, dtype=torch.int8, device=device)

    def seconds(self, run: Run, repeats: int) -> float:
        """Of one repetition: the median of ``repeats`` on a GPU, their mean on a CPU."""
        return self._on_gpu(run, repeats) if self._device.type == "cuda" else self._on_cpu(run, repeats)

    def repeats(self, run: Run, at_least: int) -> int:
        """How many repetitions make a round; also warms up."""
        run()
        if self._device.type == "cuda":
            run()
            torch.cuda.synchronize(self._device)
            return at_least
        return max(at_least, int(MIN_ROUND_S / max(self._on_cpu(run, 1), 1e-7)))

    def _on_gpu(self, run: Run, repeats: int) -> float:
        marks = []
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._buffer.zero_()
            torch.cuda._sleep(PAUSE_CYCLES)
            begin.record()
            run()
            end.record()
            marks.append((begin, end))
        torch.cuda.synchronize(self._device)
        return float(statistics.median(begin.elapsed_time(end) for begin, end in marks)) / 1e3

    def _on_cpu(self, run: Run, repeats: int) -> float:
        began = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - began) / repeats


def interleaved(clock: Clock, runs: Sequence[Run], rounds: int, repeats: int) -> list[float]:
    """Median seconds of each; all take turns within a round, and nobody always has the first."""
    counts = [clock.repeats(run, repeats) for run in runs]
    times: list[list[float]] = [[] for _ in runs]
    for number in range(rounds):
        for turn in range(len(runs)):
            i = (number + turn) % len(runs)
            times[i].append(clock.seconds(runs[i], counts[i]))
    return [statistics.median(of_one) for of_one in times]


def measure_roofline(device: torch.device, clock: Clock, rounds: int = 3) -> Roofline:
    """Copy and multiply once per round, and take the best: it is a bound that is wanted."""
    source = torch.ones(COPY_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    copy = _best(clock, lambda: (target.copy_(source),), rounds)
    tflops = {name: _product_tflops(device, clock, name, rounds) for name in ("float32", "bfloat16")}
    return Roofline(2 * source.nbytes / copy / 1e9, tflops)


def _product_tflops(device: torch.device, clock: Clock, precision: Precision, rounds: int) -> float:
    size = PRODUCT_SIZE[device.type]
    a, b = torch.randn(2, size, size, device=device).to(getattr(torch, precision)).unbind()
    return float(2 * size**3 / _best(clock, lambda: (a @ b,), rounds) / 1e12)


def _best(clock: Clock, run: Run, rounds: int) -> float:
    repeats = clock.repeats(run, 3)
    return min(clock.seconds(run, repeats) for _ in range(rounds))
