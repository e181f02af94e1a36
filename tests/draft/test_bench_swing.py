"""The benchmark of a load that swings: its steps, its figures, its servers, and a run with the demo."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from specmamba.bench import swing
from specmamba.bench.adaptive import ADAPTIVE, PLAIN
from specmamba.bench.http_overhead.client import TimedAnswer, ask_all_timed, request_bytes
from specmamba.bench.soak import server as soak_server
from specmamba.errors import ConfigError, SpecmambaError
from specmamba.measure.settling import (
    Arrival,
    FullStep,
    Step,
    full_steps,
    median_curve,
    reached_after,
    settled_after,
    steps_of,
    tokens_by_step,
)
from specmamba.measure.swings import CODE, NOISE, Load, Phase, Played, phase_report
from tests.fake_engine import serving

pytestmark = pytest.mark.usefixtures("forked_processes")

LOAD = Load((1, 4, 1), 2, 8, {CODE: 0.8, NOISE: 1.5}, seed=3, vocab_size=100)


def arrival(at: float, stream: int, *tokens: int, begins: bool = False) -> Arrival:
    return Arrival(at, stream, tokens, 0, is_first=begins)


# Steps


def test_tokens_are_split_behind_those_that_were_not_drafted() -> None:
    assert tokens_by_step([0]) == (1,)
    assert tokens_by_step([1, 2, 0, 0, 1, 0]) == (3, 1, 2)
    assert tokens_by_step([1, 0, 1, 2]) == (2, 2)  # the answer was long enough


def test_steps_of_one_client() -> None:
    """Its second answer goes on with the next step, and waits for its prompt first."""
    own = [arrival(1, 0, 1, begins=True), arrival(2, 0, 2), arrival(9, 0, 1, begins=True), arrival(10, 0, 3, 1)]
    steps = steps_of(own, 1)
    assert [(step.at, step.tokens, step.is_full) for step in steps] == [
        (1, 1, False),
        (2, 2, True),
        (9, 1, False),
        (10, 3, True),
        (10, 1, True),
    ]
    assert full_steps(steps) == [FullStep(1, 2), FullStep(1, 3), FullStep(0, 1)]


def test_steps_of_clients_that_are_read_in_any_order() -> None:
    """Three steps of two streams; the client reads stream 1 late, and then twice before it reads stream 0."""
    ordered = [arrival(1.0, 0, 1, begins=True), arrival(1.1, 1, 1, begins=True)]
    late = [arrival(2.0, 0, 2), arrival(3.0, 0, 1), arrival(3.1, 1, 3), arrival(3.2, 1, 1)]
    assert steps_of([*late, *ordered], 2) == [Step(1.1, 2, False), Step(3.1, 5, True), Step(3.2, 2, True)]


def test_a_step_is_full_when_every_client_goes_on() -> None:
    both = [arrival(1, 0, 1, begins=True), arrival(2, 0, 1), arrival(2.1, 1, 1, begins=True)]
    both += [arrival(3, 0, 1), arrival(3.1, 1, 1), arrival(4, 1, 1)]  # stream 0 has ended
    assert [step.is_full for step in steps_of(both, 2)] == [False, False, True, False]


# Settling


def stretch(slow: int, steps: int = 200) -> list[FullStep]:
    return [FullStep(2.0 if i < slow else 1.0, 3) for i in range(steps)]


@pytest.mark.parametrize(("slow", "settled"), [(0, 25), (2, 25), (3, 26), (30, 53)])
def test_when_the_speed_has_settled(slow: int, settled: int) -> None:
    """A window of 25 steps may have two that take twice as long: 25 / 27 is within 10 %, 25 / 28 is not."""
    curve = median_curve([stretch(slow)], 25)
    assert len(curve) == 176
    assert settled_after(curve, 25, 0.1) == settled
    assert reached_after(curve, 25, 0.1) == settled


def test_a_slow_window_at_the_end_is_not_settled() -> None:
    assert settled_after([1.0, 0.8, 1.0, 1.2, 0.8], 25, 0.1) is None
    assert settled_after([1.0, 0.8, 1.0, 1.2, 0.95], 25, 0.1) == 27
    assert reached_after([0.8, 0.9, 0.8], 25, 0.1) == 26
    assert reached_after([0.8], 25, 0.1) is None


def test_the_median_hides_the_noise_of_one_round() -> None:
    rounds = [stretch(0), stretch(80), stretch(0, 150)]
    curve = median_curve(rounds, 25)
    assert curve == [1.0] * 126  # as far as the shortest goes
    assert median_curve([stretch(0, 49)], 25) == []
    assert settled_after([], 25, 0.1) is None


# What is asked, and the figures


def test_from_phase_to_phase_one_thing_changes() -> None:
    assert [(phase.clients, phase.text) for phase in LOAD.phases] == [
        (1, CODE),
        (1, NOISE),
        (4, NOISE),
        (4, CODE),
        (1, CODE),
        (1, NOISE),
    ]
    for before, phase in pairwise([*LOAD.phases, LOAD.phases[0]]):
        assert (before.clients == phase.clients) + (before.text == phase.text) == 1


def test_requests_are_decided_by_their_numbers() -> None:
    every = [
        body for number in range(3) for phase in LOAD.phases for of_one in LOAD.bodies(phase, number) for body in of_one
    ]
    assert max(Counter(body["seed"] for body in every).values()) == 1
    noise = LOAD.bodies(LOAD.phases[2], 1)
    assert noise == LOAD.bodies(LOAD.phases[2], 1)
    assert [len(of_one) for of_one in noise] == [2, 2, 2, 2]
    assert all(0 <= token < 100 for body in noise[0] for token in body["prompt"])
    assert {body["temperature"] for body in noise[0]} == {1.5}
    assert isinstance(LOAD.bodies(LOAD.phases[0], 1)[0][0]["prompt"], str)


def test_the_figures_of_a_phase(capsys: pytest.CaptureFixture[str]) -> None:
    def played(*speeds: float, sizing: dict[str, int] | None = None) -> list[Played]:
        return [Played(speed, 1.5, 200, tuple(stretch(30)), sizing or {}) for speed in speeds]

    by_way = {
        PLAIN: played(10, 20, 30),
        "chain of 1": played(40, 10, 25),
        "chain of 3": played(1, 2, 3),
        "tree of 8": played(1, 2, 3),
        ADAPTIVE: played(20, 30, 10, sizing={"num_steps": 7}),
    }
    report = phase_report(Phase(0, 1, CODE), by_way, ADAPTIVE)
    assert (report["best_static"], report["over_best"], report["over_best_range"]) == ("chain of 1", 0.5, [0.4, 3.0])
    assert report["ways"][PLAIN]["tokens_per_second"] == 20
    assert report["ways"][ADAPTIVE]["settled_after"] == 53
    assert report["ways"][ADAPTIVE]["sizing"] == {"num_steps": 21}
    head = {"model": "m", "dtype": "float32", "machine": "a machine", "requests": 2, "max_tokens": 8, "rounds": 3}
    swing.print_report({**head, "phases": [report], "worst_over_best": 0.5, "slowest_to_settle": None})
    said = capsys.readouterr().out
    assert "0.50 (0.40-3.00)" in said
    assert "25.0*" in said
    assert "53 (53/53/53/53)" in said
    assert "slowest to settle: - steps" in said


# Clients and servers


def ask(url: str, *bodies: dict[str, Any], clients: int = 1) -> list[list[TimedAnswer]]:
    parts = urlsplit(url)
    requests = [request_bytes(parts.netloc, {"prompt": "x", "stream": True, **body}) for body in bodies]
    return asyncio.run(ask_all_timed((str(parts.hostname), int(parts.port or 0)), [requests] * clients))


def test_tokens_arrive_whole() -> None:
    fields = {"stream_options": {"include_usage": True}, "return_tokens": True}
    with serving() as served:
        answers = ask(served.url, *({**fields, "max_tokens": count} for count in (9, 5)), clients=2)
        ((refused,),) = ask(served.url, {"max_tokens": "many"})
    arrivals = [each for i, of_one in enumerate(answers) for answer in of_one for each in swing.arrivals_of(i, answer)]
    assert [each.is_first for each in arrivals].count(True) == 4
    played = swing.played_of(arrivals, 2, 28, 2.0, {})
    assert played.speed == 14
    assert played.num_steps >= len(played.steps)
    with pytest.raises(SpecmambaError, match="28 tokens came, but 29 were asked for"):
        swing.played_of(arrivals, 2, 29, 2.0, {})
    with pytest.raises(SpecmambaError, match=r"HTTP/1\.1 400"):
        swing.arrivals_of(0, refused)


def test_when_the_bytes_of_an_answer_were_there() -> None:
    answer = TimedAnswer(b"abcdefgh", (1.0, 2.0, 4.0), (3, 4, 8))
    assert [answer.arrived_at(end) for end in (1, 3, 4, 5, 8)] == [1, 1, 2, 4, 4]


def test_flags_go_to_the_servers_that_can_use_them() -> None:
    config = swing.SwingConfig(
        dtype="float32", speculative_costs=Path("costs.json"), speculative_draft_model_path="head"
    )
    engines = {way: swing.engine_of(config, way) for way in swing.SERVED}
    assert {engine.dtype for engine in engines.values()} == {"float32"}
    assert {way for way, engine in engines.items() if engine.speculative_costs} == {ADAPTIVE}
    assert {way for way, engine in engines.items() if engine.speculative_draft_model_path is None} == {PLAIN}
    assert engines["chain of 1"].speculative_num_steps == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"speculative_num_steps": 2}, "--speculative-num-steps: this benchmark chooses its own drafts"),
        ({"clients": (1, 17)}, "--clients 17 needs as many --max-running-requests"),
    ],
)
def test_flags_that_do_not_fit(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        swing.run(swing.SwingConfig(**flags))


def test_a_server_that_does_not_start(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    program = "print('reading weights'); print('a shard is missing'); raise SystemExit(3)"
    monkeypatch.setattr(soak_server, "SERVE", (sys.executable, "-c", program))
    with pytest.raises(SystemExit, match="2"):
        swing.main([])
    said = capsys.readouterr().err
    assert "reading weights\na shard is missing\n" in said
    assert f"{swing.PROG}: error: plain: the server ended with status 3: a shard is missing" in said


def test_all_servers_end_with_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import time; print('specmamba: ready at http://127.0.0.1:1', flush=True); time.sleep(60)"
    monkeypatch.setattr(soak_server, "SERVE", (sys.executable, "-c", program))
    started: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", Noted)
    monkeypatch.setattr(soak_server.ServerProcess, "get", interrupt)
    assert swing.main([]) == 130
    assert len(started) == len(swing.SERVED)
    assert all(process.poll() is not None for process in started)


@pytest.mark.slow
@pytest.mark.long
def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    flags = ["--rounds", "1", "--clients", "1,2", "--requests", "1", "--max-tokens", "8", "--max-total-tokens", "4096"]
    assert swing.main([*flags, "--max-running-requests", "2", "--dtype", "float32", "--json", str(file)]) == 0
    report = json.loads(file.read_text("utf8"))
    assert [(phase["clients"], phase["text"]) for phase in report["phases"]] == [
        (1, CODE),
        (1, NOISE),
        (2, NOISE),
        (2, CODE),
    ]
    assert all(phase["ways"][way]["tokens_per_second"] > 0 for phase in report["phases"] for way in swing.SERVED)
    assert all(phase["ways"][PLAIN]["accepted"] == 1 for phase in report["phases"])
    assert all(phase["ways"][ADAPTIVE]["sizing"]["num_steps"] > 0 for phase in report["phases"])
    assert "specmamba-demo, float32" in capsys.readouterr().out
