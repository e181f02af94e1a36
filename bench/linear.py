"""Speed of one linear layer, native against PyTorch's best, at the row counts of decoding, verifying and prefilling.

    python -m specmamba.bench.linear [--shapes 7168x1024 1024x3584] [--rows 1 8 64] [--rounds 9]

Many weights of each shape take turns, so that no cache holds them: what counts is a layer inside a model. Both
contestants take turns within a round. The table has medians over rounds, and "ratio" is the median of each round's own
ratio, torch over native: what slows the machine down for a while slows both down.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specmamba.bench.report import machine, versions

if TYPE_CHECKING:  # --help must not wait for torch
    from torch import Tensor

    from specmamba.kernels.linear import PackedWeight

PROG = "python -m specmamba.bench.linear"
SHAPES = ("7168x1024", "1024x3584", "1024x2048")  # Qwen3.5-0.8B: MLP up and down, output projections
ROWS = (1, 2, 4, 8, 16, 32, 64, 256)
MIN_WEIGHT_BYTES = 200e6  # of all weights of a shape together: several times what caches hold


@dataclass(frozen=True)
class Measurement:
    """Seconds of one product, medians over rounds."""

    rows: int
    torch_seconds: float
    native_seconds: float
    ratio: float  # of torch's to the native one, within each round


def main(arguments: list[str] | None = None) -> int:
    """Print one table per shape; returns the exit status: 1 without native code, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog=PROG, description="Speed of one bf16 linear layer, native against PyTorch.")
    parser.add_argument("--shapes", nargs="+", type=_shape, default=[_shape(s) for s in SHAPES], metavar="NxK")
    parser.add_argument("--rows", nargs="+", type=_count, default=list(ROWS), metavar="M")
    parser.add_argument("--rounds", type=_count, default=9)
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    try:
        return _compare(options.shapes, options.rows, options.rounds)
    except KeyboardInterrupt:
        return 130


def _compare(shapes: Sequence[tuple[int, int]], rows: Sequence[int], rounds: int) -> int:
    import torch

    from specmamba.kernels.linear import native_ops

    if native_ops.code() is None:
        print(f"{PROG}: there is no native code to compare with; the log says why", file=sys.stderr)
        return 1
    names = ", ".join(f"{name} {version}" for name, version in versions(("specmamba", "torch")).items())
    print(f"{machine()}; threads: {torch.get_num_threads()}; {names}; medians of {rounds} rounds")
    for n, k in shapes:
        _print_table(n, k, measure(n, k, rows, rounds))
    return 0


def contestants(n: int, k: int) -> tuple[list[PackedWeight], list[PackedWeight]]:
    """The same random weights [N, K] in bf16, native and PyTorch's: as many as no cache holds."""
    import torch

    from specmamba.kernels.linear import pack, torch_ops

    weights = [torch.randn(n, k).bfloat16() for _ in range(max(2, round(MIN_WEIGHT_BYTES / (2 * n * k))))]
    return [pack(w) for w in weights], [torch_ops.pack(w) for w in weights]


def measure(n: int, k: int, rows: Sequence[int], rounds: int) -> list[Measurement]:
    """Products of [M, K] with many weights [N, K], for every M of ``rows``."""
    import torch

    native, other = contestants(n, k)
    results = []
    for m in rows:
        x = torch.randn(m, k).bfloat16()
        pairs = [(_seconds(other, x), _seconds(native, x)) for _ in range(rounds + 1)][1:]  # the first one warms up
        other_median, native_median = (statistics.median(times) for times in zip(*pairs, strict=True))
        ratio = statistics.median(of_torch / of_native for of_torch, of_native in pairs)
        results.append(Measurement(m, other_median, native_median, ratio))
    return results


def _seconds(products: Sequence[PackedWeight], x: Tensor) -> float:
    """Mean time of one product."""
    began = time.perf_counter()
    for product in products:
        product(x)
    return (time.perf_counter() - began) / len(products)


def _print_table(n: int, k: int, measurements: Sequence[Measurement]) -> None:
    print(
        f"\nweight [{n}, {k}] bf16\n{'rows':>6}{'torch us':>11}{'native us':>11}{'ratio':>8}{'GB/s':>8}{'GFLOP/s':>10}"
    )
    for m in measurements:
        seconds = m.native_seconds
        print(
            f"{m.rows:>6}{m.torch_seconds * 1e6:>11.1f}{seconds * 1e6:>11.1f}{m.ratio:>8.2f}"
            f"{2 * n * k / seconds / 1e9:>8.1f}{2 * m.rows * n * k / seconds / 1e9:>10.1f}"
        )


def _shape(text: str) -> tuple[int, int]:
    n, _, k = text.partition("x")
    return _count(n), _count(k)


def _count(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
