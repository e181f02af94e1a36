"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from specmamba.errors import RequestError
from specmamba.server.chat_format import ChatFormat, ChatWishes
from specmamba.server.chat_messages import ChatMessage
from specmamba.server.chat_protocol import ChatCompletionRequest
from specmamba.server.chat_responses import ChatCompletion, ChatCompletionChunk
from specmamba.server.errors import ApiError, as_api_error
from specmamba.server.fields import shortened
from specmamba.server.observers import CallContext
from specmamba.server.openapi import answers
from specmamba.server.service import Service
from specmamba.server.token_pieces import TokenPieces
from specmamba.server.tools.plan import ToolPlan, plan_tools


def chat_routes(service: Service) -> APIRouter:
    """The routes under ``/v1/chat``."""
    router = APIRouter()

    @router.post(
        "/v1/chat/completions", responses=answers(ChatCompletion, ChatCompletionChunk), response_model=ChatCompletion
    )
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        """Answer a conversation, written out by the checkpoint's own chat template."""
        call = CallContext.of(request, "chatcmpl")
        service.check_model(body.model)
        check_template(service)
        plan = await asyncio.to_thread(_plan, service, body) if body.tools else ToolPlan()
        prompt = await _prompt(service, body, plan)
        wishes = ChatWishes(plan, body.num_logprobs, _new_pieces(service, body))
        answer_format = ChatFormat(call.call_id, service.model_names[0], service.tokenizer, wishes)
        try:
            choices = await service.choices(
                body, [prompt], _max_tokens(service, body, len(prompt)), grammar=plan.grammar, request=request
            )
            return await service.answer(request, body, choices, answer_format, call)
        except RequestError as error:
            raise about_messages(error) from None

    return router


def check_template(service: Service) -> None:
    """Raises ApiError 400 where the checkpoint cannot write conversations out."""
    if not service.tokenizer.has_chat_template:
        raise ApiError(
            400, "this model has no chat template: use /v1/completions", param="messages", code="no_chat_template"
        )


async def chat_text(
    service: Service,
    messages: Sequence[ChatMessage],
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """A conversation written out with its special tokens, up to where the answer begins.

    Raises:
        ApiError: 400; there is no chat template, or it refuses the messages, tools or variables.
    """
    check_template(service)
    written = [message.for_template() for message in messages]
    try:
        return await asyncio.to_thread(service.tokenizer.chat_text, written, tools, variables)
    except RequestError as error:
        raise about_messages(error) from None


async def _prompt(service: Service, body: ChatCompletionRequest, plan: ToolPlan) -> list[int]:
    text = await chat_text(service, body.messages, plan.template_tools, body.chat_template_kwargs)
    try:
        return await service.encode(text, add_special_tokens=False)
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
    """What was asked for, or all that the context leaves. A prompt that leaves nothing is refused by the engine."""
    asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    return max(1, service.context_length - num_prompt_tokens) if asked is None else asked


def about_messages(error: ApiError | RequestError) -> ApiError:
    """The engine speaks of a prompt; a chat has messages."""
    named = as_api_error(error)
    param = "messages" if named.detail.param == "prompt" else named.detail.param
    return ApiError(named.status, shortened(str(error)), param=param, code=named.detail.code)
