"""POST /cache/save and /cache/load: cached prefixes to disk now, and from host memory or disk into the pools."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import numpy as np
from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from specmamba.cache.tiers.prefix_tiers import TierWish
from specmamba.server.api.completions import as_list
from specmamba.server.api.operations import between_steps
from specmamba.server.api.requests import CacheKey, cache_key_of
from specmamba.server.api.service import Service
from specmamba.server.http.callers import caller_of, check_operator
from specmamba.server.http.error_answers import SERVER, ApiError, errors
from specmamba.server.http.fields import Prompt, StrictModel

if TYPE_CHECKING:
    from specmamba.engine.engine import Engine

SAVE_TIMEOUT_S = 600.0
POLL_S = 0.01
LONGEST_POLL_S = 0.25  # of a load: each time it waits, it asks after half as long again
MAX_LOADS, MAX_LOADS_OF_CLIENT = 16, 4  # calls at a time: each asks the engine, between its steps, again and again


class Saved(BaseModel):
    """What was written to the folder of prefixes while it was saved, requests' own writes included."""

    success: Literal[True] = True
    written_entries: int
    written_bytes: int
    lost_entries: Annotated[int, Field(description="not written: the metrics have the reasons")]


class LoadRequest(StrictModel):
    """Texts whose prefixes are brought into the pools, before requests ask for them."""

    prompt: Prompt
    cache_salt: Annotated[CacheKey | None, Field(description="that requests will have")] = None
    extra_key: Annotated[CacheKey | None, Field(description="that requests will have")] = None


class LoadedPrompt(BaseModel):
    """One text."""

    prompt_tokens: int
    cached_tokens: Annotated[int, Field(description="of its beginning that are in the pools now, with a state")]


class Loaded(BaseModel):
    """What is cached of each text, in the order of the prompts."""

    success: Literal[True] = True
    prompts: list[LoadedPrompt]


def _refuse_without(what: str, flags: str) -> NoReturn:
    raise ApiError(400, f"this server keeps {what}: start it with {flags}", code="no_stored_prefixes")


class LoadCalls:
    """The calls of /cache/load that are being answered."""

    def __init__(self) -> None:
        self._num_open: Counter[str] = Counter()  # by the name of the client

    @contextmanager
    def place_of(self, client: str) -> Iterator[None]:
        """Count a call while it is answered. Raises ApiError 429: too many are, of this client or of all."""
        if self._num_open[client] >= MAX_LOADS_OF_CLIENT or self._num_open.total() >= MAX_LOADS:
            message = f"/cache/load answers {MAX_LOADS} calls at a time, {MAX_LOADS_OF_CLIENT} of one client"
            raise ApiError(
                429,
                f"{message}: wait for one of them to end",
                kind="rate_limit_error",
                code="too_many_loads",
                headers={"Retry-After": "1"},
            )
        self._num_open[client] += 1
        try:
            yield
        finally:
            self._num_open[client] -= 1
            self._num_open += Counter()  # without clients that have none


def stored_prefix_routes(service: Service) -> APIRouter:
    """POST /cache/save and /cache/load."""
    router = APIRouter(prefix="/cache")
    saving, loads = asyncio.Lock(), LoadCalls()

    @router.post("/save", responses=errors(400, 401, 403, 503))
    async def save(request: Request) -> Saved:
        """Write all cached prefixes to disk or to the store of the flags, and wait for it. For the operator."""
        check_operator(request.scope)
        async with saving:  # a second call waits, and finds next to nothing to write
            return await _save(service)

    @router.post("/load", responses=errors(400, 401, 429, 503))
    async def load(body: LoadRequest, request: Request) -> Loaded:
        """Bring what lies below the pools of the caller's texts into them, as far as there is room."""
        caller = caller_of(request.scope)
        with loads.place_of(caller.name):
            prompts = as_list(body.prompt)
            tokens = [await service.encode(each) if isinstance(each, str) else each for each in prompts]
            key = cache_key_of(body.cache_salt, body.extra_key)
            return Loaded(prompts=[await _load(service, each, key, caller.tenant) for each in tokens])

    return router


def _refuse_replicas(service: Service) -> None:
    if "dp_size" in service.engine.constants.description:  # of a ``ReplicatedEngine``, also where it has one replica
        message = "each replica keeps prefixes for itself: /cache/save and /cache/load need --dp-size 1"
        raise ApiError(400, message, code="several_replicas")


async def _save(service: Service) -> Saved:
    _refuse_replicas(service)
    saving = await between_steps(service.engine, lambda engine: engine.cache_manager.start_saving())
    if saving is None:
        _refuse_without("no prefixes on disk or in a store", "--hicache-storage-dir")
    before, deadline = saving.stats(), time.monotonic() + SAVE_TIMEOUT_S
    while not await between_steps(service.engine, lambda _: saving.go_on()):
        if time.monotonic() > deadline:
            message = f"disk or store have not taken all prefixes in {SAVE_TIMEOUT_S:g} s; what it has taken stays"
            raise ApiError(503, message, kind=SERVER, code="disk_too_slow")
        await asyncio.sleep(POLL_S)
    after = saving.stats()
    return Saved(
        written_entries=after.writes - before.writes,
        written_bytes=after.written_bytes - before.written_bytes,
        lost_entries=sum(after.lost_writes.values()) - sum(before.lost_writes.values()),
    )


async def _load(service: Service, tokens: Sequence[int], extra_key: str | None, tenant: str | None) -> LoadedPrompt:
    _refuse_replicas(service)

    def check(engine: Engine) -> None:
        tiers = engine.cache_manager.tiers
        if tiers is None or all(tier.name == "remote" for tier in tiers.tiers):  # which other servers have
            _refuse_without("prefixes in its pools alone", "--hicache-storage-dir or --hicache-size")
        engine.check_prompt(tokens)

    await between_steps(service.engine, check)  # it looks at each token, so not at each poll
    array, wish, pause_s = np.array(tokens, dtype=np.int64), TierWish(), POLL_S

    def go_on(engine: Engine) -> int | None:
        engine.settle()
        return engine.cache_manager.load_prefix(wish, array, extra_key, tenant)

    try:
        while (count := await between_steps(service.engine, go_on)) is None:
            await asyncio.sleep(pause_s)
            pause_s = min(1.5 * pause_s, LONGEST_POLL_S)
        return LoadedPrompt(prompt_tokens=len(tokens), cached_tokens=count)
    finally:
        if not wish.is_over:  # the client is gone, or the engine too slow
            service.engine.call(lambda engine: engine.cache_manager.cancel_load(wish))
