"""One replica: it is started, started again when it has ended, and ended with the server."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from specmamba.errors import SpecmambaError
from specmamba.parallel.messages import Messages
from specmamba.replicas.replica_launch import ChildReplica, Launch, Launched, ReplicaTask

logger = logging.getLogger("specmamba")

END_TIMEOUT_S = 10.0
RETIRE_TIMEOUT_S = 60.0  # of one that ends while the server goes on: it may have prefixes to write
END_LOOK_S = 0.5  # between two looks whether the server ends, while another process is waited for
MAX_FAILED_STARTS = 3  # in a row; then it stays away
SHORT_LIFE_S = 60.0  # who ends sooner is started later
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0


@dataclass(frozen=True, slots=True)
class ReadyReplica:
    """A replica that has loaded its model."""

    index: int
    generation: int  # of its process: how many were started for this index, up to it
    link: Messages
    pid: int
    constants: dict[str, Any]


class ReplicaProcess:
    """Keeps a replica running, on a thread of its own.

    Connections of replicas that are ready are handed over; this thread reads nothing after that.
    """

    def __init__(
        self,
        task: ReplicaTask,
        next_generation: Callable[[], int],
        on_ready: Callable[[ReadyReplica], None],
        on_gone: Callable[[ReplicaProcess, str], None],
        launch: Launch = ChildReplica,
        after: ReplicaProcess | None = None,
    ) -> None:
        """Start it.

        Args:
            task: of the replica.
            next_generation: returns the number of each process that is started for this index. Process ids do not
                tell them apart: the system gives them out again, and those of other machines are its own.
            on_ready: called on the thread with each replica that is ready.
            on_gone: called on the thread with this object and the reason when it cannot be started (any more).
            launch: starts it, each time.
            after: one that ends, and has its memory until then.
        """
        self.index = task.index
        self._task, self._on_ready, self._on_gone, self._launch = task, on_ready, on_gone, launch
        self._after, self._next_generation = after, next_generation
        self._process: Launched | None = None
        self._generation = 0  # of the process
        self._is_ready = False  # likewise: it has something to finish
        self._closing = threading.Event()
        self._lock = threading.Lock()  # guards the process between its start and the end of all
        self._thread = threading.Thread(target=self._run, name=f"replica-{task.index}", daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """Whether it has no process, nor has the one that it waits for, and none will be started."""
        after = self._after
        return not self._thread.is_alive() and (after is None or after.has_ended)

    def has(self, generation: int) -> bool:
        """Whether its process is the one of this generation."""
        return self._process is not None and self._generation == generation

    def kill(self, generation: int) -> None:
        """Kill the process, if it is still the one of this generation."""
        with self._lock:
            if self._process is not None and self._generation == generation:
                self._process.kill()

    def start_no_more(self) -> None:
        """Let the end of the process be the last one."""
        self._closing.set()

    def close(self, timeout_s: float | None = None) -> None:
        """Start it no more; the process ends with its connection, or is killed after a time, while it loads at once."""
        self.start_no_more()
        process = self._process
        if process is not None:
            most_s = END_TIMEOUT_S if timeout_s is None else timeout_s
            process.wait(most_s if self._is_ready else 0.0)
            process.kill()
        self._thread.join(END_TIMEOUT_S)
        if (after := self._after) is not None:
            after.close(timeout_s)

    def retire(self, at_once: bool) -> None:
        """As ``close``, or ``abandon`` with ``at_once``, without waiting for it."""
        self.start_no_more()
        end = self.abandon if at_once else partial(self.close, RETIRE_TIMEOUT_S)
        threading.Thread(target=end, name=f"replica-{self._task.index}-end", daemon=True).start()

    def abandon(self) -> None:
        """End it at once, where it never became ready."""
        self.start_no_more()
        with self._lock:
            if self._process is not None:
                self._process.kill()
        self._thread.join(END_TIMEOUT_S)
        if (after := self._after) is not None:
            after.abandon()

    def has_ended_in(self, timeout_s: float) -> bool:
        """Wait for its end; returns whether it came within the time."""
        self._thread.join(timeout_s)
        after = self._after
        if after is not None and not self._thread.is_alive():
            after.has_ended_in(timeout_s)
        return self.has_ended

    def _run(self) -> None:
        num_failed, pause, index = 0, FIRST_PAUSE_S, self.index
        has_run = False
        while self._after is not None and not self._closing.is_set():
            if self._after.has_ended_in(END_LOOK_S):
                self._after = None
        while not self._closing.is_set():
            began, failure = time.monotonic(), None
            try:
                process = self._start()
                failure = self._watch(process, process.connection())
            except Exception as error:  # noqa: BLE001 -- of what starts it: the server waits to hear of any
                what = str(error) if isinstance(error, OSError | SpecmambaError) else f"{type(error).__name__}: {error}"
                failure = f"it cannot be started: {what}"
                self._give_up()
            if self._closing.is_set():
                return
            has_run |= failure is None
            num_failed = 0 if failure is None else num_failed + 1
            if failure is not None and (not has_run or num_failed >= MAX_FAILED_STARTS):
                self._on_gone(self, failure)
                return
            end = "nothing" if self._process is None else self._process.end
            logger.error("replica %d has ended with %s, and is started again", index, end)
            pause = FIRST_PAUSE_S if time.monotonic() > began + SHORT_LIFE_S else min(2 * pause, LONGEST_PAUSE_S)
            self._closing.wait(pause)

    def _give_up(self) -> None:
        """End a process that is not watched any more: another one would wait for what it has."""
        with self._lock, suppress(Exception):  # whatever ends it may have failed with what watches it
            if self._process is not None:
                self._process.kill()

    def _start(self) -> Launched:
        """Start the process. Raises OSError."""
        with self._lock:
            if self._closing.is_set():
                raise OSError("the server ends")
            self._process, self._is_ready = (process := self._launch(self._task)), False
            self._generation = self._next_generation()
        return process

    def _watch(self, process: Launched, link: Messages) -> str | None:
        """Wait until it is ready, hand it over, and wait for its end. Returns why it did not become ready."""
        try:
            while (message := link.receive()) is not None and "log" in message:
                log(self._task.index, message)
        except (OSError, ValueError) as error:
            message = {"failed": f"it says nothing that can be read: {error}"}
        if message is not None and "ready" in message:
            self._is_ready = True
            self._on_ready(ReadyReplica(self._task.index, self._generation, link, process.pid, message["ready"]))
            process.wait()
            return None
        link.close()
        process.kill()
        process.wait()
        if message is None:
            return f"its process has ended with {process.end} before it was ready"
        return str(message.get("failed", message))


def log(index: int, message: Mapping[str, Any]) -> None:
    """Write what a replica logs."""
    logger.log(int(message["level"]), "%s", f"replica {index}: {message['log']}" if index else message["log"])
