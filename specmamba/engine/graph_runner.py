"""Captured steps: which steps can be captured, their padding to buckets, and their replay."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from specmamba.cache.memory import MemoryPlan
from specmamba.command_line import readable
from specmamba.config import EngineConfig
from specmamba.core import Batch, DraftTree
from specmamba.cuda_graphs import EagerReplay, GraphReplay, NativeReplay, Replay, bucket_for, bucket_sizes
from specmamba.draft.drafter import Drafter, HostPendingTokens
from specmamba.engine.request import Request
from specmamba.engine.step_inputs import Sampling, StepInputs, StepKind
from specmamba.errors import ConfigError
from specmamba.kernels import gpu
from specmamba.verify.acceptance import AcceptPolicy
from specmamba.verify.pools import Pools
from specmamba.verify.result import StepOutput
from specmamba.verify.state_buffers import VerifySlots
from specmamba.verify.step import Drafts, GivenDrafts

DEFAULT_LARGEST = 64  # largest captured batch without --cuda-graph-max-bs
RunStep = Callable[[Batch, Drafts, VerifySlots], StepOutput]


class StepGraphRunner:
    """Pads a batch to a bucket, writes its inputs to fixed buffers, and replays the captured step of this kind.

    A captured step does not depend on host values: numbers that shapes depend on are bounds for all batches, and
    exact values are in the buffers. A drafter that depends on host values drafts before the step and observes after
    it; any other drafter is part of the step.
    """

    def __init__(
        self, replay: Replay[StepOutput], buckets: tuple[int, ...], pools: Pools, plan: MemoryPlan, device: torch.device
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
        self.inputs = StepInputs(buckets[-1], plan.max_nodes, device)
        self._pools, self._device = pools, device
        self._max_root_position = plan.context_length

    def bucket(self, batch_size: int) -> int | None:
        """Return the batch size that a batch is padded to; None: it is too large to be captured."""
        return bucket_for(batch_size, self.buckets)

    @staticmethod
    def fits(pending_tokens: HostPendingTokens | None, drafter: Drafter) -> bool:
        """Whether the pending tokens of a draft head fit a captured step: no more than what one step decides.

        A drafter that drafts before the step runs them there, with the shapes of the batch.
        """
        if pending_tokens is None:
            return True
        return drafter.is_capturable and (pending_tokens.is_deferred or max(pending_tokens.counts) <= drafter.max_nodes)

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
        kind = self._kind(requests, drafter, pending_tokens, tree)
        self._pools.table.upload()
        rows = [request.held_row for request in requests]
        slots = self._pools.state_buffers.place(rows, kind.num_nodes, is_captured=True)

        def fill() -> None:
            self.inputs.write(requests, slots, pending_tokens)
            if tree is not None:
                self.inputs.write_tree(tree)

        step = self._step(kind, drafter, run_step, has_tree=tree is not None)
        key = kind, policy, drafter if tree is None else None  # a step on a given tree does not know its drafter
        return self.replay.run(key, step, self.inputs.clear, fill).first(len(requests))

    def capture(self, drafter: Drafter, run_step: RunStep, policy: AcceptPolicy) -> None:
        """Capture the most frequent steps, on padding rows only: every bucket, greedy and with a temperature."""
        for bucket in reversed(self.buckets):  # the largest first: the others reuse its memory
            num_nodes = drafter.num_nodes(bucket)
            defers = (False, True) if drafter.has_pending_tokens and num_nodes == 1 else (False,)
            for is_drawn in (False, True):
                for is_deferred in defers:
                    kind = StepKind(bucket, num_nodes, Sampling(is_drawn), self._max_root_position, is_deferred)
                    step = self._step(kind, drafter, run_step, has_tree=False)
                    self.replay.run((kind, policy, drafter), step, self.inputs.clear, self.inputs.clear)

    def _step(self, kind: StepKind, drafter: Drafter, run_step: RunStep, has_tree: bool) -> Callable[[], StepOutput]:
        """Return the function that runs a step of this kind on the input buffers."""

        def step() -> StepOutput:
            batch = self.inputs.batch(kind, drafter.max_nodes if drafter.has_pending_tokens else None)
            buffers = self._pools.state_buffers
            folds = buffers.folds_in_verify or buffers.folds_in_plan
            slots = self.inputs.slots(kind, buffers.node_offset(kind.num_nodes), folds, self._device)
            return run_step(batch, GivenDrafts(self.inputs.tree(kind)) if has_tree else drafter, slots)

        return step

    def _kind(
        self,
        requests: Sequence[Request],
        drafter: Drafter,
        pending_tokens: HostPendingTokens | None,
        tree: DraftTree | None,
    ) -> StepKind:
        size = self.bucket(len(requests))
        assert size is not None
        last = self._max_root_position
        if not self.replay.has_fixed_shapes:
            last = max(request.root_position for request in requests)
        num_nodes = drafter.num_nodes(size)
        if tree is not None:  # drafts of varying size: powers of two, so that not every size is a kind of its own
            num_nodes = min(gpu.next_power_of_2(tree.shape.num_nodes), num_nodes)
        return StepKind(
            batch_size=size,
            num_nodes=num_nodes,
            sampling=self.inputs.write_settings(requests),
            max_root_position=last,
            is_deferred=pending_tokens is not None and pending_tokens.is_deferred,
            is_forced=any(request.forced_output_ids for request in requests),
            is_chain=tree is not None and tree.shape.is_chain and tree.shape.num_nodes == num_nodes,
            max_children=1 if tree is None else tree.shape.max_children,
        )


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


def _replay(device: torch.device, pads: bool, num_threads: int) -> Replay[StepOutput] | None:
    if device.type == "cpu":
        return NativeReplay(num_threads) if NativeReplay.is_available() else EagerReplay() if pads else None
    if not gpu.runs_on(device):
        raise ConfigError(
            "steps can only be captured with the kernels in Triton: pip install 'specmamba[gpu]' and leave "
            "SPECMAMBA_TRITON alone, or give --disable-cuda-graph"
        )
    return GraphReplay(device)


def capture_steps(
    graphs: StepGraphRunner | None, drafter: Drafter, run_step: RunStep, policy: AcceptPolicy
) -> list[str]:
    """Capture the most frequent steps; returns the lines of the start-up report about buckets, time and memory.

    Steps of drafters that read the host are captured when they are first needed.

    Raises:
        ConfigError: the memory beside weights and pools is too small for the graphs.
    """
    if graphs is None:
        return []
    sizes = ", ".join(map(str, graphs.buckets))
    if isinstance(graphs.replay, EagerReplay):
        return [f"steps are padded to batches of {sizes} and run operator by operator"]
    if not isinstance(graphs.replay, GraphReplay) or not drafter.is_capturable:
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
