"""The middlewares around an application: cross-origin requests, API keys, and the limits on calls and bodies."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from specmamba.server.http.error_answers import ApiError
from specmamba.server.http.limits import CALLER, LimitBody, LimitCalls
from specmamba.server_config import ServerConfig

ANY_ORIGIN = "*"
_READABLE_HEADERS = ("X-Request-Id", "Retry-After")
# Probes and scrapers rarely send a key, and get load figures only. The page's files hold nothing about the model; the
# page asks its user for a key.
_OPEN_PATHS = frozenset({"/", "/health", "/ready", "/metrics"})
_OPEN_PREFIX = "/page/"


def is_allowed_origin(headers: Headers, allowed: Sequence[str]) -> bool:
    """Whether the ``Origin`` of a request that changes something is allowed.

    Programs send no ``Origin``. Browsers do, also for requests that a page of another server has started. The
    server's own page is recognized by equal hosts in ``Origin`` and ``Host``.
    """
    origins = headers.getlist("origin")
    if not origins:
        return True
    if len(origins) > 1:
        return False
    origin = origins[0].lower()
    if ANY_ORIGIN in allowed or origin in allowed:
        return True
    scheme, _, host = origin.partition("://")
    return scheme in ("http", "https") and bool(host) and host == headers.get("host", "").lower()


def cors_middleware(app: ASGIApp, origins: Sequence[str]) -> CORSMiddleware:
    """ASGI middleware: answers preflight requests of browsers, and lets pages of ``origins`` read answers."""
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST"),
        allow_headers=(ANY_ORIGIN,),  # clients send headers of their own; no header grants access except a valid key
        expose_headers=_READABLE_HEADERS,
    )


def install_guards(app: FastAPI, config: ServerConfig) -> None:
    """Add the middlewares that ``config`` asks for. A middleware that is added later is further outside.

    From the outside: cross-origin (preflight requests carry no key), key, calls at a time, body.
    """
    app.add_middleware(LimitBody, max_bytes=config.max_request_bytes)
    if config.max_calls_per_key is not None:
        app.add_middleware(LimitCalls, max_calls=config.max_calls_per_key)
    if config.api_key:
        app.add_middleware(RequireApiKey, keys=[key.get_secret_value() for key in config.api_key])
    if config.cors_allow_origins:
        app.add_middleware(cors_middleware, origins=config.cors_allow_origins)


class RequireApiKey:
    """ASGI middleware: requires ``Authorization: Bearer KEY`` with one of ``keys``; else status 401."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _OPEN_PATHS or scope["path"].startswith(_OPEN_PREFIX):
            await self.app(scope, receive, send)
            return
        index = self._index_of_key(scope)
        if index is None:
            await _refusal().response()(scope, receive, send)
            return
        scope[CALLER] = f"key {index}"
        await self.app(scope, receive, send)

    def _index_of_key(self, scope: Scope) -> int | None:
        """The index of the key that a request carries, or None. Takes the same time for every wrong key."""
        # Compared as bytes: a header need not be ASCII.
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        values = [value for name, value in headers if name == b"authorization"]
        scheme, _, key = values[0].strip().partition(b" ") if len(values) == 1 else (b"", b"", b"")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return matches.index(True) if any(matches) and scheme.lower() == b"bearer" else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()  # equal lengths: compare_digest reveals the length


def _refusal() -> ApiError:
    return ApiError(
        401,
        "the API key is missing or wrong: send the header 'Authorization: Bearer KEY'",
        kind="authentication_error",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )
