"""From a schema, an expression or rules to what a matcher walks."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from specmamba.core import GrammarSpec
from specmamba.errors import EngineStoppedError, GrammarQueueFullError, RequestError, SpecmambaError
from specmamba.grammar.compiled import CompiledGrammar, GrammarCache, copy_of
from specmamba.grammar.vocabulary import token_bytes
from specmamba.grammar.worker_process import WorkerProcess

if TYPE_CHECKING:
    from specmamba.models.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MAX_WAITING = 64  # specifications, however many requests wait for each


class GrammarCompiler:
    """Compiles off the caller's thread, keeps what it has compiled, and gives up after a time.

    The work is done in a process of its own, one specification after the other, started by the first one: what takes
    too long or too much memory, or crashes, ends that process and nothing else. ``cache_bytes`` bounds the memory of
    compiled grammars that are kept, by least recent use. Safe to use from any thread.

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
        self._lock = threading.Lock()
        self._is_closed = False
        self._waiting: dict[GrammarSpec, list[Future[CompiledGrammar]]] = {}
        self._jobs: queue.SimpleQueue[GrammarSpec | None] = queue.SimpleQueue()
        self._worker: WorkerProcess | None = None
        self._tokenizer_info: Any = None
        self._thread: threading.Thread | None = None

    @property
    def worker_pid(self) -> int | None:
        """The process that compiles, once there is one."""
        return None if self._worker is None else self._worker.pid

    def compile(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        """The grammar of a specification, at once where it is known already.

        The future raises:
            RequestError: the specification is wrong, unsupported, or takes too long to compile (caused by TimeoutError
                then); the model has no end-of-text token.
            GrammarQueueFullError: too many wait already.
            EngineStoppedError: the compiler was closed.
        """
        future: Future[CompiledGrammar] = Future()
        with self._lock:
            error = self._refusal(spec)
            if error is not None:
                future.set_exception(error)
            elif isinstance(known := self._cache.get(spec), CompiledGrammar):
                future.set_result(known)
            elif known is not None:
                future.set_exception(copy_of(known))
            else:
                self._wait(spec, future)
        return future

    def close(self) -> None:
        """End what still compiles. Whoever waits gets EngineStoppedError."""
        with self._lock:
            self._is_closed = True
            thread, worker = self._thread, self._worker
        self._jobs.put(None)
        if worker is not None:
            worker.close()
        if thread is not None:
            thread.join()

    def _refusal(self, spec: GrammarSpec) -> SpecmambaError | None:
        if self._is_closed:
            return EngineStoppedError("no more grammars are compiled: the server is stopping")
        if not self._eos_token_ids:
            return RequestError(
                "this model has no end-of-text token, so no structured output of it could end", "grammar"
            )
        if spec not in self._waiting and len(self._waiting) >= MAX_WAITING:
            return GrammarQueueFullError(len(self._waiting))
        return None

    def _wait(self, spec: GrammarSpec, future: Future[CompiledGrammar]) -> None:
        if spec in self._waiting:
            self._waiting[spec].append(future)
            return
        self._waiting[spec] = [future]
        self._jobs.put(spec)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="grammar-compiler", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (spec := self._jobs.get()) is not None and not self._is_closed:
            with self._lock:
                is_wanted = not all(future.cancelled() for future in self._waiting[spec])
                if not is_wanted:
                    del self._waiting[spec]
            if is_wanted:
                self._finish(spec)
        if self._worker is not None:
            self._worker.reap()
        with self._lock:
            futures = [future for waiting in self._waiting.values() for future in waiting]
            self._waiting.clear()
        for future in futures:
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineStoppedError("the server stopped before the grammar was compiled"))

    def _finish(self, spec: GrammarSpec) -> None:
        outcome = self._outcome(spec)
        with self._lock:
            if self._is_closed:
                return  # everybody who waits is told so
            futures = self._waiting.pop(spec)
            self._cache.add(spec, outcome)
        for future in futures:
            if not future.set_running_or_notify_cancel():
                continue
            if isinstance(outcome, CompiledGrammar):
                future.set_result(outcome)
            else:
                future.set_exception(copy_of(outcome))

    def _outcome(self, spec: GrammarSpec) -> CompiledGrammar | RequestError:
        try:
            return self._compile(spec)
        except RequestError as error:
            return error
        except Exception as error:  # the end of this specification, which must not be the thread's
            logger.warning("a grammar could not be compiled", exc_info=True)
            failure = RequestError(f"the grammar could not be compiled: {type(error).__name__}: {error}", "grammar")
            failure.__cause__ = error
            return failure

    def _compile(self, spec: GrammarSpec) -> CompiledGrammar:
        import xgrammar

        if self._worker is None:
            self._tokenizer_info = xgrammar.TokenizerInfo(
                token_bytes(self._tokenizer, self._vocab_size),
                vocab_size=self._vocab_size,
                stop_token_ids=self._eos_token_ids,
            )
            line = self._tokenizer_info.serialize_json().encode() + b"\n"
            with self._lock:
                self._worker = WorkerProcess(line, self._timeout_s)
                if self._is_closed:
                    self._worker.close()
        text = self._worker.compile(spec)
        compiled = xgrammar.CompiledGrammar.deserialize_json(text, self._tokenizer_info)
        return CompiledGrammar(spec, compiled, len(text))
