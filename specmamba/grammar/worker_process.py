"""The parent's side of the process that compiles: start it, send requests, kill it when it takes too long."""

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
from typing import Any

from specmamba.errors import RequestError
from specmamba.sampling_params import GrammarSpec

START_TIMEOUT_S = 120.0  # xgrammar imports torch
SPARE_AFTER_S = 1.0  # of compiling, a spare process is started
MEMORY_BYTES, MAX_ANSWER_BYTES = 2 << 30, 256 << 20
_MAX_HEADER_BYTES = 1 << 16


class WorkerProcess:
    """A process that compiles. It is started for the first request, and again after it has died."""

    def __init__(self, vocabulary: bytes, timeout_s: float) -> None:
        self._vocabulary = vocabulary  # one line
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._spare: subprocess.Popen[bytes] | None = None
        self._busy: subprocess.Popen[bytes] | None = None
        self._was_killed = False  # at least once
        self._is_dying = False  # the process was killed, but may still run
        self._lock = threading.Lock()  # guards the fields above and the next; not held while waiting
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The id of the process, or None before it was started."""
        return None if self._process is None else self._process.pid

    def compile(self, spec: GrammarSpec, is_wanted: Callable[[], bool] = lambda: True) -> str:
        """Compile a specification; gives the compiled grammar as serialized by xgrammar.

        Raises:
            RequestError: the specification is wrong, takes too long (caused by TimeoutError) or too much memory, or is
            no
                longer wanted.
            OSError: the process cannot be started.
        """
        if self._process is not None and (self._is_dying or self._process.poll() is not None):
            self._end()
        process = self._process or self._start()
        if self._was_killed:  # and may be killed again
            self._prepare_spare()
        request = json.dumps({"kind": spec.kind, "text": spec.text}).encode() + b"\n"
        with self._lock:
            if not is_wanted():
                raise RequestError("the grammar is no longer wanted", "grammar")
            self._busy = process
        with self._deadline(process, self._timeout_s) as expired:
            answer = self._ask(process, request)
        with self._lock:
            self._busy = None
            self._is_dying |= expired.is_set()
        if answer is None:
            self._end()
            self._was_killed = True
            self._prepare_spare()
            raise self._failure(expired.is_set())
        header, payload = answer
        if "error" in header:
            cause = TimeoutError() if header.get("is_slow") else None
            raise RequestError(str(header["error"]), "grammar") from cause
        return payload.decode()

    def abandon(self) -> None:
        """Stop the running compilation, if there is one. Safe to call from any thread."""
        with self._lock:
            if self._busy is not None:
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
        """After ``close``: wait for the end of the processes. Called by the thread that compiles."""
        self._end()
        spare, self._spare = self._spare, None
        _reap(spare)

    def _failure(self, is_late: bool) -> RequestError:
        if not is_late:
            return RequestError(
                "the grammar could not be compiled: it needs too much memory, or nests too deep", "grammar"
            )
        error = RequestError(
            f"the grammar takes more than {self._timeout_s:g} s to compile: make it smaller", "grammar"
        )
        error.__cause__ = TimeoutError()
        return error

    def _start(self) -> subprocess.Popen[bytes]:
        """Take the spare process or a new one, and wait until it is ready."""
        self._prepare_spare()
        with self._lock:
            process, self._spare = self._spare, None
            if process is None or self._is_closed:
                self._spare = process
                raise OSError("the compiler is closed")
            self._process, self._is_dying = process, False
        with self._deadline(process, START_TIMEOUT_S):
            is_ready = self._answer(process) is not None
        if not is_ready:
            self._end()
            raise OSError("the process that compiles did not start")
        return process

    def _prepare_spare(self) -> None:
        """Start a spare process, unless there is one. It dies with the thread that calls this."""
        with self._lock:
            if self._spare is None and not self._is_closed:
                self._spare = _launch(self._vocabulary)

    def _ask(self, process: subprocess.Popen[bytes], line: bytes) -> tuple[dict[str, Any], bytes] | None:
        """Send a request and read its answer; None when the process died."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except OSError:
            return None
        ready = select.poll()
        ready.register(process.stdout, select.POLLIN)
        if not ready.poll(SPARE_AFTER_S * 1000):
            self._prepare_spare()  # this one may be killed, and the next request should not wait for torch
        return self._answer(process)

    def _answer(self, process: subprocess.Popen[bytes]) -> tuple[dict[str, Any], bytes] | None:
        assert process.stdout is not None
        text = process.stdout.readline(_MAX_HEADER_BYTES)
        if not text.endswith(b"\n"):
            return None
        header: dict[str, Any] = json.loads(text)
        size = int(header.get("size", 0))
        if size > MAX_ANSWER_BYTES:
            self._end()
            return {"error": "the compiled grammar is too large: make it smaller"}, b""
        payload = process.stdout.read(size)
        return (header, payload) if len(payload) == size else None

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


def _launch(vocabulary: bytes) -> subprocess.Popen[bytes]:
    """Start a process, and send it the vocabulary in the background."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "specmamba.grammar.worker", str(MEMORY_BYTES)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
    )
    threading.Thread(target=_feed, args=(process, vocabulary), name="grammar-vocabulary", daemon=True).start()
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
