"""Several replicas behind one port beside one server: conversations whose turns go back to what was computed before.

    python -m specmamba.bench.replicas [--model DIR] [--json FILE] [--dp-size 2] [--clients 6] [--turns 5] [--rounds 3]
        [--requests 8] [--ray] [any engine flag]

One server, N replicas that get requests by prefix, and N that get them in turn run on this machine, with --ray also N
behind Ray Serve (specmamba[scale]); only one of them works at a time, and all take turns within a round, with empty
caches. Every client holds a conversation: each turn is the text so far, its answer and a new question. Reported are
medians over rounds: tokens of prompts that were resumed, time to the first token, tokens per second, and for one client
alone the time between two events, and that of a whole request by its tokens; what that is more than with one server in
the same round is what passing a token on costs. What it costs exactly is measured in each round after that, with
single requests to all servers in turn: processor time of the process in front by request and by token, how much of it
is that of the event loop, which one server has too, and how much longer the time between two tokens is than that of one
server (``ingress_cost``). Each token is an event, unless ``--stream-chunk-interval`` says how long some may wait.
Replicas share the cores of this machine, so speed says little about machines of their own; hits and processor time do
not depend on it.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import time
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from specmamba.bench.ingress_cost import Front, costs, ray_processes
from specmamba.bench.ray_deployment import ray_deployment
from specmamba.bench.serving.events import events_of
from specmamba.bench.serving.server import signals_end_the_context
from specmamba.bench.soak.server import ServerProcess, server_process
from specmamba.config import EngineConfig
from specmamba.measure.command import Page, Report, in_turns, put_out, run_command
from specmamba.measure.prompts import bundled_texts, model_name
from specmamba.measure.report import (
    Count,
    JsonOption,
    machine,
    median_with_range,
    progress_bar,
    range_text,
    require,
    versions,
)

if TYPE_CHECKING:
    import httpx

PROG = "python -m specmamba.bench.replicas"
ONE, BY_PREFIX, IN_TURN = "one server", "replicas, by prefix", "replicas, in turn"
ON_RAY = "replicas, on Ray Serve"
QUESTION = "\n# And now the same for the next case, with a comment on each line.\n"


class ReplicasBenchConfig(JsonOption):
    """Replicas behind one port beside one server."""

    dp_size: Annotated[int, Field(ge=2, le=64, description="replicas")] = 2
    clients: Annotated[Count, Field(description="conversations at a time")] = 6
    turns: Annotated[Count, Field(description="of each conversation")] = 5
    rounds: Annotated[Count, Field(description="rounds of all servers; medians over them are reported")] = 3
    max_tokens: Annotated[int, Field(ge=2, description="new tokens of every turn")] = 64
    beginning: Annotated[Count, Field(description="characters of the first turn")] = 2000
    requests: Annotated[
        Count, Field(description="of each kind in a round, of which the cost of passing on is taken")
    ] = 8
    ray: Annotated[bool, Field(description="also measure replicas behind Ray Serve, on a cluster of this machine")] = (
        False
    )
    stream_chunk_interval: Annotated[
        float, Field(ge=0, le=1, description="as of specmamba serve, of all servers: 0 makes an event of each token")
    ] = 0.0
    startup_timeout: Annotated[
        float, Field(gt=0, allow_inf_nan=False, description="seconds that each server may take to load")
    ] = 600.0


@dataclass(frozen=True, slots=True)
class Turn:
    """One request and its answer."""

    prompt_tokens: int
    cached_tokens: int
    tokens: int
    first_s: float
    gaps: tuple[float, ...]  # between two events
    per_token_s: float  # from the request to the last event: a proxy may hold events back and send several at once
    text: str


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status: 0, or 130 after Ctrl-C."""
    return run_command(PROG, ReplicasBenchConfig, arguments, lambda config: put_out(config, run(config), print_report))


def run(config: ReplicasBenchConfig) -> dict[str, Any]:
    """Start the servers and run all rounds; the report as a JSON object.

    Raises:
        SpecmambaError: a server does not start.
    """
    require("httpx", PROG)
    several = ("--dp-size", str(config.dp_size), "--dp-placement")
    flags = {ONE: (), BY_PREFIX: (*several, "prefix"), IN_TURN: (*several, "round_robin")}
    ways = [*flags, *([ON_RAY] if config.ray else [])]
    engine = EngineConfig(**config.model_dump(include=set(EngineConfig.model_fields)))
    played: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    spent: list[dict[str, dict[str, float]]] = []
    with signals_end_the_context(), ExitStack() as stack:
        servers = {way: _start(engine, config, way, flags.get(way), stack) for way in ways}
        described = servers[ONE].get("/server_info")["engine"]
        with progress_bar("rounds of all servers", (config.rounds + 1) * len(ways)) as advance:
            for number in range(config.rounds + 1):  # in the first one steps are recorded: it does not count
                for way in in_turns(ways, number):
                    figures = asyncio.run(play(servers[way], config, number))
                    if number:
                        played[way].append(figures)
                    advance()
                if number:
                    spent.append(asyncio.run(pass_on(servers, config)))
    return {
        "model": model_name(described),
        "dtype": described["dtype"],
        "machine": machine(),
        "versions": versions(("specmamba", "torch")),
        **config.model_dump(include={"dp_size", "clients", "turns", "rounds", "max_tokens", "beginning", "requests"}),
        "stream_chunk_interval": config.stream_chunk_interval,
        "ways": {way: _medians(found, played[ONE]) for way, found in played.items()},
        "passing_on": {way: _passing_on(way, spent) for way in ways},
    }


def _start(
    engine: EngineConfig, config: ReplicasBenchConfig, way: str, flags: Sequence[str] | None, stack: ExitStack
) -> ServerProcess:
    """Start a server with these flags; None: a deployment of Ray Serve."""
    print(f"starting: {way}", file=sys.stderr)
    if flags is None:
        return stack.enter_context(
            ray_deployment(engine, config.dp_size, config.startup_timeout, config.stream_chunk_interval)
        )
    interval = f"--stream-chunk-interval={config.stream_chunk_interval:g}"
    return stack.enter_context(
        server_process(engine, config.startup_timeout, ("--disable-log-requests", interval, *flags))
    )


async def play(server: ServerProcess, config: ReplicasBenchConfig, number: int) -> dict[str, float]:
    """One round with one server: all conversations side by side, then one alone."""
    import httpx

    async with httpx.AsyncClient(base_url=server.url, timeout=600.0, headers=server.headers) as http:
        texts = [text.text for text in bundled_texts()]

        def converse(client: int) -> Awaitable[list[Turn]]:
            return _converse(http, config, texts[client % len(texts)], f"{number}.{client}")

        (await http.post("/flush_cache")).raise_for_status()
        began = time.perf_counter()
        found = await asyncio.gather(*map(converse, range(config.clients)))
        seconds = time.perf_counter() - began
        (await http.post("/flush_cache")).raise_for_status()
        alone = await converse(config.clients)
    turns = [turn for conversation in found for turn in conversation]
    later = [turn for conversation in found for turn in conversation[1:]]
    return {
        "resumed": sum(turn.cached_tokens for turn in turns) / sum(turn.prompt_tokens for turn in turns),
        "first_token_s": statistics.median(turn.first_s for turn in later or turns),
        "tokens_per_second": sum(turn.tokens for turn in turns) / seconds,
        "gap_alone_ms": 1e3 * statistics.median(gap for turn in alone for gap in turn.gaps),
        "token_alone_ms": 1e3 * statistics.median(turn.per_token_s for turn in alone),
    }


async def pass_on(servers: Mapping[str, ServerProcess], config: ReplicasBenchConfig) -> dict[str, dict[str, float]]:
    """What passing on costs, in one round of single requests: ``ingress_cost.costs``."""
    import httpx

    async with AsyncExitStack() as stack:
        fronts = {}
        for way, server in servers.items():
            http = httpx.AsyncClient(base_url=server.url, timeout=600.0, headers=server.headers)
            processes = {ONE: [], ON_RAY: ray_processes()}.get(way, [server.pid])
            loop = None if way == ON_RAY else server.pid
            fronts[way] = Front(await stack.enter_async_context(http), processes, loop)
        prompt = bundled_texts()[0].text[:200]
        return await costs(fronts, prompt, config.requests, config.max_tokens, config.clients)


async def _converse(http: httpx.AsyncClient, config: ReplicasBenchConfig, own: str, name: str) -> list[Turn]:
    """Hold a conversation that begins with ``own``; ``name`` tells it apart from others."""
    text = f"# {name}\n" + (own * (config.beginning // len(own) + 1))[: config.beginning]
    turns: list[Turn] = []
    for _ in range(config.turns):
        turns.append(await _ask(http, text, config.max_tokens))
        text += turns[-1].text + QUESTION
    return turns


async def _ask(http: httpx.AsyncClient, prompt: str, max_tokens: int) -> Turn:
    options = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **options}
    began, times, text, usage = time.perf_counter(), list[float](), "", dict[str, Any]()
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for event in events_of(answer):
            usage = event.get("usage") or usage
            if event["choices"]:
                times.append(time.perf_counter())
                text += event["choices"][0]["text"]
    gaps = tuple(after - before for before, after in itertools.pairwise(times))
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    num_tokens = usage["completion_tokens"]
    per_token_s = (times[-1] - began) / num_tokens
    return Turn(usage["prompt_tokens"], cached, num_tokens, times[0] - began, gaps, per_token_s, text)


def _medians(found: Sequence[Mapping[str, float]], of_one: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Medians with ranges, and differences from and ratios to one server in the same round."""
    figures: dict[str, Any] = {name: median_with_range([round_[name] for round_ in found], 4) for name in found[0]}
    more = [1e3 * (mine["token_alone_ms"] - one["token_alone_ms"]) for mine, one in zip(found, of_one, strict=True)]
    figures["more_per_token_us"] = median_with_range(more, 1)
    for name in ("first_token_s", "tokens_per_second", "gap_alone_ms", "token_alone_ms"):
        ratios = [mine[name] / one[name] for mine, one in zip(found, of_one, strict=True)]
        figures[f"{name}_over_one_server"] = median_with_range(ratios, 3)
    return figures


def _passing_on(way: str, spent: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    """Medians over rounds with ranges, and how much longer a token takes than with one server in the same round."""
    names = set.intersection(*(set(round_[way]) for round_ in spent))
    found = {name: median_with_range([round_[way][name] for round_ in spent], 1) for name in sorted(names)}
    gaps = [(round_[way].get("gap_us"), round_[ONE].get("gap_us")) for round_ in spent]
    more = [own - of_one for own, of_one in gaps if own is not None and of_one is not None]
    return found | ({"more_gap_us": median_with_range(more, 1)} if more else {})


def print_report(report: Report) -> None:
    """Print the table of servers."""
    page = Page()
    page.lines(
        f"{report['model']}, {report['dtype']}, {report['machine']}: {report['clients']} conversations of "
        f"{report['turns']} turns, {report['dp_size']} replicas"
    )
    names = ("resumed", "first_token_s", "tokens_per_second", "gap_alone_ms", "token_alone_ms", "more_per_token_us")
    rows = [
        (way, *(range_text(figures[name], "{:.4g}".format) for name in names))
        for way, figures in report["ways"].items()
    ]
    heads = ("resumed", "first token, s", "tokens/s", "between events alone, ms", "per token alone, ms", "more, us")
    page.table(("", *heads), rows)
    loaded = f"a token, {report['clients']} clients"
    page.lines("Passing on, in us: processor time in front of the replicas, and the time between two tokens")
    parts = {"request_us": "a request", "token_us": "a token", "loaded_token_us": loaded}
    parts |= {"gap_us": "between two tokens", "more_gap_us": "more than one server"}
    page.table(*_costs(report, parts))
    page.lines("Of that, in us: processor time of the event loop")
    loops = {"loop_request_us": "a request", "loop_token_us": "a token", "loop_loaded_token_us": loaded}
    page.table(*_costs(report, loops))


def _costs(report: Report, names: Mapping[str, str]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Heads and rows of these figures, given with their heads, of all ways."""
    rows = [
        (way, *(range_text(own[name], "{:.4g}".format) if name in own else "-" for name in names))
        for way, own in report["passing_on"].items()
    ]
    return ("", *names.values()), rows


if __name__ == "__main__":
    sys.exit(main())
