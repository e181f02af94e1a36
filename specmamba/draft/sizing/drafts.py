"""Drafts whose size is decided between draft and verify, for steps that are not captured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from specmamba.core import Batch, DraftTree, Packing, TreeShape, Verdict
from specmamba.draft.candidates import Candidates
from specmamba.draft.drafter import Drafter, chain_shape, root_tree, tree_shape
from specmamba.draft.sizing.sizer import DraftSize, DraftSizer
from specmamba.draft.sizing.trees import HostTrees


class SizedDrafts:
    """A drafter's candidates, cut to trees of the size that a sizer chooses."""

    def __init__(self, drafter: Drafter, sizer: DraftSizer, size: DraftSize, drafted: Batch) -> None:
        """Draft what the sizer has planned, for the requests of the batch ``drafted``."""
        self._drafter, self._sizer, self._size, self._drafted = drafter, sizer, size, drafted

    def propose(self, batch: Batch) -> DraftTree:
        """Return the chosen trees."""
        candidates = self._drafter.offer(self._drafted, self._size.depth)
        trees = self._sizer.choose(*on_host(candidates, self._drafted.size), candidates.depths, candidates.ranks)
        return tree_of(candidates, trees, batch, self._size)

    def propose_nothing(self, batch: Batch) -> DraftTree:
        """Return the roots alone; the drafter's own state follows the text."""
        return self._drafter.propose_nothing(batch)

    def observe(self, batch: Batch, verdict: Verdict, features: Tensor) -> None:
        """Pass the verdict to the drafter."""
        self._drafter.observe(batch, verdict, features)


def on_host(candidates: Candidates, num_rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return tokens, parents and log probabilities of the first rows, [B, C] each."""
    columns = candidates.tokens, candidates.parents, candidates.logp
    tokens, parents, logp = (x[:num_rows].cpu().numpy() for x in columns)
    return tokens, parents, logp


def tree_of(candidates: Candidates, trees: HostTrees, batch: Batch, size: DraftSize) -> DraftTree:
    """Put chosen trees on the device."""
    device = batch.root_tokens.device
    num_rows, width = trees.tokens.shape
    if width == 1:
        return root_tree(batch)
    tokens = torch.from_numpy(trees.tokens.copy()).to(device)
    tokens[:, 0] = batch.root_tokens
    parents = torch.from_numpy(trees.parents.copy()).to(device)
    shape = _shape(trees, parents, num_rows, width, device)
    probs = candidates.draft_probs
    if probs is not None:
        assert candidates.entries is not None
        places = np.arange(num_rows) if size.drafted is None else np.maximum(np.cumsum(size.drafted) - 1, 0)
        rows = torch.from_numpy(places).to(device)[:, None]
        entries = candidates.entries[rows, torch.from_numpy(trees.candidates).to(device)]
        probs = probs[rows, entries]
    return DraftTree(tokens, shape, probs)


def _shape(trees: HostTrees, parents: Tensor, size: int, width: int, device: torch.device) -> TreeShape:
    is_chain, is_ragged = trees.is_chain, trees.num_nodes < size * width
    if is_chain and not is_ragged:
        return chain_shape(size, width, device)
    shape = tree_shape(parents, 1 if is_chain else width - 1)
    if not is_ragged:
        return shape
    packing = Packing(*(torch.from_numpy(x).to(device) for x in trees.packing(trees.num_nodes)))
    return replace(shape, packing=packing)
