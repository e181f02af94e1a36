"""The Python interface: ``LLM`` continues prompts in this process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from numbers import Integral
from typing import Any, Self

from pydantic import ValidationError

from specmamba.command_line import describe_validation_error
from specmamba.config import EngineConfig
from specmamba.core import OutputDelta, RequestOutput
from specmamba.engine.engine import Engine
from specmamba.engine.workbench import Workbench
from specmamba.errors import ConfigError, RequestError
from specmamba.grammar import CompiledGrammar, GrammarCompiler
from specmamba.sampling_params import GrammarSpec, SamplingParams

Prompt = str | Sequence[int]

GRAMMAR_TIMEOUT_S, GRAMMAR_CACHE_BYTES = 30.0, 256 << 20


class LLM:
    """A model in this process that continues prompts.

    Use it from one thread only, and close it, or use it as a context manager::

        with LLM(model="./my-model", speculative_algorithm="mtp") as llm:
            outputs = llm.generate(["def main():", "class A"], SamplingParams(max_tokens=64))
    """

    def __init__(self, **flags: Any) -> None:
        """Load the model and allocate its memory.

        Args:
            flags: the fields of ``EngineConfig``, which are the flags of the command line
                (``--speculative-num-steps 4`` is ``speculative_num_steps=4``). Without ``model`` the bundled demo is
                loaded.

        Raises:
            ConfigError: a flag is unknown or has an invalid value.
            SpecmambaError: the checkpoint cannot be loaded, or the memory does not suffice; the message says why.
        """
        try:
            config = EngineConfig(**flags)
        except ValidationError as error:
            raise ConfigError(describe_validation_error(error)) from None
        self.engine = Engine(config)
        self._grammars: GrammarCompiler | None = None
        self._num_calls = 0
        self._undelivered: dict[str, deque[OutputDelta]] = {}  # of every open request

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        replay: Sequence[Sequence[int]] | None = None,
        extra_key: str | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts, batched continuously.

        Args:
            prompts: one prompt or several; a prompt is a text or a list of token ids.
            sampling_params: for all prompts, or a sequence with one for each; by default ``SamplingParams()``.
            replay: for each prompt, token ids that are used as output instead of chosen tokens, as far as they go. The
                speculation figures then say how drafts are accepted on this text.
            extra_key: cached prefixes are shared among prompts of the same key only.

        Returns:
            One output per prompt, in the order of the prompts.

        Raises:
            RequestError: a prompt is empty, too long, or has a token that is not in the vocabulary; the numbers of
                prompts and of sampling parameters (or replays) differ; or a grammar cannot be used. No prompt is run
                then.
        """
        token_ids = [self._encode(prompt) for prompt in _as_list(prompts)]
        params = _one_each(sampling_params, len(token_ids))
        replays = [()] * len(token_ids) if replay is None else [tuple(tokens) for tokens in replay]
        if len(replays) != len(token_ids):
            raise RequestError(f"{len(replays)} replays were given for {len(token_ids)} prompts")
        for ids, own, forced in zip(token_ids, params, replays, strict=True):
            self.engine.check_prompt(ids, own.max_tokens)
            self.engine.check_tokens(forced, "replay")
            self.engine.check_tokens(own.logit_bias, "logit_bias")
        grammars = self._compile(params)
        self._num_calls += 1
        names = [f"generate-{self._num_calls}-{i}" for i in range(len(token_ids))]
        add = partial(self.engine.add_request, extra_key=extra_key)
        requests = {
            name: partial(add, name, ids, own, forced, grammar=grammars.get(own.grammar))
            for name, ids, own, forced in zip(names, token_ids, params, replays, strict=True)
        }
        deltas: dict[str, list[OutputDelta]] = {name: [] for name in names}
        for delta in self._run(requests):
            deltas[delta.request_id].append(delta)
        return [_output(ids, deltas[name]) for name, ids in zip(names, token_ids, strict=True)]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, extra_key: str | None = None
    ) -> Iterator[OutputDelta]:
        """Continue one prompt, piece by piece.

        Args:
            prompt: a text or a list of token ids.
            sampling_params: by default ``SamplingParams()``.
            extra_key: cached prefixes are shared among prompts of the same key only.

        Yields:
            The deltas of the output; the last one has a ``finish_reason``. Closing the iterator early aborts the
            request.

        Raises:
            RequestError: the prompt is empty, too long, or has a token that is not in the vocabulary, or the grammar
                cannot be used.
        """
        self._num_calls += 1
        params = sampling_params or SamplingParams()
        grammar = self._compile([params]).get(params.grammar)
        name, ids = f"stream-{self._num_calls}", self._encode(prompt)
        add = partial(self.engine.add_request, name, ids, params, extra_key=extra_key, grammar=grammar)
        yield from self._run({name: add})

    def flush_cache(self) -> int:
        """Evict the cached prefixes that no running request uses. Returns the number of evicted tokens."""
        return self.engine.flush_cache()

    @cached_property
    def workbench(self) -> Workbench:
        """Access for tools that measure and tune: other drafters, ranks of drafts, step times, logits."""
        return Workbench(self.engine)

    def close(self) -> None:
        """Abort running requests and end the grammar compiler. The object cannot be used afterwards."""
        if self._grammars is not None:
            self._grammars.close()
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _encode(self, prompt: object) -> list[int]:
        if isinstance(prompt, str):
            return self.engine.tokenizer.encode(prompt)
        tokens: list[Any] | None = list(prompt) if isinstance(prompt, Iterable) else None
        if tokens is None or not all(map(_is_token, tokens)):
            raise RequestError(f"a prompt is a text or a list of token ids, not {prompt!r:.80}", "prompt")
        return [int(token) for token in tokens]

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
        if self._grammars is None:
            self._grammars = _grammar_compiler(self.engine)
        return {spec: self._grammars.compile(spec).result() for spec in specs}  # the queue is limited

    def _run(self, requests: Mapping[str, Callable[[], None]]) -> Iterator[OutputDelta]:
        """Add requests to the engine, given by name, as far as its queue has room, and step it until they have ended.

        Yields their deltas. Several calls may be open at a time; each steps the engine when it has no delta to yield.
        """
        names, waiting = list(requests), list(requests.values())[::-1]
        unfinished = set(names)
        self._undelivered.update({name: deque() for name in names})
        try:
            while unfinished and (waiting or self.engine.has_unfinished_requests or self._has_deltas(names)):
                while waiting and len(self.engine.scheduler.waiting) < self.engine.config.max_queued_requests:
                    waiting.pop()()
                if not self._has_deltas(names):
                    self._step()
                for delta in self._take(names):
                    if delta.finish_reason is not None:
                        unfinished.discard(delta.request_id)
                    yield delta
        finally:
            for name in names:
                self.engine.abort(name)
                del self._undelivered[name]

    def _step(self) -> None:
        for delta in self.engine.step():
            if delta.request_id in self._undelivered:  # else the request was added to the engine directly
                self._undelivered[delta.request_id].append(delta)

    def _has_deltas(self, names: Sequence[str]) -> bool:
        return any(self._undelivered[name] for name in names)

    def _take(self, names: Sequence[str]) -> Iterator[OutputDelta]:
        for name in names:
            while self._undelivered[name]:
                yield self._undelivered[name].popleft()


def _grammar_compiler(engine: Engine) -> GrammarCompiler:
    try:
        return GrammarCompiler(
            engine.tokenizer, engine.vocab_size, engine.eos_token_ids, GRAMMAR_TIMEOUT_S, GRAMMAR_CACHE_BYTES
        )
    except ImportError as error:
        raise RequestError(str(error), "grammar") from None


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    items: list[Any] = list(prompts)
    return [items] if items and all(map(_is_token, items)) else items


def _is_token(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)  # includes the integers of NumPy


def _one_each(sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params or SamplingParams()] * count
    if len(sampling_params) != count:
        raise RequestError(f"{len(sampling_params)} sampling parameters were given for {count} prompts")
    return list(sampling_params)


def _output(prompt: list[int], deltas: list[OutputDelta]) -> RequestOutput:
    last = deltas[-1]
    return RequestOutput(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        prompt_token_ids=tuple(prompt),
        finish_reason=last.finish_reason or "abort",
        num_cached_tokens=last.num_cached_tokens,
        spec=last.spec,
        error=last.error,
        logprobs=tuple(logprob for delta in deltas for logprob in delta.logprobs),
        prompt_logprobs=next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None), None),
    )
