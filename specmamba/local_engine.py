"""What ``LLM`` and ``AsyncLLM`` share: an engine in this process on a thread of its own, and requests for it."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import torch

from specmamba.calls.collector import Call, OnDelta
from specmamba.calls.given_prompts import GivenPrompt, Message
from specmamba.config import EngineConfig
from specmamba.core import RequestOutput
from specmamba.engine.channels import EngineRequest
from specmamba.engine.engine import Engine
from specmamba.engine.loading import process_threads
from specmamba.engine.mirror.start import build_engine
from specmamba.engine.thread import EngineThread
from specmamba.errors import EngineFailedError, EngineStoppedError, RequestError, SpecmambaError
from specmamba.flags.keywords import config_of, in_keywords
from specmamba.grammar import CompiledGrammar, GrammarCompiler
from specmamba.sampling_params import GrammarSpec, SamplingParams

GRAMMAR_TIMEOUT_S, GRAMMAR_CACHE_BYTES = 30.0, 256 << 20
ABORT_TIMEOUT_S = 10.0
WAKE_INTERVAL_S = 0.05  # that tokens of a stream wait for the next, on an event loop


class LocalEngine:
    """An engine and its thread. Safe to use from any thread.

    ``engine`` itself may be used, by one thread, while no request runs.
    """

    def __init__(self, flags: Mapping[str, Any], is_stepped_here: bool) -> None:
        """Load the model.

        Args:
            flags: fields of ``EngineConfig``.
            is_stepped_here: the caller's thread may step ``engine`` too. It keeps the engine's number of PyTorch's
                threads, which is a setting of each thread, until it calls ``close``.

        Raises:
            ConfigError, SpecmambaError: as ``LLM``.
        """
        config = config_of(flags)
        before = torch.get_num_threads()
        self._stepper = threading.get_ident() if is_stepped_here else None
        try:
            # built here and not in the thread, so that Ctrl-C ends a load
            self.engine = _build(config)
        except BaseException:
            torch.set_num_threads(before)
            raise
        self.thread = EngineThread(_handing_over(self.engine), WAKE_INTERVAL_S, what="this model")
        self.thread.start()
        if not is_stepped_here:
            torch.set_num_threads(before)
        self._lock = threading.Lock()  # guards the field below
        self._grammars: list[GrammarCompiler] = []  # one at the most
        # also at exit: a thread that still runs native code when the interpreter ends would abort the process
        self._end = weakref.finalize(self, _end, self.thread, self._grammars)
        self._numbers = itertools.count(1)

    def prepare(
        self,
        prompts: Sequence[GivenPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        extra_key: str | None,
        replay: Sequence[Sequence[int]] | None = None,
    ) -> list[Call]:
        """Encode and check the prompts of a call, and compile its grammars, which takes time.

        Returns:
            The ``n`` continuations of every prompt, side by side.

        Raises:
            RequestError: as ``LLM.generate``.
            EngineStoppedError: closed.
        """
        self._require_open()
        token_ids = [self._encode(prompt.content) for prompt in prompts]
        params = _one_each(sampling_params, len(token_ids))
        replays = [()] * len(token_ids) if replay is None else [tuple(tokens) for tokens in replay]
        if len(replays) != len(token_ids):
            raise RequestError(f"{len(replays)} replays were given for {len(token_ids)} prompts")
        encoded = {id(own): self.engine.encode_prediction(own) for own in {id(own): own for own in params}.values()}
        predictions = [encoded[id(own)] for own in params]  # many prompts may share one long text
        for ids, own, forced, predicted in zip(token_ids, params, replays, predictions, strict=True):
            self.engine.check_request(ids, own, forced)
            self.engine.check_prediction(predicted, own)
        grammars = self._compile(params)
        keys = [prompt.prefix_key(extra_key) for prompt in prompts]
        parts = zip(token_ids, params, replays, keys, predictions, strict=True)
        return [
            Call(ids, own.of_choice(i), forced, key, grammars.get(own.grammar), i, predicted)
            for ids, own, forced, key, predicted in parts
            for i in range(own.n)
        ]

    def prepare_stream(
        self, prompt: GivenPrompt, sampling_params: SamplingParams | None, extra_key: str | None
    ) -> list[Call]:
        """Prepare the calls of a stream, one for each continuation of its prompt.

        Raises RequestError as ``LLM.stream``, EngineStoppedError.
        """
        if sampling_params is not None and not isinstance(sampling_params, SamplingParams):
            raise RequestError(
                f"a stream is of one prompt and has one SamplingParams(...), not {sampling_params!r:.80}",
                "sampling_params",
            )
        return self.prepare([prompt], sampling_params, extra_key)

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
    ) -> GivenPrompt:
        """The prompt that the chat template makes of a conversation. Raises RequestError as ``LLM.chat``."""
        return GivenPrompt(self.engine.tokenizer.apply_chat_template(messages, tools, variables))

    def requests(self, calls: Sequence[Call], sinks: Iterable[OnDelta]) -> list[EngineRequest]:
        """The engine requests of calls, each with the function that gets its deltas on the engine thread."""
        number = next(self._numbers)
        return [
            EngineRequest(
                f"call-{number}-{i}",
                call.prompt,
                call.params,
                sink,
                call.prefix_key,
                call.grammar,
                forced_output_ids=call.replay,
                predicted_ids=call.predicted,
            )
            for i, (call, sink) in enumerate(zip(calls, sinks, strict=True))
        ]

    def submit(self, requests: Sequence[EngineRequest]) -> Future[None]:
        """Run requests, which wait as long as the engine's queue is full. Does not block.

        Every request gets a last delta, unless the future raises.

        Raises:
            EngineStoppedError: closed, or failed (also through the future).
        """
        self._require_open()
        return self.thread.submit(requests, may_wait=True)

    def abort(self, requests: Iterable[EngineRequest], wait: bool = False) -> None:
        """End requests; with ``wait``, their memory is free on return, unless a step takes very long.

        Garbage collection may call this for a stream: on the engine thread, or while its thread holds a lock that the
        engine waits for. So it does not wait there, nor without a limit.
        """
        self.thread.abort(request.request_id for request in requests)
        if wait and not self.thread.is_current:
            with suppress(EngineStoppedError, TimeoutError):
                self.thread.call(lambda _: None).result(ABORT_TIMEOUT_S)

    def check_failure(self) -> None:
        """Raise EngineFailedError, caused by what ended the engine, if it has failed."""
        if (failed := self.thread.failed) is not None:
            raise EngineFailedError(f"the engine failed: {type(failed).__name__}: {failed}") from failed

    def checked(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Give outputs back. Raises EngineFailedError if the engine has failed before all of them were complete."""
        if any(one.finish_reason == "error" for output in outputs for one in output.outputs):
            self.check_failure()
        return outputs

    def flush_cache(self) -> int:
        """Evict the cached prefixes that no request uses. Returns the number of evicted tokens."""
        self._require_open()
        flushed: int = self.thread.call(lambda engine: engine.flush_cache()).result()
        return flushed

    def close(self) -> None:
        """Abort what runs, and end the thread and the grammar compiler."""
        with self._lock:
            if self._end.alive:
                self._end()
                if self._stepper == threading.get_ident():  # the engine's thread has restored its own number
                    torch.set_num_threads(process_threads())

    def _require_open(self) -> None:
        if not self._end.alive:
            raise EngineStoppedError("this model is closed: make another one")

    def _encode(self, content: str | list[int]) -> list[int]:
        return self.engine.tokenizer.encode(content) if isinstance(content, str) else content

    def _compile(self, params: Sequence[SamplingParams]) -> dict[GrammarSpec | None, CompiledGrammar]:
        """The compiled grammars of these requests, each compiled once.

        Raises:
            RequestError: a grammar cannot be compiled, or is combined with ``ignore_eos``.
        """
        specs = dict.fromkeys(own.grammar for own in params if own.grammar is not None)
        if not specs:
            return {}
        if any(own.grammar is not None and own.ignore_eos for own in params):
            raise RequestError("ignore_eos cannot be used with a grammar: nothing follows where it ends", "ignore_eos")
        with self._lock:
            self._require_open()
            if not self._grammars:
                self._grammars.append(_grammar_compiler(self.engine))
            compiler = self._grammars[0]
        return {spec: compiler.compile(spec).result() for spec in specs}  # the queue is limited


def _build(config: EngineConfig) -> Engine:
    """The engine; errors that speak of flags speak of keywords here."""
    try:
        return build_engine(config)
    except SpecmambaError as error:
        in_keywords(error)
        raise


def _handing_over(engine: Engine) -> Callable[[], Engine]:
    """What the engine's thread calls for the engine.

    PyTorch's number of threads and the present CUDA device are settings of each thread.
    """
    number = torch.get_num_threads()
    index = torch.cuda.current_device() if engine.device.type == "cuda" else None

    def take() -> Engine:
        torch.get_num_threads()  # the first one in a thread sets what was set last in any, perhaps for another engine
        torch.set_num_threads(number)
        if index is not None:
            torch.cuda.set_device(index)
        return engine

    return take


def _end(thread: EngineThread, grammars: list[GrammarCompiler]) -> None:
    thread.shutdown(0.0)
    while grammars:
        grammars.pop().close()


def _grammar_compiler(engine: Engine) -> GrammarCompiler:
    try:
        return GrammarCompiler(
            engine.tokenizer, engine.vocab_size, engine.eos_token_ids, GRAMMAR_TIMEOUT_S, GRAMMAR_CACHE_BYTES
        )
    except ImportError as error:
        raise RequestError(str(error), "grammar") from None


def _one_each(sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params or SamplingParams()] * count
    given: object = sampling_params
    if not isinstance(given, Sequence) or not all(isinstance(one, SamplingParams) for one in given):
        raise RequestError(f"sampling_params are SamplingParams(...), not {sampling_params!r:.80}", "sampling_params")
    if len(sampling_params) != count:
        raise RequestError(f"{len(sampling_params)} sampling parameters were given for {count} prompts")
    return list(sampling_params)
