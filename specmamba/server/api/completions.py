"""POST /v1/completions: the route, and answers in the shape of ``text_completion``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import cast

from fastapi import APIRouter, Request
from starlette.responses import Response

from specmamba.core import OutputDelta, TokenLogprob
from specmamba.models.text.tokenizer import Tokenizer
from specmamba.server.api.answers import check_number
from specmamba.server.api.requests import CompletionRequest
from specmamba.server.api.responses import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    EndReason,
    TokenPiece,
    Usage,
    new_head,
)
from specmamba.server.api.service import Service
from specmamba.server.api.tokenization import TokenPieces, completion_logprobs, joined, prompt_offsets
from specmamba.server.http.error_answers import ApiError, ErrorAnswer, answers
from specmamba.server.observe.call_record import CallRecord

DEFAULT_MAX_TOKENS = 16


def end_reason(delta: OutputDelta) -> EndReason | None:
    """The finish reason in OpenAI's terms; "abort" and "error" are answered as errors instead."""
    return delta.finish_reason if delta.finish_reason in ("stop", "length") else None


class EchoedPrompt:
    """A prompt in front of its answers: the text that was sent, or the text of its tokens, special ones included."""

    def __init__(self, tokenizer: Tokenizer, prompt: str | Sequence[int], tokens: Sequence[int]) -> None:
        self._tokenizer, self._prompt, self._tokens = tokenizer, prompt, tokens
        self._written: CompletionLogprobs | None = None  # the same for all choices of the prompt

    @cached_property
    def text(self) -> str:
        if isinstance(self._prompt, str):
            return self._prompt
        if not self._tokenizer.has_text:
            return ""
        return self._tokenizer.decode(self._prompt, skip_special_tokens=False)

    @cached_property
    def _offsets(self) -> list[int]:
        return prompt_offsets(self._tokenizer, self._tokens, self.text)

    def logprobs(self, entries: Sequence[TokenLogprob | None], num_top: int) -> CompletionLogprobs:
        """Log probabilities of the prompt's tokens; ``entries`` has None for the first token."""
        if self._written is None:
            written = completion_logprobs(self._tokenizer, self._tokens, entries, num_top)
            self._written = written.model_copy(update={"text_offset": self._offsets})
        return self._written


class ChoiceWriter:
    """Writes one choice from the deltas of its request, in order: whole from one delta, or a chunk for each."""

    def __init__(
        self, tokenizer: Tokenizer, body: CompletionRequest, hidden: Collection[int], echo: EchoedPrompt | None
    ) -> None:
        self._tokenizer = tokenizer
        self._num_top = body.logprobs
        self._with_tokens = bool(body.return_tokens) or not tokenizer.has_text
        self._echo = echo
        self._pieces = TokenPieces(tokenizer, hidden)
        self._length = 0  # characters written, those of an echo included
        self._offset = 0  # of the next token; larger than the length while text is held back

    def write_text(self, delta: OutputDelta) -> str | None:
        """The next piece when it is nothing but text; None when ``write`` must be called instead."""
        has_more = self._with_tokens or self._num_top is not None or self._echo is not None
        return None if has_more or delta.finish_reason is not None else delta.text

    def write(self, index: int, delta: OutputDelta) -> CompletionChoice:
        """The next piece of the choice."""
        echo, self._echo = self._echo, None
        text = delta.text
        if echo is not None:
            text, self._offset = echo.text + text, len(echo.text)
        self._length += len(text)
        needs_pieces = self._with_tokens or self._num_top is not None
        pieces = self._pieces.push(delta) if needs_pieces else []
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=self._logprobs(delta, pieces, echo),
            finish_reason=end_reason(delta),
            tokens=pieces if self._with_tokens else None,
        )

    def _logprobs(
        self, delta: OutputDelta, pieces: Sequence[TokenPiece], echo: EchoedPrompt | None
    ) -> CompletionLogprobs | None:
        if self._num_top is None:
            return None
        written = completion_logprobs(self._tokenizer, delta.token_ids, delta.logprobs, self._num_top)
        written.text_offset = self._offsets(pieces, delta.finish_reason is not None)
        if echo is None:
            return written
        return joined(echo.logprobs(delta.prompt_logprobs or (), self._num_top), written)

    def _offsets(self, pieces: Sequence[TokenPiece], is_last: bool) -> list[int]:
        offsets = []
        for piece in pieces:
            offsets.append(self._offset)
            self._offset += len(piece.text)
        # tokens that a stop string has cut off get the offset of the end
        return [min(offset, self._length) for offset in offsets] if is_last else offsets


class CompletionFormat:
    """``AnswerFormat`` of completions: whole answers and chunks have the same shape."""

    has_named_events = False

    def __init__(self, call_id: str, model: str, writers: Sequence[ChoiceWriter]) -> None:
        """``writers``: one per choice."""
        self._head = new_head(call_id, model)
        self._writers = writers

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

    def counted(self, usage: Usage) -> Usage:
        return usage

    def closing(self, usage: Usage) -> Sequence[Completion]:
        return [self._completion([], usage)]

    def failure(self, error: ApiError) -> ErrorAnswer:
        return error.answer()

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None = None) -> Completion:
        return Completion(**self._head, choices=choices, usage=usage)


def completion_routes(service: Service) -> APIRouter:
    """POST /v1/completions."""
    router = APIRouter()

    @router.post("/v1/completions", responses=answers(Completion, Completion), response_model=Completion)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continue one prompt or several."""
        record = CallRecord.of(request.scope)
        call_id = record.new_call_id("cmpl")
        service.check_model(body.model)
        prompts = as_list(body.prompt)
        # Checked before the texts are encoded, which takes time.
        check_number(body.num_asked, "n" if body.best_of is None else "best_of", len(prompts), service.config)
        if body.suffix:
            prompts, body = _with_gap(service, prompts, body.suffix), _ending_like_a_gap(service, body)
        tokens = [await service.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        choices = await service.choices(body, tokens, max_tokens, per_prompt=body.num_asked, request=request)
        writers = [
            ChoiceWriter(service.tokenizer, body, service.hidden_ids(body), echo)
            for echo in _echoes(service, body, prompts, tokens)
            for _ in range(choices.kept)
        ]
        answer_format = CompletionFormat(call_id, service.model_names[0], writers)
        return await service.answer(request, body, choices, answer_format, record)

    return router


def _echoes(
    service: Service, body: CompletionRequest, prompts: Sequence[str | list[int]], tokens: Sequence[list[int]]
) -> list[EchoedPrompt | None]:
    """The text in front of the answers to each prompt, if any."""
    if not body.echo:
        return [None] * len(prompts)
    return [EchoedPrompt(service.tokenizer, *pair) for pair in zip(prompts, tokens, strict=True)]


def _with_gap(service: Service, prompts: Sequence[str | list[int]], suffix: str) -> list[str | list[int]]:
    """The prompts that ask for what stands between each text and ``suffix``.

    Raises:
        ApiError: 400; the tokenizer has no tokens for that, or a prompt is no text.
    """
    service.tokenizer.require_text("a suffix", "suffix")
    infill = service.tokenizer.infill
    if infill is None:
        message = "suffix: this model's tokenizer has no tokens for a gap in a text (fill in the middle): leave it out"
        raise ApiError(400, message, param="suffix", code="not_supported")
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise ApiError(400, "suffix: the prompt must be a text then, not token ids", param="suffix")
    return [infill.prompt(str(prompt), suffix) for prompt in prompts]


def _ending_like_a_gap(service: Service, body: CompletionRequest) -> CompletionRequest:
    """The request with the tokens that end the filling of a gap as further stop tokens, unless it ignores the end."""
    infill = service.tokenizer.infill
    if infill is None or body.ignore_eos:
        return body
    stops = list(dict.fromkeys((*(body.stop_token_ids or ()), *infill.end_ids)))
    return body.model_copy(update={"stop_token_ids": stops})


def as_list(prompt: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    """Return the prompts of a ``prompt`` field, of which there may be one."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]
    return list(cast("list[str | list[int]]", prompt))
