"""Communication between the engine thread and others: requests, functions to run, and calls on event loops."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import asdict, dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from specmamba.core import ANYONE, FinishReason, Handoff, OutputDelta, Owner
from specmamba.errors import RequestError
from specmamba.parallel.messages import encoded
from specmamba.sampling_params import SamplingParams

if TYPE_CHECKING:
    from specmamba.engine.base_engine import BaseEngine
    from specmamba.grammar import CompiledGrammar
    from specmamba.models.text.tokenizer import Tokenizer

T = TypeVar("T")

SHARE = 0.02  # share of a core that the rounds of an event loop may use


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt for the engine. ``on_delta`` is called in the engine thread, so it must be quick and never block."""

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    on_delta: Callable[[OutputDelta], None]
    extra_key: str | None = None  # cached prefixes are shared with requests of the same key and tenant only
    grammar: CompiledGrammar | None = None  # of ``params.grammar``
    owner: Owner = ANYONE
    forced_output_ids: Sequence[int] = ()  # given instead of chosen, as far as they go
    predicted_ids: Sequence[int] = ()  # expected output, to draft from
    handoff: Handoff | None = None  # where its prompt goes to, or comes from


@dataclass(frozen=True, slots=True)
class SentRequest:
    """A request as an engine in another process gets it: another rank's, or a replica's."""

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams  # its prediction does not travel: ``predicted_ids`` has the tokens
    forced_output_ids: Sequence[int] = ()
    extra_key: str | None = None
    grammar: str | None = None  # ``params.grammar`` compiled, as xgrammar serializes it
    owner: Owner = ANYONE
    predicted_ids: Sequence[int] = ()

    def message(self) -> dict[str, Any]:
        """The command that adds it."""
        return {
            "do": "add",
            "request_id": self.request_id,
            "prompt_token_ids": list(map(int, self.prompt_token_ids)),
            "params": self.params.model_dump(mode="json", exclude_defaults=True, exclude={"prediction"}),
            "forced_output_ids": list(map(int, self.forced_output_ids)),
            "extra_key": self.extra_key,
            "grammar": self.grammar,
            "owner": asdict(self.owner),
            "predicted_ids": list(map(int, self.predicted_ids)),
        }

    def line(self) -> bytes:
        """The command as it is sent. Raises RequestError: it is too long."""
        try:
            return encoded(self.message())
        except ValueError as error:
            raise RequestError(str(error)) from error

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> SentRequest:
        """The request of a command."""
        given = {name: value for name, value in message.items() if name not in ("do", "params", "owner")}
        return cls(params=SamplingParams(**message["params"]), owner=Owner(**message["owner"]), **given)

    def add_to(self, engine: BaseEngine, grammar: CompiledGrammar | None = None) -> None:
        """Add it to an engine of this process, with its grammar; raises as ``BaseEngine.add_request``."""
        engine.add_request(
            self.request_id,
            self.prompt_token_ids,
            self.params,
            self.forced_output_ids,
            self.extra_key,
            grammar,
            self.owner,
            self.predicted_ids,
        )


@dataclass(slots=True)
class OpenRequest:
    """A request that has not had its last delta yet."""

    request: EngineRequest
    latest: OutputDelta

    @classmethod
    def just_added(cls, request: EngineRequest) -> OpenRequest:
        return cls(request, OutputDelta(request.request_id, (), "", len(request.prompt_token_ids), 0, 0))

    def last_delta(self, finish_reason: FinishReason, error: str) -> OutputDelta:
        """Make a last delta without new tokens; counts and statistics are those of the newest delta."""
        return OutputDelta(
            request_id=self.latest.request_id,
            token_ids=(),
            text="",
            num_prompt_tokens=self.latest.num_prompt_tokens,
            num_cached_tokens=self.latest.num_cached_tokens,
            num_output_tokens=self.latest.num_output_tokens,
            finish_reason=finish_reason,
            error=error,
            spec=self.latest.spec,
        )


@dataclass(frozen=True, slots=True)
class EngineConstants:
    """Facts that do not change while an engine runs, so that they may be read from any thread."""

    tokenizer: Tokenizer
    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    description: dict[str, object]


@dataclass(frozen=True, slots=True)
class _Command:
    """A function to run in the engine thread; with ``must_succeed`` its exceptions end the engine."""

    function: Callable[[Any], Any]  # of the engine; a caller may know its class
    future: Future[Any]
    must_succeed: bool


class CommandQueue:
    """Takes functions from any thread and runs them in one; every function has a future that is always resolved.

    A future is in the set of unanswered ones from the moment it is returned. So even the future of a command that the
    thread had taken from the queue when it died gets an exception when the queue is closed.
    """

    def __init__(self, refusal: Callable[[], Exception]) -> None:
        """``refusal`` makes the exception for functions that are put after the queue was closed."""
        self._refusal = refusal
        self._queue: SimpleQueue[_Command] = SimpleQueue()
        self._unanswered: set[Future[Any]] = set()
        # Garbage collection may close a stream, and so put a command, while this thread holds the lock.
        self._lock = threading.RLock()
        self._is_open = True
        self.on_put: Callable[[], None] = lambda: None  # called behind each function that is put

    @property
    def is_open(self) -> bool:
        return self._is_open

    def put(self, function: Callable[[Any], T], must_succeed: bool = False) -> Future[T]:
        """Queue a function. Raises the refusal if the queue is closed."""
        future: Future[T] = Future()
        with self._lock:
            if not self._is_open:
                raise self._refusal()
            self._unanswered.add(future)
            self._queue.put(_Command(function, future, must_succeed))
        future.add_done_callback(self._unanswered.discard)
        self.on_put()
        return future

    def run(self, engine: BaseEngine, wait: bool, timeout_s: float | None = None) -> None:
        """Run all queued functions; with ``wait``, at least one, or none that comes within the time.

        Raises exceptions that must end the engine.
        """
        with suppress(Empty):
            while wait or not self._queue.empty():  # between two steps it mostly is, and an exception takes longer
                command = self._queue.get(wait, timeout_s if wait else None)
                wait = False
                if command.future.set_running_or_notify_cancel():
                    _run(command, engine)

    def close(self, unanswered: Callable[[], Exception] | None = None) -> None:
        """Refuse all further functions, and resolve unanswered futures with ``unanswered`` or else the refusal."""
        with self._lock:
            self._is_open = False
        for future in list(self._unanswered):
            with suppress(InvalidStateError):  # the caller cancelled it
                future.set_exception((unanswered or self._refusal)())


def _run(command: _Command, engine: BaseEngine) -> None:
    try:
        command.future.set_result(command.function(engine))
    except BaseException as error:
        with suppress(InvalidStateError):
            command.future.set_exception(error)
        if command.must_succeed or not isinstance(error, Exception):
            raise


class LoopWaker:
    """Calls functions on one event loop, those of a step together.

    Every wake takes the interpreter, and often a core, away from the engine: with one stream of the demo on two cores a
    wake in every step cost a fifth of all tokens. So after a wake the loop sets a timer, and until the timer expires a
    step only leaves its functions for it. The time is such that the loop's rounds use at most ``SHARE`` of a core, and
    at most ``interval_s``: no function waits longer, whatever happens to the engine.

    ``add`` and ``end_step`` are called in the engine thread (or by ``EngineThread.give_up``).
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, interval_s: float) -> None:
        self._loop = loop
        self._interval_s = interval_s
        self._spent_s = 0.0  # processor time of the loop's thread at its last round
        self._lock = threading.Lock()  # guards the fields below
        self._functions: list[Callable[[], object]] = []
        self._is_urgent = False
        self._has_timer = False

    def add(self, function: Callable[[], object], at_once: bool) -> None:
        """Call a function when this step ends (``at_once``), else within the interval."""
        with self._lock:
            self._functions.append(function)
            self._is_urgent |= at_once

    def end_step(self) -> None:
        """Wake the loop if a function is urgent, or if there are functions and no timer.

        Raises:
            RuntimeError: the loop has been closed.
        """
        with self._lock:
            if not self._functions or (self._has_timer and not self._is_urgent):
                return
        self._loop.call_soon_threadsafe(self._call_all)

    def _call_all(self) -> None:
        with self._lock:
            functions, self._functions = self._functions, []
            self._is_urgent = False
            starts_timer = self._interval_s > 0 and not self._has_timer
            self._has_timer |= starts_timer
        if starts_timer:  # before the functions, because one of them may raise
            self._loop.call_later(self._pause_s(), self._look)
        for function in functions:
            function()

    def _pause_s(self) -> float:
        before, self._spent_s = self._spent_s, time.thread_time()
        return min(self._interval_s, (self._spent_s - before) / SHARE)

    def _look(self) -> None:
        with self._lock:
            self._has_timer = False
            if not self._functions:
                return  # the next step wakes the loop
        self._call_all()
