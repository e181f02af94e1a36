"""Matrix product with a weight that is laid out once for its device."""

from __future__ import annotations

from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from specmamba.kernels import gpu
from specmamba.kernels.linear import native_ops, torch_ops

__all__ = ["PackedWeight", "WeightForm", "copies", "has_fast_int8", "pack"]

WeightForm = Literal["plain", "int8"]  # as it is; a signed byte per weight and a scale per output


class PackedWeight(Protocol):
    """y = x W^T without bias, in x's dtype."""

    nbytes: int  # of what is kept, but for the padding of panels

    def __call__(self, x: Tensor, /) -> Tensor:
        """[..., K] -> [..., N]."""


def pack(weight: Tensor, form: WeightForm = "plain") -> PackedWeight:
    """Lay out a weight [N, K] for multiplying inputs of its dtype.

    ``plain``: bf16 on a CPU is copied into native panels, or oneDNN's blocks where native code cannot be had;
    everything else stays as it is. ``int8``: rounded, see ``reference.quantize``; on a GPU few rows multiply in Triton,
    bf16 and float32 on a CPU multiply in native code, everything else in PyTorch. An empty weight stays plain. Where a
    copy takes its place, the weight is not kept.

    Raises:
        ValueError: no such form.
    """
    if form not in get_args(WeightForm):
        raise ValueError(f"a weight has no form {form!r}, only {', '.join(get_args(WeightForm))}")
    is_int8 = form == "int8" and weight.numel() > 0
    if is_int8 and gpu.can_launch(weight):
        from specmamba.kernels.linear import triton_ops

        return triton_ops.TritonInt8Weight(weight)
    dtypes = (torch.bfloat16, torch.float32) if is_int8 else (torch.bfloat16,)
    if weight.device.type == "cpu" and weight.dtype in dtypes and weight.numel():
        code = native_ops.code()
        if code is not None:
            return native_ops.NativeInt8Weight(weight, code) if is_int8 else native_ops.NativeWeight(weight, code)
    return torch_ops.Int8Weight(weight) if is_int8 else torch_ops.pack(weight)


def copies(device: torch.device, dtype: torch.dtype, form: WeightForm = "plain") -> bool:
    """Whether ``pack`` keeps a copy of a weight rather than the weight."""
    if form == "int8":
        return True
    if device.type != "cpu" or dtype is not torch.bfloat16:
        return False
    return native_ops.code() is not None or torch_ops.can_pack(torch.empty(1, 1, dtype=dtype))


def has_fast_int8(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the int8 form is known to multiply a few rows of this dtype faster than the plain one; see README.md.

    On a GPU it reads half the bytes, but nobody has measured what that is worth, so it does not count as faster there.
    """
    return device.type == "cpu" and dtype is torch.bfloat16 and native_ops.code() is not None
