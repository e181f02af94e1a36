"""The arguments of the application: flags of ``specmamba serve``, and what Ray is asked for."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, Field, ValidationError
from pydantic.fields import FieldInfo

from specmamba.errors import ConfigError
from specmamba.flags.command_line import describe_validation_error
from specmamba.flags.other_names import OTHER_NAMES, flag_of, translated
from specmamba.flags.settings import is_plain_list, listed, variable_of
from specmamba.server_config import BY_RAY, ServerConfig

logger = logging.getLogger("specmamba")

# Ray Serve listens for HTTP, on addresses of its own choice.
_BY_RAY = "Ray Serve takes the connections: leave it out, and see its http_options"
_ELSEWHERE = {
    **dict.fromkeys(("host", "port", *BY_RAY), _BY_RAY),
    "disaggregation_mode": "prompts are handed over by servers outside of Ray: leave it out",
    "config": "the arguments stand in the file of Ray Serve: leave it out",
}
ANYWHERE = "0.0.0.0"  # where Ray Serve's proxies may listen: a caller by a loopback name is no operator then


def _whole_above_one(number: float) -> float:
    if number > 1 and number != int(number):
        raise ValueError("Ray counts CPUs above one as a whole")
    return number


Cpus = Annotated[float, AfterValidator(_whole_above_one)]


class ClusterConfig(ServerConfig):
    """A server whose replicas Ray places."""

    replica_cpus: Annotated[
        Cpus, Field(gt=0, le=1024, description="CPUs that Ray reserves for a replica; on a CPU its share of memory")
    ] = 1.0
    ingress_cpus: Annotated[
        Cpus, Field(ge=0, le=1024, description="CPUs that Ray reserves for the HTTP server in front of the replicas")
    ] = 1.0


def config_of_args(args: Mapping[str, Any]) -> ClusterConfig:
    """The configuration of an application's arguments, over the environment.

    Values may be texts, as ``serve run`` gives them, or what YAML has. Names of other runtimes are translated, and a
    note of each is logged.

    Raises:
        ConfigError: a flag is unknown, given twice or belongs to Ray, or a value or a combination is not valid.
    """
    given, notes = translated(named(args))
    for note in notes:
        logger.warning("%s", note)
    for name in _ELSEWHERE:
        if name in given:
            raise ConfigError(f"{flag_of(name)}: {_ELSEWHERE[name]}")
    if "replicas" in given:  # they are Ray's in any case
        if "dp_size" in given:
            raise ConfigError("--replicas, --dp-size: give one of them")
        given["dp_size"] = given.pop("replicas")
    fields = ClusterConfig.model_fields
    given = {name: _read(name, value, fields[name]) if name in fields else value for name, value in given.items()}

    def origin(name: str) -> str:
        variable = None if name in given else variable_of(name)
        return "" if variable is None else f" (from the environment: {variable})"

    try:
        # whatever the environment says of replicas: it is meant for ``specmamba serve``
        config = ClusterConfig(**{**given, "host": ANYWHERE, "replicas": None})
    except ValidationError as error:
        raise ConfigError(describe_validation_error(error, fields, origin)) from None
    if config.disaggregation_mode != "null":  # by the environment
        raise ConfigError(f"--disaggregation-mode: {_ELSEWHERE['disaggregation_mode']}")
    return config


def of_server(config: ServerConfig, replica_cpus: float = 1.0, ingress_cpus: float = 1.0) -> ClusterConfig:
    """The configuration of ``specmamba serve --replicas``.

    Args:
        config: its flags, which are checked.
        replica_cpus: CPUs of a replica at the most: above one as a whole, as Ray counts them, below in thousandths.
        ingress_cpus: of the server in front.
    """
    parts = 1 if replica_cpus >= 1.0 else 1000
    cpus = {"replica_cpus": math.floor(replica_cpus * parts) / parts, "ingress_cpus": ingress_cpus}
    changed = {"host": ANYWHERE, "dp_size": config.first_replicas, **cpus}
    return ClusterConfig.model_construct({*config.model_fields_set, *changed}, **{**dict(config), **changed})


def named(args: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with names of fields, of other runtimes too; with hyphens or underscores they are the same.

    Raises:
        ConfigError: one is given twice, or is written as on a command line: with hyphens in front, or as a switch that
            is turned off.
    """
    found: dict[str, Any] = {}
    for given, value in args.items():
        name = given.replace("-", "_")
        if name.startswith("_"):
            raise ConfigError(f"{given}: flags stand here without hyphens in front: {name.strip('_')}")
        if (switch := _switch_of(name)) is not None:
            raise ConfigError(f"{given}: a switch is turned off by its own name here: {switch}: false")
        if name in found:
            raise ConfigError(f"{flag_of(name)} is given twice, with hyphens and with underscores: give it once")
        found[name] = value
    return found


def _switch_of(name: str) -> str | None:
    """The switch that ``no_...`` turns off on a command line, or None."""
    switch, fields = name.removeprefix("no_"), ClusterConfig.model_fields
    if switch == name or name in fields:
        return None
    is_own = switch in fields and fields[switch].annotation is bool
    return switch if is_own or (switch in OTHER_NAMES and OTHER_NAMES[switch].is_switch) else None


def _read(name: str, value: object, field: FieldInfo) -> object:
    """A value as pydantic is to check it. Raises ConfigError: it is no list, or true or false where that means nothing.

    YAML reads on, off, yes and no as true and false. Numbers would be made of them: 1 and 0.
    """
    if isinstance(value, str) and is_plain_list(field):
        return listed(flag_of(name), value)
    kinds = list(kinds_of(field.annotation))
    if not isinstance(value, bool) or bool in kinds:
        return value
    word = "on" if value else "off"
    if word in kinds:
        return word
    raise ConfigError(f"{flag_of(name)}: this is no switch (got {str(value).lower()}, as YAML also reads {word})")


def kinds_of(annotation: Any) -> Iterator[Any]:
    """The types that an annotation allows, and the words of a ``Literal``."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from kinds_of(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for each in get_args(annotation):
            yield from kinds_of(each)
    elif origin is Literal:
        yield from get_args(annotation)
    else:
        yield annotation
