"""Speed of one linear layer, native against PyTorch's best, at the row counts of decoding, verifying and prefilling.

    python -m specmamba.bench.linear [--shapes 7168x1024 1024x3584] [--rows 1 8 64] [--rounds 9]
                                     [--form plain|int8|int4-g32|...] [--against torch|bf16]

Many weights of each shape take turns, so that no cache holds them, as in a layer inside a model. Both products take
turns within a round. The table has medians over rounds; "ratio" is the median of the ratio within each round, the other
product over the native one, because a slow minute of the machine affects both.

``--form int8`` measures the native product with int8 weights, against PyTorch's own, and forms with codes in groups
against PyTorch's with bf16 weights; with ``--against bf16``, against the native one with the bf16 weights that they
were rounded from.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from specmamba.measure.command import versions_text
from specmamba.measure.report import machine, versions

if TYPE_CHECKING:  # --help must not wait for torch
    from torch import Tensor

    from specmamba.kernels.linear import PackedWeight, WeightForm

PROG = "python -m specmamba.bench.linear"
SHAPES = ("7168x1024", "1024x3584", "1024x2048")  # Qwen3.5-0.8B: MLP up and down, output projections
ROWS = (1, 2, 4, 8, 16, 32, 64, 256)
MIN_WEIGHT_BYTES = 200e6  # of all weights of a shape together: several times the size of caches
# Of a weight, its share of scales included.
BYTES = {"plain": 2, "int8": 1, "int4-g32": 0.5625, "int4-g64": 0.53125, "int4-g128": 0.515625, "fp8": 1.015625}

Opponent = Literal["torch", "bf16"]  # PyTorch's product of the same form; the native one with bf16 weights


@dataclass(frozen=True)
class Measurement:
    """Seconds of one product, medians over rounds."""

    rows: int
    other_seconds: float
    native_seconds: float
    ratio: float  # of the other's to the native one, within each round


def main(arguments: list[str] | None = None) -> int:
    """Print one table per shape; returns the exit status: 1 without native code, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog=PROG, description="Speed of one linear layer, native against PyTorch.")
    parser.add_argument("--shapes", nargs="+", type=_shape, default=[_shape(s) for s in SHAPES], metavar="NxK")
    parser.add_argument("--rows", nargs="+", type=_count, default=list(ROWS), metavar="M")
    parser.add_argument("--rounds", type=_count, default=9)
    parser.add_argument("--form", choices=list(BYTES), default="plain", help="of the native weights; plain is bf16")
    parser.add_argument("--against", choices=get_args(Opponent), default="torch")
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    if (options.form, options.against) == ("plain", "bf16"):
        parser.error("--against bf16 compares native bf16 with itself: it needs --form int8")
    try:
        return _compare(options)
    except KeyboardInterrupt:
        return 130


def _compare(options: argparse.Namespace) -> int:
    import torch

    from specmamba.kernels.linear import native_ops

    if native_ops.code() is None:
        print(f"{PROG}: there is no native code to compare with: {_why_not_native()}", file=sys.stderr)
        return 1
    names = versions_text({"versions": versions(("specmamba", "torch"))})
    print(f"{machine()}; threads: {torch.get_num_threads()}; {names}; medians of {options.rounds} rounds")
    for n, k in options.shapes:
        _print_table(n, k, measure(n, k, options.rows, options.rounds, options.form, options.against), options)
    return 0


def _why_not_native() -> str:
    from specmamba.kernels.linear import native_ops
    from specmamba.kernels.native import library
    from specmamba.kernels.native.levels import NativeUnavailableError

    try:
        library.open_library(native_ops.SOURCE)
    except NativeUnavailableError as reason:
        return str(reason)
    return "it loads, but not for this product"


def contestants(
    n: int, k: int, form: WeightForm = "plain", against: Opponent = "torch"
) -> tuple[list[PackedWeight], list[PackedWeight]]:
    """The same random weights [N, K], packed for the native product and for the other; too many for any cache."""
    import torch

    from specmamba.kernels.linear import pack, torch_ops

    def other(weight: Tensor) -> PackedWeight:
        if against == "bf16":
            return pack(weight)
        return torch_ops.Int8Weight(weight) if form == "int8" else torch_ops.pack(weight)

    weights = [torch.randn(n, k).bfloat16() for _ in range(max(2, round(MIN_WEIGHT_BYTES / (BYTES[form] * n * k))))]
    return [pack(w, form) for w in weights], [other(w) for w in weights]


def measure(
    n: int, k: int, rows: Sequence[int], rounds: int, form: WeightForm = "plain", against: Opponent = "torch"
) -> Iterator[Measurement]:
    """Time products of [M, K] with many weights [N, K]; yields the times for each M of ``rows`` when it has them."""
    import torch

    native, other = contestants(n, k, form, against)
    for m in rows:
        x = torch.randn(m, k).bfloat16()
        pairs = [(_seconds(other, x), _seconds(native, x)) for _ in range(rounds + 1)][1:]  # the first one warms up
        other_median, native_median = (statistics.median(times) for times in zip(*pairs, strict=True))
        ratio = statistics.median(of_other / of_native for of_other, of_native in pairs)
        yield Measurement(m, other_median, native_median, ratio)


def _seconds(products: Sequence[PackedWeight], x: Tensor) -> float:
    """Mean time of one product."""
    began = time.perf_counter()
    for product in products:
        product(x)
    return (time.perf_counter() - began) / len(products)


def _print_table(n: int, k: int, measurements: Iterable[Measurement], options: argparse.Namespace) -> None:
    """Print the head before anything is measured, and each line as soon as it is known."""
    form, against = options.form, options.against
    print(f"\nweight [{n}, {k}] {'bf16' if form == 'plain' else form}")
    print(f"{'rows':>6}{against + ' us':>11}{'native us':>11}{'ratio':>8}{'GB/s':>8}{'GFLOP/s':>10}", flush=True)
    for m in measurements:
        seconds = m.native_seconds
        print(
            f"{m.rows:>6}{m.other_seconds * 1e6:>11.1f}{seconds * 1e6:>11.1f}{m.ratio:>8.2f}"
            f"{BYTES[form] * n * k / seconds / 1e9:>8.1f}{2 * m.rows * n * k / seconds / 1e9:>10.1f}",
            flush=True,
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
