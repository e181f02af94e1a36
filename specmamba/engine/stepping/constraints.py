"""Draft trees restricted by their requests: grammars prune trees before the verify, some requests forbid drafts.

Masks are made on other threads (``GrammarFollower``). A step waits for them for a short time; then it goes on without
the requests whose masks are not there, which take part in a later step.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from specmamba.core import Batch, DraftTree, Verdict
from specmamba.draft.drafter import chain_shape, tree_shape
from specmamba.engine.request import Request
from specmamba.errors import RequestError
from specmamba.grammar import CompiledGrammar, GrammarFollower, GrammarMatcher, MaskMaker
from specmamba.grammar.follower import WaitShares
from specmamba.grammar.mask_maker import QUICK_SECONDS, MaskJob
from specmamba.grammar.matcher import SLOW_SECONDS, scale_of, too_complex
from specmamba.sampling_params import GrammarSpec, SamplingParams
from specmamba.verify.step import Drafts

ROOT_SECONDS, TREE_SECONDS = 0.015, 0.02  # that a step waits for the masks of roots, and of trees
NODES_SHARE = 0.75  # of the time for trees, for their nodes; the rest is for handing over
MAX_TREE_SECONDS = 0.8 * QUICK_SECONDS  # for the nodes of one tree, so that its job stays a quick one
MAX_DRAWN_SECONDS = 2.0  # that a step waits for trees whose tokens were drawn


class Constraints:
    """The grammars of an engine's requests: which requests have their masks, and how long a step may wait for them."""

    def __init__(self, vocab_size: int) -> None:
        self._maker, self._vocab_size = MaskMaker(), vocab_size
        self._shares = WaitShares()
        self._is_shared = False  # whether waits in this step delay others than the one owner of all its requests
        self._max_drawn = SLOW_SECONDS * scale_of(vocab_size)  # of processor time

    def follower(
        self, params: SamplingParams, grammar: CompiledGrammar | None, owner: str | None
    ) -> GrammarFollower | None:
        """Return what follows the output of a new request through its grammar; None: it has no grammar.

        Args:
            params: of the request.
            grammar: ``params.grammar``, compiled.
            owner: the caller that is charged for the time of slow masks.

        Raises:
            RequestError: ``grammar`` is not the compiled ``params.grammar``, or end-of-text is ignored, which ends it.
        """
        if params.grammar is None:
            return None
        if params.ignore_eos:
            message = "a grammar ends with the end-of-text token: drop ignore_eos, or the grammar"
            raise RequestError(message, "ignore_eos")
        if grammar is None or grammar.spec != params.grammar:
            raise RequestError("the grammar of this request has not been compiled", "grammar")
        return GrammarFollower(GrammarMatcher(grammar, self._vocab_size), self._maker, owner)

    def ready(self, requests: Sequence[Request], is_idle: bool) -> list[Request]:
        """Begin a step: return the requests that can be verified now, and those whose grammars have failed.

        Waits for masks that are usually quick, unless steps have waited for those of their owner too long; for others
        only where the step would have nothing to do (``is_idle`` says that it has had nothing so far), so that the
        caller can call again at once.
        """
        followers = [request.follower for request in requests if request.follower is not None]
        if not followers:
            return list(requests)
        end = time.monotonic() + ROOT_SECONDS
        is_idle = is_idle and len(followers) == len(requests)
        self._is_shared = not is_idle or len({follower.owner for follower in followers}) > 1
        for follower in followers:
            follower.is_spent = self._is_shared and self._shares.is_spent(follower.owner, end - ROOT_SECONDS)
            follower.start()
        self._settle(followers, [follower for follower in followers if follower.is_awaited], end)
        if is_idle and not any(follower.is_settled for follower in followers):
            self._settle(followers, followers, end, even_blocked=True)
        for follower in followers:
            follower.note_late()
        return [request for request in requests if request.follower is None or request.follower.is_settled]

    def agree_on_errors(self, batch: Sequence[Request]) -> None:
        """Agree with other ranks on the requests of a step that cannot go on; without any there is nothing to do."""

    def can_begin(self, follower: GrammarFollower) -> bool:
        """Whether the mask of a drawn tree can be begun at once, or after a quick one."""
        return self._maker.has_room(follower.owner)

    def wait(self, followers: Collection[GrammarFollower], is_drawn: bool) -> None:
        """Wait for the masks of trees; a request whose drawn tree takes too long fails, if it was begun."""
        jobs, start = [follower.job for follower in followers if follower.job is not None], time.monotonic()
        if not is_drawn:
            self._maker.wait(jobs, TREE_SECONDS)
            self._charge(jobs, start)
            return
        self._maker.wait(jobs, MAX_DRAWN_SECONDS, self._max_drawn)
        self._charge(jobs, start)
        for follower in followers:
            if follower.job is not None and not follower.job.is_done and not follower.leave_tree():
                follower.error = too_complex()

    def distrust(self, grammar: GrammarSpec | None, requests: Collection[Request]) -> None:
        """End requests with a grammar that was too slow at their next slow mask."""
        for request in requests:
            if request.follower is not None and request.params.grammar == grammar:
                request.follower.distrust()

    def close(self) -> None:
        """End the threads that make masks, without waiting for native calls."""
        self._maker.close()

    def _settle(
        self,
        followers: Collection[GrammarFollower],
        awaited: Collection[GrammarFollower],
        end: float,
        even_blocked: bool = False,
    ) -> None:
        for follower in followers:
            follower.settle()
        jobs, start = [follower.job for follower in awaited if follower.job is not None], time.monotonic()
        self._maker.wait(jobs, end - start, even_blocked=even_blocked)
        if not even_blocked:  # else the step has nothing else to do
            self._charge(jobs, start)
        for follower in followers:
            follower.settle()

    def _charge(self, jobs: Collection[MaskJob], start: float) -> None:
        """Charge a wait from ``start`` until now to the owners of the jobs that ran in it."""
        if self._is_shared:
            now = time.monotonic()
            for job in jobs:
                self._shares.add(job.owner, job.seconds_since(start), now)


class ConstrainedDrafts:
    """A drafter's trees without the nodes that requests refuse, with the tokens that may follow each remaining node."""

    def __init__(self, drafts: Drafts, requests: Sequence[Request], constraints: Constraints) -> None:
        """Restrict the trees of ``drafts`` for the requests of a batch, given in its order."""
        self._drafts, self._requests, self._constraints = drafts, requests, constraints

    def propose(self, batch: Batch) -> DraftTree:
        """The trees, pruned."""
        return restrict(self._requests, self._drafts.propose(batch), self._constraints)

    def observe(self, batch: Batch, verdict: Verdict, features: torch.Tensor) -> None:
        """Pass the verdict to the drafter."""
        self._drafts.observe(batch, verdict, features)


@dataclass(frozen=True, slots=True)
class _Row:
    """The nodes of a row that are kept, in rising order, and the tokens that may follow each, [n, words] int32."""

    nodes: list[int]
    parents: list[int]
    bits: NDArray[np.int32] | None = None


def restrict(requests: Sequence[Request], tree: DraftTree, constraints: Constraints) -> DraftTree:
    """Remove the nodes that requests refuse from their trees, and set the tokens that may follow the others.

    A tree whose mask is not there in time is cut to its root; its request sits out the next steps until the mask is.

    Trees whose tokens were drawn keep refused nodes: the rule of acceptance needs the order in which a node's children
    were drawn, and a token that is not allowed has probability 0, so it is never accepted. For the same reason the time
    that masks of drawn tokens take now must not decide whether they are used; the last step's time per node decides
    whether they are made. Then the step waits for them, and a request whose mask takes too long fails. A tree is left
    out when slow masks of other requests keep its own from being begun: its own tokens did not decide that.

    Args:
        requests: of the batch, in its order. Those with a grammar are settled.
        tree: of the drafter.
        constraints: of the engine.
    """
    tokens, parents, is_drawn = tree.tokens.tolist(), tree.shape.parents.tolist(), tree.draft_probs is not None
    drafts = [_drafted(parents[place], request) for place, request in enumerate(requests)]
    followers = [request.follower for request in requests]
    num_trees = sum(follower is not None and len(real) > 1 for follower, real in zip(followers, drafts, strict=True))
    share = min(TREE_SECONDS * NODES_SHARE / max(num_trees, 1), MAX_TREE_SECONDS)
    begun = []
    # Looked up before any mask is begun: the time of these masks must not decide which of them are made.
    has_room = [not is_drawn or follower is None or constraints.can_begin(follower) for follower in followers]
    for place, (follower, real) in enumerate(zip(followers, drafts, strict=True)):
        if follower is None or len(real) == 1 or not has_room[place] or (follower.is_spent and not is_drawn):
            continue
        nodes_ahead = len(real) if is_drawn else 2  # a mask that is not drawn may end after any node
        if follower.seconds_per_node * nodes_ahead > share:
            continue
        given = [tokens[place][node] for node in real]
        follower.begin_tree(given, _renumbered(real, parents[place]), None if is_drawn else share, is_drawn)
        begun.append(follower)
    constraints.wait(begun, is_drawn)
    return _keep(
        tree,
        [
            _row(follower, real, parents[place], is_drawn)
            for place, (follower, real) in enumerate(zip(followers, drafts, strict=True))
        ],
    )


def _drafted(parents: Sequence[int], request: Request) -> list[int]:
    """The nodes that a request may verify: all that are no padding, down to its largest depth."""
    depths, most = [0] * len(parents), request.params.max_depth
    for node, parent in enumerate(parents[1:], 1):
        depths[node] = depths[parent] + 1
    real = [node for node, parent in enumerate(parents) if parent >= 0 or node == 0]
    return real if most is None else [node for node in real if depths[node] <= most]


def _row(follower: GrammarFollower | None, real: list[int], parents: Sequence[int], is_drawn: bool) -> _Row:
    if follower is None:
        return _Row(real, _renumbered(real, parents))
    mask = follower.take_tree()
    if mask is None:
        return _Row([0], [-1], None if follower.root is None else follower.root.bits)
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
