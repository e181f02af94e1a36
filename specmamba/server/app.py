"""The application: routes, guards and error handlers around one engine thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute

import specmamba
from specmamba.engine.thread import EngineThread
from specmamba.server.api.chat import chat_routes
from specmamba.server.api.completions import completion_routes
from specmamba.server.api.documentation import documentation_routes
from specmamba.server.api.models import info_routes, model_routes
from specmamba.server.api.operations import health_routes, prefix_cache_routes
from specmamba.server.api.service import Service
from specmamba.server.api.stored_prefixes import stored_prefix_routes
from specmamba.server.api.tokenization import tokenize_routes
from specmamba.server.http.error_answers import corrected_schema, install_error_handlers
from specmamba.server.http.guards import install_guards
from specmamba.server.messages_api.message_routes import message_routes
from specmamba.server.observe.call_record import CallRecord, RecordCalls
from specmamba.server.observe.logs import log_call
from specmamba.server.observe.tracing import build_tracer
from specmamba.server.page.routes import event_routes, page_routes
from specmamba.server.replica_routes import replica_routes
from specmamba.server.responses_api.response_route import response_routes
from specmamba.server_config import ServerConfig


def create_app(config: ServerConfig, engine_thread: EngineThread) -> FastAPI:
    """The ASGI application that serves an engine over HTTP.

    Args:
        config: the flags of ``specmamba serve``.
        engine_thread: must have been started; it is not stopped when the application ends.

    Raises:
        ConfigError: ``--otlp-traces-endpoint`` is not usable, or OpenTelemetry is not installed.
    """
    service = Service(config, engine_thread)
    app = FastAPI(
        title="specmamba",
        version=specmamba.__version__,
        description="OpenAI-compatible serving of hybrid language models with speculative decoding.",
        docs_url=None,  # both pages load scripts from other servers; ``documentation_routes`` has one that does not
        redoc_url=None,
        redirect_slashes=False,  # it would redirect clients to whatever host their Host header names
    )
    routers = _routers(service)
    install_error_handlers(app, [r for router in routers for r in router.routes if isinstance(r, APIRoute)])
    for router in routers:
        app.include_router(router)
    _correct_schema(app)
    install_guards(app, config)
    # Added last, so that it is the outermost: it also records the calls that the guards refuse.
    app.add_middleware(RecordCalls, at_end=_at_end(service))
    return app


def _routers(service: Service) -> list[APIRouter]:
    routers = [
        completion_routes(service),
        chat_routes(service),
        response_routes(service),
        message_routes(service),
        tokenize_routes(service),
        model_routes(service),
        health_routes(service),
        info_routes(service),
        prefix_cache_routes(service),
        stored_prefix_routes(service),
        replica_routes(service),
        documentation_routes(),
    ]
    if not service.config.disable_page:
        routers += [page_routes(), event_routes(service)]
    return routers


def _at_end(service: Service) -> list[Callable[[CallRecord], None]]:
    """The functions that get the record of every call when it ends."""
    config, tracer = service.config, build_tracer(service.config)
    reports: list[Callable[[CallRecord], None]] = [service.metrics.record_call]
    if not config.disable_log_requests:
        reports.append(log_call)
    if tracer is not None:
        reports.append(tracer.record_call)
    return reports


def _correct_schema(app: FastAPI) -> None:
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        return app.openapi_schema or corrected_schema(generate())

    app.openapi = openapi  # type: ignore[method-assign]
