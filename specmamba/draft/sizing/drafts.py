"""Drafts whose size is decided between draft and verify."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specmamba.core import Batch, DraftTree, Packing, TreeShape, Verdict
from specmamba.draft.candidates import Candidates
from specmamba.draft.drafter import DrafterInStep, chain_shape, root_tree, tree_shape
from specmamba.draft.sizing.rounds import DraftSize
from specmamba.draft.sizing.sizer import DraftSizer
from specmamba.kernels import draft_sizing
from specmamba.kernels.draft_sizing import Chosen, Ints, TreeArrays


@dataclass(frozen=True, slots=True)
class SizedDrafts(DrafterInStep):
    """A drafter's candidates, cut to trees of the size that a sizer chooses."""

    sizer: DraftSizer
    size: DraftSize  # that the sizer has planned
    offer: Callable[[], Candidates]  # for requests that are drafted for, and perhaps for padding

    def propose(self, batch: Batch) -> DraftTree:
        """Return the chosen trees."""
        candidates = self.offer()
        chosen = self.sizer.choose(candidates, batch.size)
        return tree_of(candidates, self.sizer.trees, chosen, batch, self.size)


@dataclass(frozen=True, slots=True)
class DraftsInStep(DrafterInStep):
    """Drafts of a captured step that chooses its trees itself and learns from them, without the host in its middle."""

    sizer: DraftSizer
    depth: int
    key: Hashable  # of the step
    read: Callable[[Candidates], DraftTree]  # the chosen trees, or chains

    def propose(self, batch: Batch) -> DraftTree:
        """Return the chosen trees."""
        candidates = self.drafter.offer(batch, self.depth)
        self.sizer.choose(candidates, batch.size, self.key)
        return self.read(candidates)

    def observe(self, batch: Batch, verdict: Verdict, features: Tensor) -> None:
        """Pass the verdict to the drafter and to the sizer."""
        self.drafter.observe(batch, verdict, features)
        self.sizer.learn_in_step(self.key, verdict.path.numpy(), verdict.num_accepted.numpy())


def first_chains(candidates: Candidates, batch: Batch, depth: int) -> DraftTree:
    """The chains of first children among the candidates of a comb: ``topk`` children of each node of the chain."""
    topk = candidates.tokens.shape[1] // depth
    tokens = torch.cat([batch.root_tokens[:, None], candidates.tokens[:, ::topk]], 1)
    probs = candidates.draft_probs
    if probs is not None:  # the last node has no children, its row is not used
        probs = torch.cat([probs, probs[:, -1:]], 1)
    return DraftTree(tokens, chain_shape(batch.size, depth + 1, tokens.device), probs)


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
