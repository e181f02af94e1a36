"""An engine of this runtime in a process of its own, as each server of llama.cpp has one."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import IO, Any

from specmamba.bench.llama_cpp.figures import Answer, Batch
from specmamba.bench.serving.server import python_path
from specmamba.config import EngineConfig
from specmamba.errors import SpecmambaError
from specmamba.measure.prompts import PromptText

WORKER = (sys.executable, "-P", "-m", "specmamba.bench.llama_cpp.worker")
_LOG_BYTES = 1 << 14  # read from the end of the log


class EngineProcess:
    """A process that runs ``worker.py``. Use ``started_engine``; ``facts`` is what ``Worker.load`` says."""

    def __init__(self, process: subprocess.Popen[bytes], log: IO[bytes], timeout_s: float) -> None:
        self.facts: dict[str, Any] = {}
        self._process, self._log, self._timeout_s = process, log, timeout_s

    def run(self, batch: Batch) -> list[Answer]:
        """Run the requests of a batch together. Raises SpecmambaError: one failed, or the process ended."""
        answers = self.ask("run", asdict(batch), self._timeout_s)["answers"]
        return [Answer(tokens=tuple(fields.pop("tokens")), **fields) for fields in answers]

    def encode(self, texts: Sequence[PromptText]) -> tuple[list[list[int]], list[list[int]]]:
        """Token ids of prompts, and of prompts with their continuations. Raises SpecmambaError likewise."""
        answer = self.ask("encode", {"texts": [asdict(text) for text in texts]}, self._timeout_s)
        return answer["prompts"], answer["continued"]

    def memory_speed(self) -> float:
        """Gigabytes of weights that a product reads in a second from the memory. Raises SpecmambaError likewise."""
        return float(self.ask("memory_speed", {}, self._timeout_s)["gb_per_s"])

    def ask(self, name: str, arguments: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Call a method of ``worker.Worker``, and wait for what it returns.

        Raises:
            SpecmambaError: the answer is an error or late, or the process ended; the message has its last line.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({name: arguments}).encode() + b"\n")
            self._process.stdin.flush()
            line = self._read_line(time.monotonic() + timeout_s)
        except OSError:
            line = b""
        if not line:
            raise SpecmambaError(f"the process of an engine ended: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise SpecmambaError(answer["error"])
        return answer

    def end(self) -> None:
        """Kill the process, also in the middle of a batch."""
        self._process.kill()
        self._process.communicate()

    def _read_line(self, deadline: float) -> bytes:
        """The next line of the output, with its end; empty after the end of the process."""
        assert self._process.stdout is not None
        parts: list[bytes] = []
        while not (parts and parts[-1].endswith(b"\n")):
            if not select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise SpecmambaError("an engine gave no answer in time (--startup-timeout, --answer-timeout)")
            part = os.read(self._process.stdout.fileno(), 1 << 16)
            if not part:
                return b""
            parts.append(part)
        return b"".join(parts)

    def _last_words(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        text = os.pread(self._log.fileno(), _LOG_BYTES, max(0, size - _LOG_BYTES)).decode("utf8", "replace")
        lines = [line for line in text.splitlines() if line.strip()]
        return lines[-1] if lines else "it said nothing"


@contextmanager
def started_engine(
    flags: dict[str, Any], startup_timeout_s: float, answer_timeout_s: float, command: Sequence[str] | None = None
) -> Iterator[EngineProcess]:
    """Start a process and load an engine in it; the process ends with the context.

    Args:
        flags: the keywords of ``LLM``.
        startup_timeout_s: seconds that loading may take.
        answer_timeout_s: seconds that a batch may take.
        command: of a process with another ``Worker``; None: ``WORKER``.

    Raises:
        SpecmambaError: the engine cannot be loaded.
    """
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command or WORKER,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=_environment(),
            start_new_session=True,  # Ctrl-C reaches the benchmark only, which then ends the process
        )
        engine = EngineProcess(process, log, answer_timeout_s)
        try:
            engine.facts = engine.ask("load", {"flags": flags}, startup_timeout_s)
            yield engine
        finally:
            engine.end()


def _environment() -> dict[str, str]:
    """This process's environment without the engine's flags: all of them are keywords."""
    flags = {f"SPECMAMBA_{name.upper()}" for name in EngineConfig.model_fields}
    return {name: value for name, value in os.environ.items() if name not in flags} | {"PYTHONPATH": python_path()}
