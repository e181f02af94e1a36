"""What requests refuse of drafts: a grammar prunes its tree before the verify, and a request may want no drafts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from specmamba.core import Batch, DraftTree
from specmamba.draft.drafter import chain_shape, tree_shape
from specmamba.engine.request import Request
from specmamba.errors import GrammarError


class Restricted(NamedTuple):
    """A batch and its trees as far as its requests allow them, and what went wrong, by place in the batch."""

    batch: Batch
    tree: DraftTree
    errors: dict[int, str]


MASK_SECONDS = 0.02  # for the masks of all drafts of a step; the roots have theirs, however long they take
LEAST_SECONDS = 1e-4


@dataclass(frozen=True, slots=True)
class _Row:
    """Which nodes of a row are kept, rising; and what may follow each of them, [n, words] int32."""

    nodes: list[int]
    parents: list[int]
    bits: NDArray[np.int32] | None = None


def restrict(requests: Sequence[Request], batch: Batch, tree: DraftTree) -> Restricted:
    """Take the nodes out of trees that requests refuse, and say what may follow the others.

    Trees whose tokens were drawn keep refused nodes: which of a node's children were drawn first matters to the rule
    that accepts them, and a token that must not follow has no probability to be accepted with. For the same reason what
    was drawn must not decide whether there is time to look at it; there it is the last step's time that does.
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
    kept = _keep(tree, rows)
    return Restricted(replace(batch, allowed=_allowed(rows, kept)), kept, errors)


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
    """Parents of these nodes as places among them."""
    place = {node: i for i, node in enumerate(nodes)}
    return [place.get(parents[node], -1) for node in nodes]


def _keep(tree: DraftTree, rows: Sequence[_Row]) -> DraftTree:
    size, num_nodes = len(rows), max(len(row.nodes) for row in rows)
    if all(len(row.nodes) == tree.shape.num_nodes for row in rows):
        return tree
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
    return DraftTree(tree.tokens.gather(1, index), shape, probs)


def _allowed(rows: Sequence[_Row], tree: DraftTree) -> torch.Tensor | None:
    """[B, N, words] int32; None: everything may follow everywhere."""
    words = next((row.bits.shape[1] for row in rows if row.bits is not None), None)
    if words is None:
        return None
    bits = np.full((len(rows), tree.shape.num_nodes, words), -1, dtype=np.int32)
    for place, row in enumerate(rows):
        if row.bits is not None:
            bits[place, : len(row.bits)] = row.bits
    return torch.from_numpy(bits).to(tree.tokens.device)
