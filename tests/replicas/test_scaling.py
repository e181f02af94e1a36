"""Replicas that follow the load: started under it, ended after it, and no request fails or has another text."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from specmamba.config import EngineConfig
from specmamba.engine.engine import Engine
from specmamba.errors import ConfigError, ReplicaLostError
from specmamba.flags.command_line import parse_command_line
from specmamba.replicas import replacement, replica_process
from specmamba.replicas.replica_launch import ChildReplica, ReplicaTask
from specmamba.replicas.replicated_engine import ReplicatedEngine
from specmamba.server_config import ServerConfig
from tests.fake_engine import Served, serving, wait_until
from tests.replicas.test_replicated_engine import FLAGS, PROMPTS, add, finish, outputs

pytestmark = pytest.mark.usefixtures("forked_processes")

EXACT = {**FLAGS, "deterministic": True}  # batches of many sizes run here, and rounding must not change a sampled text
SCALING: dict[str, Any] = {
    "dp_max_size": 3,
    "dp_target_tokens": 60,
    "dp_grow_delay": 0.5,
    "dp_shrink_delay": 1.5,
}


def states_of(served: Served) -> dict[str, int]:
    found: dict[str, int] = served.http.get("/server_info").json()["stats"]["replicas"]["states"]
    return found


@pytest.mark.slow
def test_from_one_to_three_and_back_without_a_failed_request() -> None:
    plain = Engine(EngineConfig(**EXACT))
    for number in range(4):
        add(plain, number, max_tokens=96, temperature=0.8 if number % 2 else 0.0, seed=number)
    found = outputs(finish(plain))
    expected = [found[str(number)][1] for number in range(4)]
    config = ServerConfig(**EXACT, **SCALING)
    with serving(ReplicatedEngine(config), **SCALING) as served, ThreadPoolExecutor(8) as clients:
        assert states_of(served)["ready"] == 1
        has_grown = False

        def ask(number: int) -> int:
            """Ask again and again until there are three replicas, and then some more. Returns the number of calls."""
            sampled = {"temperature": 0.8, "seed": number} if number % 2 else {"temperature": 0.0}
            body = {"prompt": PROMPTS[number], "max_tokens": 96, "ignore_eos": True, **sampled}
            for count in range(1, 1000):
                is_last = has_grown
                answer = served.http.post("/v1/completions", json=body, timeout=120).raise_for_status().json()
                assert answer["choices"][0]["text"] == expected[number]
                if is_last:
                    return count
            raise AssertionError("there are never three")

        running = [clients.submit(ask, number % 4) for number in range(8)]
        wait_until(lambda: states_of(served)["ready"] == 3, timeout_s=120)
        has_grown = True
        counts = [future.result() for future in running]
        assert min(counts) >= 1
        wait_until(lambda: states_of(served)["ready"] == 1, timeout_s=60)  # no call makes it look
        wait_until(lambda: states_of(served)["off"] == 2, timeout_s=60)
        metrics = served.http.get("/metrics").text
        assert 'specmamba_replica_scalings_total{direction="up"} 2.0' in metrics
        assert 'specmamba_replica_scalings_total{direction="down"} 2.0' in metrics
        assert 'specmamba_requests_total{finish_reason="error"} 0.0' in metrics


def test_another_replica_follows_the_last_one_that_has_failed_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no request runs, and where one waits; its text is that of one engine. At last the server ends."""
    monkeypatch.setattr(replica_process, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(replica_process, "LONGEST_PAUSE_S", 0.05)
    for name in ("FIRST_WAIT_S", "LONGEST_WAIT_S"):
        monkeypatch.setattr(replacement, name, 0.2)
    broken: set[int] = set()

    def launch(task: ReplicaTask) -> ChildReplica:
        if task.index in broken:
            raise OSError(f"replica {task.index} does not fit")
        return ChildReplica(task)

    plain = Engine(EngineConfig(**FLAGS))
    add(plain, 0, max_tokens=48)
    expected = outputs(finish(plain))["0"][1]
    body = {"prompt": PROMPTS[0], "max_tokens": 48, "ignore_eos": True, "temperature": 0}
    config = ServerConfig(**FLAGS, dp_max_size=2)
    with serving(ReplicatedEngine(config, launch=launch), dp_max_size=2) as served:

        def lose(index: int) -> None:
            broken.add(index)
            (pid,) = [each["pid"] for each in cards(served) if each["state"] == "ready"]
            os.kill(pid, signal.SIGKILL)

        lose(0)
        wait_until(lambda: states_of(served)["starting"], timeout_s=60)
        wait_until(lambda: served.engine._fleet.num_started == {0: 1, 1: 1}, timeout_s=60)  # without a call
        answer = served.http.post("/v1/completions", json=body, timeout=120).raise_for_status().json()
        assert answer["choices"][0]["text"] == expected
        assert [(each["state"], each["generation"]) for each in cards(served)] == [("failed", None), ("ready", 1)]
        assert "replica 0 does not fit" in cards(served)[0]["reason"]
        assert 'specmamba_replica_starts_total{replica="1"} 1.0' in served.http.get("/metrics").text
        lose(1)
        wait_until(lambda: served.thread.has_stopped, timeout_s=60)
        assert isinstance(served.thread.failed, ReplicaLostError)
        assert f"{replacement.MAX_ATTEMPTS} attempts to start another one have failed" in str(served.thread.failed)


def cards(served: Served) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = served.http.get("/replicas").raise_for_status().json()["replicas"]
    return found


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dp-min-size", "2"], "--dp-min-size: this needs --dp-max-size"),
        (["--dp-target-tokens", "7", "--dp-grow-delay", "1"], "--dp-target-tokens, --dp-grow-delay: this needs"),
        (["--dp-min-size", "3", "--dp-max-size", "2"], "--dp-min-size 3: this is more than --dp-max-size 2"),
        (["--dp-size", "3", "--dp-max-size", "2"], "--dp-size 3: the start is from --dp-min-size to --dp-max-size"),
        (["--dp-size", "1", "--dp-min-size", "2", "--dp-max-size", "2"], "--dp-size 1: the start is from"),
        (
            ["--dp-max-size", "2", "--disaggregation-mode", "decode", "--disaggregation-key", "k" * 16],
            "drop it, or --dp-max-size 2",
        ),
    ],
)
def test_numbers_that_do_not_fit(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_command_line(ServerConfig, "specmamba serve", flags)


@pytest.mark.parametrize(
    ("flags", "first", "most"),
    [
        ({}, 1, 1),
        ({"dp_size": 2}, 2, 2),
        ({"dp_max_size": 3}, 1, 3),
        ({"dp_min_size": 2, "dp_max_size": 3}, 2, 3),
        ({"dp_size": 3, "dp_min_size": 2, "dp_max_size": 4}, 3, 4),
    ],
)
def test_how_many_there_are_at_first_and_at_the_most(flags: dict[str, Any], first: int, most: int) -> None:
    config = ServerConfig(**flags)
    assert (config.first_replicas, config.most_replicas) == (first, most)
