"""The server's connections with its replicas: they are told, heard, and given up when they are lost."""

from __future__ import annotations

import itertools
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import Empty
from typing import Any

from specmamba.engine.engine_sample import EngineSample
from specmamba.engine.scheduler import EngineStats
from specmamba.errors import ConfigError, EngineStoppedError
from specmamba.parallel.messages import Messages, encoded
from specmamba.replicas.placement import Published
from specmamba.replicas.published_entries import PublishedEntries, TierIdentity
from specmamba.replicas.replica_fleet import ReplicaFleet
from specmamba.replicas.replica_process import ReadyReplica, log
from specmamba.replicas.wire import load_sample, load_stats

logger = logging.getLogger("specmamba")

WAIT_S = 0.02  # for what replicas send, before the time is looked at
ANSWER_TIMEOUT_S = 20.0
MAX_SILENCE_S = 20.0  # of a replica with requests, which gives a sign of life twice a second


class Replica:
    """One replica that is ready, as the server sees it."""

    def __init__(self, ready: ReadyReplica, folders: dict[TierIdentity, PublishedEntries]) -> None:
        """``folders``: what all replicas have published of folders, by what those who share one have in common."""
        self.link, self.generation, self.pid, self.constants = ready.link, ready.generation, ready.pid, ready.constants
        identity = TierIdentity.of(ready.constants["tiers"])
        has_folder = identity is not None and ready.constants["tiers"]["has_folder"]
        folder = folders.setdefault(identity, PublishedEntries(identity)) if identity and has_folder else None
        self.published = Published(identity, folder)
        self.stats: EngineStats | None = None  # the newest
        self.sample: EngineSample | None = None  # likewise, until it is read
        self.asked_sample: int | None = None  # number of the question that is not answered yet
        self.answers: dict[int, Any] = {}  # by number of the question
        self.heard = time.monotonic()
        self.leaves_at: float | None = None  # of one that is drained: when its requests go on elsewhere


class _Sources:
    """What is waited for: the links of some replicas, and a bell."""

    def __init__(self, links: Mapping[int, Messages], bell: int | None) -> None:
        self.links, self.bell, self.poll = links, bell, select.poll()
        self.by_descriptor = {link.fileno(): index for index, link in links.items()}
        for descriptor in (*self.by_descriptor, *(() if bell is None else (bell,))):
            self.poll.register(descriptor, select.POLLIN)


class ReplicaLinks:
    """The replicas that are ready, by index. Used by one thread."""

    def __init__(
        self,
        fleet: ReplicaFleet,
        num_first: int,
        on_message: Callable[[Mapping[str, Any]], None],
        on_loss: Callable[[int, bool], None],
        on_return: Callable[[int], None],
    ) -> None:
        """Start the first replicas, and wait until they are ready.

        The very first one is started alone: it reports, and the others find the times of steps that it has measured.

        Args:
            fleet: their processes.
            num_first: how many are started now.
            on_message: called with what is said about requests: deltas and refusals.
            on_loss: called with the index of a replica that is gone, and whether it was lost, not taken out of service.
            on_return: called with the index of one that has become ready after the first.

        Raises:
            ConfigError: one cannot start; then none is left.
        """
        self._on_message, self._on_loss, self._on_return = on_message, on_loss, on_return
        self._fleet = fleet
        self.ready: dict[int, Replica] = {}
        self._folders: dict[TierIdentity, PublishedEntries] = {}
        self._numbers = itertools.count(1)
        # guards the next field, which is None when all is closed; a thread that holds it may put a command again, where
        # garbage collection closes a stream
        self._bell_lock = threading.RLock()
        self._bell: int | None = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._sources: _Sources | None = None  # of ``receive``, as long as the replicas are the same
        first = fleet.indices[:num_first]
        try:
            for group in (first[:1], first[1:]):
                self._start(group, num_first)
        except BaseException:
            fleet.abandon()
            self._close_links()
            raise

    def _start(self, group: Sequence[int], size: int) -> None:
        for index in group:
            self._fleet.start(index)
        for _ in group:
            arrival = self._fleet.arrivals.get()
            if isinstance(arrival, str):
                raise ConfigError(f"--dp-size {size}: {arrival}")
            self.ready[arrival.index] = Replica(arrival, self._folders)
        num_ready = len(self.ready)
        while any(replica.stats is None for replica in self.ready.values()):
            self.receive(WAIT_S)
            if len(self.ready) < num_ready:
                raise ConfigError(f"--dp-size {size}: a replica has ended as soon as it was ready")

    @property
    def serving(self) -> Mapping[int, Replica]:
        """Those that get requests: ready, and not drained."""
        return {index: replica for index, replica in self.ready.items() if replica.leaves_at is None}

    def take_arrivals(self) -> None:
        """Take in replicas that have become ready."""
        while not self._fleet.arrivals.empty():
            arrival = self._fleet.arrivals.get_nowait()
            if isinstance(arrival, ReadyReplica):
                self._take_in(arrival)

    def _take_in(self, arrival: ReadyReplica) -> None:
        self.lose(arrival.index)  # the one that it follows
        if not self._fleet.has(arrival):  # it was taken out of service meanwhile
            arrival.link.close()
            return
        self.ready[arrival.index] = Replica(arrival, self._folders)
        logger.warning("replica %d is ready (process %d, start %d)", arrival.index, arrival.pid, arrival.generation)
        self._on_return(arrival.index)

    def tell(self, index: int, message: Mapping[str, Any]) -> bool:
        """Send a message to a replica; False: it is lost."""
        return self.tell_line(index, encoded(dict(message)))

    def tell_line(self, index: int, line: bytes) -> bool:
        """Send a message that ``encoded`` gave, likewise."""
        replica = self.ready.get(index)
        if replica is None:
            return False
        try:
            replica.link.send_line(line)
        except OSError:
            self.lose(index)
            return False
        return True

    def wake(self) -> None:
        """End a wait of ``receive``, or the next one; from any thread."""
        with self._bell_lock:
            if self._bell is not None:
                os.eventfd_write(self._bell, 1)

    def receive(self, wait_s: float) -> None:
        """Take what has arrived from all replicas; wait for the first message, or ``wake``, where there is none."""
        sources = self._current_sources()
        for descriptor, _ in sources.poll.poll(wait_s * 1000):
            if descriptor == sources.bell:
                os.eventfd_read(descriptor)
                continue
            index = sources.by_descriptor[descriptor]
            replica = self.ready[index]
            replica.heard = time.monotonic()
            try:
                for message in replica.link.arrived():
                    self._take(index, replica, message)
            except (OSError, EOFError, ValueError):
                self.lose(index)

    def _current_sources(self) -> _Sources:
        links = {index: replica.link for index, replica in self.ready.items()}
        if self._sources is None or (self._sources.links, self._sources.bell) != (links, self._bell):
            self._sources = _Sources(links, self._bell)
        return self._sources

    def _take(self, index: int, replica: Replica, message: Mapping[str, Any]) -> None:
        if "stats" in message:
            replica.stats = load_stats(message["stats"])
            replica.published.update(message)
        elif "log" in message:
            log(index, message)
        elif "answer" in message and message["answer"] == replica.asked_sample:
            replica.sample, replica.asked_sample = load_sample(message["value"]), None
        elif "answer" in message:
            replica.answers[message["answer"]] = message["value"]
        elif "beat" not in message:
            self._on_message(message)

    def lose(self, index: int) -> None:
        """Forget a replica, which is killed, and started again by its thread unless it was to leave."""
        replica = self.ready.pop(index, None)
        if replica is None:
            return
        replica.link.close()
        if replica.leaves_at is not None:
            self._fleet.retire(index, at_once=False)
        self._fleet.kill(index, replica.generation)
        logger.error("replica %d (process %d, start %d) is lost", index, replica.pid, replica.generation)
        self._on_loss(index, True)

    def retire(self, index: int) -> None:
        """Let a replica end, which is ready, starts or has failed; its requests are to go on elsewhere."""
        replica = self.ready.pop(index, None)
        if replica is not None:
            with suppress(OSError):  # it has just ended
                replica.link.send({"do": "close"})
            replica.link.close()
        self._fleet.retire(index, at_once=replica is None)
        self._on_loss(index, False)

    def lose_silent(self, is_busy: Callable[[int], bool]) -> None:
        """Give up those of the replicas with requests (``is_busy``, of an index) that stand still."""
        limit = time.monotonic() - MAX_SILENCE_S
        for index in [i for i, replica in self.ready.items() if replica.heard < limit and is_busy(i)]:
            logger.error("replica %d gave no sign of life for %g s", index, MAX_SILENCE_S)
            self.lose(index)

    def ask_all(self, question: Mapping[str, Any]) -> list[Any]:
        """The answers of all replicas. Raises EngineStoppedError: one takes too long, or none is ready."""
        number = next(self._numbers)
        told = {"do": "ask", "number": number, **question}
        asked = {index: replica for index, replica in sorted(self.ready.items()) if self.tell(index, told)}
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while any(self.ready.get(i) is replica and number not in replica.answers for i, replica in asked.items()):
            if time.monotonic() > deadline:
                raise EngineStoppedError(f"a replica has been in one step for more than {ANSWER_TIMEOUT_S:g} s")
            self.receive(WAIT_S)
        found = [replica.answers.pop(number) for replica in asked.values() if number in replica.answers]
        if not found:
            raise EngineStoppedError("no replica is ready: try again later")
        return found

    def next_samples(self, question: Mapping[str, Any]) -> list[EngineSample]:
        """Ask all for a sample, and return what they have answered since the last call: nothing waits for a step."""
        self.receive(0.0)
        for index, replica in sorted(self.ready.items()):
            if replica.asked_sample is None:
                replica.asked_sample = next(self._numbers)
                self.tell(index, {"do": "ask", "number": replica.asked_sample, **question})
        samples = [replica.sample for _, replica in sorted(self.ready.items()) if replica.sample is not None]
        for replica in self.ready.values():
            replica.sample = None
        return samples

    def close(self) -> None:
        """End all replicas."""
        self._fleet.start_no_more()
        for index in list(self.ready):
            self.tell(index, {"do": "close"})
        self._close_arrivals()  # whose processes end with that
        self._fleet.close()
        self._close_links()

    def _close_arrivals(self) -> None:
        """Close the connections of replicas that were not taken in."""
        with suppress(Empty):
            while True:
                arrival = self._fleet.arrivals.get_nowait()
                if isinstance(arrival, ReadyReplica):
                    arrival.link.close()

    def _close_links(self) -> None:
        """Close all connections."""
        self._close_arrivals()
        for replica in self.ready.values():
            replica.link.close()
        self.ready.clear()
        with self._bell_lock:
            if self._bell is not None:
                os.close(self._bell)
            self._bell = None
