"""The flags of ``specmamba serve``: the engine's, and those of the HTTP server in front of it."""

from __future__ import annotations

import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, SecretStr, model_validator

from specmamba.config import EngineConfig
from specmamba.flags.settings import split_list

_ORIGIN = re.compile(r"https?://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?", re.ASCII | re.IGNORECASE)
_HOST_NAME = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*|[0-9a-f:]*:[0-9a-f:.]+", re.ASCII | re.IGNORECASE)
_KEY_RULE = "a key is printable text without commas and spaces"
_MAX_KEY_FILE_BYTES = 1 << 20
MIN_SHARED_KEY = 16  # characters: proofs of a shorter key could be guessed by those who see them
# Ray Serve has limits of its own for connections, and gives up clients that do not read.
BY_RAY = ("max_connections_per_address", "read_timeout", "write_timeout")
Placement = Literal["prefix", "round_robin"]  # of requests on replicas
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]


def _checked_keys(keys: Sequence[SecretStr]) -> Sequence[SecretStr]:
    """Check that keys can be sent in a header and written in a list with commas."""
    if not all(_is_key(key.get_secret_value()) for key in keys):
        raise ValueError(f"{_KEY_RULE}; give the flag again for another key")
    return keys


def _checked_key(key: SecretStr) -> SecretStr:
    if not _is_key(key.get_secret_value()):
        raise ValueError(_KEY_RULE)
    return key


def _checked_shared_key(key: SecretStr) -> SecretStr:
    if len(_checked_key(key).get_secret_value()) < MIN_SHARED_KEY:
        raise ValueError(f"the key of prefill and decode servers has {MIN_SHARED_KEY} characters or more")
    return key


def _own_transport(name: object) -> object:
    if name in ("mori", "ascend", "fake"):
        raise ValueError(f"{name} is not supported: choose tcp, nixl or mooncake, or drop the flag")
    return name


def _is_key(text: str) -> bool:
    return bool(text) and text.isprintable() and "," not in text and " " not in text


def _keys_in(file: Path, flag: str) -> list[str]:
    """The keys in a file, one a line; blank lines and lines that begin with # are left out.

    Raises:
        ValueError: the file cannot be read, or has no key, or a line that is no key; the message shows no line.
    """
    try:
        with file.open("rb") as opened:  # read once: it may be a pipe
            data = opened.read(_MAX_KEY_FILE_BYTES + 1)
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"{flag}: {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{flag}: {file} is no text in UTF-8") from None
    if len(data) > _MAX_KEY_FILE_BYTES:
        raise ValueError(f"{flag}: {file} is larger than {_MAX_KEY_FILE_BYTES} bytes")
    lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), 1)]
    keys = [(number, line) for number, line in lines if line and not line.startswith("#")]
    for number, key in keys:
        if not _is_key(key):
            raise ValueError(f"{flag}: line {number} of {file}: {_KEY_RULE}")
    if not keys:
        raise ValueError(f"{flag}: {file} holds no key")
    return [key for _, key in keys]


def _checked_origins(origins: Sequence[str]) -> tuple[str, ...]:
    """Check that origins are written as browsers send them, and convert them to lower case."""
    for origin in origins:
        if origin != "*" and _ORIGIN.fullmatch(origin) is None:
            raise ValueError("an origin is written like https://example.com:8080, without a path, or is * for any")
    return tuple(origin.lower() for origin in origins)


def _checked_hosts(names: Sequence[str]) -> tuple[str, ...]:
    """Check names of hosts, and convert them to lower case."""
    for name in names:
        if name != "*" and _HOST_NAME.fullmatch(name) is None:
            raise ValueError("a host is written like api.example.com, *.example.com or *, without a port")
    return tuple(name.lower() for name in names)


ApiKeys = Annotated[tuple[SecretStr, ...], BeforeValidator(split_list), AfterValidator(_checked_keys)]
Hosts = Annotated[tuple[str, ...], BeforeValidator(split_list), AfterValidator(_checked_hosts)]
Origins = Annotated[tuple[str, ...], BeforeValidator(split_list), AfterValidator(_checked_origins)]


class ServerConfig(EngineConfig):
    """``specmamba serve``: the engine and the HTTP server in front of it."""

    model_config = ConfigDict(hide_input_in_errors=True)  # the input may be a key

    host: Annotated[str, Field(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, description="port to listen on; 0: any free one")] = 30000
    dp_size: Annotated[
        int, Field(ge=1, le=64, description="copies of the model behind this port, each in a process of its own")
    ] = 1
    dp_min_size: Annotated[
        int | None, Field(ge=1, le=64, description="copies at the least, with --dp-max-size; none: 1")
    ] = None
    dp_max_size: Annotated[
        int | None,
        Field(ge=1, le=64, description="copies at the most: their number follows the load; none: it is --dp-size"),
    ] = None
    dp_target_tokens: Annotated[
        int, Field(ge=1, description="queued tokens of each copy above which, with --dp-max-size, more are started")
    ] = 4096
    dp_grow_delay: Annotated[
        Seconds, Field(description="seconds for which there must be more before copies are started")
    ] = 5.0
    dp_shrink_delay: Annotated[
        Seconds, Field(description="seconds for which there must be clearly less before a copy is ended")
    ] = 60.0
    dp_placement: Annotated[
        Placement,
        Field(description="which copy gets a request: the one with the least to compute for it, or each in turn"),
    ] = "prefix"
    replicas: Annotated[
        int | None,
        Field(ge=1, le=64, description="copies of the model under Ray Serve, in place of --dp-size; none: without Ray"),
    ] = None
    disaggregation_mode: Annotated[
        Literal["null", "prefill", "decode"],
        Field(description="prefill: compute prompts for decode servers; decode: take them over; null: neither"),
    ] = "null"
    disaggregation_bootstrap_port: Annotated[
        int,
        Field(ge=0, le=65535, description="port from which a prefill server hands prompts over, at --host; 0: any"),
    ] = 8998
    disaggregation_transfer_backend: Annotated[
        Literal["tcp", "nixl", "mooncake"],
        BeforeValidator(_own_transport),
        Field(description="what brings KV and states; tcp: the connection that brings all else"),
    ] = "tcp"
    disaggregation_key: Annotated[
        Annotated[SecretStr, AfterValidator(_checked_shared_key)] | None,
        Field(description="key that prefill and decode servers prove to each other"),
    ] = None
    disaggregation_key_file: Annotated[
        Path | None, Field(description="a file that holds the key of prefill and decode servers")
    ] = None
    disaggregation_prefill_hosts: Annotated[
        Hosts,
        Field(description="a prefill server that requests may name, beside this machine; may be given again"),
    ] = ()
    disaggregation_timeout: Annotated[
        Seconds, Field(description="seconds that a request waits for its prompt, and that a prompt is held")
    ] = 30.0

    api_key: Annotated[
        ApiKeys, Field(description="ask every client for this key (Authorization: Bearer ...); may be given again")
    ] = ()
    api_key_file: Annotated[
        Path | None,
        Field(description="a file of further API keys, one a line; lines that begin with # are left out"),
    ] = None
    admin_key: Annotated[
        Annotated[SecretStr, AfterValidator(_checked_key)] | None,
        Field(description="key of the operator: for /events, /cache, /server_info and /flush_cache, of all requests"),
    ] = None
    admin_key_file: Annotated[Path | None, Field(description="a file that holds the operator's key")] = None
    served_model_name: Annotated[
        str | None, Field(min_length=1, description="the model's name in the API; none: its path")
    ] = None
    shutdown_timeout: Annotated[
        float, Field(ge=0, le=3600, description="seconds that running requests get to finish after SIGTERM")
    ] = 30.0
    disable_page: Annotated[bool, Field(description="serve no page at / and no events for it")] = False
    cors_allow_origins: Annotated[
        Origins, Field(description="web pages of this origin may use the API; may be given again")
    ] = ()

    allowed_hosts: Annotated[
        Hosts,
        Field(description="a further name by which clients reach the server, *.example.com or *; may be given again"),
    ] = ()
    prefix_cache_scope: Annotated[
        Literal["key", "shared"],
        Field(description="cached prefixes are reused within an API key, or by all keys, which must trust each other"),
    ] = "key"

    max_request_bytes: Annotated[int, Field(ge=1024, description="size of a request body at the most")] = 8 << 20
    max_choices: Annotated[int, Field(ge=1, le=1024, description="n and best_of of a request at the most")] = 16
    max_connections: Annotated[int, Field(ge=1, description="open connections at the most")] = 1024
    max_connections_per_address: Annotated[
        int | None, Field(ge=1, description="of these from one client address; none: three quarters of them")
    ] = None
    max_calls_per_key: Annotated[
        int | None, Field(ge=1, description="calls of one API key that are answered at a time; more get a 429")
    ] = None
    queue_timeout: Annotated[Seconds | None, Field(description="seconds a request waits for its first step")] = 300.0
    request_timeout: Annotated[Seconds | None, Field(description="seconds a request takes at the most")] = 3600.0
    read_timeout: Annotated[Seconds, Field(description="seconds in which a client must have sent its request")] = 30.0
    write_timeout: Annotated[
        Seconds, Field(description="seconds after which a client that does not read its answer is dropped")
    ] = 30.0
    stream_chunk_interval: Annotated[
        float,
        Field(ge=0, le=1, description="seconds that tokens of a stream wait for the next at most; 0: for none"),
    ] = 0.05

    grammar_timeout: Annotated[Seconds, Field(description="seconds to compile a schema, expression or grammar")] = 10.0
    grammar_cache_mb: Annotated[int, Field(ge=1, le=65_536, description="memory for compiled grammars, in MiB")] = 256
    tool_call_parser: Annotated[
        Literal["auto", "hermes", "qwen3-xml", "nemotron", "none"],
        Field(description="how the model writes tool calls; auto: as its chat template says"),
    ] = "auto"

    reasoning_parser: Annotated[
        Literal["auto", "qwen3", "nemotron", "none"],
        Field(description="how the model writes reasoning; auto: <think> in its chat template or vocabulary"),
    ] = "auto"

    allow_special_tokens: Annotated[
        bool, Field(description="special tokens written in messages act as such; by default they are text")
    ] = False

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Annotated[Literal["text", "json"], Field(description="of the log's lines")] = "text"
    disable_log_requests: Annotated[bool, Field(description="write no line for each request")] = False
    metrics_compat: Annotated[
        Literal["none", "vllm"], Field(description="give speculation's metrics under vLLM's names too")
    ] = "none"
    otlp_traces_endpoint: Annotated[
        str | None, Field(min_length=1, description="send OpenTelemetry traces there (HTTP); needs specmamba[otel]")
    ] = None

    @model_validator(mode="before")
    @classmethod
    def _add_keys_of_files(cls, values: Any) -> Any:
        """Add the keys in ``api_key_file`` to ``api_key``; those in files of one key become that key."""
        if not isinstance(values, dict):
            return values
        added: dict[str, Any] = {}
        if isinstance(file := values.get("api_key_file"), str | Path):
            try:
                given = split_list(values.get("api_key", ()))
            except ValueError as error:
                raise ValueError(f"--api-key: {error}") from None
            own = list(given) if isinstance(given, list | tuple) else [given]
            added["api_key"] = [*own, *_keys_in(Path(file), "--api-key-file")]
        for name in ("admin_key", "disaggregation_key"):
            if isinstance(file := values.get(f"{name}_file"), str | Path):
                flag = f"--{name.replace('_', '-')}"
                if values.get(name) is not None:
                    raise ValueError(f"{flag}, {flag}-file: give one of them")
                added[name], *more = _keys_in(Path(file), f"{flag}-file")
                if more:
                    raise ValueError(f"{flag}-file: {file} holds more than one key")
        return {**values, **added}

    @model_validator(mode="after")
    def _keys_differ(self) -> ServerConfig:
        if self.admin_key is not None and self.admin_key in self.api_key:
            raise ValueError("--admin-key: it must not be one of the keys that clients have (--api-key)")
        return self

    @model_validator(mode="after")
    def _sizes_fit(self) -> ServerConfig:
        for problem in (_ray_problem(self), _disaggregation_problem(self), _scaling_problem(self)):
            if problem is not None:
                raise ValueError(problem)
        return self

    @property
    def first_replicas(self) -> int:
        """Copies of the model at the start."""
        return max(self.replicas or self.dp_size, self.dp_min_size or 1)

    @property
    def most_replicas(self) -> int:
        """Copies of the model at the most; 1, without Ray: it runs in this process."""
        return self.dp_max_size or self.replicas or self.dp_size

    @property
    def exposed_key_files(self) -> list[Path]:
        """The files of keys that other users of the machine may read."""
        exposed = stat.S_IRGRP | stat.S_IROTH
        given = self.api_key_file, self.admin_key_file, self.disaggregation_key_file, self.hicache_storage_key_file
        files = [file for file in given if file is not None and file.is_file()]
        return [file for file in files if file.stat().st_mode & exposed]

    @property
    def model_name(self) -> str:
        if self.served_model_name is not None:
            return self.served_model_name
        return "specmamba-demo" if self.model is None else self.model


def _ray_problem(config: ServerConfig) -> str | None:
    """Return what does not go with replicas under Ray Serve, or None."""
    if config.replicas is None:
        return None
    flag, fields = f"--replicas {config.replicas}", type(config).model_fields
    if "dp_size" in config.model_fields_set:
        return f"{flag}, --dp-size {config.dp_size}: give one of them: copies under Ray Serve, or without Ray"
    if config.disaggregation_mode != "null":
        mode = f"--disaggregation-mode {config.disaggregation_mode}"
        return f"{mode}: prompts are handed over by servers outside of Ray: drop it, or {flag}"
    for name in BY_RAY:
        if getattr(config, name) != fields[name].default:
            return f"{_flag(name)}: Ray Serve takes the connections: drop it, or {flag}"
    return None


def _disaggregation_problem(config: ServerConfig) -> str | None:
    """Return what is wrong with the flags of prefill and decode servers, or None."""
    mode, fields = f"--disaggregation-mode {config.disaggregation_mode}", type(config).model_fields
    if config.disaggregation_mode == "null":
        names = [name for name in fields if name.startswith("disaggregation_")]
        given = [_flag(name) for name in names if getattr(config, name) != fields[name].default]
        return f"{', '.join(given)}: this needs --disaggregation-mode prefill or decode" if given else None
    if config.disaggregation_key is None:
        return f"{mode}: both servers need one key, by --disaggregation-key-file"
    for name in ("tp_size", "dp_size", "dp_max_size"):
        if (size := getattr(config, name) or 1) > 1:
            return f"{mode}: prompts are handed over by one process: drop it, or {_flag(name)} {size}"
    if config.disable_radix_cache:
        return f"{mode}: this needs the prefix cache: drop it, or --disable-radix-cache"
    if config.disaggregation_mode == "prefill" and config.disaggregation_prefill_hosts:
        return f"--disaggregation-prefill-hosts: this is for decode servers: drop it, or {mode}"
    return None


def _scaling_problem(config: ServerConfig) -> str | None:
    """Return what is wrong with the flags of the number of copies, or None."""
    fields, least, most = type(config).model_fields, config.dp_min_size or 1, config.dp_max_size
    if most is None:
        names = ("dp_min_size", "dp_target_tokens", "dp_grow_delay", "dp_shrink_delay")
        given = [_flag(name) for name in names if getattr(config, name) != fields[name].default]
        return f"{', '.join(given)}: this needs --dp-max-size" if given else None
    if least > most:
        return f"--dp-min-size {least}: this is more than --dp-max-size {most}"
    name = "dp_size" if config.replicas is None else "replicas"
    size = config.replicas or config.dp_size
    if size > most or (name in config.model_fields_set and size < least):
        return f"{_flag(name)} {size}: the start is from --dp-min-size to --dp-max-size, which are {least} and {most}"
    return None


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
