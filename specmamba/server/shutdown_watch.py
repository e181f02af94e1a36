"""The time-out of a shutdown holds, whatever hangs: a thread of a library, native code, the log or a client.

At its end the interpreter waits for threads, and for the executors of event loops; a thread that hangs would keep the
process from ending.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NoReturn

logger = logging.getLogger("specmamba")

# Behind the time-out: a step that hangs is abandoned, clients read what is written, the log is flushed.
MARGIN_S = 19.0
# After a second and a third signal the process ends at the latest after this time.
_SECOND_S, _THIRD_S = 10.0, 3.0
# When all is done, threads and exit handlers have this time.
_END_S = 3.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class ShutdownWatch:
    """Ends the process with status 1 if it has not ended some time after a signal.

    A thread without Python code ends it, so that neither a lock of the interpreter nor a stalled log can prevent that.
    Python code must run once after the signal: native code that never lets other threads run prevents that.
    """

    def __init__(self, shutdown_timeout: float) -> None:
        """``shutdown_timeout``: seconds that running requests have after the first signal."""
        self._allowed_s = (shutdown_timeout + MARGIN_S, _SECOND_S, _THIRD_S)
        self._null = open(os.devnull, "wb")  # noqa: SIM115 -- for tracebacks, as long as the process runs
        self._num_signals = 0
        self._ends_at = math.inf

    def start(self) -> None:
        """Watch for signals; call it in the main thread."""
        receiver, sender = os.pipe()
        os.set_blocking(sender, False)
        # Python's handlers run in the main thread, which may hang; what is written here is read by any thread.
        signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(receiver,), name="specmamba-shutdown", daemon=True).start()

    def _watch(self, receiver: int) -> None:
        while True:
            rest_s = self._ends_at - time.monotonic()
            ready, _, _ = select.select([receiver], [], [], None if math.isinf(rest_s) else max(0.0, rest_s - 0.5))
            if not ready:
                logger.error("the shutdown takes too long: the process is ended")
                return
            for number in os.read(receiver, 64):
                if number in _SIGNALS:
                    self._shorten()

    def _shorten(self) -> None:
        allowed_s = self._allowed_s[min(self._num_signals, 2)]
        self._num_signals += 1
        self._ends_at = min(self._ends_at, time.monotonic() + allowed_s)
        rest_s = max(0.01, self._ends_at - time.monotonic())
        faulthandler.dump_traceback_later(rest_s, exit=True, file=self._null)


def end_at_signals(flush: Callable[[], None] = lambda: None) -> None:
    """Let a signal end the process with status 0 wherever it is in its start; call it in the main thread.

    The interpreter's own end would abort it: threads that load the model are in native code then.
    """
    for number in _SIGNALS:
        signal.signal(number, lambda *_: end_now(0, flush))


@contextmanager
def ending_at_signals() -> Iterator[None]:
    """``end_at_signals``; after an exception inside, signals do what they did before."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    end_at_signals()
    try:
        yield
    except BaseException:
        for number, handler in before.items():
            signal.signal(number, handler)
        raise


def ignore_signals() -> None:
    """Let signals change nothing, for a process that is about to end; a watch still sees them."""
    for number in _SIGNALS:
        signal.signal(number, lambda *_: None)


def end_now(status: int, flush: Callable[[], None]) -> NoReturn:
    """End the process without the interpreter's end. ``flush`` has a second, on a thread: locks may be held here."""
    flushing = threading.Thread(target=flush, daemon=True)
    flushing.start()
    flushing.join(1.0)
    os._exit(status)


def end_soon(status: int, flush: Callable[[], None]) -> None:
    """End the process in ``_END_S`` seconds, if it has not ended by itself: all that matters is done.

    Args:
        status: the exit status.
        flush: called before, because exit handlers do not run.
    """

    def end() -> None:
        time.sleep(_END_S)
        flush()
        os._exit(status)

    threading.Thread(target=end, name="specmamba-end", daemon=True).start()


class UnjoinedExecutor(ThreadPoolExecutor):
    """An event loop's threads. The end of the loop does not wait for them: one may hang in a library."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=True)
