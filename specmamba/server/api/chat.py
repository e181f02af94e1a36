"""POST /v1/chat/completions: the route, and the steps from a conversation to its choices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from fastapi import APIRouter, Request
from starlette.responses import Response

from specmamba.errors import RequestError
from specmamba.server.api.answers import AnswerFormat
from specmamba.server.api.chat_format import ChatFormat
from specmamba.server.api.conversation import ChatCompletionRequest, about_messages, chat_text, check_template
from specmamba.server.api.listed_logprobs import most_tokens
from specmamba.server.api.parsed_choice import ChatOptions
from specmamba.server.api.responses import ChatCompletion, ChatCompletionChunk
from specmamba.server.api.service import Service
from specmamba.server.api.tokenization import TokenPieces
from specmamba.server.http.error_answers import ApiError, answers
from specmamba.server.observe.call_record import CallRecord
from specmamba.server.tools.choice import ToolPlan, plan_tools
from specmamba.templates.rendering import Effort


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
        chat = await render_chat(service, body, request)
        answer_format = ChatFormat(call_id, service.model_names[0], service.tokenizer, chat.options)
        return await answer_chat(service, chat, body, request, answer_format, record)

    return router


@dataclass(frozen=True, slots=True)
class RenderedRequest:
    """The prompt of a conversation, and how its answers are written."""

    prompt: list[int]
    options: ChatOptions


async def render_chat(
    service: Service, body: ChatCompletionRequest, request: Request, effort: Effort | None = None
) -> RenderedRequest:
    """Turn a conversation into a prompt; ``effort`` is used in place of that of ``body``.

    Raises:
        ApiError: the model does not exist or has no chat template, or cannot use the messages or tools.
    """
    service.check_model(body.model)
    check_template(service)
    plan = await asyncio.to_thread(_plan, service, body) if body.tools else ToolPlan()
    effort = effort or body.reasoning_effort
    variables = body.chat_template_kwargs
    rendered = await chat_text(service, body.messages, plan.template_tools, variables, request, effort=effort)
    try:
        prompt = await service.encode_chat(rendered)
    except (ApiError, RequestError) as error:
        raise about_messages(error) from None
    reasoning = service.reasoning.start(rendered.text)
    return RenderedRequest(prompt, ChatOptions(plan, reasoning, body.num_logprobs, _new_pieces(service, body)))


async def answer_chat(
    service: Service,
    chat: RenderedRequest,
    body: ChatCompletionRequest,
    request: Request,
    answer_format: AnswerFormat,
    record: CallRecord,
) -> Response:
    """Generate the choices of a conversation, and answer whole or as a stream.

    Raises:
        ApiError: as ``Service.choices`` and ``Service.answer``; errors of the prompt name the messages.
    """
    max_tokens = _max_tokens(service, body, len(chat.prompt))
    plan, reasoning = chat.options.plan, chat.options.reasoning
    try:
        choices = await service.choices(
            body, [chat.prompt], max_tokens, grammar=plan.grammar, reasoning=reasoning, request=request
        )
        return await service.answer(request, body, choices, answer_format, record)
    except RequestError as error:
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
