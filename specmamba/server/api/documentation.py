"""GET /docs: what the server answers to, as a plain page without scripts, made from the OpenAPI schema."""

from __future__ import annotations

from html import escape
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
</head>
<body>
<h1>{title}</h1>
<p>{description}</p>
<table>
{rows}
</table>
<p>Bodies, answers and errors, field by field: <a href="openapi.json">openapi.json</a> (OpenAPI {openapi})</p>
</body>
</html>
"""


def documentation_routes() -> APIRouter:
    """GET /docs. It needs no key: there is nothing about the model or its clients in it."""
    router = APIRouter(include_in_schema=False)

    @router.get("/docs")
    async def documentation(request: Request) -> HTMLResponse:
        return HTMLResponse(page_of(request.app.openapi()), headers=_HEADERS)

    return router


def page_of(schema: dict[str, Any]) -> str:
    """The page of an OpenAPI schema: a line for each method of each address."""
    info = schema["info"]
    rows = [
        f"<tr><td>{escape(method.upper())}</td><td><code>{escape(path)}</code></td><td>{escape(_first(operation))}</td></tr>"
        for path, operations in schema["paths"].items()
        for method, operation in operations.items()
    ]
    return _PAGE.format(
        title=escape(f"{info['title']} {info['version']}"),
        description=escape(info["description"]),
        rows="\n".join(rows),
        openapi=escape(schema["openapi"]),
    )


def _first(operation: dict[str, Any]) -> str:
    """The first paragraph of an operation's description, on one line."""
    text: str = operation.get("description") or operation.get("summary") or ""
    return " ".join(text.split("\n\n")[0].split())
