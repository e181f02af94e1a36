"""Batches of requests through ``LLM.generate`` and through HTTP, in turns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from specmamba.bench.http_overhead.client import ask_all, num_tokens, request_bytes
from specmamba.bench.http_overhead.tables import WAYS, summary
from specmamba.bench.serving.server import started_server
from specmamba.config import EngineConfig
from specmamba.errors import SpecmambaError
from specmamba.measure.prompts import PLAIN_FLAGS, bundled_texts, model_name, seed_of
from specmamba.measure.report import machine, progress_bar, versions

if TYPE_CHECKING:
    from specmamba.bench.http_overhead.__main__ import HttpOverheadConfig
    from specmamba.llm import LLM

Batch = Callable[[int], float]  # clients -> tokens per second


def run(config: HttpOverheadConfig) -> dict[str, Any]:
    """All rounds; the report as a JSON object. Raises SpecmambaError."""
    flags = config.model_dump(include=set(EngineConfig.model_fields))
    settings = [flags | PLAIN_FLAGS]
    if config.speculative_algorithm != "none":
        settings.insert(0, flags)
    measured = [_measure(config, EngineConfig(**each)) for each in settings]
    described = measured[0][0]
    return {
        "model": model_name(described),
        "machine": machine(),
        "versions": versions(("specmamba", "torch", "uvicorn", "starlette")),
        "dtype": described["dtype"],
        "rounds": config.rounds,
        "max_tokens": config.max_tokens,
        "temperature": config.temperature,
        "results": [row for _, rows in measured for row in rows],
    }


def _measure(config: HttpOverheadConfig, engine: EngineConfig) -> tuple[dict[str, object], list[dict[str, Any]]]:
    """One setting of drafts: what its engine says of itself, and a row per level."""
    from specmamba.llm import LLM

    with started_server(engine, None, config.startup_timeout) as (url, server), LLM(**engine.model_dump()) as llm:
        described = llm.engine.describe()
        batches = dict(zip(WAYS, _batches(config, llm, url), strict=True))
        rates = _play(config, batches, str(described["speculative_algorithm"]))
        server.check()
    rows = [summary(str(described["speculative_algorithm"]), clients, rates[clients]) for clients in config.concurrency]
    return described, rows


def _play(config: HttpOverheadConfig, batches: dict[str, Batch], label: str) -> dict[int, list[dict[str, float]]]:
    """Tokens per second by level, round and way. A round that is not counted comes first."""
    rates: dict[int, list[dict[str, float]]] = {clients: [] for clients in config.concurrency}
    with progress_bar(label, (config.rounds + 1) * len(config.concurrency)) as advance:
        for number in range(config.rounds + 1):
            for clients in config.concurrency:
                turns = WAYS if number % 2 else WAYS[::-1]
                rate = {way: batches[way](clients) for way in turns}
                if number:
                    rates[clients].append(rate)
                advance()
    return rates


def _batches(config: HttpOverheadConfig, llm: LLM, url: str) -> tuple[Batch, Batch, Batch]:
    """What runs a level once, by way."""
    parts = urlsplit(url)
    address = (str(parts.hostname), int(parts.port or 0))
    prompts = [text.text for text in bundled_texts()]

    def generate(clients: int) -> float:
        return _timed(config, clients, lambda: _generated(config, llm, prompts, clients))

    def ask(clients: int, stream: bool) -> float:
        bodies = [_body(config, number, prompt, stream) for number, prompt in _numbered(config, prompts, clients)]
        requests = [request_bytes(parts.netloc, body) for body in bodies]
        shares = [requests[client::clients] for client in range(clients)]
        return _timed(config, clients, lambda: sum(map(num_tokens, asyncio.run(ask_all(address, shares)))))

    return generate, lambda clients: ask(clients, False), lambda clients: ask(clients, True)


def _timed(config: HttpOverheadConfig, clients: int, work: Callable[[], int]) -> float:
    """Tokens per second. Raises SpecmambaError: there were not as many as asked for."""
    began = time.perf_counter()
    tokens = work()
    elapsed_s = time.perf_counter() - began
    asked = _count(config, clients) * config.max_tokens
    if tokens != asked:
        raise SpecmambaError(f"{tokens} tokens came, but {asked} were asked for")
    return tokens / elapsed_s


def _generated(config: HttpOverheadConfig, llm: LLM, prompts: Sequence[str], clients: int) -> int:
    from specmamba import SamplingParams

    texts = [prompt for _, prompt in _numbered(config, prompts, clients)]
    params = [SamplingParams(**_sampling(config, number)) for number in range(len(texts))]
    batches = [slice(begin, begin + clients) for begin in range(0, len(texts), clients)]
    outputs = [output for batch in batches for output in llm.generate(texts[batch], params[batch])]
    return sum(len(output.token_ids) for output in outputs)


def _count(config: HttpOverheadConfig, clients: int) -> int:
    return clients * max(1, config.num_requests // clients)


def _numbered(config: HttpOverheadConfig, prompts: Sequence[str], clients: int) -> list[tuple[int, str]]:
    return list(enumerate(islice(cycle(prompts), _count(config, clients))))


def _sampling(config: HttpOverheadConfig, number: int) -> dict[str, Any]:
    return {
        "max_tokens": config.max_tokens,
        "temperature": config.temperature,
        "seed": seed_of(config.seed, number),
        "ignore_eos": True,
    }


def _body(config: HttpOverheadConfig, number: int, prompt: str, stream: bool) -> dict[str, Any]:
    streamed = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    return {"prompt": prompt, **_sampling(config, number), **streamed}
