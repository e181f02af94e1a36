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
STEPS = 64  # of each count
ROUNDS = 7  # of timed steps and a pass over linear layers, in turns: bandwidth changes from minute to minute
STEPS_PER_ROUND = 16
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
        multiplied by one after the other; ``floor_ms`` = the one over the other; ``step_ms``; ``share_of_floor``, the
        floor over the step right before it: all medians over rounds. ``operators`` of PyTorch per step, and ``shares``
        of the step's time by kind of work.
    """
    flags = config.model_dump(include=set(EngineConfig.model_fields), exclude={"speculative_algorithm"})
    with LLM(**flags, speculative_algorithm="none") as llm:
        model = llm.engine.model
        # every weight is read once per step; a tied embedding is read as the output head
        weight_bytes = model.num_parameters * model.cache_shape.dtype.itemsize
        layers = LinearLayers(config.model_path, weight_bytes, model.cache_shape.dtype)
        rounds = _timed_rounds(llm, layers)
        floor = statistics.median(floor for floor, _ in rounds)
        return {
            "weight_bytes": weight_bytes,
            "linear_gb_per_s": weight_bytes / floor / 1e9,
            "floor_ms": floor * 1e3,
            "step_ms": statistics.median(step for _, step in rounds) * 1e3,
            "share_of_floor": statistics.median(floor / step for floor, step in rounds),
            "operators": _count_operators(llm),
            "shares": _shares(llm),
        }


class LinearLayers:
    """Linear layers of the MLP's size, as many as the model weighs: what holds the model in a cache holds these too."""

    def __init__(self, model_path: str, weight_bytes: int, dtype: torch.dtype) -> None:
        shape = AutoConfig.from_pretrained(model_path).get_text_config()
        weight = torch.randn(2 * shape.intermediate_size, shape.hidden_size).to(dtype)
        self._layers = [linear.pack(weight.clone()) for _ in range(max(1, weight_bytes // weight.nbytes))]
        self._scale = weight_bytes / (len(self._layers) * weight.nbytes)
        self._x = torch.randn(1, shape.hidden_size).to(dtype)

    def seconds(self) -> float:
        """Multiply one row by one layer after the other; the time that the model's bytes take at this speed."""
        began = time.perf_counter()
        for layer in self._layers:
            layer(self._x)
        return (time.perf_counter() - began) * self._scale


def _decode(llm: LLM) -> None:
    """Bring one request to where every further step is plain decoding."""
    llm.engine.abort("floor")
    prompt = llm.engine.tokenizer.encode(PROMPT)
    params = SamplingParams(max_tokens=1000, temperature=0.0, ignore_eos=True)
    llm.engine.add_request("floor", prompt, params)
    for _ in range(16):
        llm.engine.step()


def _timed_rounds(llm: LLM, layers: LinearLayers) -> list[tuple[float, float]]:
    """Seconds of the floor and of a step, by round."""
    _decode(llm)
    layers.seconds()  # warm up
    rounds = []
    for _ in range(ROUNDS):
        times = []
        for _ in range(STEPS_PER_ROUND):
            began = time.perf_counter()
            llm.engine.step()
            times.append(time.perf_counter() - began)
        rounds.append((layers.seconds(), statistics.median(times)))
    return rounds


def _count_operators(llm: LLM) -> int:
    _decode(llm)
    with OperatorCount() as count:
        for _ in range(STEPS):
            llm.engine.step()
    return int(count.calls / STEPS)


def _shares(llm: LLM) -> dict[str, float]:
    """Shares of the wall time of a step.

    What no operator of PyTorch accounts for is in native kernels and in Python between calls, which the
    profiler slows down.
    """
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
