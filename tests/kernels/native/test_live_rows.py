"""Packed operands whose last rows are padding: native operators leave these out, and only these."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specmamba.kernels import linear, moe, rowwise
from specmamba.kernels.native.live import live_rows

NUM_ROWS, WIDTH = 7, 32
DTYPES = torch.float32, torch.bfloat16
pytestmark = pytest.mark.usefixtures("needs_native")


def weight(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def operators(dtype: torch.dtype) -> dict[str, Callable[[Tensor], Tensor]]:
    """Operators on [1, T, WIDTH], whose rows depend on nothing else."""
    plain, int8 = (linear.pack(weight(24, WIDTH).to(dtype), form) for form in ("plain", "int8"))
    router, experts = moe.pack_router(weight(5, WIDTH)), moe.pack(weight(5, 16, WIDTH).to(dtype))
    norm = weight(WIDTH)

    def route(x: Tensor) -> Tensor:
        x = x[0]
        shares, chosen = router(x).softmax(-1).topk(2)
        ordered, groups = moe.dispatch(x, chosen, 5)
        return moe.combine(experts(ordered, groups), groups, shares)[None]

    return {
        "plain": plain,
        "int8": int8,
        "norm": lambda x: rowwise.rms_norm(x, norm, 1e-6),
        "sum and norm": lambda x: torch.cat(rowwise.add_rms_norm(x, x, norm, 1e-6), -1),
        "norm by head": lambda x: rowwise.rms_norm(x.unflatten(-1, (2, -1)), norm.view(2, -1), 1e-6).flatten(-2),
        "silu": rowwise.silu_mul,
        "experts": route,
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_live", [0, 1, 4, 7])
def test_live_rows_are_those_of_the_whole_operand(num_live: int, dtype: torch.dtype) -> None:
    x, count = torch.randn(1, NUM_ROWS, WIDTH).to(dtype), torch.tensor([num_live])
    for name, run in operators(dtype).items():
        want = run(x)
        broken = x.clone()
        broken[:, num_live:] = torch.nan  # what no row may depend on
        with live_rows(NUM_ROWS, count):
            assert torch.equal(run(broken)[:, :num_live], want[:, :num_live]), name
        assert torch.equal(run(x), want), name


@pytest.mark.parametrize("shape", [(NUM_ROWS, 1, WIDTH), (1, NUM_ROWS - 1, WIDTH)])
def test_other_operands_are_whole(shape: tuple[int, ...]) -> None:
    """Trees side by side may have as many nodes as the packing has rows."""
    x, run = torch.randn(*shape), operators(torch.float32)["plain"]
    want = run(x)
    with live_rows(NUM_ROWS, torch.tensor([0])):
        assert torch.equal(run(x), want)


def test_heads_are_no_rows() -> None:
    x, norm = torch.randn(1, NUM_ROWS, 3, WIDTH), weight(WIDTH)
    want = rowwise.rms_norm(x, norm, 1e-6)
    with live_rows(NUM_ROWS, torch.tensor([NUM_ROWS])):
        assert torch.equal(rowwise.rms_norm(x, norm, 1e-6), want)


def test_scopes_end_and_may_lie_in_each_other() -> None:
    x, run = torch.randn(1, NUM_ROWS, WIDTH), operators(torch.float32)["norm"]
    want = run(x)
    with live_rows(NUM_ROWS, torch.tensor([2])):
        with live_rows(3, torch.tensor([1])):
            assert torch.equal(run(x), want)
        with live_rows(NUM_ROWS, None):
            assert torch.equal(run(x)[:, :2], want[:, :2])
    assert torch.equal(run(x), want)
