"""The processes of replicas: which of them are to run, how they start, and how those end that are not to run."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from queue import SimpleQueue

from specmamba.replicas.replica_launch import Launch, ReplicaTask
from specmamba.replicas.replica_process import ReadyReplica, ReplicaProcess

logger = logging.getLogger("specmamba")


class ReplicaFleet:
    """Replicas by index. Used by one thread; each process is started, and started again, on a thread of its own.

    These threads say that a replica is gone, so there is a lock for what is on.
    """

    def __init__(self, tasks: Sequence[ReplicaTask], launch: Launch) -> None:
        """``tasks``: one for each replica that there can be; none is started yet."""
        self._tasks = {task.index: task for task in tasks}
        self._launch = launch
        self._lock = threading.RLock()  # guards the four fields below
        self._on: dict[int, ReplicaProcess] = {}
        self._ending: dict[int, ReplicaProcess] = {}
        self._gone: dict[int, str] = {}  # of those that are on: they cannot be started, and why; the newest last
        self._generations: Counter[int] = Counter()  # processes that were started for each index
        self.arrivals: SimpleQueue[ReadyReplica | str] = SimpleQueue()  # ready ones, and why others do not come
        self._on_gone: Callable[[], None] = lambda: None

    @property
    def indices(self) -> Sequence[int]:
        """All replicas that there can be."""
        return sorted(self._tasks)

    @property
    def on(self) -> Collection[int]:
        """Those that run, start, or wait to be started again."""
        with self._lock:
            return [index for index in self._on if index not in self._gone]

    def reason(self, index: int) -> str | None:
        """Why a replica cannot be started; None: it can."""
        return self._gone.get(index)

    def is_ending(self, index: int) -> bool:
        """Whether the process of a replica that is off still ends."""
        return index in self._ending and not self._ending[index].has_ended

    @property
    def latest_failure(self) -> str | None:
        """Why the last of those that cannot be started has failed; None: all can be."""
        with self._lock:
            return next(reversed(self._gone.values()), None)

    @property
    def num_started(self) -> Mapping[int, int]:
        """How many processes were started for each replica; the newest has this number as its generation."""
        with self._lock:
            return {index: self._generations[index] for index in self.indices}

    def _next_generation(self, index: int) -> int:
        with self._lock:
            self._generations[index] += 1
            return self._generations[index]

    def start(self, index: int) -> None:
        """Start a replica that is not on, when the process of its last time has ended."""
        with self._lock:
            self._on.pop(index, None)
            self._gone.pop(index, None)
            before = self._ending.pop(index, None)
            task = self._tasks[index]
            number = partial(self._next_generation, index)
            self._on[index] = ReplicaProcess(task, number, self.arrivals.put, self._tell_gone, self._launch, before)

    def retire(self, index: int, at_once: bool) -> None:
        """Start a replica no more. Its process ends with its connection, or is killed after a time or ``at_once``."""
        with self._lock:
            process = self._on.pop(index, None)
            self._gone.pop(index, None)
            if process is not None:
                self._ending[index] = process
        if process is not None:
            process.retire(at_once)

    def has(self, ready: ReadyReplica) -> bool:
        """Whether a replica that has become ready is one that is to run."""
        return ready.index in self._on and self._on[ready.index].has(ready.generation)

    def kill(self, index: int, generation: int) -> None:
        """Kill a process that is lost; its thread starts it again, unless it was retired."""
        process = self._on.get(index) or self._ending.get(index)
        if process is not None:
            process.kill(generation)

    def _tell_gone(self, process: ReplicaProcess, reason: str) -> None:
        """Note, on the thread of a replica, that it does not come back, unless it is out of service meanwhile."""
        text = f"replica {process.index} cannot be started: {reason}"
        logger.error("%s", text)
        with self._lock:
            if self._on.get(process.index) is not process:
                return
            self._gone[process.index] = text
        self.arrivals.put(text)
        self._on_gone()

    def when_one_is_gone(self, callback: Callable[[], None]) -> None:
        """Call a function, from another thread, each time that a replica cannot be started any more."""
        self._on_gone = callback

    def start_no_more(self) -> None:
        """Let the end of each process be the last one."""
        for process in self._on.values():
            process.start_no_more()

    def close(self) -> None:
        """Wait until all processes have ended; those that take long are killed."""
        for process in [*self._on.values(), *self._ending.values()]:
            process.close()

    def abandon(self) -> None:
        """End all processes at once."""
        for process in [*self._on.values(), *self._ending.values()]:
            process.abandon()
