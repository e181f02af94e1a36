"""The file of ``specmamba deploy``: an application of Ray Serve, declared in YAML, and what it comes to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from specmamba.cluster.cluster_config import ClusterConfig, config_of_args, kinds_of, named
from specmamba.errors import ConfigError
from specmamba.flags.near_names import did_you_mean
from specmamba.flags.other_names import OTHER_NAMES, Renamed, translated
from specmamba.server.listener import http_url
from specmamba.server_config import Seconds

_MAX_FILE_BYTES = 1 << 20


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), hide_input_in_errors=True)

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_switch(cls, value: object) -> object:
        if isinstance(value, bool):  # of which numbers would be made: 1 and 0
            raise ValueError(f"this is no switch (got {str(value).lower()}, as YAML also reads on, off, yes and no)")
        return value


class HttpPart(_Part):
    """Where the proxies of Ray Serve listen."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)] = 8000


class AutoscalingPart(_Part):
    """How the number of replicas follows the load."""

    min_replicas: Annotated[int, Field(ge=1, le=64)] = 1
    max_replicas: Annotated[int, Field(ge=1, le=64)]
    initial_replicas: Annotated[int | None, Field(ge=1, le=64)] = None
    target_queued_tokens: Annotated[int | None, Field(ge=1)] = None  # of each replica
    upscale_delay_s: Seconds | None = None
    downscale_delay_s: Seconds | None = None

    def flags(self) -> dict[str, Any]:
        """The flags of ``specmamba serve`` that say the same."""
        named = {
            "dp_min_size": self.min_replicas,
            "dp_max_size": self.max_replicas,
            "dp_size": self.initial_replicas,
            "dp_target_tokens": self.target_queued_tokens,
            "dp_grow_delay": self.upscale_delay_s,
            "dp_shrink_delay": self.downscale_delay_s,
        }
        return {name: value for name, value in named.items() if value is not None}


class ResourcesPart(_Part):
    """What Ray reserves; GPUs of a replica are its ``tp_size``."""

    replica_cpus: float | None = None
    ingress_cpus: float | None = None

    def flags(self) -> dict[str, Any]:
        """The arguments of the application that say the same."""
        return self.model_dump(exclude_none=True)


# Keys of the file, or of a part of it, that say what a flag says: the flag must not stand under ``flags`` too.
_INSTEAD = {
    "model": "model",
    "tp_size": "tp_size",
    "dp_size": "replicas",
    "replicas": "replicas",
    "dp_min_size": "autoscaling.min_replicas",
    "dp_max_size": "autoscaling.max_replicas",
    "dp_target_tokens": "autoscaling.target_queued_tokens",
    "dp_grow_delay": "autoscaling.upscale_delay_s",
    "dp_shrink_delay": "autoscaling.downscale_delay_s",
    "host": "http.host",
    "port": "http.port",
    "api_key_file": "api_key_file",
    "admin_key_file": "admin_key_file",
    "replica_cpus": "resources.replica_cpus",
    "ingress_cpus": "resources.ingress_cpus",
}


class DeploymentFile(_Part):
    """What a file says."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")] = "specmamba"  # of the application
    ray_address: Annotated[str | None, Field(min_length=1)] = None  # of the cluster; None: one that is started here
    http: HttpPart = HttpPart()
    model: Annotated[str | None, Field(min_length=1)] = None
    tp_size: Annotated[int | None, Field(ge=1)] = None
    replicas: Annotated[int | None, Field(ge=1, le=64)] = None
    autoscaling: AutoscalingPart | None = None
    resources: ResourcesPart = ResourcesPart()
    api_key_file: Path | None = None
    admin_key_file: Path | None = None
    flags: dict[str, Any] = Field(default_factory=dict)  # others of ``specmamba serve``

    @model_validator(mode="after")
    def _says_all_once(self) -> DeploymentFile:
        if self.replicas is not None and self.autoscaling is not None:
            raise ValueError("replicas, autoscaling: give one of them")
        for flag in self.flags:
            if (instead := _instead_of(flag)) is not None:
                raise ValueError(f"flags.{flag}: this file has {instead} for it")
        return self

    def arguments(self) -> dict[str, Any]:
        """The arguments of the application (``specmamba.cluster.app``)."""
        named = {
            "model": self.model,
            "tp_size": self.tp_size,
            "dp_size": self.replicas,
            "api_key_file": None if self.api_key_file is None else str(self.api_key_file),
            "admin_key_file": None if self.admin_key_file is None else str(self.admin_key_file),
        }
        scaling = {} if self.autoscaling is None else self.autoscaling.flags()
        given = {name: value for name, value in named.items() if value is not None}
        return {**self.flags, **given, **scaling, **self.resources.flags()}

    def config(self) -> ClusterConfig:
        """The configuration of the application. Raises ConfigError as ``config_of_args``."""
        return config_of_args(self.arguments())


def _instead_of(flag: str) -> str | None:
    """The key of the file that says what a flag says, by whichever of its names; None: there is none."""
    name = flag.replace("-", "_")
    known = OTHER_NAMES.get(name)
    if name == "data_parallel_size":
        return "replicas"
    return _INSTEAD.get(known.field if isinstance(known, Renamed) else name)


def read_deployment(path: Path) -> DeploymentFile:
    """Read a file.

    Raises:
        ConfigError: it cannot be read, is no YAML, or says what cannot be; keys that are nearly right are named.
    """
    try:
        with path.open("rb") as opened:
            data = opened.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > _MAX_FILE_BYTES:
        raise ConfigError(f"{path} is larger than {_MAX_FILE_BYTES} bytes")
    try:
        said = yaml.safe_load(data)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f", line {mark.line + 1}"
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{path}{line}: this is no YAML: {problem}") from None
    except RecursionError:
        raise ConfigError(f"{path}: this is nested too deeply") from None
    if not isinstance(said, dict):
        raise ConfigError(f"{path}: this is no mapping of keys to values, like model: /models/it")
    try:
        return DeploymentFile.model_validate(said)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{path}: {line}" for line in _problems(error))) from None


def _problems(error: ValidationError) -> Iterator[str]:
    for problem in error.errors(include_url=False, include_input=False):
        place = [str(part) for part in problem["loc"]]
        name = ".".join(place)
        text = str(problem["msg"]).removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            text = "there is no such key" + _near(place)
        yield f"{name}: {text}" if name else text


def _near(place: list[str]) -> str:
    """A half sentence about what an unknown key may mean: another key of its part, or a flag."""
    part: Any = DeploymentFile
    for name in place[:-1]:
        kinds = [kind for kind in kinds_of(part.model_fields[name].annotation) if isinstance(kind, type)]
        part = next((kind for kind in kinds if issubclass(kind, _Part)), _Part)
    name = place[-1].replace("-", "_")
    if len(place) == 1 and name in ClusterConfig.model_fields:
        return f"; flags of specmamba serve stand below flags, or have another name here: {_INSTEAD.get(name, 'flags')}"
    return did_you_mean(name, part.model_fields)


def plan_rows(deployment: DeploymentFile, config: ClusterConfig) -> list[tuple[str, str]]:
    """What a file comes to, as names and values; keys are not shown."""
    least, most = config.dp_min_size or config.first_replicas, config.most_replicas
    number = f"{most}"
    if config.dp_max_size is not None:
        first = config.first_replicas
        number = f"{least} to {most}, {first} at first: above {config.dp_target_tokens} queued tokens of each for "
        number += (
            f"{config.dp_grow_delay:g} s more are started, clearly below for {config.dp_shrink_delay:g} s one ends"
        )
    ranks = config.tp_size
    gpus = "no GPU" if config.device == "cpu" else f"{ranks} GPU{'s' if ranks > 1 else ''} where the cluster has any"
    cpus = config.ingress_cpus
    in_all = dict.fromkeys(f"{size * config.replica_cpus + cpus:g}" for size in (least, most))  # once, where it stays
    rows = [
        ("application", deployment.name),
        ("Ray", deployment.ray_address or "a cluster of this machine, started and ended with the command"),
        (
            "address",
            f"{http_url(deployment.http.host, deployment.http.port)}, unless Ray Serve has another one already",
        ),
        ("model", config.model_name if config.model is None else config.model),
        ("replicas", number),
        ("each", f"{config.replica_cpus:g} CPUs, {gpus}"),
        ("server in front", f"{cpus:g} CPUs"),
        ("in all", f"{' to '.join(in_all)} CPUs"),
        ("clients' keys", f"{len(config.api_key)}" if config.api_key else "none: all who reach it may use it"),
        ("operator's key", "one" if config.admin_key is not None else "none: no caller is an operator"),
    ]
    return rows + [(f"flags.{name}", _shown(name, config)) for name in sorted(_own_flags(deployment.flags))]


def _own_flags(flags: Mapping[str, Any]) -> list[str]:
    """The names here of flags that a file gives, also by names of other runtimes."""
    return [name for name in translated(named(flags))[0] if name in ClusterConfig.model_fields]


def _shown(name: str, config: ClusterConfig) -> str:
    value = getattr(config, name)
    return "(not shown)" if "key" in name else str(value)
