"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import cast

from fastapi import APIRouter, Request
from starlette.responses import Response

from specmamba.core import OutputDelta
from specmamba.server.errors import ApiError
from specmamba.server.observers import CallContext
from specmamba.server.openapi import answers
from specmamba.server.protocol import CompletionRequest
from specmamba.server.responses import Completion, CompletionChoice, EndReason, Usage
from specmamba.server.service import Service
from specmamba.server.streams import Ask

DEFAULT_MAX_TOKENS = 16


class CompletionFormat:
    """Answers in the shape of ``text_completion``; a chunk has the shape of the whole."""

    def __init__(self, call_id: str, model: str) -> None:
        self._id = call_id
        self._model = model
        self._created = int(time.time())

    def whole(self, outputs: Sequence[OutputDelta], usage: Usage) -> Completion:
        return self._completion([_choice(index, output) for index, output in enumerate(outputs)], usage)

    def opening(self, num_choices: int) -> Sequence[Completion]:
        return ()

    def chunks(self, index: int, delta: OutputDelta) -> Sequence[Completion]:
        if not delta.text and delta.finish_reason is None:
            return ()  # a token in the middle of a character
        return (self._completion([_choice(index, delta)]),)

    def usage_chunk(self, usage: Usage) -> Completion:
        return self._completion([], usage)

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None = None) -> Completion:
        return Completion(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)


def _choice(index: int, delta: OutputDelta) -> CompletionChoice:
    return CompletionChoice(index=index, text=delta.text, finish_reason=end_reason(delta))


def end_reason(delta: OutputDelta) -> EndReason | None:
    """The reason as OpenAI knows it; "abort" and "error" have become errors before they get here."""
    return delta.finish_reason if delta.finish_reason in ("stop", "length") else None


def completion_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions", responses=answers(Completion, Completion), response_model=Completion)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continue one prompt or several."""
        call = CallContext.of(request, "cmpl")
        service.check_model(body.model)
        max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        params = service.sampling_params(body, max_tokens)
        prompts = await _token_prompts(service, body)
        answer_format = CompletionFormat(call.call_id, service.model_names[0])
        asks = [Ask(prompt, params) for prompt in prompts]
        return await service.answer(request, body, asks, answer_format, call)

    return router


async def _token_prompts(service: Service, body: CompletionRequest) -> list[list[int]]:
    prompts = _as_list(body.prompt)
    most = service.config.max_running_requests + service.config.max_queued_requests
    if len(prompts) > most:
        raise ApiError(400, f"prompt: {len(prompts)} prompts in a call, but at most {most} fit in", param="prompt")
    return [await service.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]


def _as_list(prompt: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]
    return list(cast("list[str | list[int]]", prompt))
