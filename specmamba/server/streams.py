"""The way from the engine thread to a coroutine of the event loop, and from there to the client."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specmamba.core import OutputDelta, SamplingParams
from specmamba.engine.thread import EngineRequest, EngineThread
from specmamba.errors import EngineStoppedError
from specmamba.server.deadlines import CallLimits, Deadline
from specmamba.server.errors import SERVER, ApiError, as_api_error
from specmamba.server.observers import AbortReason, CallContext, ObserverFactory, RequestObserver

if TYPE_CHECKING:
    from specmamba.grammar import CompiledGrammar

__all__ = ["Ask", "Call", "CallLimits", "EventStream", "client_gone", "merge", "until_client_gone"]

logger = logging.getLogger("specmamba")

T = TypeVar("T")

_BETWEEN_EVENTS = "\n\ndata: "
_MOST_PENDING = 64  # deltas of a choice that are kept one by one: merging each with all before it would take longer


@dataclass(frozen=True, slots=True)
class Ask:
    """What a call asks the engine for: one choice of its answer."""

    prompt: Sequence[int]
    params: SamplingParams
    grammar: CompiledGrammar | None = None


def merge(*deltas: OutputDelta | None) -> OutputDelta:
    """Deltas of one request, in their order, as if the engine had given them at once. None stands for nothing."""
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

    Deltas that nobody has read yet are merged, so a slow reader costs no more than the text of its own answer. An
    answer that is wanted whole wakes the event loop when it begins and when it ends, one in pieces also in between, at
    most as often as the engine thread lets it (``--stream-chunk-interval``).
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
        context: CallContext,
        asks: Sequence[Ask],
        extra_key: str | None = None,
        limits: CallLimits | None = None,
        whole: bool = False,
    ) -> Call:
        """Hand prompts to the engine, all or none. They share cached prefixes with calls of the same ``extra_key``.

        With ``whole`` nothing is given before a choice has ended, but for news that the call has begun.

        Raises:
            RequestError, QueueFullError, EngineStoppedError: as ``EngineThread.submit``.
            ApiError: a step of the engine did not end in time.
        """
        call = cls(engine, context.call_id, len(asks), limits, time.perf_counter() - context.arrived_at, whole)
        call._observers = [[observe(context, index) for observe in observers] for index in range(len(asks))]
        requests = [
            EngineRequest(call._ids[index], ask.prompt, ask.params, call._listener(index), extra_key, ask.grammar)
            for index, ask in enumerate(asks)
        ]
        try:
            await call._until_taken(asyncio.wrap_future(engine.submit(requests)))
        except BaseException:
            call._deadline.cancel()
            engine.abort(call._ids)  # when this coroutine is cancelled the engine may have taken them all the same
            raise
        return call

    async def _until_taken(self, taken: asyncio.Future[None]) -> None:
        """Wait for the engine thread, which takes requests between two steps."""
        try:
            async with asyncio.timeout_at(self._deadline.at):
                await taken
        except TimeoutError:
            raise self._deadline.error() from None

    def abort(self, reason: AbortReason = "disconnect") -> None:
        """Give up the choices that have not ended. Harmless when all have, and when called again."""
        left = [index for index in range(len(self._ids)) if index not in self.last_deltas]
        self._deadline.cancel()
        if left and not self._is_aborted:
            self._is_aborted = True
            self._engine.abort([self._ids[index] for index in left])
            for observer in (observer for index in left for observer in self._observers[index]):
                observer.record_abort(reason)

    async def __aiter__(self) -> AsyncIterator[list[tuple[int, OutputDelta]]]:
        """What is new with the index of its choice, all at once, until every choice has ended.

        Raises:
            EngineStoppedError: the engine gave a choice up because the server stops.
            ApiError: the engine failed, or time ran out; then the engine has been told to stop already.
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
            if sound := [entry for entry in news if not _is_broken(entry[1])]:
                yield sound
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
                except Exception:  # who looks on must not cost the client its answer
                    logger.exception("an observer of requests failed")
            is_last = delta.finish_reason is not None
            with self._lock:
                pending = self._pending.setdefault(index, [])
                pending.append(delta)
                if len(pending) == _MOST_PENDING:
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
    if delta.finish_reason == "error" and delta.error_code is not None:
        raise ApiError(400, delta.error or "the request cannot go on", code=delta.error_code)
    if delta.finish_reason == "error":
        raise ApiError(500, delta.error or "the engine failed", kind=SERVER, code="engine_error")


async def client_gone(receive: Receive) -> None:
    """Return when the client has hung up (its request must have been read)."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_client_gone(receive: Receive, work: asyncio.Task[T]) -> T | None:
    """The result of ``work``, or None when the client hung up first; then the work is cancelled."""
    watcher = asyncio.create_task(client_gone(receive))
    try:
        await asyncio.wait({work, watcher}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        work.cancel()
        watcher.cancel()
        await asyncio.gather(work, watcher, return_exceptions=True)


class EventStream(Response):
    """Server-sent events as an iterator makes them, those of a list at once; then ``[DONE]``.

    ``on_close`` runs however the response ends, begun or not.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[Sequence[str]], on_close: Callable[[], None]) -> None:
        # Nothing on the way may hold events back to compress or to collect them.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["Content-Length"]
        self._events = events
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_client_gone(receive, asyncio.create_task(self._send_all(send)))
        finally:
            self._on_close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for events in self._guarded():
            body = f"data: {_BETWEEN_EVENTS.join(events)}\n\n".encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def _guarded(self) -> AsyncIterator[Sequence[str]]:
        """The events; an error becomes the last of them, since the status has been sent already."""
        try:
            async for events in self._events:
                yield events
        except Exception as error:  # noqa: BLE001 -- what it is, as_api_error decides
            yield [as_api_error(error).body()]
