"""OpenTelemetry traces: a span for every call that generates, continuing the trace of its client."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import specmamba
from specmamba.errors import ConfigError
from specmamba.server.observe.call_record import CallRecord
from specmamba.server_config import ServerConfig

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

logger = logging.getLogger("specmamba")

_NEEDED = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")
_EXPORT_TIMEOUT_S = 5.0
_OPERATIONS = {"/v1/completions": "text_completion", "/v1/chat/completions": "chat"}


def check_tracing(config: ServerConfig) -> None:
    """Check ``--otlp-traces-endpoint``.

    Raises:
        ConfigError: it is not an HTTP address, or OpenTelemetry is not installed.
    """
    endpoint = config.otlp_traces_endpoint
    if endpoint is None:
        return
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"--otlp-traces-endpoint: {endpoint!r} is no address like http://127.0.0.1:4318/v1/traces (OTLP over HTTP)"
        )
    if not all(_is_installed(module) for module in _NEEDED):
        raise ConfigError("--otlp-traces-endpoint: OpenTelemetry is not installed: pip install 'specmamba[otel]'")


def build_tracer(config: ServerConfig) -> Tracer | None:
    """The tracer that ``config`` asks for, or None. Raises ConfigError as ``check_tracing`` does."""
    if config.otlp_traces_endpoint is None:
        return None
    check_tracing(config)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    parts = urlsplit(config.otlp_traces_endpoint)
    endpoint = parts._replace(path="/v1/traces").geturl() if parts.path in ("", "/") else parts.geturl()
    return Tracer(OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S), config.model_name)


class Tracer:
    """Makes a span of every call; a thread of its own exports them.

    Spans wait in a queue of limited length: an exporter that fails or is slow loses spans, and does not delay calls.
    The rest of the queue is exported when the process ends.
    """

    def __init__(self, exporter: SpanExporter, model_name: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._provider = TracerProvider(resource=Resource.create({"service.name": "specmamba"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("specmamba", specmamba.__version__)
        self._model_name = model_name

    def record_call(self, call: CallRecord) -> None:
        """Make the span of a call that has ended. Calls without a ``call_id``, which generate nothing, have no span."""
        if call.call_id is None:
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        operation = _OPERATIONS.get(call.path, call.path.rpartition("/")[2])
        span = self._tracer.start_span(
            f"{operation} {self._model_name}",
            context=TraceContextTextMapPropagator().extract(call.trace),
            kind=SpanKind.SERVER,
            attributes=span_attributes(call, operation, self._model_name),
            start_time=call.arrived_ns,
        )
        if call.outcome is not None:
            span.set_attribute("error.type", call.outcome)
            span.set_status(Status(StatusCode.ERROR))
        span.end(call.arrived_ns + int(call.total_s * 1e9))

    def close(self) -> None:
        """Export the spans in the queue, for a few seconds at most."""
        try:
            self._provider.shutdown()
        except Exception:  # exporters of other packages may raise anything
            logger.warning("the last traces are lost", exc_info=True)


def span_attributes(call: CallRecord, operation: str, model_name: str) -> dict[str, str | int | float | list[str]]:
    """The attributes of a call's span; OpenTelemetry's names for generative models where there are any."""
    totals = call.totals()
    attributes: dict[str, str | int | float | list[str]] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "specmamba",
        "gen_ai.request.model": model_name,
        "gen_ai.response.model": model_name,
        "gen_ai.response.id": call.call_id or "",
        "gen_ai.request.choice.count": call.num_choices,
        "gen_ai.response.finish_reasons": call.finish_reasons,
        "gen_ai.usage.input_tokens": totals.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": totals.cached_tokens,
        "gen_ai.usage.output_tokens": totals.output_tokens,
        "specmamba.request.id": call.request_id,
        "specmamba.spec.draft_tokens": totals.draft_tokens,
        "specmamba.spec.accepted_tokens": totals.accepted_tokens,
        "specmamba.spec.accept_length": totals.accept_length,
        "http.request.method": call.method,
        "http.response.status_code": call.status,
        "url.path": call.path,
    }
    if call.time_to_first_token is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = call.time_to_first_token
    return attributes


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
