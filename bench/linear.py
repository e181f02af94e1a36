"""Speed of one linear layer, native against PyTorch's best, at the row counts of decoding, verifying and prefilling.

    python -m specmamba.bench.linear [--shapes 7168x1024 1024x3584] [--rows 1 8 64] [--rounds 9]

Many weights of each shape take turns, so that no cache holds them: what counts is a layer inside a model. Both
contestants take turns within a round; the table has the median over rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

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


def main(arguments: list[str] | None = None) -> int:
    """Print one table per shape; returns the exit status."""
    parser = argparse.ArgumentParser(prog=PROG, description="Speed of one bf16 linear layer, native against PyTorch.")
    parser.add_argument("--shapes", nargs="+", type=_shape, default=[_shape(s) for s in SHAPES], metavar="NxK")
    parser.add_argument("--rows", nargs="+", type=_count, default=list(ROWS), metavar="M")
    parser.add_argument("--rounds", type=_count, default=9)
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    from specmamba.kernels.linear import native_ops

    if native_ops.code() is None:
        print(f"{PROG}: there is no native code to compare with; the log says why", file=sys.stderr)
        return 1
    for n, k in options.shapes:
        _print_table(n, k, measure(n, k, options.rows, options.rounds))
    return 0


def measure(n: int, k: int, rows: Sequence[int], rounds: int) -> list[Measurement]:
    """Products of [M, K] with many weights [N, K], for every M of ``rows``."""
    import torch

    from specmamba.kernels.linear import pack, torch_ops

    weights = [torch.randn(n, k).bfloat16() for _ in range(max(2, round(MIN_WEIGHT_BYTES / (2 * n * k))))]
    native, other = [pack(w) for w in weights], [torch_ops.pack(w) for w in weights]
    results = []
    for m in rows:
        x = torch.randn(m, k).bfloat16()
        other_times, native_times = [], []
        for _ in range(rounds + 1):
            other_times.append(_seconds(other, x))
            native_times.append(_seconds(native, x))
        # the first round warms up
        results.append(Measurement(m, statistics.median(other_times[1:]), statistics.median(native_times[1:])))
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
            f"{m.rows:>6}{m.torch_seconds * 1e6:>11.1f}{seconds * 1e6:>11.1f}{m.torch_seconds / seconds:>8.2f}"
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
