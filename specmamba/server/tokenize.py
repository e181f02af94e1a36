"""POST /tokenize and POST /detokenize: what a prompt is to the model, in the shapes of vLLM."""

from __future__ import annotations

from typing import Annotated, Self

from fastapi import APIRouter
from pydantic import BaseModel, Field, model_validator
from pydantic_core import PydanticCustomError

from specmamba.server.chat import chat_prompt
from specmamba.server.chat_messages import ChatMessage
from specmamba.server.fields import StrictModel, TokenId
from specmamba.server.logprobs import token_string
from specmamba.server.openapi import errors
from specmamba.server.responses import LeftOutWhenNone
from specmamba.server.service import Service, off_loop

_ERRORS = errors(400, 401, 404, 413, 415, 500)


class TokenizeRequest(StrictModel):
    """The body of POST /tokenize: a prompt or the messages of a chat."""

    model: Annotated[str | None, Field(description="a name listed by /v1/models; none: the served model")] = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage] | None, Field(min_length=1)] = None
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
    router = APIRouter()

    @router.post("/tokenize", responses=_ERRORS)
    async def tokenize(body: TokenizeRequest) -> Tokenized:
        """The tokens that the model would be given for a prompt or for messages."""
        service.check_model(body.model)
        if body.messages is not None:
            tokens = await chat_prompt(service, body.messages)
        else:
            tokens = await service.encode(body.prompt or "", body.add_special_tokens is not False)
        strings = await off_loop(len(tokens), _strings, service, tokens) if body.return_token_strs else None
        return Tokenized(count=len(tokens), max_model_len=service.context_length, tokens=tokens, token_strs=strings)

    @router.post("/detokenize", responses=_ERRORS)
    async def detokenize(body: DetokenizeRequest) -> Detokenized:
        """The text of token ids."""
        service.check_model(body.model)
        service.check_token_ids("tokens", body.tokens)
        return Detokenized(prompt=await off_loop(len(body.tokens), service.tokenizer.decode, body.tokens, False))

    return router


def _strings(service: Service, tokens: list[int]) -> list[str]:
    return [token_string(service.tokenizer, token) for token in tokens]
