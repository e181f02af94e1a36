"""Replicas that are taken out of service and put back: by an operator, and as the load wants it."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import get_args

from specmamba.engine.replica_control import ReplicaState, ReplicaStats, ReplicaStatus
from specmamba.errors import ReplicaLostError, ReplicaStateError
from specmamba.replicas.placement import Work
from specmamba.replicas.replacement import MAX_ATTEMPTS, Replacement
from specmamba.replicas.replica_fleet import ReplicaFleet
from specmamba.replicas.replica_links import ReplicaLinks
from specmamba.replicas.scaling_policy import Load, Marks, ScalingPolicy

logger = logging.getLogger("specmamba")

LOOK_S = 0.5  # between two looks at the load


class FleetControl:
    """``ReplicaControl`` of a ``ReplicatedEngine``. A replica leaves when its last request has ended, or moves."""

    def __init__(
        self,
        fleet: ReplicaFleet,
        links: ReplicaLinks,
        work: Callable[[], Mapping[int | None, Work]],
        policy: ScalingPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take control.

        Args:
            fleet, links: the replicas.
            work: returns what each ready replica has to do, and under None what waits for one.
            policy: says how many there should be; None: an operator alone changes their number.
            clock: seconds.
        """
        self._fleet, self._links, self._work = fleet, links, work
        self._policy, self._clock = policy, clock
        self._marks, self._looked = Marks(), -math.inf
        self._held: set[int] = set()  # taken out of service by an operator
        self._num_grown = self._num_shrunk = 0
        self._replacement = Replacement()

    def state(self, index: int) -> ReplicaState:
        """The state of a replica."""
        if (replica := self._links.ready.get(index)) is not None:
            return "ready" if replica.leaves_at is None else "draining"
        if self._fleet.reason(index) is not None:
            return "failed"
        if index in self._fleet.on:
            return "starting"
        return "ending" if self._fleet.is_ending(index) else "off"

    def statuses(self) -> list[ReplicaStatus]:
        """As ``ReplicaControl``."""
        self._links.take_arrivals()
        return [self._status(index, self._work()) for index in self._fleet.indices]

    def _status(self, index: int, work: Mapping[int | None, Work]) -> ReplicaStatus:
        replica, own = self._links.ready.get(index), work.get(index, Work())
        return ReplicaStatus(
            index,
            self.state(index),
            index in self._held,
            None if replica is None else replica.generation,
            None if replica is None else replica.pid,
            own.num_requests,
            own.queued_tokens,
            self._fleet.reason(index),
        )

    def drain(self, index: int, timeout_s: float | None, generation: int | None = None) -> ReplicaStatus:
        """As ``ReplicaControl``. Of one that is drained already, the time changes."""
        self._check(index)
        self._links.take_arrivals()
        self._check_generation(index, generation)
        state = self.state(index)
        if state in ("ready", "starting") and not self._links.serving.keys() - {index}:
            text = f"no replica but {index} is ready, and its requests would have to wait"
            raise ReplicaStateError(f"{text}: resume another one first, and wait until it is ready")
        self._held.add(index)
        if state in ("ready", "draining"):
            self._let_leave(index, timeout_s)
        elif state in ("starting", "failed"):
            self._links.retire(index)
        logger.warning("replica %d is taken out of service", index)
        self.let_go()
        return self._status(index, self._work())

    def resume(self, index: int) -> ReplicaStatus:
        """As ``ReplicaControl``."""
        self._check(index)
        self._links.take_arrivals()
        self._held.discard(index)
        self._bring(index)
        return self._status(index, self._work())

    def _check(self, index: int) -> None:
        if index not in self._fleet.indices:
            raise ReplicaStateError(f"there is no replica {index}: there are {len(self._fleet.indices)}, from 0 on")

    def _check_generation(self, index: int, generation: int | None) -> None:
        replica = self._links.ready.get(index)
        now = None if replica is None else replica.generation
        if generation not in (None, now):
            found = "none is ready" if now is None else f"its generation is {now}"
            raise ReplicaStateError(f"replica {index} has no process of generation {generation} any more: {found}")

    def _let_leave(self, index: int, timeout_s: float | None) -> None:
        self._links.ready[index].leaves_at = math.inf if timeout_s is None else self._clock() + timeout_s

    def _bring(self, index: int) -> None:
        """Let a replica serve, if it does not already: one that is drained goes on, others are started."""
        if (replica := self._links.ready.get(index)) is not None:
            replica.leaves_at = None
        elif index not in self._fleet.on:
            self._fleet.start(index)

    def let_go(self) -> None:
        """End the drained replicas that have no requests any more, or whose time is over."""
        leaving = {i: replica.leaves_at for i, replica in self._links.ready.items() if replica.leaves_at is not None}
        if not leaving:
            return
        work, now = self._work(), self._clock()
        for index, leaves_at in leaving.items():
            if leaves_at <= now or not work[index].num_requests:
                logger.warning("replica %d ends: it has %d requests", index, work[index].num_requests)
                self._links.retire(index)

    def look(self) -> None:
        """Do what is due: drained replicas end, and the number of the others follows the load.

        Raises:
            ReplicaLostError: none is left, and none can be started.
        """
        self.let_go()
        if not (self._links.ready or self._fleet.on):
            self._replace()
            return
        if self._links.serving:
            self._replacement.forget()
        if self._policy is None or (now := self._clock()) < self._looked + LOOK_S:
            return
        self._looked = now
        load = self._load()
        wanted, self._marks = self._policy.decide(load, now, self._marks)
        for _ in range(wanted - load.num_replicas):
            self._grow()
        if wanted < load.num_replicas:
            self._shrink()

    def next_look_s(self) -> float | None:
        """Seconds until ``look`` is to be called next where no request runs; None: nothing is due."""
        if self._policy is None or self._policy.is_at_rest(self._load()):
            return None
        return LOOK_S

    def _load(self) -> Load:
        num_serving = len(self._links.serving)
        num_starting = len([index for index in self._fleet.on if index not in self._links.ready])
        return Load(num_serving, num_starting, sum(work.queued_tokens for work in self._work().values()))

    def _grow(self) -> None:
        """Let one more serve: first those that are leaving, which have their model still."""
        states = {index: self.state(index) for index in self._fleet.indices if index not in self._held}
        free = [index for state in ("draining", "off", "ending") for index in states if states[index] == state]
        if not free:
            return
        self._num_grown += 1
        logger.warning("replica %d is started: the others have much to do, or are too few", free[0])
        self._bring(free[0])

    def _replace(self) -> None:
        """Start any other replica where the last one has failed for good, if their number may change.

        One that has not failed yet comes first. Raises ReplicaLostError: none may be started, or none can be.
        """
        states = {index: self.state(index) for index in self._fleet.indices if index not in self._held}
        free = [index for state in ("off", "ending", "failed") for index in states if states[index] == state]
        reason = self._fleet.latest_failure or "all replicas are out of service"
        if self._policy is None or not free:
            raise ReplicaLostError(reason)
        if self._replacement.is_given_up:
            text = f"no replica is left, and {MAX_ATTEMPTS} attempts to start another one have failed"
            raise ReplicaLostError(f"{text}; the last: {reason}")
        index = self._replacement.choose(free, self._clock())
        if index is None:
            return
        number = self._replacement.num_attempts
        logger.error("no replica is left: replica %d is started (attempt %d of %d)", index, number, MAX_ATTEMPTS)
        self._fleet.start(index)

    def _shrink(self) -> None:
        """Let one leave: one that is not ready yet, else the one with the least to do."""
        starting = [index for index in self._fleet.on if index not in self._links.ready]
        work = self._work()
        ready = sorted(self._links.serving, key=lambda index: (work[index].queued_tokens, -index))
        if not starting and len(ready) < 2:
            return
        self._num_shrunk += 1
        index = max(starting) if starting else ready[0]
        logger.warning("replica %d is taken out of service: the others have little to do", index)
        if starting:
            self._links.retire(index)
        else:
            self._let_leave(index, None)
            self.let_go()

    def stats(self) -> ReplicaStats:
        """Figures now."""
        counts = Counter(self.state(index) for index in self._fleet.indices)
        states = {name: counts[name] for name in get_args(ReplicaState)}
        started = {str(index): number for index, number in self._fleet.num_started.items()}
        return ReplicaStats(states, self._load().queued_tokens, self._num_grown, self._num_shrunk, started)
