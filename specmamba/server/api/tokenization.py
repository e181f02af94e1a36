"""Tokens as clients see them: names, log probabilities and pieces of answers; POST /tokenize and /detokenize.

The two routes have the shapes of vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Annotated, Any, Self

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, model_validator
from pydantic_core import PydanticCustomError
from starlette.responses import Response

from specmamba.core import OutputDelta, TokenLogprob
from specmamba.models.text.tokenizer import Detokenizer, Tokenizer
from specmamba.server.api.conversation import Messages, TemplateVariables, chat_text
from specmamba.server.api.responses import CompletionLogprobs, LeftOutWhenNone, TokenPiece
from specmamba.server.api.service import Service, size_of
from specmamba.server.api.streaming import off_loop
from specmamba.server.http.error_answers import ApiError, errors
from specmamba.server.http.fields import StrictModel, TokenId, longest_text
from specmamba.server.tools.definitions import Tool, Tools

# The log probability of an impossible token: JSON has no infinity.
LEAST_LOGPROB = -9999.0
_ERRORS = errors(400, 401, 404, 413, 415, 429, 500)


def finite(logprob: float) -> float:
    """A log probability that JSON can represent: negative infinity becomes ``LEAST_LOGPROB``."""
    return max(logprob, LEAST_LOGPROB)


def token_string(tokenizer: Tokenizer, token_id: int) -> str:
    r"""A name for a token: its text, ``bytes:\xe4`` where its bytes are not UTF-8, ``token_id:7`` without bytes."""
    data = tokenizer.token_bytes(token_id)
    if data is None:
        return f"token_id:{token_id}"
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def completion_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None], num_top: int
) -> CompletionLogprobs:
    """Log probabilities in the shape of OpenAI's completions.

    Args:
        tokenizer: names the tokens.
        tokens: T token ids.
        logprobs: one entry per token, None for a token without any.
        num_top: likeliest tokens to list for each token.

    Returns:
        The log probabilities. Their ``text_offset`` is all 0: the caller sets it.
    """
    return CompletionLogprobs(
        tokens=[token_string(tokenizer, token) for token in tokens],
        token_logprobs=[None if entry is None else finite(entry.logprob) for entry in logprobs],
        top_logprobs=[_top(tokenizer, entry, num_top) for entry in logprobs] if num_top else None,
        text_offset=[0] * len(tokens),
    )


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """The log probabilities of a text and of the text that follows it."""
    tops = None
    if first.top_logprobs is not None and second.top_logprobs is not None:
        tops = first.top_logprobs + second.top_logprobs
    return CompletionLogprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=tops,
        text_offset=first.text_offset + second.text_offset,
    )


def _top(tokenizer: Tokenizer, entry: TokenLogprob | None, num_top: int) -> dict[str, float] | None:
    if entry is None:
        return None
    top: dict[str, float] = {}
    # likeliest first: of two tokens with the same name the likelier one is listed
    for token, logprob in (*entry.top[:num_top], (entry.token_id, entry.logprob)):
        top.setdefault(token_string(tokenizer, token), finite(logprob))
    return top


class TokenPieces:
    """Splits one choice into its tokens: the text that each adds, and how deep it was drafted."""

    def __init__(self, tokenizer: Tokenizer, hidden: Collection[int] = ()) -> None:
        """``hidden``: token ids that end the choice and have no text."""
        self._detokenizer = Detokenizer(tokenizer)
        self._hidden = hidden

    def push(self, delta: OutputDelta) -> list[TokenPiece]:
        """The pieces of the next delta, one for each of its tokens."""
        depths = delta.depths or (0,) * len(delta.token_ids)
        pieces = [
            TokenPiece(id=token, text=self._text(token), depth=depth)
            for token, depth in zip(delta.token_ids, depths, strict=True)
        ]
        if pieces and delta.finish_reason is not None:
            pieces[-1].text += self._detokenizer.flush()
        return pieces

    def _text(self, token: int) -> str:
        return "" if token in self._hidden else self._detokenizer.push(token)


def prompt_offsets(tokenizer: Tokenizer, tokens: Sequence[int], text: str) -> list[int]:
    """Characters of a prompt's text before each of its tokens.

    The text may differ from the decoded tokens: a tokenizer may normalize characters, and may add special tokens,
    which have no length unless they are part of the text.
    """
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    offsets, at = [], 0
    for token in tokens:
        offsets.append(at)
        piece = detokenizer.push(token)
        if text.startswith(piece, at) or not tokenizer.is_silent(token, skip_special_tokens=True):
            at = min(at + len(piece), len(text))
    return offsets


class TokenizeRequest(StrictModel):
    """The body of POST /tokenize: a prompt or the messages of a chat."""

    model: Annotated[str | None, Field(description="a name listed by /v1/models; none: the served model")] = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Annotated[Tools | None, Field(description="with messages: given to the chat template")] = None
    chat_template_kwargs: TemplateVariables | None = None
    add_special_tokens: Annotated[
        bool | None, Field(description="as the checkpoint's settings say; not for messages: their template writes them")
    ] = None
    return_token_strs: Annotated[bool | None, Field(description="list the tokens' texts too")] = None

    @model_validator(mode="after")
    def _one_text(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("prompt", "send either prompt or messages", {"field": "prompt"})
        if self.messages is not None and self.add_special_tokens:
            message = "messages get those that the chat template writes, and no others"
            raise PydanticCustomError("add_special_tokens", message, {"field": "add_special_tokens"})
        for field in ("tools", "chat_template_kwargs"):
            if self.messages is None and getattr(self, field):
                raise PydanticCustomError("no_messages", "only allowed together with messages", {"field": field})
        return self


class Tokenized(BaseModel):
    """The tokens of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: Annotated[
        list[str] | None, LeftOutWhenNone, Field(description=r"a token that is no text by itself: bytes:\xe4")
    ] = None


class DetokenizeRequest(StrictModel):
    """The body of POST /detokenize."""

    model: Annotated[str | None, Field(description="a name listed by /v1/models; none: the served model")] = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class Detokenized(BaseModel):
    """The text of tokens, special ones spelled out."""

    prompt: str


def tokenize_routes(service: Service) -> APIRouter:
    """POST /tokenize and /detokenize."""
    router = APIRouter()

    @router.post("/tokenize", responses=_ERRORS, response_model=Tokenized)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """The tokens that the model would get for a prompt or for messages."""
        service.check_model(body.model)
        if body.messages is None:
            text, field, size = body.prompt or "", "prompt", len(body.prompt or "")
            encode = partial(service.tokenizer.encode, text, body.add_special_tokens is not False)
        else:
            tools = _for_template(service, body.tools or ())
            check = partial(_check_length, service, field="messages")
            rendered = await chat_text(service, body.messages, tools, body.chat_template_kwargs, request, check)
            text, field, size = rendered.text, "messages", size_of(rendered)
            encode = partial(service.tokenizer.encode_chat, rendered)
        _check_length(service, len(text), field)
        return await _answer(size, lambda: _tokenized(service, encode(), bool(body.return_token_strs)))

    @router.post("/detokenize", responses=_ERRORS, response_model=Detokenized)
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids."""
        service.check_model(body.model)
        service.check_token_ids("tokens", body.tokens)
        decode = service.tokenizer.decode
        return await _answer(len(body.tokens), lambda: Detokenized(prompt=decode(body.tokens, False)))

    return router


async def _answer(size: int, work: Callable[[], BaseModel]) -> Response:
    """Answer with the result of ``work`` on ``size`` characters or tokens. It is made and serialized off the loop."""
    content = await off_loop(size, lambda: work().model_dump_json(), encodes=True)
    return Response(content, media_type="application/json")


def _check_length(service: Service, length: int, field: str) -> None:
    most = longest_text(service.context_length)
    if length > most:
        message = f"{field}: {length} characters, but at most {most} are tokenized in a call: send them in parts"
        raise ApiError(400, message, param=field, code="too_long")


def _for_template(service: Service, tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
    """The tools as the chat template reads them.

    Raises:
        ApiError: 400; the template does not use tools.
    """
    if tools and "tools" not in (service.tokenizer.chat_template(with_tools=True) or ""):
        message = "tools: the model's chat template knows no tools"
        raise ApiError(400, message, param="tools", code="tools_not_supported")
    return [tool.for_template() for tool in tools] or None


def _tokenized(service: Service, tokens: list[int], with_strings: bool) -> Tokenized:
    strings = None
    if with_strings:
        names = {token: token_string(service.tokenizer, token) for token in set(tokens)}
        strings = [names[token] for token in tokens]
    return Tokenized(count=len(tokens), max_model_len=service.context_length, tokens=tokens, token_strs=strings)
