"""Captured steps: which steps can be captured, their padding to buckets, and their replay."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specmamba.cache.memory import MemoryPlan
from specmamba.cache.shapes import pending_token_capacity
from specmamba.command_line import readable
from specmamba.config import EngineConfig
from specmamba.core import Batch, DraftTree
from specmamba.cuda_graphs import EagerReplay, GraphReplay, NativeReplay, Replay, bucket_for, bucket_sizes
from specmamba.draft.candidates import Candidates
from specmamba.draft.drafter import ChainDrafts, Drafter, HostPendingTokens, PlainDrafts
from specmamba.draft.sizing.sizer import DraftSize
from specmamba.engine.request import Request
from specmamba.engine.step_inputs import Sampling, StepInputs, StepKind
from specmamba.errors import ConfigError
from specmamba.kernels import gpu
from specmamba.kernels.draft_sizing import Chosen, Ints
from specmamba.verify.acceptance import AcceptPolicy
from specmamba.verify.pools import Pools
from specmamba.verify.result import StepOutput
from specmamba.verify.state_buffers import VerifySlots
from specmamba.verify.step import Drafts, GivenDrafts

NODES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)  # of the widest chosen tree, padded
PATIENCE = 16  # steps that take another kind before their own is recorded, which takes as long as many steps
FEW_NODES = (2, 4)  # of a request: the sizes of those kinds, and the largest trees
DEFAULT_LARGEST = 64  # largest captured batch without --cuda-graph-max-bs
RunStep = Callable[[Batch, Drafts, VerifySlots], StepOutput]


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
        self.inputs = StepInputs(buckets[-1], plan.max_nodes, device, plan.num_rows)
        self._wishes: dict[Hashable, int] = {}  # steps that wanted a kind before it was recorded
        self.is_patient = True  # a kind that was seldom wanted is not recorded yet
        self._draft_inputs = StepInputs(buckets[-1], plan.max_nodes, device)  # of drafts for some of the requests
        self._pools, self._device, self._max_nodes = pools, device, plan.max_nodes
        self._max_root_position = plan.context_length

    def bucket(self, batch_size: int) -> int | None:
        """Return the batch size that a batch is padded to; None: it is too large to be captured."""
        return bucket_for(batch_size, self.buckets)

    def run(
        self,
        requests: Sequence[Request],
        drafter: Drafter,
        run_step: RunStep,
        policy: AcceptPolicy,
        pending_tokens: HostPendingTokens | None,
        tree: DraftTree | None,
    ) -> StepOutput:
        """Replay a step.

        Args:
            requests: in order of their rows, no more than the largest bucket.
            drafter: drafts and observes in the step, if it is capturable.
            run_step: ``verify.step.step`` on the engine's target and pools.
            policy: that ``run_step`` follows.
            pending_tokens: as the drafter prepared them for the bucket.
            tree: drafted before the step, without distributions; None: the step drafts.
        """
        kind = self._kind(requests, drafter, pending_tokens)
        if tree is None:
            return self._replay(requests, pending_tokens, kind, run_step, policy, drafter, lambda: drafter)
        # drafts of varying size: powers of two, so that not every size is a kind of its own
        num_nodes = min(gpu.next_power_of_2(tree.shape.num_nodes), kind.num_nodes)
        is_chain = tree.shape.is_chain and tree.shape.num_nodes == num_nodes
        kind = kind._replace(num_nodes=num_nodes, is_chain=is_chain, max_children=tree.shape.max_children)
        return self._replay(
            requests,
            pending_tokens,
            kind,
            run_step,
            policy,
            None,  # a step on a given tree does not know its drafter
            lambda: GivenDrafts(self.inputs.tree(kind)),
            lambda: self.inputs.trees.write(tree),
        )

    def run_plain(
        self,
        requests: Sequence[Request],
        drafter: Drafter,
        run_step: RunStep,
        policy: AcceptPolicy,
        pending_tokens: HostPendingTokens | None,
    ) -> StepOutput:
        """Replay a step without drafts, in which the drafter follows the text. Arguments as for ``run``."""
        return self._run_fixed(requests, PlainDrafts(drafter), 1, run_step, policy, pending_tokens)

    def run_chains(
        self,
        requests: Sequence[Request],
        drafter: Drafter,
        run_step: RunStep,
        policy: AcceptPolicy,
        pending_tokens: HostPendingTokens | None,
        num_nodes: int,
    ) -> StepOutput:
        """Replay a step with chains of ``num_nodes`` nodes, roots included. Other arguments as for ``run``."""
        return self._run_fixed(requests, ChainDrafts(drafter, num_nodes), num_nodes, run_step, policy, pending_tokens)

    def _run_fixed(
        self,
        requests: Sequence[Request],
        drafts: PlainDrafts | ChainDrafts,
        num_nodes: int,
        run_step: RunStep,
        policy: AcceptPolicy,
        pending_tokens: HostPendingTokens | None,
    ) -> StepOutput:
        kind = self._kind(requests, drafts.drafter, pending_tokens)._replace(num_nodes=num_nodes)
        return self._replay(requests, pending_tokens, kind, run_step, policy, drafts, lambda: drafts)

    def offer(
        self, requests: Sequence[Request], drafter: Drafter, pending_tokens: HostPendingTokens | None, size: DraftSize
    ) -> Candidates:
        """Replay a draft; its numbers are valid until the next replay.

        Distributions that drafts are drawn from stay for ``run_chosen``.

        Args:
            requests: those that are drafted for.
            drafter: a capturable one.
            pending_tokens: of all requests of the step.
            size: depth of the draft, and who is drafted for.
        """
        inputs, own = self.inputs, pending_tokens
        if size.drafted is not None and pending_tokens is not None:
            inputs, own = self._draft_inputs, pending_tokens.of(np.flatnonzero(size.drafted).tolist())
        kind = self._kind(requests, drafter, own, inputs)._replace(num_nodes=size.depth)
        kind = self._deeper(kind, drafter, size)
        self._pools.table.upload()

        def draft() -> Candidates:
            found = drafter.offer(inputs.batch(kind), kind.num_nodes)
            if found.draft_probs is not None:
                self._keep_probs(drafter, kind.batch_size, found.draft_probs)
            return found

        key = "offer", kind, drafter, size.drafted is None
        found: Candidates = self.replay.run(key, draft, inputs.clear, lambda: inputs.write(requests, own))
        return found

    def run_chosen(
        self,
        requests: Sequence[Request],
        drafter: Drafter,
        run_step: RunStep,
        policy: AcceptPolicy,
        pending_tokens: HostPendingTokens | None,
        candidates: Candidates,
        chosen: Chosen,
        size: DraftSize,
    ) -> StepOutput:
        """Replay a step on trees that were chosen from ``candidates`` and written to ``inputs.trees``.

        Other arguments are as for ``run``.

        A capturable drafter has offered them by ``offer``, and observes in the step; any other one observes after it.
        """
        kind = self._kind(requests, drafter, pending_tokens if drafter.is_capturable else None)
        entries = None
        if candidates.draft_probs is not None:
            assert candidates.entries is not None
            if not drafter.is_capturable:
                self._keep_probs(drafter, kind.batch_size, candidates.draft_probs)
            kind = kind._replace(num_distributions=drafter.num_distributions)
            nodes = self.inputs.trees.arrays.candidates[: len(requests), : chosen.width]
            entries = _chosen_entries(candidates.entries, nodes, size, kind.num_distributions)
        observer = drafter if drafter.is_capturable else None
        kind = self._larger(self._sized(kind, chosen), policy, observer)
        return self._replay(
            requests,
            pending_tokens,
            kind,
            run_step,
            policy,
            observer,
            lambda: GivenDrafts(self.inputs.tree(kind), observer),
            lambda: self.inputs.trees.write_chosen(kind, entries),
        )

    def _keep_probs(self, drafter: Drafter, num_rows: int, draft_probs: Tensor) -> None:
        """Copy distributions to where captured steps read them."""
        size, count, vocab_size = draft_probs.shape
        kept = self.inputs.trees.draft_probs(num_rows, drafter.num_distributions, vocab_size)
        kept[:size, :count] = draft_probs

    def totals(self, batch_size: int) -> range:
        """Numbers of nodes to which verifies of chosen trees are padded."""
        size = self.bucket(batch_size) or batch_size
        step = max(1, size // 4)
        return range(step, size * self._max_nodes + 1, step)

    def _deeper(self, kind: StepKind, drafter: Drafter, size: DraftSize) -> StepKind:
        """The kind of a draft; the deepest one while it is not recorded and was seldom wanted."""
        deepest = kind._replace(num_nodes=drafter.max_steps)
        keys = [("offer", x, drafter, size.drafted is None) for x in (kind, deepest)]
        return deepest if self._waits(keys[0], keys[1]) else kind

    def _larger(self, kind: StepKind, policy: AcceptPolicy, name: Hashable) -> StepKind:
        """The kind of a verify; a larger one of few sizes while it is not recorded and was seldom wanted."""
        size, most = kind.batch_size, self._max_nodes
        nodes = next((n for n in FEW_NODES if n < most and num_tokens(kind) <= n * size), most)
        larger = kind._replace(num_nodes=most, num_packed=nodes * size)
        if size == 1:
            larger = kind._replace(num_nodes=max(nodes, kind.num_nodes), num_packed=0)
        return larger if self._waits((kind, policy, name), (larger, policy, name)) else kind

    def _waits(self, wanted: Hashable, other: Hashable) -> bool:
        """Whether a step takes another kind because its own is not recorded and was seldom wanted."""
        replay = self.replay
        if wanted == other or not self.is_patient or not isinstance(replay, NativeReplay) or replay.has_record(wanted):
            return False
        self._wishes[wanted] = self._wishes.get(wanted, 0) + 1
        return self._wishes[wanted] <= PATIENCE

    def _sized(self, kind: StepKind, chosen: Chosen) -> StepKind:
        """The kind of step that takes these trees."""
        width, size = chosen.width, kind.batch_size
        kind = kind._replace(max_children=self._max_nodes - 1)
        if size == 1:
            return kind._replace(num_nodes=width)
        width = min(next(n for n in NODES if n >= width), self._max_nodes)
        if chosen.num_nodes == size * width:
            return kind._replace(num_nodes=width)
        totals = self.totals(size)
        total = totals[-(-chosen.num_nodes // totals.step) - 1]
        return kind._replace(num_nodes=width, num_packed=total)

    def capture(self, drafter: Drafter, run_step: RunStep, policy: AcceptPolicy) -> None:
        """Capture the most frequent steps, on padding rows only: every bucket, greedy and with a temperature."""
        for bucket in reversed(self.buckets):  # the largest first: the others reuse its memory
            num_nodes = drafter.num_nodes(bucket)
            defers = (False, True) if drafter.has_pending_tokens and num_nodes == 1 else (False,)
            for is_drawn in (False, True):
                for is_deferred in defers:
                    most = drafter.max_nodes if drafter.has_pending_tokens else 0
                    kind = StepKind(bucket, num_nodes, Sampling(is_drawn), self._max_root_position, is_deferred)
                    kind = kind._replace(max_pending_tokens=most)
                    step = self._step(kind, run_step, lambda: drafter)
                    self.replay.run((kind, policy, drafter), step, self.inputs.clear, self.inputs.clear)

    def _replay(
        self,
        requests: Sequence[Request],
        pending_tokens: HostPendingTokens | None,
        kind: StepKind,
        run_step: RunStep,
        policy: AcceptPolicy,
        name: Hashable,
        drafts: Callable[[], Drafts],
        write_tree: Callable[[], None] | None = None,
    ) -> StepOutput:
        self._pools.table.upload()
        rows = [request.held_row for request in requests]
        slots = self._pools.state_buffers.place(rows, kind.num_nodes, is_captured=True)

        def fill() -> None:
            self.inputs.write(requests, pending_tokens)
            self.inputs.write_slots(slots)
            if write_tree is not None:
                write_tree()

        step = self._step(kind, run_step, drafts)
        output: StepOutput = self.replay.run((kind, policy, name), step, self.inputs.clear, fill)
        return output.first(len(requests))

    def _step(self, kind: StepKind, run_step: RunStep, drafts: Callable[[], Drafts]) -> Callable[[], StepOutput]:
        """Return the function that runs a step of this kind on the input buffers."""

        def step() -> StepOutput:
            batch = self.inputs.batch(kind)
            buffers = self._pools.state_buffers
            folds = buffers.folds_in_verify or buffers.folds_in_plan
            slots = self.inputs.slots(kind, buffers.node_offset(kind.num_nodes), folds, self._device)
            return run_step(batch, drafts(), slots)

        return step

    def _kind(
        self,
        requests: Sequence[Request],
        drafter: Drafter,
        pending_tokens: HostPendingTokens | None,
        inputs: StepInputs | None = None,
    ) -> StepKind:
        size = self.bucket(len(requests))
        assert size is not None
        last = self._max_root_position
        if not self.replay.has_fixed_shapes:
            last = max(request.root_position for request in requests)
        most = 0
        if pending_tokens is not None:
            most = drafter.max_nodes
            if not pending_tokens.is_deferred and max(pending_tokens.counts) > most:
                most = pending_token_capacity(most)
        return StepKind(
            batch_size=size,
            num_nodes=drafter.num_nodes(size),
            sampling=(inputs or self.inputs).write_settings(requests),
            max_root_position=last,
            is_deferred=pending_tokens is not None and pending_tokens.is_deferred,
            is_forced=any(request.forced_output_ids for request in requests),
            max_pending_tokens=most,
            keeps_tokens=pending_tokens is not None and pending_tokens.kept is not None,
        )


def num_tokens(kind: StepKind) -> int:
    """Tokens that the products of a step of this kind run on."""
    return kind.num_packed or kind.batch_size * kind.num_nodes


def _chosen_entries(entries: Tensor, nodes: Ints, size: DraftSize, num_distributions: int) -> Ints:
    """The distribution that the children of each node were drawn from, [B, N], among those of all drafted rows."""
    of_drafted = entries.cpu().numpy()
    rows = size.places(len(nodes))  # of those that are not drafted for, no entry is read
    found: Ints = of_drafted[rows[:, None], nodes] + rows[:, None] * num_distributions
    return found


def build_graph_runner(
    config: EngineConfig, pools: Pools, plan: MemoryPlan, device: torch.device, num_threads: int
) -> StepGraphRunner | None:
    """Build the graph runner; None where no step is captured: with the flag, and without native code on a CPU.

    ``num_threads``: of replays on a CPU.

    Raises:
        ConfigError: a GPU without Triton; only Triton kernels can be captured.
    """
    if config.disable_cuda_graph:
        return None
    replay = _replay(device, config.cuda_graph_max_bs is not None, num_threads)
    if replay is None:
        return None
    largest = min(config.cuda_graph_max_bs or DEFAULT_LARGEST, plan.num_running_requests)
    return StepGraphRunner(replay, bucket_sizes(largest), pools, plan, device)


def _replay(device: torch.device, pads: bool, num_threads: int) -> Replay[Any] | None:
    if device.type == "cpu":
        return NativeReplay(num_threads) if NativeReplay.is_available() else EagerReplay() if pads else None
    if not gpu.runs_on(device):
        raise ConfigError(
            "steps can only be captured with the kernels in Triton: pip install 'specmamba[gpu]' and leave "
            "SPECMAMBA_TRITON alone, or give --disable-cuda-graph"
        )
    return GraphReplay(device)


def capture_steps(
    graphs: StepGraphRunner | None, drafter: Drafter, run_step: RunStep, policy: AcceptPolicy, is_sized: bool
) -> list[str]:
    """Capture the most frequent steps; returns the lines of the start-up report about buckets, time and memory.

    Steps of drafters that read the host, and of drafts whose size is decided in each step, are captured when they are
    first needed.

    Raises:
        ConfigError: the memory beside weights and pools is too small for the graphs.
    """
    if graphs is None:
        return []
    sizes = ", ".join(map(str, graphs.buckets))
    if isinstance(graphs.replay, EagerReplay):
        return [f"steps are padded to batches of {sizes} and run operator by operator"]
    if not isinstance(graphs.replay, GraphReplay) or not drafter.is_capturable or is_sized:
        return [f"steps are captured for batches of {sizes}, each when it is first needed"]
    start = time.perf_counter()
    try:
        graphs.capture(drafter, run_step, policy)
    except torch.cuda.OutOfMemoryError as error:
        raise ConfigError(
            f"the memory beside weights and pools is too small to capture steps for batches of {sizes}: lower "
            "--cuda-graph-max-bs or --mem-fraction-static, or give --disable-cuda-graph"
        ) from error
    costs = graphs.replay.costs.values()
    took = f"{len(costs)} graphs in {time.perf_counter() - start:.1f} s, {readable(sum(c.num_bytes for c in costs))}"
    return [f"steps are captured for batches of {sizes}: {took}"]
