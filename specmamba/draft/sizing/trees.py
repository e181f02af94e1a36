"""Ragged trees of chosen candidates, as numbers of the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specmamba.draft.candidates import Bools, Ints


@dataclass(frozen=True, slots=True)
class HostTrees:
    """The trees of a batch. A row's nodes come first; the rest of its N columns is padding."""

    tokens: Ints  # [B, N]; those of the roots are not set
    parents: Ints  # [B, N]; -1 for roots and padding
    candidates: Ints  # [B, N], 1 + the candidate of each node; 0 for roots and padding
    counts: Ints  # [B], nodes of each row

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


def trees_of(tokens: Ints, parents: Ints, kept: Bools, num_nodes: int) -> HostTrees:
    """Make the trees of the candidates that are kept.

    Args:
        tokens, parents: [B, C], as in ``Candidates``.
        kept: [B, C]; a candidate's parent is kept too.
        num_nodes: N, at least one more than any row keeps.
    """
    numbers = np.cumsum(kept, 1)
    row, candidate = np.nonzero(kept)
    node = numbers[row, candidate]
    size = len(kept)
    of_tokens, of_parents = np.zeros((size, num_nodes), np.int64), np.full((size, num_nodes), -1, np.int64)
    of_candidates = np.zeros((size, num_nodes), np.int64)
    padded = np.concatenate([np.zeros((size, 1), np.int64), numbers], 1)
    of_tokens[row, node] = tokens[row, candidate]
    of_parents[row, node] = padded[row, parents[row, candidate]]
    of_candidates[row, node] = candidate + 1
    return HostTrees(of_tokens, of_parents, of_candidates, numbers[:, -1] + 1)
