"""Drafts from a text that the client expects, in place of the drafter's: for answers that repeat most of a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specmamba.core import Batch, DraftTree, Verdict
from specmamba.draft.drafter import chain_shape, tree_shape
from specmamba.verify.step import Drafts

FIRST_DRAFT = 4  # tokens of the first draft: an answer often begins as its prediction does
MIN_WINDOW, MAX_WINDOW = 2, 12  # tokens that must agree to find the place again, and that are compared
MAX_CANDIDATES = 1024  # places that are compared: long repetitions must not hold up the other requests of a batch


class PredictedText:
    """The expected text of one answer, and the place in it that the answer has reached.

    A draft is no longer than the run of tokens that have agreed so far, so a text that is no prediction of the answer
    costs little: no more drafts are refused than tokens agreed before, and a few at the beginning. Where the answer
    parts from the text, the place is lost until its last tokens stand in the text: the longest match is taken, and of
    equal ones the first behind the lost place.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = np.array(tokens, dtype=np.int64)
        self._place: int | None = 0  # of the token that comes next; None: lost
        self._lost_at = 0
        self._run = FIRST_DRAFT  # tokens that agree, up to the place
        self._num_read = 0  # tokens of the answer

    def drafts(self, answer: Sequence[int], most: int) -> list[int]:
        """Return up to ``most`` tokens that are expected behind an answer, which goes on from that of the last call."""
        self._follow(answer[self._num_read :])
        self._num_read = len(answer)
        if self._place is None:
            self._find(np.array(answer[-MAX_WINDOW:], dtype=np.int64))
        if self._place is None or most < 1:
            return []
        found: list[int] = self._tokens[self._place : self._place + min(most, self._run)].tolist()
        return found

    def _follow(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if self._place is None:
                return
            if self._place < len(self._tokens) and self._tokens[self._place] == token:
                self._place += 1
                self._run += 1
            else:
                self._lost_at, self._place = self._place, None

    def _find(self, last: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        """Find the place behind the longest match of the answer's ``last`` tokens."""
        ends = np.flatnonzero(self._tokens[:-1] == last[-1])  # a match at the end has nothing behind it
        if len(ends) > MAX_CANDIDATES:
            first = np.searchsorted(ends, self._lost_at - 1)
            behind = ends[first : first + MAX_CANDIDATES]
            ends = np.concatenate([ends[: min(MAX_CANDIDATES - len(behind), first)], behind])
        lengths = np.ones(len(ends), np.int64)
        agrees = np.ones(len(ends), bool)
        for back in range(1, len(last)):
            agrees &= ends >= back
            agrees &= self._tokens[ends - back] == last[-1 - back]
            if not agrees.any():
                break
            lengths += agrees
        if not len(ends) or (longest := int(lengths.max())) < MIN_WINDOW:
            return
        places = ends[lengths == longest] + 1
        behind = places[places >= self._lost_at]
        self._place, self._run = int(behind[0] if len(behind) else places[0]), longest


@dataclass(frozen=True, slots=True)
class PredictedDrafts:
    """A step's drafts, with chains of predicted tokens in place of the trees of some requests."""

    drafts: Drafts
    chains: Sequence[Sequence[int]]  # of each request; empty: it keeps its tree

    def propose(self, batch: Batch) -> DraftTree:
        """Return the trees."""
        return _with_chains(self.drafts.propose(batch), self.chains)

    def observe(self, batch: Batch, verdict: Verdict, features: torch.Tensor) -> None:
        """Pass the verdict to the drafter."""
        self.drafts.observe(batch, verdict, features)


def _with_chains(tree: DraftTree, chains: Sequence[Sequence[int]]) -> DraftTree:
    """Replace trees of a batch by chains; a row of which the chain is empty keeps its tree.

    Chains are not drawn: their rows must be decided under ``target``, which uses no distributions of drafts.
    """
    lengths = [1 + len(chain) for chain in chains]
    device, are_all = tree.tokens.device, min(lengths) > 1
    kept, num_nodes = tree.shape.num_nodes, max(lengths)
    if not are_all:
        num_nodes = max(num_nodes, kept)
    width = min(kept, num_nodes)
    tokens = tree.tokens.new_zeros(len(chains), num_nodes)
    parents = torch.full_like(tokens, -1)
    tokens[:, :width], parents[:, :width] = tree.tokens[:, :width], tree.shape.parents[:, :width]
    for row, chain in enumerate(chains):
        if chain:
            padding = num_nodes - 1 - len(chain)
            tokens[row, 1:] = torch.tensor([*chain, *[0] * padding], device=device)
            parents[row] = torch.tensor([*range(-1, len(chain)), *[-1] * padding], device=device)
    if are_all and min(lengths) == num_nodes:
        return DraftTree(tokens, chain_shape(len(chains), num_nodes, device))
    probs = None if are_all else tree.draft_probs
    if probs is not None and num_nodes > probs.shape[1]:  # the added nodes have no drawn children
        probs = torch.cat([probs, probs[:, -1:].expand(-1, num_nodes - probs.shape[1], -1)], 1)
    return DraftTree(tokens, tree_shape(parents, 1 if are_all else tree.shape.max_children), probs)
