"""GET /v1/models, /model_info and /server_info: what is served, and how the server is doing.

/model_info and /server_info have the keys that SGLang's routers and benchmarks read.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

import specmamba
from specmamba.engine.thread import EngineThread
from specmamba.server.api.operations import engine_stats
from specmamba.server.api.service import Service
from specmamba.server.http.callers import check_operator
from specmamba.server.http.error_answers import errors

if TYPE_CHECKING:
    from specmamba.engine.scheduler import EngineStats


class ModelCard(BaseModel):
    """A model that can be named in requests."""

    id: str
    root: Annotated[str | None, Field(description="where its checkpoint and tokenizer are")] = None
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "specmamba"
    max_model_len: int


class ModelList(BaseModel):
    """The models that can be named in requests."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


def model_routes(service: Service) -> APIRouter:
    """GET /v1/models and /v1/models/{name}."""
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
        """One model by its name, which may have slashes."""
        service.check_model(name)
        return card(name)

    return router


class ModelInfo(BaseModel):
    """The model that is served."""

    model_path: str
    tokenizer_path: str
    served_model_name: str
    is_generation: Literal[True] = True
    has_image_understanding: Literal[False] = False
    has_audio_understanding: Literal[False] = False
    preferred_sampling_params: None = None
    weight_version: str
    model_type: str | None
    architectures: list[str]
    max_context_length: int


class Version(BaseModel):
    """The version of this program."""

    version: str


class InternalState(BaseModel):
    """Figures of the engine that SGLang's benchmarks read."""

    avg_spec_accept_length: Annotated[float | None, Field(description="since the start; null before the first step")]
    effective_max_running_requests_per_dp: int


class ServerInfo(BaseModel):
    """The configuration and the state of the server. One process serves one copy of one model."""

    version: str
    uptime_seconds: float
    status: Literal["ready", "draining", "stopped"]
    served_model_names: list[str]
    served_model_name: str
    model_path: str
    tokenizer_path: str
    context_length: int
    page_size: int
    tp_size: int
    dp_size: int
    disaggregation_mode: Literal["null", "prefill", "decode"]
    disaggregation_bootstrap_port: int
    max_running_requests: int
    max_total_num_tokens: int | None
    max_total_tokens: int | None
    max_prefill_tokens: int
    speculative_algorithm: str | None
    speculative_num_steps: int | None
    speculative_eagle_topk: int | None
    speculative_num_draft_tokens: int | None
    internal_states: list[InternalState]
    engine: dict[str, Any]
    stats: dict[str, Any]


def info_routes(service: Service) -> APIRouter:
    """GET /server_info and /model_info, also under their older names."""
    router = APIRouter()
    started = time.monotonic()

    @router.get("/server_info", responses=errors(401, 403))
    @router.get("/get_server_info", responses=errors(401, 403), include_in_schema=False)
    async def server_info(request: Request) -> ServerInfo:
        """The configuration and the state of the server. For the operator."""
        check_operator(request.scope)
        return _server_info(service, await engine_stats(service.engine), time.monotonic() - started)

    @router.get("/version", responses=errors(401))
    async def version() -> Version:
        """The version of the server."""
        return Version(version=specmamba.__version__)

    @router.get("/model_info", responses=errors(401))
    @router.get("/get_model_info", responses=errors(401), include_in_schema=False)
    async def model_info() -> ModelInfo:
        """The model that is served."""
        described = service.engine.constants.description
        return ModelInfo(
            model_path=_model_path(service),
            tokenizer_path=_model_path(service),
            served_model_name=service.model_names[0],
            weight_version=service.config.revision or "default",
            model_type=_text(described.get("model_type")),
            architectures=[str(described["architecture"])] if "architecture" in described else [],
            max_context_length=service.context_length,
        )

    return router


def _server_info(service: Service, stats: EngineStats | None, uptime_s: float) -> ServerInfo:
    config, described = service.config, service.engine.constants.description
    algorithm = _text(described.get("speculative_algorithm"))
    drafts = {} if algorithm in (None, "none") else described
    num_tokens = _number(described.get("kv_pool_tokens"))
    most = _number(described.get("max_running_requests")) or config.max_running_requests
    accept_length = None if stats is None else stats.spec.accept_length or None
    return ServerInfo(
        version=specmamba.__version__,
        uptime_seconds=uptime_s,
        status=_status(service.engine),
        served_model_names=list(service.model_names),
        served_model_name=service.model_names[0],
        model_path=_model_path(service),
        tokenizer_path=_model_path(service),
        context_length=service.context_length,
        page_size=config.page_size,
        tp_size=config.tp_size,
        dp_size=config.first_replicas,
        disaggregation_mode=config.disaggregation_mode,
        disaggregation_bootstrap_port=config.disaggregation_bootstrap_port,
        max_running_requests=most,
        max_total_num_tokens=num_tokens,
        max_total_tokens=num_tokens,
        max_prefill_tokens=config.chunked_prefill_size,
        speculative_algorithm=_text(drafts.get("speculative_algorithm")),
        speculative_num_steps=_number(drafts.get("speculative_num_steps")),
        speculative_eagle_topk=_number(drafts.get("speculative_eagle_topk")),
        speculative_num_draft_tokens=_number(drafts.get("speculative_num_draft_tokens")),
        internal_states=[
            InternalState(avg_spec_accept_length=accept_length, effective_max_running_requests_per_dp=most)
        ],
        engine=described,
        stats={} if stats is None else dataclasses.asdict(stats),
    )


def _status(engine: EngineThread) -> Literal["ready", "draining", "stopped"]:
    if engine.is_accepting:
        return "ready"
    return "stopped" if engine.has_stopped else "draining"


def _model_path(service: Service) -> str:
    return str(service.engine.constants.description["model"])


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _number(value: object) -> int | None:
    return value if isinstance(value, int) else None
