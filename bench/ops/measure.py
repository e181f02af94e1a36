"""Compares the forms of operators on the very inputs that are timed, times them, and measures the machine's roofline.

On a GPU a repetition is measured by two events. Before it a buffer larger than the second-level cache is written, so
that no operand is found in the cache, and the device pauses for some milliseconds while the CPU launches the work: what
is measured is the device's time without the time between launches, which a CUDA graph takes away. (A form of more than
some hundred launches is still being launched when the pause is over.) On a CPU repetitions follow each other, and
operands that fit its caches are found there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from specmamba.bench.ops.case import TORCH, Candidate, Case, Cost, Operator, Place, Precision, Run
from specmamba.kernels.gpu import has_triton, is_interpreted
from specmamba.measure.command import in_turns
from specmamba.measure.report import progress_bar

FLUSH_BYTES = 1 << 28  # five times the second-level cache of the largest GPUs
PAUSE_CYCLES = 5_000_000  # about three milliseconds
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}  # of the source
PRODUCT_SIZE = {"cuda": 4096, "cpu": 512}
MIN_ROUND_S = 2e-3  # on a CPU a round repeats what is shorter
MAX_ERROR_TEXT = 160  # characters


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
        """Seconds of one repetition: the median of ``repeats`` on a GPU, their mean on a CPU."""
        return self._on_gpu(run, repeats) if self._device.type == "cuda" else self._on_cpu(run, repeats)

    def repeats(self, run: Run, at_least: int) -> int:
        """The number of repetitions in a round; also warms up."""
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
    """Median seconds of each; they take turns within a round, in an order that rotates."""
    counts = [clock.repeats(run, repeats) for run in runs]
    times: list[list[float]] = [[] for _ in runs]
    for number in range(rounds):
        for i in in_turns(range(len(runs)), number):
            times[i].append(clock.seconds(runs[i], counts[i]))
    return [statistics.median(of_one) for of_one in times]


def measure_roofline(device: torch.device, clock: Clock, rounds: int = 3) -> Roofline:
    """Time copies and matrix products; the best of all rounds, because the roofline is a bound."""
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


@dataclass(frozen=True)
class Effort:
    """How much is run, and how operators are tested before."""

    rounds: int
    repeats: int  # in a round
    is_quick: bool
    is_tiny: bool  # shapes of a few elements, which say nothing about speed
    find_red: Callable[
        [Sequence[Operator], bool], dict[str, str]
    ]  # runs the tests (True: Triton's too); failures by operator


def place_of(device: torch.device) -> Place:
    """A device, and whether Triton's kernels run there."""
    return Place(device, has_triton() if device.type == "cuda" else is_interpreted())


@torch.inference_mode()
def measure_operators(operators: Sequence[Operator], place: Place, effort: Effort) -> dict[str, Any]:
    """Test operators, compare their forms and time them.

    Returns:
        ``roofline`` of this machine, and ``operators``: name, ``tests_failed`` (None, or why nothing was timed) and
        ``cases``: name, dtype, bytes, flops, ``roofline_seconds`` and ``results``, one for each candidate.
    """
    reds = effort.find_red(operators, place.has_triton)
    clock = Clock(place.device)
    roofline = measure_roofline(place.device, clock, rounds=1 if effort.is_tiny else 3)
    chosen = [
        (operator, () if operator.name in reds else operator.chosen(effort.is_quick, effort.is_tiny))
        for operator in operators
    ]
    found = []
    with progress_bar("cases of operators", sum(len(cases) for _, cases in chosen)) as advance:
        for operator, cases in chosen:
            timed = []
            for case in cases:
                timed.append(_measure(operator, case, place, clock, roofline, effort))
                advance()
            found.append({"name": operator.name, "tests_failed": reds.get(operator.name), "cases": timed})
    return {"roofline": {"copy_gb_per_s": roofline.copy_gb_per_s, "tflops": dict(roofline.tflops)}, "operators": found}


def _measure(
    operator: Operator, case: Case, place: Place, clock: Clock, roofline: Roofline, effort: Effort
) -> dict[str, Any]:
    cost = operator.cost(case)
    bound = roofline.seconds(cost)
    prepared, results = _prepare(operator, operator.candidates(case, place), place)
    seconds = dict.fromkeys(prepared, 0.0)
    if prepared:
        times = interleaved(clock, list(prepared.values()), effort.rounds, effort.repeats)
        seconds = dict(zip(prepared, times, strict=True))
    for result in results:
        if result["candidate"] in seconds:
            result |= _figures(result["candidate"], seconds, bound, cost.bytes)
    return {
        "name": case.name,
        "dtype": case.dtype,
        "bytes": cost.bytes,
        "flops": cost.flops,
        "roofline_seconds": bound,
        "results": results,
    }


def _figures(name: str, seconds: dict[str, float], bound: float, num_bytes: int) -> dict[str, Any]:
    own = seconds[name]
    return {
        "seconds": own,
        "share_of_roofline": bound / own,
        "gb_per_s": num_bytes / own / 1e9,
        "speed_up_over": {other: theirs / own for other, theirs in seconds.items() if other != name},
    }


def _prepare(
    operator: Operator, candidates: Sequence[Candidate], place: Place
) -> tuple[dict[str, Run], list[dict[str, Any]]]:
    """Run every candidate once and compare it with PyTorch's form.

    Returns:
        The candidates that can be timed, and a result of every candidate, which says why it cannot be.
    """
    runs: dict[str, Run] = {}
    results: list[dict[str, Any]] = []
    expected: tuple[Tensor, ...] | None = None
    for candidate in candidates:
        if candidate.package is not None and (place.device.type == "cpu" or find_spec(candidate.package) is None):
            continue
        result: dict[str, Any] = {"candidate": candidate.name, "note": candidate.note, "failed": None}
        results.append(result)
        try:
            run = candidate.prepare()
            outputs = tuple(x.clone() for x in run())  # a later run may write to the memory of these views
        except Exception as error:  # noqa: BLE001 - any error of a package is shown in the table
            result["failed"] = f"could not run: {type(error).__name__}: {error}"[:MAX_ERROR_TEXT]
            continue
        expected = outputs if candidate.name == TORCH else expected
        assert expected is not None, "PyTorch's form comes first"
        error_size = largest_error(outputs, expected)
        bound = operator.tolerance if candidate.tolerance is None else candidate.tolerance
        result |= {"error": error_size, "tolerance": bound}
        if not error_size <= bound:
            result["failed"] = f"wrong: off by {error_size:.1e}, which may be {bound:.1e}"
            continue
        if candidate.package is None and not _has_same_bits(outputs, candidate.prepare()):
            result["failed"] = "a second run on the same inputs gives other bits"
            continue
        runs[candidate.name] = run
    return runs, results


def _has_same_bits(outputs: Sequence[Tensor], run: Run) -> bool:
    """Whether another run, on fresh copies of the same inputs, has the same outputs; equal NaN count as equal."""
    return all(
        torch.equal(x, y) or torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(outputs, run(), strict=True)
    )


def largest_error(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest error of results, relative to the largest number of a tensor; of integers the share that differs.

    Outputs that only one of two forms has are ignored. NaN counts as an infinite error.
    """
    return max(_error(got, wanted) for got, wanted in zip(outputs, expected, strict=False))


def _error(got: Tensor, wanted: Tensor) -> float:
    if got.shape != wanted.shape:
        return float("inf")
    if not wanted.is_floating_point():
        return float((got != wanted).float().mean())
    difference = (got.float() - wanted.float()).abs().amax()
    error = float(difference / wanted.float().abs().amax().clamp(min=1e-12))
    return error if error == error else float("inf")  # NaN
