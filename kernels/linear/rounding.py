"""Round matrices to codes: int4 in groups, int8 and FP8 by output."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from specmamba.kernels.linear.quantized import QuantizedMatrix, e4m3_values, rows_at_once

CodeForm = Literal["int4", "int8", "fp8"]
# Of the scale that lets the largest weight of a group have the largest code: smaller ones cut it off, and round the
# others better. Which is best is tried for each group.
_FACTORS = tuple(1 - 0.04 * step for step in range(11))
_LARGEST = {"int4": 7.0, "int8": 127.0, "fp8": 448.0}


def round_matrix(
    weight: Tensor, form: CodeForm, group: int = 32, scale_dtype: torch.dtype = torch.float32
) -> QuantizedMatrix:
    """Round a matrix to nearest codes; int4 with the scale of each group that has the least squared error.

    Args:
        weight: [..., N, K]; a NaN or an infinity makes its group NaN, in int8 and fp8 its output.
        form: int4 with a scale for every ``group`` inputs; int8 and fp8 (e4m3) with a scale per output.
        group: 32, 64 or 128; the last group of an output may be shorter.
        scale_dtype: codes are those of scales that are rounded to it.
    """
    width, is_int4 = weight.shape[-1], form == "int4"
    rounded = [
        _round_groups(rows, group, scale_dtype) if is_int4 else _round_rows(rows, form, scale_dtype)
        for rows in weight.flatten(0, -2).split(rows_at_once(width, weight.device))
    ]
    codes, scales = (torch.cat(of_rows).unflatten(0, weight.shape[:-1]) for of_rows in zip(*rounded, strict=True))
    if form == "fp8":
        return QuantizedMatrix(codes.view(torch.uint8), scales, width, table=e4m3_values().to(weight.device))
    return QuantizedMatrix(codes, scales, group if is_int4 else width, bits=4 if is_int4 else 8)


def _round_rows(weight: Tensor, form: CodeForm, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    values = weight.float()
    scale = _usable(values.abs().amax(1, keepdim=True) / _LARGEST[form], scale_dtype)
    ratios = (values / scale).clamp_(-_LARGEST[form], _LARGEST[form])
    return (ratios.round_().to(torch.int8) if form == "int8" else ratios.to(torch.float8_e4m3fn)), scale


def _round_groups(weight: Tensor, group: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    width = weight.shape[1]
    values = F.pad(weight.float(), (0, -width % group)).unflatten(1, (-1, group))
    largest = values.abs().amax(2, keepdim=True) / _LARGEST["int4"]
    best = torch.full_like(largest, torch.inf)
    scales = torch.full_like(largest, torch.nan)  # stays where a weight is no number
    for factor in _FACTORS:
        scale = _usable(largest * factor, scale_dtype)
        rounded = (values / scale).round_().clamp_(-8, 7)
        error = rounded.mul_(scale).sub_(values).square_().sum(2, keepdim=True)
        is_better = error < best
        best = torch.where(is_better, error, best)
        scales = torch.where(is_better, scale, scales)
    codes = (values / scales).nan_to_num_(0.0).round_().clamp_(-8, 7).to(torch.int8)
    return codes.flatten(1)[:, :width].contiguous(), scales.squeeze(2)


def _usable(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Round scales to a type, and give them as float32; those of zeros, or too small for the type, become 1."""
    rounded = scale.to(dtype).float()
    return torch.where(rounded == 0, torch.ones_like(rounded), rounded)
