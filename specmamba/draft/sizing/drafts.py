"""Drafts whose size is decided between draft and verify, for steps that are not captured."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specmamba.core import Batch, DraftTree, Packing, TreeShape, Verdict
from specmamba.draft.candidates import Candidates
from specmamba.draft.drafter import Drafter, chain_shape, root_tree, tree_shape
from specmamba.draft.sizing.schedule import DraftSize
from specmamba.draft.sizing.sizer import DraftSizer
from specmamba.kernels import draft_sizing
from specmamba.kernels.draft_sizing import Chosen, Ints, TreeArrays


class SizedDrafts:
    """A drafter's candidates, cut to trees of the size that a sizer chooses."""

    def __init__(self, drafter: Drafter, sizer: DraftSizer, size: DraftSize, drafted: Batch) -> None:
        """Draft what the sizer has planned, for the requests of the batch ``drafted``."""
        self._drafter, self._sizer, self._size, self._drafted = drafter, sizer, size, drafted

    def propose(self, batch: Batch) -> DraftTree:
        """Return the chosen trees."""
        candidates = self._drafter.offer(self._drafted, self._size.depth)
        chosen = self._sizer.choose(candidates, batch.size)
        return tree_of(candidates, self._sizer.trees, chosen, batch, self._size)

    def propose_nothing(self, batch: Batch) -> DraftTree:
        """Return the roots alone; the drafter's own state follows the text."""
        return self._drafter.propose_nothing(batch)

    def observe(self, batch: Batch, verdict: Verdict, features: Tensor) -> None:
        """Pass the verdict to the drafter."""
        self._drafter.observe(batch, verdict, features)


@dataclass(frozen=True, slots=True)
class DraftsInStep:
    """Drafts of a captured step that chooses its trees itself, without the host between draft and verify."""

    drafter: Drafter
    sizer: DraftSizer
    depth: int
    key: Hashable  # of the step
    read: Callable[[Candidates], DraftTree]  # the chosen trees

    def propose(self, batch: Batch) -> DraftTree:
        """Return the chosen trees."""
        candidates = self.drafter.offer(batch, self.depth)
        self.sizer.choose(candidates, batch.size, self.key)
        return self.read(candidates)

    def observe(self, batch: Batch, verdict: Verdict, features: Tensor) -> None:
        """Pass the verdict to the drafter."""
        self.drafter.observe(batch, verdict, features)


def tree_of(candidates: Candidates, arrays: TreeArrays, chosen: Chosen, batch: Batch, size: DraftSize) -> DraftTree:
    """Put chosen trees on the device."""
    device, num_rows, width = batch.root_tokens.device, batch.size, chosen.width
    if width == 1:
        return root_tree(batch)

    def put(x: Ints) -> Tensor:
        return torch.from_numpy(x.copy()).to(device)

    tokens = put(arrays.tokens[:num_rows, :width])
    tokens[:, 0] = batch.root_tokens
    shape = _shape(arrays, chosen, num_rows, put)
    probs = candidates.draft_probs
    if probs is not None:
        assert candidates.entries is not None
        rows = put(size.places(num_rows))[:, None]
        probs = probs[rows, candidates.entries[rows, put(arrays.candidates[:num_rows, :width])]]
    return DraftTree(tokens, shape, probs)


def _shape(arrays: TreeArrays, chosen: Chosen, num_rows: int, put: Callable[[Ints], Tensor]) -> TreeShape:
    parents, width, total = put(arrays.parents[:num_rows, : chosen.width]), chosen.width, chosen.num_nodes
    is_ragged = total < num_rows * width
    if chosen.is_chain and not is_ragged:
        return chain_shape(num_rows, width, parents.device)
    shape = tree_shape(parents, 1 if chosen.is_chain else width - 1)
    if not is_ragged:
        return shape
    draft_sizing.pack(arrays, num_rows, width, total)
    places, nodes = arrays.places[:total], arrays.nodes[: num_rows * width]
    packing = Packing(*map(put, (places, nodes, arrays.firsts[:num_rows], arrays.num_nodes[:num_rows])))
    return replace(shape, packing=packing)
