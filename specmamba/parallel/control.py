"""The connection of rank 0 with every other rank: the handshake, commands to them, and signs of life from them.

A rank that ends closes its connection. One that is stopped, or that hangs in a call of the system, sends no beats; it
is killed then, because an exchange of tensors with it would never end.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from specmamba.errors import ConfigError, RankLostError
from specmamba.parallel.messages import Messages, connect, encoded, listen, peer_process
from specmamba.parallel.ranks import ONE_RANK, Ranks

logger = logging.getLogger("specmamba")

BEAT_S = 0.5
# Beats that may be missing. Time in which this process itself did not run counts once: where the whole machine stands
# still, no rank is lost.
MAX_SILENCE = 10
JOIN_TIMEOUT_S = 300.0  # in which the other ranks import what they need
HELLO_TIMEOUT_S = 5.0  # in which a process that has connected says which rank it is
SEND_TIMEOUT_S = 10  # a rank reads all the time, also in a long step: one that does not is stopped
LAST_S = 2.0  # in which the last command comes over the connection of a rank 0 that has left
TOLD_MS = 250  # for which a rank waits for a command in shared memory before it looks at what comes over its connection
Lost = Callable[[RankLostError], None]


class RankLinks:
    """Rank 0's connections with the others. ``send`` belongs to one thread; the signs of life are watched in another.

    Raises:
        ConfigError: the name is in use.
    """

    def __init__(self, name: str, size: int) -> None:
        """name: of the socket, in the abstract namespace; size: number of ranks, this one counted."""
        self.size, self._links = size, dict[int, Messages]()
        self._processes: dict[int, int] = {}  # ids, by rank
        self._silence: dict[int, int] = {}  # beats that are missing now
        self._failure: str | None = None  # what a rank says about its end
        self._ranks = ONE_RANK
        self.lost: RankLostError | None = None
        self._on_lost: list[Lost] = []
        self._lock = threading.Lock()  # guards the two fields above
        self._closing, self._is_strict = threading.Event(), False
        self._watcher = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
        try:
            self._server = listen(name, size)
        except OSError as error:
            raise ConfigError(f"--tp-size {size}: the ranks cannot meet at {name!r}: {error}") from None

    def join(self, facts: Mapping[str, str], store_file: str | None, check: Callable[[], None] = lambda: None) -> None:
        """Wait for all ranks, and compare what they will run.

        Args:
            facts: of this rank, by what they are called in messages.
            store_file: told to the others.
            check: called again and again while this waits; raises to end it.

        Raises:
            ConfigError: a rank brings other facts, or does not come.
        """
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        self._server.settimeout(BEAT_S)
        while len(self._links) < self.size - 1:
            check()
            if time.monotonic() > deadline:
                missing = sorted({*range(1, self.size)} - self._links.keys())
                raise ConfigError(f"--tp-size {self.size}: ranks {missing} did not start in {JOIN_TIMEOUT_S:g} s")
            with suppress(TimeoutError):
                self._greet(self._server.accept()[0], facts)
        for rank, link in self._links.items():
            try:
                link.send({"store": store_file})
            except OSError as error:
                raise ConfigError(f"--tp-size {self.size}: rank {rank} has ended: {error}") from None
        self._watcher.start()

    def _greet(self, connection: socket.socket, facts: Mapping[str, str]) -> None:
        """Take a rank in. A connection that brings no rank must not keep the others from meeting: it is dropped."""
        link, is_taken = Messages(connection), False
        try:
            process = peer_process(connection)
            connection.settimeout(HELLO_TIMEOUT_S)
            rank, theirs = _hello_of(link.receive())
            if problem := self._problem(rank, theirs, facts):
                message = f"--tp-size {self.size}: rank {rank} is refused: {problem}: start all ranks alike"
                with suppress(OSError):
                    link.send({"refused": message})
                raise ConfigError(message)
            connection.settimeout(None)
            link.limit_sends(SEND_TIMEOUT_S)
            self._links[rank], self._processes[rank], self._silence[rank] = link, process, 0
            is_taken = True
        except (OSError, ValueError) as error:
            logger.debug("a connection brings no rank: %s", error)
        finally:
            if not is_taken:
                link.close()

    def _problem(self, rank: int, theirs: Mapping[str, object], facts: Mapping[str, str]) -> str | None:
        if not 0 < rank < self.size or rank in self._links:
            return "there is no place for it"
        others = [what for what, value in facts.items() if theirs.get(what) != value]
        return f"it has another {others[0]} than rank 0" if others else None

    def use(self, ranks: Ranks) -> None:
        """From now on commands go by the exchanges of the same ranks, where these are faster; a loss ends them."""
        self._ranks = ranks
        self.when_lost(lambda _: ranks.end())

    def watch_strictly(self) -> None:
        """From now on also ranks are lost that give no sign of life; before that, those that end."""
        self._is_strict = True

    def when_lost(self, callback: Lost) -> None:
        """Call a function, in another thread, when a rank is lost; at once if one is lost already."""
        with self._lock:
            self._on_lost.append(callback)
            lost = self.lost
        if lost is not None:
            callback(lost)

    def send(self, message: dict[str, Any]) -> None:
        """Send a command to all other ranks. Raises RankLostError; ValueError: it is too long, and no rank gets it."""
        self.send_line(encoded(message))

    def send_line(self, line: bytes) -> None:
        """Send a command that ``encoded`` gave. Raises RankLostError."""
        if self.lost is not None:
            raise self.lost
        try:
            if self._ranks.tell(line):
                return
            for link in self._links.values():
                link.send_line(line)
        except (OSError, RuntimeError) as error:
            raise self.lost_soon() or RankLostError(f"--tp-size {self.size}: a rank is lost: {error}") from error

    def lost_soon(self, wait_s: float = 2.0) -> RankLostError | None:
        """The loss of a rank that is noticed now or soon, where an exchange has failed; None: there is none."""
        end = time.monotonic() + wait_s
        while self.lost is None and time.monotonic() < end:
            time.sleep(0.02)
        return self.lost

    def close(self) -> None:
        """Tell the others to end, and leave them."""
        self._closing.set()
        for link in self._links.values():
            with suppress(OSError):
                link.send({"do": "close"})
        if self._watcher.is_alive():
            self._watcher.join()
        for link in self._links.values():
            link.close()
        self._server.close()

    def _watch(self) -> None:
        poll = select.poll()
        ranks = {link.fileno(): rank for rank, link in self._links.items()}
        for descriptor in ranks:
            poll.register(descriptor, select.POLLIN)
        while self.lost is None and not self._closing.wait(BEAT_S):
            heard = {ranks[descriptor] for descriptor, _ in poll.poll(0)}
            for rank in self._links:
                self._silence[rank] = 0 if rank in heard else self._silence[rank] + 1
                if rank in heard and not self._goes_on(rank):
                    self._lose(rank, self._failure or "it has ended")
                elif self._is_strict and self._silence[rank] > MAX_SILENCE:
                    self._lose(rank, f"it gave no sign of life for {MAX_SILENCE * BEAT_S:g} s")

    def _goes_on(self, rank: int) -> bool:
        """Read all that has arrived from a rank; False: it has ended."""
        try:
            for message in self._links[rank].arrived():
                if "failed" in message:
                    self._failure = str(message["failed"])
                    return False
        except (OSError, EOFError, ValueError):
            return False
        return True

    def _lose(self, rank: int, why: str) -> None:
        if self._closing.is_set() or self.lost is not None:
            return
        error = RankLostError(f"--tp-size {self.size}: rank {rank} (process {self._processes[rank]}) is lost: {why}")
        logger.error("%s", error)
        with self._lock:
            self.lost = error
            callbacks = list(self._on_lost)
        self.kill()
        for callback in callbacks:
            try:
                callback(error)
            except Exception:  # those behind it end the streams
                logger.exception("what follows the loss of a rank has failed")

    def kill(self) -> None:
        """Kill the other ranks, so that no exchange with them waits."""
        for process in self._processes.values():
            if process <= 0:  # of another namespace, where it has no id here; 0 and -1 stand for groups of processes
                continue
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)


class FirstRankLink:
    """The connection of another rank with rank 0. This process ends at once when rank 0 does.

    Raises:
        ConfigError: rank 0 is not there, or refuses this rank.
    """

    def __init__(self, name: str, rank: int, facts: Mapping[str, str]) -> None:
        """Join; ``name`` and ``facts`` as for ``RankLinks``."""
        self._link = _connect(name)
        self._link.send({"rank": rank, "facts": dict(facts)})
        answer = self._link.receive()
        if answer is None or "refused" in answer:
            raise ConfigError("rank 0 has ended" if answer is None else str(answer["refused"]))
        self.store_file: str | None = answer["store"]
        self._ranks = ONE_RANK
        self._condition = threading.Condition()  # guards the next field
        self._received: list[dict[str, Any]] = []
        for task in (self._receive_all, self._beat):
            threading.Thread(target=task, daemon=True).start()

    def use(self, ranks: Ranks) -> None:
        """From now on commands come as ``RankLinks.use`` says."""
        self._ranks = ranks

    def receive(self) -> dict[str, Any]:
        """Wait for the next command. Raises RuntimeError: another rank has ended."""
        while self._ranks.is_recordable and self._ranks.size > 1:
            try:
                line = self._ranks.told(TOLD_MS)
            except RuntimeError:  # also where rank 0 has told the end, and left
                with self._condition:
                    if not self._condition.wait_for(lambda: bool(self._received), LAST_S):
                        raise
                    return self._received.pop(0)
            if line is not None:
                message: dict[str, Any] = json.loads(line)
                return message
            with self._condition:
                if self._received:
                    return self._received.pop(0)
        with self._condition:
            self._condition.wait_for(lambda: bool(self._received))
            return self._received.pop(0)

    def fail(self, message: str) -> None:
        """Tell rank 0 why this rank ends."""
        with suppress(OSError):
            self._link.send({"failed": message})

    def _receive_all(self) -> None:
        try:
            while (message := self._link.receive()) is not None:
                with self._condition:
                    self._received.append(message)
                    self._condition.notify()
                if message.get("do") == "close":
                    return
        except (OSError, ValueError):
            pass
        os._exit(1)  # also in the middle of an exchange with ranks that are gone

    def _beat(self) -> None:
        with suppress(OSError):
            while True:
                self._link.send({"beat": 1})
                time.sleep(BEAT_S)


def _hello_of(message: dict[str, Any] | None) -> tuple[int, Mapping[str, object]]:
    """The rank and the facts of a first message. Raises ValueError: it has none."""
    match message:
        case {"rank": int(rank), "facts": dict(facts)}:
            return rank, facts
    raise ValueError(f"the first message is {message!r:.200}")


def _connect(name: str) -> Messages:
    """Connect to rank 0, which may start later (under ``torchrun``)."""
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    while True:
        try:
            return connect(name)
        except PermissionError as error:
            raise ConfigError(f"rank 0: {error}") from None
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigError(f"rank 0 cannot be reached: {error}") from None
            time.sleep(0.1)
