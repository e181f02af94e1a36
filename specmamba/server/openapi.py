"""What the OpenAPI schema says about answers that FastAPI cannot see in a signature."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from specmamba.server.responses import ErrorAnswer

_COMPONENT = "#/components/schemas/{model}"
_EVENTS = "text/event-stream"
_ERRORS = {
    400: "a field is wrong, or the prompt does not fit",
    401: "the API key is missing or wrong",
    403: "the request comes from a web page",
    404: "there is no such model",
    413: "the body is too large",
    415: "the body is not declared as JSON",
    429: "the queue is full, or the client has too many calls open: try again later",
    500: "the engine failed",
    503: "the request waited too long, or the server is shutting down",
    504: "the answer was not whole in time",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The error answers of a route."""
    return {status: {"model": ErrorAnswer, "description": _ERRORS[status]} for status in statuses}


def answers(whole: type[BaseModel], chunk: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """The answers of a route that generates: whole, streamed, or an error.

    422 is FastAPI's own status for wrong fields; ``finished`` takes it out, since this server answers 400.
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
    """The schema of one event. What it needs stands in ``$defs``, for ``finished`` to put where the others are."""
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


def finished(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema as FastAPI makes it, corrected.

    It lacks the 422 answers that this server never gives, and has the definitions of what is streamed.
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


drop_unused = finished
