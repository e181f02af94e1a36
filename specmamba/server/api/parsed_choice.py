"""One answer of a conversation, parsed while it is generated: reasoning, content and calls, tokens and figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from specmamba.core import OutputDelta, TokenLogprob
from specmamba.models.text.tokenizer import Tokenizer
from specmamba.sampling_params import ReasoningStart
from specmamba.server.api.completions import end_reason
from specmamba.server.api.responses import ChatEndReason, ChatLogprobs, ChatTokenLogprob, TokenPiece, TopLogprob, Usage
from specmamba.server.api.tokenization import TokenPieces, finite, token_string
from specmamba.server.tools.choice import ToolPlan
from specmamba.server.tools.parsing import AnswerParser, CallBegin, Event
from specmamba.server.tools.reasoning import ReasonedAnswer, ReasoningTokens


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How a request wants its answers written."""

    plan: ToolPlan
    reasoning: ReasoningStart
    num_logprobs: int | None  # likeliest tokens to list for each token; None: no log probabilities
    new_pieces: Callable[[], TokenPieces] | None  # None: no list of tokens

    @property
    def is_text_only(self) -> bool:
        return self.num_logprobs is None and self.new_pieces is None


class ParsedChoice:
    """One answer, parsed while it is generated."""

    def __init__(self, options: ChatOptions, tokenizer: Tokenizer) -> None:
        self._options, self._tokenizer = options, tokenizer
        self._parser: AnswerParser = options.plan.new_parser()
        self._reasoning_tokens: ReasoningTokens | None = None
        if options.reasoning != "none":
            self._parser = reasoned = ReasonedAnswer(self._parser, options.reasoning)
            self._reasoning_tokens = ReasoningTokens(tokenizer, reasoned)
        self._pieces = options.new_pieces() if options.new_pieces is not None else None
        self.num_calls = 0

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens so far of the reasoning in front of the answer."""
        return 0 if self._reasoning_tokens is None else self._reasoning_tokens.number

    def read(self, delta: OutputDelta) -> list[Event]:
        """The events of the next piece."""
        is_last = delta.finish_reason is not None
        events = self._parser.push(delta.text)
        if is_last:
            events += self._parser.finish()
        if self._reasoning_tokens is not None:
            self._reasoning_tokens.read(delta.token_ids, is_last=is_last)
        self.num_calls += sum(isinstance(event, CallBegin) for event in events)
        return events

    def end_reason(self, delta: OutputDelta) -> ChatEndReason | None:
        """Why the answer has ended after a piece that was read; None: it goes on."""
        reason = end_reason(delta)
        return self._options.plan.called if reason == "stop" and self.num_calls else reason

    def tokens(self, delta: OutputDelta) -> list[TokenPiece] | None:
        """The tokens of the next piece, where the request asks for them."""
        return None if self._pieces is None else self._pieces.push(delta)

    def logprobs(self, delta: OutputDelta) -> ChatLogprobs | None:
        """The log probabilities of the next piece's tokens, where the request asks for them."""
        num_top = self._options.num_logprobs
        if num_top is None:
            return None
        return ChatLogprobs(content=[_token_logprob(self._tokenizer, entry, num_top) for entry in delta.logprobs])


def with_reasoning(usage: Usage, choices: Iterable[ParsedChoice]) -> Usage:
    """The usage with the tokens of the reasoning of all choices."""
    details = usage.completion_tokens_details
    number = sum(choice.num_reasoning_tokens for choice in choices)
    counted = details.model_copy(update={"reasoning_tokens": number})
    return usage.model_copy(update={"completion_tokens_details": counted})


def _token_logprob(tokenizer: Tokenizer, entry: TokenLogprob, num_top: int) -> ChatTokenLogprob:
    top = [
        TopLogprob(token=token_string(tokenizer, token), bytes=_bytes(tokenizer, token), logprob=finite(logprob))
        for token, logprob in entry.top[:num_top]
    ]
    return ChatTokenLogprob(
        token=token_string(tokenizer, entry.token_id),
        bytes=_bytes(tokenizer, entry.token_id),
        logprob=finite(entry.logprob),
        top_logprobs=top,
    )


def _bytes(tokenizer: Tokenizer, token_id: int) -> list[int] | None:
    data = tokenizer.token_bytes(token_id)
    return None if data is None else list(data)
