"""Ragged trees of chosen candidates, as numbers of the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specmamba.kernels.draft_sizing import Ints


@dataclass(frozen=True, slots=True)
class HostTrees:
    """The trees of a batch. A row's nodes come first; the rest of its N columns is padding."""

    tokens: Ints  # [B, N]; those of the roots are not set
    parents: Ints  # [B, N]; -1 for roots and padding
    candidates: Ints  # [B, N], 1 + the candidate of each node; 0 for roots and padding
    counts: Ints  # [B], nodes of each row
    # The arrays are those of the sizer, which the next step overwrites.

    @property
    def num_nodes(self) -> int:
        """T, of all rows."""
        return int(self.counts.sum())

    @property
    def is_chain(self) -> bool:
        """Whether every node is the child of the one before it."""
        numbers = np.arange(self.parents.shape[1])
        return bool(((self.parents == numbers - 1) | (numbers >= self.counts[:, None])).all())

    def padded(self, batch_size: int, width: int) -> HostTrees:
        """These trees with more columns, and rows of padding that have no node at all."""
        rows, columns = batch_size - len(self.counts), width - self.tokens.shape[1]
        grown = [np.pad(x, ((0, rows), (0, columns)), constant_values=fill) for x, fill in ((self.tokens, 0), (self.parents, -1), (self.candidates, 0))]
        return HostTrees(*grown, np.pad(self.counts, (0, rows)))

    def padded(self, batch_size: int, width: int) -> HostTrees:
        """These trees with more columns, and rows of padding that have no node at all."""
        grown = ((0, batch_size - len(self.counts)), (0, width - self.tokens.shape[1]))
        columns = (np.pad(self.tokens, grown), np.pad(self.parents, grown, constant_values=-1))
        return HostTrees(*columns, np.pad(self.candidates, grown), np.pad(self.counts, grown[0]))

    def packing(self, num_places: int) -> tuple[Ints, Ints, Ints, Ints]:
        """Return the tensors of ``Packing``, in their order; places after the last node repeat place 0.

        Args:
            num_places: of the packing, at least the number of nodes.
        """
        size, width = self.parents.shape
        first = np.cumsum(self.counts) - self.counts
        places = np.zeros(num_places, np.int64)
        number = np.arange(self.num_nodes)
        places[: len(number)] = number + np.repeat(np.arange(size) * width - first, self.counts)
        nodes = first[:, None] + np.minimum(np.arange(width), np.maximum(self.counts[:, None] - 1, 0))
        return places, np.minimum(nodes, num_places - 1).ravel(), first, self.counts
