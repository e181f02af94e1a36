"""Whether bad clients slow good ones down, and whether the server gives back everything that it took.

    specmamba bench soak [--minutes 2] [--streams 64] [--json FILE] [any engine flag]
    specmamba bench soak --hostile [--attack NAME ...] [--attack-seconds 6] [--json FILE] [any engine flag]

The command starts a server of its own on this machine. In phases that take turns, ``--streams`` clients stream answers,
one after the other. In every second phase a share of them (``--bad-share``) are bad clients instead, which hang up in
the middle, stop reading or ask for constrained answers, and as many others send requests that must be refused
(bad_clients.py). So the engine never runs more streams than in the phases without bad clients. Each kind of phase takes
``--minutes`` in all. Afterwards the server must be as it was before: nothing runs, no place in a pool is held, and it
has as many open files and threads. Its memory must not have grown over all phases (slope of a least-squares line). The
latency of good clients must be within ``--at-most`` of that without bad ones. At the end SIGTERM comes during work:
every answer must finish or end with an error message, and the exit status must be 0.

A phase that is not counted and prompts that fill the KV pool come first, to warm the server up.

``--hostile`` runs attacks in place of these phases, each on a server of its own (hostile.py, attacks.py).
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from itertools import count
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from specmamba.bench.http_overhead.client import num_tokens, request_bytes
from specmamba.bench.soak.attacks import ATTACKS
from specmamba.bench.soak.bad_clients import (
    IN_PLACE_OF_STREAMS,
    REFUSED,
    Fault,
    FaultContext,
    constrained,
    next_fault,
    run_fault,
)
from specmamba.bench.soak.clients import Requests, Tally, connect, well_behaved
from specmamba.bench.soak.figures import Bounds, broken_bounds, memory_report, phase_report, print_report
from specmamba.bench.soak.hostile import print_hostile, run_hostile
from specmamba.bench.soak.server import ServerProcess, sample_rss, server_process
from specmamba.config import EngineConfig
from specmamba.errors import SpecmambaError
from specmamba.measure.command import put_out, run_command
from specmamba.measure.report import JsonOption, machine, require, versions

PROG = "specmamba bench soak"
GOOD, MIXED = "good", "with bad clients"
_PAUSE_S = 0.25  # mean pause of a client whose requests are refused, between two of them
_GRACE_S = 1.0  # bad clients end at the latest this long after a phase
_LONG_PROMPT = 2000  # tokens
Positive = Field(gt=0, allow_inf_nan=False)


def _known_attacks(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if name not in ATTACKS:
            raise ValueError(f"there is no attack {name!r}; there are: {', '.join(ATTACKS)}")
    return names


class SoakConfig(JsonOption):
    """Good clients with bad ones beside them."""

    max_running_requests: Annotated[int, Field(ge=1, description="requests in a batch at the most")] = 64
    max_total_tokens: Annotated[int | None, Field(ge=1, description="size of the KV pool")] = 32_768
    minutes: Annotated[float, Positive, Field(description="of load without bad clients; and as much with them")] = 2.0
    streams: Annotated[int, Field(ge=2, le=4096, description="clients at a time")] = 64
    rounds: Annotated[int, Field(ge=1, description="phases of each kind that the minutes are cut into")] = 2
    bad_share: Annotated[float, Field(gt=0, lt=1, description="of the streams, that bad clients take")] = 0.1
    max_tokens: Annotated[int, Field(ge=4, description="new tokens of an answer at the most")] = 64
    warmup: Annotated[float, Field(ge=0, allow_inf_nan=False, description="seconds of load before the first phase")] = (
        20.0
    )
    at_most: Annotated[float, Positive, Field(description="latency with bad clients over that without")] = 1.3
    at_most_mb_per_minute: Annotated[float, Positive, Field(description="growth of the server's memory")] = 5.0
    hostile: Annotated[bool, Field(description="run attacks in place of the phases with bad clients")] = False
    attack: Annotated[
        tuple[str, ...], AfterValidator(_known_attacks), Field(description="one of the attacks; none: all of them")
    ] = ()
    attack_seconds: Annotated[float, Positive, Field(description="of each attack, and without it")] = 6.0
    startup_timeout: Annotated[float, Positive, Field(description="seconds that the server may take to load")] = 600.0


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark. Returns the exit status: 1 when a bound is broken, 130 after Ctrl-C."""
    return run_command(PROG, SoakConfig, arguments, _run)


def _run(config: SoakConfig) -> int:
    require("httpx", PROG)
    if config.hostile:
        report = run_hostile(
            _engine_config(config), config.attack or tuple(ATTACKS), config.attack_seconds, config.startup_timeout
        )
        put_out(config, report, print_hostile)
    else:
        report = run(config)
        put_out(config, report, print_report)
    return 1 if report["broken"] else 0


def _engine_config(config: SoakConfig) -> EngineConfig:
    return EngineConfig(**config.model_dump(include=set(EngineConfig.model_fields)))


def run(config: SoakConfig) -> dict[str, Any]:
    """Run all phases; the report as a JSON object.

    Raises:
        SpecmambaError: the server ended, or still works when no client asks.
    """
    with server_process(_engine_config(config), config.startup_timeout) as server:
        soak_run = SoakRun(config, server)
        soak_run.warm_up()
        before = server.settle()
        phases, samples = asyncio.run(_phases(soak_run))
        after = server.settle()
        info = server.get("/server_info")
        end = asyncio.run(soak_run.end_in_the_middle())
    report = {
        "model": info["served_model_names"][0],
        "machine": machine(),
        "versions": versions(("specmamba", "torch", "uvicorn")),
        "streams": config.streams,
        "bad_streams": soak_run.num_bad,
        "bad_clients_beside": soak_run.num_bad,
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


async def _phases(soak_run: SoakRun) -> tuple[dict[str, list[Tally]], list[tuple[float, float]]]:
    """Run all phases in turns; the tallies by kind of phase, and (seconds, MiB) of the server's memory meanwhile."""
    seconds = soak_run.config.minutes * 60 / soak_run.config.rounds
    phases: dict[str, list[Tally]] = {GOOD: [], MIXED: []}
    samples: list[tuple[float, float]] = []
    sampler = asyncio.create_task(sample_rss(soak_run.server, samples))
    for name in _order(soak_run.config.rounds):
        phases[name].append(await soak_run.phase(seconds, is_mixed=name == MIXED))
    sampler.cancel()
    with suppress(asyncio.CancelledError):
        await sampler
    return phases, samples


def _order(rounds: int) -> Iterator[str]:
    """good, mixed, mixed, good, ...: so that neither kind always follows the other."""
    for number in range(rounds):
        yield from (GOOD, MIXED) if number % 2 == 0 else (MIXED, GOOD)


class SoakRun:
    """All clients of one server, in phases."""

    def __init__(self, config: SoakConfig, server: ServerProcess) -> None:
        self.config, self.server = config, server
        self.num_bad = max(1, round(config.bad_share * config.streams))
        self.requests = Requests.to(server.address, config.max_tokens, config.seed)
        self._numbers = count()
        self._faults = {id(IN_PLACE_OF_STREAMS): count(), id(REFUSED): count()}

    async def phase(self, seconds: float, *, is_mixed: bool) -> Tally:
        """Run clients for ``seconds``; if ``is_mixed``, bad ones in place of some good ones, and others in addition."""
        tally, until = Tally(), time.monotonic() + seconds
        num_bad = self.num_bad if is_mixed else 0
        async with asyncio.TaskGroup() as clients:
            for _ in range(self.config.streams - num_bad):
                clients.create_task(well_behaved(self.server.address, self._next_request, until, tally))
            for _ in range(num_bad):
                clients.create_task(self._run_faults(IN_PLACE_OF_STREAMS, 0.0, until, tally))
                clients.create_task(self._run_faults(REFUSED, _PAUSE_S, until, tally))
        self.server.check()
        return tally

    def warm_up(self) -> None:
        """Let the server do what makes it grow once: use all of its KV pool, compile a grammar, serve bad clients."""
        info = self.server.get("/server_info")
        length = min(_LONG_PROMPT, int(info["context_length"]) - 8)
        chosen = random.Random(self.config.seed)
        for _ in range(int(info["stats"]["kv_total_tokens"]) // length + 1):
            body = {"prompt": [chosen.randrange(1, 250) for _ in range(length)], "max_tokens": 1}
            num_tokens(asyncio.run(self._ask_once(request_bytes(self.requests.host, body))))
        asyncio.run(run_fault(constrained, FaultContext(self.server.address, self.requests, 0, chosen)))
        asyncio.run(self.phase(self.config.warmup, is_mixed=True))

    async def end_in_the_middle(self) -> dict[str, Any]:
        """Send SIGTERM while every client waits for an answer, half of them for a short one; counts how they end."""
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

    async def _run_faults(self, faults: Mapping[str, Fault], pause_s: float, until: float, tally: Tally) -> None:
        while time.monotonic() < until:
            number = next(self._faults[id(faults)])
            name, fault = next_fault(faults, number)
            chosen = random.Random(f"{self.config.seed} fault {number}")
            ending = await run_fault(
                fault, FaultContext(self.server.address, self.requests, number, chosen), until + _GRACE_S
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


if __name__ == "__main__":
    sys.exit(main())
