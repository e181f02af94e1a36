"""Trees as inputs of captured steps: fixed buffers, for batches that are padded to a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specmamba.core import DraftTree, Packing
from specmamba.draft.candidates import Candidates
from specmamba.draft.drafter import chain_shape, tree_shape
from specmamba.engine.captured.step_kind import StepKind
from specmamba.kernels import draft_sizing
from specmamba.kernels.draft_sizing import Ints, TreeArrays

# of TreeArrays, that steps read
ARRAYS = "tokens", "parents", "candidates", "num_nodes", "places", "nodes", "firsts", "num_live"


class TreeInputs:
    """Trees that were drafted before a step, for batches that are padded to a bucket."""

    def __init__(self, num_rows: int, max_nodes: int, device: torch.device) -> None:
        """Allocate the buffers of ``num_rows`` rows."""
        self._device = device
        self.arrays = TreeArrays.empty(num_rows, max_nodes)  # of the host; on a CPU steps read what it writes
        given = [torch.from_numpy(getattr(self.arrays, name)) for name in ARRAYS]
        on_device = given if device.type == "cpu" else [x.to(device) for x in given]
        self._copies = [] if device.type == "cpu" else list(zip(on_device, given, strict=True))
        self.tokens, self.parents, self._candidates, *packed = on_device
        self.counts, self.places, self.nodes, self.firsts, self.num_live = packed
        self.entries = torch.zeros_like(self.tokens)  # the distribution after each node
        self._draft_probs: dict[int, Tensor] = {}  # [rows, E, V] float32, by E
        self._allowed: Tensor | None = None  # [rows, N, words] int32, bits; None: no step was masked yet

    def clear(self) -> None:
        """Make all nodes but the roots padding."""
        for x in (self.tokens, self.counts, self.places, self.nodes, self.firsts, self.num_live, self.entries):
            x.zero_()
        self.parents.fill_(-1)

    def write(self, tree: DraftTree, num_distributions: int = 0) -> None:
        """Write trees; nodes and rows that they lack become padding.

        ``num_distributions``: of a row, as ``write_distributions`` wrote them, one for each node from the root on.
        """
        size, num_nodes = tree.tokens.shape
        self.clear()
        self.tokens[:size, :num_nodes] = tree.tokens
        self.parents[:size, :num_nodes] = tree.shape.parents
        if num_distributions:
            entries = torch.arange(size * num_distributions, device=self._device).view(size, -1)
            self.entries[:size, :num_nodes] = entries[:, :num_nodes]

    def write_distributions(self, tree: DraftTree, num_distributions: int) -> None:
        """Write what a decision reads of trees besides their tokens; their rows may draw from so many distributions."""
        (size, num_nodes), probs, bits = tree.tokens.shape, tree.draft_probs, tree.allowed_tokens
        if probs is not None:
            self.draft_probs(size, num_distributions, probs.shape[2])[:, :num_nodes] = probs
        if bits is not None:
            if self._allowed is None:
                shape = *self.tokens.shape, bits.shape[2]
                self._allowed = torch.empty(shape, dtype=torch.int32, device=self._device)
            self._allowed.fill_(-1)
            self._allowed[:size, :num_nodes] = bits

    def write_chosen(self, kind: StepKind, entries: Ints | None) -> None:
        """Write the trees that ``arrays`` have, for a step of this kind.

        Args:
            kind: of the step; rows of the arrays behind its requests are padding.
            entries: [B, N], the distribution that each node's children were drawn from, numbered through all rows;
                None: nothing is drawn.
        """
        if entries is not None:
            self.entries[: len(entries), : entries.shape[1]] = torch.from_numpy(entries)
        if kind.num_packed:
            draft_sizing.pack(self.arrays, kind.batch_size, kind.num_nodes, kind.num_packed)
        for to, given in self._copies:
            to.copy_(given)

    def draft_probs(self, num_rows: int, num_distributions: int, vocab_size: int) -> Tensor:
        """Memory for the distributions that a draft leaves to a verify, [B, E, V] float32."""
        if num_distributions not in self._draft_probs:
            shape = self.tokens.shape[0], num_distributions, vocab_size
            self._draft_probs[num_distributions] = torch.zeros(shape, device=self._device)
        return self._draft_probs[num_distributions][:num_rows]

    def read_chosen(self, kind: StepKind, root_tokens: Tensor, candidates: Candidates) -> DraftTree:
        """Pack the trees that were just chosen from ``candidates``, in a step that runs on the CPU; see ``read``."""
        draft_sizing.pack(self.arrays, kind.batch_size, kind.num_nodes, kind.num_packed)
        tree, probs = self.read(kind, root_tokens), candidates.draft_probs
        if probs is None:
            return tree
        assert candidates.entries is not None
        entries = candidates.entries.gather(1, self._candidates[: kind.batch_size, : kind.num_nodes])
        entries = entries + torch.arange(kind.batch_size)[:, None] * probs.shape[1]
        return replace(tree, draft_probs=_of_nodes(probs, entries))

    def read(self, kind: StepKind, root_tokens: Tensor) -> DraftTree:
        """The trees of a step of this kind, on ``root_tokens`` [B]."""
        size, num_nodes = kind.batch_size, kind.num_nodes
        tokens = self.tokens[:size, :num_nodes].clone()
        tokens[:, 0] = root_tokens
        parents = self.parents[:size, :num_nodes]
        packing = None
        if kind.num_packed:
            of_nodes = self.places[: kind.num_packed], self.nodes[: size * num_nodes]
            packing = Packing(*of_nodes, self.firsts[:size], self.counts[:size], self.num_live)
        if kind.is_chain:
            shape = replace(chain_shape(size, num_nodes, tokens.device), parents=parents, packing=packing)
        else:
            shape = replace(tree_shape(parents, kind.max_children), packing=packing)
        return DraftTree(tokens, shape)

    def complete(self, kind: StepKind, tree: DraftTree) -> DraftTree:
        """A tree of such a step with what only its decision reads: the distributions of drafts, and allowed tokens."""
        size, num_nodes = kind.batch_size, kind.num_nodes
        if kind.num_distributions:
            probs = self._draft_probs[kind.num_distributions]
            tree = replace(tree, draft_probs=_of_nodes(probs, self.entries[:size, :num_nodes]))
        if kind.is_masked:
            assert self._allowed is not None
            tree = replace(tree, allowed_tokens=self._allowed[:size, :num_nodes])
        return tree


def _of_nodes(probs: Tensor, entries: Tensor) -> Tensor:
    """Distributions [B, N, V] of nodes: those of ``probs`` [rows, E, V] at ``entries`` [B, N], over all rows."""
    return probs.flatten(0, 1).index_select(0, entries.reshape(-1)).view(*entries.shape, -1)


class PackedInputs:
    """The packing of rows with different numbers of tokens, in memory that captured steps of a CPU read."""

    def __init__(self, num_rows: int, width: int) -> None:
        """``width``: tokens of a row at the most."""
        self._arrays = TreeArrays.empty(num_rows, width)
        columns = (getattr(self._arrays, name) for name in ("places", "nodes", "firsts", "num_nodes", "num_live"))
        self._places, self._nodes, self._firsts, self._counts, self._num_live = map(torch.from_numpy, columns)

    def clear(self) -> None:
        """Make every row padding."""
        for x in (self._places, self._nodes, self._firsts, self._counts, self._num_live):
            x.zero_()

    def write(self, counts: Sequence[int], num_rows: int, width: int) -> None:
        """Pack so many tokens of each of ``num_rows`` rows, in a layout of ``width`` tokens a row; others have none."""
        self._arrays.num_nodes[: len(counts)] = counts
        self._arrays.num_nodes[len(counts) : num_rows] = 0
        draft_sizing.pack(self._arrays, num_rows, width, num_rows * width)

    def read(self, num_rows: int, width: int) -> Packing:
        """The packing of the first rows, in such a layout."""
        size = num_rows * width
        return Packing(
            self._places[:size], self._nodes[:size], self._firsts[:num_rows], self._counts[:num_rows], self._num_live
        )
