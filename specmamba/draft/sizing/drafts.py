"""Drafts whose size is decided between draft and verify, for steps that are not captured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from specmamba.core import Batch, DraftTree, Packing, TreeShape, Verdict
from specmamba.draft.candidates import Candidates
from specmamba.draft.drafter import Drafter, chain_shape, root_tree, tree_shape
from specmamba.draft.sizing.sizer import DraftSizer
from specmamba.draft.sizing.trees import HostTrees


class SizedDrafts:
    """A drafter's candidates, cut to trees of the size that a sizer chooses."""

    def __init__(self, drafter: Drafter, sizer: DraftSizer, depth: int) -> None:
        """Draft down to ``depth``; the sizer has planned the step."""
        self._drafter, self._sizer, self._depth = drafter, sizer, depth

    def propose(self, batch: Batch) -> DraftTree:
        """Return the chosen trees."""
        candidates = self._drafter.offer(batch, self._depth)
        trees = self._sizer.choose(*on_host(candidates, batch.size), candidates.depths, candidates.ranks)
        return tree_of(candidates, trees, batch)

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


def tree_of(candidates: Candidates, trees: HostTrees, batch: Batch) -> DraftTree:
    """Put chosen trees on the device."""
    device = batch.root_tokens.device
    size, width = trees.tokens.shape
    if width == 1:
        return root_tree(batch)
    tokens = torch.from_numpy(trees.tokens).to(device)
    tokens[:, 0] = batch.root_tokens
    parents = torch.from_numpy(trees.parents).to(device)
    shape = _shape(trees, parents, size, width, device)
    probs = candidates.draft_probs
    if probs is not None:
        assert candidates.entries is not None
        entries = candidates.entries.gather(1, torch.from_numpy(trees.candidates).to(device))
        probs = probs[torch.arange(size, device=device)[:, None], entries]
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
