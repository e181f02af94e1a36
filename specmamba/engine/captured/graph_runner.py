"""Captured steps: which kinds there are, their padding to buckets, and their replay."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specmamba.cache.memory import MemoryPlan
from specmamba.cache.shapes import pending_token_capacity
from specmamba.core import Batch, DraftTree, Verdict
from specmamba.cuda_graphs import GraphReplay, NextPart, Replay, bucket_for
from specmamba.draft.candidates import Candidates
from specmamba.draft.drafter import ChainDrafts, Drafter, HostPendingTokens, NoDrafter, PlainDrafts
from specmamba.draft.sizing.drafts import DraftsInStep, first_chains
from specmamba.draft.sizing.rounds import DraftSize
from specmamba.draft.sizing.sizer import DraftSizer
from specmamba.engine.captured.step_inputs import NEW, StepInputs
from specmamba.engine.captured.step_kind import (
    Sampling,
    StepKind,
    before_decision,
    kind_of_chosen,
)
from specmamba.engine.request import Request
from specmamba.kernels import gpu
from specmamba.kernels.draft_sizing import Ints
from specmamba.verify.pools import Pools
from specmamba.verify.result import StepOutput
from specmamba.verify.step import Drafts, GivenDrafts, Scored, Verifier


@dataclass(frozen=True, slots=True)
class StepCall:
    """A step that is to be replayed."""

    requests: Sequence[Request]  # in order of their rows, no more than the largest bucket
    drafter: Drafter
    verifier: Verifier  # of the engine
    pending_tokens: HostPendingTokens | None = None  # as the drafter prepared them


@dataclass(frozen=True, slots=True)
class ReplayedDrafts:
    """Drafts whose part before the verify is replayed."""

    drafts: Drafts
    graphs: StepGraphRunner
    call: StepCall

    def propose(self, batch: Batch) -> DraftTree:
        """Return the trees."""
        return self.graphs.draft(self.call, self.drafts)

    def observe(self, batch: Batch, verdict: Verdict, features: Tensor) -> None:
        """Pass the verdict to the drafter."""
        self.drafts.observe(batch, verdict, features)


class StepGraphRunner:
    """Pads a batch to a bucket, writes its inputs to fixed buffers, and replays the captured step of this kind.

    A captured step does not depend on host values: numbers that shapes depend on are bounds for all batches, and
    exact values are in the buffers. A drafter that depends on host values drafts before the step and observes after
    it; any other drafter is part of the step.
    """

    def __init__(
        self, replay: Replay[Any], buckets: tuple[int, ...], pools: Pools, plan: MemoryPlan, device: torch.device
    ) -> None:
        """Allocate the input buffers of captured steps.

        Args:
            replay: runs steps by kind.
            buckets: batch sizes, rising.
            pools: of the engine.
            plan: has the bounds of trees and positions.
            device: of the pools.
        """
        self.replay, self.buckets = replay, buckets
        self.calls_host = not isinstance(replay, GraphReplay)  # a captured step may call code of the host in its middle
        self.inputs = StepInputs(buckets[-1], plan.max_nodes, device, plan.num_rows)
        self._draft_inputs = StepInputs(buckets[-1], plan.max_nodes, device)  # of drafts for some of the requests
        self._pools, self._device, self._max_nodes = pools, device, plan.max_nodes
        self._max_root_position = plan.context_length
        self._num_requests = 0  # of the newest step
        self.leads = False  # ``follow`` may go on behind the newest step

    def bucket(self, batch_size: int) -> int | None:
        """Return the batch size that a batch is padded to; None: it is too large to be captured."""
        return bucket_for(batch_size, self.buckets)

    def totals(self, batch_size: int) -> range:
        """Numbers of nodes to which verifies of chosen trees are padded; native products of a CPU skip padding."""
        size = self.bucket(batch_size) or batch_size
        step = 1 if self.calls_host else max(1, size // 4)
        return range(step, size * self._max_nodes + 1, step)

    def run(self, call: StepCall) -> StepOutput:
        """Replay a step with a capturable drafter, which drafts and observes in it."""
        return self._replay(call, self._kind(call), call.drafter, call.drafter)

    def follow(self, call: StepCall, places: Sequence[int]) -> StepOutput | None:
        """Replay a step behind one that ``run`` or ``follow`` has launched, and that need not have been read.

        The host writes nothing but which requests go on, and what it knows of those that join them: what the others go
        on with is on the device.

        Args:
            call: the step; its pending tokens say nothing but that the drafter has some.
            places: of its requests in the step before, ascending; ``NEW`` for those that join them.

        Returns:
            None, where nothing was launched: this kind of step was not captured yet.
        """
        kind, drafter, is_whole = (
            self._kind(call),
            call.drafter,
            len(places) == self._num_requests and NEW not in places,
        )
        key, score, then = self._parts(call, kind, drafter, drafter, drafter)
        if not self.replay.may_follow(key, then):
            return None
        self._pools.table.upload()
        if not is_whole:
            self.inputs.keep(call.requests, places)
        self._num_requests = len(places)
        output: StepOutput = self.replay.run(key, score, self.inputs.clear, None, then)
        return output.first(len(places))

    def run_given(self, call: StepCall, tree: DraftTree) -> StepOutput:
        """Replay a step on trees that were drafted before it, and that may have masks; they are observed after it."""
        kind, trees = self._kind_of_given(call, tree), self.inputs.trees
        trees.write_distributions(tree, kind.num_distributions)
        return self._replay(call, kind, None, None, lambda: trees.write(tree, kind.num_distributions))

    def run_fixed(self, call: StepCall, drafts: PlainDrafts | ChainDrafts, num_nodes: int) -> StepOutput:
        """Replay a step without drafts, or with chains of ``num_nodes`` nodes, roots included."""
        kind = self._kind(call, num_nodes=num_nodes)
        return self._replay(call, kind, ("fixed", call.drafter), drafts)

    def run_sized(self, call: StepCall, sizer: DraftSizer, size: DraftSize) -> StepOutput:
        """Replay a step that drafts for all requests, chooses trees by ``sizer``, verifies them, and learns from them.

        A step with chains verifies all nodes of the chains, whatever is chosen.
        """
        drafter, depth = call.drafter, size.depth
        kind = self._kind(call, num_nodes=depth + 1 if size.is_chain else None)
        bucket = kind.batch_size
        if size.is_chain:
            kind = kind._replace(is_chain=True, depth=depth)
        else:
            num_nodes = min(self._max_nodes, sizer.bounds.num_nodes[depth])
            packed = bucket * num_nodes
            kind = kind._replace(num_nodes=num_nodes, num_packed=packed, max_children=num_nodes - 1, depth=depth)
        key = before_decision(kind, is_drafted=True), drafter, sizer

        def read(candidates: Candidates) -> DraftTree:
            if size.is_chain:
                return first_chains(candidates, self.inputs.batch(kind), depth)
            return self.inputs.trees.read_chosen(kind, self.inputs.rows.read("root_token", bucket), candidates)

        drafts = DraftsInStep(drafter, sizer, depth, key, read)
        return self._replay(call, kind, (drafter, sizer), drafts, lambda: sizer.prepare(key, bucket))

    def draft(self, call: StepCall, drafts: Drafts) -> DraftTree:
        """Replay the draft of a capturable drafter; valid until the next replay.

        Args:
            call: the step.
            drafts: of its drafter, made for this kind of step, and equal to others that draft the same.
        """
        kind = before_decision(self._kind(call), is_drafted=True)
        key = "draft", kind, drafts
        found = self._run_draft(call, self.inputs, kind, key, lambda: drafts.propose(self.inputs.batch(kind)))
        tree: DraftTree = found.first(len(call.requests))
        return tree

    def offer(self, call: StepCall, drafted: Sequence[Request], size: DraftSize) -> Candidates:
        """Replay a draft of a capturable drafter; its numbers are valid until the next replay.

        Distributions that drafts are drawn from stay for ``run_chosen``.

        Args:
            call: the step.
            drafted: its requests that are drafted for.
            size: depth of the draft, and who is drafted for.
        """
        inputs, own, drafter = self.inputs, call.pending_tokens, call.drafter
        if size.drafted is not None and own is not None:
            inputs, own = self._draft_inputs, own.of(np.flatnonzero(size.drafted).tolist())
        call = replace(call, requests=drafted, pending_tokens=own)
        kind = before_decision(self._kind(call, inputs), is_drafted=True)._replace(num_nodes=size.depth)

        def draft() -> Candidates:
            found = drafter.offer(inputs.batch(kind), kind.num_nodes)
            if found.draft_probs is not None:
                self._keep_probs(drafter, kind.batch_size, found.draft_probs)
            return found

        key = "offer", kind, drafter, size.drafted is None
        found: Candidates = self._run_draft(call, inputs, kind, key, draft)
        return found

    def run_chosen(self, call: StepCall, candidates: Candidates, sizer: DraftSizer, size: DraftSize) -> StepOutput:
        """Choose trees from ``candidates``, and replay a step on them.

        A capturable drafter has offered them by ``offer``, and observes in the step; any other one observes after it.
        """
        drafter = call.drafter
        kind, entries = self._kind(call), None
        chosen = sizer.choose(candidates, kind.batch_size)
        if candidates.draft_probs is not None:
            assert candidates.entries is not None
            if not drafter.is_capturable:
                self._keep_probs(drafter, kind.batch_size, candidates.draft_probs)
            kind = kind._replace(num_distributions=drafter.num_distributions)
            nodes = self.inputs.trees.arrays.candidates[: len(call.requests), : chosen.width]
            entries = _chosen_entries(candidates.entries, nodes, size, kind.num_distributions)
        kind = kind_of_chosen(
            kind, chosen, self._max_nodes, None if self.calls_host else self.totals(kind.batch_size).step
        )
        observer = drafter if drafter.is_capturable else None
        return self._replay(call, kind, observer, None, lambda: self.inputs.trees.write_chosen(kind, entries), observer)

    def capture(self, call: StepCall) -> None:
        """Capture the most frequent steps, on padding rows only: every bucket, greedy and with a temperature."""
        drafter = call.drafter
        for bucket in reversed(self.buckets):  # the largest first: the others reuse its memory
            num_nodes = drafter.num_nodes(bucket)
            defers = (False, True) if drafter.has_pending_tokens and num_nodes == 1 else (False,)
            for is_drawn in (False, True):
                for is_deferred in defers:
                    most = drafter.max_nodes if drafter.has_pending_tokens else 0
                    kind = StepKind(bucket, num_nodes, Sampling(is_drawn), self._max_root_position, is_deferred)
                    kind = kind._replace(max_pending_tokens=most)
                    self._run_parts(call, kind, drafter, drafter, drafter, self.inputs.clear)

    def _keep_probs(self, drafter: Drafter, num_rows: int, draft_probs: Tensor) -> None:
        """Copy distributions to where captured steps read them."""
        size, count, vocab_size = draft_probs.shape
        kept = self.inputs.trees.draft_probs(num_rows, drafter.num_distributions, vocab_size)
        kept[:size, :count] = draft_probs

    def _run_draft(
        self, call: StepCall, inputs: StepInputs, kind: StepKind, key: Hashable, function: Callable[[], Any]
    ) -> Any:
        """Write the inputs of a draft that no verify is part of, and run a function on them."""
        self._pools.table.upload()
        write = partial(inputs.write, call.requests, call.pending_tokens, kind)
        return self.replay.run(key, function, inputs.clear, write)

    def _replay(
        self,
        call: StepCall,
        kind: StepKind,
        name: Hashable,
        drafts: Drafts | None,
        write_tree: Callable[[], None] | None = None,
        observer: Drafts | None = None,
    ) -> StepOutput:
        """Write the inputs of a step, and run it.

        Args:
            call: the step.
            kind: of step.
            name: tells apart what kinds do not: None where no drafter runs.
            drafts: drafts and observes in the step; None: trees have been drafted before it.
            write_tree: writes these trees, or what the choice of trees needs.
            observer: observes in a step on given trees; None: nothing does.
        """
        requests = call.requests
        self._num_requests = len(requests)
        self.leads = drafts is call.drafter and self._most_unfolded(kind, call.drafter) is not None
        self._pools.table.upload()
        rows = [request.held_row for request in requests]
        slots = self._pools.state_buffers.place(rows, kind.num_nodes, is_captured=True)

        def fill() -> None:
            self.inputs.write(requests, call.pending_tokens, kind, slots)
            if write_tree is not None:
                write_tree()

        return self._run_parts(call, kind, name, drafts, drafts or observer, fill).first(len(requests))

    def _run_parts(
        self,
        call: StepCall,
        kind: StepKind,
        name: Hashable,
        drafts: Drafts | None,
        observer: Drafts | None,
        fill: Callable[[], None],
    ) -> StepOutput:
        """Run draft and forward, which all decisions share, then the decision of this kind; arguments as above."""
        key, score, then = self._parts(call, kind, name, drafts, observer)
        output: StepOutput = self.replay.run(key, score, self.inputs.clear, fill, then)
        return output

    def _parts(
        self, call: StepCall, kind: StepKind, name: Hashable, drafts: Drafts | None, observer: Drafts | None
    ) -> tuple[Hashable, Callable[[], Scored], NextPart]:
        """The two parts of a step, and the key of the first; arguments as above."""
        verifier, before = call.verifier, before_decision(kind, is_drafted=drafts is not None)

        def score() -> Scored:
            buffers = self._pools.state_buffers
            folds = buffers.folds_in_verify or buffers.folds_in_plan
            slots = self.inputs.slots(before, buffers.node_offset(kind.num_nodes), folds, self._device)
            given = drafts or GivenDrafts(self.inputs.tree(before))
            scored = verifier.score(self.inputs.batch(before), given, slots)
            return replace(scored, logits=self.inputs.keep_logits(scored.logits))

        def decide(scored: Scored) -> StepOutput:
            batch, tree = self.inputs.batch(kind), self.inputs.trees.complete(kind, scored.tree)
            output = verifier.decide(batch, replace(scored, tree=tree))
            if most_unfolded is not None:
                call.drafter.keep(batch)
            if observer is not None:
                observer.observe(batch, output.verdict, output.features)
            if most_unfolded is not None:
                output = replace(output, tokens=output.tokens.clone())  # the roots may be a view of the rows
                self.inputs.advance(kind, output.verdict, most_unfolded)
            return output

        first: tuple[str, Hashable] = "drafted", (name.like or name) if isinstance(name, NoDrafter) else name
        if drafts is None:  # the target's features are those that a head reads
            first = "given", call.drafter if call.drafter.is_capturable else None
        most_unfolded = self._most_unfolded(kind, call.drafter) if drafts is call.drafter else None
        return (before, first), score, NextPart((kind, verifier.policy, name, most_unfolded), decide)

    def _most_unfolded(self, kind: StepKind, drafter: Drafter) -> int | None:
        """Pending records of a row that the step after one of this kind does not fold; None: none may be behind it."""
        if not self.replay.is_deferred or kind.is_deferred or kind.keeps_tokens or kind.is_forced:
            return None
        if not drafter.may_follow(kind.batch_size):
            return None
        return self._pools.state_buffers.most_unfolded(kind.num_nodes)

    def _kind_of_given(self, call: StepCall, tree: DraftTree) -> StepKind:
        """The kind of a step on trees that were drafted before it."""
        kind, shape = self._kind(call), tree.shape
        # drafts of varying size: powers of two, so that not every size is a kind of its own
        num_nodes = min(gpu.next_power_of_2(shape.num_nodes), max(kind.num_nodes, shape.num_nodes))
        return kind._replace(
            num_nodes=num_nodes,
            is_chain=shape.is_chain and shape.num_nodes == num_nodes,
            max_children=shape.max_children,
            num_distributions=0 if tree.draft_probs is None else num_nodes,
            is_masked=tree.allowed_tokens is not None,
        )

    def _kind(self, call: StepCall, inputs: StepInputs | None = None, num_nodes: int | None = None) -> StepKind:
        """The kind of a step.

        Args:
            call: the step.
            inputs: that it reads; None: those of most steps.
            num_nodes: of every tree, the root included: there is room for as many pending tokens of a row as such steps
                decide, where none has more; None: as the drafter makes them.
        """
        requests, drafter, pending_tokens = call.requests, call.drafter, call.pending_tokens
        size = self.bucket(len(requests))
        assert size is not None
        last = self._max_root_position
        if not self.replay.has_fixed_shapes:
            last = max(request.root_position for request in requests)
        most = 0
        if pending_tokens is not None:
            most, longest = drafter.max_nodes, max(pending_tokens.counts)
            if num_nodes is not None and longest <= num_nodes:
                most = num_nodes
            elif not pending_tokens.is_deferred and longest > most:
                most = pending_token_capacity(most)
        needs = (inputs or self.inputs).write_settings(requests)
        return StepKind(
            batch_size=size,
            num_nodes=drafter.num_nodes(size) if num_nodes is None else num_nodes,
            sampling=needs.sampling,
            num_biases=needs.num_biases,
            num_logprobs=needs.num_logprobs,
            max_root_position=last,
            is_deferred=pending_tokens is not None and pending_tokens.is_deferred,
            is_forced=any(request.forced_output_ids for request in requests),
            max_pending_tokens=most,
            keeps_tokens=pending_tokens is not None and pending_tokens.kept is not None,
        )


def _chosen_entries(entries: Tensor, nodes: Ints, size: DraftSize, num_distributions: int) -> Ints:
    """The distribution that the children of each node were drawn from, [B, N], among those of all drafted rows."""
    of_drafted = entries.cpu().numpy()
    rows = size.places(len(nodes))  # of those that are not drafted for, no entry is read
    found: Ints = of_drafted[rows[:, None], nodes] + rows[:, None] * num_distributions
    return found
