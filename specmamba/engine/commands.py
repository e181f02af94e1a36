"""What other threads want done between two steps: a queue of functions, each with a future that is always resolved."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from specmamba.engine.engine import Engine

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Command:
    """``must_succeed``: an exception means that the engine cannot go on."""

    function: Callable[[Engine], Any]
    future: Future[Any]
    must_succeed: bool


class CommandQueue:
    """Takes functions from any thread and runs them on one.

    A future stands in the set of those without an answer from the moment it is handed out, so that even a command that
    was taken from the queue by a thread that then died is refused when the queue is closed.
    """

    def __init__(self, refusal: Callable[[], Exception]) -> None:
        """``refusal`` makes the exception for what comes once the queue is closed."""
        self._refusal = refusal
        self._queue: SimpleQueue[_Command] = SimpleQueue()
        self._unanswered: set[Future[Any]] = set()
        self._lock = threading.Lock()
        self._is_open = True

    @property
    def is_open(self) -> bool:
        return self._is_open

    def put(self, function: Callable[[Engine], T], must_succeed: bool = False) -> Future[T]:
        """Queue a function. Raises the refusal when the queue is closed."""
        future: Future[T] = Future()
        with self._lock:
            if not self._is_open:
                raise self._refusal()
            self._unanswered.add(future)
            self._queue.put(_Command(function, future, must_succeed))
        future.add_done_callback(self._unanswered.discard)
        return future

    def run(self, engine: Engine, wait: bool) -> None:
        """Run what is queued; with ``wait``, at least one. Raises what means the end of the engine."""
        with suppress(Empty):
            while True:
                command = self._queue.get(block=wait)
                wait = False
                if command.future.set_running_or_notify_cancel():
                    _run(command, engine)

    def close(self, unanswered: Callable[[], Exception] | None = None) -> None:
        """Refuse all that has no answer yet, with ``unanswered`` where it is given, and from now on everything."""
        with self._lock:
            self._is_open = False
        for future in list(self._unanswered):
            with suppress(InvalidStateError):  # cancelled by who asked
                future.set_exception((unanswered or self._refusal)())


def _run(command: _Command, engine: Engine) -> None:
    try:
        command.future.set_result(command.function(engine))
    except BaseException as error:
        with suppress(InvalidStateError):
            command.future.set_exception(error)
        if command.must_succeed or not isinstance(error, Exception):
            raise
