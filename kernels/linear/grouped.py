"""Quantized matrices as products take them: codes of 4, 6 or 8 bits, scales of 16 bits, groups of 16 to 128 inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specmamba.kernels.linear.quantized import QuantizedMatrix, e4m3_values, rows_at_once

GROUPS = (128, 64, 32, 16)
BITS = (4, 6, 8)
GPU_BITS = (4, 8)
BYTE_GROUP = 128  # of matrices that are rounded anew, to bytes
_LARGEST_EXPONENT = 15  # scales are below 2^15 times their factor: float16 ends at 2^16


@dataclass(frozen=True, slots=True)
class GroupedMatrix:
    """W[n, k] = factor[n] * (scale[n, g] * (value[n, k] - offset) + minimum[n, g]) with g = k // group.

    The value is the code, or ``table[code]``, or the number that the code is in float8 e4m3. There may be a dimension
    in front, for the matrices of experts.
    """

    codes: Tensor  # [..., N, K] uint8, below 2^bits
    bits: int  # 4, 6 or 8
    scale: Tensor  # [..., N, ceil(K / group)] float16
    factor: Tensor  # [..., N] float32, powers of two
    group: int  # one of ``GROUPS``
    offset: int = 0
    minimum: Tensor | None = None  # [..., N, ceil(K / group)] float16
    table: Tensor | None = None  # [16] uint8
    is_e4m3: bool = False  # then there is no table, and the offset is 0

    @property
    def nbytes(self) -> int:
        """Of the matrix as it is packed, without padding."""
        outputs, width = self.codes.numel() // self.codes.shape[-1], self.codes.shape[-1]
        return self.codes.numel() * self.bits // 8 + _bytes_of_scales(
            outputs, width, self.group, self.minimum is not None
        )

    def dequantize(self) -> Tensor:
        """The weights [..., N, K] float32."""
        values = self.codes if self.table is None else self.table[self.codes.int()]
        if self.is_e4m3:
            values = self.codes.view(torch.float8_e4m3fn)
        width = values.shape[-1]
        scale, minimum = (
            None if x is None else x.float().repeat_interleave(self.group, -1)[..., :width]
            for x in (self.scale, self.minimum)
        )
        assert scale is not None
        weight = (values.float() - self.offset) * scale
        return (weight if minimum is None else weight + minimum) * self.factor[..., None]


def regroup(matrix: QuantizedMatrix, for_gpu: bool = False) -> GroupedMatrix:
    """Bring a matrix into the form of products; its scales and minima are rounded to 11 bits, its codes are kept.

    Codes whose values are no whole numbers times a scale, and groups that no product has, are rounded anew: to bytes
    with a scale for every 128 inputs. So are those of FP8, unless ``for_gpu``: there these bytes are kept, and codes of
    5 and 6 bits take one. A NaN among codes makes the scale of its group NaN.
    """
    group = _product_group(matrix)
    is_e4m3 = for_gpu and _is_e4m3(matrix.table)
    coded = None if group is None else (matrix.codes, 8, 0, None, 1.0) if is_e4m3 else _coded(matrix, for_gpu)
    if group is None or coded is None:
        return regroup(to_bytes(matrix))
    codes, bits, offset, table, unit = coded
    scale, minimum = matrix.scale * unit, matrix.minimum
    whole = None if minimum is None else _whole_ratio(minimum, scale)
    if whole is not None:
        offset, minimum = offset - whole, None
    repeats = 1 if matrix.scale.shape[-1] == 1 else matrix.group // group
    num_groups = -(-codes.shape[-1] // group)
    scale = _spread(scale, repeats, num_groups)
    if is_e4m3:
        scale = _spoiled(scale, codes, group)
    spread = [scale, None if minimum is None else _spread(minimum, repeats, num_groups)]
    largest = torch.stack([x.abs().amax(-1) for x in spread if x is not None]).amax(0)
    exponent = torch.frexp(largest).exponent.clamp_(-100) - _LARGEST_EXPONENT
    factor = torch.where(largest > 0, torch.ldexp(torch.ones_like(largest), exponent), torch.ones_like(largest))
    halves = [None if x is None else (x / factor[..., None]).half() for x in spread]
    assert halves[0] is not None
    return GroupedMatrix(codes, bits, halves[0], factor, group, offset, halves[1], table, is_e4m3)


def form_name(matrix: QuantizedMatrix, for_gpu: bool = False) -> str:
    """Say for people in what form products take a matrix."""
    if not is_kept(matrix, for_gpu):
        return f"8 bits in groups of {BYTE_GROUP}, rounded anew"
    return f"{_product_bits(matrix, for_gpu)} bits in groups of {_product_group(matrix)}"


def name_of_rounded(form: str, for_gpu: bool = False) -> str:
    """Say for people in what form products take a matrix that is rounded to a form when it is loaded; "": as it is."""
    if form == "fp8" and not for_gpu:
        return f"8 bits in groups of {BYTE_GROUP}, rounded from FP8"
    return "" if form == "plain" else form


def packed_bytes(matrix: QuantizedMatrix, for_gpu: bool = False) -> int:
    """Bytes of a matrix in the form of products, from shapes alone: minima may turn out to be an offset, and less."""
    group, width = _product_group(matrix), matrix.shape[-1]
    if group is None or not is_kept(matrix, for_gpu):
        return matrix.numel() + _bytes_of_scales(matrix.numel() // width, width, BYTE_GROUP, False)
    has_minimum = matrix.minimum is not None
    return matrix.numel() * _product_bits(matrix, for_gpu) // 8 + _bytes_of_scales(
        matrix.numel() // width, width, group, has_minimum
    )


def _bytes_of_scales(outputs: int, width: int, group: int, has_minimum: bool) -> int:
    return outputs * (-(-width // group) * (4 if has_minimum else 2) + 4)


def to_bytes(matrix: QuantizedMatrix) -> QuantizedMatrix:
    """Round the weights to signed bytes with a scale for every 128 inputs: half of 1/127 of the largest at the most."""
    width = matrix.shape[-1]
    codes = torch.empty(matrix.shape, dtype=torch.int8, device=matrix.device)
    scale = torch.empty(*matrix.shape[:-1], -(-width // BYTE_GROUP), device=matrix.device)
    flat, rows = matrix.flat(), rows_at_once(width, matrix.device)
    parts = zip(*(x.flatten(0, -2).split(rows) for x in (codes, scale)), strict=True)
    for i, (codes_part, scale_part) in enumerate(parts):
        taken = torch.arange(i * rows, i * rows + len(codes_part), device=matrix.device)
        weights = flat.with_rows(taken).dequantize(torch.float32)
        padded = torch.nn.functional.pad(weights, (0, -width % BYTE_GROUP)).unflatten(1, (-1, BYTE_GROUP))
        scale_part.copy_(padded.abs().amax(2) / 127)
        ratios = (padded / scale_part[..., None]).nan_to_num_(0.0, 0.0, 0.0)
        codes_part.copy_(ratios.round_().clamp_(-127, 127).flatten(1)[:, :width])
    return QuantizedMatrix(codes, scale, BYTE_GROUP)


def is_kept(matrix: QuantizedMatrix, for_gpu: bool = False) -> bool:
    """Whether ``regroup`` keeps the codes of a matrix, rather than to round its weights anew."""
    if _product_group(matrix) is None:
        return False
    is_whole = matrix.table is None or _whole_values(matrix.table) is not None
    return is_whole or (for_gpu and _is_e4m3(matrix.table))


def _product_group(matrix: QuantizedMatrix) -> int | None:
    """The largest group of products that divides those of a matrix."""
    if matrix.scale.shape[-1] == 1:
        return next((group for group in reversed(GROUPS) if group >= matrix.shape[-1]), GROUPS[0])
    return next((group for group in GROUPS if matrix.group % group == 0), None)


def _coded(matrix: QuantizedMatrix, for_gpu: bool) -> tuple[Tensor, int, int, Tensor | None, float] | None:
    """Codes uint8, their bits, the offset, a table, and what scales are multiplied by; None: they are not whole."""
    codes = matrix.codes
    if matrix.table is not None:
        found = _whole_values(matrix.table)
        if found is None:
            return None
        values, unit = found
        table = torch.zeros(16, dtype=torch.uint8, device=values.device)
        table[: len(values)] = (values - values.min()).to(torch.uint8)
        return codes, 4, -int(values.min()), table, unit
    offset = 0 if codes.dtype is torch.uint8 else 1 << (matrix.bits - 1)
    if offset:
        codes = codes.view(torch.uint8) ^ 128 if matrix.bits == 8 else (codes + offset).view(torch.uint8)
    return codes, _product_bits(matrix, for_gpu), offset, None, 1.0


def _product_bits(matrix: QuantizedMatrix, for_gpu: bool) -> int:
    """Of a code that is kept."""
    return next(bits for bits in (GPU_BITS if for_gpu else BITS) if bits >= matrix.bits)


def _whole_values(table: Tensor) -> tuple[Tensor, float] | None:
    """The values of at most 16 codes as whole numbers that a byte holds, times a unit."""
    for unit in (1.0, 0.5):
        values = table / unit
        if len(values) <= 16 and torch.equal(values, values.round()) and float(values.max() - values.min()) <= 255:
            return values, unit
    return None


def _is_e4m3(table: Tensor | None) -> bool:
    """Whether the values of codes are those of float8 e4m3; a table without values is taken for theirs by its size."""
    if table is None or len(table) != 256:
        return False
    return table.is_meta or torch.equal(table.nan_to_num(), e4m3_values().to(table.device).nan_to_num())


def _spoiled(scale: Tensor, codes: Tensor, group: int) -> Tensor:
    """Scales of groups [..., N, G], NaN where a code of float8 e4m3 [..., N, K] of the group is NaN."""
    is_nan = torch.nn.functional.pad((codes & 127) == 127, (0, -codes.shape[-1] % group))
    return torch.where(is_nan.unflatten(-1, (-1, group)).any(-1), torch.nan, scale)


def _whole_ratio(minimum: Tensor, scale: Tensor) -> int | None:
    """The whole number by which all scales are multiplied to give the minima, as those of one zero point."""
    at = int(scale.flatten().abs().argmax())
    ratio = float(minimum.flatten()[at] / scale.flatten()[at])
    is_whole = ratio == round(ratio) if abs(ratio) <= 255 else False
    return round(ratio) if is_whole and torch.equal(minimum, scale * ratio) else None


def _spread(of_groups: Tensor, repeats: int, num_groups: int) -> Tensor:
    """Scales of larger groups for each of their smaller ones: [..., num_groups]."""
    if of_groups.shape[-1] == 1:
        return of_groups.expand(*of_groups.shape[:-1], num_groups)
    return of_groups.repeat_interleave(repeats, -1)[..., :num_groups]
