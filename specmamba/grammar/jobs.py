"""What waits to be compiled: one after the other for each caller, callers in turn."""

from __future__ import annotations

from collections import OrderedDict, deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from specmamba.core import GrammarSpec
from specmamba.grammar.compiled import CompiledGrammar

MAX_WAITING = 64  # specifications, however many requests wait for each
MAX_WAITING_OF_CALLER = 8


@dataclass(slots=True, eq=False)
class Job:
    """A specification, and those who wait for it. It counts as the first one's."""

    spec: GrammarSpec
    caller: str | None = None
    futures: list[Future[CompiledGrammar]] = field(default_factory=list)

    @property
    def is_wanted(self) -> bool:
        return not all(future.cancelled() for future in self.futures)


class Jobs:
    """Jobs by specification until they are done, in the order in which they are to be done. Not thread-safe."""

    def __init__(self) -> None:
        self._all: dict[GrammarSpec, Job] = {}
        self._waiting: OrderedDict[str | None, deque[Job]] = OrderedDict()  # who was served longest ago comes first

    def __len__(self) -> int:
        return len(self._all)

    def find(self, spec: GrammarSpec) -> Job | None:
        return self._all.get(spec)

    def num_waiting(self, caller: str | None) -> int:
        return len(self._waiting.get(caller, ()))

    def add(self, job: Job) -> None:
        self._all[job.spec] = job
        self._waiting.setdefault(job.caller, deque()).append(job)

    def take(self) -> Job | None:
        """The next one to be done; it is found until it is dropped."""
        if not self._waiting:
            return None
        caller, jobs = self._waiting.popitem(last=False)
        job = jobs.popleft()
        if jobs:
            self._waiting[caller] = jobs  # behind all others
        return job

    def drop(self, job: Job) -> None:
        """It is done, or nobody waits for it any more. Harmless when called again."""
        if self._all.get(job.spec) is job:
            del self._all[job.spec]
        jobs = self._waiting.get(job.caller)
        if jobs is not None and job in jobs:
            jobs.remove(job)
            if not jobs:
                del self._waiting[job.caller]

    def drop_all(self) -> list[Job]:
        jobs = list(self._all.values())
        self._all.clear()
        self._waiting.clear()
        return jobs
