"""Which web pages may use the API: none but the server's own, unless ``--cors-allow-origins`` names them."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

ANY_ORIGIN = "*"
_READABLE_HEADERS = ("X-Request-Id", "Retry-After")


def is_allowed_origin(headers: Headers, allowed: Sequence[str]) -> bool:
    """Whether a request that changes something may come from where it says it comes from.

    Programs send no ``Origin``; a browser does, and may be in the hands of a foreign page. The server's own page
    is known by the host that both headers name.
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
    """Answers the questions that browsers ask before they send, and marks answers as readable for ``origins``."""
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST"),
        allow_headers=(ANY_ORIGIN,),  # clients add headers of their own; none of them gives a right
        expose_headers=_READABLE_HEADERS,
    )
