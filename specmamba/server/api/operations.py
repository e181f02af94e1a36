"""GET /health, /ready, /metrics and /cache, POST /flush_cache: for probes, scrapers, tenants and the operator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Query, Request
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, Field
from starlette.responses import PlainTextResponse, Response

from specmamba.cache.prefix.inspection import View
from specmamba.engine.thread import EngineThread
from specmamba.errors import EngineStoppedError
from specmamba.server.api.service import Service
from specmamba.server.http.callers import caller_of, check_operator, view_of
from specmamba.server.http.error_answers import SERVER, ApiError, errors
from specmamba.server.http.fields import StrictModel

if TYPE_CHECKING:
    from specmamba.engine.base_engine import BaseEngine
    from specmamba.engine.scheduler import EngineStats

T = TypeVar("T")

# Without an answer of the engine within this time, a report has no engine figures.
_STATS_TIMEOUT_S = 2.0
# The engine answers between two steps. After this time the client gets an error in place of an answer.
_ENGINE_TIMEOUT_S = 60.0


class Health(BaseModel):
    """Whether the engine runs."""

    status: Literal["ok", "draining"]


class CacheReport(BaseModel):
    """The prefix cache: its settings, what is in it now, and what has happened since the start."""

    enabled: bool
    strategy: Literal["no_buffer", "extra_buffer"]
    track_interval: Annotated[int | None, Field(description="generated tokens between two states; null: none left")]
    policy: Annotated[Literal["lru", "flops"], Field(description="what is evicted first")]
    page_size: int

    hit_rate: Annotated[float, Field(description="hit_tokens / query_tokens; 0 before the first request")]
    query_tokens: Annotated[int, Field(description="tokens of admitted requests that a hit could have spared")]
    hit_tokens: Annotated[int, Field(description="those that one did spare")]
    misses: Annotated[dict[str, int], Field(description="requests by why their hit was not longer")]

    num_nodes: int
    num_tombstones: Annotated[int, Field(description="nodes with KV and without a state")]
    num_salts: Annotated[int, Field(description="trees that share nothing")]
    num_tokens: Annotated[int, Field(description="tokens in the tree")]
    num_locked_tokens: Annotated[int, Field(description="those that running requests stand on")]
    num_states: int
    inserted_tokens: int
    evicted_tokens: int
    evicted_states: int
    duplicate_states: Annotated[int, Field(description="states that were offered for a place that had one")]

    num_pages: Annotated[int, Field(description="of the whole KV pool, requests' included; so are the figures below")]
    num_free_pages: int
    num_evictable_pages: int
    num_state_slots: int
    num_free_state_slots: int
    num_evictable_states: int


class OwnCacheReport(BaseModel):
    """The prefix cache as one tenant sees it: its settings, and what its own requests found."""

    enabled: bool
    strategy: Literal["no_buffer", "extra_buffer"]
    track_interval: Annotated[int | None, Field(description="generated tokens between two states; null: none left")]
    policy: Annotated[Literal["lru", "flops"], Field(description="what is evicted first")]
    hit_rate: Annotated[float, Field(description="hit_tokens / query_tokens; 0 before the first request")]
    query_tokens: Annotated[int, Field(description="tokens of the tenant's requests that a hit could have spared")]
    hit_tokens: Annotated[int, Field(description="those that one did spare")]
    misses: Annotated[dict[str, int], Field(description="requests by why their hit was not longer")]


class Flushed(BaseModel):
    """What a flush of the prefix cache did."""

    success: Literal[True] = True
    flushed_tokens: int


async def engine_stats(engine: EngineThread) -> EngineStats | None:
    """The engine's statistics, or None when it has stopped or is in a long step."""
    try:
        return await asyncio.wait_for(asyncio.wrap_future(engine.call(lambda engine: engine.stats())), _STATS_TIMEOUT_S)
    except (EngineStoppedError, TimeoutError):
        return None


class Ready(BaseModel):
    """The model is loaded, and requests are accepted."""

    status: Literal["ready"] = "ready"


def health_routes(service: Service) -> APIRouter:
    """GET /health, /ready and /metrics."""
    router = APIRouter()
    engine = service.engine

    @router.head("/health", include_in_schema=False)
    @router.get("/health", responses=errors(503))
    async def health() -> Health:
        """200 while the engine runs, 503 once it has failed or stopped."""
        _check_running(engine)
        return Health(status="ok" if engine.is_accepting else "draining")

    @router.post("/ping", include_in_schema=False)
    @router.get("/ping", responses=errors(503))
    async def ping() -> Health:
        """/health, under the name by which hosting platforms ask."""
        return await health()

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready", responses=errors(503))
    async def ready() -> Ready:
        """200 while requests are accepted: the model is loaded, and the server is not about to stop."""
        _check_running(engine)
        if not engine.is_accepting:
            raise ApiError(
                503, "the server is shutting down", kind=SERVER, code="draining", headers={"Retry-After": "1"}
            )
        return Ready()

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics(request: Request) -> Response:
        """Figures for Prometheus; the operator's also tell misses of another salt apart from other misses."""
        whole = caller_of(request.scope).is_operator
        text = service.metrics.render(await engine_stats(engine), with_salts=whole)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    return router


def _check_running(engine: EngineThread) -> None:
    if engine.failed is not None:
        raise ApiError(503, "the engine has failed", kind=SERVER, code="engine_failed")
    if engine.has_stopped:
        raise ApiError(503, "the engine has stopped", kind=SERVER, code="engine_stopped")


class CacheQuery(StrictModel):
    """The parameters of GET /cache."""

    format: Literal["json", "text"] = "json"


def prefix_cache_routes(service: Service) -> APIRouter:
    """GET /cache and POST /flush_cache."""
    router = APIRouter()
    text = {"text/plain": {"schema": {"type": "string", "description": "one line per node of the tree"}}}

    @router.get(
        "/cache",
        responses={200: {"content": text}, **errors(400, 401, 403, 503)},
        response_model=CacheReport | OwnCacheReport,
    )
    async def cache(request: Request, query: Annotated[CacheQuery, Query()]) -> Response:
        """The prefix cache as JSON, or its tree as text: all of it for the operator, a tenant's part for the tenant.

        Neither shows any prompt.
        """
        view = view_of(request.scope)
        if query.format == "text":
            return PlainTextResponse(await between_steps(service.engine, lambda engine: engine.cache_text(view)) + "\n")
        report = await between_steps(service.engine, lambda engine: _report(engine, view))
        return Response(report.model_dump_json(), media_type="application/json")

    @router.post("/flush_cache", responses=errors(401, 403, 503))
    async def flush_cache(request: Request) -> Flushed:
        """Evict every cached prefix that no running request uses. For the operator."""
        check_operator(request.scope)
        num_tokens = await between_steps(service.engine, lambda engine: engine.flush_cache())
        return Flushed(flushed_tokens=num_tokens)

    return router


async def between_steps(engine: EngineThread, function: Callable[[Any], T]) -> T:
    """Call a function with the engine, on its thread, between two steps.

    Raises:
        EngineStoppedError: the engine has stopped.
        ApiError: 503; the current step did not end in time.
    """
    try:
        return await asyncio.wait_for(asyncio.wrap_future(engine.call(function)), _ENGINE_TIMEOUT_S)
    except TimeoutError:
        message = f"the engine has been in one step for more than {_ENGINE_TIMEOUT_S:g} s: try again later"
        raise ApiError(503, message, kind=SERVER, code="engine_busy") from None


def _report(engine: BaseEngine, view: View) -> CacheReport | OwnCacheReport:
    return (CacheReport if view.is_whole else OwnCacheReport).model_validate(engine.cache_report(view))
