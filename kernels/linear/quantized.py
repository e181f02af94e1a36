"""The canonical form of a quantized matrix: codes, a scale and perhaps a minimum per group of inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_ELEMENTS_AT_ONCE = 1 << 24  # that are dequantized: float32 copies of all would take several times the codes' memory


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

    @property
    def shape(self) -> torch.Size:
        """Of the matrix: [..., N, K]."""
        return self.codes.shape

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Compute the weights [..., N, K] in float32, and round them to ``dtype`` once."""
        width = self.codes.shape[-1]
        weight = torch.empty(self.codes.shape, dtype=dtype, device=self.codes.device)
        rows = max(_ELEMENTS_AT_ONCE // width, 1)
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
        return QuantizedMatrix(self.codes[rows], self.scale[rows], self.group, minimum, self.table)

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
        return QuantizedMatrix(self.codes[:, columns], self.scale[:, places], self.group, minimum, self.table)

    def is_like(self, other: QuantizedMatrix) -> bool:
        """Whether codes and groups mean the same."""
        if self.table is None or other.table is None:
            has_same_table = self.table is other.table
        else:
            has_same_table = torch.equal(self.table, other.table)
        has_same_parts = (self.minimum is None) == (other.minimum is None) and self.codes.dtype is other.codes.dtype
        return has_same_table and has_same_parts and self.group == other.group

    @staticmethod
    def cat(matrices: Sequence[QuantizedMatrix], dim: int) -> QuantizedMatrix:
        """Join matrices that are alike along a dimension other than the last."""
        first = matrices[0]
        minima = [x.minimum for x in matrices if x.minimum is not None]
        minimum = torch.cat(minima, dim) if minima else None
        codes, scale = (torch.cat([getattr(x, name) for x in matrices], dim) for name in ("codes", "scale"))
        return QuantizedMatrix(codes, scale, first.group, minimum, first.table)

    def _along_width(self, of_groups: Tensor, width: int) -> Tensor:
        """[n, ceil(K / group)] -> [n, K]."""
        return of_groups if of_groups.shape[1] == 1 else of_groups.repeat_interleave(self.group, 1)[:, :width]
