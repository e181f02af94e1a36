"""Tests operators, compares their forms on the very inputs that are timed, and times them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from specmamba.bench.ops.case import TORCH, Candidate, Case, Operator, Place, Run
from specmamba.bench.ops.clock import Clock, Roofline, interleaved, measure_roofline
from specmamba.kernels.gpu import has_triton, is_interpreted
from specmamba.measure.report import progress_bar

MAX_ERROR_TEXT = 160  # characters


@dataclass(frozen=True)
class Effort:
    """How much is run."""

    rounds: int
    repeats: int  # in a round
    is_quick: bool
    is_tiny: bool  # shapes of a few elements, which say nothing about speed
    find_red: Callable[[Sequence[Operator], bool], dict[str, str]]  # runs their tests (with those of Triton, or not)


def place_of(device: torch.device) -> Place:
    """What runs there."""
    return Place(device, has_triton() if device.type == "cuda" else is_interpreted())


@torch.inference_mode()
def measure_operators(operators: Sequence[Operator], place: Place, effort: Effort) -> dict[str, Any]:
    """Test, compare and time.

    Returns:
        ``roofline`` of this machine, and ``operators``: name, ``tests_failed`` (None, or why nothing was timed) and
        ``cases``: name, dtype, bytes, flops, ``roofline_seconds`` and ``results``, one for each candidate.
    """
    reds = effort.find_red(operators, place.has_triton)
    clock = Clock(place.device)
    roofline = measure_roofline(place.device, clock, rounds=1 if effort.is_tiny else 3)
    found = []
    with progress_bar("operators", len(operators)) as advance:
        for operator in operators:
            red = reds.get(operator.name)
            cases = [] if red else operator.chosen(effort.is_quick, effort.is_tiny)
            timed = [_measure(operator, case, place, clock, roofline, effort) for case in cases]
            found.append({"name": operator.name, "tests_failed": red, "cases": timed})
            advance()
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
    """Who can be timed, and a result of each that says so or why not. PyTorch's form decides what is right."""
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
            outputs = tuple(x.clone() for x in run())  # a later run may write where these are views of
        except Exception as error:  # noqa: BLE001 - whatever a package has against it is for the table to say
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
        runs[candidate.name] = run
    return runs, results


def largest_error(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """How far results are off: relative to the largest number of the tensor, or the share of integers that differ.

    What only one of two forms gives is not looked at. NaN counts as infinitely far off.
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
