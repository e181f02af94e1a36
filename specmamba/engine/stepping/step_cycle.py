"""The cycle of an engine: admit, run known tokens, launch a verify, read it, tell about it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Protocol

import torch

from specmamba.core import OutputDelta
from specmamba.cuda_graphs import HostRead
from specmamba.engine.cache_manager import CacheManager
from specmamba.engine.captured.step_chain import Arrivals, StepChain
from specmamba.engine.captured.step_in_flight import StepInFlight
from specmamba.engine.request import Request
from specmamba.engine.runner import Runner
from specmamba.engine.scheduler import Scheduler
from specmamba.engine.stepping.known_tokens import KnownTokens
from specmamba.engine.stepping.live_requests import NOT_FINITE, LiveRequests
from specmamba.engine.stepping.step_news import News, Reporter, StepNews, has_ended
from specmamba.errors import RequestError
from specmamba.verify.pools import Pools
from specmamba.verify.result import StepResult

DISPLACED = "the queue is full, and other clients have fewer requests in it: try again later"


class GrammarTurns(Protocol):
    """Says which requests take part in a verify, and which wait for their grammars; ranks of one model agree on it."""

    def ready(self, requests: Sequence[Request], is_idle: bool) -> list[Request]:
        """The requests that can be verified now, and those whose grammars have failed; as ``Constraints.ready``."""
        ...

    def agree_on_errors(self, batch: Sequence[Request]) -> None:
        """Let ranks agree which requests of a step cannot go on within their grammars."""
        ...


class StepCycle:
    """Advances all requests of an engine, one step at a time; it has what was launched and what was not told yet.

    Where the device works by itself (``Runner.overlaps``), a verify is launched by one call of ``step`` and read by the
    next, so that what the one before has decided is told while it runs; and where the host has nothing to do between
    the two (``StepChain``), it is launched before that one is read.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        cache_manager: CacheManager,
        pools: Pools,
        live: LiveRequests,
        turns: GrammarTurns,
        reporter: Reporter,
    ) -> None:
        self._runner, self._scheduler, self._cache, self._pools = runner, scheduler, cache_manager, pools
        self._live, self._turns, self._reporter = live, turns, reporter
        self.known_tokens = KnownTokens(runner, scheduler, cache_manager, live)
        self.chain = StepChain(runner, scheduler)
        self.in_flight: StepInFlight | None = None  # launched, and not read yet
        self.untold: list[OutputDelta] = []  # of a step that was read between two calls of ``step``
        self._dropped: HostRead | None = None  # of the newest step that was not read, as nothing of it was wanted
        self._finished = 0.0  # time at which the newest step was read
        self._error: Exception | None = None  # of a launch in front of deltas: the next call raises it

    @torch.inference_mode()
    def step(self) -> list[OutputDelta]:
        """Run at most one chunk of known tokens, then one verify of every request that is ready for it.

        Returns:
            A delta for every request that got tokens or ended.
        """
        if self._error is not None:
            raise self._error
        arrived: list[OutputDelta] = []
        if self._launch_behind(arrived):
            return arrived + self._tell(self._receive())
        deltas, self.untold = self.untold + arrived, []
        news, is_read_here = self._receive(), False
        if is_behind := bool(deltas or news):
            self._observe_rest(news)
        try:
            is_read_here = self._go_on(deltas, is_behind)
        except Exception as error:
            if not is_behind:
                raise
            self._error = error  # raised by the next call, behind what is known already
        if is_read_here:
            news = self._receive()
        deltas += self._tell(news)
        if is_read_here:
            self._observe_rest(news)
        return deltas

    @property
    def has_more(self) -> bool:
        """Whether something was launched or decided that ``step`` has not told yet."""
        return bool(self.untold) or self.in_flight is not None

    def settle(self) -> None:
        """Read the step in flight, if there is one; the next call of ``step`` tells about it.

        What makes room between two steps calls this before: states that a step is folding cannot move.
        """
        if self.in_flight is not None:
            with torch.inference_mode():
                self.untold += self._tell(self._receive())

    def abort(self, request_id: str) -> None:
        """Remove a request and free its memory; unknown and finished ids are ignored."""
        self._settle_for(request_id)
        self.untold = [delta for delta in self.untold if delta.request_id != request_id]
        self._live.drop(request_id)

    def preempt(self, request: Request) -> None:
        """Free all memory of a running request; its state goes to the prefix cache, and it waits again."""
        self._settle_for(request.request_id)
        if request.row is not None:  # None: it has ended
            self._live.preempt(request)

    def close(self) -> None:
        """Wait for what was launched, and drop all requests."""
        step, self.in_flight, self.untold = self.in_flight, None, []
        behind, ended = self.chain.take()
        launched = [each for each in (step, behind) if each is not None]
        for extend in (self.known_tokens.take(), *(each.extend for each in launched)):
            self.known_tokens.drop(extend)
        with suppress(Exception):  # of a device that has failed: all else is closed nevertheless
            for read in filter(None, (self._dropped, *(each.read for each in launched))):
                read.wait()  # the memory of its requests is freed
        self._live.free_held(dict.fromkeys(ended, False))
        for request_id in list(self._live.by_id):
            self.abort(request_id)

    # ---- what runs ---------------------------------------------------------------------------------------------------

    def _go_on(self, deltas: list[OutputDelta], is_behind: bool) -> bool:
        """Choose what runs now, run a chunk, and launch a verify.

        Args:
            deltas: gets the last deltas of requests that end here.
            is_behind: there is something to tell: a verify that is to be read at once is left to the next call, so that
                a request gets one delta at a time.

        Returns:
            Whether a verify was launched that is to be read at once.
        """
        deltas += [self._fail(request) for request in self.known_tokens.read()]
        while (request := self._scheduler.make_room()) is not None:  # before new requests take what running ones need
            self.preempt(request)
        deltas += self._displace()
        deltas += self._admit()
        if (yielding := self._scheduler.must_yield()) is not None:  # one a step: each costs a copy of a state
            self.preempt(yielding)
            deltas += self._admit()
        if not self._scheduler.num_running:
            handoffs = self._live.handoffs
            if self._scheduler.waiting and handoffs is not None and handoffs.make_room():
                deltas += self._admit()
            self._cache.wait_for_tiers()
        if runs := self._scheduler.next_runs():
            failed, ready = self.known_tokens.run(runs)
            deltas += [self._fail(request) for request in failed]
            deltas += self._start([request for request in ready if request.row is not None])
        overlaps = self._runner.overlaps(self._scheduler.verifying)
        if overlaps or not is_behind:
            deltas += self._launch(is_idle=not runs)
        return not (overlaps or is_behind)

    def _launch(self, is_idle: bool) -> list[OutputDelta]:
        """Launch a verify of the requests that are ready; returns the last deltas of those whose grammars fail."""
        ready = self._turns.ready(self._scheduler.verifying, is_idle)
        failed = [request for request in ready if request.grammar_error is not None]
        deltas = [self._fail(request) for request in failed]
        batch = sorted([r for r in ready if r not in failed] if failed else ready, key=attrgetter("row"))
        self.in_flight = self._runner.launch(batch) if batch else None
        self._turns.agree_on_errors(batch)
        return deltas

    def _launch_behind(self, deltas: list[OutputDelta]) -> bool:
        """Launch a verify behind the one in flight, before that is read; False: that must be read first.

        ``deltas`` gets the last deltas of requests that end here.
        """
        if self.in_flight is None or self._live.handoffs is not None:
            return False
        try:
            is_behind = self.chain.launch_behind(self.in_flight, lambda: self._arrive(deltas))
        except Exception as error:  # noqa: BLE001 -- raised by the next call, behind what is known then
            self._error = error
            return True
        if is_behind:
            self.known_tokens.take()  # it is read with that verify
        return is_behind

    def _arrive(self, deltas: list[OutputDelta]) -> Arrivals | None:
        """Admit requests and run a chunk behind the verify in flight, all of which the device does in order.

        Args:
            deltas: gets the last deltas of requests that end here.

        Returns:
            None, where a request is to be preempted first.
        """
        before = frozenset(self._scheduler.verifying)
        deltas += self._displace()
        deltas += self._admit()
        if self._scheduler.must_yield() is not None:
            return None
        if runs := self._scheduler.next_runs():
            deltas += self._start(self.known_tokens.launch(runs))
        return Arrivals([r for r in self._scheduler.verifying if r not in before], self.known_tokens.unread)

    def _displace(self) -> list[OutputDelta]:
        """Return the last deltas of requests that leave a full queue for other clients' ones."""
        return [self._fail(request, DISPLACED, "queue_full") for request in self._scheduler.take_surplus()]

    def _admit(self) -> list[OutputDelta]:
        """Admit waiting requests; returns the last deltas of those that end here."""
        deltas = []
        for request in self._scheduler.admit():
            self._runner.admit(request)
            if self._live.handoffs is not None:
                self._live.handoffs.was_admitted(request)
            if request.follower is not None:
                request.follower.start()
            if not request.num_to_extend:
                deltas += self._start([request])
        return deltas

    def _start(self, requests: Iterable[Request]) -> list[OutputDelta]:
        """Start verifying requests whose known tokens have been run; returns the last deltas of those that end here."""
        deltas = []
        for request in requests:
            if request.is_only_run:
                if self._live.handoffs is not None and request.handoff is not None:
                    self._live.leave([request])  # the state that it has may be the only one
                    self._live.handoffs.leave(request)
                deltas.append(request.delta((), "", "length"))
                self.abort(request.request_id)
            else:
                self._runner.start_verifying(request)
        return deltas

    # ---- what it has decided -----------------------------------------------------------------------------------------

    def _receive(self) -> list[News]:
        """Wait for the oldest step in flight, if there is one, and do what the next one needs; returns the news.

        Requests that it ends are freed here, or, where they take part in the step behind it, when that is read.
        """
        step, self.in_flight = self.in_flight, None
        if step is None:
            return []
        gone, out = self.chain.gone, self.chain.gone.union(self.chain.ended)
        results = self._runner.finish(step, gone, self.chain.ended)
        self._finished = time.perf_counter()
        behind, ended = self.chain.take()
        self._live.free_held(ended)
        failed = [] if step.extend is None else self.known_tokens.note(step.extend, step.read.wait()[-1])
        going_on = [(r, result) for r, result in zip(step.requests, results, strict=True) if r not in out]
        if behind is not None:
            self.chain.gone = frozenset(r for r, result in going_on if r.text.ends_on_device(result.tokens))
        news = [self._live.failure(r) if r in failed else self._advance(r, result) for r, result in going_on]
        if self._pools.counts.is_used:
            told = [each for each in news if isinstance(each, StepNews)]
            self._pools.counts.add([each.request.held_row for each in told], [each.tokens for each in told])
        leaving = {
            r: isinstance(each, StepNews) for (r, _), each in zip(going_on, news, strict=True) if has_ended(each)
        }
        for request in failed:
            if request not in leaving:  # it still extends, or joins the step behind
                leaving[request] = False
                news.append(self._live.failure(request))
        self._part_with(leaving, behind)
        return news

    def _advance(self, request: Request, result: StepResult) -> News:
        """Append the new tokens of a step to a request; the news say whether they end it."""
        if not result.is_finite or request.grammar_error is not None:
            return self._live.failure(request)
        is_first = not request.output
        try:
            count, text, reason = request.text.decide(result.tokens)
        except RequestError as error:  # the tokenizer fails
            return self._live.failure(request, str(error))
        if request.follower is not None and reason is None:
            request.follower.advance(result.tokens)
        request.output.extend(result.tokens[:count])
        previous, request.num_run = request.num_run, request.root_position
        for position in self._cache.tracked_positions(request, previous):
            if self._cache.make_slot():
                self._cache.leave_at(request, position, self._live.features(request, position))
        return StepNews(request, result, count, text, reason, is_first)

    def _part_with(self, leaving: Mapping[Request, bool], behind: StepInFlight | None) -> None:
        """End requests, and go on with the step behind, if there is one: those that it has rows of are held until then.

        ``leaving``: whether each leaves what it has computed in the prefix cache.
        """
        in_behind = frozenset[Request]() if behind is None else frozenset(behind.requests) - self.chain.gone
        if ending := [request for request in leaving if request not in in_behind]:
            self._live.leave([request for request in ending if leaving[request]])
        for request in ending:
            self.abort(request.request_id)
        if behind is None:
            return
        for request in leaving:
            if request in in_behind:
                self._live.hold(request)
                self.chain.hold(request, leaving[request])
        self._runner.expect(behind, self.chain.gone)
        if self.chain.is_wanted(behind):
            self.in_flight = behind
        else:
            self._drop(behind)

    def _drop(self, step: StepInFlight) -> None:
        """Leave a step in flight to the device, and free what the last of its requests hold: all have ended before it.

        It is not read. What uses their memory next is done behind it.
        """
        self._dropped, ended = step.read, self.chain.take_ended()
        self._runner.forgo(ended)
        self._live.free_held(ended)

    def _tell(self, news: Sequence[News]) -> list[OutputDelta]:
        """Make deltas of what a step has brought."""
        deltas, undecoded = self._reporter.deltas(news)
        return deltas + [self._fail(request, reason) for request, reason in undecoded]

    def _observe_rest(self, news: Sequence[News]) -> None:
        """Let the sizer know how long the host has worked on a step since it was read."""
        sizer = self._runner.sizer
        if sizer is not None and sizer.times_rest and news:
            sizer.observe_rest(time.perf_counter() - self._finished)

    def _settle_for(self, request_id: str) -> None:
        """Read the step in flight, if a request is part of it."""
        if self.in_flight is not None and self.in_flight.has(request_id):
            self.settle()

    def _fail(self, request: Request, message: str = NOT_FINITE, code: str | None = None) -> OutputDelta:
        """End a request that cannot continue; the others continue."""
        delta = self._live.failure(request, message, code)
        self.abort(request.request_id)
        return delta
