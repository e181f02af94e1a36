"""The middlewares around an application: hosts and origins, callers, and the limits on calls and bodies."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from specmamba.server.http.callers import IdentifyCaller, host_name, is_loopback
from specmamba.server.http.error_answers import ApiError
from specmamba.server.http.fields import shortened
from specmamba.server.http.limits import LimitBody, LimitCalls
from specmamba.server_config import ServerConfig

ANY = "*"
_READABLE_HEADERS = ("X-Request-Id", "Retry-After")


def install_guards(app: FastAPI, config: ServerConfig) -> None:
    """Add the middlewares that ``config`` asks for. A middleware that is added later is further outside.

    From the outside: host, origin, cross-origin answers (preflight requests carry no key), caller, calls, body.
    """
    app.add_middleware(LimitBody, max_bytes=config.max_request_bytes)
    if config.max_calls_per_key is not None:
        app.add_middleware(LimitCalls, max_calls=config.max_calls_per_key)
    app.add_middleware(IdentifyCaller, config=config)
    if config.cors_allow_origins:
        app.add_middleware(cors_middleware, origins=config.cors_allow_origins)
    app.add_middleware(CheckOrigin, allowed=config.cors_allow_origins)
    app.add_middleware(CheckHost, bound=config.host, allowed=config.allowed_hosts)


class CheckHost:
    """ASGI middleware: answers requests to this server's own names only; others get status 421.

    A web page can let its own name point to this machine (DNS rebinding). Its requests are of the same origin for the
    browser, and the name in their ``Host`` header is all that tells them from those of this server's page.
    """

    def __init__(self, app: ASGIApp, bound: str, allowed: Sequence[str]) -> None:
        """``bound``: the address that the server listens on; ``allowed``: further names, ``*.example.com`` or ``*``."""
        self.app = app
        self._bound, self._allowed = bound.lower(), allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            hosts = [value.decode("latin1") for name, value in scope["headers"] if name == b"host"]
            wrong = [host for host in hosts if not self._allows(host)]  # HTTP/1.0 may have none; browsers always do
            if wrong:
                await _wrong_host(wrong[0]).response()(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _allows(self, host: str) -> bool:
        if ANY in self._allowed:
            return True
        name = host_name(host)
        if name is None:
            return False
        if is_loopback(name) or name == self._bound or name in self._allowed:
            return True
        if any(pattern.startswith("*.") and name.endswith(pattern[1:]) for pattern in self._allowed):
            return True
        return _is_address(name) and self._listens_everywhere

    @property
    def _listens_everywhere(self) -> bool:
        """Whether any address may be one of this machine. A page cannot choose an address as its name."""
        return not self._bound or (_is_address(self._bound) and ipaddress.ip_address(self._bound).is_unspecified)


class CheckOrigin:
    """ASGI middleware: refuses what web pages of other origins send, unless ``allowed`` has them; status 403.

    Browsers send ``Origin`` with most requests, and ``Sec-Fetch-Site`` with those of pictures and scripts too. Links to
    this server are followed.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str]) -> None:
        self.app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_allowed_origin(Headers(scope=scope), self._allowed):
            text = "web pages of other servers may not use this one (--cors-allow-origins)"
            await ApiError(403, text, kind="permission_error", code="forbidden").response()(scope, receive, send)
            return
        await self.app(scope, receive, send)


def is_allowed_origin(headers: Headers, allowed: Sequence[str]) -> bool:
    """Whether a request comes from this server's own page, from an ``allowed`` origin, or from no page at all.

    The server's own page is recognized by equal hosts in ``Origin`` and ``Host``.
    """
    origins = headers.getlist("origin")
    if not origins:
        is_foreign = headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
        return not is_foreign or ANY in allowed or headers.get("sec-fetch-mode") == "navigate"
    if len(origins) > 1:
        return False
    origin = origins[0].lower()
    if ANY in allowed or origin in allowed:
        return True
    scheme, _, host = origin.partition("://")
    return scheme in ("http", "https") and bool(host) and host == headers.get("host", "").lower()


def cors_middleware(app: ASGIApp, origins: Sequence[str]) -> CORSMiddleware:
    """ASGI middleware: answers preflight requests of browsers, and lets pages of ``origins`` read answers."""
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST"),
        allow_headers=(ANY,),  # clients send headers of their own; no header grants access except a valid key
        expose_headers=_READABLE_HEADERS,
    )


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _wrong_host(host: str) -> ApiError:
    text = f"this server is not {shortened(host, 100)!r}: name it by --allowed-hosts to be reached as that"
    return ApiError(421, text, code="host_not_allowed")
