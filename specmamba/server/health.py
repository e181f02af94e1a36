"""GET /health, /ready and /metrics: what probes and scrapers ask."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.responses import Response

from specmamba.engine.thread import EngineThread
from specmamba.server.errors import SERVER, ApiError
from specmamba.server.info import engine_stats
from specmamba.server.openapi import errors
from specmamba.server.responses import Health
from specmamba.server.service import Service


class Ready(BaseModel):
    """The model is loaded and requests are taken."""

    status: Literal["ready"] = "ready"


def health_routes(service: Service) -> APIRouter:
    """The routes that say whether the engine runs."""
    router = APIRouter()
    engine = service.engine

    @router.head("/health", include_in_schema=False)
    @router.get("/health", responses=errors(503))
    async def health() -> Health:
        """200 while the engine runs, 503 once it has failed or stopped."""
        _check_running(engine)
        return Health(status="ok" if engine.is_accepting else "draining")

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready", responses=errors(503))
    async def ready() -> Ready:
        """200 while requests are taken: the model is loaded, and the server is not about to stop."""
        _check_running(engine)
        if not engine.is_accepting:
            raise ApiError(
                503, "the server is shutting down", kind=SERVER, code="draining", headers={"Retry-After": "1"}
            )
        return Ready()

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Figures for Prometheus."""
        return Response(service.metrics.render(await engine_stats(engine)), media_type=CONTENT_TYPE_LATEST)

    return router


def _check_running(engine: EngineThread) -> None:
    if engine.failed is not None:
        raise ApiError(503, "the engine has failed", kind=SERVER, code="engine_failed")
    if engine.has_stopped:
        raise ApiError(503, "the engine has stopped", kind=SERVER, code="engine_stopped")
