"""One continuation of a prompt as a call, and what puts the deltas of many together to the outputs of their prompts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from specmamba.core import OutputDelta, RequestOutput
from specmamba.grammar import CompiledGrammar
from specmamba.sampling_params import SamplingParams

OnDelta = Callable[[OutputDelta], None]


@dataclass(frozen=True, slots=True)
class Call:
    """One continuation of a prompt that is ready to run."""

    prompt: list[int]
    params: SamplingParams
    replay: tuple[int, ...]
    prefix_key: str | None
    grammar: CompiledGrammar | None
    index: int = 0  # among those of its prompt, which follow each other
    predicted: Sequence[int] = ()  # ``params.prediction``, encoded


def numbered(call: Call, sink: OnDelta) -> OnDelta:
    """A function that gives the deltas of a call to ``sink``, with its number among the continuations."""
    return sink if call.index == 0 else lambda delta: sink(replace(delta, index=call.index))


class Collector:
    """Takes the deltas of some requests, on the engine thread, and calls a function when all have ended."""

    def __init__(self, calls: Sequence[Call], on_end: Callable[[], object]) -> None:
        self._calls = calls
        self._on_end = on_end
        self._deltas: list[list[OutputDelta]] = [[] for _ in calls]
        self._num_open = len(calls)

    def sinks(self) -> list[OnDelta]:
        """One function for each request."""
        return [self._sink(deltas) for deltas in self._deltas]

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    @property
    def num_ended(self) -> int:
        """Calls that have ended; any thread may ask."""
        return len(self._calls) - self._num_open

    @property
    def num_tokens(self) -> int:
        """Output tokens so far; any thread may ask."""
        return sum(deltas[-1].num_output_tokens for deltas in self._deltas if deltas)

    def outputs(self) -> list[RequestOutput]:
        """The outputs of the prompts, once all have ended."""
        outputs = [_output(call, deltas) for call, deltas in zip(self._calls, self._deltas, strict=True)]
        firsts = [place for place, output in enumerate(outputs) if output.index == 0]
        return [_joined(outputs[here:after]) for here, after in itertools.pairwise([*firsts, len(outputs)])]

    def _sink(self, deltas: list[OutputDelta]) -> OnDelta:
        def take(delta: OutputDelta) -> None:
            deltas.append(delta)
            if delta.finish_reason is not None:
                self._num_open -= 1
                if not self._num_open:
                    self._on_end()

        return take


def _joined(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """The continuations of one prompt as one output; all have the log probabilities of the prompt."""
    first, *others = outputs
    if not others:
        return first
    scores = first.prompt_logprobs
    return replace(first, others=tuple(replace(other, prompt_logprobs=scores) for other in others))


def _output(call: Call, deltas: list[OutputDelta]) -> RequestOutput:
    last = deltas[-1]
    return RequestOutput(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        prompt_token_ids=tuple(call.prompt),
        finish_reason=last.finish_reason or "abort",
        num_cached_tokens=last.num_cached_tokens,
        spec=last.spec,
        error=last.error,
        logprobs=tuple(logprob for delta in deltas for logprob in delta.logprobs),
        prompt_logprobs=next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None), None),
        index=call.index,
    )
