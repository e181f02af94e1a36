"""The flags of ``specmamba serve``: the engine's, and those of the HTTP server in front of it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, SecretStr

from specmamba.config import EngineConfig

Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]


class ServerConfig(EngineConfig):
    """``specmamba serve``: the engine and the HTTP server in front of it."""

    host: Annotated[str, Field(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, description="port to listen on; 0: any free one")] = 30000
    api_key: Annotated[
        SecretStr | None, Field(min_length=1, description="ask every client for this key (Authorization: Bearer ...)")
    ] = None
    served_model_name: Annotated[
        str | None, Field(min_length=1, description="the model's name in the API; none: its path")
    ] = None
    shutdown_timeout: Annotated[
        float, Field(ge=0, le=3600, description="seconds that running requests get to finish after SIGTERM")
    ] = 30.0
    disable_page: Annotated[bool, Field(description="serve no page at / and no events for it")] = False
    cors_allow_origins: Annotated[
        tuple[str, ...], Field(description="web pages of this origin may use the API; may be given again")
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

    grammar_timeout: Annotated[Seconds, Field(description="seconds to compile a schema, expression or grammar")] = 10.0
    grammar_cache_mb: Annotated[int, Field(ge=1, le=65_536, description="memory for compiled grammars, in MiB")] = 256
    tool_call_parser: Annotated[
        Literal["auto", "hermes", "qwen3-xml", "nemotron", "none"],
        Field(description="how the model writes tool calls; auto: as its chat template says"),
    ] = "auto"

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
