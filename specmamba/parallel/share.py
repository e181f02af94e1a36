"""Which part of a matrix a rank has: whole heads, groups or channels, named, so that a refusal can name them.

A matrix of a layer is assembled of segments side by side: q | k | v | gate, z | x | B | C | dt, gate | up. A cut at the
middle of it would give one rank all queries and the other all keys, so every segment is cut by itself, at the borders
of its units. The layout is that of Megatron-LM (arXiv 1909.08053, section 3), with heads of both kinds of layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from specmamba.errors import ConfigError
from specmamba.kernels.linear import Matrix, QuantizedMatrix

# whole: every rank has the same number of units. repeated: the same, or several ranks have the same unit where there
# are more ranks than units. uneven: some ranks have one unit more.
Division = Literal["whole", "repeated", "uneven"]


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring rows or columns of one kind: ``units`` times ``width`` of them."""

    name: str  # of the units, in the plural, for messages
    units: int
    width: int = 1
    division: Division = "whole"

    @property
    def size(self) -> int:
        """All rows or columns."""
        return self.units * self.width


@dataclass(frozen=True, slots=True)
class Share:
    """The part of one rank of several."""

    rank: int = 0
    size: int = 1  # ranks

    def units(self, segment: Segment, rank: int | None = None) -> range:
        """The units of a segment that a rank has; None: this one.

        Raises:
            ConfigError: they cannot be divided so.
        """
        rank, count = self.rank if rank is None else rank, segment.units
        if segment.division == "repeated" and count < self.size and self.size % count == 0:
            only = rank * count // self.size
            return range(only, only + 1)
        if count < self.size or (count % self.size and segment.division != "uneven"):
            raise ConfigError(
                f"--tp-size {self.size}: the model has {count} {segment.name}, which cannot be divided among "
                f"{self.size} ranks: choose {_fitting(segment)}"
            )
        return range(rank * count // self.size, (rank + 1) * count // self.size)

    def count(self, segment: Segment) -> int:
        """The number of units that this rank has. Raises ConfigError as ``units``."""
        return len(self.units(segment))

    def copies(self, segment: Segment) -> int:
        """How many ranks have the same unit."""
        return self.count(segment) * self.size // segment.units if segment.division == "repeated" else 1

    def widths(self, segment: Segment) -> tuple[int, ...]:
        """The rows or columns of every rank."""
        return tuple(len(self.units(segment, rank)) * segment.width for rank in range(self.size))

    def index(self, segments: Sequence[Segment]) -> Tensor:
        """The places of this rank's rows or columns in a matrix of these segments, [n] int64, rising."""
        parts, begin = [], 0
        for segment in segments:
            own = self.units(segment)
            parts.append(torch.arange(begin + own.start * segment.width, begin + own.stop * segment.width))
            begin += segment.size
        return torch.cat(parts)

    def cut(self, x: Matrix, segments: Sequence[Segment], dim: int = 0) -> Matrix:
        """This rank's part of a tensor or a matrix whose dimension ``dim`` consists of these segments.

        Args:
            x: [..., n, ...]; of a quantized matrix [..., N, K] the last two dimensions can be cut.
            segments: together n.
            dim: which is cut.

        Raises:
            ConfigError: the segments cannot be divided, or the groups of a quantized matrix do not end where its parts
                do.
        """
        if self.size == 1:
            return x
        assert sum(segment.size for segment in segments) == x.shape[dim]
        index = self.index(segments)
        if isinstance(x, Tensor):
            return x.index_select(dim, index.to(x.device))
        dim %= len(x.shape)
        return self._columns(x, index, segments) if dim == len(x.shape) - 1 else _rows(x, index, dim)

    def cut_tensor(self, x: Tensor, segments: Sequence[Segment], dim: int = 0) -> Tensor:
        """As ``cut``, of a tensor."""
        return x if self.size == 1 else x.index_select(dim, self.index(segments).to(x.device))

    def _columns(self, x: QuantizedMatrix, index: Tensor, segments: Sequence[Segment]) -> QuantizedMatrix:
        codes = x.codes.index_select(-1, index.to(x.device))
        if x.scale.shape[-1] == 1:  # one group, a whole row
            return replace(x, codes=codes, group=max(1, len(index)))
        begin, end = int(index[0]), int(index[-1]) + 1
        is_run = end - begin == len(index)
        if not is_run or begin % x.group or (end % x.group and end != x.shape[-1]):
            raise ConfigError(
                f"--tp-size {self.size}: a matrix is stored with a scale for every {x.group} inputs, and the "
                f"{segments[0].units} {segments[0].name} cannot be divided at such borders: choose fewer ranks, or "
                "--quantization none"
            )
        groups = slice(begin // x.group, -(-end // x.group))
        minimum = None if x.minimum is None else x.minimum[..., groups]
        return replace(x, codes=codes, scale=x.scale[..., groups], minimum=minimum)


def _fitting(segment: Segment) -> str:
    """The numbers of ranks that a segment can be divided among."""
    if segment.division == "uneven":
        return f"{segment.units} at the most"
    return f"a number that divides {segment.units}{', or a multiple' if segment.division == 'repeated' else ''}"


def _rows(x: QuantizedMatrix, index: Tensor, dim: int) -> QuantizedMatrix:
    index = index.to(x.device)
    parts = {name: getattr(x, name) for name in ("codes", "scale", "minimum")}
    return replace(x, **{name: part.index_select(dim, index) for name, part in parts.items() if part is not None})
