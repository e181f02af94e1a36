"""Answers of the engine in the shapes of chat: whole, or piece by piece."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specmamba.core import OutputDelta, TokenLogprob
from specmamba.models.tokenizer import Tokenizer
from specmamba.server.chat_responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatEndReason,
    ChatLogprobs,
    ChatTokenLogprob,
    FunctionCall,
    FunctionCallDelta,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
)
from specmamba.server.completions import end_reason
from specmamba.server.logprobs import finite, token_string
from specmamba.server.responses import TokenPiece, Usage
from specmamba.server.token_pieces import TokenPieces
from specmamba.server.tools.events import AnswerParser, CallArguments, CallBegin, Content, Event, whole_answer
from specmamba.server.tools.plan import ToolPlan


@dataclass(frozen=True, slots=True)
class ChatWishes:
    """What a request wants to see of its answers."""

    plan: ToolPlan
    num_logprobs: int | None  # likeliest tokens beside each one; None: no log-probabilities
    new_pieces: Callable[[], TokenPieces] | None  # None: no list of tokens

    @property
    def nothing_but_text(self) -> bool:
        return self.num_logprobs is None and self.new_pieces is None


class _Choice:
    """One answer, read as it comes."""

    def __init__(self, wishes: ChatWishes, tokenizer: Tokenizer) -> None:
        self._wishes, self._tokenizer = wishes, tokenizer
        self._parser: AnswerParser = wishes.plan.new_parser()
        self._pieces = wishes.new_pieces() if wishes.new_pieces is not None else None
        self.num_calls = 0

    def read(self, delta: OutputDelta) -> list[Event]:
        events = self._parser.push(delta.text)
        if delta.finish_reason is not None:
            events += self._parser.finish()
        self.num_calls += sum(isinstance(event, CallBegin) for event in events)
        return events

    def end_reason(self, delta: OutputDelta) -> ChatEndReason | None:
        reason = end_reason(delta)
        return self._wishes.plan.called if reason == "stop" and self.num_calls else reason

    def tokens(self, delta: OutputDelta) -> list[TokenPiece] | None:
        return None if self._pieces is None else self._pieces.push(delta)

    def logprobs(self, delta: OutputDelta) -> ChatLogprobs | None:
        num_top = self._wishes.num_logprobs
        if num_top is None:
            return None
        return ChatLogprobs(content=[_token_logprob(self._tokenizer, entry, num_top) for entry in delta.logprobs])


class ChatFormat:
    """Answers in the shape of ``chat.completion``, chunks in that of ``chat.completion.chunk``."""

    def __init__(self, call_id: str, model: str, tokenizer: Tokenizer, wishes: ChatWishes) -> None:
        self._id, self._model = call_id, model
        self._created = int(time.time())
        self._tokenizer, self._wishes = tokenizer, wishes
        self._choices: dict[int, _Choice] = {}  # of a stream

    def whole(self, outputs: Sequence[OutputDelta], usage: Usage) -> ChatCompletion:
        choices = [self._whole_choice(index, output) for index, output in enumerate(outputs)]
        return ChatCompletion(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)

    def opening(self, num_choices: int) -> Sequence[ChatCompletionChunk]:
        content = "" if self._wishes.plan.grammar is None else None
        role = ChatDelta(role="assistant", content=content)
        return [self._chunk([ChatChunkChoice(index=index, delta=role)]) for index in range(num_choices)]

    def chunks(self, index: int, delta: OutputDelta) -> Sequence[ChatCompletionChunk | str]:
        if index not in self._choices:
            self._choices[index] = _Choice(self._wishes, self._tokenizer)
        choice = self._choices[index]
        first_call = choice.num_calls
        events = choice.read(delta)
        texts = [event.text for event in events if isinstance(event, Content)]
        if len(texts) == len(events) and self._wishes.nothing_but_text and delta.finish_reason is None:
            return texts
        added = _deltas(events, first_call)
        logprobs, tokens = choice.logprobs(delta), choice.tokens(delta)
        if not added and ((logprobs is not None and logprobs.content) or tokens):
            added = [ChatDelta(content="")]
        choices = [ChatChunkChoice(index=index, delta=one) for one in added]
        if choices:
            choices[0].logprobs, choices[0].tokens = logprobs, tokens
        if delta.finish_reason is not None:
            choices.append(ChatChunkChoice(index=index, delta=ChatDelta(), finish_reason=choice.end_reason(delta)))
        return [self._chunk([one]) for one in choices]

    def text_chunk(self, index: int, text: str) -> ChatCompletionChunk:
        return self._chunk([ChatChunkChoice(index=index, delta=ChatDelta(content=text))])

    def usage_chunk(self, usage: Usage) -> ChatCompletionChunk:
        return self._chunk([], usage)

    def _whole_choice(self, index: int, output: OutputDelta) -> ChatChoice:
        choice = _Choice(self._wishes, self._tokenizer)
        answer = whole_answer(choice.read(output))
        calls = [
            ToolCall(id=_call_id(), function=FunctionCall(name=call.name, arguments=call.arguments))
            for call in answer.calls
        ]
        message = AssistantMessage(
            content=None if calls and not answer.content else answer.content, tool_calls=calls or None
        )
        return ChatChoice(
            index=index,
            message=message,
            logprobs=choice.logprobs(output),
            finish_reason=choice.end_reason(output),
            tokens=choice.tokens(output),
        )

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> ChatCompletionChunk:
        return ChatCompletionChunk(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)


def _deltas(events: Sequence[Event], num_calls: int) -> list[ChatDelta]:
    """What events add to a message that has ``num_calls`` calls already."""
    deltas = []
    for event in events:
        match event:
            case Content(text):
                deltas.append(ChatDelta(content=text))
            case CallBegin(name):
                function = FunctionCallDelta(name=name, arguments="")
                call = ToolCallDelta(index=num_calls, id=_call_id(), type="function", function=function)
                deltas.append(ChatDelta(tool_calls=[call]))
                num_calls += 1
            case CallArguments(text):
                call = ToolCallDelta(index=num_calls - 1, function=FunctionCallDelta(arguments=text))
                deltas.append(ChatDelta(tool_calls=[call]))
    return deltas


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


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
