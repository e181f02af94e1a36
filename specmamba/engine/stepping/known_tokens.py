"""Known tokens of requests: they are run chunk by chunk, and each chunk leaves a state in the prefix cache."""

from __future__ import annotations

from collections.abc import Sequence

from specmamba.engine.cache_manager import CacheManager
from specmamba.engine.captured.step_in_flight import ExtendInFlight
from specmamba.engine.request import ChunkState, PrefillRun, Request
from specmamba.engine.runner import Runner
from specmamba.engine.scheduler import Scheduler
from specmamba.engine.stepping.live_requests import LiveRequests


class KnownTokens:
    """Runs known tokens between two verifies, or behind one that was not read yet."""

    def __init__(self, runner: Runner, scheduler: Scheduler, cache_manager: CacheManager, live: LiveRequests) -> None:
        self._runner, self._scheduler, self._cache, self._live = runner, scheduler, cache_manager, live
        self.unread: ExtendInFlight | None = None  # launched behind a verify, and in front of one that is to follow

    def run(self, runs: list[PrefillRun]) -> tuple[list[Request], list[Request]]:
        """Run known tokens, and wait for them; returns the requests that cannot go on, and those that have run all."""
        is_finite: list[bool] = self._runner.extend(runs).tolist()
        ready = self._scheduler.finish_runs(runs)
        for run, finite in zip(runs, is_finite, strict=True):
            if finite and self._cache.make_slot():
                features = self._live.features(run.request, run.request.num_run)
                self._cache.leave_chunk(run.request, features)
        return [run.request for run, finite in zip(runs, is_finite, strict=True) if not finite], ready

    def launch(self, runs: list[PrefillRun]) -> list[Request]:
        """Run known tokens behind the verify in flight; returns the requests that have run all of theirs."""
        is_finite, ready = self._runner.extend(runs), self._scheduler.finish_runs(runs)
        for run in runs:
            run.request.unread_runs.append(run)
        self.unread = ExtendInFlight(runs, is_finite, [self._copy(run.request) for run in runs])
        return ready

    def read(self) -> list[Request]:
        """Wait for what ``launch`` has run without a verify behind it; returns the requests that cannot go on."""
        extend = self.take()
        return [] if extend is None else self.note(extend, extend.is_finite.tolist())

    def take(self) -> ExtendInFlight | None:
        """Return what was launched and not read, which another reads; forget it."""
        extend, self.unread = self.unread, None
        return extend

    def note(self, extend: ExtendInFlight, is_finite: Sequence[bool]) -> list[Request]:
        """Leave states in the prefix cache where known tokens were run; returns the requests that cannot go on."""
        failed = []
        for run, state, finite in zip(extend.runs, extend.states, is_finite, strict=True):
            request = run.request
            is_here = request in self._live
            if is_here:
                request.unread_runs.remove(run)
            if state is not None and is_here and finite:
                self._cache.insert_chunk(request, state)
            elif state is not None:
                self._cache.drop_chunk(state)
            if is_here and not finite:
                failed.append(request)
        self._scheduler.note_prefixes()
        return failed

    def drop(self, extend: ExtendInFlight | None) -> None:
        """Give back the slots of states that will not be noted."""
        for state in () if extend is None else filter(None, extend.states):
            self._cache.drop_chunk(state)

    def _copy(self, request: Request) -> ChunkState | None:
        """A copy of the state at the end of the newest chunk of a request; None: there is no slot for it."""
        if not self._cache.make_slot():
            return None
        return self._cache.copy_chunk(request, self._live.features(request, request.num_run))
