"""Measure one level of load after the other against one server."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from specmamba.bench.serving.figures import level_name, level_report
from specmamba.bench.serving.load import (
    Failure,
    Outcome,
    Requests,
    Run,
    Send,
    closed_loop,
    complete,
    failure_of,
    open_loop,
    poisson_arrivals,
)
from specmamba.bench.serving.options import ServingBenchConfig
from specmamba.bench.serving.server import StartedServer
from specmamba.errors import ConfigError
from specmamba.measure.report import machine, progress_bar, versions

# Answers to a wrong request, which end the benchmark. 429 and errors of the server are counted instead.
_HOPELESS = {400, 401, 403, 404, 405, 413, 415, 422}

# Settings of a server that may be paths on its machine.
_PATHS = {"model", "speculative_tree", "speculative_ngram_corpus"}

_BREAKDOWN_S = 10.0  # the process of a server that breaks down may take this long to end


async def sweep(
    config: ServingBenchConfig,
    prompts: Sequence[str],
    url: str,
    server: StartedServer | None = None,
    transport: httpx.AsyncBaseTransport | None = None,
) -> dict[str, Any]:
    """Measure all levels against the server at ``url``; the report as a JSON object.

    Args:
        server: the server if it was started here; it is checked after every level.
        transport: replaces the network in tests.

    Raises:
        ConfigError: the server cannot be reached, or refuses what is asked.
        SpecmambaError: the server that was started here has ended.
    """
    async with _http_client(config, url, is_here=server is not None, transport=transport) as client:
        model = await _find_model(client, config)
        requests = Requests(
            model, prompts, config.max_tokens, config.temperature, config.seed, ignore_eos=config.ignore_eos
        )

        async def send(number: int, due: float) -> Outcome:
            return await complete(client, requests.body(number), due)

        await _warm_up(send, config.num_warmup)
        levels, is_flushed = [], True
        for concurrency, rate in config.levels:
            is_flushed = await _flush_cache(client) and is_flushed
            run = await _run_level(send, config, concurrency, rate)
            if server is not None:
                server.check(_BREAKDOWN_S if _looks_broken(run) else 0.0)
            levels.append(level_report(run, concurrency, rate))
        description = await _server_description(client)
    return _report(config, model, description, levels, started_here=server is not None, is_flushed=is_flushed)


def _report(
    config: ServingBenchConfig,
    model: str,
    server: dict[str, Any] | None,
    levels: list[dict[str, Any]],
    *,
    started_here: bool,
    is_flushed: bool,
) -> dict[str, Any]:
    return {
        "model": _last_part(model),
        "server": server,
        "server_started_here": started_here,
        "machine": machine(),
        "versions": versions(("specmamba", "httpx")),
        "mode": config.mode,
        "num_requests": config.num_requests,
        "num_warmup": config.num_warmup,
        "max_tokens": config.max_tokens,
        "temperature": config.temperature,
        "ignore_eos": config.ignore_eos,
        "seed": config.seed,
        "prompts": "bundled" if config.prompts is None else config.prompts.name,
        "cache_flushed": is_flushed,
        "levels": levels,
    }


def _http_client(
    config: ServingBenchConfig, url: str, *, is_here: bool, transport: httpx.AsyncBaseTransport | None
) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=_checked_url(url),
        headers=None if config.key is None else {b"Authorization": b"Bearer " + config.key.encode()},
        timeout=config.request_timeout,
        limits=httpx.Limits(max_connections=None),  # one per client
        trust_env=not is_here,  # no proxy for a server that was started here
        transport=transport,
    )


def _checked_url(url: str) -> httpx.URL:
    """Parse the URL. Raises ConfigError when httpx or the resolver does not accept its host."""
    try:
        parsed = httpx.URL(url)
        parsed.raw_host.decode("ascii").encode("idna")  # as the resolver does: no label may be empty or too long
    except (httpx.InvalidURL, UnicodeError) as error:
        raise ConfigError(f"--base-url: {url} is no address: {error}") from None
    return parsed


async def _find_model(client: httpx.AsyncClient, config: ServingBenchConfig) -> str:
    """The model's name for requests: --model with --base-url, else the first one that the server lists."""
    try:
        response = await client.get("/v1/models")
    except httpx.RequestError as error:
        raise ConfigError(f"no server answers at {client.base_url}: {type(error).__name__}: {error}") from None
    if response.status_code != httpx.codes.OK:
        failure = failure_of(response)
        hint = " (--api-key)" if failure.status in (401, 403) else ""
        raise ConfigError(f"the server at {client.base_url} answers {failure.kind}: {failure.message}{hint}")
    if config.base_url is not None and config.model is not None:
        return config.model
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        raise ConfigError(f"{client.base_url} is no OpenAI-compatible server: /v1/models lists no model") from None


async def _server_description(client: httpx.AsyncClient) -> dict[str, Any] | None:
    """The engine's description from a specmamba server; None from other servers."""
    try:
        body = (await client.get("/server_info")).json()
    except (httpx.RequestError, ValueError, RecursionError):
        return None
    engine = body.get("engine") if isinstance(body, dict) else None
    if not isinstance(engine, dict):
        return None
    names = {name: _last_part(value) for name, value in engine.items() if name in _PATHS and isinstance(value, str)}
    return engine | names


def _last_part(path: str) -> str:
    """The last part of a path: a report does not contain folders of the server's machine."""
    return Path(path).name or path


async def _warm_up(send: Send, count: int) -> None:
    """Send requests that are not counted. Raises ConfigError when the server refuses what all requests ask for."""
    for number in range(count):
        outcome = await send(number, time.perf_counter())
        if not isinstance(outcome, Failure):
            continue
        if outcome.status in _HOPELESS:
            hint = " (leave --ignore-eos out)" if "ignore_eos" in outcome.message else ""
            raise ConfigError(f"the server refuses the requests: {outcome.kind}: {outcome.message}{hint}")
        print(f"a warm-up request failed: {outcome.kind}: {outcome.message}", file=sys.stderr)


async def _flush_cache(client: httpx.AsyncClient) -> bool:
    """Flush the server's prefix cache, as levels send the same prompts. Returns whether the server did it."""
    try:
        response = await client.post("/flush_cache")
    except httpx.RequestError as error:
        print(f"the server's prefix cache was not flushed: {type(error).__name__}: {error}", file=sys.stderr)
        return False
    if response.status_code not in (httpx.codes.OK, httpx.codes.NOT_FOUND):  # 404: another kind of server
        failure = failure_of(response)
        print(f"the server's prefix cache was not flushed: {failure.kind}: {failure.message}", file=sys.stderr)
    return response.status_code == httpx.codes.OK


def _looks_broken(run: Run) -> bool:
    """Whether the level ended with a failure, as it does when the server breaks down."""
    last = run.outcomes[-1]
    return isinstance(last, Failure) and last.status != httpx.codes.TOO_MANY_REQUESTS


async def _run_level(send: Send, config: ServingBenchConfig, concurrency: int | None, rate: float | None) -> Run:
    name = level_name({"concurrency": concurrency, "request_rate": rate})
    with progress_bar(name, config.num_requests) as advance:

        async def counted(number: int, due: float) -> Outcome:
            outcome = await send(number, due)
            advance()
            return outcome

        if rate is not None:
            return await open_loop(counted, poisson_arrivals(rate, config.num_requests, config.seed))
        assert concurrency is not None
        return await closed_loop(counted, concurrency, config.num_requests)
