"""The canonical form of a quantized matrix: codes, a scale and perhaps a minimum per group of inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Weights decoded or rounded at a time: on a CPU what they pass through stays in caches, elsewhere launches count.
_ELEMENTS_ON_CPU, _ELEMENTS_AT_ONCE = 1 << 18, 1 << 24


def e4m3_values() -> Tensor:
    """What the codes 0 ... 255 of float8 e4m3 mean: [256] float32; NaN at 127 and 255."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def has_nan(weight: Tensor) -> bool:
    """Whether a weight [..., K] float8 e4m3 has a NaN: all bits but the sign."""
    if weight.is_meta or not weight.numel():
        return False
    parts = weight.view(torch.uint8).flatten(0, -2).split(max((1 << 22) // weight.shape[-1], 1))
    return any(int((part << 1).amax()) == 254 for part in parts)


def rows_at_once(width: int, device: torch.device) -> int:
    """Rows of a matrix of this width that are decoded or rounded at a time."""
    return max((_ELEMENTS_ON_CPU if device.type == "cpu" else _ELEMENTS_AT_ONCE) // width, 1)


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """W[n, k] = value[n, k] * scale[n, k // group] + minimum[n, k // group].

    The value is the code itself, or ``table[code]``. The last group of a row may be shorter than the others. There may
    be further dimensions in front, as for the stacked matrices of experts.
    """

    codes: Tensor  # [..., N, K] int8 or uint8; places in ``table`` are uint8
    scale: Tensor  # [..., N, ceil(K / group)] float32
    group: int
    minimum: Tensor | None = None  # [..., N, ceil(K / group)] float32; None: zeros
    table: Tensor | None = None  # [C] float32
    bits: int = 8  # 4 to 8. Codes are 0 to 2^bits - 1, or, where they are int8, -2^(bits - 1) to 2^(bits - 1) - 1

    @property
    def shape(self) -> torch.Size:
        """Of the matrix: [..., N, K]."""
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        """Of the tensors of which every weight or group has its own."""
        return sum(x.nbytes for x in (self.codes, self.scale, self.minimum) if x is not None)

    @property
    def device(self) -> torch.device:
        """Of all tensors but the table."""
        return self.codes.device

    def numel(self) -> int:
        """The number of weights."""
        return self.codes.numel()

    def to(self, device: torch.device) -> QuantizedMatrix:
        """Move all tensors to a device."""
        if device == self.device:
            return self
        parts = {name: getattr(self, name) for name in ("codes", "scale", "minimum", "table")}
        return replace(self, **{name: x.to(device) for name, x in parts.items() if x is not None})

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Compute the weights [..., N, K] in float32, and round them to ``dtype`` once."""
        width = self.codes.shape[-1]
        weight = torch.empty(self.codes.shape, dtype=dtype, device=self.codes.device)
        if weight.is_meta:
            return weight
        rows = rows_at_once(width, weight.device)
        by_rows = [x if x is None else x.flatten(0, -2).split(rows) for x in (self.codes, self.scale, self.minimum)]
        codes, scales, minima = by_rows
        assert codes is not None
        assert scales is not None
        for i, out in enumerate(weight.flatten(0, -2).split(rows)):
            values = codes[i].float() if self.table is None else self.table[codes[i].int()]
            values = values.mul_(self._along_width(scales[i], width))
            out.copy_(values if minima is None else values.add_(self._along_width(minima[i], width)))
        return weight

    def with_rows(self, rows: Tensor) -> QuantizedMatrix:
        """Put row ``rows[i]`` of a matrix [N, K] at place i."""
        minimum = None if self.minimum is None else self.minimum[rows]
        return replace(self, codes=self.codes[rows], scale=self.scale[rows], minimum=minimum)

    def scaled(self, factor: float | Tensor) -> QuantizedMatrix:
        """Multiply the weights by a number, or by one for each output: [N, 1]."""
        minimum = None if self.minimum is None else self.minimum * factor
        return replace(self, scale=self.scale * factor, minimum=minimum)

    def with_columns(self, columns: Tensor) -> QuantizedMatrix | Tensor:
        """Put column ``columns[i]`` of a matrix [N, K] at place i; float32 where that takes groups apart."""
        if len(columns) % self.group:
            return self.dequantize(torch.float32)[:, columns]
        in_groups = columns.view(-1, self.group)
        first = in_groups[:, 0]
        if bool((first % self.group).any()) or not torch.equal(in_groups, first[:, None] + torch.arange(self.group)):
            return self.dequantize(torch.float32)[:, columns]
        places = first // self.group
        minimum = None if self.minimum is None else self.minimum[:, places]
        return replace(self, codes=self.codes[:, columns], scale=self.scale[:, places], minimum=minimum)

    def is_like(self, other: QuantizedMatrix) -> bool:
        """Whether codes and groups mean the same."""
        if self.table is None or other.table is None:
            has_same_table = self.table is other.table
        else:
            tables = (table.view(torch.int32) for table in (self.table, other.table))  # NaN equals nothing
            has_same_table = torch.equal(*tables)
        has_same_parts = (self.minimum is None) == (other.minimum is None) and self.codes.dtype is other.codes.dtype
        return has_same_table and has_same_parts and (self.group, self.bits) == (other.group, other.bits)

    def flat(self) -> QuantizedMatrix:
        """The outputs of all stacked matrices as those of one: [..., N, K] -> [n, K]."""
        minimum = None if self.minimum is None else self.minimum.flatten(0, -2)
        return replace(self, codes=self.codes.flatten(0, -2), scale=self.scale.flatten(0, -2), minimum=minimum)

    def stacked(self, num_matrices: int) -> QuantizedMatrix:
        """The outputs of a matrix [E N, K] as those of so many stacked ones: [E, N, K]."""
        parts = [
            None if x is None else x.unflatten(0, (num_matrices, -1)) for x in (self.codes, self.scale, self.minimum)
        ]
        assert parts[0] is not None
        assert parts[1] is not None
        return replace(self, codes=parts[0], scale=parts[1], minimum=parts[2])

    @staticmethod
    def cat(matrices: Sequence[QuantizedMatrix], dim: int) -> QuantizedMatrix:
        """Join matrices that are alike along a dimension other than the last."""
        first = matrices[0]
        minima = [x.minimum for x in matrices if x.minimum is not None]
        minimum = torch.cat(minima, dim) if minima else None
        codes, scale = (torch.cat([getattr(x, name) for x in matrices], dim) for name in ("codes", "scale"))
        return replace(first, codes=codes, scale=scale, minimum=minimum)

    def _along_width(self, of_groups: Tensor, width: int) -> Tensor:
        """[n, ceil(K / group)] -> [n, K]."""
        return of_groups if of_groups.shape[1] == 1 else of_groups.repeat_interleave(self.group, 1)[:, :width]
