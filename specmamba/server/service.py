"""What the routes share: the engine, the names of the model, and the steps that every generating call takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.responses import Response

from specmamba.core import OutputDelta, SamplingParams
from specmamba.engine.thread import EngineThread
from specmamba.server.errors import ApiError, api_error_of_validation
from specmamba.server.metrics import ServerMetrics
from specmamba.server.observers import CallContext, ObserverFactory
from specmamba.server.protocol import GenerationRequest
from specmamba.server.responses import Usage
from specmamba.server.streams import Ask, Call, CallLimits, EventStream, until_client_gone
from specmamba.server_config import ServerConfig

# Shorter text is encoded at once: handing it to a thread would take longer.
_INLINE_CHARACTERS = 1000


class AnswerFormat(Protocol):
    """How one call is answered, whole or in chunks."""

    def whole(self, outputs: Sequence[OutputDelta], usage: Usage) -> BaseModel: ...
    def opening(self, num_choices: int) -> Sequence[BaseModel]: ...
    def chunks(self, index: int, delta: OutputDelta) -> Sequence[BaseModel]: ...
    def usage_chunk(self, usage: Usage) -> BaseModel: ...


class Service:
    """The state of one application."""

    def __init__(self, config: ServerConfig, engine: EngineThread) -> None:
        self.config = config
        self.engine = engine
        self.tokenizer = engine.constants.tokenizer
        self.context_length = engine.constants.context_length
        self.metrics = ServerMetrics()
        self.limits = CallLimits.of(config)
        self.observers: list[ObserverFactory] = [self.metrics.observe]
        self.model_names = (config.model_name,)  # the first is the one that answers carry
        self.created = int(time.time())

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 for a model that is not served here."""
        if name is not None and name not in self.model_names:
            raise ApiError(
                404,
                f"there is no model {name!r} here; served: {', '.join(self.model_names)}",
                param="model",
                code="model_not_found",
            )

    async def encode(self, text: str) -> list[int]:
        """Token ids of a text, without holding up other clients while a long one is encoded."""
        if len(text) <= _INLINE_CHARACTERS:
            return self.tokenizer.encode(text)
        return await asyncio.to_thread(self.tokenizer.encode, text)

    def sampling_params(self, body: GenerationRequest, max_tokens: int) -> SamplingParams:
        """Raises ApiError 400 that names the field."""
        try:
            return body.sampling_params(max_tokens)
        except ValidationError as error:
            raise api_error_of_validation(error.errors()) from None

    async def answer(
        self,
        request: Request,
        body: GenerationRequest,
        asks: Sequence[Ask],
        answer_format: AnswerFormat,
        context: CallContext,
    ) -> Response:
        """Generate, and answer whole or as a stream. A client that hangs up takes its engine requests along.

        Raises:
            RequestError, QueueFullError, EngineStoppedError: the engine does not take the prompts.
            ApiError: the engine failed before a whole answer was there.
        """
        call = await Call.start(self.engine, self.observers, context, asks, body.prefix_cache_key, self.limits)
        if body.stream:
            events = _events(call, answer_format, len(asks), body.wants_stream_usage)
            return EventStream(events, call.abort, self.limits.write_timeout)
        try:
            outputs = await until_client_gone(request.receive, asyncio.create_task(call.collect()))
        finally:
            call.abort()
        if outputs is None:
            return Response(status_code=499)  # nobody reads it; nginx's number for this case in the logs
        whole = answer_format.whole(outputs, Usage.of(outputs))
        return Response(whole.model_dump_json(), media_type="application/json")


async def _events(call: Call, answer_format: AnswerFormat, num_choices: int, with_usage: bool) -> AsyncIterator[str]:
    # With include_usage OpenAI's chunks carry "usage": null, without it they have no such field.
    without = None if with_usage else {"usage"}
    for chunk in answer_format.opening(num_choices):
        yield chunk.model_dump_json(exclude=without)
    async for index, delta in call:
        for chunk in answer_format.chunks(index, delta):
            yield chunk.model_dump_json(exclude=without)
    if with_usage:
        yield answer_format.usage_chunk(Usage.of(list(call.last_deltas.values()))).model_dump_json()
