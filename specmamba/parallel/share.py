"""Which part of a matrix a rank has: whole heads, groups or channels, named, so that a refusal can name them.

A matrix of a layer is assembled of segments side by side: q | k | v | gate, z | x | B | C | dt, gate | up. A cut at the
middle of it would give one rank all queries and the other all keys, so every segment is cut by itself, at the borders
of its units. The layout is that of Megatron-LM (arXiv 1909.08053, section 3), with heads of both kinds of layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
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

    def part(self, segments: Sequence[Segment], dim: int = 0, order: Tensor | None = None) -> Part | None:
        """The part that this rank has of a tensor whose dimension ``dim`` consists of these segments; None: all of it.

        Args:
            segments: together all of the dimension, in the order that the model wants.
            dim: counted from the end or from the front.
            order: [n] int64, where each place of the segments is stored; None: there.

        Raises:
            ConfigError: the segments cannot be divided.
        """
        if self.size == 1:
            return None if order is None else Part(dim, order)
        index = self.index(segments)
        return Part(dim, index if order is None else order[index], segments[0], self.size)

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
        part = self.part(segments, dim)
        assert part is None or sum(segment.size for segment in segments) == x.shape[dim]
        return x if part is None else part.of(x)

    def cut_tensor(self, x: Tensor, segments: Sequence[Segment], dim: int = 0) -> Tensor:
        """As ``cut``, of a tensor."""
        part = self.part(segments, dim)
        return x if part is None else part.of_tensor(x)


@dataclass(frozen=True, slots=True)
class Part:
    """Some places of one dimension of a tensor, in any order: what a rank has of it."""

    dim: int
    index: Tensor  # [n] int64, on the CPU
    segment: Segment | None = None  # the first one, for messages
    num_ranks: int = 1

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """The shape of the part of a tensor with this one."""
        dim = self.dim % len(whole)
        return (*whole[:dim], len(self.index), *whole[dim + 1 :])

    def runs(self) -> list[tuple[int, int]]:
        """The places as runs that follow each other: where each begins, and how many places it has."""
        if not len(self.index):
            return []
        breaks = (self.index.diff() != 1).nonzero().flatten() + 1
        bounds = [0, *breaks.tolist(), len(self.index)]
        return [(int(self.index[at]), end - at) for at, end in pairwise(bounds)]

    def is_of_columns(self, x: Matrix) -> bool:
        """Whether the last dimension is cut."""
        return self.dim % len(x.shape) == len(x.shape) - 1

    def of(self, x: Matrix) -> Matrix:
        """Copy the part out of a whole tensor or matrix.

        Raises:
            ConfigError: the groups of a quantized matrix do not end where its part does.
        """
        if isinstance(x, Tensor):
            return self.of_tensor(x)
        return self.with_codes(x, self.of_tensor(x.codes))

    def of_tensor(self, x: Tensor) -> Tensor:
        """As ``of``, of a tensor."""
        return x.index_select(self.dim, self.index.to(x.device))

    def with_codes(self, x: QuantizedMatrix, codes: Tensor) -> QuantizedMatrix:
        """The part of a matrix whose ``codes`` are cut already. Raises as ``of``."""
        if not self.is_of_columns(x):
            minimum = None if x.minimum is None else self.of_tensor(x.minimum)
            return replace(x, codes=codes, scale=self.of_tensor(x.scale), minimum=minimum)
        if x.scale.shape[-1] == 1:  # one group, a whole row
            return replace(x, codes=codes, group=max(1, len(self.index)))
        if not self.ends_with_groups(x):
            assert self.segment is not None
            raise ConfigError(
                f"--tp-size {self.num_ranks}: a matrix is stored with a scale for every {x.group} inputs, and the "
                f"{self.segment.units} {self.segment.name} cannot be divided at such borders: choose fewer ranks, or "
                "--quantization none"
            )
        begin, end = int(self.index[0]), int(self.index[-1]) + 1
        groups = slice(begin // x.group, -(-end // x.group))
        minimum = None if x.minimum is None else x.minimum[..., groups]
        return replace(x, codes=codes, scale=x.scale[..., groups], minimum=minimum)

    def ends_with_groups(self, x: QuantizedMatrix) -> bool:
        """Whether no group of inputs is divided, but for those that are a whole row."""
        if not self.is_of_columns(x) or x.scale.shape[-1] == 1:
            return True
        runs = self.runs()
        begin, end = runs[0][0], sum(runs[0])
        return len(runs) == 1 and begin % x.group == 0 and (end % x.group == 0 or end == x.shape[-1])


def _fitting(segment: Segment) -> str:
    """The numbers of ranks that a segment can be divided among."""
    if segment.division == "uneven":
        return f"{segment.units} at the most"
    return f"a number that divides {segment.units}{', or a multiple' if segment.division == 'repeated' else ''}"
