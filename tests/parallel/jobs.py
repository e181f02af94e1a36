"""Texts and logits of one engine, by itself or on one of several ranks that make the same calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypedDict
from unittest.mock import patch

from torch import Tensor

from specmamba.config import EngineConfig
from specmamba.cuda_graphs import NativeReplay
from specmamba.engine import runner, scheduler
from specmamba.engine.engine import Engine
from specmamba.parallel.ranks import ONE_RANK, Ranks
from specmamba.sampling_params import SamplingParams
from specmamba.verify.result import known_token_logprobs
from tests.taught import teach

SMALL: dict[str, Any] = {
    "dtype": "float32",
    "max_running_requests": 4,
    "context_length": 128,
    "max_total_tokens": 512,
    "max_mamba_cache_size": 24,
}


class Job(TypedDict):
    """What an engine is to do; plain values, so that it travels as JSON."""

    name: str
    flags: dict[str, Any]
    prompts: list[list[int]]
    params: dict[str, Any]
    is_repeated: bool  # all prompts again, one after the other: their prefixes are cached then
    taught: list[list[int]]  # texts that drafts are made of; none: drafts are as they are


class Answer(TypedDict):
    """Of one prompt."""

    tokens: list[int]
    logprobs: list[list[tuple[int, float]]]  # the likeliest tokens at every position, of the prompt first
    num_cached: int
    num_accepted: int


def run_job(job: Job, ranks: Ranks = ONE_RANK) -> dict[str, Any]:
    """Load the engine, answer the prompts, and close it."""
    of_one = {"ep_size": 1} if ranks.size == 1 else {}
    config = EngineConfig(**SMALL | {"tp_size": ranks.size} | job["flags"] | of_one)
    engine, logits = Engine(config.on_device("cpu"), ranks), list[Any]()
    try:
        if job["taught"]:
            with TemporaryDirectory() as folder:
                teach(engine, job["taught"], Path(folder))
        # as many preemptions as can be had
        with patch.object(runner, "known_token_logprobs", recording(logits)), patch.object(scheduler, "HEADROOM", 0):
            answers = _run(engine, job, "")
        for i in range(len(job["prompts"]) if job["is_repeated"] else 0):
            answers += _run(engine, {**job, "prompts": [job["prompts"][i]]}, f"again-{i}-")
        kv = [(shape.num_layers, shape.num_heads) for shape in engine.model.cache_shape.kv]
        graphs = engine.runner.graph_runner
        num_tapes = len(graphs.replay.tapes) if graphs is not None and isinstance(graphs.replay, NativeReplay) else 0
        return {
            "answers": answers,
            "prompt_logits": logits,
            "num_preemptions": engine.stats().num_preemptions,
            "kv": kv,
            "num_tapes": num_tapes,
            "is_recordable": ranks.is_recordable,
        }
    finally:
        engine.close()


def recording(logits: list[Any]) -> Callable[..., Any]:
    """``known_token_logprobs``, which leaves the logits of all positions that it is called for."""
    compute = known_token_logprobs

    def computed(hidden: Tensor, tokens: Any, of: Callable[[Tensor], Tensor], *rest: Any) -> Any:
        def kept(part: Tensor) -> Tensor:
            found = of(part)
            logits.append(found.tolist())
            return found

        return compute(hidden, tokens, kept, *rest)

    return computed


def _run(engine: Engine, job: Job, prefix: str) -> list[Answer]:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **job["params"]})
    ids = [f"{prefix}{i}" for i in range(len(job["prompts"]))]
    answers = {i: Answer(tokens=[], logprobs=[], num_cached=0, num_accepted=0) for i in ids}
    for request_id, prompt in zip(ids, job["prompts"], strict=True):
        engine.add_request(request_id, prompt, params)
    while engine.has_unfinished_requests:
        for delta in engine.step():
            assert delta.error is None, delta.error
            answer = answers[delta.request_id]
            answer["tokens"] += delta.token_ids
            listed = (*(delta.prompt_logprobs or ()), *delta.logprobs)
            answer["logprobs"] += [list(entry.top) for entry in listed if entry is not None]
            answer["num_cached"], answer["num_accepted"] = delta.num_cached_tokens, delta.spec.num_accepted_tokens
    return list(answers.values())


def prompts(vocab_size: int, lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    """Random texts."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def job(
    name: str, folder: Path, texts: list[list[int]], *, repeat: bool = False, taught: Any = (), **flags: Any
) -> Job:
    """A job on a checkpoint; ``params`` among the flags are those of the requests."""
    params = flags.pop("params", {})
    flags = {"model": str(folder), "speculative_algorithm": "none", **flags}
    return Job(name=name, flags=flags, prompts=texts, params=params, is_repeated=repeat, taught=list(taught))
