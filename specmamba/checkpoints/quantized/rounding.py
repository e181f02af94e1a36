"""Round matrices as compressed-tensors stores them."""

from __future__ import annotations

import torch
from torch import Tensor

from specmamba.kernels.linear.rounding import CodeForm, round_matrix


def stored_parts(weight: Tensor, form: CodeForm, group: int, scale_dtype: torch.dtype) -> dict[str, Tensor]:
    """Round a matrix, and lay its parts out for a file.

    Args:
        weight: [N, K]; for int4 K is a multiple of ``group``.
        form, group, scale_dtype: as for ``round_matrix``; scales are stored in ``scale_dtype``.

    Returns:
        The tensors by the last part of their names.
    """
    matrix = round_matrix(weight, form, group, scale_dtype)
    scale = matrix.scale.to(scale_dtype)
    if form == "fp8":
        return {"weight": matrix.codes.view(torch.float8_e4m3fn), "weight_scale": scale}
    if form == "int8":
        return {"weight": matrix.codes, "weight_scale": scale}
    numbers = (matrix.codes + 8).view(torch.uint8)
    packed = (numbers[:, ::2] | numbers[:, 1::2] << 4).contiguous().view(torch.int32)
    return {"weight_packed": packed, "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}
