"""Threads that make masks beside the engine's thread, so that a slow mask delays its own request only.

A native call cannot be interrupted. A thread whose job turns out slow is left to finish it at a low priority, and
another thread takes the other jobs.
"""

from __future__ import annotations

import atexit
import math
import os
import threading
import time
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from specmamba.errors import GrammarError
from specmamba.grammar.matcher import TreeMask

MAX_THREADS = 8
MAX_SLOW_OF_OWNER = 2  # slow jobs at a time, urgent ones included; others that are not urgent: one
QUICK_SECONDS = 0.01  # of wall time; a job that runs longer is slow
EXIT_SECONDS = 5.0  # that the end of the process waits for native calls
NICENESS = 10  # of slow jobs, above that of the process: the engine has precedence


class MaskJob:
    """Work on one matcher that gives a mask. ``MaskMaker`` runs it once; its result is there when it is done.

    The work may raise GrammarError. ``owner`` is the caller that it is done for; None stands for one caller. An urgent
    job does not wait for one slow job of the same owner, but for two. A suspect one, whose matcher has been slow or
    whose owner's masks took too much of the steps' time, is slow at once.
    """

    def __init__(
        self, owner: str | None, work: Callable[[], TreeMask], is_urgent: bool = False, is_suspect: bool = False
    ) -> None:
        self.owner, self.is_urgent, self.is_suspect = owner, is_urgent, is_suspect
        self.created = time.monotonic()
        self.began: float | None = None  # time.monotonic()
        self.seconds = 0.0  # of wall time that it took
        self.is_done = False
        self._work: Callable[[], TreeMask] | None = work
        self._outcome: TreeMask | GrammarError | None = None
        self._clock, self._began_at = 0, 0.0  # of the thread's processor time

    def result(self) -> TreeMask:
        """The mask of a job that is done. Raises its GrammarError."""
        assert self._outcome is not None
        if isinstance(self._outcome, GrammarError):
            raise self._outcome
        return self._outcome

    @property
    def is_late(self) -> bool:
        """Whether it runs, and has run so long that it is slow. The time in the queue does not count."""
        return not self.is_done and self.began is not None and time.monotonic() - self.began > QUICK_SECONDS

    def seconds_since(self, start: float) -> float:
        """Wall time that it has run since ``start``, a time of ``time.monotonic``."""
        if self.began is None:
            return 0.0
        end = self.began + self.seconds if self.is_done else time.monotonic()
        return max(0.0, end - max(self.began, start))

    @property
    def processor_seconds(self) -> float:
        """Processor time of a job that runs: the load of the machine does not count."""
        return time.clock_gettime(self._clock) - self._began_at

    def begin(self) -> None:
        """Note the time. Called by the thread that runs the job."""
        self._clock, self._began_at = time.pthread_getcpuclockid(threading.get_ident()), time.thread_time()
        self.began = time.monotonic()

    def run(self) -> None:
        """Do the work, and keep its result or its error."""
        assert self._work is not None
        try:
            self._outcome = self._work()
        except GrammarError as error:
            self._outcome = error
        except Exception as error:  # noqa: BLE001 -- it must end this request only
            self._outcome = GrammarError(f"the grammar failed: {type(error).__name__}: {error}", "grammar_failed")
        self._work = None


@dataclass(slots=True, eq=False)
class _Worker:
    """One thread. A slow one ends after its job, because another has taken its place."""

    thread: threading.Thread
    job: MaskJob | None = None
    is_slow: bool = False

    def slow_down(self) -> None:
        """Let others go first. Linux has priorities of threads, and one that was lowered cannot be raised."""
        self.is_slow, own_id = True, self.thread.native_id
        assert own_id is not None
        os.setpriority(os.PRIO_PROCESS, own_id, min(19, os.getpriority(os.PRIO_PROCESS, own_id) + NICENESS))


class MaskMaker:
    """Runs jobs on daemon threads: owners in turn, and at most one slow job of each owner at a time, two if urgent.

    One thread runs the quick jobs. When its job turns out slow, it gets a low priority and another one starts, up to
    ``max_threads``; this is noticed in ``submit`` and ``wait``. The last thread takes no suspect jobs, and none of an
    owner that has a slow one. All methods are called from one thread, and only ``join`` waits for native calls.
    """

    def __init__(self, max_threads: int = MAX_THREADS) -> None:
        self._max_threads = max_threads
        self._lock = threading.Lock()  # guards all fields below
        self._work, self._done = threading.Condition(self._lock), threading.Condition(self._lock)
        self._waiting: OrderedDict[str | None, deque[MaskJob]] = OrderedDict()  # the owner whose turn is next first
        self._workers: list[_Worker] = []
        self._awaited: set[MaskJob] = set()
        self._is_closed = False
        _MAKERS.add(self)

    def has_room(self, owner: str | None) -> bool:
        """Whether an urgent job of this owner can begin at once, or after a quick one."""
        with self._lock:
            self._replace_slow()
            return self._may_begin(owner, True, False, self._slow_owners())

    def submit(self, job: MaskJob) -> None:
        """Queue a job behind the jobs of its owner."""
        with self._lock:
            self._waiting.setdefault(job.owner, deque()).append(job)
            self._replace_slow()
            self._work.notify()

    def drop(self, job: MaskJob) -> bool:
        """Remove a job that is no longer wanted. False: it has begun; it goes on, and its result is not read."""
        with self._lock:
            jobs = self._waiting.get(job.owner, deque())
            if job not in jobs:
                return False
            jobs.remove(job)
            if not jobs:
                del self._waiting[job.owner]
            return True

    def wait(
        self, jobs: Collection[MaskJob], seconds: float, processor_seconds: float = math.inf, even_blocked: bool = False
    ) -> None:
        """Wait until jobs are done.

        Args:
            jobs: submitted before.
            seconds: the longest wait.
            processor_seconds: a job that has run for so long is not waited for any more.
            even_blocked: wait also for jobs that cannot begin before a slow one has ended.
        """
        if not jobs and not self._workers:
            return
        end = time.monotonic() + seconds
        with self._lock:
            while left := self._left(jobs, processor_seconds, even_blocked):
                now = time.monotonic()
                if now >= end:
                    break
                self._awaited = set(left)
                self._done.wait(min(end - now, QUICK_SECONDS / 2))
            self._awaited = set()

    def close(self) -> None:
        """Drop all jobs and end the threads; one with a native call ends after it."""
        with self._lock:
            self._is_closed = True
            self._waiting.clear()
            self._work.notify_all()

    def join(self, end: float) -> None:
        """After ``close``: wait for the threads until ``end``, a time of ``time.monotonic``."""
        with self._lock:
            threads = [worker.thread for worker in self._workers]
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _left(self, jobs: Collection[MaskJob], processor_seconds: float, even_blocked: bool) -> list[MaskJob]:
        """The jobs that ``wait`` still waits for."""
        self._replace_slow()
        slow = self._slow_owners()
        left = [job for job in jobs if not job.is_done]
        waiting = [job for job in left if job.began is None and (even_blocked or self._may_begin_job(job, slow))]
        return waiting + [j for j in left if j.began is not None and j.processor_seconds < processor_seconds]

    def _may_begin_job(self, job: MaskJob, slow: Mapping[str | None, int]) -> bool:
        return self._may_begin(job.owner, job.is_urgent, job.is_suspect, slow)

    def _may_begin(self, owner: str | None, is_urgent: bool, is_suspect: bool, slow: Mapping[str | None, int]) -> bool:
        own, total = slow.get(owner, 0), sum(slow.values())
        if total >= self._max_threads:
            return False
        if total > 0 and total == self._max_threads - 1:
            return own == 0 and not is_suspect  # the last thread is for jobs that may be quick
        return own < (MAX_SLOW_OF_OWNER if is_urgent else 1)

    def _slow_owners(self) -> Counter[str | None]:
        """How many slow jobs of each owner run."""
        return Counter(worker.job.owner for worker in self._workers if worker.is_slow and worker.job is not None)

    def _replace_slow(self) -> None:
        """Mark threads whose jobs are slow; start another where jobs wait and all are slow."""
        for worker in self._workers:
            if worker.job is not None and worker.job.is_late and not worker.is_slow:
                worker.slow_down()
        has_quick = any(not worker.is_slow for worker in self._workers)
        if self._waiting and not has_quick and len(self._workers) < self._max_threads:
            worker = _Worker(threading.Thread(target=self._run, name="grammar-masks", daemon=True))
            self._workers.append(worker)
            worker.thread.start()

    def _run(self) -> None:
        with self._lock:
            worker = next(worker for worker in self._workers if worker.thread is threading.current_thread())
        while (job := self._take(worker)) is not None:
            job.run()
            self._finish(worker, job)
            del job  # a matcher must not live until the next job

    def _take(self, worker: _Worker) -> MaskJob | None:
        """Wait for the next job; None: the thread is to end."""
        with self._lock:
            while not self._is_closed and not worker.is_slow:
                if (job := self._next()) is not None:
                    job.begin()
                    worker.job = job
                    if job.is_suspect:
                        worker.slow_down()
                    return job
                self._work.wait()
            self._workers.remove(worker)
        return None

    def _next(self) -> MaskJob | None:
        slow = self._slow_owners()
        for owner, jobs in self._waiting.items():
            job = next((job for job in jobs if self._may_begin_job(job, slow)), None)
            if job is not None:
                jobs.remove(job)
                self._waiting.move_to_end(owner)
                if not jobs:
                    del self._waiting[owner]
                return job
        return None

    def _finish(self, worker: _Worker, job: MaskJob) -> None:
        with self._lock:
            worker.job = None
            assert job.began is not None
            job.seconds = time.monotonic() - job.began
            job.is_done = True
            self._awaited.discard(job)
            if not self._awaited:
                self._done.notify()
            if worker.is_slow:
                self._work.notify()  # other jobs of its owner may begin


# A native call that returns while the interpreter ends aborts the process, so the end waits for those that run.
_MAKERS: weakref.WeakSet[MaskMaker] = weakref.WeakSet()


@atexit.register
def _end_at_exit() -> None:
    end = time.monotonic() + EXIT_SECONDS
    for maker in list(_MAKERS):
        maker.close()
        maker.join(end)
