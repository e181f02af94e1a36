"""The interface of all drafters, the drafter that proposes nothing, and the shapes of trees."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from specmamba.core import Batch, DraftTextStats, DraftTree, PendingTokens, PrefillChunk, TreeShape, Verdict
from specmamba.draft.candidates import Candidates
from specmamba.kernels import tree as tree_ops


@dataclass(frozen=True, slots=True)
class HostPendingTokens:
    """The ``PendingTokens`` of a batch, as numbers of the host."""

    counts: tuple[int, ...]
    is_deferred: bool
    kept: tuple[int, ...] | None = None  # tokens of each row that stay pending; None: all if deferred, or none

    def of(self, places: Sequence[int]) -> HostPendingTokens:
        """Those of the rows at these places, all of which the step runs."""
        return HostPendingTokens(tuple(self.counts[place] for place in places), is_deferred=False)

    def on(self, device: torch.device) -> PendingTokens:
        """Upload them to a device."""
        is_ragged = min(self.counts) < max(self.counts)
        counts = torch.tensor(self.counts, device=device) if is_ragged else None
        kept = None if self.kept is None else torch.tensor(self.kept, device=device)
        return PendingTokens(max(self.counts), counts, self.is_deferred, kept)


@dataclass
class SharedText:
    """A request's text, as far as other requests may draft from it; the drafter fills it in.

    It goes on where a preempted request comes back, so its text is counted once.
    """

    key: Hashable  # of the requests that may: texts of different keys are kept apart
    num_tokens: int = 0  # of the text that have been added
    part: int | None = None  # number of the automaton that has the last of them
    place: int = 0  # of the text there

    def skip_to(self, num_tokens: int) -> None:
        """Go on as if so many tokens had been added."""
        self.num_tokens, self.part = num_tokens, None


class Drafter(ABC):
    """Proposes draft trees. The text is always the target's, whatever is proposed: bad drafts only cost time.

    A step calls ``prepare`` on the host, ``propose`` and ``observe`` for the device, and ``advance`` on the host again.
    Where the size of drafts is decided in each step, it calls ``prepare_some`` on the host, ``offer`` with the rows
    that are drafted for, then ``observe`` and ``advance`` with all rows.
    """

    max_nodes: int  # largest number of nodes of a tree, root included
    is_capturable = False  # ``propose`` and ``observe`` never read from the device or use ``Batch.rows``
    has_pending_tokens = False  # ``prepare`` returns pending tokens
    max_steps = 0  # depth of the deepest offer
    drafts_chains = False  # has ``propose_chain``
    stand_in: NoDrafter | None = None  # takes part in steps without drafts in its place; None: it takes part in all
    num_distributions = 0  # that drafts of a row are drawn from at the most, and one for a node without children

    @abstractmethod
    def propose(self, batch: Batch) -> DraftTree:
        """Return a tree for every row of the batch. The drafter may write to the KV slots after the roots."""

    def num_nodes(self, batch_size: int) -> int:
        """Return the largest number of nodes of the trees that batches of this size get."""
        return self.max_nodes

    def propose_nothing(self, batch: Batch) -> DraftTree:
        """Return trees of the roots alone, for a batch without drafts; the drafter's own state follows the text."""
        self.propose(batch)
        return root_tree(batch)

    def prepare(self, rows: Sequence[int], batch_size: int, drafts: bool = True) -> HostPendingTokens | None:
        """Begin a step.

        Args:
            rows: of the batch, without padding.
            batch_size: rows with padding.
            drafts: whether ``propose`` follows; False: ``propose_nothing``.

        Returns:
            The pending tokens that the step runs or defers; None if the drafter has none.
        """
        return None

    def offer(self, batch: Batch, num_steps: int) -> Candidates:
        """Return candidates down to depth ``num_steps`` for every row of the batch."""
        raise NotImplementedError

    def propose_chain(self, batch: Batch, num_nodes: int) -> DraftTree:
        """Return a chain of ``num_nodes`` nodes, the root included, for every row of the batch."""
        raise NotImplementedError

    def may_follow(self, batch_size: int) -> bool:
        """Whether steps of so many rows, with padding, need nothing of the host that depends on the step before.

        Such steps run all pending tokens, and the decided ones are pending after them. What ``features`` returns is
        kept by ``keep`` until the next one, for rows that have ended already.
        """
        return False

    def keep(self, batch: Batch) -> None:  # noqa: B027
        """Keep what ``features`` returns now, for ``kept_features``: in a captured step, before ``observe``."""

    def kept_features(self, row: int, position: int) -> Tensor | None:
        """Return what ``features`` would have returned before the newest step of this row, which kept it."""
        return None

    def prepare_some(self, rows: Sequence[int], drafted: Sequence[bool]) -> HostPendingTokens | None:
        """Begin a step that drafts for some rows only; returns what ``prepare`` does, for all rows."""
        return None

    def must_draft(self, rows: Sequence[int]) -> list[bool]:
        """Whether the drafter must run now for each row, because it cannot defer the row's tokens any longer."""
        return [False] * len(rows)

    def share(self, row: int, shared: SharedText) -> None:  # noqa: B027 - a drafter without texts does nothing
        """Say, before ``begin``, which text the next request of this row shares with others."""

    def forget_texts(self) -> None:  # noqa: B027
        """Drop what is known from the texts of other requests."""

    @property
    def text_stats(self) -> DraftTextStats | None:
        """Memory of the texts that are known; None: none are kept but the requests' tokens."""
        return None

    def begin(self, row: int, tokens: Sequence[int]) -> None:  # noqa: B027 - a drafter without state does nothing
        """Start a request (or start it over) in this row; ``tokens`` are all its known tokens, root included."""

    def end(self, row: int) -> None:  # noqa: B027
        """Free what is kept for this row alone: its request ends, or is preempted. A row without one is ignored."""

    def resume(self, row: int, features: Tensor, position: int) -> None:  # noqa: B027
        """Continue a started request whose first ``position`` tokens are cached, with ``features`` [F] at their end."""

    def features(self, row: int, position: int) -> Tensor | None:
        """Return what ``resume`` needs to continue after the first ``position`` tokens of a row, [F]; None: nothing.

        Valid positions are those on the path of the newest step, and the end of the newest prefill chunk.
        """
        return None

    def begin_finish(self, rows: Sequence[int]) -> HostPendingTokens | None:
        """Begin to complete the cached data of rows that are about to end, from which other requests may continue.

        Returns:
            The pending tokens that ``finish`` is to run; None: there is nothing left to do, and it is not called.
        """
        return None

    def finish(self, batch: Batch) -> None:  # noqa: B027
        """Go on after ``begin_finish``, without a number that the host must wait for.

        ``root_positions`` are the ends of the newest steps' paths, ``pending_tokens`` those of ``begin_finish``; tokens
        and sampling settings of the batch are not used. ``features`` returns the same values before and after.
        """

    def extend(self, chunk: PrefillChunk, features: Tensor) -> None:  # noqa: B027
        """Process known tokens that the target has run, with the target's features of them [B, L, F]."""

    def observe(self, batch: Batch, verdict: Verdict, features: Tensor) -> None:  # noqa: B027
        """Process the result of a verify, with the target's features of the tree's nodes [B, N, F]."""

    def advance(self, rows: Sequence[int], decided: Sequence[Sequence[int]]) -> None:  # noqa: B027
        """End the step; ``decided`` are the tokens after each root: accepted drafts and the target's own token."""


class NoDrafter(Drafter):
    """Plain decoding: the tree is its root."""

    max_nodes = 1
    is_capturable = True
    like: NoDrafter | None = None  # captured steps begin as those of this one; None: only it has steps like its own

    def propose(self, batch: Batch) -> DraftTree:
        return root_tree(batch)

    def may_follow(self, batch_size: int) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class DrafterInStep:
    """A drafter that drafts in some way of its own in a step, and observes it."""

    drafter: Drafter

    def observe(self, batch: Batch, verdict: Verdict, features: Tensor) -> None:
        """Pass the verdict to the drafter."""
        self.drafter.observe(batch, verdict, features)


@dataclass(frozen=True, slots=True)
class PlainDrafts(DrafterInStep):
    """A drafter in a step without drafts: its state follows the text."""

    def propose(self, batch: Batch) -> DraftTree:
        """Return the roots alone."""
        return self.drafter.propose_nothing(batch)


@dataclass(frozen=True, slots=True)
class ChainDrafts(DrafterInStep):
    """A drafter in a step with a chain of a given size for every request."""

    num_nodes: int  # the root included

    def propose(self, batch: Batch) -> DraftTree:
        """Return the chains."""
        return self.drafter.propose_chain(batch, self.num_nodes)


def root_tree(batch: Batch) -> DraftTree:
    """Return trees of the roots alone."""
    return DraftTree(batch.root_tokens[:, None], chain_shape(batch.size, 1, batch.root_tokens.device))


@cache
def chain_shape(batch_size: int, num_nodes: int, device: torch.device) -> TreeShape:
    """Return the shape of a batch of chains. It is cached, so its tensors must not be changed."""
    nodes = torch.arange(num_nodes, device=device)
    ancestors = nodes <= nodes[:, None]
    return TreeShape(
        parents=(nodes - 1).expand(batch_size, -1),
        ancestors=ancestors.repeat(batch_size, 1, 1),  # dense: or each recurrent layer would make it so
        depth=nodes.expand(batch_size, -1),
        is_chain=True,
        max_children=1,
    )


def tree_shape(parents: Tensor, max_children: int) -> TreeShape:
    """Return the shape of a batch of trees.

    Args:
        parents: [B, N] int64, in topological order; -1 for the root and for padding.
        max_children: largest number of children of a node.
    """
    ancestors = tree_ops.ancestors(parents)
    return TreeShape(parents, ancestors, tree_ops.depth(ancestors), is_chain=False, max_children=max_children)
