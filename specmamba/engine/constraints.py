"""Draft trees restricted by their requests: grammars prune trees before the verify, some requests forbid drafts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from specmamba.core import Batch, DraftTree, Verdict
from specmamba.draft.drafter import Drafter, chain_shape, tree_shape
from specmamba.engine.request import Request
from specmamba.errors import GrammarError

MASK_SECONDS = 0.02  # for the masks of all drafts of a step; the roots' masks are always made
LEAST_SECONDS = 1e-4


class ConstrainedDrafts:
    """A drafter's trees without the nodes that requests refuse, with the tokens that may follow each remaining node."""

    def __init__(self, drafter: Drafter, requests: Sequence[Request]) -> None:
        """Restrict the trees of ``drafter`` for the requests of a batch, given in its order."""
        self._drafter, self._requests = drafter, requests
        self.errors: dict[int, str] = {}  # of requests that cannot continue, by index in the batch

    def propose(self, batch: Batch) -> DraftTree:
        """The drafter's trees, pruned; the roots alone where no request wants drafts."""
        wants_drafts = any(request.params.speculative for request in self._requests)
        tree = self._drafter.propose(batch) if wants_drafts else self._drafter.propose_nothing(batch)
        tree, self.errors = restrict(self._requests, tree)
        return tree

    def observe(self, batch: Batch, verdict: Verdict, features: torch.Tensor) -> None:
        """Pass the verdict to the drafter."""
        self._drafter.observe(batch, verdict, features)


@dataclass(frozen=True, slots=True)
class _Row:
    """The nodes of a row that are kept, in rising order, and the tokens that may follow each, [n, words] int32."""

    nodes: list[int]
    parents: list[int]
    bits: NDArray[np.int32] | None = None


def restrict(requests: Sequence[Request], tree: DraftTree) -> tuple[DraftTree, dict[int, str]]:
    """Remove the nodes that requests refuse from their trees, and set the tokens that may follow the others.

    Trees whose tokens were drawn keep refused nodes: the rule of acceptance needs the order in which a node's children
    were drawn, and a token that is not allowed has probability 0, so it is never accepted. For the same reason the time
    that masks of drawn tokens take now must not decide whether they are made; the last step's time per node decides.

    Returns:
        The trees, and the errors of requests that cannot continue, by index in the batch.
    """
    tokens, parents = tree.tokens.tolist(), tree.shape.parents.tolist()
    rows, errors = [], {}
    end = time.perf_counter() + MASK_SECONDS
    for place, request in enumerate(requests):
        seconds = max(end - time.perf_counter(), LEAST_SECONDS) / (len(requests) - place)
        try:
            rows.append(_row(request, tokens[place], parents[place], tree.draft_probs is not None, seconds))
        except GrammarError as error:
            rows.append(_Row([0], [-1]))
            errors[place] = str(error)
    return _keep(tree, rows), errors


def _row(request: Request, tokens: Sequence[int], parents: Sequence[int], is_drawn: bool, seconds: float) -> _Row:
    real = [node for node, parent in enumerate(parents) if parent >= 0 or node == 0]
    matcher = request.matcher
    is_slow = is_drawn and matcher is not None and matcher.seconds_per_node * len(real) > seconds
    if is_slow or not request.params.speculative:
        real = real[:1]
    if matcher is None:
        return _Row(real, _renumbered(real, parents))
    limit = None if is_drawn else seconds
    mask = matcher.mask([tokens[node] for node in real], _renumbered(real, parents), limit)
    if is_drawn:
        return _Row(real, _renumbered(real, parents), mask.bits)
    kept = [node for node, allowed in zip(real, mask.is_allowed.tolist(), strict=True) if allowed]
    return _Row(kept, _renumbered(kept, parents), mask.bits[mask.is_allowed])


def _renumbered(nodes: Sequence[int], parents: Sequence[int]) -> list[int]:
    """Return the parents of these nodes as indices into ``nodes``."""
    place = {node: i for i, node in enumerate(nodes)}
    return [place.get(parents[node], -1) for node in nodes]


def _keep(tree: DraftTree, rows: Sequence[_Row]) -> DraftTree:
    size, num_nodes = len(rows), max(len(row.nodes) for row in rows)
    allowed = _allowed_tokens(rows, num_nodes, tree.tokens.device)
    if all(len(row.nodes) == tree.shape.num_nodes for row in rows):
        return DraftTree(tree.tokens, tree.shape, tree.draft_probs, allowed)
    device = tree.tokens.device
    index = torch.tensor([row.nodes + [0] * (num_nodes - len(row.nodes)) for row in rows], device=device)
    chain = list(range(-1, num_nodes - 1))
    if all(row.parents == chain for row in rows):
        shape = chain_shape(size, num_nodes, device)
    else:
        padded = [row.parents + [-1] * (num_nodes - len(row.parents)) for row in rows]
        shape = tree_shape(torch.tensor(padded, device=device), tree.shape.max_children)
    probs = tree.draft_probs
    if probs is not None:
        probs = probs[torch.arange(size, device=device)[:, None], index]
    return DraftTree(tree.tokens.gather(1, index), shape, probs, allowed)


def _allowed_tokens(rows: Sequence[_Row], num_nodes: int, device: torch.device) -> torch.Tensor | None:
    """Return [B, N, words] int32, a bit per token; None: every token may follow every node."""
    words = next((row.bits.shape[1] for row in rows if row.bits is not None), None)
    if words is None:
        return None
    bits = np.full((len(rows), num_nodes, words), -1, dtype=np.int32)
    for place, row in enumerate(rows):
        if row.bits is not None:
            bits[place, : len(row.bits)] = row.bits
    return torch.from_numpy(bits).to(device)
