"""Norms, gates and rotations: PyTorch and native code against the reference."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from specmamba.kernels import rowwise
from specmamba.kernels.dispatch import operator_of
from specmamba.kernels.rowwise import native_ops, reference, torch_ops
from tests.kernels.rounding import tolerance
from tests.pairwise import pairwise

EPS = 1e-5
Arguments = tuple[Any, ...]


@pytest.fixture(params=["torch_ops", "native_ops"])
def ops(request: pytest.FixtureRequest) -> ModuleType:
    if request.param == "torch_ops":
        return torch_ops
    request.getfixturevalue("needs_native")
    return native_ops


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def norm_arguments(dtype: torch.dtype, lead: tuple[int, ...], width: int) -> Arguments:
    return normal(*lead, 3, width, seed=1, dtype=dtype), normal(width, seed=2), EPS


def head_norm_arguments(dtype: torch.dtype, lead: tuple[int, ...], width: int) -> Arguments:
    return normal(*lead, 3, width, seed=1, dtype=dtype), normal(3, width, seed=2), EPS


def added_arguments(dtype: torch.dtype, lead: tuple[int, ...], width: int) -> Arguments:
    x, added = (normal(*lead, 3, width, seed=seed, dtype=dtype) for seed in (1, 2))
    return x, added, normal(width, seed=3), EPS


def gated_arguments(dtype: torch.dtype, lead: tuple[int, ...], width: int) -> Arguments:
    shape = (*lead, 3, width)
    return normal(*shape, seed=1), normal(*shape, seed=2, dtype=dtype), normal(width, seed=3), EPS


def sigmoid_gated_arguments(dtype: torch.dtype, lead: tuple[int, ...], width: int) -> Arguments:
    return *gated_arguments(dtype, lead, width), True


def silu_arguments(dtype: torch.dtype, lead: tuple[int, ...], width: int) -> Arguments:
    return (normal(*lead, 2 * width, seed=1, dtype=dtype),)


def single_arguments(dtype: torch.dtype, lead: tuple[int, ...], width: int) -> Arguments:
    return (normal(*lead, width, seed=1, dtype=dtype) * 3,)


def clamped_arguments(dtype: torch.dtype, lead: tuple[int, ...], width: int) -> Arguments:
    return *silu_arguments(dtype, lead, width), 0.4


def rotate_arguments(dtype: torch.dtype, lead: tuple[int, ...], width: int) -> Arguments:
    angles = normal(*lead, 1, width // 2 * 2, seed=2)
    return normal(*lead, 3, width + 5, seed=1, dtype=dtype), angles.cos().to(dtype), angles.sin().to(dtype)


def delta_arguments(dtype: torch.dtype, lead: tuple[int, ...], width: int) -> Arguments:
    a, b = (normal(*lead, 6, seed=seed, dtype=dtype) * 4 for seed in (2, 3))
    mixed = normal(*lead, 2 * 3 * width + 12, seed=1)
    return mixed, a, b, -normal(6, seed=4).exp(), normal(6, seed=5), 3, width, 1.75


def channel_arguments(dtype: torch.dtype, lead: tuple[int, ...], width: int, bound: float | None = None) -> Arguments:
    """More value heads than the blocks of queries and keys are many."""
    mixed, _, _, _, _, *rest = delta_arguments(dtype, lead, width)
    a, b = normal(*lead, 20, width, seed=2, dtype=dtype) * 4, normal(*lead, 20, seed=3, dtype=dtype) * 4
    return mixed, a, b, -normal(20, seed=4).exp(), normal(20, width, seed=5), *rest, bound


def bounded_arguments(dtype: torch.dtype, lead: tuple[int, ...], width: int) -> Arguments:
    return channel_arguments(dtype, lead, width, bound=-5.0)


def step_arguments(dtype: torch.dtype, lead: tuple[int, ...], width: int) -> Arguments:
    raw = normal(*lead, width, seed=1, dtype=dtype) * 6
    return raw, normal(width, seed=2), normal(*lead, width, seed=3)


def skip_arguments(dtype: torch.dtype, lead: tuple[int, ...], width: int) -> Arguments:
    y, x = (normal(*lead, width, seed=seed) for seed in (1, 2))
    return y, x, normal(width, seed=3), normal(*lead, width, seed=4, dtype=dtype)


CASES: list[tuple[str, Callable[..., Arguments]]] = [
    ("rms_norm", norm_arguments),
    ("rms_norm", head_norm_arguments),
    ("add_rms_norm", added_arguments),
    ("gated_rms_norm", gated_arguments),
    ("gated_rms_norm", sigmoid_gated_arguments),
    ("silu_mul", silu_arguments),
    ("rotate", rotate_arguments),
    ("delta_inputs", delta_arguments),
    ("skip_gate", skip_arguments),
    ("time_steps", step_arguments),
]
ACTIVATIONS = ["gelu", "gelu_tanh", "sigmoid", "silu"]  # of single numbers
# limits and single numbers have no form in Triton
EVERY_CASE = pytest.mark.parametrize(
    ("name", "make"),
    [
        *CASES,
        *((name, single_arguments) for name in ACTIVATIONS),
        ("clamped_silu_mul", clamped_arguments),
    ],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
# decays by channel are a part of the native delta_net, and have no native form of their own
TRITON_CASE = pytest.mark.parametrize(
    ("name", "make"),
    [*CASES, ("delta_inputs", channel_arguments), ("delta_inputs", bounded_arguments)],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)


def outputs(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else result


@pairwise(
    EVERY_CASE,
    pytest.mark.parametrize("lead", [(1, 1), (2, 5), (3, 1)]),
    pytest.mark.parametrize("width", [2, 16, 37, 128]),
)
def test_matches_reference(
    name: str, make: Callable[..., Arguments], lead: tuple[int, ...], width: int, ops: ModuleType, dtype: torch.dtype
) -> None:
    arguments = make(dtype, lead, width)
    before = [x.clone() for x in arguments if isinstance(x, Tensor)]
    got, want = outputs(getattr(ops, name)(*arguments)), outputs(getattr(reference, name)(*arguments))
    for x, y in zip(got, want, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        # PyTorch rounds between the steps of a formula
        torch.testing.assert_close(x, y, **tolerance(dtype, roundings=2, magnitude=0.5))
    assert all(torch.equal(x, y) for x, y in zip(before, (x for x in arguments if isinstance(x, Tensor)), strict=True))


@pytest.mark.parametrize("make", [channel_arguments, bounded_arguments])
def test_decays_by_channel_match_reference(make: Callable[..., Arguments], dtype: torch.dtype) -> None:
    arguments = make(dtype, (2, 5), 37)
    for x, y in zip(rowwise.delta_inputs(*arguments), reference.delta_inputs(*arguments), strict=True):
        torch.testing.assert_close(x, y, **tolerance(torch.float32))
    assert operator_of(rowwise.delta_inputs).choose(*arguments) == "torch"


@EVERY_CASE
def test_parts_of_a_projection(name: str, make: Callable[..., Arguments], ops: ModuleType, dtype: torch.dtype) -> None:
    """Slices of wider tokens, and tensors whose batch and length have changed places."""
    arguments = make(dtype, (2, 5), 37)
    want = outputs(getattr(ops, name)(*arguments))

    def embedded(x: Any) -> Any:
        if not (isinstance(x, Tensor) and x.dim() > 2):
            return x
        wide = torch.full((*x.shape[:2], x[0, 0].numel() + 9), float("nan"), dtype=x.dtype)
        wide[..., 4:-5] = x.flatten(2)
        return wide[..., 4:-5].view(x.shape)

    def swapped(x: Any) -> Any:
        return x.transpose(0, 1).contiguous().transpose(0, 1) if isinstance(x, Tensor) and x.dim() > 2 else x

    for change in (embedded, swapped):
        got = outputs(getattr(ops, name)(*(change(x) for x in arguments)))
        for x, y in zip(got, want, strict=True):
            # PyTorch's GELU rounds otherwise at the ends of its vectors
            allowed = tolerance(dtype, terms=8) if name == "gelu" and ops is torch_ops else {"rtol": 1e-6, "atol": 1e-6}
            torch.testing.assert_close(x, y, **allowed)


@pytest.mark.usefixtures("needs_native")
@EVERY_CASE
def test_a_token_does_not_depend_on_the_others(
    name: str, make: Callable[..., Arguments], dtype: torch.dtype, set_threads: Callable[[int], None]
) -> None:
    arguments = make(dtype, (1, 200), 64)
    op = getattr(native_ops, name)
    whole = outputs(op(*arguments))
    one = outputs(op(*(x[:, 7:8] if isinstance(x, Tensor) and x.dim() > 2 else x for x in arguments)))
    set_threads(2)
    threaded = outputs(op(*arguments))
    for x, y, z in zip(whole, one, threaded, strict=True):
        assert torch.equal(x[:, 7:8], y)
        assert torch.equal(x, z)


@pytest.mark.parametrize("width", [7, 64, 500])
def test_a_sum_and_its_norm_have_the_bits_of_two_steps(width: int, ops: ModuleType, dtype: torch.dtype) -> None:
    x, added, weight, eps = added_arguments(dtype, (2, 5), width)
    total, normed = ops.add_rms_norm(x, added, weight, eps)
    assert torch.equal(total, x + added)
    assert torch.equal(normed, ops.rms_norm(x + added, weight, eps))


@pytest.mark.parametrize("value", [-1e4, -100.0, -20.0, 0.0, 19.0, 21.0, 100.0, 1e4])
def test_gates_at_the_ends(value: float, ops: ModuleType) -> None:
    mixed, gates, ones = torch.ones(1, 1, 4), torch.full((1, 1, 2), value), torch.ones(2)
    _, _, g, beta = ops.delta_inputs(mixed, gates, gates, -ones, 0 * ones, 1, 2)
    torch.testing.assert_close(g, -torch.nn.functional.softplus(gates.double()).float(), rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(beta, gates.double().sigmoid().float(), rtol=1e-5, atol=1e-37)


def test_zero_heads_stay_finite(ops: ModuleType) -> None:
    """The lengths that everything is divided by have something under the root."""
    zeros, ones = torch.zeros(1, 1, 4), torch.ones(2)
    q, k, _, _ = ops.delta_inputs(zeros, zeros[..., :2], zeros[..., :2], ones, ones, 1, 2)
    assert torch.equal(q, torch.zeros_like(q))
    assert torch.equal(k, torch.zeros_like(k))
    assert torch.equal(ops.rms_norm(zeros, torch.ones(4), EPS), zeros)


def test_what_is_no_number_stays_in_its_head(ops: ModuleType) -> None:
    x = normal(1, 3, 2, 8, seed=1)
    x[0, 1, 1, 3] = float("nan")
    y = ops.rms_norm(x, torch.ones(8), EPS)
    assert y[0, 1, 1].isnan().all()
    assert y.isnan().sum() == 8


@EVERY_CASE
def test_empty_batches(name: str, make: Callable[..., Arguments], ops: ModuleType) -> None:
    arguments = make(torch.float32, (0, 4), 8)
    for x in outputs(getattr(ops, name)(*arguments)):
        assert x.shape[:2] == (0, 4)


@pytest.mark.usefixtures("needs_native")
@EVERY_CASE
def test_native_code_is_chosen_where_it_runs(
    name: str, make: Callable[..., Arguments], monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = operator_of(getattr(rowwise, name))
    given = {dtype: make(dtype, (1, 2), 8) for dtype in (torch.float32, torch.bfloat16, torch.float16)}
    assert [operator.choose(*x) for x in given.values()] == ["native", "native", "torch"]
    monkeypatch.setattr(native_ops, "code", lambda: None)
    assert operator.choose(*given[torch.float32]) == "torch"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("rms_norm", (torch.ones(2, 8), torch.ones(9), EPS)),
        ("rms_norm", (torch.ones(1, 2, 3, 8), torch.ones(4, 8), EPS)),
        ("add_rms_norm", (torch.ones(2, 8), torch.ones(3, 8), torch.ones(8), EPS)),
        ("add_rms_norm", (torch.ones(2, 8), torch.ones(2, 8), torch.ones(2, 8), EPS)),
        ("gated_rms_norm", (torch.ones(2, 3, 8), torch.ones(2, 2, 8), torch.ones(8), EPS)),
        ("silu_mul", (torch.ones(2, 7),)),
        ("clamped_silu_mul", (torch.ones(2, 7), 0.4)),
        ("time_steps", (torch.ones(2, 8), torch.ones(8), torch.ones(3, 8))),
        ("time_steps", (torch.ones(2, 8), torch.ones(7), torch.ones(2, 8))),
        ("skip_gate", (torch.ones(2, 8), torch.ones(2, 8), torch.ones(8), torch.ones(2, 9))),
        ("skip_gate", (torch.ones(2, 8), torch.ones(1, 8), torch.ones(8), torch.ones(2, 8))),
        ("skip_gate", (torch.ones(2, 8), torch.ones(2, 8), torch.ones(2, 8), torch.ones(2, 8))),
        ("rotate", (torch.ones(1, 2, 3, 8), torch.ones(1, 2, 1, 10), torch.ones(1, 2, 1, 10))),
        ("rotate", (torch.ones(1, 2, 3, 8), torch.ones(1, 1, 1, 4), torch.ones(1, 1, 1, 4))),
        ("rotate", (torch.ones(1, 2, 3, 8), torch.ones(1, 2, 1, 4).half(), torch.ones(1, 2, 1, 4))),
        ("delta_inputs", (torch.ones(1, 1, 7), *[torch.ones(1, 1, 2)] * 2, *[torch.ones(2)] * 2, 2, 2)),
        ("delta_inputs", (torch.ones(1, 1, 9), *[torch.ones(1, 1, 2)] * 2, *[torch.ones(3)] * 2, 2, 2)),
        ("delta_inputs", (torch.ones(1, 2, 9), *[torch.ones(1, 1, 2)] * 2, *[torch.ones(2)] * 2, 2, 2)),
    ],
)
@pytest.mark.usefixtures("needs_native")
def test_native_code_reads_no_memory_of_others(name: str, arguments: Arguments) -> None:
    """Shapes that do not fit are refused; in PyTorch they are an error of an operator."""
    with pytest.raises(ValueError):
        getattr(native_ops, name)(*arguments)


@pytest.mark.usefixtures("needs_native")
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_number_has_the_same_bits_wherever_it_stands(name: str, dtype: torch.dtype) -> None:
    x = (torch.randn(3, 1037) * 6).to(dtype)
    of, found = getattr(native_ops, name), getattr(native_ops, name)(x)
    wanted = getattr(reference, name)(x.double())
    torch.testing.assert_close(found.double(), wanted, **tolerance(dtype, terms=8))
    for i in range(0, 1037, 61):
        assert torch.equal(of(x[:, i : i + 3]), found[:, i : i + 3])


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu"])
def test_activations_at_the_ends(name: str, ops: ModuleType) -> None:
    """Far above 0 a number stays what it is, far below it nothing is left, and what is no number stays that."""
    x = torch.tensor([[0.0, 1e-30, -1e-30, 30.0, 1e30, -200.0, -1e30, torch.nan]])
    y = getattr(ops, name)(x)[0]
    torch.testing.assert_close(y[:5], x[0, :5] * torch.tensor([0, 0.5, 0.5, 1, 1]), rtol=1e-6, atol=0.0)
    assert y[5:7].abs().max() < 1e-37
    assert y[7].isnan()


@pytest.mark.usefixtures("needs_native")
def test_gelu_keeps_its_digits_far_below_0() -> None:
    """The square in e^(-x^2/2) is as exact as float32 is, so that its share of the error grows with it."""
    x = torch.linspace(-12.0, 0.0, 4001)[None]
    wanted = reference.gelu(x.double())
    error = (native_ops.gelu(x).double() - wanted).abs()
    assert (error <= (6e-7 + 1.2e-7 * x.double() ** 2) * wanted.abs() + 1e-44).all()
