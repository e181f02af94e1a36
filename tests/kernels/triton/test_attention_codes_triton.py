"""Paged attention over codes in Triton: against the reference over the numbers that the codes stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specmamba.kernels.paged_attention.codes import LARGEST, as_bytes, dequantize, quantize
from tests.kernels.attention.test_attention_codes import CODES, INT8, POOLS, assert_neighbours, in_codes
from tests.kernels.test_attention_keys import make_keys
from tests.kernels.triton.test_paged_attention_triton import (
    BF16,
    FP16,
    FP32,
    TOLERANCE,
    Heads,
    make_layer,
    right_layer,
    run_layer,
)

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture
def triton_ops(gpu_device: str) -> Any:
    from specmamba.kernels.paged_attention import triton_ops

    return triton_ops


def run(ops: Any, device: str, layer: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The result and the pools as they are then."""
    made = {name: layer[name].to(device, copy=True) for name in POOLS}
    kept: dict[str, Tensor] = {}

    class Keeping:
        """Sees the pools that the call has, which ``run_layer`` copies."""

        @staticmethod
        def attend_layer(**given: Any) -> Tensor:
            out: Tensor = ops.attend_layer(**given)
            kept.update(zip(POOLS, (given["kv"][i].cpu() for i in (0, 1, 3, 4)), strict=True))
            return out

    out, *_ = run_layer(Keeping, device, layer | made)
    return out, kept


def check(ops: Any, device: str, layer: dict[str, Any], codes: torch.dtype, dtype: torch.dtype) -> None:
    """The result, over the codes that were stored; and these codes, against those of the reference's numbers."""
    coded = in_codes(layer, codes)
    out, stored = run(ops, device, coded)
    spare = torch.zeros(1, *layer["k_pool"].shape[1:])
    pools = {f"{x}_pool": dequantize(stored[f"{x}_pool"], stored[f"{x}_scales"]) for x in "kv"}
    pools = {name: torch.cat([pool.nan_to_num(0.0), spare]) for name, pool in pools.items()}
    elsewhere = torch.full_like(layer["write_slots"], len(layer["k_pool"]))
    want, *_ = right_layer(layer | pools | {"write_slots": elsewhere})
    torch.testing.assert_close(out, want, **TOLERANCE[dtype])
    slots = layer["write_slots"]
    for name, new in zip(("k", "v"), right_layer(layer)[1:], strict=True):
        wanted, scales = quantize(new[slots], codes)
        # to bfloat16 the interpreter rounds towards zero, by up to 2^-7 of each part of a rotation
        bounds = (LARGEST[codes] / 64, 0.5) if dtype is BF16 else (0.0, 0.05)
        assert_neighbours(stored[f"{name}_pool"][slots].float(), wanted.float(), codes, *bounds)
        torch.testing.assert_close(stored[f"{name}_scales"][slots], scales, **TOLERANCE[dtype])
        others = torch.ones(len(new), dtype=torch.bool)
        others[slots] = False
        assert torch.equal(as_bytes(stored[f"{name}_pool"][others]), as_bytes(coded[f"{name}_pool"][others]))


@pytest.mark.fast_cases(2)
@CODES
@pytest.mark.parametrize(
    ("num_entries", "heads", "rotated", "parts", "dtype"),
    [
        (6, (4, 2, 16), 6, "norm rotary gate", FP32),
        (0, (4, 2, 16), 16, "rotary", BF16),
        (0, (2, 2, 16), 16, "", FP16),
        (6, (3, 1, 10), 6, "gate", FP32),
        (4, (4, 1, 67), 34, "norm rotary gate", BF16),
        (4, (2, 1, 67), 34, "norm", FP16),
    ],
)
def test_a_layer(
    triton_ops: Any,
    gpu_device: str,
    num_entries: int,
    heads: Heads,
    rotated: int,
    parts: str,
    codes: torch.dtype,
    dtype: torch.dtype,
) -> None:
    layer = make_layer(make_keys([9, 0, 18], 3, num_entries=num_entries), heads, rotated, dtype, parts)
    check(triton_ops, gpu_device, layer, codes, dtype)


@CODES
@pytest.mark.parametrize("num_entries", [0, 65])
def test_a_layer_of_long_runs_and_large_trees(
    triton_ops: Any, gpu_device: str, num_entries: int, codes: torch.dtype
) -> None:
    layer = make_layer(
        make_keys([6], 66 - (num_entries > 0), num_entries=num_entries), (2, 1, 16), 8, FP16, "norm gate"
    )
    check(triton_ops, gpu_device, layer, codes, FP16)


@CODES
def test_small_values_in_float16(triton_ops: Any, gpu_device: str, codes: torch.dtype) -> None:
    """Weights times their scales would be subnormal: they are multiplied in units of the largest scale."""
    layer = make_layer(make_keys([40], 3), (2, 1, 16), 8, FP16, "")
    layer["v_pool"] = layer["v_pool"].float() * 1e-5
    layer["projected"][..., 48:] *= 1e-5
    coded = in_codes(layer, codes)
    out, stored = run(triton_ops, gpu_device, coded)
    pools = {f"{x}_pool": dequantize(stored[f"{x}_pool"], stored[f"{x}_scales"]) for x in "kv"}
    layer |= {name: pool.nan_to_num(0.0) for name, pool in pools.items()}
    want, *_ = right_layer(layer)
    torch.testing.assert_close(out * 1e4, want * 1e4, rtol=0.02, atol=1e-2)  # one unit of float16 is 6e-8


@CODES
def test_what_is_stored_bit_for_bit(triton_ops: Any, gpu_device: str, codes: torch.dtype) -> None:
    """Tiny, huge and zero heads, ties, and what is no number; nothing in slot 0, which is padding."""
    layer = make_layer(make_keys([9, 4], 4), (2, 2, 40), 6, FP32, "")
    heads = layer["projected"].view(8, -1, 40)
    heads[0, 2] *= 1e-37
    heads[1, 3] *= 1e37
    heads[2, 4], heads[3, 5] = 0.0, -0.0
    heads[4, 2, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    heads[5, 5] = torch.arange(40) - 20
    layer["write_slots"][7] = 0
    coded = in_codes(layer, codes)
    _, stored = run(triton_ops, gpu_device, coded)
    slots = layer["write_slots"][:7]
    for name, new in (("k", heads[:7, 2:4]), ("v", heads[:7, 4:6])):
        want, scales = quantize(new, codes)
        assert torch.equal(as_bytes(stored[f"{name}_pool"][slots]), as_bytes(want))
        assert torch.equal(stored[f"{name}_scales"][slots], scales)
        assert torch.equal(as_bytes(stored[f"{name}_pool"][0]), as_bytes(coded[f"{name}_pool"][0]))


def test_pools_and_scales_that_do_not_fit_are_refused(triton_ops: Any, gpu_device: str) -> None:
    layer = in_codes(make_layer(make_keys([9], 3), (2, 2, 16), 8, FP32, ""), INT8)
    for changes in (
        {"k_scales": None},
        {"k_pool": layer["k_pool"].float()},
        {"v_scales": layer["v_scales"][:, :1]},
        {"v_scales": layer["v_scales"].t().contiguous().t()},
    ):
        with pytest.raises(ValueError, match="scales"):
            run_layer(triton_ops, gpu_device, layer | changes)
