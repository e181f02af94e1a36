"""Processes of replicas that start and end in turn, without what runs in them."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from specmamba.replicas import replica_process
from specmamba.replicas.replica_fleet import ReplicaFleet
from specmamba.replicas.replica_launch import ReplicaTask
from specmamba.replicas.replica_links import ReplicaLinks


class Launched:
    """A replica that says that it is ready, and ends when it is told to."""

    end = "nothing"

    num_killed = 0

    def __init__(self, pid: int) -> None:
        self.pid, self._ended = pid, threading.Event()
        self._messages: list[dict[str, Any]] = [{"ready": {}}]
        self.loads = threading.Event()  # it is waited for

    def connection(self) -> Any:
        return self

    def receive(self) -> dict[str, Any] | None:
        self.loads.set()
        return self._messages.pop() if self._messages else None

    def close(self) -> None: ...

    def kill(self) -> None:
        self.num_killed += 1

    def finish(self) -> None:
        self._ended.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._ended.wait(timeout_s)


def test_one_starts_when_all_before_it_have_ended() -> None:
    """Also where one was taken out of service while it waited: that one has nothing, what it waited for has memory."""
    launched: list[Launched] = []

    def launch(_: ReplicaTask) -> Launched:
        launched.append(Launched(100 + len(launched)))
        return launched[-1]

    fleet = ReplicaFleet([ReplicaTask(0, {}, {}, b"")], launch)
    fleet.start(0)
    ready: Any = fleet.arrivals.get(timeout=60)
    assert fleet.has(ready)
    fleet.retire(0, at_once=False)
    fleet.start(0)
    fleet.retire(0, at_once=False)
    time.sleep(0.3)
    assert fleet.is_ending(0)
    fleet.start(0)
    time.sleep(0.3)
    assert len(launched) == 1
    launched[0].finish()
    ready = fleet.arrivals.get(timeout=60)
    assert ready.pid == 101
    fleet.start_no_more()
    launched[1].finish()
    fleet.close()


def test_processes_with_one_id_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system gives ids out again: what is said of a process that has ended does not reach the next one."""
    monkeypatch.setattr(replica_process, "FIRST_PAUSE_S", 0.01)
    launched: list[Launched] = []

    def launch(_: ReplicaTask) -> Launched:
        launched.append(Launched(77))
        return launched[-1]

    fleet = ReplicaFleet([ReplicaTask(0, {}, {}, b""), ReplicaTask(1, {}, {}, b"")], launch)
    fleet.start(0)
    first: Any = fleet.arrivals.get(timeout=60)
    launched[0].finish()
    second: Any = fleet.arrivals.get(timeout=60)
    assert (first.generation, second.generation, first.pid == second.pid) == (1, 2, True)
    assert not fleet.has(first)
    assert fleet.has(second)
    fleet.kill(0, first.generation)
    assert [process.num_killed for process in launched] == [0, 0]
    fleet.kill(0, second.generation)
    assert [process.num_killed for process in launched] == [0, 1]
    fleet.retire(0, at_once=True)
    launched[1].finish()
    fleet.start(0)  # counted on
    third: Any = fleet.arrivals.get(timeout=60)
    assert (third.generation, fleet.num_started) == (3, {0: 3, 1: 0})
    fleet.start_no_more()
    launched[2].finish()
    fleet.close()


class Loading(Launched):
    """A replica that loads until it is killed."""

    def receive(self) -> dict[str, Any] | None:
        self.loads.set()
        self._ended.wait()
        return None

    def kill(self) -> None:
        self._ended.set()


def test_one_that_loads_is_not_waited_for_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_process, "END_TIMEOUT_S", 60.0)
    launched = Loading(77)
    fleet = ReplicaFleet([ReplicaTask(0, {}, {}, b"")], lambda _: launched)
    fleet.start(0)
    assert launched.loads.wait(60)
    began = time.monotonic()
    fleet.close()
    assert time.monotonic() - began < replica_process.END_TIMEOUT_S / 2


class Unreadable(Launched):
    """A replica that runs, and says nothing that can be read."""

    def connection(self) -> Any:
        raise ValueError("no message")

    def kill(self) -> None:
        super().kill()
        self._ended.set()


def test_one_that_cannot_be_watched_is_ended() -> None:
    """What it has may be all that there is: the next one would wait for it."""
    launched = Unreadable(77)
    fleet = ReplicaFleet([ReplicaTask(0, {}, {}, b"")], lambda _: launched)
    fleet.start(0)
    assert "no message" in str(fleet.arrivals.get(timeout=60))
    assert launched.num_killed == 1
    fleet.close()


def test_a_wait_for_replicas_ends_when_something_else_is_to_be_done() -> None:
    links = ReplicaLinks(ReplicaFleet([], Launched), 0, print, print, print)  # type: ignore[arg-type]
    timer, began = threading.Timer(0.1, links.wake), time.monotonic()
    timer.start()
    links.receive(60.0)
    assert 0.1 <= time.monotonic() - began < 30
    timer.join()
    began = time.monotonic()
    links.receive(0.05)  # it is told once
    assert time.monotonic() - began >= 0.05
    links.close()
    links.wake()  # too late, and no harm
