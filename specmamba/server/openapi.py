"""What the OpenAPI schema says about answers that FastAPI cannot see in a signature."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from specmamba.server.responses import ErrorAnswer

_ERRORS = {
    400: "a field is wrong, or the prompt does not fit",
    401: "the API key is missing or wrong",
    403: "the request comes from a web page",
    404: "there is no such model",
    413: "the body is too large",
    415: "the body is not declared as JSON",
    429: "the queue is full: try again later",
    500: "the engine failed",
    503: "the server is shutting down, or its engine does not answer",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The error answers of a route."""
    return {status: {"model": ErrorAnswer, "description": _ERRORS[status]} for status in statuses}


def answers(whole: type[BaseModel], chunk: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """The answers of a route that generates: whole, streamed, or an error.

    422 is FastAPI's own status for wrong fields; ``drop_unused`` takes it out, since this server answers 400.
    """
    stream = {"text/event-stream": {"schema": {"type": "string", "description": f"events of {chunk.__name__}"}}}
    ok: dict[int | str, dict[str, Any]] = {
        200: {"model": whole, "description": "the answer, or a stream of events", "content": stream}
    }
    return ok | errors(400, 401, 404, 413, 415, 429, 500, 503)


def drop_unused(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without the 422 answers that FastAPI adds and this server never gives."""
    for path in schema["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        schema["components"]["schemas"].pop(name, None)
    return schema
