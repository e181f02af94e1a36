"""Steps that are replayed: which ones can be, and what they do."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from specmamba.cache.request_table import RequestTable
from specmamba.cache.state_buffers import HostPlaces, Places, StateBuffers
from specmamba.core import Batch, DraftTree
from specmamba.cuda_graphs import Replay, bucket_for
from specmamba.draft.drafter import Drafter, HostPendingTokens
from specmamba.engine.outcome import Outcome
from specmamba.engine.request import Request
from specmamba.engine.step_buffers import Sampling, StepBuffers, StepKind
from specmamba.kernels.gpu import next_power_of_2

Decide = Callable[[Batch, DraftTree, Places], Outcome]


class ReplayedSteps:
    """Pads a batch to a bucket, writes its inputs where they stay, and replays the step of this kind.

    A step that is replayed reads nothing of the host: numbers that shapes depend on are bounds of all batches, and what
    is exact stands in the buffers. A drafter that looks at the host drafts before it and observes behind it. The rest
    is one piece, with the draft head's part of the accepted tokens in it, which every draft begins with.
    """

    def __init__(
        self,
        replay: Replay[Outcome],
        buckets: tuple[int, ...],
        records: StateBuffers[Any],
        table: RequestTable,
        max_nodes: int,
        max_root_position: int,
        device: torch.device,
    ) -> None:
        """Allocate the inputs of all buckets.

        Args:
            replay: runs steps by kind.
            buckets: batch sizes, rising.
            records: of the states.
            table: of the rows.
            max_nodes: of a tree.
            max_root_position: no root ever stands behind it.
            device: of the pools.
        """
        self.replay, self.buckets = replay, buckets
        self.buffers = StepBuffers(buckets[-1], max_nodes, device)
        self._records, self._table, self._device = records, table, device
        self._max_root_position = max_root_position

    def bucket(self, batch_size: int) -> int | None:
        """What a batch is padded to. None: it is too large."""
        return bucket_for(batch_size, self.buckets)

    @staticmethod
    def can_tell(pending_tokens: HostPendingTokens | None, drafter: Drafter) -> bool:
        """Whether what a draft head has to be told fits a replayed step: no more than what one step decides.

        Whoever drafts outside of the step is told there, with the shapes of the batch.
        """
        if pending_tokens is None:
            return True
        return drafter.is_capturable and (pending_tokens.is_deferred or max(pending_tokens.counts) <= drafter.max_nodes)

    def run(
        self,
        requests: Sequence[Request],
        drafter: Drafter,
        decide: Decide,
        settings: Hashable,
        pending_tokens: HostPendingTokens | None,
        tree: DraftTree | None,
    ) -> tuple[HostPlaces, Outcome]:
        """Replay a step.

        Args:
            requests: in order of their rows, no more than the largest bucket.
            drafter: drafts and observes in the step, where it can.
            decide: verifies, accepts and commits.
            settings: what ``decide`` depends on besides its arguments.
            pending_tokens: as the drafter prepared them for the bucket.
            tree: what it drafted outside of the step, without distributions; None: the step drafts.
        """
        kind = self._kind(requests, drafter, pending_tokens, tree)
        self._table.tell()
        places = self._records.place([request.held_row for request in requests], kind.num_nodes)

        def fill() -> None:
            self.buffers.write(requests, places, pending_tokens)
            if tree is not None:
                self.buffers.write_tree(tree)

        def step() -> Outcome:
            return self._step(kind, drafter, decide, drafts=tree is None)

        outcome = self.replay.run((kind, settings, drafter), step, self.buffers.clear, fill)
        return places, outcome.first(len(requests))

    def capture(self, bucket: int, sampling: Sampling, drafter: Drafter, decide: Decide, settings: Hashable) -> None:
        """Run a step on nothing but padding, so that it is there when it is needed."""
        num_nodes = drafter.num_nodes(bucket)
        keeps = (False, True) if drafter.has_pending_tokens and num_nodes == 1 else (False,)
        for is_deferred in keeps:
            kind = StepKind(bucket, num_nodes, sampling, self._max_root_position, is_deferred)

            def step(kind: StepKind = kind) -> Outcome:
                return self._step(kind, drafter, decide, drafts=True)

            self.replay.run((kind, settings, drafter), step, self.buffers.clear, self.buffers.clear)

    def _kind(
        self,
        requests: Sequence[Request],
        drafter: Drafter,
        pending_tokens: HostPendingTokens | None,
        tree: DraftTree | None,
    ) -> StepKind:
        size = self.bucket(len(requests))
        assert size is not None
        last = max(request.root_position for request in requests)
        num_nodes = drafter.num_nodes(size)
        if tree is not None:  # where drafts are as large as they happen to be, not every size is a step of its own
            num_nodes = min(next_power_of_2(tree.shape.num_nodes), num_nodes)
        return StepKind(
            batch_size=size,
            num_nodes=num_nodes,
            sampling=Sampling.of([request.params for request in requests]),
            max_root_position=self._max_root_position if self.replay.has_fixed_shapes else last,
            is_deferred=pending_tokens is not None and pending_tokens.is_deferred,
            is_forced=any(request.forced for request in requests),
            is_chain=tree is not None and tree.shape.is_chain and tree.shape.num_nodes == num_nodes,
            max_children=1 if tree is None else tree.shape.max_children,
        )

    def _step(self, kind: StepKind, drafter: Drafter, decide: Decide, drafts: bool) -> Outcome:
        """All of it, on the buffers."""
        batch = self.buffers.batch(kind, drafter.max_nodes if drafter.has_pending_tokens else None)
        offset = self._records.node_offset(kind.num_nodes)
        places = self.buffers.places(kind, offset, self._records.folds_in_verify, self._device)
        tree = drafter.propose(batch) if drafts else self.buffers.tree(kind)
        outcome = decide(batch, tree, places)
        if drafts:
            drafter.observe(batch, outcome.verdict, outcome.features)
        return outcome
