"""Prefill and steps of requests: it makes batches of requests, runs them, and reads the results."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from specmamba.cache.access import ExtendState, PagedKV, prefill_chunk
from specmamba.cache.pair_writes import PairWrites
from specmamba.cache.prefix.inspection import View
from specmamba.core import Batch, DraftView, PendingTokens, PrefillChunk
from specmamba.cuda_graphs import DirectRead, HostRead
from specmamba.draft.drafter import ChainDrafts, Drafter, HostPendingTokens, PlainDrafts
from specmamba.draft.predicted_text import PredictedDrafts
from specmamba.draft.sizing.drafts import SizedDrafts
from specmamba.draft.sizing.repeats import LONGEST_START
from specmamba.draft.sizing.rounds import DraftSize, SizedBatch
from specmamba.draft.sizing.sizer import DraftSizer
from specmamba.engine.captured.captured_steps import capture_steps
from specmamba.engine.captured.ending_rows import EndingRows
from specmamba.engine.captured.graph_runner import ReplayedDrafts, StepCall, StepGraphRunner
from specmamba.engine.captured.step_in_flight import ExtendInFlight, StepInFlight
from specmamba.engine.captured.step_inputs import NEW
from specmamba.engine.request import PrefillRun, Request, forced_ahead
from specmamba.engine.stepping.constraints import ConstrainedDrafts, Constraints
from specmamba.kernels.draft_sizing import Ints
from specmamba.kernels.state_records import RowSet
from specmamba.layers.context import ForwardContext
from specmamba.models.base import Target
from specmamba.parallel.ranks import ONE_RANK, Ranks
from specmamba.sampling_params import SamplingBatch
from specmamba.verify.acceptance import AcceptPolicy
from specmamba.verify.pools import Pools
from specmamba.verify.probe import StepProbe
from specmamba.verify.result import StepOutput, StepResult, known_token_logprobs
from specmamba.verify.same_step import RankVerifier
from specmamba.verify.step import Drafts, Verifier


class Runner:
    """Runs prefill chunks and steps on a target, its pools and a drafter."""

    def __init__(
        self,
        target: Target,
        pools: Pools,
        drafter: Drafter,
        device: torch.device,
        policy: AcceptPolicy,
        constraints: Constraints,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        self.target, self.drafter, self.pools = target, drafter, pools
        self.graph_runner: StepGraphRunner | None = None  # None: every step has the shapes of its batch
        self.drafts_before = False  # some rank has grammars: all make trees in front of what is captured
        self.probe = StepProbe(device)
        parts = target, pools, policy, self.probe
        self.verifier = Verifier(*parts) if ranks.size == 1 else RankVerifier(*parts, ranks)
        self.on_draft: Callable[[DraftView], None] | None = None  # gets the first draft of each view in every step
        self.watched: tuple[View, ...] = ()
        self._device, self._constraints = device, constraints
        self._sampling: tuple[tuple[int, ...], SamplingBatch] | None = None
        self._restricted: tuple[tuple[tuple[int, ...], bool], bool] | None = None
        self.sizer: DraftSizer | None = None  # decides the size of drafts in each step; None: the drafter does
        self.ending_rows = EndingRows(pools.table.num_rows, device)
        self._chunk_writes, self._slot_writes = PairWrites(device), PairWrites(device)
        self._is_in_parts = False  # the step is not replayed as a whole, and its time says nothing about others
        self._catches_up = False  # the drafter runs tokens in a step without drafts, which it seldom does
        self._sized: tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[Ints, Ints, Ints]] | None = None

    def admit(self, request: Request) -> None:
        """Prepare the drafter for a request in its new row; its first ``num_run`` tokens are cached."""
        self.drafter.share(request.held_row, request.shared_text)
        self.drafter.begin(request.held_row, request.known_tokens(0, request.num_tokens))
        if request.num_run:
            features = self.pools.states.features[0, request.held_slot]
            self.drafter.resume(request.held_row, features, request.num_run)

    def dismiss(self, request: Request) -> None:
        """Free what the drafter keeps for a request that is about to lose its row; it may have none."""
        if request.row is not None:
            self.drafter.end(request.row)

    def start_verifying(self, request: Request) -> None:
        """Make the state of a request, whose known tokens but the last have been run, a checkpoint to verify from."""
        row, request.is_verifying = request.held_row, True
        self.pools.state_buffers.begin(row, request.held_slot, request.request_id, request.root_position)
        if self.sizer is not None:
            number = request.num_tokens
            self.sizer.begin(row, request.mode, request.known_tokens(max(0, number - LONGEST_START), number))
        if request.params.has_penalties:
            self.pools.counts.begin(row, request.prompt, request.output)

    def complete(self, requests: Sequence[Request]) -> None:
        """Complete the drafter's KV and features of verifying requests, before the prefix cache takes them over."""
        rows = sorted([request.held_row for request in requests])
        if rows and (pending_tokens := self.drafter.begin_finish(rows)) is not None:
            # a text may end inside the accepted path, but the rows' states are at the end of the path
            positions = [self.pools.state_buffers.position(row) for row in rows]
            self.drafter.finish(self.ending_rows.batch(rows, positions, pending_tokens))

    def extend(self, runs: Sequence[PrefillRun]) -> Tensor:
        """Run known tokens: they fill KV and advance states, and nothing is sampled.

        It waits for the device only where prompt logprobs are requested.

        Returns:
            [B] bool, for every run whether its hidden states are finite, and its logits where prompt logprobs are
            requested; on the device.
        """
        chunk, states = self._chunk(runs), self.pools.states
        held = [run.request.held_slot for run in runs]
        slots = RowSet.of(held, self._device, self._slot_writes.send_columns([held])[0])
        for run in runs:
            states.check(run.request.held_slot, run.request.request_id, run.start)
            states.begin_write(run.request.held_slot, run.request.request_id)
        context = ForwardContext(
            kv=PagedKV.of_chunk(self.pools.kv, self.pools.table, chunk),
            state=ExtendState(states, slots, chunk.lengths),
            positions=chunk.positions,
        )
        hidden, features = self.target.forward(chunk.tokens, context)
        self.drafter.extend(chunk, features)
        has_logits = [self._read_prompt(run, hidden[place]) for place, run in enumerate(runs)]
        for run in runs:
            states.end_write(run.request.held_slot, run.start + run.length)
        is_finite = (hidden.isfinite().all(-1) | ~chunk.is_token).all(-1)
        return is_finite if all(has_logits) else is_finite & torch.tensor(has_logits, device=self._device)

    def overlaps(self, requests: Sequence[Request]) -> bool:
        """Whether ``launch`` may return before the device has done a step of these requests.

        Not where the host has a part in the middle of the step, or tools look at it.
        """
        graphs, sizer = self.graph_runner, self.sizer
        if graphs is None or not graphs.replay.is_deferred or graphs.bucket(len(requests)) is None:
            return False
        if self.probe.is_watching or self.target.is_watched or (sizer is not None and sizer.forced is not None):
            return False
        asks = sizer is None
        return self.drafter.is_capturable and not any(
            r.follower is not None or r.predicted is not None or (asks and r.params.max_depth is not None)
            for r in requests
        )

    @property
    def is_deferred(self) -> bool:
        """Whether steps may be read after the host has gone on."""
        return self.graph_runner is not None and self.graph_runner.replay.is_deferred

    def launch_behind(
        self,
        step: StepInFlight,
        places: Sequence[int],
        joining: Sequence[Request] = (),
        extend: ExtendInFlight | None = None,
    ) -> StepInFlight | None:
        """Launch the next step of some requests of a step that was not read yet; ``finish`` is to be told of it.

        Args:
            step: the newest one.
            places: of the requests in it, ascending; they have KV for what both steps may add.
            joining: requests that take part in the next step for the first time; each ``may_join``.
            extend: was launched in front of it, and is read with it.

        Returns:
            None, where the step needs the host, or was not captured yet: nothing was launched.
        """
        graphs, drafter = self.graph_runner, self.drafter
        if graphs is None or not step.leads or not graphs.leads or self.sizer is not None or self._is_looked_at:
            return None
        members = [*((step.requests[place], place) for place in places), *((request, NEW) for request in joining)]
        members.sort(key=lambda member: member[0].held_row)
        requests, places = [request for request, _ in members], [place for _, place in members]
        if requests != list(step.requests) and any(request.params.logit_bias for request in step.requests):
            return None  # they are written by the host, and number the rows
        bucket = graphs.bucket(len(requests))
        if bucket is None or drafter.num_nodes(bucket) != step.num_nodes:
            return None  # that step has decided for trees of its own size which rows fold
        began, rows = time.perf_counter(), tuple([request.held_row for request in requests])
        pending_tokens = HostPendingTokens((1,) * len(rows), False) if drafter.has_pending_tokens else None
        output = graphs.follow(self._call(requests, pending_tokens, drafter), places)
        if output is None:
            return None
        columns = output.columns if extend is None else (*output.columns, extend.is_finite)
        read, num_nodes = graphs.replay.read(columns), step.num_nodes
        return StepInFlight(requests, rows, output, read, drafter, False, True, began, num_nodes, True, bucket, extend)

    @property
    def _is_looked_at(self) -> bool:
        """Whether tools look at steps, or time them."""
        return self.on_draft is not None or self.probe.is_watching or self.target.is_watched

    def _leads(self, requests: Sequence[Request]) -> bool:
        """Whether the step after the newest one, which was replayed, needs nothing that the host knows after it."""
        graphs = self.graph_runner
        if graphs is None or not graphs.leads or self.sizer is not None or not self.overlaps(requests):
            return False
        return not any(request.forced_output_ids or request.params.has_penalties for request in requests)

    def launch(self, requests: Sequence[Request]) -> StepInFlight:
        """Draft, verify, accept, commit (``verify/step.py``): one to N new tokens for every request.

        Until ``finish`` was called, nothing that the step reads or writes may be used; see ``overlaps``.

        Args:
            requests: those that verify now, in order of their rows; their grammars are settled.
        """
        began, num_unreplayed = time.perf_counter(), self._num_unreplayed
        rows = tuple([request.held_row for request in requests])
        self.probe.start(len(rows))
        sizer, size = self.sizer, None
        if sizer is not None:
            size = sizer.again(rows) or self._plan(sizer, requests, rows)
        drafter = self.drafter
        if size is not None and size.depth == 0 and drafter.stand_in is not None:
            drafter = drafter.stand_in
        chains = self._predicted(requests)
        output, leads = self._run_captured(requests, rows, size, drafter, chains), False
        if output is None:
            output = self.verifier.step(*self._drafts(requests, rows, size, drafter, chains))
            read: HostRead = DirectRead(output.columns)
        else:
            assert self.graph_runner is not None
            read = self.graph_runner.replay.read(output.columns)
            leads = self._leads(requests)
        is_usual = chains is None and num_unreplayed == self._num_unreplayed
        is_usual = is_usual and not (self._is_in_parts or self._catches_up)
        learns = chains is None and size is not None and size.depth > 0 and all(r.follower is None for r in requests)
        num_nodes = output.tokens.shape[1]
        return StepInFlight(requests, rows, output, read, drafter, learns, is_usual, began, num_nodes, leads)

    def expect(self, step: StepInFlight, gone: Collection[Request]) -> None:
        """Count what ``launch`` would have counted, for a step that was launched before the one before it was read.

        ``gone``: its requests that were padding in it.
        """
        if rows := [request.held_row for request in step.requests if request not in gone]:
            self.pools.state_buffers.place(rows, step.num_nodes, is_captured=True)
            self.drafter.prepare(rows, step.bucket)

    def forgo(self, ended: Collection[Request]) -> None:
        """Count a step that is not read: ``ended`` are its requests that were no padding in it, as for ``finish``."""
        if rows := [request.held_row for request in ended]:
            self.pools.advance([-1] * len(rows))
            self.drafter.advance(rows, [()] * len(rows))

    def finish(
        self, step: StepInFlight, gone: Collection[Request] = (), ended: Collection[Request] = ()
    ) -> list[StepResult]:
        """Wait for a step, and count on the host what it has decided; returns the result of each request.

        Args:
            step: the oldest one in flight.
            gone: its requests that were padding in it; their results mean nothing.
            ended: its requests that the step before has ended: nothing of theirs is kept.
        """
        requests, rows, output, sizer = step.requests, step.rows, step.output, self.sizer
        listed = () if output.logprobs is None else [request.params.logprobs for request in requests]
        results = output.results(step.read.wait()[: len(output.columns)], listed)
        decided = [result.tokens for result in results]
        num_accepted = [len(tokens) - 1 for tokens in decided]
        if gone or ended:
            kept = [-1 if r in ended else n for r, n in zip(requests, num_accepted, strict=True) if r not in gone]
            there = [place for place, request in enumerate(requests) if request not in gone]
            self.pools.advance(kept)
            step.drafter.advance([rows[place] for place in there], [decided[place] for place in there])
            return results
        self.pools.advance(num_accepted)
        step.drafter.advance(rows, decided)
        self.probe.lap("commit")
        if sizer is not None:
            if step.learns and sizer.learns_on_host:
                sizer.learn(output.verdict.path.cpu().numpy(), output.verdict.num_accepted.cpu().numpy())
            seconds = time.perf_counter() - step.began if step.is_usual else None
            sizer.observe(decided, num_accepted if step.learns else None, seconds)
        if self.on_draft is not None:
            for place in _first_of_views(requests, self.watched):
                request = requests[place]
                self.on_draft(output.draft_of(place, request.request_id, decided[place], request.owner.tenant))
        return results

    def capture(self, is_sized: bool) -> list[str]:
        """Capture the most frequent steps; returns the lines of the start-up report about them.

        ``is_sized``: the size of drafts is decided in each step.
        """
        return capture_steps(self.graph_runner, self._call(()), is_sized)

    def _predicted(self, requests: Sequence[Request]) -> list[list[int]] | None:
        """The tokens that are predicted for each request in this step; None: for none of them."""
        if all(request.predicted is None for request in requests):
            return None
        graphs, size = self.graph_runner, len(requests)
        bucket = None if graphs is None else graphs.bucket(size)
        most = min(self.drafter.num_nodes(size), self.drafter.num_nodes(bucket or size)) - 1
        chains = [request.predicted_drafts(most) for request in requests]
        return chains if any(chains) else None

    def _run_drafted_before(
        self, graphs: StepGraphRunner, requests: Sequence[Request], batch: Batch, drafts: Drafts
    ) -> StepOutput:
        """Draft before the step, replay verify and decision, and observe after it."""
        output = graphs.run_given(self._call(requests), self.verifier.same(drafts).propose(batch))
        drafts.observe(batch, output.verdict, output.features)
        return output

    def _drafts(
        self,
        requests: Sequence[Request],
        rows: tuple[int, ...],
        size: DraftSize | None,
        drafter: Drafter,
        chains: Sequence[Sequence[int]] | None,
        graphs: StepGraphRunner | None = None,
    ) -> tuple[Batch, Drafts]:
        """The batch of a step that is run operator by operator, and what drafts in it: by ``graphs``, if given."""
        drafted_for = [r for i, r in enumerate(requests) if r.params.is_drafted and not (chains and chains[i])]
        wants_drafts = bool(drafted_for) and (size is None or size.depth > 0)
        if graphs is not None and not drafter.is_capturable:
            graphs = None
        num_rows = (graphs and graphs.bucket(len(rows))) or len(rows)
        pending_tokens, drafted = self._prepared(requests, rows, size, wants_drafts, drafter, num_rows)
        batch, call = self._whole_batch(requests, pending_tokens), self._call(requests, pending_tokens, drafter)
        drafts: Drafts = drafter if wants_drafts else PlainDrafts(drafter)
        sized = size if wants_drafts else None
        if sized is not None and sized.is_chain:
            drafts = ChainDrafts(self.drafter, sized.depth + 1)
        if sized is not None and not sized.is_chain:
            assert self.sizer is not None
            if graphs is not None:
                offer = partial(graphs.offer, call, drafted, sized)
            else:
                own = batch if drafted is requests else self._drafted_batch(drafted, sized, pending_tokens)
                offer = partial(self.drafter.offer, own, sized.depth)
            drafts = SizedDrafts(self.drafter, self.sizer, sized, offer)
        elif graphs is not None and (wants_drafts or self._catches_up):
            drafts = ReplayedDrafts(drafts, graphs, call)
        if chains is not None:
            drafts = PredictedDrafts(drafts, chains)
        if self._are_restricted(requests):
            drafts = ConstrainedDrafts(drafts, requests, self._constraints)
        return batch, drafts

    def _run_captured(
        self,
        requests: Sequence[Request],
        rows: tuple[int, ...],
        size: DraftSize | None,
        drafter: Drafter,
        chains: Sequence[Sequence[int]] | None,
    ) -> StepOutput | None:
        """Run these requests through a captured step; None: no captured step fits, and nothing has been run."""
        graphs, self._is_in_parts = self.graph_runner, False
        if graphs is None or self.probe.is_watching or self.target.is_watched:
            return None
        bucket = graphs.bucket(len(requests))
        if bucket is None:
            return None
        if chains is not None or self.drafts_before or self._are_restricted(requests):
            self._is_in_parts = True
            before = self._drafts(requests, rows, size, drafter, chains, graphs)
            return self._run_drafted_before(graphs, requests, *before)
        if size is not None and drafter is self.drafter:
            return self._run_sized(graphs, requests, rows, size)
        if drafter.is_capturable:
            return graphs.run(self._call(requests, drafter.prepare(rows, bucket), drafter))
        batch = self._whole_batch(requests, drafter.prepare(rows, len(rows)))
        return self._run_drafted_before(graphs, requests, batch, drafter)

    def _call(
        self,
        requests: Sequence[Request],
        pending_tokens: HostPendingTokens | None = None,
        drafter: Drafter | None = None,
    ) -> StepCall:
        drafter = drafter or self.drafter
        return StepCall(requests, drafter, self.verifier, pending_tokens)

    def _are_restricted(self, requests: Sequence[Request]) -> bool:
        """Whether trees are pruned: some request has a grammar, or wants smaller drafts than the drafter makes.

        A sizer knows itself what requests want.
        """
        asked = tuple([request.sequence_number for request in requests]), self.sizer is None
        if self._restricted is None or self._restricted[0] != asked:
            found = any(r.follower is not None or (r.params.max_depth is not None and asked[1]) for r in requests)
            self._restricted = asked, found
        return self._restricted[1]

    def _run_sized(
        self, graphs: StepGraphRunner, requests: Sequence[Request], rows: tuple[int, ...], size: DraftSize
    ) -> StepOutput:
        """Replay a step of the planned size."""
        drafter, sizer = self.drafter, self.sizer
        assert sizer is not None
        pending_tokens, drafted = self._prepared(requests, rows, size, size.depth > 0, drafter, len(rows))
        if not drafter.is_capturable:
            return self._run_on_host_drafts(graphs, requests, drafted, size, pending_tokens)
        call = self._call(requests, pending_tokens)
        if size.depth == 0:
            return graphs.run_fixed(call, PlainDrafts(drafter), 1)
        learns = not size.is_chain or (size.learns and sizer.bounds.width == 1)
        if size.drafted is None and graphs.calls_host and learns:
            return graphs.run_sized(call, sizer, size)
        if size.is_chain:
            return graphs.run_fixed(call, ChainDrafts(drafter, size.depth + 1), size.depth + 1)
        return graphs.run_chosen(call, graphs.offer(call, drafted, size), sizer, size)

    def _run_on_host_drafts(
        self,
        graphs: StepGraphRunner,
        requests: Sequence[Request],
        drafted: Sequence[Request],
        size: DraftSize,
        pending_tokens: HostPendingTokens | None,
    ) -> StepOutput:
        """Draft by a drafter that no captured step has in it, and replay the verify."""
        drafter, sizer, call = self.drafter, self.sizer, self._call(requests)
        assert sizer is not None
        batch = self._whole_batch(requests, pending_tokens)
        if size.depth == 0:
            output = graphs.run_given(call, drafter.propose_nothing(batch))
        else:
            candidates = drafter.offer(self._drafted_batch(drafted, size, pending_tokens), size.depth)
            output = graphs.run_chosen(call, candidates, sizer, size)
        drafter.observe(batch, output.verdict, output.features)
        return output

    def _prepared(
        self,
        requests: Sequence[Request],
        rows: tuple[int, ...],
        size: DraftSize | None,
        wants_drafts: bool,
        drafter: Drafter,
        num_rows: int,
    ) -> tuple[HostPendingTokens | None, Sequence[Request]]:
        """Prepare the drafter; returns its pending tokens, and the requests that are drafted for.

        ``num_rows``: of the batch that is drafted for, with padding.
        """
        if size is None or size.drafted is None or not wants_drafts:
            pending_tokens = drafter.prepare(rows, num_rows, wants_drafts)
            self._catches_up = not wants_drafts and pending_tokens is not None and not pending_tokens.is_deferred
            return pending_tokens, requests
        self._catches_up = False
        drafted = [request for request, is_drafted in zip(requests, size.drafted.tolist(), strict=True) if is_drafted]
        return drafter.prepare_some(rows, size.drafted.tolist()), drafted

    def _drafted_batch(
        self, drafted: Sequence[Request], size: DraftSize, pending_tokens: HostPendingTokens | None
    ) -> Batch:
        """Build the batch of the requests that are drafted for."""
        if pending_tokens is not None and size.drafted is not None:
            pending_tokens = pending_tokens.of(np.flatnonzero(size.drafted).tolist())
        return self._whole_batch(drafted, pending_tokens)

    @property
    def _num_unreplayed(self) -> int:
        """Captured steps that were recorded instead of replayed, or run before that: they take longer."""
        return 0 if self.graph_runner is None else self.graph_runner.replay.num_unreplayed

    def totals(self, batch_size: int) -> range:
        """Numbers of nodes to which verifies of chosen trees are padded."""
        graphs = self.graph_runner
        if graphs is None or graphs.bucket(batch_size) is None:
            return range(1, batch_size * self.drafter.max_nodes + 1)
        return graphs.totals(batch_size)

    def _plan(self, sizer: DraftSizer, requests: Sequence[Request], rows: tuple[int, ...]) -> DraftSize:
        return sizer.plan(self._sized_batch(requests, rows), rows, lambda: self.drafter.must_draft(rows))

    def _sized_batch(self, requests: Sequence[Request], rows: tuple[int, ...]) -> SizedBatch:
        """What the sizer sees of a batch; made again when its members change."""
        members = tuple([request.sequence_number for request in requests])
        if self._sized is None or self._sized[0] != (members, rows):
            depths = [self._depth_bound(request) for request in requests]
            modes = [request.mode for request in requests]
            self._sized = (members, rows), (np.array(rows), np.array(modes), np.array(depths))
        return SizedBatch(*self._sized[1], lambda: sum(request.root_position for request in requests))

    def _depth_bound(self, request: Request) -> int:
        assert self.sizer is not None
        most, own = self.sizer.bounds.num_steps, request.params.max_depth
        return most if own is None else min(most, own)

    def _whole_batch(self, requests: Sequence[Request], pending_tokens: HostPendingTokens | None) -> Batch:
        """Build the batch of a step with its exact shapes."""
        num_logprobs = [request.params.logprobs for request in requests if request.params.logprobs is not None]
        batch = self._batch(requests, [request.root_position for request in requests])
        on_device: PendingTokens | None = None if pending_tokens is None else pending_tokens.on(self._device)
        return replace(batch, pending_tokens=on_device, num_logprobs=max(num_logprobs, default=None))

    def _read_prompt(self, run: PrefillRun, hidden: Tensor) -> bool:
        """Compute log probabilities of the prompt tokens after a run, if the request needs prompt logprobs.

        Returns:
            False if the target's logits are not finite.
        """
        request = run.request
        first, end = run.start + 1, min(run.start + run.length + 1, len(request.prompt))
        known = len(request.prompt_logprobs)  # a run after a preemption may begin before it
        if not request.must_read_prompt or not first <= known < end:
            return True
        count = request.params.prompt_logprobs or 0
        hidden = hidden[known - first : end - first]
        tokens, target = request.prompt[known:end], self.target
        found, is_finite = known_token_logprobs(hidden, tokens, target.logits, target.vocab_size, count)
        request.prompt_logprobs += found
        return is_finite

    def _batch(self, requests: Sequence[Request], positions: Sequence[int]) -> Batch:
        rows = tuple(request.held_row for request in requests)
        return Batch(
            rows=rows,
            row_index=torch.tensor(rows, device=self._device),
            root_tokens=torch.tensor([request.root_token for request in requests], device=self._device),
            root_positions=torch.tensor(positions, device=self._device),
            max_root_position=max(positions),
            sampling=self._sampling_batch(requests),
            forced_output_ids=self._forced_output_ids(requests),
        )

    def _forced_output_ids(self, requests: Sequence[Request]) -> Tensor | None:
        if not any(request.forced_output_ids for request in requests):
            return None
        return forced_ahead(requests, self.drafter.max_nodes).to(self._device)

    def _sampling_batch(self, requests: Sequence[Request]) -> SamplingBatch:
        """Return the sampling settings of a batch; reused until its members change."""
        members = tuple([request.sequence_number for request in requests])
        if self._sampling is None or self._sampling[0] != members:
            params, seeds, rules = zip(*[(r.params, r.seed, r.rule) for r in requests], strict=True)
            self._sampling = members, SamplingBatch.of(params, seeds, self._device, rules)
        return self._sampling[1]

    def _chunk(self, runs: Sequence[PrefillRun]) -> PrefillChunk:
        known = [run.request.known_tokens(run.start, run.start + run.length) for run in runs]
        rows, starts = [run.request.held_row for run in runs], [run.start for run in runs]
        return prefill_chunk(rows, starts, known, self._device, self._chunk_writes)


def _first_of_views(requests: Sequence[Request], views: Sequence[View]) -> list[int]:
    """The index of the first request of a batch that each view shows, without repeats."""
    firsts = (
        next((place for place, request in enumerate(requests) if view.shows(request.owner.tenant)), None)
        for view in views
    )
    return sorted({place for place in firsts if place is not None})
