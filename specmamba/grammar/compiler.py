"""Compilation of schemas, regular expressions and rules to grammars, off the caller's thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from specmamba.errors import EngineStoppedError, GrammarQueueFullError, RequestError, SpecmambaError
from specmamba.grammar.checks import too_complex
from specmamba.grammar.compilations import (
    MAX_WAITING,
    MAX_WAITING_OF_CALLER,
    CompiledGrammar,
    GrammarCache,
    Job,
    Jobs,
    copy_of,
)
from specmamba.grammar.worker_process import WorkerProcess
from specmamba.sampling_params import GrammarSpec

if TYPE_CHECKING:
    from specmamba.models.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class GrammarCompiler:
    """Compiles specifications off the caller's thread, with a time limit and a cache.

    A separate process, started for the first specification, compiles one after the other. A specification that takes
    too long or too much memory, or crashes, ends that process only. ``cache_bytes`` bounds the memory of cached
    grammars; the least recently used are dropped. Safe to use from any thread.

    Raises:
        ImportError: xgrammar is not installed.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int], timeout_s: float, cache_bytes: int
    ) -> None:
        if find_spec("xgrammar") is None:
            raise ImportError("structured output needs xgrammar: pip install 'specmamba[grammar]'")
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_token_ids = [token for token in eos_token_ids if token < vocab_size]
        self._timeout_s = timeout_s
        self._cache = GrammarCache(cache_bytes)
        self._changed = threading.Condition()  # guards the fields below
        self._is_closed = False
        self._jobs = Jobs()
        self._running: Job | None = None
        self._worker: WorkerProcess | None = None
        self._tokenizer_info: Any = None
        self._thread: threading.Thread | None = None

    @property
    def worker_pid(self) -> int | None:
        """The id of the process that compiles, or None before it was started."""
        return None if self._worker is None else self._worker.pid

    def compile(self, spec: GrammarSpec, caller: str | None = None) -> Future[CompiledGrammar]:
        """Compile a specification; the future has its result at once where the cache has it.

        Callers take turns, and only ``MAX_WAITING_OF_CALLER`` specifications of one caller may wait (of None: any
        number). When all futures of a specification are cancelled, its compilation is stopped.

        The future raises:
            RequestError: the specification is wrong, unsupported, or too complex (caused by TimeoutError); the
                model has no end-of-text token.
            GrammarQueueFullError: too many specifications wait.
            EngineStoppedError: the compiler was closed.
        """
        future: Future[CompiledGrammar] = Future()
        with self._changed:
            error = self._refusal(spec, caller)
            if error is not None:
                future.set_exception(error)
            elif isinstance(known := self._cache.get(spec), CompiledGrammar):
                future.set_result(known)
            elif known is not None:
                future.set_exception(copy_of(known))
            else:
                self._wait(spec, caller, future)
        return future

    def refuse(self, spec: GrammarSpec) -> None:
        """Refuse a specification for ``RETRY_S``, because its masks took too long while a request was running."""
        with self._changed:
            self._cache.refuse(spec, too_complex())

    def close(self) -> None:
        """Stop compiling. All pending futures raise EngineStoppedError."""
        with self._changed:
            self._is_closed = True
            thread, worker = self._thread, self._worker
            self._changed.notify_all()
        if worker is not None:
            worker.close()
        if thread is not None:
            thread.join()

    def _refusal(self, spec: GrammarSpec, caller: str | None) -> SpecmambaError | None:
        if self._is_closed:
            return EngineStoppedError("no more grammars are compiled: the server is stopping")
        if not self._eos_token_ids:
            return RequestError(
                "this model has no end-of-text token, so no structured output of it could end", "grammar"
            )
        if self._jobs.find(spec) is None:
            of_caller = 0 if caller is None else self._jobs.num_waiting(caller)
            if len(self._jobs) >= MAX_WAITING or of_caller >= MAX_WAITING_OF_CALLER:
                return GrammarQueueFullError(max(of_caller, len(self._jobs)))
        return None

    def _wait(self, spec: GrammarSpec, caller: str | None, future: Future[CompiledGrammar]) -> None:
        job = self._jobs.find(spec)
        if job is None:
            job = Job(spec, caller)
            self._jobs.add(job)
        job.futures.append(future)
        future.add_done_callback(partial(self._stop_unwanted, job))
        self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="grammar-compiler", daemon=True)
            self._thread.start()

    def _stop_unwanted(self, job: Job, future: Future[CompiledGrammar]) -> None:
        """Stop the compilation of a job whose last future was cancelled."""
        if not future.cancelled():
            return
        with self._changed:
            if job.is_wanted:
                return
            self._jobs.drop(job)
            if self._running is job and self._worker is not None:
                self._worker.abandon()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            self._finish(job)
        if self._worker is not None:
            self._worker.reap()
        with self._changed:
            jobs = self._jobs.drop_all()
        for future in (future for job in jobs for future in job.futures):
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineStoppedError("the server stopped before the grammar was compiled"))

    def _next(self) -> Job | None:
        """Wait for the next job; None once the compiler is closed."""
        with self._changed:
            while not self._is_closed:
                self._running = self._jobs.take()
                if self._running is not None:
                    return self._running
                self._changed.wait()
        return None

    def _finish(self, job: Job) -> None:
        outcome = self._outcome(job)
        with self._changed:
            self._running = None
            if self._is_closed or not job.is_wanted:
                return  # ``_run`` answers pending futures at the end
            self._jobs.drop(job)
            self._cache.add(job.spec, outcome)
        for future in job.futures:
            if not future.set_running_or_notify_cancel():
                continue
            if isinstance(outcome, CompiledGrammar):
                future.set_result(outcome)
            else:
                future.set_exception(copy_of(outcome))

    def _outcome(self, job: Job) -> CompiledGrammar | RequestError:
        try:
            return self._compile(job)
        except RequestError as error:
            return error
        except Exception as error:  # an unexpected error must end this job only, not the thread
            logger.warning("a grammar could not be compiled", exc_info=True)
            failure = RequestError(f"the grammar could not be compiled: {type(error).__name__}: {error}", "grammar")
            failure.__cause__ = error
            return failure

    def _compile(self, job: Job) -> CompiledGrammar:
        if self._worker is None:
            self._tokenizer_info = vocabulary_of(self._tokenizer, self._vocab_size, self._eos_token_ids)
            line = self._tokenizer_info.serialize_json().encode() + b"\n"
            with self._changed:
                self._worker = WorkerProcess(line, self._timeout_s)
                if self._is_closed:
                    self._worker.close()
        text = self._worker.compile(job.spec, lambda: job.is_wanted)
        return CompiledGrammar(job.spec, deserialized(text, self._tokenizer_info), len(text))


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> Any:
    """The vocabulary for which grammars are compiled, xgrammar's ``TokenizerInfo``."""
    import xgrammar

    return xgrammar.TokenizerInfo(
        token_bytes(tokenizer, vocab_size),
        vocab_size=vocab_size,
        stop_token_ids=[token for token in eos_token_ids if token < vocab_size],
    )


def deserialized(text: str, vocabulary: Any) -> Any:
    """A compiled grammar, xgrammar's ``CompiledGrammar``, from its serialized form."""
    import xgrammar

    return xgrammar.CompiledGrammar.deserialize_json(text, vocabulary)


def token_bytes(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    """The bytes of every token id below ``vocab_size``; empty for special tokens and padding, never part of a text."""
    return [_bytes_of(tokenizer, index) for index in range(vocab_size)]


def _bytes_of(tokenizer: Tokenizer, index: int) -> bytes:
    if tokenizer.is_silent(index, skip_special_tokens=True):
        return b""
    return tokenizer.token_bytes(index) or b""
