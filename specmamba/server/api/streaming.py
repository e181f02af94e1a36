"""From the engine thread to the event loop: the engine requests of one HTTP call."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from specmamba.core import ANYONE, Handoff, OutputDelta, Owner
from specmamba.engine.thread import EngineRequest, EngineThread
from specmamba.errors import EngineStoppedError
from specmamba.sampling_params import SamplingParams
from specmamba.server.http.error_answers import SERVER, ApiError, queue_full
from specmamba.server.http.limits import CallLimits, Deadline
from specmamba.server.observe.call_record import AbortReason, CallRecord, ObserverFactory, RequestObserver

if TYPE_CHECKING:
    from specmamba.grammar import CompiledGrammar

logger = logging.getLogger("specmamba")

T = TypeVar("T")

# Characters or tokens. Less work than the first is done faster than it is handed to a thread.
INLINE_SIZE, _LARGE = 1000, 65_536
# Large texts and answers take tens of bytes of memory for each character, and the interpreter's lock from the engine.
# So only two are worked on at a time.
_FOR_LARGE = ThreadPoolExecutor(max_workers=2, thread_name_prefix="large-texts")
_MAX_PENDING = 64  # deltas of a choice that are kept one by one: merging each with all before it would take longer


async def off_loop(size: int, function: Callable[..., T], *args: object, encodes: bool = False) -> T:
    """Call a function on ``size`` characters or tokens: directly when there is little to do, else on a thread.

    Large texts that the function ``encodes``, or writes, share two threads; other work does not wait for them.
    """
    if size <= INLINE_SIZE:
        return function(*args)
    pool = _FOR_LARGE if encodes and size > _LARGE else None
    return await asyncio.get_running_loop().run_in_executor(pool, function, *args)


@dataclass(frozen=True, slots=True)
class ChoiceRequest:
    """One choice to generate. ``Call`` makes an ``EngineRequest`` of it."""

    prompt: Sequence[int]
    params: SamplingParams
    grammar: CompiledGrammar | None = None  # of ``params.grammar``
    predicted: Sequence[int] = ()  # expected output, to draft from
    handoff: Handoff | None = None


def merge(*deltas: OutputDelta | None) -> OutputDelta:
    """One delta for several of one request, given in order. None is skipped."""
    given = [delta for delta in deltas if delta is not None]
    if len(given) == 1:
        return given[0]
    return replace(
        given[-1],
        token_ids=tuple(chain.from_iterable(delta.token_ids for delta in given)),
        text="".join(delta.text for delta in given),
        depths=tuple(chain.from_iterable(delta.depths for delta in given)),
        logprobs=tuple(chain.from_iterable(delta.logprobs for delta in given)),
        prompt_logprobs=next((delta.prompt_logprobs for delta in given if delta.prompt_logprobs), None),
    )


class Call:
    """The engine requests of one HTTP call, one per choice.

    Deltas that have not been read yet are merged, so that a slow reader costs no more memory than the text of its
    answer. The event loop is woken when the call begins and when a choice ends; for an answer in pieces also in
    between, at most as often as the engine thread allows it (``--stream-chunk-interval``).
    """

    def __init__(
        self,
        engine: EngineThread,
        call_id: str,
        num_choices: int,
        limits: CallLimits | None = None,
        waited_s: float = 0,
        whole: bool = False,
    ) -> None:
        self._engine = engine
        self._whole = whole
        self._ids = [f"{call_id}-{index}" for index in range(num_choices)]
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()  # guards the two fields below
        self._pending: dict[int, list[OutputDelta]] = {}
        self._waking = False
        self._arrived = asyncio.Event()
        self._observers: list[list[RequestObserver]] = []
        self._is_aborted = False
        self._deadline = Deadline(limits or CallLimits(), waited_s, self._arrived.set)
        self.last_deltas: dict[int, OutputDelta] = {}  # of the choices that have ended

    @classmethod
    async def start(
        cls,
        engine: EngineThread,
        observers: Sequence[ObserverFactory],
        record: CallRecord,
        requests: Sequence[ChoiceRequest],
        *,
        extra_key: str | None = None,
        owner: Owner = ANYONE,
        limits: CallLimits | None = None,
        whole: bool = False,
    ) -> Call:
        """Submit the requests of a call to the engine, all or none.

        Args:
            engine: the engine thread.
            observers: each makes one observer per choice.
            record: of the call, with its ``call_id`` set.
            requests: one per choice.
            extra_key: cached prefixes are shared with calls of the same key and tenant only.
            owner: the client.
            limits: how long the call may take.
            whole: only complete choices are wanted, so that the loop is not woken for each delta.

        Raises:
            RequestError, QueueFullError, EngineStoppedError: as ``EngineThread.submit``.
            ApiError: a step of the engine did not end in time.
        """
        assert record.call_id is not None
        call = cls(engine, record.call_id, len(requests), limits, time.perf_counter() - record.arrived_at, whole)
        call._observers = [[observe(record, index) for observe in observers] for index in range(len(requests))]
        engine_requests = [
            EngineRequest(
                call._ids[index],
                own.prompt,
                own.params,
                call._listener(index),
                extra_key,
                own.grammar,
                owner,
                predicted_ids=own.predicted,
                handoff=own.handoff,
            )
            for index, own in enumerate(requests)
        ]
        try:
            await call._until_submitted(asyncio.wrap_future(engine.submit(engine_requests)))
        except BaseException:
            call._deadline.cancel()
            engine.abort(call._ids)  # a cancelled coroutine does not know whether the engine has taken them
            raise
        return call

    async def _until_submitted(self, submitted: asyncio.Future[None]) -> None:
        """Wait for the engine thread, which takes requests between two steps."""
        try:
            async with asyncio.timeout_at(self._deadline.at):
                await submitted
        except TimeoutError:
            raise self._deadline.error() from None

    def abort(self, reason: AbortReason = "disconnect") -> None:
        """Abort the choices that have not ended. Does nothing when all have, or when called again."""
        left = [index for index in range(len(self._ids)) if index not in self.last_deltas]
        self._deadline.cancel()
        if left and not self._is_aborted:
            self._is_aborted = True
            self._engine.abort([self._ids[index] for index in left])
            for observer in (observer for index in left for observer in self._observers[index]):
                observer.record_abort(reason)

    async def __aiter__(self) -> AsyncIterator[list[tuple[int, OutputDelta]]]:
        """New deltas with the indices of their choices, in lists of all that are ready, until every choice has ended.

        Raises:
            EngineStoppedError: the engine aborted a choice because the server stops.
            ApiError: the engine failed, or a deadline passed; then the choices have been aborted already.
        """
        while len(self.last_deltas) < len(self._ids):
            await self._arrived.wait()
            self._arrived.clear()
            with self._lock:
                pending, self._pending = self._pending, {}
                self._waking = False
            news = [(index, found[0] if len(found) == 1 else merge(*found)) for index, found in pending.items()]
            self.last_deltas.update((index, delta) for index, delta in news if delta.finish_reason is not None)
            if news:
                self._deadline.note_begin()
            if good := [entry for entry in news if not _is_broken(entry[1])]:
                yield good
            for _, delta in news:
                _raise_if_broken(delta)
            if self._deadline.is_past and len(self.last_deltas) < len(self._ids):
                self.abort(self._deadline.reason)
                raise self._deadline.error()
        self._deadline.cancel()

    async def collect(self) -> list[OutputDelta]:
        """Wait for the end: one delta per choice, with all of its text. Raises as the iteration does."""
        parts: dict[int, list[OutputDelta]] = {}
        async for news in self:
            for index, delta in news:
                parts.setdefault(index, []).append(delta)
        return [merge(*parts[index]) for index in range(len(self._ids))]

    def _listener(self, index: int) -> Callable[[OutputDelta], None]:
        records = [observer.record for observer in self._observers[index]]
        is_first = True

        def take(delta: OutputDelta) -> None:  # on the engine thread
            nonlocal is_first
            for record in records:
                try:
                    record(delta)
                except Exception:  # an observer that fails must not cost the client its answer
                    logger.exception("an observer of requests failed")
            is_last = delta.finish_reason is not None
            with self._lock:
                pending = self._pending.setdefault(index, [])
                pending.append(delta)
                if len(pending) == _MAX_PENDING:
                    pending[:] = [merge(*pending)]
                must_wake = (is_first or not self._whole) and not self._waking
                self._waking |= must_wake
            # The last delta wakes in any case: the thread may have died between taking the lock and waking.
            if must_wake or is_last:
                self._engine.call_in_loop(self._loop, self._arrived.set, at_once=is_first or is_last)
            is_first = False

        return take


def _is_broken(delta: OutputDelta) -> bool:
    return delta.finish_reason in ("abort", "error")


def _raise_if_broken(delta: OutputDelta) -> None:
    if delta.finish_reason == "abort":
        raise EngineStoppedError(f"the answer was cut off: {delta.error or 'the engine gave it up'}")
    if delta.error_code == "queue_full":
        raise queue_full(delta.error or "the queue is full")
    if delta.finish_reason == "error" and delta.error_code is not None:
        raise ApiError(400, delta.error or "the request cannot go on", code=delta.error_code)
    if delta.finish_reason == "error":
        raise ApiError(500, delta.error or "the engine failed", kind=SERVER, code="engine_error")


async def client_gone(receive: Receive) -> None:
    """Return when the client has disconnected. The body of its request must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_client_gone(receive: Receive, work: asyncio.Task[T]) -> T | None:
    """The result of ``work``, or None when the client disconnects first; then the work is cancelled."""
    watcher = asyncio.create_task(client_gone(receive))
    try:
        await asyncio.wait({work, watcher}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        work.cancel()
        watcher.cancel()
        await asyncio.gather(work, watcher, return_exceptions=True)


async def unless_client_gone(request: Request, work: Coroutine[Any, Any, T], what: str) -> T:
    """The result of work for a client, which ends when the client disconnects.

    Raises:
        ApiError: 499; the client disconnected before ``what``, a part of the message.
    """
    result = await until_client_gone(request.receive, asyncio.create_task(work))
    if result is None:
        raise ApiError(499, f"the client hung up before {what}", code="client_gone")
    return result
