"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import cast

from fastapi import APIRouter, Request
from starlette.responses import Response

from specmamba.core import OutputDelta
from specmamba.server.choices import check_number
from specmamba.server.completion_choices import ChoiceWriter, EchoedPrompt, end_reason
from specmamba.server.observers import CallContext
from specmamba.server.openapi import answers
from specmamba.server.protocol import CompletionRequest
from specmamba.server.responses import Completion, CompletionChoice, Usage
from specmamba.server.service import Service

__all__ = ["CompletionFormat", "completion_routes", "end_reason"]

DEFAULT_MAX_TOKENS = 16


class CompletionFormat:
    """Answers in the shape of ``text_completion``; a chunk has the shape of the whole."""

    def __init__(self, call_id: str, model: str, writers: Sequence[ChoiceWriter]) -> None:
        self._id = call_id
        self._model = model
        self._writers = writers
        self._created = int(time.time())

    def whole(self, outputs: Sequence[OutputDelta], usage: Usage) -> Completion:
        choices = [self._writers[index].write(index, output) for index, output in enumerate(outputs)]
        return self._completion(choices, usage)

    def opening(self, num_choices: int) -> Sequence[Completion]:
        return ()

    def chunks(self, index: int, delta: OutputDelta) -> Sequence[Completion | str]:
        text = self._writers[index].write_text(delta)
        if text is not None:
            return (text,) if text else ()
        choice = self._writers[index].write(index, delta)
        if not (choice.text or choice.finish_reason or choice.logprobs or choice.tokens):
            return ()  # a token in the middle of a character
        return (self._completion([choice]),)

    def text_chunk(self, index: int, text: str) -> Completion:
        return self._completion([CompletionChoice(index=index, text=text, finish_reason=None)])

    def usage_chunk(self, usage: Usage) -> Completion:
        return self._completion([], usage)

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None = None) -> Completion:
        return Completion(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)


def completion_routes(service: Service) -> APIRouter:
    """The route ``/v1/completions``."""
    router = APIRouter()

    @router.post("/v1/completions", responses=answers(Completion, Completion), response_model=Completion)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continue one prompt or several."""
        call = CallContext.of(request, "cmpl")
        service.check_model(body.model)
        prompts = _as_list(body.prompt)
        # before a text is encoded for nothing
        check_number(body.num_asked, "n" if body.best_of is None else "best_of", len(prompts), service.config)
        tokens = [await service.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        choices = await service.choices(body, tokens, max_tokens, per_prompt=body.num_asked, request=request)
        writers = [
            ChoiceWriter(service.tokenizer, body, service.hidden_ids(body), echo)
            for echo in _echoes(service, body, prompts, tokens)
            for _ in range(choices.kept)
        ]
        answer_format = CompletionFormat(call.call_id, service.model_names[0], writers)
        return await service.answer(request, body, choices, answer_format, call)

    return router


def _echoes(
    service: Service, body: CompletionRequest, prompts: Sequence[str | list[int]], tokens: Sequence[list[int]]
) -> list[EchoedPrompt | None]:
    """What stands in front of the answers to each prompt."""
    if not body.echo:
        return [None] * len(prompts)
    return [EchoedPrompt(service.tokenizer, *pair) for pair in zip(prompts, tokens, strict=True)]


def _as_list(prompt: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]
    return list(cast("list[str | list[int]]", prompt))
