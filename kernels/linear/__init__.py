"""Matrix product with a weight that is laid out once for its device."""

from __future__ import annotations

from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from specmamba.kernels import gpu
from specmamba.kernels.dispatch import operator
from specmamba.kernels.linear import native_ops, torch_ops
from specmamba.kernels.linear.quantized import QuantizedMatrix

__all__ = ["PackedWeight", "QuantizedMatrix", "WeightForm", "copies", "has_fast_int8", "pack"]

WeightForm = Literal["plain", "int8"]  # as stored; a signed byte per weight and a scale per output


class PackedWeight(Protocol):
    """A weight laid out for its device: y = x W^T without bias, in x's dtype."""

    nbytes: int  # of the tensors that are kept, without the padding of panels

    def __call__(self, x: Tensor, /) -> Tensor:
        """Multiply x [..., K] on the weight's device; the result is [..., N].

        Raises:
            ValueError: another dtype, device or width (native and Triton forms).
        """


@operator(
    triton=lambda weight, form: form == "int8" and weight.numel() > 0 and gpu.can_launch(weight),
    native=native_ops.can_pack,
)
def pack(weight: Tensor, form: WeightForm = "plain") -> PackedWeight:
    """Lay out a weight for multiplying inputs of its dtype.

    ``plain``: bf16 and float32 on a CPU are copied into native panels, bf16 into oneDNN's blocks where there is no
    native code; every other weight is kept unchanged. ``int8``: rounded as ``reference.quantize`` says; on a GPU few
    rows multiply in Triton, bf16 and float32 on a CPU multiply in native code, every other weight in PyTorch. An empty
    weight stays plain.

    Args:
        weight: [N, K]; not kept where it is copied.
        form: how the weight is stored.

    Returns:
        A product that takes x [..., K] to [..., N].

    Raises:
        ValueError: there is no such form.
    """
    if form not in get_args(WeightForm):
        raise ValueError(f"a weight has no form {form!r}, only {', '.join(get_args(WeightForm))}")
    return torch_ops.Int8Weight(weight) if form == "int8" and weight.numel() > 0 else torch_ops.pack(weight)


def copies(device: torch.device, dtype: torch.dtype, form: WeightForm = "plain") -> bool:
    """Whether ``pack`` keeps a copy of a weight rather than the weight."""
    if form == "int8":
        return True
    if device.type != "cpu":  # nothing is allocated there to find out
        return False
    weight = torch.empty(1, 1, dtype=dtype)
    return native_ops.can_pack(weight, form) or torch_ops.can_pack(weight)


def has_fast_int8(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the int8 form is known to multiply a few rows of this dtype faster than the plain one; see README.md.

    On a GPU it reads half the bytes, but its speed there has not been measured, so it does not count as faster.
    """
    return device.type == "cpu" and dtype is torch.bfloat16 and native_ops.code() is not None
