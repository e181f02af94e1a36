"""The route of POST /v1/responses."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from specmamba.server.api.chat import answer_chat, render_chat
from specmamba.server.api.service import Service
from specmamba.server.http.error_answers import answers
from specmamba.server.http.field_names import fields_named
from specmamba.server.observe.call_record import CallRecord
from specmamba.server.responses_api.response_fields import ResponseRequest
from specmamba.server.responses_api.response_format import ResponseFormat
from specmamba.server.responses_api.response_items import ResponseObject, StreamedEvent
from specmamba.server.responses_api.translation import NAMES, as_chat


def response_routes(service: Service) -> APIRouter:
    """POST /v1/responses."""
    router = APIRouter()

    @router.post("/v1/responses", responses=answers(ResponseObject, StreamedEvent), response_model=ResponseObject)
    async def create_response(body: ResponseRequest, request: Request) -> Response:
        """Answer a conversation given as items; as a chat, with typed output and events."""
        record = CallRecord.of(request.scope)
        call_id = record.new_call_id("resp")
        with fields_named(NAMES):
            chat_body = as_chat(body)
            chat = await render_chat(service, chat_body, request)
            answer_format = ResponseFormat(call_id, service.model_names[0], service.tokenizer, chat.options, body)
            return await answer_chat(service, chat, chat_body, request, answer_format, record)

    return router
