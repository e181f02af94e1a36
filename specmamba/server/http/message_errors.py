"""Errors in Anthropic's shape, for the addresses below /v1/messages."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessageErrorDetail(BaseModel):
    """An error in Anthropic's terms."""

    type: str
    message: str


class MessageError(BaseModel):
    """The body of every answer below /v1/messages that is not a success."""

    type: Literal["error"] = "error"
    error: MessageErrorDetail

    @classmethod
    def of(cls, status: int, message: str) -> MessageError:
        """The error with a status of HTTP."""
        kind = _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return cls(error=MessageErrorDetail(type=kind, message=message))


def has_message_errors(path: str) -> bool:
    """Whether errors of an address have this shape."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")
