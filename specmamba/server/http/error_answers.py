"""Errors in OpenAI's shape, ``{"error": {"message", "type", "param", "code"}}``, and answers in the OpenAPI schema."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specmamba.errors import (
    EngineFailedError,
    EngineStoppedError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    SpecmambaError,
)
from specmamba.flags.near_names import did_you_mean
from specmamba.server.http.message_errors import MessageError, has_message_errors
from specmamba.server.http.unserved import why_unserved

logger = logging.getLogger("specmamba")

INVALID, SERVER = "invalid_request_error", "server_error"
_COMPONENT = "#/components/schemas/{model}"
_EVENTS = "text/event-stream"
_ERRORS = {
    400: "a field is wrong, or the prompt does not fit",
    401: "the API key is missing or wrong",
    403: "the request is for the operator, or comes from a web page of another server",
    404: "there is no such model",
    409: "a replica cannot do that now",
    413: "the body is too large",
    415: "the body is not declared as JSON",
    429: "the queue is full, or the client has too many calls open: try again later",
    500: "the engine failed",
    503: "the request waited too long, or the server is shutting down",
    504: "the answer was not whole in time",
}


class ErrorDetail(BaseModel):
    """An error in OpenAI's terms."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorDetail


class ApiError(SpecmambaError):
    """An error with its HTTP status, and its type, field and code in OpenAI's terms."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.detail = ErrorDetail(
            message=_encodable(message), type=kind, param=None if param is None else _encodable(param), code=code
        )
        self.headers = headers

    def answer(self) -> ErrorAnswer:
        return ErrorAnswer(error=self.detail)

    def response(self) -> Response:
        """The answer, in the shape that its address has for errors."""
        return _ErrorResponse(self)


class _ErrorResponse(Response):
    """An error in OpenAI's shape, or in Anthropic's below /v1/messages."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.answer().model_dump_json(), error.status, error.headers, "application/json")
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not has_message_errors(scope["path"]):
            await super().__call__(scope, receive, send)
            return
        error = self._error
        content = MessageError.of(error.status, error.detail.message).model_dump_json()
        await Response(content, error.status, error.headers, "application/json")(scope, receive, send)


def _encodable(text: str) -> str:
    """Replace lone surrogates, which text of a client may contain and UTF-8 cannot encode."""
    return text.encode("utf8", "replace").decode("utf8")


def as_api_error(error: BaseException) -> ApiError:
    """The error to answer any exception with. An unexpected exception is logged; its answer has no details."""
    match error:
        case ApiError():
            return error
        case PromptTooLongError():
            return ApiError(400, str(error), param=error.param, code="context_length_exceeded")
        case RequestError():
            return ApiError(400, str(error), param=error.param)
        case QueueFullError():
            return queue_full(str(error))
        case EngineFailedError():
            return ApiError(500, str(error), kind=SERVER, code="engine_error")
        case EngineStoppedError():
            return ApiError(503, str(error), kind=SERVER, code="engine_stopped")
        case RequestValidationError():
            return api_error_of_validation(error.errors())
        case HTTPException():
            return _of_http_exception(error)
    logger.error("a request failed unexpectedly", exc_info=error)
    return ApiError(500, "internal error: the server's log says more", kind=SERVER, code="internal_error")


def queue_full(message: str) -> ApiError:
    """The error of a request that finds the queue full, or that gives its place in it to another client's."""
    return ApiError(429, message, kind="rate_limit_error", code="queue_full", headers={"Retry-After": "1"})


def queue_timeout(what: str, limit_s: float | None) -> ApiError:
    """The error of a call whose turn did not come in time; ``what`` did not come, such as "no turn"."""
    text = f"{what} came within {limit_s:g} s (--queue-timeout): try again later"
    return ApiError(503, text, kind=SERVER, code="queue_timeout", headers={"Retry-After": "1"})


def install_error_handlers(app: FastAPI, routes: Sequence[APIRoute] = ()) -> None:
    """Answer every exception of the application through ``as_api_error``.

    A 404 names the nearest address of ``routes``, a 405 the methods that there are.
    """

    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.status_code == 404:
            return _no_such_address(request.url.path, [route.path for route in routes]).response()
        if isinstance(error, HTTPException) and error.status_code == 405:
            return _no_such_method(request, routes, error).response()
        return as_api_error(error).response()

    for handled in (SpecmambaError, RequestValidationError, HTTPException):
        app.add_exception_handler(handled, answer)
    app.add_middleware(_AnswerUnexpected)


class _AnswerUnexpected:
    """ASGI middleware: answers exceptions that have no handler.

    With a handler for ``Exception`` the connection would be closed, and with it the client's next request.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def watched_send(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self.app(scope, receive, watched_send)
        except Exception as error:
            if has_begun:
                raise
            await as_api_error(error).response()(scope, receive, send)


def _no_such_address(path: str, addresses: Sequence[str]) -> ApiError:
    if (reason := why_unserved(path)) is not None:
        return ApiError(404, reason, code="not_supported")
    hint = did_you_mean(path, addresses) or "; /docs lists what there is"
    return ApiError(404, f"there is nothing at this address{hint}", code="not_found")


def _no_such_method(request: Request, routes: Sequence[APIRoute], error: HTTPException) -> ApiError:
    """The error for an address that knows other methods; ``error`` has only those of the first route of the address."""
    found = {method for route in routes if route.path_regex.match(request.url.path) for method in route.methods or ()}
    found |= set(filter(None, (error.headers or {}).get("Allow", "").split(", ")))
    methods = sorted(found)
    message = f"this address does not know {request.method[:20]}; it knows {' and '.join(methods)}"
    return ApiError(405, message, code="method_not_allowed", headers={"Allow": ", ".join(methods)})


def _of_http_exception(error: HTTPException) -> ApiError:
    if isinstance(error.__cause__, ClientDisconnect):
        return ApiError(499, "the client hung up before its request was whole", code="disconnect")  # for the log only
    messages = {
        400: "the body is not valid JSON in UTF-8",  # the only 400 that is raised as an HTTPException
    }
    codes = {400: "invalid_json", 405: "method_not_allowed", 413: "request_too_large"}
    message = messages.get(error.status_code, str(error.detail))
    return ApiError(error.status_code, message, code=codes.get(error.status_code), headers=error.headers)


def api_error_of_validation(problems: Sequence[Any]) -> ApiError:
    """The error for failed validation: it names the first field concerned, and lists all problems of that field."""
    first = problems[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first['ctx']['error']}", code="invalid_json")
    param = _place(first)
    message = "; ".join(dict.fromkeys(_sentence(problem) for problem in problems if _place(problem) == param))
    return ApiError(400, f"{param}: {message}" if param else message, param=param, code=first["type"])


def _place(problem: Mapping[str, Any]) -> str | None:
    """``messages[0].content`` from pydantic's location, without "body" or "query" and without the tags of unions."""
    path = [part for part in problem["loc"] if not str(part).startswith("(")]
    path = path[1:] if path and path[0] in ("body", "query") else path
    path += [problem["ctx"]["field"]] if "field" in problem.get("ctx", {}) else []
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".") or None


def _sentence(problem: Mapping[str, Any]) -> str:
    if problem["type"] == "missing":
        return "the request has no body" if tuple(problem["loc"]) == ("body",) else "this field is required"
    if problem["type"] in ("model_attributes_type", "dict_type", "model_type"):
        return "must be a JSON object"
    text = str(problem["msg"]).removeprefix("Value error, ")
    return text[0].lower() + text[1:]


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The error answers of a route."""
    return {status: {"model": ErrorAnswer, "description": _ERRORS[status]} for status in statuses}


def answers(whole: type[BaseModel], chunk: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """The answers of a route that generates: whole, streamed, or an error.

    FastAPI adds 422 for wrong fields; ``corrected_schema`` removes it, since this server answers 400.
    """
    ok: dict[int | str, dict[str, Any]] = {
        200: {
            "model": whole,
            "description": "the answer, or a stream of events",
            "content": {_EVENTS: {"schema": _event(chunk)}},
        }
    }
    return ok | errors(400, 401, 404, 413, 415, 429, 500, 503, 504)


def _event(chunk: type[BaseModel]) -> dict[str, Any]:
    """The schema of one event. Its definitions are in ``$defs``; ``corrected_schema`` moves them to the components."""
    models: list[Any] = [(chunk, "serialization"), (ErrorAnswer, "serialization")]
    references, definitions = models_json_schema(models, ref_template=_COMPONENT)
    chunk_or_error = {
        "type": "string",
        "description": "a chunk, or an error that ends the answer",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": list(references.values())},
    }
    data = {"anyOf": [{"const": "[DONE]", "description": "the end of every stream"}, chunk_or_error]}
    return {"type": "object", "required": ["data"], "properties": {"data": data}, **definitions}


def corrected_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Correct the OpenAPI schema that FastAPI makes, in place; returned for convenience.

    It loses the 422 answers that this server never gives, and gets the definitions of streamed events.
    """
    components = schema["components"]["schemas"]
    for path in schema["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
            for content in operation["responses"]["200"].get("content", {}).values():
                for name, definition in content.get("schema", {}).pop("$defs", {}).items():
                    components.setdefault(name, definition)
    for name in ("HTTPValidationError", "ValidationError"):
        components.pop(name, None)
    return schema
