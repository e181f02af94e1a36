"""The two forwards and the step. Everything here works on batches and rows; requests are the scheduler's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specmamba.cache.access import ExtendState, PagedKV, VerifyState, tree_mask
from specmamba.cache.kv_pool import KVPool
from specmamba.cache.memory_plan import MemoryPlan
from specmamba.cache.request_table import RequestTable
from specmamba.cache.rows import RowSet
from specmamba.cache.snapshot_buffers import SnapshotBuffers
from specmamba.cache.spec_buffers import SpecBuffers
from specmamba.cache.state_buffers import StateBuffers, VerifyPlan
from specmamba.cache.state_pool import StatePool
from specmamba.cache.token_counts import TokenCounts
from specmamba.core import Batch, Chunk, DraftTree, SamplingBatch, Verdict
from specmamba.draft.base import Drafter
from specmamba.engine.clock import StepClock
from specmamba.engine.request import Request, Run
from specmamba.layers.context import ForwardContext
from specmamba.models.base import LoadedModel, TargetOutput
from specmamba.verify.accept import accept
from specmamba.verify.rules import AcceptRule


class Pools:
    """All mutable memory, sized by one plan."""

    def __init__(self, model: LoadedModel, plan: MemoryPlan, device: torch.device) -> None:
        shape = model.cache_shape
        self.kv = KVPool(shape, plan.num_pages, plan.page_size, device)
        self.states = StatePool(shape, plan.num_state_slots, device)
        self.table = RequestTable(plan.num_rows, plan.context_length + plan.num_slots, self.kv, device)
        backend = SpecBuffers if plan.speculative_state == "records" else SnapshotBuffers
        self.records: StateBuffers[Any] = backend(shape, self.states, plan.num_rows, plan.max_nodes, device)
        self.counts = TokenCounts(plan.num_rows, model.target.vocab_size, device)


@dataclass(frozen=True, slots=True)
class Decision:
    """What one step decided for one request, on the host."""

    tokens: tuple[int, ...]  # accepted drafts, then the bonus token
    num_drafted: int
    is_sound: bool  # False: the target's logits are not finite, and the tokens mean nothing


class Runner:
    """Runs chunks and steps on a model, its pools and a drafter."""

    def __init__(
        self, model: LoadedModel, pools: Pools, drafter: Drafter, device: torch.device, rule: AcceptRule = "target"
    ) -> None:
        self.target = model.target
        self.drafter = drafter
        self.clock = StepClock(device)
        self.on_logits: Callable[[Tensor], None] | None = None  # sees the logits [B, N, V] of every step
        self.rule = rule
        self.synthetic_acceptance: float | None = None
        self.pools, self._device = pools, device
        self._sampling: tuple[tuple[int, ...], SamplingBatch] | None = None

    def admit(self, request: Request) -> None:
        """A request got its row: whatever was there before is gone. Its first ``num_run`` tokens are cached."""
        self.drafter.begin(request.held_row, request.known_tokens(0, request.num_tokens))
        if request.num_run:
            features = self.pools.states.features[0, request.held_slot]
            self.drafter.resume(request.held_row, features, request.num_run)

    def start_verifying(self, request: Request) -> None:
        """All known tokens but the last have been run: its state becomes a checkpoint to verify from."""
        row, request.is_verifying = request.held_row, True
        self.pools.records.begin(row, request.held_slot, request.request_id, request.root_position)
        if request.params.has_penalties:
            self.pools.counts.begin(row, request.prompt, request.output)

    def finish(self, requests: Sequence[Request]) -> None:
        """What verifying requests have run is going to be shared: the drafter's part of it is completed."""
        if requests:
            requests = sorted(requests, key=lambda request: request.held_row)
            # a text may end inside the accepted path; the rows stand where the path ends
            positions = [self.pools.records.position(request.held_row) for request in requests]
            self.drafter.finish(self._batch(requests, positions))

    def release(self, row: int) -> None:
        """A row is about to be given back."""
        self.pools.records.end(row)
        self.pools.counts.end(row)

    def extend(self, runs: Sequence[Run]) -> list[bool]:
        """Run known tokens: KV and states are left behind, nothing is sampled.

        Returns:
            For every run whether its hidden states are finite.
        """
        chunk = self._chunk(runs)
        pools = self.pools
        slots = RowSet.of([run.request.held_slot for run in runs], self._device)
        for run in runs:
            pools.states.check(run.request.held_slot, run.request.request_id, run.start)
            pools.states.begin_write(run.request.held_slot, run.request.request_id)
        context = ForwardContext(
            kv=PagedKV.of_chunk(pools.kv, pools.table, chunk),
            state=ExtendState(pools.states, slots, chunk.lengths),
            positions=chunk.positions,
        )
        hidden, features = self.target.forward(chunk.tokens, context)
        self.drafter.extend(chunk, features)
        for run in runs:
            pools.states.end_write(run.request.held_slot, run.start + run.length)
        is_sound: list[bool] = (hidden.isfinite().all(-1) | ~chunk.is_token).all(-1).tolist()
        return is_sound

    def step(self, requests: Sequence[Request]) -> list[Decision]:
        """Draft, verify, accept, commit: one to N new tokens for every request."""
        batch = self._batch(requests, [request.root_position for request in requests])
        history = None if batch.sampling.penalties is None else self.pools.counts.of(batch.row_index)

        self.clock.start(len(batch.rows))
        tree = self.drafter.propose(batch)
        self.clock.lap("draft")
        plan = self.pools.records.plan(batch.rows, tree.shape)
        hidden, features = self._verify(batch, tree, plan)
        logits = self.target.logits(hidden)
        if self.on_logits is not None:
            self.on_logits(logits)
        verdict = accept(tree, logits, batch, history, rule=self.rule, synthetic=self.synthetic_acceptance)
        columns = verdict.num_accepted, verdict.is_sound, (tree.shape.parents >= 0).sum(1)
        read = torch.cat([torch.stack(columns, 1), verdict.path_tokens], 1).tolist()  # the one read of a step
        accepted = [row[0] for row in read]
        self.clock.lap("verify")
        self._commit(batch, plan, verdict, accepted)
        self.drafter.observe(batch, verdict, features, accepted)
        self.clock.lap("commit")
        return [
            Decision(tuple(tokens[: count + 1]), num_drafted, bool(is_sound))
            for count, is_sound, num_drafted, *tokens in read
        ]

    def _verify(self, batch: Batch, tree: DraftTree, plan: VerifyPlan) -> TargetOutput:
        """One target forward over all nodes of all trees."""
        table, num_nodes = self.pools.table, tree.shape.num_nodes
        nodes = torch.arange(num_nodes, device=self._device)
        write_slots = table.slots_at(batch.row_index, batch.root_positions[:, None] + nodes)
        num_keys = batch.max_root_position + num_nodes
        # a lone root: no key is another's, none is ahead; and a model without attention asks for none
        sees_all = len(batch.rows) == num_nodes == 1 or not self.pools.kv.k
        mask = None if sees_all else tree_mask(batch.root_positions, tree.shape, num_keys)
        context = ForwardContext(
            kv=PagedKV(self.pools.kv, write_slots.view(-1), table.read_slots(batch, 0, num_keys), mask),
            state=VerifyState(self.pools.records, plan),
            positions=batch.root_positions[:, None] + tree.shape.depth,
        )
        return self.target.forward(tree.tokens, context)

    def _commit(self, batch: Batch, plan: VerifyPlan, verdict: Verdict, accepted: Sequence[int]) -> None:
        """Promote the accepted paths: their records become pending, their KV moves to where their positions are."""
        self.pools.records.commit(plan, verdict.path, verdict.num_accepted, accepted)
        if plan.tree.is_chain:
            return
        steps = torch.arange(plan.tree.num_nodes, device=self._device)
        moves = (steps <= verdict.num_accepted[:, None]) & (verdict.path != steps)
        table, root = self.pools.table, batch.root_positions[:, None]
        source = table.slots_at(batch.row_index, root + verdict.path)
        target = table.slots_at(batch.row_index, root + steps)
        self.pools.kv.move(source[moves], target[moves])

    def _batch(self, requests: Sequence[Request], positions: Sequence[int]) -> Batch:
        rows = tuple(request.held_row for request in requests)
        return Batch(
            rows=rows,
            row_index=torch.tensor(rows, device=self._device),
            root_tokens=torch.tensor([request.root_token for request in requests], device=self._device),
            root_positions=torch.tensor(positions, device=self._device),
            max_root_position=max(positions),
            sampling=self._sampling_batch(requests),
            forced_tokens=self._forced_tokens(requests),
        )

    def _forced_tokens(self, requests: Sequence[Request]) -> Tensor | None:
        if not any(request.forced for request in requests):
            return None
        depth = self.drafter.max_nodes
        pieces = [r.forced[len(r.output) : len(r.output) + depth] for r in requests]
        return torch.tensor([[*piece, *[-1] * (depth - len(piece))] for piece in pieces], device=self._device)

    def _sampling_batch(self, requests: Sequence[Request]) -> SamplingBatch:
        """Settings change with the members of the batch only, so they are kept until those change."""
        members = tuple(request.sequence_number for request in requests)
        if self._sampling is None or self._sampling[0] != members:
            params, seeds = [r.params for r in requests], [r.seed for r in requests]
            self._sampling = members, SamplingBatch.of(params, seeds, self._device)
        return self._sampling[1]

    def _chunk(self, runs: Sequence[Run]) -> Chunk:
        lengths = [run.length for run in runs]
        longest = max(lengths)
        known = [run.request.known_tokens(run.start, run.start + run.length) for run in runs]
        rows = tuple(run.request.held_row for run in runs)
        starts = torch.tensor([run.start for run in runs], device=self._device)
        return Chunk(
            rows=rows,
            row_index=torch.tensor(rows, device=self._device),
            tokens=torch.tensor([k + [0] * (longest - len(k)) for k in known], device=self._device),
            positions=starts[:, None] + torch.arange(longest, device=self._device),
            lengths=torch.tensor(lengths, device=self._device),
            is_padded=min(lengths) < longest,
            end=max(run.start + run.length for run in runs),
        )
