"""Which steps are replayed, and how: from flags to buckets, and what capturing them took."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from specmamba.config import EngineConfig
from specmamba.console import readable
from specmamba.cuda_graphs import EagerReplay, GraphReplay, Replay, bucket_sizes
from specmamba.engine.outcome import Outcome
from specmamba.engine.replayed_step import ReplayedSteps
from specmamba.errors import ConfigError
from specmamba.kernels import gpu

if TYPE_CHECKING:
    from specmamba.cache.memory import MemoryPlan
    from specmamba.engine.runner import Pools, Runner

DEFAULT_LARGEST = 64


def build_replays(config: EngineConfig, pools: Pools, plan: MemoryPlan, device: torch.device) -> ReplayedSteps | None:
    """What replays steps; None where nothing is to be replayed: on a CPU, unless buckets were asked for.

    Raises:
        ConfigError: a GPU without Triton, whose kernels alone can be captured.
    """
    if config.disable_cuda_graph or (device.type == "cpu" and config.cuda_graph_max_bs is None):
        return None
    if device.type == "cuda" and not gpu.runs_on(device):
        raise ConfigError(
            "steps can only be captured with the kernels in Triton: pip install 'specmamba[gpu]' and leave "
            "SPECMAMBA_TRITON alone, or give --disable-cuda-graph"
        )
    replay: Replay[Outcome] = GraphReplay(device) if device.type == "cuda" else EagerReplay()
    largest = min(config.cuda_graph_max_bs or DEFAULT_LARGEST, plan.num_running_requests)
    table, longest = pools.table, plan.context_length
    return ReplayedSteps(replay, bucket_sizes(largest), pools.records, table, plan.max_nodes, longest, device)


def capture(runner: Runner) -> list[str]:
    """Capture what is needed most, and say what it took, for people at start-up."""
    replays = runner.replays
    if replays is None:
        return []
    sizes = ", ".join(map(str, replays.buckets))
    if not isinstance(replays.replay, GraphReplay):
        return [f"steps are padded to batches of {sizes} and run operator by operator"]
    if not runner.drafter.is_capturable:
        return [f"steps are captured for batches of {sizes}, each when it is first needed"]
    start = time.perf_counter()
    try:
        runner.capture()
    except torch.cuda.OutOfMemoryError as error:
        raise ConfigError(
            f"the memory beside weights and pools is too small to capture steps for batches of {sizes}: lower "
            "--cuda-graph-max-bs or --mem-fraction-static, or give --disable-cuda-graph"
        ) from error
    costs = replays.replay.costs.values()
    took = f"{len(costs)} graphs in {time.perf_counter() - start:.1f} s, {readable(sum(c.num_bytes for c in costs))}"
    return [f"steps are captured for batches of {sizes}: {took}"]
