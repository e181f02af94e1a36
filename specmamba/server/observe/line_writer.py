"""Output on threads of its own: a reader that stalls, a full disk or a closed pipe neither delays nor ends the server.

Lines that find the queue full, or that cannot be written, are dropped and counted.
"""

from __future__ import annotations

import atexit
import io
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TextIO

_MAX_QUEUED_BYTES = 1 << 20
_BYTES_OF_AN_ENTRY = 64  # besides its text
_REPORT_INTERVAL_S = 1.0
# The output has this time at the end of the process.
FLUSH_S = 1.0


class LineWriter:
    """Writes lines to a file descriptor on a thread.

    Every method may be called from any thread, and none but ``flush`` waits for the descriptor.
    """

    def __init__(self, descriptor: int, report: Callable[[int], str] | None = None) -> None:
        """``report``: the line that is written after a number of lines were dropped; None: none is."""
        self.descriptor = descriptor
        self._report = report
        self._queue: SimpleQueue[bytes | threading.Event] = SimpleQueue()
        self._lock = threading.RLock()  # guards the next three; a finalizer or a signal handler may write too
        self._thread: threading.Thread | None = None
        self._num_put = 0  # bytes
        self._num_refused = 0  # lines
        # Written on the writer's thread only.
        self._num_taken = 0  # bytes
        self._num_lost = 0  # lines
        self._num_reported = 0  # lines
        self._next_report_at = 0.0
        self._is_torn = False

    @property
    def num_dropped(self) -> int:
        """Lines that found the queue full or could not be written."""
        return self._num_refused + self._num_lost

    def put(self, line: str) -> None:
        """Queue a line, which ends with a newline, or drop it."""
        data = line.encode("utf8", "backslashreplace")
        with self._lock:
            has_room = self._num_put + _size(data) - self._num_taken <= _MAX_QUEUED_BYTES
            if has_room and self.start():
                self._num_put += _size(data)
                self._queue.put(data)
            else:
                self._num_refused += 1

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was put before is written or dropped. Returns False if it is not in time."""
        if self._thread is None:
            return True
        done = threading.Event()
        self._queue.put(done)
        return done.wait(timeout_s)

    def start(self) -> bool:
        """Start the thread, which the first line does otherwise. Returns False if the system has no more threads."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="specmamba-output", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system has no more threads, or the interpreter ends
                return False
            self._thread = thread
        return True

    # ---- on the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            entry = self._queue.get()
            if isinstance(entry, threading.Event):
                self._report_drops()
                entry.set()
                continue
            is_written = self._write(entry)
            self._num_lost += not is_written
            self._num_taken += _size(entry)
            if is_written and (self._queue.empty() or time.monotonic() >= self._next_report_at):
                self._report_drops()

    def _report_drops(self) -> None:
        num_new = self.num_dropped - self._num_reported
        if self._report is not None and num_new and self._write(self._report(num_new).encode()):
            self._num_reported += num_new
            self._next_report_at = time.monotonic() + _REPORT_INTERVAL_S

    def _write(self, data: bytes) -> bool:
        """Write a whole line, and wait as long as that takes. Returns False if it cannot be written."""
        left = memoryview(b"\n" + data if self._is_torn else data)
        while left:
            try:
                num_written = os.write(self.descriptor, left)
            except BlockingIOError:  # whatever shares the descriptor has made it non-blocking
                self._wait_until_writable()
            except OSError:
                return False
            else:
                left = left[num_written:]
                self._is_torn = len(left) > 0
        return True

    def _wait_until_writable(self) -> None:
        poll = select.poll()
        poll.register(self.descriptor, select.POLLOUT)
        poll.poll(1000)


def _size(data: bytes) -> int:
    return len(data) + _BYTES_OF_AN_ENTRY


class LineStream(io.TextIOBase):
    """A text stream in place of ``sys.stdout`` or ``sys.stderr``, whose whole lines go to a writer."""

    def __init__(self, writer: LineWriter) -> None:
        self._writer = writer
        self._lock = threading.RLock()
        self._rest = ""

    @property
    def encoding(self) -> str:  # type: ignore[override] # read by libraries
        return "utf-8"

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return os.isatty(self._writer.descriptor)

    def fileno(self) -> int:
        return self._writer.descriptor

    def write(self, text: str) -> int:
        with self._lock:
            lines, newline, self._rest = (self._rest + text).rpartition("\n")
            if newline:
                self._writer.put(lines + newline)
        return len(text)

    def flush(self) -> None:
        """Queue what is no whole line yet, such as a progress bar."""
        with self._lock:
            if self._rest:
                self._writer.put(self._rest)
            self._rest = ""


@dataclass(frozen=True)
class ProcessOutput:
    """The writers of the two standard streams."""

    writers: tuple[LineWriter, LineWriter]

    @classmethod
    def taken_over(cls, log: LineWriter) -> ProcessOutput:
        """Replace ``sys.stdout`` and ``sys.stderr`` for the rest of the process.

        Args:
            log: writes to standard error.
        """
        out = LineWriter(descriptor_of(sys.__stdout__))
        sys.stdout, sys.stderr = LineStream(out), LineStream(log)
        output = cls((out, log))
        for writer in output.writers:  # now: a model that takes all memory may leave none for a thread
            writer.start()
        atexit.register(output.flush)
        return output

    def flush(self) -> None:
        """Wait until all is written, for ``FLUSH_S`` at the most."""
        deadline = time.monotonic() + FLUSH_S
        for writer in self.writers:
            writer.flush(max(0.0, deadline - time.monotonic()))


def descriptor_of(stream: TextIO | None) -> int:
    """The descriptor of a standard stream; of the null device if the process was started without the stream."""
    return os.open(os.devnull, os.O_WRONLY) if stream is None else stream.fileno()
