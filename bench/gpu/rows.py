"""The end-to-end rows: full batches of an engine, in this process."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specmamba import LLM, SamplingParams
from specmamba.bench.gpu.plan import PLAIN, Block
from specmamba.config import EngineConfig
from specmamba.errors import ConfigError
from specmamba.measure.full_batch import Job, Stretch, accept_length, run_full_batch
from specmamba.measure.prompts import bundled_texts, encode_prompt, seed_of

TEMPERATURE = 0.8
GRAPH_FIELD = "disable_cuda_graph"
MAX_ERROR_TEXT = 200  # characters


@dataclass(frozen=True)
class Load:
    """What every request of a row does."""

    device: str
    dtype: str
    max_tokens: int
    warm_up_tokens: int
    stretches: int  # measured runs of a row
    context_length: int = 1024


def engine_flags(block: Block, folder: Path | None, load: Load) -> dict[str, Any]:
    """Of the engine that runs a block.

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
    """Rows of a block as they are measured, and before them {"start_s"}; the engine is closed in any case."""
    began = time.perf_counter()
    llm = LLM(**engine_flags(block, folder, load))
    try:
        yield {"start_s": time.perf_counter() - began}
        for batch_size in block.batches:
            began = time.perf_counter()
            figures = measure_row(llm, batch_size, load)
            yield {**described(block, batch_size), **figures, "row_s": time.perf_counter() - began}
    finally:
        llm.close()
        del llm
        gc.collect()
        if load.device == "cuda":
            torch.cuda.empty_cache()


def described(block: Block, batch_size: int) -> dict[str, Any]:
    """What a row is of."""
    return {
        "model": block.model,
        "shape": block.shape.name,
        "batch_size": batch_size,
        "graphs": block.graphs,
        "state": block.state,
    }


def measure_row(llm: LLM, batch_size: int, load: Load) -> dict[str, Any]:
    """Tokens per second of all requests together, acceptance length and the time of a step. The first run warms up."""
    run_full_batch(llm, jobs_of(llm, batch_size, load, load.warm_up_tokens))
    jobs = jobs_of(llm, batch_size, load, load.max_tokens)
    stretches = [run_full_batch(llm, jobs) for _ in range(load.stretches)]
    return figures_of(stretches)


def figures_of(stretches: list[Stretch]) -> dict[str, Any]:
    """Medians over stretches: a kernel that is compiled in the middle of one shall not count."""
    return {
        "tokens_per_second": statistics.median(s.num_tokens / s.seconds for s in stretches),
        "accept_length": accept_length(stretches),
        "step_ms": statistics.median(s.step_ms for s in stretches),
        "steps": sum(s.num_steps for s in stretches),
    }


def jobs_of(llm: LLM, batch_size: int, load: Load, max_tokens: int) -> list[Job]:
    """As many requests: bundled prompts in turn, each request with a seed of its own."""
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
