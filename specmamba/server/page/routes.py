"""The routes of the live page: its static files at / and /page/..., and its server-sent events at /events.

The events: ``hello`` once, then ``stats`` a few times a second, ``draft`` and ``tree`` when there is something new,
``busy`` while the engine is in a long step, and ``end`` when it has stopped. The data of each is a JSON object.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specmamba.cache.prefix.inspection import WHOLE, View
from specmamba.server.api.service import Service
from specmamba.server.api.streaming import until_client_gone
from specmamba.server.http.callers import view_of
from specmamba.server.http.error_answers import ApiError
from specmamba.server.page.feed import Feed, Listener

INDEX = "index.html"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
# The page runs its own scripts only, connects to its own server only, and cannot be framed.
SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file with its headers."""

    body: bytes
    media_type: str
    etag: str


def load_files() -> dict[str, StaticFile]:
    """Read all files of the page, by their path below its folder. Requests never read the disk."""
    return dict(_read(files("specmamba.server") / "page_files", ""))


def page_routes() -> APIRouter:
    """GET / and /page/...; they need no key: the files contain nothing about the model or its clients."""
    router = APIRouter(include_in_schema=False)
    static = load_files()

    @router.api_route("/", methods=["GET", "HEAD"])
    async def index(request: Request) -> Response:
        return _answer(request, static[INDEX])

    @router.api_route("/page/{path:path}", methods=["GET", "HEAD"])
    async def file(request: Request, path: str) -> Response:
        found = static.get(path)
        if found is None:
            raise ApiError(404, "there is nothing at this address", code="not_found")
        return _answer(request, found)

    return router


def _answer(request: Request, file: StaticFile) -> Response:
    headers = SECURITY_HEADERS | {"ETag": file.etag, "Cache-Control": "no-cache"}
    known = (tag.strip() for tag in request.headers.get("if-none-match", "").split(","))
    if file.etag in known:
        return Response(status_code=304, headers=headers)
    return Response(file.body, headers=headers, media_type=file.media_type)


def _read(folder: Traversable, prefix: str) -> Iterator[tuple[str, StaticFile]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _read(entry, f"{prefix}{entry.name}/")
            continue
        media_type = MEDIA_TYPES.get(entry.name[entry.name.rfind(".") :])
        if media_type is not None:
            body = entry.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:20]}"'
            yield f"{prefix}{entry.name}", StaticFile(body, media_type, etag)


def event_routes(service: Service) -> APIRouter:
    """GET /events: what the caller may see, since drafted tokens are shown."""
    router = APIRouter(include_in_schema=False)
    feed = Feed(service)

    @router.get("/events")
    async def events(request: Request) -> Response:
        return LiveStream(feed, view_of(request.scope))

    return router


class LiveStream(Response):
    """Server-sent events until the engine stops or the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, feed: Feed, view: View = WHOLE) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["Content-Length"]
        self._feed, self._view = feed, view

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        listener = self._feed.join(
            self._view
        )  # called here so that leave() follows in any case; its ApiError is answered
        try:
            await until_client_gone(receive, asyncio.create_task(self._send_all(listener, send)))
        finally:
            self._feed.leave(listener)

    async def _send_all(self, listener: Listener, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for name, data in listener:
            body = f"event: {name}\ndata: {data}\n\n".encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
