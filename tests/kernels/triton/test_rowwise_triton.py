"""Norms, gates and rotations in Triton against the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specmamba.kernels import rowwise
from specmamba.kernels.dispatch import operator_of
from specmamba.kernels.rowwise import reference, torch_ops
from tests.kernels.rounding import tolerance
from tests.kernels.test_rowwise import EPS, TRITON_CASE, Arguments, normal, outputs

pytestmark = pytest.mark.usefixtures("poisoned")

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
# to bfloat16 the interpreter rounds towards zero
TOLERANCE = {dtype: tolerance(dtype, magnitude=0.1) for dtype in (torch.float32, torch.bfloat16, torch.float16)}
# of norms of sums that were rounded before
TWICE = {dtype: tolerance(dtype, roundings=3, magnitude=1.0) for dtype in TOLERANCE}


@pytest.fixture
def triton_ops(gpu_device: str) -> Any:
    from specmamba.kernels.rowwise import triton_ops

    return triton_ops


def on(device: str, arguments: Arguments) -> Arguments:
    return tuple(x.to(device) if isinstance(x, Tensor) else x for x in arguments)


def in_double(arguments: Arguments) -> Arguments:
    return tuple(x.double() if isinstance(x, Tensor) else x for x in arguments)


def check(triton_ops: Any, device: str, name: str, arguments: Arguments, dtype: torch.dtype) -> None:
    """Against the reference in float64, and in shape and dtype against PyTorch."""
    want = outputs(getattr(reference, name)(*in_double(arguments)))
    like = outputs(getattr(torch_ops, name)(*arguments))
    got = outputs(getattr(triton_ops, name)(*on(device, arguments)))
    for x, y, z in zip(got, want, like, strict=True):
        assert (x.shape, x.dtype) == (z.shape, z.dtype)
        allowed = TWICE if name == "add_rms_norm" else TOLERANCE
        torch.testing.assert_close(x.cpu().double(), y, **allowed[dtype if z.dtype == dtype else torch.float32])


@pytest.mark.fast_cases(1)
@DTYPES
@TRITON_CASE
@pytest.mark.parametrize(("lead", "width"), [((1, 1), 2), ((2, 5), 37), ((3, 1), 128)])
def test_matches_reference(
    triton_ops: Any,
    gpu_device: str,
    name: str,
    make: Callable[..., Arguments],
    lead: tuple[int, ...],
    width: int,
    dtype: torch.dtype,
) -> None:
    check(triton_ops, gpu_device, name, make(dtype, lead, width), dtype)


@DTYPES
@pytest.mark.parametrize("shape", [(700,), (3, 700), (2, 2, 700), (2, 1, 3, 2, 20)])
def test_norms_of_whole_tokens(triton_ops: Any, gpu_device: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(
        triton_ops, gpu_device, "rms_norm", (normal(*shape, seed=1, dtype=dtype), normal(shape[-1], seed=2), EPS), dtype
    )


@DTYPES
@pytest.mark.parametrize("shape", [(2, 37), (3, 1, 700)])
def test_sums_of_slices(triton_ops: Any, gpu_device: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """What is normed is the sum as it is kept; tokens of the stream may lie apart."""
    x, added = (normal(*shape[:-1], shape[-1] + 3, seed=seed, dtype=dtype)[..., 1:-2] for seed in (1, 2))
    weight = normal(shape[-1], seed=3)
    check(triton_ops, gpu_device, "add_rms_norm", (x, added, weight, EPS), dtype)
    x, added, weight = on(gpu_device, (x, added, weight))
    total, normed = triton_ops.add_rms_norm(x, added, weight, EPS)
    assert torch.equal(normed, triton_ops.rms_norm(total, weight, EPS))


def test_wide_gates(triton_ops: Any, gpu_device: str) -> None:
    check(triton_ops, gpu_device, "silu_mul", (normal(2, 2, 2 * 1100, seed=1),), torch.float32)
    check(triton_ops, gpu_device, "silu_mul", (normal(3, 2 * 40, seed=1),), torch.float32)


def test_many_channels_around_a_scan(triton_ops: Any, gpu_device: str) -> None:
    raw, x, y = normal(3, 2, 2, 1100, seed=1)
    check(triton_ops, gpu_device, "time_steps", (raw, normal(1100, seed=2), x), torch.float32)
    check(triton_ops, gpu_device, "skip_gate", (y, x, normal(1100, seed=2), raw), torch.float32)


def test_halves_of_angles_may_differ(triton_ops: Any, gpu_device: str) -> None:
    check(triton_ops, gpu_device, "rotate", (normal(2, 3, 2, 9, seed=1), *normal(2, 2, 3, 1, 6, seed=2)), torch.float32)


@TRITON_CASE
@pytest.mark.parametrize("form", ["embedded", "swapped"])
def test_parts_of_a_projection(
    triton_ops: Any, gpu_device: str, name: str, make: Callable[..., Arguments], form: str
) -> None:
    """Slices of wider tokens with NaN beside them, and tensors whose batch and length have changed places."""
    arguments = on(gpu_device, make(torch.float32, (2, 5), 37))
    want = outputs(getattr(triton_ops, name)(*arguments))

    def changed(x: Any) -> Any:
        if not (isinstance(x, Tensor) and x.dim() > 2):
            return x
        if form == "swapped":
            return x.transpose(0, 1).contiguous().transpose(0, 1)
        wide = x.new_full((*x.shape[:2], x[0, 0].numel() + 9), float("nan"))
        wide[..., 4:-5] = x.flatten(2)
        return wide[..., 4:-5].view(x.shape)

    for x, y in zip(outputs(getattr(triton_ops, name)(*map(changed, arguments))), want, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("value", [-1e4, -100.0, -20.0, -3.0, 0.0, 1e-3, 2.0, 19.0, 21.0, 100.0, 1e4])
def test_gates_at_the_ends(triton_ops: Any, gpu_device: str, value: float) -> None:
    mixed, gates, ones = torch.ones(1, 1, 4), torch.full((1, 1, 2), value), torch.ones(2)
    _, _, g, beta = triton_ops.delta_inputs(*on(gpu_device, (mixed, gates, gates, -ones, 0 * ones)), 1, 2)
    want = torch.nn.functional.softplus(gates.double(), threshold=50).float()
    torch.testing.assert_close(-g.cpu(), want, rtol=1e-5, atol=1e-37)
    torch.testing.assert_close(beta.cpu(), gates.double().sigmoid().float(), rtol=1e-5, atol=1e-37)


@pytest.mark.parametrize("value", [-1e4, -100.0, -20.0, -3.0, 0.0, 1e-3, 2.0, 19.0, 21.0, 100.0, 1e4])
def test_decays_by_channel_at_the_ends(triton_ops: Any, gpu_device: str, value: float) -> None:
    """Of rates from 0 to -100, log decays are as far from 0 as a bound allows, or as 1e6; gates close and open."""
    a, rates, bias = torch.full((1, 1, 3, 2), value), torch.tensor([0.0, -1.0, -100.0]), torch.zeros(3, 2)
    given = on(gpu_device, (torch.ones(1, 1, 4), a, a[..., 0], rates, bias))
    wide = rates.double()[:, None]
    for bound in (None, -5.0):
        _, _, g, _ = triton_ops.delta_inputs(*given, 1, 2, 1.0, bound)
        softplus = torch.nn.functional.softplus(a.double(), threshold=50)
        want = wide * softplus if bound is None else bound * (-wide * a.double()).sigmoid()
        torch.testing.assert_close(g.cpu(), want.float(), rtol=1e-5, atol=1e-37)
    x = normal(1, 1, 3, 2, seed=1).to(gpu_device)
    y = triton_ops.gated_rms_norm(x, a.to(gpu_device), torch.ones(2, device=gpu_device), EPS, True)
    want = a.double().sigmoid() * reference.rms_norm(x.cpu().double(), torch.ones(2), EPS)
    torch.testing.assert_close(y.cpu(), want.float(), rtol=1e-5, atol=1e-37)


@pytest.mark.parametrize("value", [-1e4, -100.0, -20.0, -3.0, 0.0, 1e-3, 2.0, 19.0, 21.0, 100.0, 1e4])
def test_around_a_scan_at_the_ends(triton_ops: Any, gpu_device: str, value: float) -> None:
    raw, bias, x = torch.full((1, 1, 3), value), torch.tensor([0.0, 0.5, -0.5]), torch.tensor([[[-2.0, 1.0, 0.5]]])
    steps, weighted = triton_ops.time_steps(*on(gpu_device, (raw, bias, x)))
    want = torch.nn.functional.softplus((raw + bias).double(), threshold=50)
    torch.testing.assert_close(steps.cpu(), want.float(), rtol=1e-5, atol=1e-37)
    torch.testing.assert_close(weighted.cpu(), (want * x).float(), rtol=1e-5, atol=1e-37)
    y = triton_ops.skip_gate(*on(gpu_device, (x, x + 1, bias, raw)))
    want = reference.skip_gate(x.double(), x.double() + 1, bias.double(), raw.double())
    torch.testing.assert_close(y.cpu(), want.float(), rtol=1e-5, atol=1e-37)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("width", [1, 40, 128])
def test_gates_of_heads(triton_ops: Any, gpu_device: str, width: int, dtype: torch.dtype) -> None:
    """Of a slice of projections, with rounding in the same two places as a sigmoid and a product have it."""
    projected = (9 * normal(2, 3, 7 + 5, seed=1)).to(dtype)
    gates, x = projected[..., 7:], normal(2, 3, 5, width, seed=2).to(dtype)
    y = triton_ops.gate_heads(x.to(gpu_device), gates.to(gpu_device))
    assert y.dtype is dtype
    want = x.float() * gates.double().sigmoid().to(dtype).float()[..., None]
    torch.testing.assert_close(y.cpu().float(), want, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    assert triton_ops.gate_heads(x[:, :0].to(gpu_device), gates[:, :0].to(gpu_device)).shape == (2, 0, 5, width)


def test_zero_heads_stay_finite(triton_ops: Any, gpu_device: str) -> None:
    zeros, ones = torch.zeros(1, 1, 4), torch.ones(2)
    given = on(gpu_device, (zeros, zeros[..., :2], zeros[..., :2], ones, ones))
    q, k, _, _ = triton_ops.delta_inputs(*given, 1, 2)
    assert torch.equal(q, torch.zeros_like(q))
    assert torch.equal(k, torch.zeros_like(k))
    y = triton_ops.rms_norm(given[0], torch.ones(4, device=gpu_device), EPS)
    assert torch.equal(y, torch.zeros_like(y))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # of the interpreter: infinity times 0
@TRITON_CASE
def test_what_is_no_number_stays_in_its_token(
    triton_ops: Any, gpu_device: str, name: str, make: Callable[..., Arguments], value: float
) -> None:
    arguments = make(torch.float32, (2, 3), 8)
    want = outputs(getattr(triton_ops, name)(*on(gpu_device, arguments)))
    arguments[0][1, 2].view(-1)[3] = value
    got = outputs(getattr(triton_ops, name)(*on(gpu_device, arguments)))
    right = outputs(getattr(torch_ops, name)(*arguments))
    if name != "time_steps" or value != -torch.inf:  # whose softplus is 0
        assert any(not x.isfinite().all() for x in got)
    for x, y, z in zip(got, want, right, strict=True):
        assert torch.equal(x.isnan().cpu(), z.isnan())
        felt = torch.zeros(2, 3, dtype=torch.bool, device=x.device)
        felt[1, 2] = True
        assert torch.equal(x[~felt], y[~felt])


@TRITON_CASE
def test_empty_batches(triton_ops: Any, gpu_device: str, name: str, make: Callable[..., Arguments]) -> None:
    for x in outputs(getattr(triton_ops, name)(*on(gpu_device, make(torch.float32, (0, 4), 8)))):
        assert x.shape[:2] == (0, 4)


@TRITON_CASE
@pytest.mark.usefixtures("launchable")
def test_triton_is_chosen_where_it_runs(name: str, make: Callable[..., Arguments]) -> None:
    assert operator_of(getattr(rowwise, name)).choose(*make(torch.float32, (1, 2), 8)) == "triton"
