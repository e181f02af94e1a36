"""POST /tokenize and POST /detokenize: what a prompt is to the model, in the shapes of vLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Self

from fastapi import APIRouter
from pydantic import BaseModel, Field, model_validator
from pydantic_core import PydanticCustomError
from starlette.responses import Response

from specmamba.server.chat import chat_text
from specmamba.server.chat_messages import Messages
from specmamba.server.chat_protocol import TemplateVariables
from specmamba.server.errors import ApiError
from specmamba.server.fields import StrictModel, TokenId
from specmamba.server.logprobs import token_string
from specmamba.server.openapi import errors
from specmamba.server.responses import LeftOutWhenNone
from specmamba.server.service import Service
from specmamba.server.texts import off_loop
from specmamba.server.tools.definitions import Tool, Tools

_ERRORS = errors(400, 401, 404, 413, 415, 429, 500)
# Characters. Where more fit the context (most tokens have fewer than eight), that is the limit.
_LONG_TEXT, _CHARACTERS_PER_TOKEN = 1 << 20, 8


class TokenizeRequest(StrictModel):
    """The body of POST /tokenize: a prompt or the messages of a chat."""

    model: Annotated[str | None, Field(description="a name listed by /v1/models; none: the served model")] = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Annotated[Tools | None, Field(description="with messages: told to the chat template")] = None
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
    """The routes ``/tokenize`` and ``/detokenize``."""
    router = APIRouter()

    @router.post("/tokenize", responses=_ERRORS, response_model=Tokenized)
    async def tokenize(body: TokenizeRequest) -> Response:
        """The tokens that the model would be given for a prompt or for messages."""
        service.check_model(body.model)
        text, field = body.prompt or "", "prompt"
        if body.messages is not None:
            tools = _for_template(service, body.tools or ())
            text, field = await chat_text(service, body.messages, tools, body.chat_template_kwargs), "messages"
        _check_length(service, text, field)
        special = body.messages is None and body.add_special_tokens is not False
        return await _answer(len(text), lambda: _tokenized(service, text, special, bool(body.return_token_strs)))

    @router.post("/detokenize", responses=_ERRORS, response_model=Detokenized)
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids."""
        service.check_model(body.model)
        service.check_token_ids("tokens", body.tokens)
        decode = service.tokenizer.decode
        return await _answer(len(body.tokens), lambda: Detokenized(prompt=decode(body.tokens, False)))

    return router


async def _answer(size: int, work: Callable[[], BaseModel]) -> Response:
    """What ``work`` on ``size`` characters or tokens finds, written out where it was found."""
    content = await off_loop(size, lambda: work().model_dump_json())
    return Response(content, media_type="application/json")


def _check_length(service: Service, text: str, field: str) -> None:
    most = max(_LONG_TEXT, _CHARACTERS_PER_TOKEN * service.context_length)
    if len(text) > most:
        message = f"{field}: {len(text)} characters, but at most {most} are tokenized in a call: send them in parts"
        raise ApiError(400, message, param=field, code="too_long")


def _for_template(service: Service, tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
    """The tools as a chat would tell them to the chat template. Raises ApiError 400 when it knows none."""
    if tools and "tools" not in (service.tokenizer.chat_template(with_tools=True) or ""):
        message = "tools: the model's chat template knows no tools"
        raise ApiError(400, message, param="tools", code="tools_not_supported")
    return [tool.for_template() for tool in tools] or None


def _tokenized(service: Service, text: str, add_special_tokens: bool, with_strings: bool) -> Tokenized:
    tokens = service.tokenizer.encode(text, add_special_tokens)
    strings = None
    if with_strings:
        names = {token: token_string(service.tokenizer, token) for token in set(tokens)}
        strings = [names[token] for token in tokens]
    return Tokenized(count=len(tokens), max_model_len=service.context_length, tokens=tokens, token_strs=strings)
