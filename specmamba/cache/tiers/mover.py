"""A thread that moves entries, so that no step of the engine waits for a disk."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

logger = logging.getLogger("specmamba")


class Mover:
    """Runs jobs one after the other, in a thread that starts with the first one.

    A job has a size: the memory that it holds until it has run. No more than ``max_bytes`` are held together, but one
    job of any size is taken.
    """

    def __init__(self, name: str, max_bytes: int) -> None:
        self._name, self._max_bytes = name, max_bytes
        self._jobs: deque[tuple[Callable[[], None], int]] = deque()
        self._num_bytes = 0
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._began: float | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the jobs that wait or run."""
        return self._num_bytes

    @property
    def began(self) -> float | None:
        """When the job that runs now has begun, by ``time.monotonic()``; None: none runs."""
        return self._began

    def has_room(self, nbytes: int) -> bool:
        """Whether a job of this size is taken now."""
        return not self._is_closed and (not self._num_bytes or self._num_bytes + nbytes <= self._max_bytes)

    def put(self, job: Callable[[], None], nbytes: int) -> bool:
        """Queue a job. Returns False, and does nothing, where there is no room for it."""
        with self._changed:
            if not self.has_room(nbytes):
                return False
            self._jobs.append((job, nbytes))
            self._num_bytes += nbytes
            if self._thread is None:
                # a daemon, so that a disk that does not answer cannot keep the process from exiting
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return True

    def wait(self, nbytes: int, timeout_s: float) -> bool:
        """Wait until there is room for a job of this size; returns whether there is."""
        with self._changed:
            return self._changed.wait_for(lambda: self.has_room(nbytes), timeout_s)

    def drain(self, timeout_s: float) -> bool:
        """Wait until all jobs have run; returns whether they have."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs and not self._num_bytes, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Run what is queued, take nothing more, and end the thread; returns whether it ended in time."""
        deadline = time.monotonic() + timeout_s
        self.drain(timeout_s)
        with self._changed:
            self._is_closed = True
            self._jobs.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()) + 0.1)
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._is_closed)
                if not self._jobs:
                    return
                job, nbytes = self._jobs.popleft()
                self._began = time.monotonic()
            try:
                job()
            except Exception:
                logger.exception("%s: a job failed", self._name)
            self._began = None
            del job  # and the memory that it holds
            with self._changed:
                self._num_bytes -= nbytes
                self._changed.notify_all()
