"""What stands before the application: the key, the size of the body, its type."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specmamba.server.errors import ApiError

# Probes and scrapers rarely carry a key, and learn no more than load figures.
OPEN_PATHS = frozenset({"/health", "/metrics"})


class RequireApiKey:
    """Asks for ``Authorization: Bearer KEY``."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self.app = app
        self._key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._has_key(scope):
            error = ApiError(
                401,
                "the API key is missing or wrong: send the header 'Authorization: Bearer KEY'",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error.response()(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        # Bytes as they came: a header need not be ASCII, and compare_digest refuses text that is not.
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        values = [value for name, value in headers if name == b"authorization"]
        scheme, _, key = values[0].strip().partition(b" ") if len(values) == 1 else (b"", b"", b"")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key)


class LimitBody:
    """Refuses bodies that are too large, announced or not, and those that are not JSON."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        announced = headers.get("content-length", "")
        has_body = announced not in ("", "0") or "transfer-encoding" in headers
        if announced.isdecimal() and int(announced) > self._max_bytes:
            await self._too_large().response()(scope, receive, send)
        elif has_body and not _is_json(headers.get("content-type", "")):
            # Also keeps the forms of foreign web pages out, which browsers send without asking.
            error = ApiError(415, "send JSON, with the header 'Content-Type: application/json'", code="not_json")
            await error.response()(scope, receive, send)
        else:
            await self.app(scope, self._counted(receive), send)

    def _counted(self, receive: Receive) -> Receive:
        received = 0

        async def receive_counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                # Only an HTTPException passes through the reading of a body unchanged.
                raise HTTPException(413, str(self._too_large()))
            return message

        return receive_counted

    def _too_large(self) -> ApiError:
        return ApiError(
            413, f"the body is larger than {self._max_bytes} bytes (--max-request-bytes)", code="request_too_large"
        )


def _is_json(content_type: str) -> bool:
    media_type = content_type.partition(";")[0].strip().lower()
    return media_type == "application/json" or (media_type.startswith("application/") and media_type.endswith("+json"))
