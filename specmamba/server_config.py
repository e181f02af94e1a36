"""The flags of ``specmamba serve``: the engine's, and those of the HTTP server in front of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr
from pydantic_settings import NoDecode, SettingsConfigDict

from specmamba.config import EngineConfig

_ORIGIN = re.compile(r"https?://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?", re.ASCII | re.IGNORECASE)
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]


def _split(value: object) -> object:
    """Split a text at commas: lists are written ``a,b`` in the environment and in files."""
    return value.split(",") if isinstance(value, str) else value


def _checked_keys(keys: Sequence[SecretStr]) -> Sequence[SecretStr]:
    """Check that keys can be sent in a header and written in a list with commas."""
    for key in keys:
        text = key.get_secret_value()
        if not text or not text.isprintable() or "," in text or " " in text:
            raise ValueError("a key is printable text without commas and spaces; give the flag again for another key")
    return keys


def _checked_origins(origins: Sequence[str]) -> tuple[str, ...]:
    """Check that origins are written as browsers send them, and convert them to lower case."""
    for origin in origins:
        if origin != "*" and _ORIGIN.fullmatch(origin) is None:
            raise ValueError("an origin is written like https://example.com:8080, without a path, or is * for any")
    return tuple(origin.lower() for origin in origins)


ApiKeys = Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_split), AfterValidator(_checked_keys)]
Origins = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split), AfterValidator(_checked_origins)]


class ServerConfig(EngineConfig):
    """``specmamba serve``: the engine and the HTTP server in front of it."""

    model_config = SettingsConfigDict(hide_input_in_errors=True)  # the input may be a key

    host: Annotated[str, Field(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, description="port to listen on; 0: any free one")] = 30000
    api_key: Annotated[
        ApiKeys, Field(description="ask every client for this key (Authorization: Bearer ...); may be given again")
    ] = ()
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

    max_request_bytes: Annotated[int, Field(ge=1024, description="size of a request body at the most")] = 8 << 20
    max_choices: Annotated[int, Field(ge=1, le=1024, description="n and best_of of a request at the most")] = 16
    max_connections: Annotated[int, Field(ge=1, description="open connections at the most")] = 1024
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

    @property
    def model_name(self) -> str:
        if self.served_model_name is not None:
            return self.served_model_name
        return "specmamba-demo" if self.model is None else self.model
