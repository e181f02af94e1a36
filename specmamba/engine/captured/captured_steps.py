"""Whether steps are captured, and the capture of the most frequent ones at the start."""

from __future__ import annotations

import time
from typing import Any

import torch

from specmamba.cache.memory import MemoryPlan
from specmamba.config import EngineConfig
from specmamba.cuda_graphs import EagerReplay, GraphReplay, NativeReplay, Replay, bucket_sizes
from specmamba.engine.captured.graph_runner import StepCall, StepGraphRunner
from specmamba.errors import ConfigError
from specmamba.flags.command_line import readable
from specmamba.kernels import gpu
from specmamba.parallel.ranks import Ranks
from specmamba.verify.pools import Pools


def build_graph_runner(
    config: EngineConfig, pools: Pools, plan: MemoryPlan, device: torch.device, num_threads: int, ranks: Ranks
) -> StepGraphRunner | None:
    """Build the graph runner; None where no step is captured: with the flag, and without native code on a CPU.

    Args:
        config, pools, plan, device: of the engine.
        num_threads: of replays on a CPU.
        ranks: that share the model.

    Raises:
        ConfigError: a GPU without Triton; only Triton kernels can be captured. Or steps of several ranks are to be
            captured on GPUs.
    """
    if config.disable_cuda_graph and config.cuda_graph_max_bs is None:
        return None
    if ranks.size > 1 and device.type == "cuda":
        raise ConfigError("--cuda-graph-max-bs: on GPUs steps of several ranks are not captured: drop it")
    pads, planned = config.cuda_graph_max_bs is not None, plan.graph_pool_bytes
    replay = _replay(device, pads, num_threads, ranks.is_recordable, planned)
    if replay is None:
        return None
    largest = min(config.largest_captured_batch, plan.num_running_requests)
    return StepGraphRunner(replay, bucket_sizes(largest), pools, plan, device)


def _replay(
    device: torch.device, pads: bool, num_threads: int, is_recordable: bool, planned_bytes: int
) -> Replay[Any] | None:
    if device.type == "cpu":
        is_recorded = is_recordable and NativeReplay.is_available() and not gpu.is_interpreted()  # no kernel of Triton
        return NativeReplay(num_threads) if is_recorded else EagerReplay() if pads else None
    off = gpu.choice().off
    if off or not gpu.runs_on(device):
        way = f"leave {gpu.SWITCH} alone (it turns off {', '.join(off)})" if off else "pip install 'specmamba[gpu]'"
        raise ConfigError(f"steps can only be captured with the kernels in Triton: {way}, or give --disable-cuda-graph")
    return GraphReplay(device, planned_bytes)


def capture_steps(graphs: StepGraphRunner | None, call: StepCall, is_sized: bool) -> list[str]:
    """Capture the most frequent steps; returns the lines of the start-up report about buckets, time and memory.

    Steps of drafters that read the host, and of drafts whose size is decided in each step, are captured when they are
    first needed. ``call`` has no requests.

    Raises:
        ConfigError: the memory beside weights and pools is too small for the graphs.
    """
    if graphs is None:
        return []
    sizes = ", ".join(map(str, graphs.buckets))
    if isinstance(graphs.replay, EagerReplay):
        return [f"steps are padded to batches of {sizes} and run operator by operator"]
    if not isinstance(graphs.replay, GraphReplay) or not call.drafter.is_capturable or is_sized:
        return [f"steps are captured for batches of {sizes}, each when it is first needed"]
    start = time.perf_counter()
    try:
        graphs.capture(call)
    except torch.cuda.OutOfMemoryError as error:
        raise ConfigError(
            f"the memory beside weights and pools is too small to capture steps for batches of {sizes}: lower "
            "--cuda-graph-max-bs or --mem-fraction-static, or give --disable-cuda-graph"
        ) from error
    replay, planned = graphs.replay, readable(graphs.replay.planned_bytes)
    seconds = f"{len(replay.costs)} graphs in {time.perf_counter() - start:.1f} s"
    took = f"{seconds}, {readable(replay.pool_bytes)} of {planned} that were planned"
    return [f"steps are captured for batches of {sizes}: {took}"]
