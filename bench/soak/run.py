"""Phases with and without bad clients, in turns; then what the server holds, and its end in the middle of work."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from itertools import count
from typing import TYPE_CHECKING, Any

from specmamba.bench.http_overhead.client import num_tokens, request_bytes
from specmamba.bench.soak.bad_clients import ON_A_STREAM, Fault, Mischief, commit, constrained, next_fault
from specmamba.bench.soak.clients import Requests, Tally, connect, well_behaved
from specmamba.bench.soak.figures import Bounds, broken_bounds, memory_report, phase_report
from specmamba.bench.soak.refused import BESIDE
from specmamba.bench.soak.server import Besieged, besieged_server, sample_rss
from specmamba.config import EngineConfig
from specmamba.errors import SpecmambaError
from specmamba.measure.report import machine, versions

if TYPE_CHECKING:
    from specmamba.bench.soak.__main__ import SoakConfig

GOOD, MIXED = "good", "with bad clients"
_PAUSE_S = 0.25  # of a bad client beside the streams, between two requests, in the mean
_GOING_HOME_S = 1.0  # bad clients do not stay longer than this after the end of a phase
_LONG_PROMPT = 2000  # tokens


class Siege:
    """All clients of one server."""

    def __init__(self, config: SoakConfig, server: Besieged) -> None:
        self.config, self.server = config, server
        self.num_bad = max(1, round(config.bad_share * config.streams))
        self.requests = Requests.to(server.address, config.max_tokens, config.seed)
        self._numbers = count()
        self._faults = {id(ON_A_STREAM): count(), id(BESIDE): count()}

    async def phase(self, seconds: float, *, is_mixed: bool) -> Tally:
        """Clients come, ask for so long, and leave. Bad ones take the place of some good ones, others come besides."""
        tally, until = Tally(), time.monotonic() + seconds
        num_bad = self.num_bad if is_mixed else 0
        async with asyncio.TaskGroup() as clients:
            for _ in range(self.config.streams - num_bad):
                clients.create_task(well_behaved(self.server.address, self._next_request, until, tally))
            for _ in range(num_bad):
                clients.create_task(self._misbehave(ON_A_STREAM, 0.0, until, tally))
                clients.create_task(self._misbehave(BESIDE, _PAUSE_S, until, tally))
        self.server.check()
        return tally

    def warm_up(self) -> None:
        """Have the server do what makes it grow once: touch all of its KV pool, compile a grammar, see bad clients."""
        info = self.server.get("/server_info")
        length = min(_LONG_PROMPT, int(info["context_length"]) - 8)
        chosen = random.Random(self.config.seed)
        for _ in range(int(info["stats"]["kv_total_tokens"]) // length + 1):
            body = {"prompt": [chosen.randrange(1, 250) for _ in range(length)], "max_tokens": 1}
            num_tokens(asyncio.run(self._ask_once(request_bytes(self.requests.host, body))))
        asyncio.run(commit(constrained, Mischief(self.server.address, self.requests, 0, chosen)))
        asyncio.run(self.phase(self.config.warmup, is_mixed=True))

    async def end_in_the_middle(self) -> dict[str, Any]:
        """SIGTERM while every client waits for an answer, half of them for a short one. How these end, counted."""
        endings: dict[str, int] = {"finished": 0, "clear error": 0, "cut off": 0}

        async def client(number: int) -> None:
            fields = {"max_tokens": 1000} if number % 2 else {}
            endings[await self._ending(self.requests.stream(number, **fields))] += 1

        async with asyncio.TaskGroup() as clients:
            for number in range(self.config.streams):
                clients.create_task(client(number))
            await asyncio.sleep(0.5)
            self.server.terminate()
        return {"endings": endings, "exit_status": await asyncio.to_thread(self.server.wait)}

    def _next_request(self) -> bytes:
        return self.requests.stream(next(self._numbers))

    async def _misbehave(self, faults: Mapping[str, Fault], pause_s: float, until: float, tally: Tally) -> None:
        while time.monotonic() < until:
            number = next(self._faults[id(faults)])
            name, fault = next_fault(faults, number)
            chosen = random.Random(f"{self.config.seed} fault {number}")
            ending = await commit(
                fault, Mischief(self.server.address, self.requests, number, chosen), until + _GOING_HOME_S
            )
            tally.outcomes[name, ending] += 1
            await asyncio.sleep(chosen.uniform(0, 2 * pause_s))

    async def _ask_once(self, request: bytes) -> bytes:
        connection = await connect(self.server.address)
        try:
            return await connection.ask(request)
        finally:
            connection.close()

    async def _ending(self, request: bytes) -> str:
        try:
            answer = await self._ask_once(request)
        except (SpecmambaError, OSError):
            return "cut off"
        if b'"error"' in answer:
            return "clear error"
        return "finished" if b"[DONE]" in answer else "cut off"


def run(config: SoakConfig) -> dict[str, Any]:
    """The whole siege; the report as a JSON object. Raises SpecmambaError: the server broke down, or works on."""
    engine = EngineConfig(**config.model_dump(include=set(EngineConfig.model_fields)))
    with besieged_server(engine, config.startup_timeout) as server:
        siege = Siege(config, server)
        siege.warm_up()
        before = server.settle()
        phases, samples = asyncio.run(_phases(siege))
        after = server.settle()
        info = server.get("/server_info")
        end = asyncio.run(siege.end_in_the_middle())
    report = {
        "model": info["served_model_names"][0],
        "machine": machine(),
        "versions": versions(("specmamba", "torch", "uvicorn")),
        "streams": config.streams,
        "bad_streams": siege.num_bad,
        "bad_clients_beside": siege.num_bad,
        "max_running_requests": config.max_running_requests,
        "preemptions": info["stats"]["num_preemptions"],
        "phases": {name: phase_report(tallies) for name, tallies in phases.items()},
        "before": asdict(before),
        "after": asdict(after),
        "memory": memory_report(samples),
        "end": end,
    }
    bounds = Bounds(config.at_most, config.at_most_mb_per_minute)
    return report | {"bounds": asdict(bounds), "broken": broken_bounds(report, bounds)}


async def _phases(siege: Siege) -> tuple[dict[str, list[Tally]], list[tuple[float, float]]]:
    """All phases in turns, and the memory of the server meanwhile."""
    seconds = siege.config.minutes * 60 / siege.config.rounds
    phases: dict[str, list[Tally]] = {GOOD: [], MIXED: []}
    samples: list[tuple[float, float]] = []
    sampler = asyncio.create_task(sample_rss(siege.server, samples))
    for name in _order(siege.config.rounds):
        phases[name].append(await siege.phase(seconds, is_mixed=name == MIXED))
    sampler.cancel()
    with suppress(asyncio.CancelledError):
        await sampler
    return phases, samples


def _order(rounds: int) -> Iterator[str]:
    """good, mixed, mixed, good, ...: neither always comes after the other."""
    for number in range(rounds):
        yield from (GOOD, MIXED) if number % 2 == 0 else (MIXED, GOOD)
