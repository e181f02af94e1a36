"""The engine on a thread of its own: requests go in through a queue, their deltas come out through callbacks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from specmamba.core import FinishReason, OutputDelta, SamplingParams
from specmamba.errors import EngineStoppedError

if TYPE_CHECKING:
    from specmamba.engine.engine import Engine
    from specmamba.grammar import CompiledGrammar
    from specmamba.models.tokenizer import Tokenizer

logger = logging.getLogger("specmamba")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt for the engine. ``on_delta`` is called on the engine thread, so it must be quick and never block."""

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    on_delta: Callable[[OutputDelta], None]
    extra_key: str | None = None  # cached prefixes are shared with requests of the same key only
    grammar: CompiledGrammar | None = None  # of ``params.grammar``


@dataclass(slots=True)
class _OpenRequest:
    """A request that still owes its caller a last delta."""

    request: EngineRequest
    latest: OutputDelta

    @classmethod
    def just_added(cls, request: EngineRequest) -> _OpenRequest:
        return cls(request, OutputDelta(request.request_id, (), "", len(request.prompt_token_ids), 0, 0))

    def last_delta(self, finish_reason: FinishReason, error: str) -> OutputDelta:
        return replace(self.latest, token_ids=(), text="", finish_reason=finish_reason, error=error)


@dataclass(frozen=True, slots=True)
class _Command:
    """Something to do between two steps. ``must_succeed``: an exception means that the engine cannot go on."""

    function: Callable[[Engine], Any]
    future: Future[Any]
    must_succeed: bool = False


@dataclass(frozen=True, slots=True)
class EngineConstants:
    """What does not change while an engine lives, and so may be read from any thread."""

    tokenizer: Tokenizer
    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    description: dict[str, object]


class EngineThread:
    """Runs an engine until it is drained or fails; every method may be called from any thread.

    The engine is built, used and closed on this thread alone. Whatever happens to it, every request that was taken
    gets a delta with a ``finish_reason`` (unless it is aborted by its caller) and every future is resolved.
    """

    def __init__(self, build_engine: Callable[[], Engine]) -> None:
        self._build_engine = build_engine
        self._loaded: Future[EngineConstants] = Future()
        self._commands: SimpleQueue[_Command] = SimpleQueue()
        self._open: dict[str, _OpenRequest] = {}  # only touched on the engine thread
        self._lock = threading.Lock()  # guards the fields below
        self._taking_commands = True
        self._draining = False
        self._deadline = float("inf")
        self._stop_callbacks: list[Callable[[], None]] = []
        self._failed: BaseException | None = None
        # A daemon, so that a step that never returns cannot keep the process from exiting.
        self._thread = threading.Thread(target=self._run, name="specmamba-engine", daemon=True)

    # ---- for other threads -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Load the engine and start stepping. Raises whatever building the engine raises."""
        self._thread.start()
        self._loaded.result()

    @property
    def constants(self) -> EngineConstants:
        """Known once ``start`` has returned."""
        return self._loaded.result(timeout=0)

    @property
    def failed(self) -> BaseException | None:
        """The exception that ended the engine, or None."""
        return self._failed

    @property
    def has_stopped(self) -> bool:
        """Whether the thread has ended, drained or failed."""
        return not self._taking_commands

    @property
    def is_accepting(self) -> bool:
        return self._taking_commands and not self._draining and self._failed is None

    def submit(self, requests: Sequence[EngineRequest]) -> Future[None]:
        """Add requests, all or none of them. The future raises what ``Engine.add_request`` raises.

        Raises:
            EngineStoppedError: draining, stopped or failed (also through the future).
        """
        if not self.is_accepting:
            raise self._refusal()
        return self.call(lambda engine: self._add(engine, requests))

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget requests and free what they hold. Their callbacks are not called again once this has taken effect."""
        ids = tuple(request_ids)
        with suppress(EngineStoppedError):  # then nothing runs any more
            self._put(_Command(lambda engine: self._abort(engine, ids), Future(), must_succeed=True))

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Run a function on the engine thread, between two steps: statistics, and what later operations need.

        Raises:
            EngineStoppedError: the thread has ended (also through the future).
        """
        future: Future[T] = Future()
        self._put(_Command(function, future))
        return future

    def drain(self, deadline_s: float) -> None:
        """Take no more requests; end when the running ones have finished, or at the deadline. Does not wait.

        Called again it can only bring the deadline forward.
        """
        with self._lock:
            self._draining = True
            self._deadline = min(self._deadline, time.monotonic() + deadline_s)
        with suppress(EngineStoppedError):
            self.call(lambda _: None)  # wakes an idle engine

    def shutdown(self, deadline_s: float, grace_s: float = 10.0) -> bool:
        """Drain and wait. False when a step still hangs ``grace_s`` after the deadline."""
        self.drain(deadline_s)
        self._thread.join(deadline_s + grace_s)
        return not self._thread.is_alive()

    def on_stop(self, callback: Callable[[], None]) -> None:
        """Have a function called when the thread ends, drained or failed (at once if it has ended already)."""
        with self._lock:
            if self._taking_commands:
                self._stop_callbacks.append(callback)
                return
        callback()

    def _put(self, command: _Command) -> None:
        with self._lock:
            if not self._taking_commands:
                raise self._refusal()
            self._commands.put(command)

    def _refusal(self) -> EngineStoppedError:
        if self._failed is not None:
            return EngineStoppedError("the engine has failed and takes no more requests")
        return EngineStoppedError("the server is shutting down and takes no more requests")

    # ---- on the engine thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            engine = self._build_engine()
            constants = EngineConstants(
                engine.tokenizer,
                engine.context_length,
                engine.vocab_size,
                engine.eos_token_ids,
                engine.describe(),
            )
        except BaseException as error:  # noqa: BLE001 -- start() raises it
            self._failed = error
            self._refuse_commands()
            self._loaded.set_exception(error)
            return
        self._loaded.set_result(constants)
        try:
            self._step_until_drained(engine)
        except BaseException as error:
            logger.critical("the engine failed", exc_info=error)
            self._failed = error
        self._end(engine)

    def _step_until_drained(self, engine: Engine) -> None:
        while True:
            self._run_commands(engine)
            if self._draining and (not self._open or time.monotonic() >= self._deadline):
                return
            if engine.has_unfinished_requests:
                self._deliver(engine, engine.step())
            if self._open and not engine.has_unfinished_requests:
                # Waiting for a delta that cannot come would leave a client hanging for ever.
                raise RuntimeError(f"the engine lost track of {', '.join(self._open)}")

    def _run_commands(self, engine: Engine) -> None:
        idle = not engine.has_unfinished_requests and not self._draining
        try:
            while True:
                command = self._commands.get(block=idle)
                idle = False
                if not command.future.set_running_or_notify_cancel():
                    continue
                try:
                    command.future.set_result(command.function(engine))
                except BaseException as error:
                    command.future.set_exception(error)
                    if command.must_succeed or not isinstance(error, Exception):
                        raise
        except Empty:
            return

    def _add(self, engine: Engine, requests: Sequence[EngineRequest]) -> None:
        if self._draining:
            raise self._refusal()
        added = []
        try:
            for request in requests:
                engine.add_request(
                    request.request_id,
                    request.prompt_token_ids,
                    request.params,
                    extra_key=request.extra_key,
                    grammar=request.grammar,
                )
                added.append(request.request_id)
        except BaseException:
            for request_id in added:  # not those it failed on: an id in use is another request's
                engine.abort(request_id)
            raise
        self._open.update((request.request_id, _OpenRequest.just_added(request)) for request in requests)

    def _abort(self, engine: Engine, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._open.pop(request_id, None)
            engine.abort(request_id)

    def _deliver(self, engine: Engine, deltas: Iterable[OutputDelta]) -> None:
        for delta in deltas:
            entry = self._open.get(delta.request_id)
            if entry is None:
                continue  # aborted since
            entry.latest = delta
            if delta.finish_reason is not None:
                del self._open[delta.request_id]
            try:
                entry.request.on_delta(delta)
            except Exception:  # its listener is gone; the other requests go on
                logger.debug("nobody takes the output of %s", delta.request_id, exc_info=True)
                self._abort(engine, [delta.request_id])

    def _end(self, engine: Engine) -> None:
        """Give every open request its last delta, refuse what still waits in the queue, and close the engine."""
        failed = self._failed
        reason: FinishReason = "abort" if failed is None else "error"
        message = "the server is shutting down" if failed is None else f"the engine failed: {_one_line(failed)}"
        self._deliver_last(engine, reason, message)
        callbacks = self._refuse_commands()
        try:
            engine.close()
        except Exception as error:
            logger.error("closing the engine failed", exc_info=error)
            self._failed = self._failed or error
        for callback in callbacks:
            callback()

    def _deliver_last(self, engine: Engine, reason: FinishReason, message: str) -> None:
        entries, self._open = list(self._open.values()), {}
        for entry in entries:
            try:
                if self._failed is None:
                    engine.abort(entry.request.request_id)
                entry.request.on_delta(entry.last_delta(reason, message))
            except Exception:
                logger.debug("nobody takes the end of %s", entry.request.request_id, exc_info=True)

    def _refuse_commands(self) -> list[Callable[[], None]]:
        with self._lock:  # after this nothing can be put in the queue
            self._taking_commands = False
            callbacks, self._stop_callbacks = self._stop_callbacks, []
        while not self._commands.empty():
            future = self._commands.get().future
            if future.set_running_or_notify_cancel():
                future.set_exception(self._refusal())
        return callbacks


def _one_line(error: BaseException) -> str:
    """What happened, without the pages that some exceptions (CUDA's) carry."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
