"""The Python interface: prompts in, texts out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from numbers import Integral
from types import TracebackType
from typing import Any, NamedTuple, Self

from pydantic import ValidationError

from specmamba.command_line import describe_validation_error
from specmamba.config import EngineConfig
from specmamba.core import GrammarSpec, OutputDelta, RequestOutput, SamplingParams
from specmamba.engine.engine import Engine
from specmamba.engine.workbench import Workbench
from specmamba.errors import ConfigError, RequestError
from specmamba.grammar import CompiledGrammar, GrammarCompiler

Prompt = str | Sequence[int]

GRAMMAR_TIMEOUT_S, GRAMMAR_CACHE_BYTES = 30.0, 256 << 20


class LLM:
    """A model that answers batches of prompts.

    Keyword arguments are the command line's flags: ``LLM(model="...", speculative_algorithm="mtp")``.

    Raises:
        SpecmambaError: a flag, the checkpoint or the memory does not allow to start; the message says which.
    """

    def __init__(self, **flags: Any) -> None:
        try:
            config = EngineConfig(**flags)
        except ValidationError as error:
            raise ConfigError(describe_validation_error(error)) from None
        self.engine = Engine(config)
        self._grammars: GrammarCompiler | None = None
        self._num_calls = 0
        self._inboxes: dict[str, deque[OutputDelta]] = {}  # of every open request, whichever call steps the engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        replay: Sequence[Sequence[int]] | None = None,
        extra_key: str | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts (texts or lists of token ids), batched continuously; answers in the order of the prompts.

        With ``replay``, a list of token ids for each prompt, the output is these tokens as far as they go, and the
        speculation figures say how drafts would have fared on them: acceptance on a given text.

        Prefixes that earlier prompts of the same ``extra_key`` have left in the cache are not computed again.

        Raises:
            RequestError: a prompt is empty, too long, or has a token that is not in the vocabulary, the numbers of
                prompts and sampling parameters (or replays) differ, or a grammar cannot be used. Nothing is run then.
        """
        token_ids = [self._encode(prompt) for prompt in _as_list(prompts)]
        params = _one_each(sampling_params, len(token_ids))
        replays = [()] * len(token_ids) if replay is None else [tuple(tokens) for tokens in replay]
        if len(replays) != len(token_ids):
            raise RequestError(f"{len(replays)} replays were given for {len(token_ids)} prompts")
        for ids, own, replayed in zip(token_ids, params, replays, strict=True):
            self.engine.check_prompt(ids, own.max_tokens)
            self.engine.check_tokens(replayed, "replay")
            self.engine.check_tokens(own.logit_bias, "logit_bias")
        grammars = self._compile(params)
        self._num_calls += 1
        names = [f"generate-{self._num_calls}-{i}" for i in range(len(token_ids))]
        deltas: dict[str, list[OutputDelta]] = {name: [] for name in names}
        for delta in self._run(
            [
                _Ask(name, ids, own, replayed, extra_key, grammars.get(own.grammar))
                for name, ids, own, replayed in zip(names, token_ids, params, replays, strict=True)
            ]
        ):
            deltas[delta.request_id].append(delta)
        return [_output(ids, deltas[name]) for name, ids in zip(names, token_ids, strict=True)]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, extra_key: str | None = None
    ) -> Iterator[OutputDelta]:
        """Answer one prompt piece by piece. Leaving the iterator early aborts the request.

        Raises:
            RequestError: the prompt is empty, too long, or has a token that is not in the vocabulary, or the grammar
                cannot be used.
        """
        self._num_calls += 1
        params = sampling_params or SamplingParams()
        grammar = self._compile([params]).get(params.grammar)
        yield from self._run([_Ask(f"stream-{self._num_calls}", self._encode(prompt), params, (), extra_key, grammar)])

    def flush_cache(self) -> int:
        """Forget cached prefixes that no running request stands on; the number of tokens that were forgotten."""
        return self.engine.flush_cache()

    @property
    def workbench(self) -> Workbench:
        """For tools that measure and tune: drafts in other ways, ranks, times, logits."""
        return Workbench(self.engine)

    def close(self) -> None:
        """Drop whatever still runs. The object is of no use afterwards."""
        if self._grammars is not None:
            self._grammars.close()
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _encode(self, prompt: object) -> list[int]:
        if isinstance(prompt, str):
            return self.engine.tokenizer.encode(prompt)
        tokens: list[Any] | None = list(prompt) if isinstance(prompt, Iterable) else None
        if tokens is None or not all(map(_is_token, tokens)):
            raise RequestError(f"a prompt is a text or a list of token ids, not {prompt!r:.80}", "prompt")
        return [int(token) for token in tokens]

    def _compile(self, params: Sequence[SamplingParams]) -> dict[GrammarSpec | None, CompiledGrammar]:
        """The grammars of these requests, each compiled once. Raises RequestError."""
        specs = dict.fromkeys(own.grammar for own in params if own.grammar is not None)
        if not specs:
            return {}
        if any(own.grammar is not None and own.ignore_eos for own in params):
            raise RequestError("ignore_eos cannot be used with a grammar: nothing follows where it ends", "ignore_eos")
        if self._grammars is None:
            self._grammars = _grammar_compiler(self.engine)
        return {spec: self._grammars.compile(spec).result() for spec in specs}  # one by one: the queue has a bound

    def _run(self, requests: list[_Ask]) -> Iterator[OutputDelta]:
        waiting, names = requests[::-1], [request.name for request in requests]
        unfinished = set(names)
        self._inboxes.update({name: deque() for name in names})
        try:
            while unfinished and (waiting or self.engine.has_unfinished_requests or self._has_mail(names)):
                while waiting and len(self.engine.scheduler.waiting) < self.engine.config.max_queued_requests:
                    self.engine.add_request(*waiting.pop())
                if not self._has_mail(names):
                    self._step()
                for delta in self._take(names):
                    if delta.finish_reason is not None:
                        unfinished.discard(delta.request_id)
                    yield delta
        finally:
            for name in names:
                self.engine.abort(name)
                del self._inboxes[name]

    def _step(self) -> None:
        for delta in self.engine.step():
            if delta.request_id in self._inboxes:  # else it was put into the engine by other means
                self._inboxes[delta.request_id].append(delta)

    def _has_mail(self, names: Sequence[str]) -> bool:
        return any(self._inboxes[name] for name in names)

    def _take(self, names: Sequence[str]) -> Iterator[OutputDelta]:
        for name in names:
            while self._inboxes[name]:
                yield self._inboxes[name].popleft()


class _Ask(NamedTuple):
    """What ``Engine.add_request`` is given."""

    name: str
    token_ids: list[int]
    params: SamplingParams
    replay: tuple[int, ...]
    extra_key: str | None
    grammar: CompiledGrammar | None


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
    return isinstance(value, Integral) and not isinstance(value, bool)  # NumPy's integers are integers too


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
