"""Attacks, one after the other, each on a server of its own: what a good client notices, and what the server keeps.

Two good clients stream answers, alone first and then beside the attackers. A *silence* is the time that a good client
waits for the next piece of an answer, from its request on. Afterwards the server must hold what it held before, and
SIGTERM in the middle of the attack must end it within its time-out.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from specmamba.bench.soak.attacks import ATTACKS, BAD_KEY, GOOD_KEY, OPERATOR_KEY, Attack, Place, post
from specmamba.bench.soak.clients import Address, connected
from specmamba.bench.soak.figures import not_given_back
from specmamba.bench.soak.server import SHUTDOWN_TIMEOUT_S, ServerProcess, server_process
from specmamba.config import DEMO_MODEL, EngineConfig
from specmamba.errors import SpecmambaError
from specmamba.measure.command import Page
from specmamba.measure.report import machine, percentile, versions

NUM_GOOD = 2
SLOWDOWN, SLACK_MS = 2.0, 100.0  # of the 99th percentile of silences
LONGEST_MS = 1500.0  # a silence: a server that stands still once does not move the percentile
GROWTH_MB = 64.0
END_MARGIN_S = 20.0  # after --shutdown-timeout, as docs/operations.md promises
_KEYS = {"SPECMAMBA_API_KEY": f"{GOOD_KEY},{BAD_KEY}", "SPECMAMBA_ADMIN_KEY": OPERATOR_KEY}
_SPARE_DESCRIPTORS = 2  # pipes of a spare process, which is started once another one had to be killed
_FIGURES = ("p50_ms", "p99_ms", "longest_ms")
_PROMPT = "import os\n\ndef read_file(path):\n    "


@dataclass
class Heard:
    """What good clients noticed in one phase."""

    silences: list[float] = field(default_factory=list)  # seconds
    num_answers: int = 0
    failures: list[str] = field(default_factory=list)


def run_hostile(engine: EngineConfig, names: Sequence[str], seconds: float, startup_timeout: float) -> dict[str, Any]:
    """Run attacks; the report as a JSON object.

    Raises:
        SpecmambaError: a server did not start, or still works when no client asks.
    """
    attacks = {name: _attacked(engine, ATTACKS[name], seconds, startup_timeout) for name in names}
    broken = [f"{name}: {sentence}" for name, report in attacks.items() for sentence in _broken(report)]
    return {
        "machine": machine(),
        "versions": versions(("specmamba", "torch", "uvicorn")),
        "bounds": {
            "slowdown": SLOWDOWN,
            "slack_ms": SLACK_MS,
            "longest_ms": LONGEST_MS,
            "growth_mb": GROWTH_MB,
            "end_margin_s": END_MARGIN_S,
        },
        "attacks": attacks,
        "broken": broken,
    }


def _attacked(engine: EngineConfig, attack: Attack, seconds: float, startup_timeout: float) -> dict[str, Any]:
    with (
        _model_of(engine, attack) as config,
        server_process(
            config, startup_timeout, attack.flags, _KEYS, OPERATOR_KEY, stalls_log=attack.stalls_log
        ) as server,
    ):
        asyncio.run(_good_clients(server.address, 1.0))  # the first steps take longer
        asyncio.run(_together(server, attack, 2.0))  # what grows once: pools of memory and threads
        _fill_pools(server)
        before, rss_before = server.settle(), server.rss_mb()
        alone = asyncio.run(_good_clients(server.address, seconds))
        attacked = asyncio.run(_together(server, attack, seconds))
        after, rss_after = server.settle(), server.rss_mb()
        end_s, status = asyncio.run(_end_in_the_middle(server, attack))
    return {
        "alone": _silences(alone),
        "attacked": _silences(attacked),
        "before": asdict(before),
        "after": asdict(after),
        "growth_mb": round(rss_after - rss_before, 1),
        "end": {"seconds": round(end_s, 2), "exit_status": status},
    }


@contextmanager
def _model_of(engine: EngineConfig, attack: Attack) -> Iterator[EngineConfig]:
    """The engine's flags, with a checkpoint that has the attack's chat template."""
    if attack.template is None:
        yield engine
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "model"
        shutil.copytree(DEMO_MODEL if engine.model is None else engine.model, copy)
        (copy / "chat_template.jinja").write_text(attack.template)
        yield engine.model_copy(update={"model": str(copy)})


def _fill_pools(server: ServerProcess) -> None:
    """Let the KV pool be used once: its memory is counted from the first use."""
    stats = server.get("/server_info")["stats"]
    chosen = random.Random(0)
    for _ in range(int(stats["kv_total_tokens"]) // 1900 + 1):
        body = {"prompt": [chosen.randrange(1, 250) for _ in range(1900)], "max_tokens": 1}
        server.post("/v1/completions", body)


async def _together(server: ServerProcess, attack: Attack, seconds: float) -> Heard:
    attackers = [asyncio.create_task(_attack(server.address, attack, number)) for number in range(attack.num_attackers)]
    await asyncio.sleep(min(0.5, seconds / 4))
    try:
        return await _good_clients(server.address, seconds)
    finally:
        for attacker in attackers:
            attacker.cancel()
        await asyncio.gather(*attackers, return_exceptions=True)
        server.check()


async def _attack(address: Address, attack: Attack, number: int) -> None:
    place = Place(address, random.Random(number))
    while True:
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            await attack.act(place)
        await asyncio.sleep(0.01)


async def _good_clients(address: Address, seconds: float) -> Heard:
    heard, until = Heard(), time.monotonic() + seconds
    async with asyncio.TaskGroup() as clients:
        for number in range(NUM_GOOD):
            clients.create_task(_good_client(address, until, heard, number))
    return heard


async def _good_client(address: Address, until: float, heard: Heard, number: int) -> None:
    """Ask at least once, and again until the given time."""
    body = {"prompt": _PROMPT, "max_tokens": 64, "temperature": 0.8, "seed": number, "ignore_eos": True, "stream": True}
    request = post(address, "/v1/completions", json.dumps(body).encode(), GOOD_KEY, "Connection: close")
    while True:
        try:
            async with asyncio.timeout(30), connected(address) as wire:
                answer, asked_at = b"", time.perf_counter()
                await wire.send(request)
                while piece := await wire.reader.read(1 << 16):
                    now = time.perf_counter()
                    heard.silences.append(now - asked_at)
                    answer, asked_at = answer + piece, now
            if b"data: [DONE]" not in answer or b'"error"' in answer:
                raise SpecmambaError(answer[:200].decode("utf8", "replace"))
            heard.num_answers += 1
        except (SpecmambaError, OSError) as error:
            heard.failures.append(f"{type(error).__name__}: {error}"[:300])
            await asyncio.sleep(0.1)
        if time.monotonic() >= until:
            return


async def _end_in_the_middle(server: ServerProcess, attack: Attack) -> tuple[float, int]:
    """Send SIGTERM during the attack; the seconds until the process ended, and its exit status."""
    attackers = [asyncio.create_task(_attack(server.address, attack, number)) for number in range(attack.num_attackers)]
    await asyncio.sleep(1.0)
    began = time.monotonic()
    server.terminate()
    status = await asyncio.to_thread(server.wait)
    for attacker in attackers:
        attacker.cancel()
    await asyncio.gather(*attackers, return_exceptions=True)
    return time.monotonic() - began, status


def _silences(heard: Heard) -> dict[str, Any]:
    spread = {f"p{q}_ms": round(percentile(heard.silences, q) * 1e3, 1) for q in (50, 99)} if heard.silences else {}
    spread |= {"longest_ms": round(max(heard.silences, default=0.0) * 1e3, 1)}
    return {"answers": heard.num_answers, **spread, "failures": heard.failures[:5], "num_failures": len(heard.failures)}


def _broken(report: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each bound that one attack has broken."""
    alone, attacked = report["alone"], report["attacked"]
    for name, phase in (("alone", alone), ("attacked", attacked)):
        if phase["num_failures"] or not phase["answers"]:
            yield f"{name}: {phase['num_failures']} answers failed, {phase['answers']} came: {phase['failures'][:1]}"
            return
    most = SLOWDOWN * alone["p99_ms"] + SLACK_MS
    if attacked["p99_ms"] > most:
        yield f"silences of {attacked['p99_ms']} ms (p99), at most {most:.1f} allowed"
    if attacked["longest_ms"] > LONGEST_MS:
        yield f"a silence of {attacked['longest_ms']} ms"
    yield from not_given_back(report, _SPARE_DESCRIPTORS)
    if report["growth_mb"] > GROWTH_MB:
        yield f"memory grew by {report['growth_mb']} MiB"
    end = report["end"]
    if end["seconds"] > SHUTDOWN_TIMEOUT_S + END_MARGIN_S or end["exit_status"] not in (0, 1):
        yield f"SIGTERM: ended after {end['seconds']} s with status {end['exit_status']}"


def print_hostile(report: Mapping[str, Any]) -> None:
    """Print a table of the attacks, and the bounds that are broken."""
    page = Page()
    page.lines(
        "silences of good clients in ms (p50, p99, longest), alone and attacked; growth of memory; "
        "seconds from SIGTERM to the end"
    )
    rows = [
        (
            name,
            *(", ".join(str(own[phase].get(name, "-")) for name in _FIGURES) for phase in ("alone", "attacked")),
            str(own["attacked"]["answers"]),
            f"{own['growth_mb']:+.1f} MiB",
            f"{own['end']['seconds']:.1f} ({own['end']['exit_status']})",
        )
        for name, own in report["attacks"].items()
    ]
    page.table(("attack", "alone", "attacked", "answers", "memory", "end (status)"), rows)
    page.lines(*(report["broken"] or ("all bounds are kept",)))
