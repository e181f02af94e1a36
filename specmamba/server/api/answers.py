"""From the choices of a call to its HTTP response: one JSON document, or a stream of server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from fastapi import Request
from pydantic import BaseModel
from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specmamba.core import Handoff, OutputDelta
from specmamba.sampling_params import SamplingParams
from specmamba.server.api.listed_logprobs import SharedPromptLogprobs
from specmamba.server.api.requests import GenerationRequest
from specmamba.server.api.responses import Usage
from specmamba.server.api.streaming import INLINE_SIZE, Call, ChoiceRequest, off_loop, until_client_gone
from specmamba.server.http.error_answers import ApiError, as_api_error
from specmamba.server_config import ServerConfig

if TYPE_CHECKING:
    from specmamba.grammar import CompiledGrammar

Chunk = BaseModel | str


class ReasoningText(str):
    """A chunk that is nothing but text of the reasoning; other strings are text of the answer."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Choices:
    """What a call generates: ``per_prompt`` choices for each prompt, of which ``kept`` are returned.

    Prompt p has the requests ``p * per_prompt, p * per_prompt + 1, ...``, and the choices ``p * kept, p * kept + 1,
    ...`` of the answer.
    """

    requests: Sequence[ChoiceRequest]
    per_prompt: int = 1
    kept: int = 1

    @classmethod
    def of(
        cls,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        grammar: CompiledGrammar | None = None,
        predicted: Sequence[int] = (),
        handoffs: Sequence[Handoff | None] = (),
        *,
        per_prompt: int = 1,
        kept: int = 1,
    ) -> Choices:
        """Request every prompt ``per_prompt`` times, each time with the settings of one choice, and its own handoff."""
        varied = [params.of_choice(i) for i in range(per_prompt)]
        pairs = [(prompt, own) for prompt in prompts for own in varied]
        requests = [
            ChoiceRequest(prompt, own, grammar, predicted, handoff)
            for (prompt, own), handoff in zip(pairs, handoffs or [None] * len(pairs), strict=True)
        ]
        return cls(requests, per_prompt, kept)

    def best(self, outputs: Sequence[OutputDelta]) -> list[OutputDelta]:
        """The outputs to return: for each prompt the ``kept`` with the likeliest tokens.

        ``outputs`` has one whole output per request. Those to return have the log probabilities of their prompt.
        """
        outputs = [output for _, output in self.shared_prompt_logprobs().share(list(enumerate(outputs)))]
        if self.kept == self.per_prompt:
            return outputs
        of_prompts = (outputs[first : first + self.per_prompt] for first in range(0, len(outputs), self.per_prompt))
        return [output for group in of_prompts for output in sorted(group, key=_negative_logprob)[: self.kept]]

    def shared_prompt_logprobs(self) -> SharedPromptLogprobs:
        """What gives each choice the log probabilities of its prompt, if the call asks for them."""
        return SharedPromptLogprobs(self.per_prompt, self.requests[0].params.prompt_logprobs is not None)

    def usage(self, last_deltas: Mapping[int, OutputDelta]) -> Usage:
        """Token counts after the newest delta of each request, by its index; a prompt counts once."""
        started = sorted(last_deltas)
        first_of = {index // self.per_prompt: index for index in reversed(started)}
        return Usage.of([last_deltas[i] for i in started], [last_deltas[i] for i in first_of.values()])


def check_number(count: int, param: str, num_prompts: int, config: ServerConfig) -> None:
    """Check that ``count`` choices for each of ``num_prompts`` prompts are allowed, and fit the engine's queue.

    Raises:
        ApiError: 400; they do not. The error names ``param`` or the prompt.
    """
    if count > config.max_choices:
        message = f"{param}: {count} choices, but this server gives at most {config.max_choices} (--max-choices)"
        raise ApiError(400, message, param=param)
    most = config.max_running_requests + config.max_queued_requests
    if num_prompts > most:
        raise ApiError(400, f"prompt: {num_prompts} prompts in a call, but at most {most} fit in", param="prompt")
    if num_prompts * count > most:
        message = f"{param}: {num_prompts} prompts with {count} choices each, but at most {most} answers fit in a call"
        raise ApiError(400, message, param=param)


def _negative_logprob(output: OutputDelta) -> float:
    """Minus the mean log probability of an output's tokens; 0 for an output without tokens."""
    return -sum(token.logprob for token in output.logprobs) / max(len(output.logprobs), 1)


class AnswerFormat(Protocol):
    """The JSON shape of one call's answer, whole or in chunks. A chunk that is a str stands for its ``text_chunk``."""

    has_named_events: bool  # the name of an event is the field "type" of its chunk; else events have no names

    def whole(self, outputs: Sequence[OutputDelta], usage: Usage) -> BaseModel: ...
    def opening(self, num_choices: int) -> Sequence[BaseModel]: ...
    def chunks(self, index: int, delta: OutputDelta) -> Sequence[Chunk]: ...
    @property
    def text_chunk(self) -> Callable[[int, str], BaseModel] | None: ...  # of an index and a text; None: no str is given
    def counted(self, usage: Usage) -> Usage: ...  # with what only the parsed text tells
    def closing(self, usage: Usage) -> Sequence[BaseModel]: ...  # after the end of all choices
    def failure(self, error: ApiError) -> BaseModel: ...  # the last chunk of a stream that cannot go on


class ChunkWriter:
    """Writes the chunks of one call as JSON.

    Most chunks differ in their text only, so the JSON around the text is built once for each choice: building a model
    for every piece would take most of the event loop's time.
    """

    def __init__(self, text_chunk: Callable[[int, str], BaseModel] | None, *, with_usage: bool) -> None:
        """``with_usage``: chunks have a field "usage", which is null until there is a value."""
        self._text_chunk = text_chunk
        # With include_usage OpenAI's chunks carry "usage": null, without it they have no such field.
        self._without = None if with_usage else {"usage"}
        self._around: dict[tuple[type[str], int], tuple[str, str]] = {}

    def write(self, index: int, chunk: Chunk) -> str:
        """The JSON of a chunk of the choice ``index``."""
        if not isinstance(chunk, str):
            return chunk.model_dump_json(exclude=self._without)
        kind = (type(chunk), index)
        if kind not in self._around:
            self._around[kind] = self._split(*kind)
        before, after = self._around[kind]
        return f"{before}{to_json(chunk).decode()}{after}"

    def full(self, index: int, chunk: Chunk) -> BaseModel:
        """A chunk of the choice ``index`` as a model."""
        return self._model_of(index, chunk) if isinstance(chunk, str) else chunk

    def _model_of(self, index: int, text: str) -> BaseModel:
        assert self._text_chunk is not None
        return self._text_chunk(index, text)

    def _split(self, kind: type[str], index: int) -> tuple[str, str]:
        empty = self._model_of(index, kind()).model_dump_json(exclude=self._without)
        before, _, after = empty.rpartition('""')  # the text is the last string of a chunk
        return before, after


async def send_answer(
    request: Request, body: GenerationRequest, call: Call, choices: Choices, answer_format: AnswerFormat
) -> Response:
    """The response to a call that has started: whole, or as a stream when ``body.stream`` is set.

    The call is aborted when the client disconnects, and whenever it ends with an error. Raises as ``Call.collect``.
    """
    if body.stream:
        return EventStream(_events(call, answer_format, choices, body), answer_format, call.abort)
    try:
        outputs = await until_client_gone(request.receive, asyncio.create_task(call.collect()))
    finally:
        call.abort()
    if outputs is None:
        return Response(status_code=499)  # not sent: nginx's status for a client that disconnected, for the log
    kept, usage = choices.best(outputs), choices.usage(call.last_deltas)
    size = sum(map(_num_written, kept))
    content = await off_loop(size, lambda: answer_format.whole(kept, usage).model_dump_json(), encodes=True)
    return Response(content, media_type="application/json")


def _num_tokens(delta: OutputDelta) -> int:
    """Tokens that have to be written out."""
    return len(delta.token_ids) + len(delta.prompt_logprobs or ())


def _num_written(delta: OutputDelta) -> int:
    """Tokens that have to be written out, those that are listed beside others included."""
    scored = delta.logprobs[-1:] or (delta.prompt_logprobs or ())[-1:]
    num_beside = max((len(entry.top) for entry in scored if entry is not None), default=0)
    return _num_tokens(delta) * (1 + num_beside)


async def _events(
    call: Call, answer_format: AnswerFormat, choices: Choices, body: GenerationRequest
) -> AsyncIterator[Sequence[str]]:
    """The events of a stream, as lists of those that are ready at the same time; no list is empty."""
    writer = ChunkWriter(answer_format.text_chunk, with_usage=bool(body.wants_stream_usage or body.wants_running_usage))
    latest: dict[int, OutputDelta] = {}
    if opening := [_event(writer, 0, chunk, answer_format) for chunk in answer_format.opening(len(choices.requests))]:
        yield opening
    shared = choices.shared_prompt_logprobs()
    async for news in call:
        events: list[str] = []
        for index, delta in shared.share(news):
            latest[index] = delta
            size = _num_tokens(delta)
            if size <= INLINE_SIZE:  # the usual case: a coroutine for each delta would cost more than its chunk
                chunks = answer_format.chunks(index, delta)
            else:
                chunks = await off_loop(size, answer_format.chunks, index, delta)
            if body.wants_running_usage:
                usage = {"usage": answer_format.counted(choices.usage(latest))}
                chunks = [writer.full(index, chunk).model_copy(update=usage) for chunk in chunks]
            events += [_event(writer, index, chunk, answer_format) for chunk in chunks]
        if events:
            yield events
    if body.wants_stream_usage:
        closing = answer_format.closing(choices.usage(latest))
        if events := [_framed(chunk, chunk.model_dump_json(), answer_format) for chunk in closing]:
            yield events


def _event(writer: ChunkWriter, index: int, chunk: Chunk, answer_format: AnswerFormat) -> str:
    return _framed(chunk, writer.write(index, chunk), answer_format)


def _framed(chunk: Chunk, content: str, answer_format: AnswerFormat) -> str:
    """A chunk, written as ``content``, as a server-sent event without its end."""
    if answer_format.has_named_events and isinstance(chunk, BaseModel):
        return f"event: {chunk.type}\ndata: {content}"  # type: ignore[attr-defined]
    return f"data: {content}"


class EventStream(Response):
    """Server-sent events; those of one list are sent at once. Without names, the last event is ``[DONE]``.

    ``on_close`` is called however the response ends, even when it has not begun.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[Sequence[str]], answer_format: AnswerFormat, on_close: Callable[[], None]
    ) -> None:
        # Proxies must not hold events back in order to compress or to collect them.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["Content-Length"]
        self._events = events
        self._format = answer_format
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_client_gone(receive, asyncio.create_task(self._send_all(send)))
        finally:
            self._on_close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        while events := await self._next_events():
            body = "\n\n".join([*events, ""]).encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})
        end = b"" if self._format.has_named_events else b"data: [DONE]\n\n"
        await send({"type": "http.response.body", "body": end, "more_body": False})

    async def _next_events(self) -> Sequence[str]:
        """The next events, none at the end; an error becomes the last of them, since the status has been sent already.

        Not a generator around the events: each takes part in every token of a stream.
        """
        try:
            return await anext(self._events)
        except StopAsyncIteration:
            return ()
        except Exception as error:  # noqa: BLE001 -- as_api_error handles every exception
            failure = self._format.failure(as_api_error(error))
            return [_framed(failure, failure.model_dump_json(), self._format)]
