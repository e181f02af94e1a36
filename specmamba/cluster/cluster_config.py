"""The arguments of the application: flags of ``specmamba serve``, and what Ray is asked for."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError

from specmamba.errors import ConfigError
from specmamba.flags.command_line import describe_validation_error
from specmamba.flags.other_names import flag_of, translated
from specmamba.flags.settings import is_plain_list, listed, variable_of
from specmamba.server_config import ServerConfig

logger = logging.getLogger("specmamba")

# Ray Serve listens for HTTP, on addresses of its own choice, and gives up clients that do not read.
_BY_RAY = "Ray Serve takes the connections: leave it out, and see its http_options"
_ELSEWHERE = {
    **dict.fromkeys(("host", "port", "max_connections_per_address", "read_timeout", "write_timeout"), _BY_RAY),
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
        ConfigError: a flag is unknown or belongs to Ray, or a value or a combination is not valid.
    """
    given, notes = translated({name.replace("-", "_"): value for name, value in args.items()})
    for note in notes:
        logger.warning("%s", note)
    for name in _ELSEWHERE:
        if name in given:
            raise ConfigError(f"{flag_of(name)}: {_ELSEWHERE[name]}")
    fields = ClusterConfig.model_fields
    for name, value in given.items():
        if isinstance(value, str) and name in fields and is_plain_list(fields[name]):
            given[name] = listed(flag_of(name), value)

    def origin(name: str) -> str:
        variable = None if name in given else variable_of(name)
        return "" if variable is None else f" (from the environment: {variable})"

    try:
        config = ClusterConfig(**{**given, "host": ANYWHERE})
    except ValidationError as error:
        raise ConfigError(describe_validation_error(error, fields, origin)) from None
    if config.disaggregation_mode != "null":  # by the environment
        raise ConfigError(f"--disaggregation-mode: {_ELSEWHERE['disaggregation_mode']}")
    return config
