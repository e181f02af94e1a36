"""What the routes share: the engine, the names of the model, and the steps that every generating call takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import Protocol, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.responses import Response

from specmamba.core import GrammarSpec, OutputDelta
from specmamba.engine.thread import EngineThread
from specmamba.server.choices import Choices, check_number
from specmamba.server.chunks import Chunk, ChunkWriter
from specmamba.server.errors import ApiError, api_error_of_validation
from specmamba.server.fields import shortened
from specmamba.server.metrics import ServerMetrics
from specmamba.server.observers import CallContext, build_observers
from specmamba.server.protocol import GenerationRequest
from specmamba.server.responses import Usage
from specmamba.server.streams import Call, CallLimits, EventStream, until_client_gone
from specmamba.server.structured import Grammars
from specmamba.server.texts import encode_prompt
from specmamba.server_config import ServerConfig

T = TypeVar("T")

# Characters or tokens that are worked on at once: handing fewer to a thread would take longer.
_INLINE_SIZE = 1000


class AnswerFormat(Protocol):
    """How one call is answered, whole or in chunks. A chunk that is a text stands for ``text_chunk`` of it."""

    def whole(self, outputs: Sequence[OutputDelta], usage: Usage) -> BaseModel: ...
    def opening(self, num_choices: int) -> Sequence[BaseModel]: ...
    def chunks(self, index: int, delta: OutputDelta) -> Sequence[Chunk]: ...
    def text_chunk(self, index: int, text: str) -> BaseModel: ...
    def usage_chunk(self, usage: Usage) -> BaseModel: ...


class Service:
    """The state of one application."""

    def __init__(self, config: ServerConfig, engine: EngineThread) -> None:
        self.config = config
        self.engine = engine
        self.tokenizer = engine.constants.tokenizer
        self.context_length = engine.constants.context_length
        self.metrics = ServerMetrics(config)
        self.grammars = Grammars(config, engine.constants)
        engine.on_stop(self.grammars.close)  # on the engine's thread, and those who wait are told
        self.limits = CallLimits.of(config)
        self.observers = build_observers(self.metrics)
        self.model_names = (config.model_name,)  # the first is the one that answers carry
        self.created = int(time.time())

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 for a model that is not served here."""
        if name is not None and name not in self.model_names:
            raise ApiError(
                404,
                f"there is no model {shortened(name)!r} here; served: {', '.join(self.model_names)}",
                param="model",
                code="model_not_found",
            )

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt, which holds up nobody. Raises ApiError 400, before the work, when it cannot fit."""
        return await encode_prompt(self.tokenizer, text, self.context_length, add_special_tokens)

    def hidden_ids(self, body: GenerationRequest) -> frozenset[int]:
        """The tokens that end an answer and do not show in it."""
        own = () if body.ignore_eos else self.engine.constants.eos_token_ids
        return frozenset((*own, *(body.stop_token_ids or ())))

    async def choices(
        self,
        body: GenerationRequest,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        *,
        per_prompt: int | None = None,
        grammar: GrammarSpec | None = None,
        request: Request | None = None,
    ) -> Choices:
        """Make the engine requests: each prompt ``per_prompt`` times, by default n times.

        Their text follows the grammar that is given or else the one that the request asks for. No grammar is compiled
        for a ``request`` whose client has disconnected.

        Raises:
            ApiError: a field asks for what this server does not give; the error names it.
        """
        kept = body.n or 1
        per_prompt = kept if per_prompt is None else per_prompt
        check_number(per_prompt, "n" if per_prompt == kept else "best_of", len(prompts), self.config)
        self.check_token_ids("logit_bias", body.logit_bias or ())
        self.check_token_ids("stop_token_ids", body.stop_token_ids or ())
        param, spec = ("tools", grammar) if grammar else (body.grammar_field, body.grammar_spec)
        try:
            params = body.sampling_params(max_tokens, spec)
        except ValidationError as error:
            raise api_error_of_validation(error.errors()) from None
        compiled = None if spec is None else await self.grammars.compile(spec, param, request)
        return Choices.of(prompts, params, compiled, per_prompt=per_prompt, kept=kept)

    def check_token_ids(self, param: str, ids: Collection[int]) -> None:
        """Raises ApiError 400 that names the field, for tokens that the model does not have."""
        num_tokens = self.engine.constants.vocab_size
        if (highest := max(ids, default=0)) >= num_tokens:
            message = f"{param}: there is no token {highest}: the vocabulary has {num_tokens}"
            raise ApiError(400, message, param=param)

    async def answer(
        self,
        request: Request,
        body: GenerationRequest,
        choices: Choices,
        answer_format: AnswerFormat,
        context: CallContext,
    ) -> Response:
        """Generate, and answer whole or as a stream. A client that hangs up takes its engine requests along.

        Raises:
            RequestError, QueueFullError, EngineStoppedError: the engine does not take the prompts.
            ApiError: the engine failed before a whole answer was there.
        """
        call = await Call.start(
            self.engine,
            self.observers,
            context,
            choices.asks,
            body.prefix_cache_key,
            self.limits,
            whole=not body.stream,
        )
        if body.stream:
            return EventStream(_events(call, answer_format, choices, body), call.abort)
        try:
            outputs = await until_client_gone(request.receive, asyncio.create_task(call.collect()))
        finally:
            call.abort()
        if outputs is None:
            return Response(status_code=499)  # nobody reads it; nginx's number for this case in the logs
        given, usage = choices.best(outputs), choices.usage(call.last_deltas)
        content = await off_loop(sum(map(_size, given)), lambda: answer_format.whole(given, usage).model_dump_json())
        return Response(content, media_type="application/json")


async def off_loop(size: int, function: Callable[..., T], *args: object) -> T:
    """Call a function: at once where it has little to do, else on a thread, so that other clients need not wait."""
    return function(*args) if size <= _INLINE_SIZE else await asyncio.to_thread(function, *args)


def _size(delta: OutputDelta) -> int:
    return len(delta.token_ids) + len(delta.prompt_logprobs or ())


async def _events(
    call: Call, answer_format: AnswerFormat, choices: Choices, body: GenerationRequest
) -> AsyncIterator[Sequence[str]]:
    writer = ChunkWriter(answer_format.text_chunk, with_usage=bool(body.wants_stream_usage or body.wants_running_usage))
    latest: dict[int, OutputDelta] = {}
    if opening := [writer.write(0, chunk) for chunk in answer_format.opening(len(choices.asks))]:
        yield opening
    async for news in call:
        events: list[str] = []
        for index, delta in news:
            latest[index] = delta
            if _size(delta) <= _INLINE_SIZE:  # most are, and a coroutine for each would cost more than its chunk
                chunks = answer_format.chunks(index, delta)
            else:
                chunks = await asyncio.to_thread(answer_format.chunks, index, delta)
            if body.wants_running_usage:
                usage = {"usage": choices.usage(latest)}
                chunks = [writer.full(index, chunk).model_copy(update=usage) for chunk in chunks]
            events += [writer.write(index, chunk) for chunk in chunks]
        if events:
            yield events
    if body.wants_stream_usage:
        yield [answer_format.usage_chunk(choices.usage(latest)).model_dump_json()]
