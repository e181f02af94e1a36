"""The attacks of the soak benchmark: what each sends, the bounds that it must keep, and a short run with the demo."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from specmamba.bench.soak import __main__ as soak
from specmamba.bench.soak.attacks import ATTACKS, BAD_KEY, GOOD_KEY, OPERATOR_KEY, Place
from specmamba.bench.soak.hostile import _broken, _good_clients, print_hostile
from tests.fake_engine import serving, wait_until
from tests.server.test_events import WatchedEngine

pytestmark = pytest.mark.usefixtures("forked_processes")

HOLDINGS = {"kv_tokens": 0, "states": 0, "free_pages": 9, "free_states": 3, "descriptors": 20, "threads": 12}
PHASE = {"answers": 4, "p50_ms": 20.0, "p99_ms": 50.0, "longest_ms": 300.0, "failures": [], "num_failures": 0}
REPORT: dict[str, Any] = {
    "alone": PHASE,
    "attacked": PHASE | {"p99_ms": 199.0},
    "before": HOLDINGS,
    "after": dict(HOLDINGS),
    "growth_mb": 3.0,
    "end": {"seconds": 2.5, "exit_status": 0},
}


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("name", [name for name, attack in ATTACKS.items() if attack.act.__name__ != "blank_lines"])
def test_an_attack_leaves_nothing_behind(name: str) -> None:
    """Each reaches the server, whose good clients are answered meanwhile."""
    keys = {"api_key": (GOOD_KEY, BAD_KEY), "admin_key": OPERATOR_KEY}
    engine = WatchedEngine(context_length=4096)
    with serving(engine, **keys, read_timeout=5) as served:
        url = httpx.URL(served.url)
        address = (url.host, int(url.port or 0))

        async def attack() -> int:
            acts = [ATTACKS[name].act(Place(address, random.Random(number))) for number in range(2)]
            attackers = [asyncio.ensure_future(act) for act in acts]
            good = await _good_clients(address, 0.05)
            assert not good.failures
            done, left = await asyncio.wait(attackers, timeout=0.2)
            assert all(task.exception() is None or isinstance(task.exception(), OSError) for task in done)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            return good.num_answers

        assert asyncio.run(attack()) > 0
        wait_until(lambda: not engine.running)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("attacked", "p99_ms"), 201.0, "silences of 201.0 ms (p99), at most 200.0 allowed"),
        (("attacked", "longest_ms"), 1501.0, "a silence of 1501.0 ms"),
        (("attacked", "num_failures"), 1, "attacked: 1 answers failed"),
        (("alone", "answers"), 0, "alone: 0 answers failed, 0 came"),
        (("after", "states"), 1, "states: 1 held by an idle server"),
        (("after", "threads"), 40, "threads: 12 before, 40 after"),
        (("growth_mb",), 65.0, "memory grew by 65.0 MiB"),
        (("end", "seconds"), 23.0, "SIGTERM: ended after 23.0 s"),
        (("end", "exit_status"), -9, "SIGTERM: ended after 2.5 s with status -9"),
    ],
)
def test_every_bound(place: tuple[str, ...], value: object, message: str) -> None:
    report = copy.deepcopy(REPORT)
    inner = report
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    assert not list(_broken(REPORT))
    (sentence,) = _broken(report)
    assert sentence.startswith(message)


def test_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    print_hostile({"attacks": {"floods of choices": REPORT}, "broken": []})
    shown = capsys.readouterr().out
    assert "floods of choices" in shown
    assert "all bounds are kept" in shown


def test_unknown_attacks_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        soak.main(["--hostile", "--attack", "hugs"])
    assert "--attack: there is no attack 'hugs'; there are: grammar bombs" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.long
def test_a_short_run(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    flags = ["--hostile", "--attack-seconds", "1", "--attack", "stalled log"]
    soak.main([*flags, "--json", str(file), "--dtype", "float32"])  # its bounds on time are not for a busy machine
    report = json.loads(file.read_text())
    assert set(report["attacks"]) == {"stalled log"}
    for own in report["attacks"].values():
        assert own["end"]["exit_status"] == 0
        assert own["attacked"]["answers"]
        assert own["after"]["states"] == own["after"]["kv_tokens"] == 0
