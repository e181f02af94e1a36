"""POST /v1/chat/completions: the route, and answers in the shapes of chat, whole or piece by piece."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fastapi import APIRouter, Request
from starlette.responses import Response

from specmamba.core import OutputDelta, TokenLogprob
from specmamba.errors import RequestError
from specmamba.models.tokenizer import Tokenizer
from specmamba.server.api.completions import end_reason
from specmamba.server.api.conversation import (
    ChatCompletionRequest,
    about_messages,
    chat_text,
    check_template,
)
from specmamba.server.api.listed_logprobs import most_tokens
from specmamba.server.api.responses import (
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
    TokenPiece,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
    Usage,
    new_head,
)
from specmamba.server.api.service import Service
from specmamba.server.api.tokenization import TokenPieces, finite, token_string
from specmamba.server.http.error_answers import ApiError, answers
from specmamba.server.observe.call_record import CallRecord
from specmamba.server.tools.choice import ToolPlan, plan_tools
from specmamba.server.tools.parsing import AnswerParser, CallArguments, CallBegin, Content, Event, whole_answer


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How a request wants its answers written."""

    plan: ToolPlan
    num_logprobs: int | None  # likeliest tokens to list for each token; None: no log probabilities
    new_pieces: Callable[[], TokenPieces] | None  # None: no list of tokens

    @property
    def is_text_only(self) -> bool:
        return self.num_logprobs is None and self.new_pieces is None


class _Choice:
    """One answer, parsed while it is generated."""

    def __init__(self, options: ChatOptions, tokenizer: Tokenizer) -> None:
        self._options, self._tokenizer = options, tokenizer
        self._parser: AnswerParser = options.plan.new_parser()
        self._pieces = options.new_pieces() if options.new_pieces is not None else None
        self.num_calls = 0

    def read(self, delta: OutputDelta) -> list[Event]:
        events = self._parser.push(delta.text)
        if delta.finish_reason is not None:
            events += self._parser.finish()
        self.num_calls += sum(isinstance(event, CallBegin) for event in events)
        return events

    def end_reason(self, delta: OutputDelta) -> ChatEndReason | None:
        reason = end_reason(delta)
        return self._options.plan.called if reason == "stop" and self.num_calls else reason

    def tokens(self, delta: OutputDelta) -> list[TokenPiece] | None:
        return None if self._pieces is None else self._pieces.push(delta)

    def logprobs(self, delta: OutputDelta) -> ChatLogprobs | None:
        num_top = self._options.num_logprobs
        if num_top is None:
            return None
        return ChatLogprobs(content=[_token_logprob(self._tokenizer, entry, num_top) for entry in delta.logprobs])


class ChatFormat:
    """``AnswerFormat`` of chat: whole answers are ``chat.completion``, chunks are ``chat.completion.chunk``."""

    def __init__(self, call_id: str, model: str, tokenizer: Tokenizer, options: ChatOptions) -> None:
        self._head = new_head(call_id, model)
        self._tokenizer, self._options = tokenizer, options
        self._choices: dict[int, _Choice] = {}  # of a stream

    def whole(self, outputs: Sequence[OutputDelta], usage: Usage) -> ChatCompletion:
        choices = [self._whole_choice(index, output) for index, output in enumerate(outputs)]
        return ChatCompletion(**self._head, choices=choices, usage=usage)

    def opening(self, num_choices: int) -> Sequence[ChatCompletionChunk]:
        content = "" if self._options.plan.grammar is None else None
        role = ChatDelta(role="assistant", content=content)
        return [self._chunk([ChatChunkChoice(index=index, delta=role)]) for index in range(num_choices)]

    def chunks(self, index: int, delta: OutputDelta) -> Sequence[ChatCompletionChunk | str]:
        if index not in self._choices:
            self._choices[index] = _Choice(self._options, self._tokenizer)
        choice = self._choices[index]
        first_call = choice.num_calls
        events = choice.read(delta)
        texts = [event.text for event in events if isinstance(event, Content)]
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
        return self._chunk([ChatChunkChoice(index=index, delta=ChatDelta(content=text))])

    def usage_chunk(self, usage: Usage) -> ChatCompletionChunk:
        return self._chunk([], usage)

    def _whole_choice(self, index: int, output: OutputDelta) -> ChatChoice:
        choice = _Choice(self._options, self._tokenizer)
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
        return ChatCompletionChunk(**self._head, choices=choices, usage=usage)


def _deltas(events: Sequence[Event], num_calls: int) -> list[ChatDelta]:
    """The deltas of a message that has ``num_calls`` calls already."""
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


def chat_routes(service: Service) -> APIRouter:
    """POST /v1/chat/completions."""
    router = APIRouter()

    @router.post(
        "/v1/chat/completions", responses=answers(ChatCompletion, ChatCompletionChunk), response_model=ChatCompletion
    )
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        """Answer a conversation, which the checkpoint's own chat template turns into a prompt."""
        record = CallRecord.of(request.scope)
        call_id = record.new_call_id("chatcmpl")
        service.check_model(body.model)
        check_template(service)
        plan = await asyncio.to_thread(_plan, service, body) if body.tools else ToolPlan()
        prompt = await _prompt(service, body, plan, request)
        options = ChatOptions(plan, body.num_logprobs, _new_pieces(service, body))
        answer_format = ChatFormat(call_id, service.model_names[0], service.tokenizer, options)
        try:
            choices = await service.choices(
                body, [prompt], _max_tokens(service, body, len(prompt)), grammar=plan.grammar, request=request
            )
            return await service.answer(request, body, choices, answer_format, record)
        except RequestError as error:
            raise about_messages(error) from None

    return router


async def _prompt(service: Service, body: ChatCompletionRequest, plan: ToolPlan, request: Request) -> list[int]:
    rendered = await chat_text(service, body.messages, plan.template_tools, body.chat_template_kwargs, request)
    try:
        return await service.encode_chat(rendered)
    except (ApiError, RequestError) as error:
        raise about_messages(error) from None


def _plan(service: Service, body: ChatCompletionRequest) -> ToolPlan:
    template = service.tokenizer.chat_template(with_tools=True) or ""
    parallel = body.parallel_tool_calls is not False
    return plan_tools(body.tools or (), body.effective_tool_choice, parallel, template, service.config.tool_call_parser)


def _new_pieces(service: Service, body: ChatCompletionRequest) -> Callable[[], TokenPieces] | None:
    if not body.return_tokens:
        return None
    hidden = service.hidden_ids(body)
    return lambda: TokenPieces(service.tokenizer, hidden)


def _max_tokens(service: Service, body: ChatCompletionRequest, num_prompt_tokens: int) -> int:
    """The requested limit, or the rest of the context as far as log probabilities may be listed for it.

    When the prompt leaves no room, the engine refuses it.
    """
    requested = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    rest = max(1, service.context_length - num_prompt_tokens)
    return most_tokens(body, rest) if requested is None else requested
