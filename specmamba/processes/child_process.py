"""The parent's side of a process that works for it: start it, send requests, kill it when it takes too long.

The other side is ``child_main.py``. A request is one line. An answer is a line of JSON, the header, whose "size" is the
number of bytes that follow (by default none).
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

START_TIMEOUT_S = 120.0  # a child may import torch
SPARE_AFTER_S = 1.0  # of work on one request, a spare process is started
_MAX_HEADER_BYTES = 1 << 16


class NoAnswerError(Exception):
    """The process gave no answer, and has ended.

    ``reason`` is "late" (it was killed at the deadline), "ended" (it died, or its answer was no longer wanted) or
    "too_large" (it was killed because of the size of its answer).
    """

    def __init__(self, reason: Literal["late", "ended", "too_large"]) -> None:
        super().__init__(reason)
        self.reason = reason


class ChildProcess:
    """A process that answers one request at a time. It is started for the first one, and again after it has died.

    ``start``, ``ask`` and ``reap`` belong to one thread; the process ends with it. Other methods are thread-safe.
    """

    def __init__(self, module: str, memory_bytes: int, max_answer_bytes: int, first_line: bytes = b"") -> None:
        """``module``: run with ``memory_bytes`` as its argument. ``first_line``: its first input, with its end."""
        self._module, self._memory_bytes, self._first_line = module, memory_bytes, first_line
        self._max_answer_bytes = max_answer_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._spare: subprocess.Popen[bytes] | None = None
        self._busy: subprocess.Popen[bytes] | None = None
        self._is_wanted: Callable[[], bool] = lambda: True  # of the running request
        self._was_killed = False  # at least once
        self._is_dying = False  # the process was killed, but may still run
        self._lock = threading.Lock()  # guards the fields above and the next; not held while waiting
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The id of the process, or None before it was started."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process unless it runs, and wait until it is ready. Raises OSError when it cannot be started."""
        if self._process is not None and (self._is_dying or self._process.poll() is not None):
            self._end()
        if self._process is None:
            self._start()

    def ask(
        self, line: bytes, timeout_s: float, is_wanted: Callable[[], bool] = lambda: True
    ) -> tuple[dict[str, Any], bytes]:
        """Send a request, a line with its end, and wait for the answer; gives its header and the bytes behind it.

        Raises:
            NoAnswerError: the process died, was killed after ``timeout_s``, or the answer is no longer wanted.
            OSError: the process cannot be started.
        """
        self.start()
        process = self._process
        assert process is not None
        if self._was_killed:  # and may be killed again
            self._prepare_spare()
        with self._lock:
            if not is_wanted():
                raise NoAnswerError("ended")
            self._busy, self._is_wanted = process, is_wanted
        with self._deadline(process, timeout_s) as expired:
            answer = self._exchange(process, line)
        with self._lock:
            self._busy = None
            self._is_dying |= expired.is_set()
        if isinstance(answer, NoAnswerError):
            self._end()
            self._was_killed = True
            self._prepare_spare()
            raise NoAnswerError("late") if expired.is_set() else answer
        return answer

    def abandon(self) -> None:
        """Stop the work on the running request, if there is one and it is no longer wanted."""
        with self._lock:
            if self._busy is not None and not self._is_wanted():
                self._is_dying = True
                self._busy.kill()

    def close(self) -> None:
        """Kill the process, if there is one, and start no other."""
        with self._lock:
            self._is_closed = True
            for process in (self._process, self._spare):
                if process is not None:
                    process.kill()

    def reap(self) -> None:
        """After ``close``: wait for the end of the processes."""
        self._end()
        spare, self._spare = self._spare, None
        _reap(spare)

    def _start(self) -> None:
        """Take the spare process or a new one, and wait until it is ready."""
        self._prepare_spare()
        with self._lock:
            process, self._spare = self._spare, None
            if process is None or self._is_closed:
                self._spare = process
                raise OSError(f"{self._module} is closed")
            self._process, self._is_dying = process, False
        with self._deadline(process, START_TIMEOUT_S):
            is_ready = not isinstance(self._answer(process), NoAnswerError)
        if not is_ready:
            self._end()
            raise OSError(f"the process of {self._module} did not start")

    def _prepare_spare(self) -> None:
        """Start a spare process, unless there is one. It dies with the thread that calls this."""
        with self._lock:
            if self._spare is None and not self._is_closed:
                self._spare = _launch(self._module, self._memory_bytes, self._first_line)

    def _exchange(self, process: subprocess.Popen[bytes], line: bytes) -> tuple[dict[str, Any], bytes] | NoAnswerError:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except OSError:
            return NoAnswerError("ended")
        ready = select.poll()
        ready.register(process.stdout, select.POLLIN)
        if not ready.poll(SPARE_AFTER_S * 1000):
            self._prepare_spare()  # this one may be killed, and the next request should not wait for its start
        return self._answer(process)

    def _answer(self, process: subprocess.Popen[bytes]) -> tuple[dict[str, Any], bytes] | NoAnswerError:
        assert process.stdout is not None
        text = process.stdout.readline(_MAX_HEADER_BYTES)
        if not text.endswith(b"\n"):
            return NoAnswerError("ended")
        header: dict[str, Any] = json.loads(text)
        size = int(header.get("size", 0))
        if size > self._max_answer_bytes:
            return NoAnswerError("too_large")
        payload = process.stdout.read(size)
        return (header, payload) if len(payload) == size else NoAnswerError("ended")

    @contextmanager
    def _deadline(self, process: subprocess.Popen[bytes], seconds: float) -> Iterator[threading.Event]:
        """Kill the process when the ``with`` block takes longer; the event is set then."""
        expired = threading.Event()

        def kill() -> None:
            expired.set()
            process.kill()

        timer = threading.Timer(seconds, kill)
        timer.daemon = True
        timer.start()
        try:
            yield expired
        finally:
            timer.cancel()

    def _end(self) -> None:
        """Kill the process and wait for its end; the next request starts another."""
        process, self._process = self._process, None
        _reap(process)


def python_path() -> str:
    """``PYTHONPATH`` for a child process that imports this package, also from a checkout."""
    root = str(Path(__file__).parents[2])
    return os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))


def _launch(module: str, memory_bytes: int, first_line: bytes) -> subprocess.Popen[bytes]:
    """Start a process, and send it the first line in the background."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(memory_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": python_path(), "CUDA_VISIBLE_DEVICES": ""},
    )
    if first_line:
        threading.Thread(target=_feed, args=(process, first_line), name="first-line", daemon=True).start()
    return process


def _feed(process: subprocess.Popen[bytes], line: bytes) -> None:
    assert process.stdin is not None
    with suppress(OSError, ValueError):  # it died, which the next request to it notices
        process.stdin.write(line)
        process.stdin.flush()


def _reap(process: subprocess.Popen[bytes] | None) -> None:
    if process is None:
        return
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # unwritten data is lost with the process
                pipe.close()
