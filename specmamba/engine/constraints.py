"""What requests refuse of drafts: a grammar prunes its tree before the verify, and a request may want no drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from specmamba.core import Batch, DraftTree
from specmamba.draft.base import chain_shape, tree_shape
from specmamba.engine.request import Request
from specmamba.errors import GrammarError


class Restricted(NamedTuple):
    """A batch and its trees as far as its requests allow them, and what went wrong, by place in the batch."""

    batch: Batch
    tree: DraftTree
    errors: dict[int, str]


@dataclass(frozen=True, slots=True)
class _Row:
    """Which nodes of a row are kept, rising; and what may follow each of them, [n, words] int32."""

    nodes: list[int]
    parents: list[int]
    bits: NDArray[np.int32] | None = None


def restrict(requests: Sequence[Request], batch: Batch, tree: DraftTree) -> Restricted:
    """Take the nodes out of trees that requests refuse, and say what may follow the others.

    Trees whose tokens were drawn keep refused nodes: which of a node's children were drawn first matters to the rule
    that accepts them, and a token that must not follow has no probability to be accepted with.
    """
    tokens, parents = tree.tokens.tolist(), tree.shape.parents.tolist()
    rows, errors = [], {}
    for place, request in enumerate(requests):
        try:
            rows.append(_row(request, tokens[place], parents[place], is_drawn=tree.draft_probs is not None))
        except GrammarError as error:
            rows.append(_Row([0], [-1]))
            errors[place] = str(error)
    kept = _keep(tree, rows)
    return Restricted(replace(batch, allowed=_allowed(rows, kept)), kept, errors)


def _row(request: Request, tokens: Sequence[int], parents: Sequence[int], is_drawn: bool) -> _Row:
    real = [node for node, parent in enumerate(parents) if parent >= 0 or node == 0]
    if not request.params.speculative:
        real = real[:1]
    kept, bits = real, None
    if request.matcher is not None:
        mask = request.matcher.mask([tokens[node] for node in real], _renumbered(real, parents), may_prune=not is_drawn)
        if not is_drawn:
            kept = [node for node, allowed in zip(real, mask.is_allowed.tolist(), strict=True) if allowed]
        bits = mask.bits if is_drawn else mask.bits[mask.is_allowed]
    return _Row(kept, _renumbered(kept, parents), bits)


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
