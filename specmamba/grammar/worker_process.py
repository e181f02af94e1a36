"""The parent's side of the process that compiles grammars."""

from __future__ import annotations

from collections.abc import Callable

from specmamba.errors import RequestError
from specmamba.processes.child_process import ChildProcess, NoAnswerError
from specmamba.sampling_params import GrammarSpec

MEMORY_BYTES, MAX_ANSWER_BYTES = 2 << 30, 256 << 20


class WorkerProcess:
    """A process that compiles. It is started for the first request, and again after it has died."""

    def __init__(self, vocabulary: bytes, timeout_s: float) -> None:
        """``vocabulary``: as serialized by xgrammar, one line."""
        self._child = ChildProcess("specmamba.grammar.worker", MEMORY_BYTES, MAX_ANSWER_BYTES, vocabulary)
        self._timeout_s = timeout_s
        self.abandon, self.close, self.reap = self._child.abandon, self._child.close, self._child.reap

    @property
    def pid(self) -> int | None:
        """The id of the process, or None before it was started."""
        return self._child.pid

    def compile(self, spec: GrammarSpec, is_wanted: Callable[[], bool] = lambda: True) -> str:
        """Compile a specification; gives the compiled grammar as serialized by xgrammar.

        Raises:
            RequestError: the specification is wrong, takes too long (caused by TimeoutError) or too much memory, or is
                no longer wanted.
            OSError: the process cannot be started.
        """
        request = spec.model_dump_json().encode() + b"\n"
        try:
            header, payload = self._child.ask(request, self._timeout_s, is_wanted)
        except NoAnswerError as error:
            raise self._failure(error.reason) from (TimeoutError() if error.reason == "late" else None)
        if "error" in header:
            cause = TimeoutError() if header.get("is_slow") else None
            raise RequestError(str(header["error"]), "grammar") from cause
        return payload.decode()

    def _failure(self, reason: str) -> RequestError:
        if reason == "late":
            message = f"the grammar takes more than {self._timeout_s:g} s to compile: make it smaller"
        elif reason == "too_large":
            message = "the compiled grammar is too large: make it smaller"
        else:
            message = "the grammar could not be compiled: it needs too much memory, or nests too deep"
        return RequestError(message, "grammar")
