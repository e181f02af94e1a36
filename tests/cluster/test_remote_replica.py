"""Replicas that connect back over TCP, as actors of Ray do, in plain processes: no cluster is needed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from specmamba.cluster import remote_replica
from specmamba.cluster.engine_actor import EngineActor
from specmamba.cluster.remote_replica import RemoteReplica
from specmamba.cluster.signed_messages import connect
from specmamba.config import EngineConfig
from specmamba.core import OutputDelta
from specmamba.engine.engine import Engine
from specmamba.engine.mirror.start import facts_of
from specmamba.errors import ConfigError
from specmamba.replicas import replica_process
from specmamba.replicas.replica_launch import ReplicaTask
from specmamba.replicas.replica_tasks import tasks_of
from specmamba.replicas.replicated_engine import ReplicatedEngine
from specmamba.server_config import ServerConfig
from tests.replicas.test_replicated_engine import FLAGS, add, finish, outputs, pid_of, wait_for_all

pytestmark = pytest.mark.usefixtures("forked_processes")

PROGRAM = f"""
import json, sys
from {EngineActor.__module__} import EngineActor
given, address, key = json.load(sys.stdin)
sys.exit(EngineActor().run(given, tuple(address), bytes.fromhex(key)))
"""


class ProcessReplica(RemoteReplica):
    """What is an actor elsewhere is a process here."""

    def __init__(self, task: ReplicaTask, **changes: Any) -> None:
        super().__init__(task, "127.0.0.1", "a process")
        self.given |= {"cpus": None, **changes}
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **task.environment}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", PROGRAM], stdin=subprocess.PIPE, env=environment, text=True
        )
        assert self.process.stdin is not None
        with self.process.stdin as stdin:
            json.dump([self.given, self.address, self.key.hex()], stdin)

    @property
    def end(self) -> str:
        return f"status {self.process.returncode}"

    def kill(self) -> None:
        self.process.kill()

    def wait(self, timeout_s: float | None = None) -> bool:
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True


@pytest.fixture(scope="module")
def replicated() -> Iterator[ReplicatedEngine]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("FIRST_PAUSE_S", "LONGEST_PAUSE_S"):  # before a replica is started again
            patch.setattr(replica_process, name, 0.1)
        engine = ReplicatedEngine(ServerConfig(dp_size=2, **FLAGS), launch=ProcessReplica)
        yield engine
        engine.close()


def test_a_killed_replica_changes_no_text(replicated: ReplicatedEngine) -> None:
    wait_for_all(replicated)
    plain = Engine(EngineConfig(**FLAGS))
    for engine in (plain, replicated):
        for number in range(4):
            add(engine, number, max_tokens=160, temperature=0.8 if number % 2 else 0.0, seed=number)
    assert {course.replica for course in replicated._courses.values()} == {0, 1}

    def kill(deltas: dict[str, list[OutputDelta]]) -> bool:
        if "0" not in deltas:
            return False
        os.kill(pid_of(replicated, "0"), signal.SIGKILL)
        return True

    assert outputs(finish(replicated, kill)) == outputs(finish(plain))
    wait_for_all(replicated)


@pytest.mark.slow
def test_a_text_goes_where_its_beginning_is(replicated: ReplicatedEngine) -> None:
    wait_for_all(replicated)
    long = " a sentence that is long enough to be worth going back to." * 12
    first = {}
    for number in (0, 1):
        add(replicated, number, prompt=f"{number}{long}")
        first[number] = replicated._courses[str(number)].replica
    finish(replicated)
    assert set(first.values()) == {0, 1}
    for number in (1, 0):
        add(replicated, number, prompt=f"{number}{long} And more")
        assert replicated._courses[str(number)].replica == first[number]
    assert min(deltas[-1].num_cached_tokens for deltas in finish(replicated).values()) > 100


def one_task(**flags: Any) -> ReplicaTask:
    (task,) = tasks_of(ServerConfig(**FLAGS, **flags), b"s" * 32)
    return task


def test_another_checkpoint_or_version_is_no_replica() -> None:
    changed = {**facts_of(EngineConfig(**one_task().flags)), "checkpoint (--model)": "another"}
    with pytest.raises(ConfigError, match=f"{socket.gethostname()} has another checkpoint"):
        ReplicatedEngine(ServerConfig(dp_size=1, **FLAGS), launch=partial(ProcessReplica, facts=changed))


def test_what_goes_wrong_before_a_start_is_told() -> None:
    """In the thread that starts it; the server waits for it."""
    with pytest.raises(ConfigError, match=r"it cannot be started: .*nowhere"):
        ReplicatedEngine(
            ServerConfig(dp_size=1, **FLAGS, speculative_draft_model_path="/nowhere"), launch=ProcessReplica
        )

    def launch(_: ReplicaTask) -> ProcessReplica:
        raise KeyError("no room")

    with pytest.raises(ConfigError, match="it cannot be started: KeyError: 'no room'"):
        ReplicatedEngine(ServerConfig(dp_size=1, **FLAGS), launch=launch)


class SilentReplica(RemoteReplica):
    """Never connects, and has ended."""

    end = "status 9"

    def kill(self) -> None: ...

    def wait(self, timeout_s: float | None = None) -> bool:
        return True


def test_one_that_ends_before_it_connects_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_replica, "POLL_S", 0.05)
    replica = SilentReplica(one_task(), "127.0.0.1", "nothing")
    with pytest.raises(OSError, match="ended with status 9 before it has connected"):
        replica.connection()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(replica.address, 5)


def test_strangers_are_turned_away_and_the_replica_is_taken() -> None:
    class Waiting(SilentReplica):
        def wait(self, timeout_s: float | None = None) -> bool:
            return False

    replica = Waiting(one_task(), "127.0.0.1", "nothing")
    with socket.create_connection(replica.address, 5) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 8)
        assert replica._next_connection() is None
    with ThreadPoolExecutor(1) as other:
        connecting = other.submit(connect, *replica.address, replica.key)
        connecting.add_done_callback(lambda done: done.result().send({"pid": 77}))
        link = replica.connection()
        link.close()
        connecting.result().close()
    assert replica.pid == 77
