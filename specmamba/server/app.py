"""The application: routes, guards and error handlers around one engine thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, FastAPI

import specmamba
from specmamba.engine.thread import EngineThread
from specmamba.server.calls import CallRecord, RecordCalls
from specmamba.server.chat import chat_routes
from specmamba.server.completions import completion_routes
from specmamba.server.errors import install_error_handlers
from specmamba.server.events import event_routes
from specmamba.server.guards import install_guards
from specmamba.server.health import health_routes
from specmamba.server.info import info_routes
from specmamba.server.logs import log_call
from specmamba.server.openapi import errors, finished
from specmamba.server.page import page_routes
from specmamba.server.prefix_cache import prefix_cache_routes
from specmamba.server.responses import ModelCard, ModelList
from specmamba.server.service import Service
from specmamba.server.tokenize import tokenize_routes
from specmamba.server.tracing import build_tracer
from specmamba.server_config import ServerConfig


def create_app(config: ServerConfig, engine_thread: EngineThread) -> FastAPI:
    """The HTTP interface of an engine thread that has been started. Raises ConfigError as ``build_tracer`` does."""
    service = Service(config, engine_thread)
    app = FastAPI(
        title="specmamba",
        version=specmamba.__version__,
        description="OpenAI-compatible serving of hybrid language models with speculative decoding.",
        docs_url=None,  # both pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,  # it would send clients to an address made of their own Host header
    )
    install_error_handlers(app)
    for router in _routers(service):
        app.include_router(router)
    _describe_truly(app)
    install_guards(app, config)
    # Added last, so that it sees every call first, and every answer last: those of the guards too.
    app.add_middleware(RecordCalls, at_end=_at_end(service))
    return app


def _routers(service: Service) -> list[APIRouter]:
    routers = [
        completion_routes(service),
        chat_routes(service),
        tokenize_routes(service),
        _model_routes(service),
        health_routes(service),
        info_routes(service),
        prefix_cache_routes(service),
    ]
    if not service.config.disable_page:
        routers += [page_routes(), event_routes(service)]
    return routers


def _at_end(service: Service) -> list[Callable[[CallRecord], None]]:
    """Who is told of every call that is over."""
    config, tracer = service.config, build_tracer(service.config)
    tell: list[Callable[[CallRecord], None]] = [service.metrics.record_call]
    if not config.disable_log_requests:
        tell.append(log_call)
    if tracer is not None:
        tell.append(tracer.record_call)
    return tell


def _describe_truly(app: FastAPI) -> None:
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        return app.openapi_schema or finished(generate())

    app.openapi = openapi  # type: ignore[method-assign]


def _model_routes(service: Service) -> APIRouter:
    router = APIRouter()

    def card(name: str) -> ModelCard:
        root = service.config.model or name
        return ModelCard(id=name, created=service.created, max_model_len=service.context_length, root=root)

    @router.head("/v1/models", include_in_schema=False)
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
