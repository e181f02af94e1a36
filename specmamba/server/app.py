"""The application: routes, guards and error handlers around one engine thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, FastAPI

import specmamba
from specmamba.engine.thread import EngineThread
from specmamba.server.api.chat import chat_routes
from specmamba.server.api.completions import completion_routes
from specmamba.server.api.models import info_routes, model_routes
from specmamba.server.api.operations import health_routes, prefix_cache_routes
from specmamba.server.api.service import Service
from specmamba.server.api.tokens import tokenize_routes
from specmamba.server.http.error_answers import finished, install_error_handlers
from specmamba.server.http.guards import install_guards
from specmamba.server.observe.call_record import CallRecord, RecordCalls
from specmamba.server.observe.logs import log_call
from specmamba.server.observe.tracing import build_tracer
from specmamba.server.page.routes import event_routes, page_routes
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
        model_routes(service),
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
