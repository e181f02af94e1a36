"""The queue of specifications to compile, and the cache of compiled and refused ones."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from specmamba.errors import RequestError
from specmamba.sampling_params import GrammarSpec

MAX_REFUSALS = 256  # in the cache, so that repeated requests with a bad specification do not delay others
RETRY_S = 60.0  # until a specification is tried again whose failure may not be its own fault
MAX_WAITING = 64  # specifications, however many requests wait for each
MAX_WAITING_OF_CALLER = 8


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A specification compiled by xgrammar for one tokenizer."""

    spec: GrammarSpec
    compiled: Any  # xgrammar.CompiledGrammar
    num_bytes: int = 0  # of the serialized form, which is about the memory that the compiled form takes


class GrammarCache:
    """Outcomes by specification. The least recently used are dropped beyond a number of bytes or of refusals."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._grammars: OrderedDict[GrammarSpec, tuple[CompiledGrammar, int]] = OrderedDict()
        self._refusals: OrderedDict[GrammarSpec, tuple[RequestError, float]] = OrderedDict()
        self.num_bytes = 0

    def get(self, spec: GrammarSpec) -> CompiledGrammar | RequestError | None:
        """The cached outcome of a specification, or None. Marks a grammar as just used."""
        error, expiry = self._refusals.get(spec, (None, 0.0))
        if time.monotonic() < expiry:
            return error
        if spec not in self._grammars:
            return None
        self._grammars.move_to_end(spec)
        return self._grammars[spec][0]

    def add(self, spec: GrammarSpec, outcome: CompiledGrammar | RequestError) -> None:
        """Add an outcome, and drop others until the cache is within its bounds. A larger grammar is not kept."""
        if isinstance(outcome, RequestError):
            self.refuse(spec, outcome)
            return
        size = outcome.num_bytes + len(spec.text)
        self._grammars[spec] = (outcome, size)
        self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            _, (_, dropped) = self._grammars.popitem(last=False)
            self.num_bytes -= dropped

    def refuse(self, spec: GrammarSpec, error: RequestError) -> None:
        """Add a refusal in place of what is known of a specification; one with a cause holds for ``RETRY_S`` only."""
        _, dropped = self._grammars.pop(spec, (None, 0))
        self.num_bytes -= dropped
        is_permanent = error.__cause__ is None
        self._refusals[spec] = (error, float("inf") if is_permanent else time.monotonic() + RETRY_S)
        self._refusals.move_to_end(spec)
        if len(self._refusals) > MAX_REFUSALS:
            self._refusals.popitem(last=False)


def copy_of(error: RequestError) -> RequestError:
    """A copy for another caller, because raising an exception changes it."""
    copy = RequestError(str(error), error.param)
    copy.__cause__ = error.__cause__
    return copy


@dataclass(slots=True, eq=False)
class Job:
    """A specification to compile, with the futures of all callers; it takes the turn of the first caller."""

    spec: GrammarSpec
    caller: str | None = None
    futures: list[Future[CompiledGrammar]] = field(default_factory=list)

    @property
    def is_wanted(self) -> bool:
        """Whether a future is left that was not cancelled."""
        return not all(future.cancelled() for future in self.futures)


class Jobs:
    """The queue of jobs: first come, first served for each caller, callers in turn. Not thread-safe.

    A job that was taken can still be found until it is dropped.
    """

    def __init__(self) -> None:
        self._all: dict[GrammarSpec, Job] = {}
        # The caller whose turn is next comes first.
        self._waiting: OrderedDict[str | None, deque[Job]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._all)

    def find(self, spec: GrammarSpec) -> Job | None:
        """The job of a specification, waiting or running, or None."""
        return self._all.get(spec)

    def num_waiting(self, caller: str | None) -> int:
        """The number of jobs of a caller that have not been taken."""
        return len(self._waiting.get(caller, ()))

    def add(self, job: Job) -> None:
        """Add a job behind all jobs of its caller."""
        self._all[job.spec] = job
        self._waiting.setdefault(job.caller, deque()).append(job)

    def take(self) -> Job | None:
        """Take the next job, or None; it can still be found until it is dropped."""
        if not self._waiting:
            return None
        caller, jobs = self._waiting.popitem(last=False)
        job = jobs.popleft()
        if jobs:
            self._waiting[caller] = jobs  # behind all others
        return job

    def drop(self, job: Job) -> None:
        """Remove a job that is done or no longer wanted; no error where it was removed before."""
        if self._all.get(job.spec) is job:
            del self._all[job.spec]
        jobs = self._waiting.get(job.caller)
        if jobs is not None and job in jobs:
            jobs.remove(job)
            if not jobs:
                del self._waiting[job.caller]

    def drop_all(self) -> list[Job]:
        """Remove all jobs; gives those that were not done."""
        jobs = list(self._all.values())
        self._all.clear()
        self._waiting.clear()
        return jobs
