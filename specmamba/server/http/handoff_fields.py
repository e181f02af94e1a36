"""The fields that routers add to requests for prefill and decode servers, and the handoffs that they ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeVar

from pydantic import Discriminator, Field, Tag

from specmamba.core import Handoff
from specmamba.server.http.callers import host_name, is_loopback
from specmamba.server.http.error_answers import ApiError
from specmamba.server.http.fields import MAX_PROMPTS, StrictModel, shortened
from specmamba.server_config import ServerConfig

T = TypeVar("T")
HANDOFF_FIELDS = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
ONE, LIST = "(one)", "(list)"
HostName = Annotated[str, Field(min_length=1, max_length=253)]
Port = Annotated[int, Field(ge=1, le=65535)]
Room = Annotated[int, Field(ge=0, lt=2**63)]
_Several = Field(max_length=MAX_PROMPTS, fail_fast=True)
_OneOrList = Discriminator(lambda value: LIST if isinstance(value, list) else ONE)


class HandoffRequest(StrictModel):
    """Where prefill and decode of a request meet: one room, or one for each of its prompts or choices."""

    bootstrap_host: Annotated[
        Annotated[Annotated[HostName, Tag(ONE)] | Annotated[list[HostName | None], _Several, Tag(LIST)], _OneOrList]
        | None,
        Field(description="of the prefill server (--disaggregation-mode); SGLang's router adds it"),
    ] = None
    bootstrap_port: Annotated[
        Annotated[Annotated[Port, Tag(ONE)] | Annotated[list[Port | None], _Several, Tag(LIST)], _OneOrList] | None,
        Field(description="from which that server hands prompts over; none: --disaggregation-bootstrap-port"),
    ] = None
    bootstrap_room: Annotated[
        Annotated[Annotated[Room, Tag(ONE)] | Annotated[list[Room], _Several, Tag(LIST)], _OneOrList] | None,
        Field(description="a number that both servers get with the request"),
    ] = None


def handoffs_of(
    body: HandoffRequest, config: ServerConfig, num_prompts: int, per_prompt: int
) -> Sequence[Handoff | None]:
    """Return the handoff of each choice of a call, ``per_prompt`` for each prompt; None where no room is named.

    Raises:
        ApiError: 400; this server hands nothing over, rooms are more or fewer than prompts, or the host is none that
            requests may name.
    """
    count = num_prompts * per_prompt
    if body.bootstrap_room is None:
        for name in ("host", "port"):
            if getattr(body, f"bootstrap_{name}") is not None:
                raise _refusal(name, "this needs bootstrap_room")
        return [None] * count
    if config.disaggregation_mode == "null":
        raise _refusal("room", "this server is neither for prefill nor for decode (--disaggregation-mode)")
    rooms = body.bootstrap_room if isinstance(body.bootstrap_room, list) else [body.bootstrap_room] * num_prompts
    if len(rooms) not in (num_prompts, count):
        raise _refusal("room", f"{len(rooms)} rooms for {num_prompts} prompts: give one for each, or for each choice")
    if config.disaggregation_mode == "prefill":
        found = [Handoff(room) for room in rooms]
    else:
        hosts = _for_each(body.bootstrap_host, len(rooms), "host")
        ports = _for_each(body.bootstrap_port, len(rooms), "port")
        own = config.disaggregation_bootstrap_port
        found = [
            Handoff(room, _checked(host, config), port or own)
            for room, host, port in zip(rooms, hosts, ports, strict=True)
        ]
    return [found[index * len(rooms) // count] for index in range(count)]


def _for_each(given: T | list[T | None] | None, count: int, name: str) -> list[T | None]:
    if not isinstance(given, list):
        return [given] * count
    if len(given) != count:
        raise _refusal(name, f"{len(given)} of them for {count} rooms")
    return given


def _checked(host: str | None, config: ServerConfig) -> str:
    """The host, if clients may have this server connect to it."""
    allowed = config.disaggregation_prefill_hosts
    if host is None:
        raise _refusal("host", "a room needs the host of its prefill server")
    name = host_name(host) or ""
    is_named = "*" in allowed or name in allowed
    is_named = is_named or any(each.startswith("*.") and name.endswith(each[1:]) for each in allowed)
    if not name or not (is_named or is_loopback(name)):
        text = f"{shortened(host, 100)!r} is no prefill server of this one (--disaggregation-prefill-hosts)"
        raise _refusal("host", text)
    return name


def _refusal(name: str, text: str) -> ApiError:
    return ApiError(400, f"bootstrap_{name}: {text}", param=f"bootstrap_{name}")
