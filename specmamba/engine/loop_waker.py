"""Waking an event loop from the engine thread, no more often than its clients can tell."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

SHARE = 0.02  # of a core, for streams


class LoopWaker:
    """Has functions called on one event loop, those of a step together.

    Every wake takes the interpreter, and often a core, away from the engine: with one stream of the demo on two cores a
    wake at every step cost a fifth of all tokens. So after a wake the loop looks again by itself, and until then a step
    leaves its functions for it to find. It does so once its last round has taken no more than ``SHARE`` of a core's
    time, but ``interval_s`` later at the latest: whatever becomes of the engine, no function waits for longer.

    ``add`` and ``end_step`` are for the engine thread (or for who speaks for it once it hangs).
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, interval_s: float) -> None:
        self._loop = loop
        self._interval_s = interval_s
        self._spent_s = 0.0  # processor time of the loop's thread when it was here last
        self._lock = threading.Lock()  # guards the fields below
        self._functions: list[Callable[[], object]] = []
        self._is_urgent = False
        self._looks_by_itself = False  # a timer of the loop is set

    def add(self, function: Callable[[], object], at_once: bool) -> None:
        """Have a function called: when this step ends, or else within the interval."""
        with self._lock:
            self._functions.append(function)
            self._is_urgent |= at_once

    def end_step(self) -> None:
        """Wake the loop where something cannot wait, or where it would not look by itself.

        Raises:
            RuntimeError: the loop has been closed.
        """
        with self._lock:
            if not self._functions or (self._looks_by_itself and not self._is_urgent):
                return
        self._loop.call_soon_threadsafe(self._call_all)

    def _call_all(self) -> None:
        with self._lock:
            functions, self._functions = self._functions, []
            self._is_urgent = False
            starts_timer = self._interval_s > 0 and not self._looks_by_itself
            self._looks_by_itself |= starts_timer
        if starts_timer:  # first, as it must run whatever a function does
            self._loop.call_later(self._pause_s(), self._look)
        for function in functions:
            function()

    def _pause_s(self) -> float:
        before, self._spent_s = self._spent_s, time.thread_time()
        return min(self._interval_s, (self._spent_s - before) / SHARE)

    def _look(self) -> None:
        with self._lock:
            self._looks_by_itself = False
            if not self._functions:
                return  # and the next step wakes
        self._call_all()
