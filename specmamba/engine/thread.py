"""The engine in a thread of its own: requests go in through a queue, their deltas come out through callbacks."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from specmamba.core import FinishReason, OutputDelta
from specmamba.engine.channels import CommandQueue, EngineConstants, EngineRequest, LoopWaker, OpenRequest
from specmamba.errors import EngineFailedError, EngineStoppedError, RankLostError, SpecmambaError

if TYPE_CHECKING:
    from specmamba.engine.base_engine import BaseEngine

__all__ = ["EngineConstants", "EngineRequest", "EngineThread"]

logger = logging.getLogger("specmamba")

SIGNAL_INTERVAL_S = 0.2  # of waits for an engine that loads
LOST_GRACE_S = 3.0  # in which a step ends by itself when a process is lost that it waits for
T = TypeVar("T")


class EngineThread:
    """Runs an engine until it is drained or fails; every public method may be called from any thread.

    The engine is built, used and closed in this thread only, unless the builder hands one over that was built before.
    Even if it fails, every accepted request gets a delta with a ``finish_reason`` (unless its caller aborts it), and
    every future is resolved.
    """

    def __init__(
        self, build_engine: Callable[[], BaseEngine], wake_interval_s: float = 0.0, what: str = "the server"
    ) -> None:
        """Prepare the thread without starting it.

        Args:
            build_engine: called in the thread; gives an engine that no other thread uses while requests run.
            wake_interval_s: longest time that a function which is not urgent waits for its event loop (``LoopWaker``).
            what: what ends with this thread, for messages.
        """
        self._build_engine = build_engine
        self._wake_interval_s = wake_interval_s
        self._what = what
        self._loaded: Future[EngineConstants] = Future()
        self._commands = CommandQueue(self._refusal)
        self._open: dict[str, OpenRequest] = {}  # used in the engine thread only, and by ``give_up``
        self._backlog: deque[str] = deque()  # of these, the ones that wait for room in the engine's queue
        self._wakers: dict[asyncio.AbstractEventLoop, LoopWaker] = {}  # the same
        self._lock = threading.Lock()  # guards the fields below
        self._draining = False
        self._deadline = float("inf")
        self._has_stopped = False
        self._stop_callbacks: list[Callable[[], None]] = []
        self._failed: BaseException | None = None
        # A daemon, so that a step that never returns cannot keep the process from exiting.
        self._thread = threading.Thread(target=self._run, name="specmamba-engine", daemon=True)

    # ---- for other threads -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread and wait until the engine is built. Raises the exception of a build that fails."""
        self._thread.start()
        # Handlers of signals run between waits: one that arrives right before a wait does not interrupt it.
        while not self._loaded.done():
            wait([self._loaded], SIGNAL_INTERVAL_S)
        self._loaded.result()

    @property
    def constants(self) -> EngineConstants:
        """Facts about the engine; available once ``start`` has returned."""
        return self._loaded.result(timeout=0)

    @property
    def failed(self) -> BaseException | None:
        """The exception that ended the engine, or None."""
        return self._failed

    @property
    def has_stopped(self) -> bool:
        """Whether the engine was drained or has failed, so that nothing more will run."""
        return not self._commands.is_open

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this thread, where waiting for it would never end."""
        return threading.current_thread() is self._thread

    @property
    def is_accepting(self) -> bool:
        return self._commands.is_open and not self._draining and self._failed is None

    def submit(self, requests: Sequence[EngineRequest], may_wait: bool = False) -> Future[None]:
        """Add requests, all or none of them. The future raises what ``BaseEngine.add_request`` raises.

        Args:
            requests: what to add; their ids are unique.
            may_wait: requests that the engine's queue has no room for wait in front of it, instead of being refused;
                one that the engine then refuses ends with an error delta.

        Raises:
            EngineStoppedError: draining, stopped or failed (also through the future).
        """
        if not self.is_accepting:
            raise self._refusal()
        return self.call(lambda engine: self._queue(requests) if may_wait else self._add(engine, requests))

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests and free their memory. Their callbacks are not called any more once the thread has done this."""
        ids = tuple(request_ids)
        with suppress(EngineStoppedError):  # then no request runs any more
            self._commands.put(lambda engine: self._abort(engine, ids), must_succeed=True)

    def call(self, function: Callable[[Any], T]) -> Future[T]:
        """Call a function with the engine, in its thread, between two steps, for example to read statistics.

        Raises:
            EngineStoppedError: the thread has ended (also through the future).
        """
        return self._commands.put(function)

    def call_in_loop(self, loop: asyncio.AbstractEventLoop, function: Callable[[], object], at_once: bool) -> None:
        """Call a function on an event loop after all deltas of this step; for use in ``on_delta`` callbacks only.

        Args:
            loop: the event loop.
            function: takes no arguments.
            at_once: wake the loop when this step ends; else the function may wait for ``wake_interval_s``.
        """
        if loop not in self._wakers:
            self._wakers[loop] = LoopWaker(loop, self._wake_interval_s)
        self._wakers[loop].add(function, at_once)

    def drain(self, deadline_s: float) -> None:
        """Refuse new requests, and end when the running ones have finished or at the deadline. Does not wait.

        A second call can only make the deadline earlier.
        """
        with self._lock:
            self._draining = True
            self._deadline = min(self._deadline, time.monotonic() + deadline_s)
        self._wake()

    def shutdown(self, deadline_s: float, grace_s: float = 10.0) -> bool:
        """Drain and wait for the end. Returns False if a step is still running ``grace_s`` after the deadline."""
        self.drain(deadline_s)
        if self.is_current:
            return False
        self._thread.join(deadline_s + grace_s)
        return not self._thread.is_alive()

    def give_up(self, error: BaseException | None = None) -> None:
        """Fail from outside the thread, for a step that hangs, so that no client waits forever.

        ``error``: why it hangs, if that is known.
        """
        if self._commands.is_open:
            self._fail(error or TimeoutError("a step does not end"))
            for callback in self._end_requests():
                self._attempt(callback)

    def on_stop(self, callback: Callable[[], None]) -> None:
        """Call a function when the thread ends, drained or failed; at once if it has ended already."""
        with self._lock:
            if not self._has_stopped:
                self._stop_callbacks.append(callback)
                return
        callback()

    def _wake(self) -> None:
        """Let an idle engine look what is due."""
        with suppress(EngineStoppedError):
            self.call(lambda _: None)

    def _refusal(self) -> EngineStoppedError:
        if self._failed is not None:
            return EngineStoppedError("the engine has failed and takes no more requests")
        return EngineStoppedError(f"{self._what} is shutting down and takes no more requests")

    # ---- on the engine thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            engine = self._build_engine()
            engine.when_lost(self._fail_soon)
            engine.when_due(self._wake)
            self._commands.on_put = engine.wake
            constants = EngineConstants(
                engine.tokenizer,
                engine.context_length,
                engine.vocab_size,
                engine.eos_token_ids,
                engine.describe(),
            )
        except BaseException as error:  # noqa: BLE001 -- start() raises it
            self._failed = error
            self._commands.close()
            self._loaded.set_exception(error)
            return
        self._loaded.set_result(constants)
        try:
            self._step_until_drained(engine)
        except BaseException as error:  # noqa: BLE001 -- clients wait for answers after any exception
            self._fail(error)
        self._end(engine)

    def _fail_soon(self, error: Exception) -> None:
        """Fail between two steps, also where no request runs; for a thread that sees that the engine cannot go on.

        A step that does not end, as a GPU may wait for a lost process without limit, is given up.
        """

        def fail(_: BaseEngine) -> None:
            raise error

        with suppress(EngineStoppedError):
            self._commands.put(fail, must_succeed=True)
            timer = threading.Timer(LOST_GRACE_S, self.give_up, (error,))
            timer.daemon = True
            timer.start()

    def _fail(self, error: BaseException) -> None:
        if self._failed is None:
            logger.critical("the engine failed", exc_info=error)
            self._failed = error

    def _step_until_drained(self, engine: BaseEngine) -> None:
        while self._failed is None:
            is_idle = not self._open and not self._draining
            self._commands.run(engine, is_idle, engine.idle() if is_idle else None)
            if self._draining and (not self._open or time.monotonic() >= self._deadline):
                return
            self._fill(engine)
            if self._open and engine.has_unfinished_requests:  # what tools add directly they step themselves
                self._deliver(engine, engine.step())
            if self._open and not (engine.has_unfinished_requests or self._backlog):
                # no further delta would come, and these clients would wait forever
                raise RuntimeError(f"the engine lost track of {', '.join(self._open)}")

    def _add(self, engine: BaseEngine, requests: Sequence[EngineRequest]) -> None:
        if self._draining:
            raise self._refusal()
        added = []
        try:
            for request in requests:
                _add_to(engine, request)
                added.append(request.request_id)
        except BaseException:
            for request_id in added:  # not the one that failed: its id may belong to a running request
                engine.abort(request_id)
            raise
        self._open.update((request.request_id, OpenRequest.just_added(request)) for request in requests)

    def _queue(self, requests: Sequence[EngineRequest]) -> None:
        if self._draining:
            raise self._refusal()
        self._open.update((request.request_id, OpenRequest.just_added(request)) for request in requests)
        self._backlog.extend(request.request_id for request in requests)

    def _fill(self, engine: BaseEngine) -> None:
        """Add what waits in front of the engine's queue, as far as there is room."""
        while self._backlog and engine.has_room:
            if (entry := self._open.get(self._backlog.popleft())) is None:
                continue  # it was aborted
            try:
                _add_to(engine, entry.request)
            except RankLostError:
                raise  # nothing can be computed any more
            except Exception as error:  # what is wrong with one request must not end the others
                if not isinstance(error, SpecmambaError):
                    logger.exception("the request %s could not be added", entry.request.request_id)
                engine.abort(entry.request.request_id)
                message = str(error) if isinstance(error, SpecmambaError) else _one_line(error)
                self._deliver(engine, [entry.last_delta("error", message)])

    def _abort(self, engine: BaseEngine, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._open.pop(request_id, None)
            engine.abort(request_id)

    def _deliver(self, engine: BaseEngine, deltas: Iterable[OutputDelta]) -> None:
        for delta in deltas:
            entry = self._open.get(delta.request_id)
            if entry is None:
                continue  # it was aborted during this step
            entry.latest = delta
            try:
                entry.request.on_delta(delta)
            except Exception:  # the client is gone; the other requests continue
                logger.debug(
                    "the callback of %s raised an exception: the request is aborted", delta.request_id, exc_info=True
                )
                self._abort(engine, [delta.request_id])
            # Not before the callback: if the thread dies in it, the request still gets its last delta.
            if delta.finish_reason is not None:
                self._open.pop(delta.request_id, None)
        self._wake_loops()

    def _wake_loops(self) -> None:
        for loop, waker in list(self._wakers.items()):
            try:
                waker.end_step()
                is_closed = loop.is_closed()
            except RuntimeError:
                is_closed = True
            if is_closed:  # no client waits there
                self._wakers.pop(loop, None)

    def _end(self, engine: BaseEngine) -> None:
        """End all requests, then close the engine. An exception in one part does not stop the others."""
        if self._failed is None:
            for request_id in list(self._open):
                self._attempt(partial(engine.abort, request_id))
        callbacks = self._end_requests()
        self._attempt(engine.close)
        for callback in callbacks:
            self._attempt(callback)

    def _end_requests(self) -> list[Callable[[], None]]:
        """Send every open request its last delta and refuse all queued calls; return the callbacks of ``on_stop``."""
        failed = self._failed
        reason: FinishReason = "abort" if failed is None else "error"
        message = f"{self._what} is shutting down" if failed is None else f"the engine failed: {_one_line(failed)}"
        for request_id in list(self._open):
            if (entry := self._open.pop(request_id, None)) is None:  # ``give_up`` runs in another thread
                continue
            try:
                entry.request.on_delta(entry.last_delta(reason, message))
            except BaseException:  # the other requests still need their last delta
                logger.debug("the callback of %s raised an exception at the end", request_id, exc_info=True)
        self._wake_loops()
        self._commands.close(None if failed is None else partial(EngineFailedError, message))
        with self._lock:
            self._has_stopped = True
            callbacks, self._stop_callbacks = self._stop_callbacks, []
        return callbacks

    def _attempt(self, function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 -- the following parts must run in any case
            self._fail(error)


def _add_to(engine: BaseEngine, request: EngineRequest) -> None:
    engine.add_request(
        request.request_id,
        request.prompt_token_ids,
        request.params,
        request.forced_output_ids,
        predicted_ids=request.predicted_ids,
        extra_key=request.extra_key,
        grammar=request.grammar,
        owner=request.owner,
    )
    if request.handoff is not None:
        engine.hand_over(request.request_id, request.handoff)


def _one_line(error: BaseException) -> str:
    """Format an exception with the first line of its message; those of CUDA have pages."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
