"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from specmamba.core import OutputDelta
from specmamba.errors import PromptTooLongError, RequestError
from specmamba.server.chat_protocol import ChatCompletionRequest
from specmamba.server.chat_responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
)
from specmamba.server.completions import end_reason
from specmamba.server.errors import ApiError, as_api_error
from specmamba.server.observers import CallContext
from specmamba.server.openapi import answers
from specmamba.server.responses import Usage
from specmamba.server.service import Service
from specmamba.server.streams import Ask


class ChatFormat:
    """Answers in the shape of ``chat.completion``, chunks in that of ``chat.completion.chunk``."""

    def __init__(self, call_id: str, model: str) -> None:
        self._id = call_id
        self._model = model
        self._created = int(time.time())

    def whole(self, outputs: Sequence[OutputDelta], usage: Usage) -> ChatCompletion:
        choices = [
            ChatChoice(index=i, message=AssistantMessage(content=output.text), finish_reason=end_reason(output))
            for i, output in enumerate(outputs)
        ]
        return ChatCompletion(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)

    def opening(self, num_choices: int) -> Sequence[ChatCompletionChunk]:
        role = ChatDelta(role="assistant", content="")
        return [self._chunk([ChatChunkChoice(index=index, delta=role)]) for index in range(num_choices)]

    def chunks(self, index: int, delta: OutputDelta) -> Sequence[ChatCompletionChunk]:
        chunks = []
        if delta.text:
            chunks.append(self._chunk([ChatChunkChoice(index=index, delta=ChatDelta(content=delta.text))]))
        if delta.finish_reason is not None:
            last = ChatChunkChoice(index=index, delta=ChatDelta(), finish_reason=end_reason(delta))
            chunks.append(self._chunk([last]))
        return chunks

    def usage_chunk(self, usage: Usage) -> ChatCompletionChunk:
        return self._chunk([], usage)

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> ChatCompletionChunk:
        return ChatCompletionChunk(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)


def chat_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/v1/chat/completions", responses=answers(ChatCompletion, ChatCompletionChunk), response_model=ChatCompletion
    )
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        """Answer a conversation, written out by the checkpoint's own chat template."""
        call = CallContext.of(request, "chatcmpl")
        service.check_model(body.model)
        if not service.tokenizer.has_chat_template:
            raise ApiError(
                400, "this model has no chat template: use /v1/completions", param="messages", code="no_chat_template"
            )
        answer_format = ChatFormat(call.call_id, service.model_names[0])
        try:
            prompt = await _token_prompt(service, body)
            params = service.sampling_params(body, _max_tokens(service, body, len(prompt)))
            return await service.answer(request, body, [Ask(prompt, params)], answer_format, call)
        except RequestError as error:
            raise _about_messages(error) from None

    return router


async def _token_prompt(service: Service, body: ChatCompletionRequest) -> list[int]:
    messages = [message.for_template() for message in body.messages]
    return await asyncio.to_thread(service.tokenizer.apply_chat_template, messages)


def _max_tokens(service: Service, body: ChatCompletionRequest, num_prompt_tokens: int) -> int:
    """What was asked for, or all that the context leaves. A prompt that leaves nothing is refused by the engine."""
    asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    return max(1, service.context_length - num_prompt_tokens) if asked is None else asked


def _about_messages(error: RequestError) -> ApiError:
    """The engine speaks of a prompt; a chat has messages."""
    named = as_api_error(error)
    param = "messages" if error.param == "prompt" or isinstance(error, PromptTooLongError) else error.param
    return ApiError(named.status, str(error), param=param, code=named.detail.code)
