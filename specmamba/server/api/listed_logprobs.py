"""Log probabilities that an answer lists: how many a call may ask for, and those of a prompt, shared by its choices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from specmamba.core import OutputDelta, TokenLogprob
from specmamba.server.api.requests import GenerationRequest
from specmamba.server.api.streaming import merge
from specmamba.server.http.error_answers import ApiError

# A token lists its own log probability and those of the likeliest tokens, each about 30 bytes of JSON and 400 bytes of
# Python objects: 16 MB of answer, 200 MB of memory. 64 prompts of 2048 tokens with one likeliest token each, as
# evaluations of models send them, are half of it.
MAX_LISTED = 1 << 19

News = Sequence[tuple[int, OutputDelta]]


def check_listed(
    body: GenerationRequest, prompts: Sequence[Sequence[int]], max_tokens: int, per_prompt: int, context_length: int
) -> None:
    """Check that a call lists no more log probabilities than ``MAX_LISTED``.

    Args:
        body: the request.
        prompts: token ids of each prompt; prompts that do not fit into the context are not counted.
        max_tokens: new tokens of each choice at the most.
        per_prompt: choices that are generated for each prompt, of which ``body.n`` or 1 are returned.
        context_length: prompt and new tokens of a choice at the most.

    Raises:
        ApiError: 400; the field that asks for log probabilities is named.
    """
    num_listed = 0
    for prompt in prompts:
        if body.num_logprobs is not None:
            num_new = max(0, min(max_tokens, context_length - len(prompt)))
            num_listed += per_prompt * num_new * (body.num_logprobs + 1)
        if body.num_prompt_logprobs is not None and len(prompt) <= context_length:
            num_listed += (body.n or 1) * len(prompt) * (body.num_prompt_logprobs + 1)
    if num_listed > MAX_LISTED:
        param = body.logprobs_field
        message = (
            f"{param}: {num_listed} log probabilities may be listed, but {MAX_LISTED} are the most in a call: "
            "ask for fewer of them, for fewer tokens, or for fewer choices"
        )
        raise ApiError(400, message, param=param)


def most_tokens(body: GenerationRequest, max_tokens: int) -> int:
    """The new tokens of each choice, at most ``max_tokens``, for which ``check_listed`` passes; 1 at the least."""
    if body.num_logprobs is None:
        return max_tokens
    return max(1, min(max_tokens, MAX_LISTED // ((body.n or 1) * (body.num_logprobs + 1))))


class SharedPromptLogprobs:
    """Gives all choices of a prompt the log probabilities that its first choice has computed.

    Other choices that begin earlier are held back: their first delta has to carry them.
    """

    def __init__(self, per_prompt: int, are_computed: bool) -> None:
        """Prompt p has the choices ``p * per_prompt, ...``; ``are_computed``: the first of them computes them."""
        self._per_prompt = per_prompt if are_computed else 1
        self._known: dict[int, tuple[TokenLogprob | None, ...] | None] = {}  # by prompt
        self._held: dict[int, list[OutputDelta]] = {}  # by choice
        self._begun: set[int] = set()  # the other choices that have them

    def share(self, news: News) -> list[tuple[int, OutputDelta]]:
        """The deltas, by choice, that can be written now."""
        return list(news) if self._per_prompt == 1 else list(self._share(news))

    def _share(self, news: News) -> Iterator[tuple[int, OutputDelta]]:
        for index, delta in news:
            prompt, place = divmod(index, self._per_prompt)
            if place == 0:
                yield index, delta
                if prompt not in self._known:
                    self._known[prompt] = delta.prompt_logprobs
                    others = [other for other in self._held if other // self._per_prompt == prompt]
                    yield from ((other, self._first(other, merge(*self._held.pop(other)))) for other in others)
            elif prompt in self._known:
                yield index, delta if index in self._begun else self._first(index, delta)
            else:
                self._held.setdefault(index, []).append(delta)

    def _first(self, index: int, delta: OutputDelta) -> OutputDelta:
        self._begun.add(index)
        return replace(delta, prompt_logprobs=self._known[index // self._per_prompt])
