"""Answers in the shapes of chat: ``chat.completion``, or ``chat.completion.chunk`` piece by piece."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from specmamba.core import OutputDelta
from specmamba.models.text.tokenizer import Tokenizer
from specmamba.server.api.answers import ReasoningText
from specmamba.server.api.parsed_choice import ChatOptions, ParsedChoice, with_reasoning
from specmamba.server.api.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    FunctionCall,
    FunctionCallDelta,
    ToolCall,
    ToolCallDelta,
    Usage,
    new_head,
)
from specmamba.server.http.error_answers import ApiError, ErrorAnswer
from specmamba.server.tools.parsing import CallArguments, CallBegin, Content, Event, Reasoning, whole_answer


class ChatFormat:
    """``AnswerFormat`` of chat: whole answers are ``chat.completion``, chunks are ``chat.completion.chunk``."""

    has_named_events = False

    def __init__(self, call_id: str, model: str, tokenizer: Tokenizer, options: ChatOptions) -> None:
        self._head = new_head(call_id, model)
        self._tokenizer, self._options = tokenizer, options
        self._choices: dict[int, ParsedChoice] = {}

    def whole(self, outputs: Sequence[OutputDelta], usage: Usage) -> ChatCompletion:
        choices = [self._whole_choice(index, output) for index, output in enumerate(outputs)]
        return ChatCompletion(**self._head, choices=choices, usage=self.counted(usage))

    def opening(self, num_choices: int) -> Sequence[ChatCompletionChunk]:
        content = "" if self._options.plan.grammar is None else None
        role = ChatDelta(role="assistant", content=content)
        return [self._chunk([ChatChunkChoice(index=index, delta=role)]) for index in range(num_choices)]

    def chunks(self, index: int, delta: OutputDelta) -> Sequence[ChatCompletionChunk | str]:
        choice = self._choice(index)
        first_call = choice.num_calls
        events = choice.read(delta)
        texts = [_text_of(event) for event in events if isinstance(event, Content | Reasoning)]
        if len(texts) == len(events) and self._options.is_text_only and delta.finish_reason is None:
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
        is_reasoning = isinstance(text, ReasoningText)
        delta = ChatDelta(reasoning_content=text) if is_reasoning else ChatDelta(content=text)
        return self._chunk([ChatChunkChoice(index=index, delta=delta)])

    def counted(self, usage: Usage) -> Usage:
        return with_reasoning(usage, self._choices.values())

    def failure(self, error: ApiError) -> ErrorAnswer:
        return error.answer()

    def closing(self, usage: Usage) -> Sequence[ChatCompletionChunk]:
        return [self._chunk([], self.counted(usage))]

    def _choice(self, index: int) -> ParsedChoice:
        if index not in self._choices:
            self._choices[index] = ParsedChoice(self._options, self._tokenizer)
        return self._choices[index]

    def _whole_choice(self, index: int, output: OutputDelta) -> ChatChoice:
        choice = self._choice(index)
        answer = whole_answer(choice.read(output))
        calls = [
            ToolCall(id=_call_id(), function=FunctionCall(name=call.name, arguments=call.arguments))
            for call in answer.calls
        ]
        has_more = bool(calls or answer.reasoning)
        message = AssistantMessage(
            content=None if has_more and not answer.content else answer.content,
            reasoning_content=answer.reasoning or None,
            tool_calls=calls or None,
        )
        return ChatChoice(
            index=index,
            message=message,
            logprobs=choice.logprobs(output),
            finish_reason=choice.end_reason(output),
            tokens=choice.tokens(output),
        )

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> ChatCompletionChunk:
        return ChatCompletionChunk(**self._head, choices=choices, usage=usage)


def _text_of(event: Content | Reasoning) -> str:
    return ReasoningText(event.text) if isinstance(event, Reasoning) else event.text


def _deltas(events: Sequence[Event], num_calls: int) -> list[ChatDelta]:
    """The deltas of a message that has ``num_calls`` calls already."""
    deltas = []
    for event in events:
        match event:
            case Reasoning(text):
                deltas.append(ChatDelta(reasoning_content=text))
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
