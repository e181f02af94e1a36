"""The two forwards and the step. Everything here works on batches and rows; requests are the scheduler's."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from specmamba.cache.access import ExtendState, PagedKV, VerifyState, causal_keys, tree_keys
from specmamba.cache.kv_pool import KVPool
from specmamba.cache.memory import MemoryPlan
from specmamba.cache.request_table import RequestTable
from specmamba.cache.rows import RowSet
from specmamba.cache.snapshot_buffers import SnapshotBuffers
from specmamba.cache.spec_buffers import SpecBuffers
from specmamba.cache.state_buffers import HostPlaces, Places, StateBuffers, VerifyPlan
from specmamba.cache.state_pool import StatePool
from specmamba.cache.token_counts import TokenCounts
from specmamba.core import Batch, Chunk, DraftTree, DraftView, PendingTokens, SamplingBatch, Verdict
from specmamba.draft.drafter import Drafter
from specmamba.engine.clock import StepClock
from specmamba.engine.constraints import restrict
from specmamba.engine.logprobs import PathLogprobs, of_known_tokens
from specmamba.engine.outcome import Decision, Outcome
from specmamba.engine.replayed_step import ReplayedSteps
from specmamba.engine.request import Request, Run, forced_ahead
from specmamba.engine.step_buffers import Sampling
from specmamba.kernels import tree as tree_ops
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
        self.table = RequestTable(plan.num_rows, plan.context_length + plan.num_lookahead_slots, self.kv, device)
        backend = SpecBuffers if plan.speculative_state == "records" else SnapshotBuffers
        self.records: StateBuffers[Any] = backend(shape, self.states, plan.num_rows, plan.max_nodes, device)
        self.counts = TokenCounts(plan.num_rows, model.target.vocab_size, device)


@dataclass(frozen=True, slots=True)
class _Made:
    """What a step has made, on the device; the requests that cannot go on, by place in the batch."""

    places: HostPlaces
    outcome: Outcome
    errors: dict[int, str] = field(default_factory=dict)


def _with_extras(made: _Made, decisions: list[Decision], requests: Sequence[Request]) -> list[Decision]:
    """Decisions with the log probabilities that requests ask for, and with what went wrong."""
    if made.outcome.logprobs is not None:
        tokens, counts = [d.tokens for d in decisions], [r.params.logprobs for r in requests]
        figures = made.outcome.logprobs.read(tokens, counts)
        decisions = [replace(d, logprobs=found) for d, found in zip(decisions, figures, strict=True)]
    return [replace(d, error=made.errors.get(place)) for place, d in enumerate(decisions)] if made.errors else decisions


class Runner:
    """Runs chunks and steps on a model, its pools and a drafter."""

    def __init__(
        self, model: LoadedModel, pools: Pools, drafter: Drafter, device: torch.device, rule: AcceptRule = "target"
    ) -> None:
        self.target = model.target
        self.drafter = drafter
        self.replays: ReplayedSteps | None = None  # None: every step has the shapes of its batch
        self.clock = StepClock(device)
        self.on_logits: Callable[[Tensor], None] | None = None  # sees the logits [B, N, V] of every step
        self.on_draft: Callable[[DraftView], None] | None = None  # sees the first draft of every step
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
            For every run whether its hidden states are finite, and its logits where somebody asks for them.
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
        can_tell = [self._read_prompt(run, hidden[place]) for place, run in enumerate(runs)]
        for run in runs:
            pools.states.end_write(run.request.held_slot, run.start + run.length)
        is_finite: list[bool] = (hidden.isfinite().all(-1) | ~chunk.is_token).all(-1).tolist()
        return [finite and told for finite, told in zip(is_finite, can_tell, strict=True)]

    def step(self, requests: Sequence[Request]) -> list[Decision]:
        """Draft, verify, accept, commit: one to N new tokens for every request."""
        rows = tuple(request.held_row for request in requests)
        self.clock.start(len(rows))
        made = self._run_step(requests, rows)
        read = made.outcome.packed.tolist()  # the one read of a step
        decisions = [Decision.read(row) for row in read]
        self.pools.records.advance(made.places, [len(decision.tokens) - 1 for decision in decisions])
        self.drafter.advance(rows, [decision.tokens for decision in decisions])
        self.clock.lap("commit")
        if self.on_draft is not None:
            self.on_draft(made.outcome.draft_of(0, requests[0].request_id, decisions[0].tokens))
        return _with_extras(made, decisions, requests)

    def capture(self) -> None:
        """Capture the steps that are needed most: of every bucket, greedy and with a temperature.

        Those of drafters that look at the host are captured when they are first needed.
        """
        replays, drafter = self.replays, self.drafter
        if replays is None or not drafter.is_capturable:
            return
        for bucket in reversed(replays.buckets):  # the largest first: the others find room in its memory
            for is_drawn in (False, True):
                replays.capture(bucket, Sampling(is_drawn), drafter, self.decide, self._settings)

    @property
    def _settings(self) -> Hashable:
        """What ``decide`` depends on besides its arguments."""
        return self.rule, self.synthetic_acceptance

    def _run_step(self, requests: Sequence[Request], rows: tuple[int, ...]) -> _Made:
        """Replayed where it can be, else with the shapes of this batch."""
        replays, drafter = self.replays, self.drafter
        # whoever wants the times of phases, or looks on, wants steps that run operator by operator
        is_watched = self.clock.is_on or self.on_logits is not None or self.target.is_watched
        if replays is None or is_watched or any(request.params.is_special for request in requests):
            return self._run_directly(requests, rows)
        bucket = replays.bucket(len(requests))
        pending_tokens = None if bucket is None else drafter.prepare(rows, bucket)
        if bucket is None or not replays.can_tell(pending_tokens, drafter):
            return self._run_directly(requests, rows)
        if drafter.is_capturable:
            return _Made(*replays.run(requests, drafter, self.decide, self._settings, pending_tokens, None))
        batch = self._batch_of(requests)
        tree = drafter.propose(batch)
        if tree.draft_probs is not None:
            return self._decide_directly(batch, tree, rows)
        places, outcome = replays.run(requests, drafter, self.decide, self._settings, None, tree)
        drafter.observe(batch, outcome.verdict, outcome.features)
        return _Made(places, outcome)

    def _run_directly(self, requests: Sequence[Request], rows: tuple[int, ...]) -> _Made:
        """A step with the shapes of this batch."""
        drafts = any(request.params.speculative for request in requests)
        pending_tokens = self.drafter.prepare(rows, len(rows), drafts)
        batch = self._batch_of(requests, None if pending_tokens is None else pending_tokens.on(self._device))
        tree = self.drafter.propose(batch) if drafts else self.drafter.propose_nothing(batch)
        errors: dict[int, str] = {}
        if any(request.matcher is not None or not request.params.speculative for request in requests):
            batch, tree, errors = restrict(requests, batch, tree)
        wanted = [request.params.logprobs for request in requests if request.params.logprobs is not None]
        made = self._decide_directly(replace(batch, num_logprobs=max(wanted, default=None)), tree, rows)
        return replace(made, errors=errors)

    def _decide_directly(self, batch: Batch, tree: DraftTree, rows: tuple[int, ...]) -> _Made:
        self.clock.lap("draft")
        places = self.pools.records.place(rows, tree.shape.num_nodes)
        outcome = self.decide(batch, tree, places.on(self._device))
        self.drafter.observe(batch, outcome.verdict, outcome.features)
        return _Made(places, outcome)

    def decide(self, batch: Batch, tree: DraftTree, places: Places) -> Outcome:
        """Verify, accept, commit, on the device alone: nothing here waits for it."""
        history = None if batch.sampling.penalties is None else self.pools.counts.of(batch.row_index)
        plan = self.pools.records.plan_at(places, tree.shape)
        node_slots = self._node_slots(batch, tree.shape.num_nodes)
        hidden, features = self._verify(batch, tree, plan, node_slots)
        logits = self.target.logits(hidden)
        if self.on_logits is not None:
            self.on_logits(logits)
        verdict = accept(tree, logits, batch, history, rule=self.rule, synthetic=self.synthetic_acceptance)
        self.clock.lap("verify")
        self._commit(batch, plan, verdict, node_slots)
        num_drafted = (tree.shape.parents >= 0).sum(1)
        columns = torch.stack([verdict.num_accepted, verdict.is_sound, num_drafted], 1)
        packed = torch.cat([columns, verdict.path_tokens], 1)
        figures = None if batch.num_logprobs is None else PathLogprobs.of(logits, verdict, batch.num_logprobs)
        return Outcome(verdict, features, packed, tree.tokens, tree.shape.parents, figures)

    def _read_prompt(self, run: Run, hidden: Tensor) -> bool:
        """Note how likely the tokens behind a run are, where a request asks for it of its prompt.

        Returns:
            Whether all is well: False where the target's logits are not finite.
        """
        request = run.request
        first, end = run.start + 1, min(run.start + run.length + 1, len(request.prompt))
        known = len(request.prompt_logprobs)  # a run after a preemption may begin before it
        if not request.must_read_prompt or not first <= known < end:
            return True
        count = request.params.prompt_logprobs or 0
        hidden = hidden[known - first : end - first]
        tokens, target = request.prompt[known:end], self.target
        found, is_sound = of_known_tokens(hidden, tokens, target.logits, target.vocab_size, count)
        request.prompt_logprobs += found
        return is_sound

    def _verify(self, batch: Batch, tree: DraftTree, plan: VerifyPlan, node_slots: Tensor) -> TargetOutput:
        """One target forward over all nodes of all trees."""
        table, num_nodes, shape = self.pools.table, tree.shape.num_nodes, tree.shape
        num_keys = batch.max_root_position + num_nodes
        positions = batch.root_positions[:, None] + shape.depth
        if shape.is_chain:
            is_lone = batch.size == num_nodes == 1  # no key is another's, none is ahead
            keys = causal_keys(table, batch, positions, num_keys, sees_all=is_lone)
        else:
            keys = tree_keys(table, batch, shape.ancestors, num_keys)
        context = ForwardContext(
            kv=PagedKV(self.pools.kv, node_slots.view(-1), keys),
            state=VerifyState(self.pools.records, plan),
            positions=positions,
        )
        return self.target.forward(tree.tokens, context)

    def _commit(self, batch: Batch, plan: VerifyPlan, verdict: Verdict, node_slots: Tensor) -> None:
        """Promote the accepted paths: their records become pending, their KV moves to where their positions are."""
        self.pools.records.promote(plan, verdict.path, verdict.num_accepted)
        if not plan.tree.is_chain and self.pools.kv.k:
            source, target = tree_ops.kv_moves(verdict.path, verdict.num_accepted, node_slots)
            if batch.is_exact and source.is_cpu:  # to look costs nothing there, to copy what stays does
                is_moved = source != target
                source, target = source[is_moved], target[is_moved]
            self.pools.kv.move(source.flatten(), target.flatten())

    def _node_slots(self, batch: Batch, num_nodes: int) -> Tensor:
        """[B, N] KV slots of the nodes of trees: they stand behind the root, one after the other."""
        nodes = torch.arange(num_nodes, device=self._device)
        return self.pools.table.slots_at(batch.row_index, batch.root_positions[:, None] + nodes)

    def _batch_of(self, requests: Sequence[Request], pending_tokens: PendingTokens | None = None) -> Batch:
        return replace(
            self._batch(requests, [request.root_position for request in requests]), pending_tokens=pending_tokens
        )

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
        return forced_ahead(requests, self.drafter.max_nodes).to(self._device)

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
