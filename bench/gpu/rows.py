"""Runs on the engines of ``specmamba bench gpu``: end-to-end rows of full batches, and texts that must agree.

**Texts**: whether the GPU writes the texts of the CPU, greedily, on the demo. In float32 all tokens should be equal (a
difference is judged too, because the two devices add up in different orders). In bfloat16 decoding with drafts is
compared with plain decoding, both on the GPU; near ties may differ.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specmamba import LLM, SamplingParams
from specmamba.bench.gpu.plan import CHAIN, PLAIN, TEMPERATURE, TREE, Block, Shape
from specmamba.bench.gpu.replays import profile_replays
from specmamba.config import EngineConfig
from specmamba.errors import ConfigError, RequestError
from specmamba.measure.acceptance.judge import Judge
from specmamba.measure.full_batch import Job, Stretch, accept_length, run_full_batch
from specmamba.measure.prompts import PLAIN_FLAGS, bundled_texts, encode_prompt, seed_of

GRAPH_FIELD = "disable_cuda_graph"
MAX_ERROR_TEXT = 200  # characters
Texts = list[tuple[int, ...]]
CONTEXT = 1024


@dataclass(frozen=True)
class Load:
    """The load of every row."""

    device: str
    dtype: str
    max_tokens: int
    warm_up_tokens: int
    stretches: int  # measured runs of a row
    context_length: int = 1024


def engine_flags(block: Block, folder: Path | None, load: Load) -> dict[str, Any]:
    """The flags of the engine that runs a block.

    Raises:
        ConfigError: this version captures no graphs.
    """
    if GRAPH_FIELD not in EngineConfig.model_fields and block.graphs and load.device != "cpu":
        raise ConfigError("this version captures no CUDA graphs")
    graphs = {GRAPH_FIELD: not block.graphs} if GRAPH_FIELD in EngineConfig.model_fields else {}
    return {
        "model": None if folder is None else str(folder),
        "device": load.device,
        "dtype": load.dtype,
        "num_threads": 1 if load.device == "cpu" else None,
        "context_length": load.context_length,
        "disable_radix_cache": True,
        "max_running_requests": max(block.batches),
        "chunked_prefill_size": 8192,  # all prompts of a batch in one step
        "speculative_state": block.state,
        **block.shape.flags,
        **graphs,
    }


def run_block(block: Block, folder: Path | None, load: Load) -> Iterator[dict[str, Any]]:
    """Run the rows of a block on one engine, which is closed at the end.

    Yields:
        {"start_s"}, the seconds to start the engine; then the figures of each row.
    """
    began = time.perf_counter()
    llm = LLM(**engine_flags(block, folder, load))
    try:
        yield {"start_s": time.perf_counter() - began}
        for batch_size in block.batches:
            began = time.perf_counter()
            figures = measure_row(llm, batch_size, load)
            if block.graphs and block.state == "records" and load.device == "cuda":
                jobs = jobs_of(llm, batch_size, load, load.max_tokens)
                figures["replay"] = profile_replays(llm, jobs, figures["step_ms"])
            yield {**described(block, batch_size), **figures, "row_s": time.perf_counter() - began}
    finally:
        llm.close()
        del llm
        gc.collect()
        if load.device == "cuda":
            torch.cuda.empty_cache()


def described(block: Block, batch_size: int) -> dict[str, Any]:
    """The columns that identify a row."""
    return {
        "model": block.model,
        "shape": block.shape.name,
        "batch_size": batch_size,
        "graphs": block.graphs,
        "state": block.state,
    }


def measure_row(llm: LLM, batch_size: int, load: Load) -> dict[str, Any]:
    """Measure a full batch: tokens per second of all requests, acceptance length, time of a step. One run warms up."""
    run_full_batch(llm, jobs_of(llm, batch_size, load, load.warm_up_tokens))
    jobs = jobs_of(llm, batch_size, load, load.max_tokens)
    stretches = [run_full_batch(llm, jobs) for _ in range(load.stretches)]
    return figures_of(stretches)


def figures_of(stretches: list[Stretch]) -> dict[str, Any]:
    """Medians over stretches, so that a kernel that is compiled during one does not count."""
    return {
        "tokens_per_second": statistics.median(s.num_tokens / s.seconds for s in stretches),
        "accept_length": accept_length(stretches),
        "step_ms": statistics.median(s.step_ms for s in stretches),
        "steps": sum(s.num_steps for s in stretches),
    }


def jobs_of(llm: LLM, batch_size: int, load: Load, max_tokens: int) -> list[Job]:
    """``batch_size`` requests: bundled prompts in turns, each request with a seed of its own."""
    texts = bundled_texts()
    room = load.context_length - max_tokens - 1
    prompts = [encode_prompt(text, llm.engine.tokenizer)[-room:] for text in texts]
    jobs = []
    for i in range(batch_size):
        seed = seed_of(0, i)
        params = SamplingParams(max_tokens=max_tokens, temperature=TEMPERATURE, seed=seed, ignore_eos=True)
        jobs.append(Job(tuple(prompts[i % len(prompts)]), params))
    return jobs


def with_speed_up(row: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The row with its speed-up over plain decoding of the same batch, graphs and model; None where that is missing."""
    alike = ("model", "batch_size", "graphs")
    plain = [r for r in rows if r["shape"] == PLAIN.name and all(r[name] == row[name] for name in alike)]
    ratio = row["tokens_per_second"] / plain[0]["tokens_per_second"] if plain else None
    return {**row, "speed_up": 1.0 if row["shape"] == PLAIN.name else ratio}


def compare_texts(device: str, num_prompts: int, max_tokens: int) -> dict[str, Any]:
    """Count texts by type and drafts: {"float32": {"plain": {"identical", "near_tie", "diverged"}, ...}, ...}.

    Raises:
        RequestError: the model's numbers are not finite.
    """
    found: dict[str, Any] = {"num_prompts": num_prompts, "max_tokens": max_tokens}
    texts = {shape: _generate(device, "float32", shape, num_prompts, max_tokens) for shape in (PLAIN, CHAIN, TREE)}
    found["float32"] = _judged("cpu", "float32", texts, num_prompts, max_tokens)
    texts = {shape: _generate(device, "bfloat16", shape, num_prompts, max_tokens) for shape in (CHAIN, TREE)}
    found["bfloat16"] = _judged(device, "bfloat16", texts, num_prompts, max_tokens)
    return found


def _engine(device: str, dtype: str, shape: Shape) -> LLM:
    flags: dict[str, Any] = {"device": device, "dtype": dtype} | ({"num_threads": 1} if device == "cpu" else {})
    return LLM(context_length=CONTEXT, disable_radix_cache=True, **shape.flags, **flags)


def _prompts(llm: LLM, count: int, max_tokens: int) -> list[list[int]]:
    room = CONTEXT - max_tokens - 1
    return [encode_prompt(text, llm.engine.tokenizer)[-room:] for text in bundled_texts()[:count]]


def _generate(device: str, dtype: str, shape: Shape, count: int, max_tokens: int) -> Texts:
    with _engine(device, dtype, shape) as llm:
        return _texts(llm, _prompts(llm, count, max_tokens), max_tokens)


def _texts(llm: LLM, prompts: Sequence[list[int]], max_tokens: int) -> Texts:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    for output in outputs:
        if output.finish_reason == "error":
            raise RequestError(output.error or "the model's numbers are not finite")
    return [output.token_ids for output in outputs]


def _judged(device: str, dtype: str, texts: dict[Shape, Texts], count: int, max_tokens: int) -> dict[str, Any]:
    """Compare the texts of each kind of drafts with plain decoding on ``device``, which also judges differences."""
    with _engine(device, dtype, PLAIN) as llm:
        prompts = _prompts(llm, count, max_tokens)
        plain = _texts(llm, prompts, max_tokens)
        llm.workbench.use_drafts(**PLAIN_FLAGS)
        judge = Judge(llm.workbench.logits_along, getattr(torch, dtype), 0.0)
        return {shape.name: _count(judge, prompts, plain, found) for shape, found in texts.items()}


def _count(judge: Judge, prompts: Sequence[list[int]], plain: Texts, found: Texts) -> dict[str, int]:
    counts = {"identical": 0, "near_tie": 0, "diverged": 0}
    for number, (prompt, expected, got) in enumerate(zip(prompts, plain, found, strict=True)):
        difference = judge.compare(number, prompt, 0, expected, got)
        counts["identical" if difference is None else difference.kind] += 1
    return counts
