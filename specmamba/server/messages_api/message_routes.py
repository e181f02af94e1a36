"""The routes of POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from specmamba.server.api.chat import answer_chat, render_chat
from specmamba.server.api.service import Service
from specmamba.server.http.error_answers import answers, errors
from specmamba.server.http.field_names import fields_named
from specmamba.server.http.message_errors import MessageError
from specmamba.server.messages_api.message_events import MessageAnswer, MessageEvent, TokenCount
from specmamba.server.messages_api.message_fields import CountRequest, MessageRequest
from specmamba.server.messages_api.message_format import MessageFormat, StopFinder
from specmamba.server.messages_api.message_translation import as_chat, effort_of, names_of
from specmamba.server.observe.call_record import CallRecord


def message_routes(service: Service) -> APIRouter:
    """POST /v1/messages and /v1/messages/count_tokens."""
    router = APIRouter()

    @router.post(
        "/v1/messages", responses=_in_this_shape(answers(MessageAnswer, MessageEvent)), response_model=MessageAnswer
    )
    async def create_message(body: MessageRequest, request: Request) -> Response:
        """Answer a conversation given in Anthropic's terms; as a chat, with typed blocks and events."""
        record = CallRecord.of(request.scope)
        call_id = record.new_call_id("msg")
        with fields_named(names_of(body)):
            chat_body = as_chat(body)
            chat = await render_chat(service, chat_body, request, effort_of(body, service))
            stops = StopFinder(service.tokenizer, body.stop_sequences or (), service.hidden_ids(chat_body))
            model = service.model_names[0]
            answer_format = MessageFormat(call_id, model, service.tokenizer, chat.options, len(chat.prompt), stops)
            return await answer_chat(service, chat, chat_body, request, answer_format, record)

    @router.post(
        "/v1/messages/count_tokens",
        responses=_in_this_shape(errors(400, 401, 404, 413, 415, 429, 500)),
        response_model=TokenCount,
    )
    async def count_tokens(body: CountRequest, request: Request) -> TokenCount:
        """The tokens of the prompt that a conversation makes."""
        with fields_named(names_of(body)):
            chat = await render_chat(service, as_chat(body), request, effort_of(body, service))
        return TokenCount(input_tokens=len(chat.prompt))

    return router


def _in_this_shape(answers: dict[int | str, dict[str, Any]]) -> dict[int | str, dict[str, Any]]:
    """The answers of a route, with Anthropic's errors in place of OpenAI's."""
    return {
        status: {**answer, "model": MessageError} if isinstance(status, int) and status >= 400 else answer
        for status, answer in answers.items()
    }
