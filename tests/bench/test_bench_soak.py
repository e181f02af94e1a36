"""The soak benchmark: endings of bad clients, figures and bounds, and a short run with the demo."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from specmamba.bench.soak import __main__ as soak
from specmamba.bench.soak.bad_clients import IN_PLACE_OF_STREAMS, REFUSED, Fault, FaultContext, run_fault
from specmamba.bench.soak.clients import Requests, Tally, Timing, well_behaved
from specmamba.bench.soak.figures import Bounds, broken_bounds, memory_report, phase_report, print_report, slowdowns
from tests.fake_engine import FakeEngine, Served, serving, wait_until

pytestmark = pytest.mark.usefixtures("forked_processes")

REFUSALS = {
    "no JSON": "400",
    "deep JSON": "400",
    "no UTF-8": "400",
    "lone surrogate": "400",
    "wrong type": "400",
    "unknown field": "400",
    "not a number": "400",
    "out of range": "400",
    "token out of range": "400",
    "empty prompt": "400",
    "no such model": "404",
    "no JSON announced": "415",
    "too large": "413",
    "garbage": "400",
    "wrong method": "405",
    "no such path": "404",
    "no HTTP version": "400",
    "huge header": "431",
    "slow head": "408",
    "slow body": "408",
    "aborted upload": "left",
}


def run_all_faults(served: Served, faults: Mapping[str, Fault]) -> dict[str, str]:
    """Run all faults at once; how each ended."""
    url = httpx.URL(served.url)
    address = (url.host, int(url.port or 0))
    requests = Requests(f"{url.host}:{url.port}", ["def main():"], 40, seed=0)

    async def run() -> list[str]:
        contexts = [FaultContext(address, requests, number, random.Random(number)) for number in range(len(faults))]
        return list(await asyncio.gather(*map(run_fault, faults.values(), contexts)))

    return dict(zip(faults, asyncio.run(run()), strict=True))


def test_invalid_requests_are_refused() -> None:
    with serving(read_timeout=1.0) as served:
        endings = run_all_faults(served, REFUSED)
        assert not served.engine.seen_params
        assert served.complete(prompt="x").status_code == 200
    assert endings == REFUSALS


def test_bad_streams_leave_nothing_behind() -> None:
    faults = {name: fault for name, fault in IN_PLACE_OF_STREAMS.items() if name not in ("stop reading", "constrained")}
    with serving(FakeEngine(step_s=0.05)) as served:
        endings = run_all_faults(served, faults)
        wait_until(lambda: not served.engine.running)
        assert served.complete(prompt="x").status_code == 200
        assert len(served.engine.seen_params) >= 2  # faults that send a whole request
        assert len(served.engine.aborted) >= 1
    assert endings == {name: "200" if name in ("hang up mid stream", "read slowly") else "left" for name in faults}


def test_good_clients_are_timed() -> None:
    with serving(FakeEngine(step_s=0.02, chunk=1)) as served:
        url = httpx.URL(served.url)
        address = (url.host, int(url.port or 0))
        requests = Requests(f"{url.host}:{url.port}", ["def main():"], 40, seed=0)
        tally = Tally()
        numbers = iter(range(1000))

        async def run() -> None:
            import time

            until = time.monotonic() + 0.3
            await well_behaved(address, lambda: requests.stream(next(numbers)), until, tally)

        asyncio.run(run())
    assert not tally.failures
    assert tally.num_tokens == sum(params.max_tokens for params in served.engine.seen_params)
    assert len(tally.timings) == len(served.engine.seen_params) > 0
    assert all(timing.first_s >= 0.005 and timing.per_token_s >= 0.004 for timing in tally.timings)


def test_good_clients_that_fail_are_counted() -> None:
    with serving(FakeEngine(fail_at_step=3)) as served:
        url = httpx.URL(served.url)
        requests = Requests(f"{url.host}:{url.port}", ["x"], 40, seed=0)
        tally = Tally()

        async def run() -> None:
            import time

            await well_behaved(
                (url.host, int(url.port or 0)), lambda: requests.stream(0), time.monotonic() + 0.3, tally
            )

        asyncio.run(run())
    assert not tally.timings
    assert sum(tally.failures.values()) >= 1


# --- figures ---


def tally(first_ms: float, per_token_ms: float, outcomes: dict[tuple[str, str], int] | None = None) -> Tally:
    timings = [Timing(first_ms * factor / 1e3, per_token_ms * factor / 1e3) for factor in (1, 2, 3)]
    return Tally(timings, 30, Counter(), Counter(outcomes or {}))


def report() -> dict[str, Any]:
    held = {"kv_tokens": 0, "states": 0, "free_pages": 9, "free_states": 4, "descriptors": 8, "threads": 5}
    mixed = tally(11, 5, {("garbage", "400"): 2, ("garbage", "closed"): 1, ("no JSON", "400"): 3})
    return {
        "model": "m",
        "streams": 8,
        "bad_streams": 1,
        "bad_clients_beside": 1,
        "phases": {"good": phase_report([tally(10, 5), tally(10, 5)]), "with bad clients": phase_report([mixed])},
        "before": held,
        "after": dict(held),
        "memory": memory_report([(0.0, 100.0), (30.0, 101.0), (60.0, 102.0)]),
        "end": {"endings": {"finished": 3, "clear error": 5, "cut off": 0}, "exit_status": 0},
        "broken": [],
    }


def test_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    figures = report()
    good, mixed = figures["phases"].values()
    assert (good["answers"], good["tokens"]) == (6, 60)
    assert good["first_ms"] == pytest.approx({"p50": 20, "p95": 30})
    assert mixed["faults"] == {"garbage": {"400": 2, "closed": 1}, "no JSON": {"400": 3}}
    assert slowdowns(figures["phases"])["first_ms p50"] == pytest.approx(1.1)
    assert figures["memory"] == {"first_mb": 100.0, "last_mb": 102.0, "mb_per_minute": 2.0}
    assert math.isnan(memory_report([(1.0, 5.0)])["mb_per_minute"])
    assert broken_bounds(figures, Bounds(1.3, 5.0)) == []
    print_report(figures)
    out = capsys.readouterr().out
    assert "2 400, 1 closed" in out
    assert "all bounds are kept" in out


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("after.kv_tokens", 3, "kv_tokens: 3 held by an idle server"),
        ("after.states", 1, "states: 1 held by an idle server"),
        ("after.free_pages", 8, "free_pages: 9 before, 8 after"),
        ("after.free_states", 3, "free_states: 4 before, 3 after"),
        ("after.descriptors", 9, "descriptors: 8 before, 9 after"),
        ("after.threads", 14, "threads: 5 before, 14 after"),
        ("memory.mb_per_minute", 6.0, "memory grows by 6.00 MiB a minute"),
        ("end.exit_status", 1, "exit status 1 after SIGTERM"),
        ("end.endings.cut off", 2, "SIGTERM: 2 answers were cut off without a word"),
        ("phases.good.failures", {"HTTP 500": 2}, "good: 2 well-behaved clients failed: HTTP 500"),
        ("phases.good.answers", 0, "good: no well-behaved client got an answer"),
        ("phases.with bad clients.faults", {"garbage": {"500": 2}}, "garbage: 2 times 500"),
        ("phases.with bad clients.faults", {"slow head": {"never stopped": 1}}, "slow head: 1 times never stopped"),
        ("phases.with bad clients.per_token_ms.p95", 50.0, "per_token_ms p95: 3.33 times that without bad clients"),
        ("phases.with bad clients.first_ms.p50", math.nan, "first_ms p50: nan times that without bad clients"),
    ],
)
def test_every_bound(place: str, value: object, message: str) -> None:
    figures = copy.deepcopy(report())
    *parents, name = place.split(".")
    inner = figures
    for parent in parents:
        inner = inner[parent]
    assert name in inner
    inner[name] = value
    assert broken_bounds(figures, Bounds(1.3, 5.0)) == [message]


@pytest.mark.slow
def test_a_short_run(tmp_path: Path) -> None:
    """With the demo; bounds on time are off, because the machine may be busy."""
    file = tmp_path / "report.json"
    flags = ["--minutes", "0.02", "--rounds", "1", "--warmup", "0.2", "--streams", "8", "--max-tokens", "16"]
    flags += ["--max-running-requests", "8", "--max-total-tokens", "4096", "--bad-share", "0.25", "--json", str(file)]
    status = soak.main([*flags, "--at-most", "1e9", "--at-most-mb-per-minute", "1e9"])
    figures = json.loads(file.read_text("utf8"))
    assert figures["broken"] == []
    assert status == 0
    assert figures["phases"]["with bad clients"]["faults"]
    assert figures["memory"]["first_mb"] > 50
    assert sum(figures["end"]["endings"].values()) == 8
