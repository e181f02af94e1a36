"""What a plain decode step has to cost, and where the rest of its time goes."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from specmamba import LLM, SamplingParams
from specmamba.config import EngineConfig
from specmamba.kernels import linear

PROMPT = "def main():\n"
STEPS = 64
LINEAR_PASSES = 7
GROUPS = {
    "PyTorch's matrix products": ("linear", "addmm", "aten::mm", "bmm", "triangular"),
    "attention": ("attention",),
}


class OperatorCount(TorchDispatchMode):
    """Counts operator calls that reach a kernel or make a view."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def floor_report(config: EngineConfig) -> dict[str, Any]:
    """Measure plain decoding of one request.

    Returns:
        ``weight_bytes`` a step reads; ``linear_gb_per_s``, what layers of the model's size reach when one row is
        multiplied by one after the other; ``floor_ms`` = the one over the other; ``step_ms`` (median), and
        ``share_of_floor`` = floor over step; ``operators`` of PyTorch per step, and ``shares`` of the step's time by
        kind of work.
    """
    flags = config.model_dump(
        include=set(EngineConfig.model_fields),
        exclude={"speculative_algorithm", "speculative_num_steps", "speculative_num_draft_tokens"},
    )
    with LLM(**flags, speculative_algorithm="none") as llm:
        model = llm.engine.model
        # every weight is read once per step; a tied embedding is read as the output head
        weight_bytes = model.num_parameters * model.cache_shape.dtype.itemsize
        step_ms = statistics.median(_step_times(llm)) * 1e3
        bandwidth = linear_bandwidth(config.model_path, weight_bytes, model.cache_shape.dtype)
        floor_ms = weight_bytes / bandwidth * 1e3
        return {
            "weight_bytes": weight_bytes,
            "linear_gb_per_s": bandwidth / 1e9,
            "floor_ms": floor_ms,
            "step_ms": step_ms,
            "share_of_floor": floor_ms / step_ms,
            "operators": _count_operators(llm),
            "shares": _shares(llm),
        }


def linear_bandwidth(model_path: str, weight_bytes: int, dtype: torch.dtype) -> float:
    """Bytes per second at which one row goes through linear layers of the MLP's size, as many as the model weighs.

    So what holds the model in a cache, if anything does, holds these too.
    """
    shape = AutoConfig.from_pretrained(model_path).get_text_config()
    size = 2 * shape.intermediate_size, shape.hidden_size
    weight = torch.randn(size).to(dtype)
    layers = [linear.pack(weight.clone()) for _ in range(max(1, weight_bytes // weight.nbytes))]
    x = torch.randn(1, shape.hidden_size).to(dtype)
    times = []
    for _ in range(LINEAR_PASSES):
        began = time.perf_counter()
        for layer in layers:
            layer(x)
        times.append(time.perf_counter() - began)
    return len(layers) * weight.nbytes / statistics.median(times)


def _decode(llm: LLM) -> None:
    """Bring one request to where every further step is plain decoding."""
    llm.engine.close()
    prompt = llm.engine.tokenizer.encode(PROMPT)
    params = SamplingParams(max_tokens=1000, temperature=0.0, ignore_eos=True)
    llm.engine.add_request("floor", prompt, params)
    for _ in range(16):
        llm.engine.step()


def _step_times(llm: LLM) -> list[float]:
    _decode(llm)
    times = []
    for _ in range(STEPS):
        began = time.perf_counter()
        llm.engine.step()
        times.append(time.perf_counter() - began)
    return times


def _count_operators(llm: LLM) -> int:
    _decode(llm)
    with OperatorCount() as count:
        for _ in range(STEPS):
            llm.engine.step()
    return int(count.calls / STEPS)


def _shares(llm: LLM) -> dict[str, float]:
    """Shares of wall time. What no operator of PyTorch accounts for is in native kernels, and in Python between calls,
    to which the profiler adds."""
    _decode(llm)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        began = time.perf_counter()
        for _ in range(STEPS):
            llm.engine.step()
        wall_us = (time.perf_counter() - began) * 1e6
    spent = dict.fromkeys([*GROUPS, "all other operators"], 0.0)
    for event in recorded.key_averages():
        group = next((g for g, names in GROUPS.items() if any(n in event.key for n in names)), "all other operators")
        spent[group] += event.self_cpu_time_total
    shares = {group: round(us / wall_us, 3) for group, us in spent.items()}
    return {**shares, "native kernels and Python": round(1 - sum(shares.values()), 3)}
