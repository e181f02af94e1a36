"""A replica that connects back to the server, wherever it runs; what starts and ends it is left to subclasses."""

from __future__ import annotations

import logging
import secrets
import socket
import time
from abc import ABC, abstractmethod
from typing import Any

from specmamba.cluster.signed_messages import accept
from specmamba.config import EngineConfig
from specmamba.engine.mirror.start import facts_of
from specmamba.parallel.messages import Messages
from specmamba.replicas.replica_launch import ReplicaTask, given_to

logger = logging.getLogger("specmamba")

POLL_S = 1.0  # between two looks at a replica that has not connected yet
WARN_S = 30.0  # between two warnings that it waits for room


class RemoteReplica(ABC):
    """A replica that was started: ``replica_launch.Launched``. It connects to a port that is open for it alone."""

    def __init__(self, task: ReplicaTask, host: str, needs: str) -> None:
        """Listen for it.

        Args:
            task: of the replica.
            host: the address of this machine that others reach.
            needs: what it waits for, in warnings.

        Raises:
            OSError: no port can be had.
            CheckpointError: the checkpoint is not on this machine.
        """
        self.pid = 0
        self._index, self._needs = task.index, needs
        self.key = secrets.token_bytes(32)  # of this start
        self.given: dict[str, Any] = given_to(task) | {"facts": dict(facts_of(EngineConfig(**task.flags)))}
        self._listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._listener.settimeout(POLL_S)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]

    @property
    @abstractmethod
    def end(self) -> str:
        """As ``Launched``."""

    @abstractmethod
    def kill(self) -> None:
        """As ``Launched``."""

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> bool:
        """As ``Launched``."""

    def connection(self) -> Messages:
        """As ``Launched``. Connections that do not know the key are closed."""
        began = warned = time.monotonic()
        with self._listener:
            while (link := self._next_connection()) is None:
                if self.wait(0):
                    raise OSError(f"it has ended with {self.end} before it has connected")
                if time.monotonic() > warned + WARN_S:
                    warned = time.monotonic()
                    text = "replica %d has not connected for %.0f s: it waits for %s, or starts"
                    logger.warning(text, self._index, warned - began, self._needs)
        return link

    def _next_connection(self) -> Messages | None:
        try:
            link = accept(self._listener, self.key)
        except TimeoutError:
            return None
        if link is None:
            logger.warning("a connection to %s:%d does not know the key", *self.address)
            return None
        self.pid = int((link.receive() or {"pid": 0})["pid"])
        return link
