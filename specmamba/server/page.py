"""GET / and /page/...: the live page. Static files of the package; what moves on it comes from the API and /events."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

from fastapi import APIRouter, Request
from starlette.responses import Response

from specmamba.server.errors import ApiError

INDEX = "index.html"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
# The page runs its own scripts, speaks to its own server, and is put into no other page.
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
    """A file as it is sent."""

    body: bytes
    media_type: str
    etag: str


def load_files() -> dict[str, StaticFile]:
    """All files of the page by their path below its folder. Nothing else is ever looked for on the disk."""
    return dict(_read(files("specmamba.server") / "page_files", ""))


def page_routes() -> APIRouter:
    """Routes that need no key: there is nothing of the model or of its clients in these files."""
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
