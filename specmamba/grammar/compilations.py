"""Compilations of grammars: those that wait for their turn, and the outcomes that are kept for later requests."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from specmamba.core import GrammarSpec
from specmamba.errors import RequestError

MAX_REFUSALS = 256  # that are remembered, so that who repeats a bad one does not hold up the others
RETRY_S = 60.0  # until what was no fault of the specification, or of a busy machine perhaps, is tried again
MAX_WAITING = 64  # specifications, however many requests wait for each
MAX_WAITING_OF_CALLER = 8


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """What xgrammar has made of a specification, for one tokenizer."""

    spec: GrammarSpec
    compiled: Any  # xgrammar.CompiledGrammar
    num_bytes: int = 0  # of what the worker sent: about what it takes here, where every rule has its own automaton


class GrammarCache:
    """Outcomes by specification: grammars up to a size in bytes, refusals up to a number, by least recent use."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._grammars: OrderedDict[GrammarSpec, tuple[CompiledGrammar, int]] = OrderedDict()
        self._refusals: OrderedDict[GrammarSpec, tuple[RequestError, float]] = OrderedDict()
        self.num_bytes = 0

    def get(self, spec: GrammarSpec) -> CompiledGrammar | RequestError | None:
        """What became of a specification, if it is known; it counts as used now."""
        if spec in self._grammars:
            self._grammars.move_to_end(spec)
            return self._grammars[spec][0]
        error, expiry = self._refusals.get(spec, (None, 0.0))
        return error if time.monotonic() < expiry else None

    def add(self, spec: GrammarSpec, outcome: CompiledGrammar | RequestError) -> None:
        """Keep an outcome, and drop others as far as needed. A grammar larger than the cache is not kept."""
        if isinstance(outcome, RequestError):
            self._refuse(spec, outcome)
            return
        size = outcome.num_bytes + len(spec.text)
        self._grammars[spec] = (outcome, size)
        self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            _, (_, dropped) = self._grammars.popitem(last=False)
            self.num_bytes -= dropped

    def _refuse(self, spec: GrammarSpec, error: RequestError) -> None:
        is_for_good = error.__cause__ is None
        self._refusals[spec] = (error, float("inf") if is_for_good else time.monotonic() + RETRY_S)
        self._refusals.move_to_end(spec)
        if len(self._refusals) > MAX_REFUSALS:
            self._refusals.popitem(last=False)


def copy_of(error: RequestError) -> RequestError:
    """For another caller: raising an exception writes into it."""
    copy = RequestError(str(error), error.param)
    copy.__cause__ = error.__cause__
    return copy


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
