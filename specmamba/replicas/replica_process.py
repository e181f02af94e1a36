"""One replica: it is started, started again when it has ended, and ended with the server; and how processes start."""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from specmamba.errors import SpecmambaError
from specmamba.parallel.messages import Messages
from specmamba.processes.child_process import python_path

logger = logging.getLogger("specmamba")

END_TIMEOUT_S = 10.0
MAX_FAILED_STARTS = 3  # in a row; then it stays away
SHORT_LIFE_S = 60.0  # who ends sooner is started later
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
SEND_TIMEOUT_S = 5  # a replica reads all the time, also in a long step: one that does not is stopped
_TIME = struct.Struct("ll")  # of the kernel: seconds, microseconds


@dataclass(frozen=True, slots=True)
class ReplicaTask:
    """What a replica is started with."""

    index: int
    flags: Mapping[str, Any]  # of its engine
    environment: Mapping[str, str]  # beside that of this process
    secret: bytes  # key of the hashes of prefixes


@dataclass(frozen=True, slots=True)
class ReadyReplica:
    """A replica that has loaded its model."""

    index: int
    link: Messages
    pid: int
    constants: dict[str, Any]


class Launched(Protocol):
    """A replica that was started; ``kill`` may come from any thread."""

    @property
    def pid(self) -> int:
        """The id of its process, where ``connection`` has returned."""

    @property
    def end(self) -> str:
        """How it has ended."""

    def connection(self) -> Messages:
        """Wait for the connection with it; called once. Raises OSError: it has ended."""

    def kill(self) -> None:
        """End it at once."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for its end. Returns False: it runs."""


Launch = Callable[[ReplicaTask], Launched]  # starts a replica, and does not wait


class ChildReplica:
    """A replica as a child process of this one: ``Launched``."""

    def __init__(self, task: ReplicaTask) -> None:
        """Start the process, and tell it what to do. Raises OSError."""
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, send_timeout())
        with ExitStack() as undo, theirs:
            undo.callback(ours.close)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "specmamba.replicas.replica_main"],
                stdin=subprocess.PIPE,
                stdout=2,  # standard output is the server's
                env={**os.environ, "PYTHONPATH": python_path(), **task.environment},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # signals of a terminal are for the server
            )
            assert self._process.stdin is not None
            given = {"connection": theirs.fileno(), **given_to(task)}
            with suppress(BrokenPipeError), self._process.stdin as stdin:
                stdin.write(json.dumps(given).encode())
            undo.pop_all()
        self._link = Messages(ours)

    @property
    def pid(self) -> int:
        """As ``Launched``."""
        return self._process.pid

    @property
    def end(self) -> str:
        """As ``Launched``."""
        return f"status {self._process.returncode}"

    def connection(self) -> Messages:
        """As ``Launched``."""
        return self._link

    def kill(self) -> None:
        """As ``Launched``."""
        self._process.kill()

    def wait(self, timeout_s: float | None = None) -> bool:
        """As ``Launched``."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
            return True
        return False


class ReplicaProcess:
    """Keeps a replica running, on a thread of its own.

    Connections of replicas that are ready are handed over; this thread reads nothing after that.
    """

    def __init__(
        self,
        task: ReplicaTask,
        on_ready: Callable[[ReadyReplica], None],
        on_gone: Callable[[int, str], None],
        launch: Launch = ChildReplica,
    ) -> None:
        """Start it.

        Args:
            task: of the replica.
            on_ready: called on the thread with each replica that is ready.
            on_gone: called on the thread with the index and the reason when it cannot be started (any more).
            launch: starts it, each time.
        """
        self._task, self._on_ready, self._on_gone, self._launch = task, on_ready, on_gone, launch
        self._process: Launched | None = None
        self._closing = threading.Event()
        self._lock = threading.Lock()  # guards the process between its start and the end of all
        self._thread = threading.Thread(target=self._run, name=f"replica-{task.index}", daemon=True)
        self._thread.start()

    def kill(self, pid: int) -> None:
        """Kill the process, if it is still the one with this id."""
        with self._lock:
            if self._process is not None and self._process.pid == pid:
                self._process.kill()

    def start_no_more(self) -> None:
        """Let the end of the process be the last one."""
        self._closing.set()

    def close(self) -> None:
        """Start it no more; the process ends with its connection, or is killed after ``END_TIMEOUT_S``."""
        self.start_no_more()
        process = self._process
        if process is not None:
            process.wait(END_TIMEOUT_S)
            process.kill()
        self._thread.join(END_TIMEOUT_S)

    def abandon(self) -> None:
        """End it at once, where it never became ready."""
        self.start_no_more()
        with self._lock:
            if self._process is not None:
                self._process.kill()
        self._thread.join(END_TIMEOUT_S)

    def _run(self) -> None:
        num_failed, pause, index = 0, FIRST_PAUSE_S, self._task.index
        has_run = False
        while not self._closing.is_set():
            began, failure = time.monotonic(), None
            try:
                process = self._start()
                failure = self._watch(process, process.connection())
            except Exception as error:  # noqa: BLE001 -- of what starts it: the server waits to hear of any
                what = str(error) if isinstance(error, OSError | SpecmambaError) else f"{type(error).__name__}: {error}"
                failure = f"it cannot be started: {what}"
            if self._closing.is_set():
                return
            has_run |= failure is None
            num_failed = 0 if failure is None else num_failed + 1
            if failure is not None and (not has_run or num_failed >= MAX_FAILED_STARTS):
                self._on_gone(index, failure)
                return
            end = "nothing" if self._process is None else self._process.end
            logger.error("replica %d has ended with %s, and is started again", index, end)
            pause = FIRST_PAUSE_S if time.monotonic() > began + SHORT_LIFE_S else min(2 * pause, LONGEST_PAUSE_S)
            self._closing.wait(pause)

    def _start(self) -> Launched:
        """Start the process. Raises OSError."""
        with self._lock:
            if self._closing.is_set():
                raise OSError("the server ends")
            self._process = process = self._launch(self._task)
        return process

    def _watch(self, process: Launched, link: Messages) -> str | None:
        """Wait until it is ready, hand it over, and wait for its end. Returns why it did not become ready."""
        try:
            while (message := link.receive()) is not None and "log" in message:
                log(self._task.index, message)
        except (OSError, ValueError) as error:
            message = {"failed": f"it says nothing that can be read: {error}"}
        if message is not None and "ready" in message:
            self._on_ready(ReadyReplica(self._task.index, link, process.pid, message["ready"]))
            process.wait()
            return None
        link.close()
        process.kill()
        process.wait()
        if message is None:
            return f"its process has ended with {process.end} before it was ready"
        return str(message.get("failed", message))


def given_to(task: ReplicaTask) -> dict[str, Any]:
    """What the program of a replica is told, as values of JSON: see ``replica_main``."""
    return {
        "index": task.index,
        "flags": dict(task.flags),
        "secret": task.secret.hex(),
        "log_level": logger.getEffectiveLevel(),
    }


def send_timeout() -> bytes:
    """``SEND_TIMEOUT_S`` as the value of ``SO_SNDTIMEO``."""
    return _TIME.pack(SEND_TIMEOUT_S, 0)


def log(index: int, message: Mapping[str, Any]) -> None:
    """Write what a replica logs."""
    logger.log(int(message["level"]), "%s", f"replica {index}: {message['log']}" if index else message["log"])
