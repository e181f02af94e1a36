"""The application: routes, guards and error handlers around one engine thread."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

import specmamba
from specmamba.engine.thread import EngineThread
from specmamba.errors import EngineStoppedError
from specmamba.server.chat import chat_routes
from specmamba.server.completions import completion_routes
from specmamba.server.errors import SERVER, ApiError, install_error_handlers
from specmamba.server.guards import LimitBody, RequireApiKey
from specmamba.server.openapi import drop_unused, errors
from specmamba.server.prefix_cache import prefix_cache_routes
from specmamba.server.responses import Health, ModelCard, ModelList, ServerInfo
from specmamba.server.service import Service
from specmamba.server_config import ServerConfig

if TYPE_CHECKING:
    from specmamba.engine.engine import EngineStats

# A scrape does not wait longer than this for a step to end; it gets the figures of the last one instead.
_STATS_TIMEOUT_S = 2.0


def create_app(config: ServerConfig, engine_thread: EngineThread) -> FastAPI:
    """The HTTP interface of an engine thread that has been started."""
    service = Service(config, engine_thread)
    app = FastAPI(
        title="specmamba",
        version=specmamba.__version__,
        description="OpenAI-compatible serving of hybrid language models with speculative decoding.",
        docs_url=None,  # both pages load scripts from elsewhere
        redoc_url=None,
    )
    install_error_handlers(app)
    app.include_router(completion_routes(service))
    app.include_router(chat_routes(service))
    app.include_router(_model_routes(service))
    app.include_router(_operator_routes(service))
    app.include_router(prefix_cache_routes(service))
    _describe_truly(app)
    app.add_middleware(LimitBody, max_bytes=config.max_request_bytes)
    if config.api_key is not None:  # added last, so that it is asked first
        app.add_middleware(RequireApiKey, api_key=config.api_key.get_secret_value())
    return app


def _describe_truly(app: FastAPI) -> None:
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        return app.openapi_schema or drop_unused(generate())

    app.openapi = openapi  # type: ignore[method-assign]


def _model_routes(service: Service) -> APIRouter:
    router = APIRouter()

    def card(name: str) -> ModelCard:
        return ModelCard(id=name, created=service.created, max_model_len=service.context_length)

    @router.get("/v1/models", responses=errors(401))
    async def list_models() -> ModelList:
        """The models that requests can name."""
        return ModelList(data=[card(name) for name in service.model_names])

    @router.get("/v1/models/{name:path}", responses=errors(401, 404))
    async def get_model(name: str) -> ModelCard:
        """One of them; the name may hold slashes."""
        service.check_model(name)
        return card(name)

    return router


def _operator_routes(service: Service) -> APIRouter:
    router = APIRouter()
    started = time.monotonic()

    @router.get("/health", responses=errors(503))
    async def health() -> Health:
        """200 while the engine runs, 503 once it has failed or stopped."""
        if service.engine.failed is not None:
            raise ApiError(503, "the engine has failed", kind=SERVER, code="engine_failed")
        if service.engine.has_stopped:
            raise ApiError(503, "the engine has stopped", kind=SERVER, code="engine_stopped")
        return Health(status="ok" if service.engine.is_accepting else "draining")

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Figures for Prometheus."""
        return Response(service.metrics.render(await _stats(service.engine)), media_type=CONTENT_TYPE_LATEST)

    @router.get("/server_info", responses=errors(401))
    async def server_info() -> ServerInfo:
        """What runs here and how it is doing."""
        stats = await _stats(service.engine)
        return ServerInfo(
            version=specmamba.__version__,
            uptime_seconds=time.monotonic() - started,
            served_model_names=list(service.model_names),
            context_length=service.context_length,
            engine=service.engine.constants.description,
            stats={} if stats is None else dataclasses.asdict(stats),
        )

    return router


async def _stats(engine: EngineThread) -> EngineStats | None:
    """The engine's statistics, or None when it has stopped or is in a long step."""
    try:
        return await asyncio.wait_for(asyncio.wrap_future(engine.call(lambda engine: engine.stats())), _STATS_TIMEOUT_S)
    except (EngineStoppedError, TimeoutError):
        return None
