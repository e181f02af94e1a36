"""Which replica is started, drained or spared: replicas of which nothing runs, and a clock that the test moves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from specmamba.errors import ReplicaLostError, ReplicaStateError
from specmamba.replicas.fleet_control import LOOK_S, FleetControl
from specmamba.replicas.placement import Work
from specmamba.replicas.replacement import FIRST_WAIT_S, LONGEST_WAIT_S, MAX_ATTEMPTS
from specmamba.replicas.scaling_policy import ScalingPolicy


@dataclass
class Replicas:
    """``ReplicaFleet`` and ``ReplicaLinks``, as far as the control uses them."""

    size: int
    ready: dict[int, Any] = field(default_factory=dict)
    running: set[int] = field(default_factory=set)
    failed: dict[int, str] = field(default_factory=dict)
    num_started: dict[int, int] = field(default_factory=dict)

    @property
    def indices(self) -> range:
        return range(self.size)

    @property
    def on(self) -> list[int]:
        return sorted(self.running)

    @property
    def serving(self) -> dict[int, Any]:
        return {index: replica for index, replica in self.ready.items() if replica.leaves_at is None}

    def reason(self, index: int) -> str | None:
        return self.failed.get(index)

    @property
    def latest_failure(self) -> str | None:
        return next(reversed(self.failed.values()), None)

    def is_ending(self, index: int) -> bool:
        return False

    def take_arrivals(self) -> None: ...

    def start(self, index: int) -> None:
        self.failed.pop(index, None)
        self.running.add(index)
        self.num_started[index] = self.num_started.get(index, 0) + 1

    def fail(self, index: int, reason: str = "it does not fit") -> None:
        self.ready.pop(index, None)
        self.running.discard(index)
        self.failed[index] = reason

    def retire(self, index: int) -> None:
        self.ready.pop(index, None)
        self.running.discard(index)
        self.failed.pop(index, None)

    def become_ready(self, *indices: int) -> None:
        for index in indices:
            self.running.add(index)
            self.ready[index] = SimpleNamespace(leaves_at=None, pid=100 + index, generation=10 + index)


class Scene:
    def __init__(self, num_ready: int, policy: ScalingPolicy | None = None, size: int = 3) -> None:
        self.replicas, self.now = Replicas(size), 1000.0
        self.replicas.become_ready(*range(num_ready))
        self.work: dict[int | None, Work] = {}
        anything: Any = self.replicas
        self.control = FleetControl(anything, anything, self._work, policy, lambda: self.now)

    def _work(self) -> Mapping[int | None, Work]:
        return {**dict.fromkeys([*self.replicas.ready, None], Work()), **self.work}

    def states(self) -> list[str]:
        return [status.state for status in self.control.statuses()]

    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += LOOK_S
            self.control.look()


POLICY = ScalingPolicy(1, 3, target_tokens=1000, grow_delay_s=2.0, shrink_delay_s=4.0)
BUSY = Work(4, 5000)


def test_a_drained_one_ends_with_its_last_request() -> None:
    scene = Scene(2)
    scene.work[1] = Work(1, 0)
    status = scene.control.drain(1, None)
    assert (status.state, status.held, status.num_requests) == ("draining", True, 1)
    scene.wait(999.0)
    assert scene.states() == ["ready", "draining", "off"]
    scene.work[1] = Work()
    scene.control.look()
    assert scene.states() == ["ready", "off", "off"]


def test_a_drained_one_ends_when_its_time_is_over() -> None:
    scene = Scene(2)
    scene.work[0] = Work(1, 0)
    scene.control.drain(0, 10.0)
    scene.wait(9.5)
    assert scene.states()[0] == "draining"
    scene.wait(0.5)
    assert scene.states()[0] == "off"


def test_one_that_drains_goes_on_and_one_that_is_off_starts() -> None:
    scene = Scene(3)
    scene.work[1] = Work(1, 0)
    scene.control.drain(1, 10.0)
    scene.control.drain(2, 10.0)
    assert scene.states() == ["ready", "draining", "off"]
    assert scene.control.resume(1).state == "ready"
    assert scene.control.resume(2).state == "starting"
    assert scene.control.resume(2).state == "starting"
    scene.wait(20.0)
    assert scene.states() == ["ready", "ready", "starting"]


def test_one_that_starts_or_has_failed_can_be_taken_out_and_a_failed_one_resumed() -> None:
    scene = Scene(1)
    scene.control.resume(1)
    scene.control.resume(2)
    scene.replicas.fail(2)
    assert (scene.states(), scene.control.statuses()[2].reason) == (["ready", "starting", "failed"], "it does not fit")
    assert scene.control.drain(1, None).state == "off"
    assert scene.control.resume(2).state == "starting"


def test_the_last_one_stays() -> None:
    scene = Scene(2)
    scene.work[0] = Work(1, 0)
    scene.control.drain(0, None)
    with pytest.raises(ReplicaStateError, match="no replica but 1 is ready"):
        scene.control.drain(1, None)
    scene.control.drain(0, 5.0)  # again: it has less time
    scene.wait(5.0)
    assert scene.states() == ["off", "ready", "off"]


@pytest.mark.parametrize("call", ["drain", "resume"])
def test_there_is_no_such_replica(call: str) -> None:
    scene = Scene(2)
    with pytest.raises(ReplicaStateError, match="there is no replica 3: there are 3, from 0 on"):
        scene.control.drain(3, None) if call == "drain" else scene.control.resume(3)


def test_a_process_is_named_by_its_generation() -> None:
    """A replica that was started again meanwhile is not the one that was meant, whatever the id of its process."""
    scene = Scene(3)
    assert [status.generation for status in scene.control.statuses()] == [10, 11, 12]
    scene.replicas.ready[1] = SimpleNamespace(leaves_at=None, pid=101, generation=12)
    with pytest.raises(
        ReplicaStateError, match="replica 1 has no process of generation 11 any more: its generation is 12"
    ):
        scene.control.drain(1, None, 11)
    assert scene.states() == ["ready", "ready", "ready"]
    assert not scene.control.statuses()[1].held
    assert scene.control.drain(1, None, 12).state == "off"
    with pytest.raises(ReplicaStateError, match="no process of generation 12 any more: none is ready"):
        scene.control.drain(1, None, 12)


def test_where_the_last_one_has_failed_others_are_started() -> None:
    scene = Scene(1, POLICY)
    scene.replicas.fail(0)
    scene.wait(FIRST_WAIT_S - LOOK_S)
    assert scene.states() == ["failed", "off", "off"]
    assert scene.control.next_look_s() == LOOK_S
    scene.wait(2 * LOOK_S)
    assert scene.states() == ["failed", "starting", "off"]
    scene.replicas.fail(1)
    scene.wait(2 * FIRST_WAIT_S)
    assert scene.states() == ["failed", "failed", "off"]  # each attempt waits longer
    scene.wait(2 * LOOK_S)
    assert scene.states() == ["failed", "failed", "starting"]
    scene.replicas.become_ready(2)
    scene.wait(LOOK_S)
    assert scene.control.stats().num_grown == 0  # not for the load
    scene.replicas.fail(2)
    scene.wait(FIRST_WAIT_S + LOOK_S)  # the attempts before are forgotten
    assert scene.states() == ["starting", "failed", "failed"]


def test_attempts_to_replace_the_last_one_end() -> None:
    scene = Scene(1, POLICY)
    scene.replicas.fail(0)
    began, starts = scene.now, list[float]()

    def go_on() -> None:
        while True:
            scene.wait(LOOK_S)
            for index in list(scene.replicas.running):
                starts.append(scene.now)
                scene.replicas.fail(index, f"no room on {index}")

    with pytest.raises(ReplicaLostError, match=f"{MAX_ATTEMPTS} attempts .* have failed; the last: no room on 2"):
        go_on()
    assert scene.replicas.num_started == {0: 2, 1: 2, 2: 2}
    pauses = [after - before for before, after in zip([began, *starts], starts, strict=False)]
    least = [min(FIRST_WAIT_S * 2**number, LONGEST_WAIT_S) for number in range(MAX_ATTEMPTS)]
    assert all(low <= pause <= low + 3 * LOOK_S for low, pause in zip(least, pauses, strict=True))


def test_without_others_the_last_failure_is_the_end() -> None:
    """Where the number is fixed, all replicas were tried; what an operator has taken out of service stays out."""
    scene = Scene(2)
    scene.replicas.fail(1, "the first")
    scene.control.look()
    scene.replicas.fail(0, "the second")
    with pytest.raises(ReplicaLostError, match="the second"):
        scene.control.look()
    scene = Scene(3, POLICY)
    for index in (1, 2):
        scene.control.drain(index, None)
    scene.replicas.fail(0)
    scene.wait(FIRST_WAIT_S + LOOK_S)
    assert scene.states() == ["starting", "off", "off"]


def test_the_number_follows_the_load_and_comes_back() -> None:
    scene = Scene(1, POLICY)
    scene.work[0] = BUSY
    scene.wait(2.5)
    assert scene.states() == ["ready", "starting", "starting"]
    scene.replicas.become_ready(1, 2)
    scene.work = {0: Work(1, 0), 2: Work(2, 0)}
    scene.wait(5.0)
    assert scene.states() == ["ready", "off", "ready"]  # the one without requests
    assert scene.control.next_look_s() == LOOK_S
    scene.wait(5.0)
    assert scene.states() == ["draining", "off", "ready"]  # its request finishes
    scene.work = {0: Work(1, 0), 2: BUSY}
    scene.wait(2.5)
    assert scene.states() == ["ready", "starting", "ready"]  # the one that still drains comes first
    stats = scene.control.stats()
    assert (stats.num_grown, stats.num_shrunk) == (4, 2)
    assert stats.states | {"ready": 2, "starting": 1, "off": 0} == stats.states


def test_what_an_operator_has_taken_out_stays_out() -> None:
    scene = Scene(2, POLICY)
    scene.control.drain(1, None)
    scene.work[0] = BUSY
    scene.wait(2.5)
    assert scene.states() == ["ready", "off", "starting"]
    scene.replicas.become_ready(2)
    scene.wait(60.0)
    assert scene.states() == ["ready", "off", "ready"]
    assert scene.control.stats().num_grown == 1
    scene.control.resume(1)
    assert scene.states() == ["ready", "starting", "ready"]


def test_where_nothing_is_due_nothing_looks() -> None:
    assert Scene(1).control.next_look_s() is None
    assert Scene(1, POLICY).control.next_look_s() is None
    assert Scene(2, POLICY).control.next_look_s() == LOOK_S
