"""How a replica is started: what it is told, and a process of this machine that does it."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from specmamba.parallel.messages import Messages
from specmamba.processes.child_process import python_path

logger = logging.getLogger("specmamba")

SEND_TIMEOUT_S = 5  # a replica reads all the time, also in a long step: one that does not is stopped


@dataclass(frozen=True, slots=True)
class ReplicaTask:
    """What a replica is started with."""

    index: int
    flags: Mapping[str, Any]  # of its engine
    environment: Mapping[str, str]  # beside that of this process
    secret: bytes  # key of the hashes of prefixes


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
        self._link.limit_sends(SEND_TIMEOUT_S)

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


def given_to(task: ReplicaTask) -> dict[str, Any]:
    """What the program of a replica is told, as values of JSON: see ``replica_main``."""
    return {
        "index": task.index,
        "flags": dict(task.flags),
        "secret": task.secret.hex(),
        "log_level": logger.getEffectiveLevel(),
    }
