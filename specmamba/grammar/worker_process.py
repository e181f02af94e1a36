"""The parent's end of the process that compiles: it is started, asked, and killed when it takes too long."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from specmamba.core import GrammarSpec
from specmamba.errors import RequestError

START_TIMEOUT_S = 120.0  # it imports torch, as xgrammar does
MEMORY_BYTES, MAX_ANSWER_BYTES = 2 << 30, 256 << 20
_MAX_HEADER_BYTES = 1 << 16


class WorkerProcess:
    """One process, or none: it is started by the first question and again after it has died."""

    def __init__(self, vocabulary: bytes, timeout_s: float) -> None:
        self._vocabulary = vocabulary  # a line
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # starting one and ending it for good exclude each other
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def compile(self, spec: GrammarSpec) -> str:
        """What xgrammar has made of a specification, as it writes it.

        Raises:
            RequestError: the specification is wrong, or takes too long (caused by TimeoutError) or too much memory.
            OSError: the process cannot be started.
        """
        if self._process is not None and self._process.poll() is not None:
            self._end()  # it died over nothing
        process = self._process or self._start()
        question = json.dumps({"kind": spec.kind, "text": spec.text}).encode() + b"\n"
        with self._deadline(process, self._timeout_s) as expired:
            answer = self._ask(process, question)
        if answer is None:
            self._end()
            if expired.is_set():
                message = f"the grammar takes more than {self._timeout_s:g} s to compile: make it smaller"
                raise RequestError(message, "grammar") from TimeoutError()
            raise RequestError(
                "the grammar could not be compiled: it needs too much memory, or nests too deep", "grammar"
            )
        header, payload = answer
        if "error" in header:
            raise RequestError(str(header["error"]), "grammar")
        return payload.decode()

    def close(self) -> None:
        """Kill the process, if there is one; there will be no other."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                self._process.kill()

    def _start(self) -> subprocess.Popen[bytes]:
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        with self._lock:
            if self._is_closed:
                raise OSError("nothing is compiled any more")
            self._process = process = subprocess.Popen(
                [sys.executable, "-P", "-m", "specmamba.grammar.worker", str(MEMORY_BYTES)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
            )
        with self._deadline(process, START_TIMEOUT_S):
            is_ready = self._ask(process, self._vocabulary) is not None
        if not is_ready:
            self._end()
            raise OSError("the process that compiles did not start")
        return process

    def _ask(self, process: subprocess.Popen[bytes], line: bytes) -> tuple[dict[str, Any], bytes] | None:
        """The answer; None when the process died over it."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except OSError:
            return None
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
        """Kill the process when the block takes longer; the event says that this was so."""
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
        """Reap the process; the next question starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):  # what was not written has nobody to read it
                        pipe.close()

    def reap(self) -> None:
        """After ``close``, by the thread that asks: nothing of the process stays."""
        self._end()
