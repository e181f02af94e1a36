"""Angles of rotary position embedding: PyTorch and native code against the reference."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from specmamba.kernels import rowwise
from specmamba.kernels.dispatch import operator_of
from specmamba.kernels.rowwise import native_ops, reference, torch_ops
from tests.pairwise import pairwise

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.fixture(params=["torch_ops", "native_ops"])
def ops(request: pytest.FixtureRequest) -> ModuleType:
    if request.param == "torch_ops":
        return torch_ops
    request.getfixturevalue("needs_native")
    return native_ops


@pairwise(
    DTYPES,
    pytest.mark.parametrize("half", [1, 3, 32]),
    pytest.mark.parametrize("scaling", [1.0, 1.25]),
)
def test_angles_match_reference(ops: ModuleType, half: int, scaling: float, dtype: torch.dtype) -> None:
    frequencies = (10000.0 ** -(torch.arange(half) / half)).repeat(2)
    positions = torch.tensor([[0, 1, 2, 77], [5, 262_143, 131_072, 0]])[:, ::2]
    got, want = (f(positions, frequencies, scaling, dtype) for f in (ops.rotary_angles, reference.rotary_angles))
    for x, y in zip(got, want, strict=True):
        assert (x.shape, x.dtype) == ((2, 2, 1, 2 * half), dtype)
        torch.testing.assert_close(x, y, rtol=2**-8 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


@pytest.mark.usefixtures("needs_native")
def test_threads_change_nothing(set_threads: Callable[[int], None]) -> None:
    frequencies, positions = torch.rand(32).repeat(2), torch.arange(500)[None]
    results = []
    for count in (1, 2):
        set_threads(count)
        results.append(native_ops.rotary_angles(positions, frequencies, 1.0, torch.bfloat16))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    one = native_ops.rotary_angles(positions[:, 7:8], frequencies, 1.0, torch.bfloat16)
    assert all(torch.equal(x[:, 7:8], y) for x, y in zip(results[0], one, strict=True))


@pytest.mark.usefixtures("needs_native")
def test_native_code_is_taken_where_it_can_and_refuses_what_does_not_fit() -> None:
    positions, frequencies = torch.zeros(1, 2, dtype=torch.int64), torch.ones(4)
    for wrong in [(positions.int(), frequencies), (positions, frequencies.double()), (positions, frequencies[:3])]:
        with pytest.raises(ValueError, match=r"dtypes|rotate"):
            native_ops.rotary_angles(*wrong, 1.0, torch.float32)
    assert native_ops.can_take_angles(positions, frequencies, torch.float32)
    assert not native_ops.can_take_angles(positions, frequencies.to("meta"), torch.float32)
    dtypes, operator = (torch.float32, torch.bfloat16, torch.float16), operator_of(rowwise.rotary_angles)
    chosen = [operator.choose(positions, frequencies, 1.0, dtype) for dtype in dtypes]
    assert chosen == ["native", "native", "torch"]
