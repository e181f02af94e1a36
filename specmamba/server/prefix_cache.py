"""GET /cache and POST /flush_cache: what operators see of the prefix cache, and how they empty it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from fastapi import APIRouter, Query, Request
from starlette.responses import PlainTextResponse, Response

from specmamba.engine.thread import EngineThread
from specmamba.server.cors import is_allowed_origin
from specmamba.server.errors import SERVER, ApiError
from specmamba.server.fields import StrictModel
from specmamba.server.openapi import errors
from specmamba.server.responses import CacheReport, Flushed
from specmamba.server.service import Service

if TYPE_CHECKING:
    from specmamba.engine.engine import Engine

T = TypeVar("T")

# The engine answers between two steps; one that takes longer than this is better reported than waited for.
_ENGINE_TIMEOUT_S = 60.0


class CacheQuery(StrictModel):
    """The parameters of GET /cache."""

    format: Literal["json", "text"] = "json"


def prefix_cache_routes(service: Service) -> APIRouter:
    """The routes that show and empty the prefix cache."""
    router = APIRouter()
    text = {"text/plain": {"schema": {"type": "string", "description": "one line per node of the tree"}}}

    @router.get("/cache", responses={200: {"content": text}, **errors(400, 401, 503)}, response_model=CacheReport)
    async def cache(query: Annotated[CacheQuery, Query()]) -> Response:
        """What the prefix cache holds and how it does: figures, or the tree itself. Neither shows any prompt."""
        if query.format == "text":
            return PlainTextResponse(await _between_steps(service.engine, _tree) + "\n")
        report = await _between_steps(service.engine, _report)
        return Response(report.model_dump_json(), media_type="application/json")

    @router.post("/flush_cache", responses=errors(401, 403, 503))
    async def flush_cache(request: Request) -> Flushed:
        """Forget every cached prefix that no running request stands on."""
        if not is_allowed_origin(request.headers, service.config.cors_allow_origins):
            # A browser sends a request without a body for any page.
            raise ApiError(403, "web pages of other servers may not do this (--cors-allow-origins)", code="forbidden")
        num_tokens = await _between_steps(service.engine, lambda engine: engine.flush_cache())
        return Flushed(flushed_tokens=num_tokens)

    return router


async def _between_steps(engine: EngineThread, function: Callable[[Engine], T]) -> T:
    """Raises EngineStoppedError, and ApiError 503 when a step does not end."""
    try:
        return await asyncio.wait_for(asyncio.wrap_future(engine.call(function)), _ENGINE_TIMEOUT_S)
    except TimeoutError:
        message = f"the engine has been in one step for more than {_ENGINE_TIMEOUT_S:g} s: try again later"
        raise ApiError(503, message, kind=SERVER, code="engine_busy") from None


def _report(engine: Engine) -> CacheReport:
    config = engine.config
    tracks = config.mamba_radix_cache_strategy == "extra_buffer"
    settings = {
        "enabled": engine.prefixes.is_on,
        "strategy": config.mamba_radix_cache_strategy,
        "track_interval": config.mamba_track_interval if tracks else None,
    }
    return CacheReport.model_validate(settings | engine.prefixes.cache.summary())


def _tree(engine: Engine) -> str:
    if not engine.prefixes.is_on:
        return "the prefix cache is off (--disable-radix-cache)"
    return engine.prefixes.cache.render_text()
