"""GET /replicas, POST /replicas/{id}/drain and /resume: the operator's hand on replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel, Field

from specmamba.engine.replica_control import ReplicaControl, ReplicaState, ReplicaStatus
from specmamba.errors import ReplicaStateError
from specmamba.server.api.operations import between_steps
from specmamba.server.api.service import Service
from specmamba.server.http.callers import check_operator
from specmamba.server.http.error_answers import ApiError, errors
from specmamba.server.http.fields import StrictModel

T = TypeVar("T")
ReplicaId = Annotated[int, Path(ge=0, lt=1 << 16)]


class ReplicaCard(BaseModel):
    """A replica now."""

    id: int
    state: ReplicaState
    held: Annotated[bool, Field(description="an operator has taken it out of service")]
    generation: Annotated[
        int | None, Field(description="of its process, where it is ready: how many were started for this id, up to it")
    ]
    pid: Annotated[int | None, Field(description="of its process, where it is ready; ids come again")]
    num_requests: int
    queued_tokens: Annotated[int, Field(description="tokens that it has yet to compute; each request counts as some")]
    reason: Annotated[str | None, Field(description="why it has failed to start")]


class ReplicaList(BaseModel):
    """All replicas that there can be."""

    replicas: list[ReplicaCard]


class DrainQuery(StrictModel):
    """The parameters of POST /replicas/{id}/drain."""

    timeout: Annotated[
        float | None,
        Field(
            strict=False, ge=0, le=86_400, description="seconds until its requests go on at others; none: they finish"
        ),
    ] = None
    generation: Annotated[
        int | None,
        Field(strict=False, ge=1, lt=1 << 32, description="of the process that is meant; none: whichever it is"),
    ] = None


def replica_routes(service: Service) -> APIRouter:
    """GET /replicas, POST /replicas/{id}/drain and /resume."""
    router = APIRouter(prefix="/replicas")

    @router.get("", responses=errors(400, 401, 403, 503))
    async def list_replicas(request: Request) -> ReplicaList:
        """All replicas and their states. For the operator."""
        found = await _call(service, request, lambda control: control.statuses())
        return ReplicaList(replicas=[_card(status) for status in found])

    @router.post("/{replica}/drain", responses=errors(400, 401, 403, 409, 503))
    async def drain(replica: ReplicaId, request: Request, query: Annotated[DrainQuery, Query()]) -> ReplicaCard:
        """Take a replica out of service: it gets no more requests, and ends when it has none. For the operator."""
        found = await _call(service, request, lambda control: control.drain(replica, query.timeout, query.generation))
        return _card(found)

    @router.post("/{replica}/resume", responses=errors(400, 401, 403, 409, 503))
    async def resume(replica: ReplicaId, request: Request) -> ReplicaCard:
        """Put a replica back into service, or start it again. For the operator."""
        return _card(await _call(service, request, lambda control: control.resume(replica)))

    return router


async def _call(service: Service, request: Request, function: Callable[[ReplicaControl], T]) -> T:
    """Call a function with the control of the replicas, between two steps.

    Raises:
        ApiError: 403, the caller is no operator; 400, there are no replicas; 409, a replica cannot do that now.
        EngineStoppedError: the engine has stopped.
    """
    check_operator(request.scope)

    def run(control: ReplicaControl | None) -> T:
        if control is None:
            message = "requests run in the server's own process: replicas need --dp-size above 1, or --dp-max-size"
            raise ApiError(400, message, code="no_replicas")
        return function(control)

    try:
        return await between_steps(service.engine, lambda engine: run(engine.replicas))
    except ReplicaStateError as error:
        raise ApiError(409, str(error), code="replica_state") from None


def _card(status: ReplicaStatus) -> ReplicaCard:
    return ReplicaCard.model_validate(status, from_attributes=True)
