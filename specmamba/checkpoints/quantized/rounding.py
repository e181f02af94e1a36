"""Round matrices to codes, as compressed-tensors stores them."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Form = Literal["int4", "int8", "fp8"]
# Of the scale that lets the largest weight of a group have the largest code: smaller ones cut it off, and round the
# others better. Which is best is tried for each group.
_FACTORS = torch.arange(1.0, 0.58, -0.04).tolist()
_ELEMENTS_AT_ONCE = 1 << 22
_LARGEST = {"int4": 7.0, "int8": 127.0, "fp8": 448.0}


def round_matrix(weight: Tensor, form: Form, group: int, scale_dtype: torch.dtype) -> dict[str, Tensor]:
    """Round a matrix to nearest codes; int4 with the scale of each group that has the least squared error.

    Args:
        weight: [N, K], of finite numbers; for int4 K is a multiple of ``group``.
        form: int4 with a scale for every ``group`` inputs; int8 and fp8 (e4m3) with a scale per output.
        group: 32, 64 or 128.
        scale_dtype: of the scales; codes are those of the rounded scales.

    Returns:
        The tensors by the last part of their names.
    """
    rounded = [
        _round_groups(rows, group, scale_dtype) if form == "int4" else _round_rows(rows, form, scale_dtype)
        for rows in weight.split(max(_ELEMENTS_AT_ONCE // weight.shape[1], 1))
    ]
    codes, scales = (torch.cat(of_rows) for of_rows in zip(*rounded, strict=True))
    if form != "int4":
        return {"weight": codes, "weight_scale": scales}
    numbers = (codes + 8).view(torch.uint8)
    packed = (numbers[:, ::2] | numbers[:, 1::2] << 4).contiguous().view(torch.int32)
    return {"weight_packed": packed, "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}


def _round_rows(weight: Tensor, form: Form, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    values = weight.float()
    scale = _usable(values.abs().amax(1, keepdim=True) / _LARGEST[form], scale_dtype)
    ratios = (values / scale.float()).clamp_(-_LARGEST[form], _LARGEST[form])
    return (ratios.round_().to(torch.int8) if form == "int8" else ratios.to(torch.float8_e4m3fn)), scale


def _round_groups(weight: Tensor, group: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    values = weight.float().unflatten(1, (-1, group))
    largest = values.abs().amax(2, keepdim=True) / _LARGEST["int4"]
    best = torch.full_like(largest, torch.inf)
    scales, codes = torch.empty_like(largest, dtype=scale_dtype), torch.empty_like(values, dtype=torch.int8)
    for factor in _FACTORS:
        scale = _usable(largest * factor, scale_dtype)
        rounded = (values / scale.float()).round_().clamp_(-8, 7)
        error = (rounded * scale.float() - values).square_().sum(2, keepdim=True)
        is_better = error < best
        best = torch.where(is_better, error, best)
        scales = torch.where(is_better, scale, scales)
        codes = torch.where(is_better, rounded.to(torch.int8), codes)
    return codes.flatten(1), scales.squeeze(2)


def _usable(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Round scales; those of zeros, or too small for the type, become 1."""
    rounded = scale.to(dtype)
    return torch.where(rounded > 0, rounded, torch.ones_like(rounded))
