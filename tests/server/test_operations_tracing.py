"""Traces: the attributes of a span, the trace that it continues, and collectors that fail."""

from __future__ import annotations

import importlib.util
import logging
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from specmamba.errors import ConfigError
from specmamba.server import app as app_module
from specmamba.server.observe.tracing import Tracer, build_tracer, check_tracing
from specmamba.server_config import ServerConfig
from tests.fake_engine import FakeEngine, Served, serving

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CANARY = "pineapple"


class Traced:
    """A server whose spans are kept."""

    def __init__(self, served: Served, tracer: Tracer, exporter: InMemorySpanExporter) -> None:
        self.served, self._tracer, self._exporter = served, tracer, exporter

    def spans(self, at_least: int = 1) -> list[Any]:
        """The spans since the last call. A span ends a little after the client has its answer."""
        self.served.http.get("/health")
        deadline = time.monotonic() + 60
        while True:
            assert self._tracer._provider.force_flush()
            found = list(self._exporter.get_finished_spans())
            if len(found) >= at_least or time.monotonic() > deadline:
                self._exporter.clear()
                return found
            time.sleep(0.01)


@pytest.fixture(scope="module")
def traced() -> Iterator[Traced]:
    exporter = InMemorySpanExporter()
    tracer = Tracer(exporter, "org/model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app_module, "build_tracer", lambda config: tracer)
        with serving(FakeEngine(), served_model_name="org/model") as served:
            yield Traced(served, tracer, exporter)
    tracer.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_is_a_span_with_its_figures(traced: Traced, stream: bool) -> None:
    body = {"prompt": CANARY, "max_tokens": 10, "stream": stream}
    response = traced.served.http.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
    (span,) = traced.spans()
    assert (span.name, span.kind.name) == ("text_completion org/model", "SERVER")
    assert span.end_time - span.start_time > 0
    assert span.parent is None
    wanted = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "org/model",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": len(CANARY),
        "gen_ai.usage.cache_read.input_tokens": 3,
        "gen_ai.usage.output_tokens": 10,
        "specmamba.request.id": "mine",
        "specmamba.spec.draft_tokens": 10,
        "specmamba.spec.accepted_tokens": 5,
        "specmamba.spec.accept_length": 2.0,
        "http.response.status_code": 200,
        "url.path": "/v1/completions",
    }
    assert {name: span.attributes[name] for name in wanted} == wanted
    assert span.attributes["gen_ai.response.id"] in response.text
    assert 0 < span.attributes["gen_ai.response.time_to_first_chunk"] <= (span.end_time - span.start_time) / 1e9
    said = [
        str(value) for name, value in span.attributes.items() if name != "gen_ai.response.id"
    ]  # may have any digits
    assert not any(CANARY in value or "def" in value for value in said)


def test_the_trace_of_the_client_is_continued(traced: Traced) -> None:
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "tracestate": "vendor=1"}
    traced.served.http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
    (span,) = traced.spans()
    assert f"{span.context.trace_id:032x}" == TRACE_ID
    assert f"{span.parent.span_id:016x}" == PARENT_ID
    assert span.context.trace_state.get("vendor") == "1"


@pytest.mark.parametrize("parent", ["", "nonsense", f"00-{'0' * 32}-{PARENT_ID}-01", "00-" + "f" * 9000])
def test_a_broken_trace_context_begins_a_new_trace(traced: Traced, parent: str) -> None:
    response = traced.served.http.post("/v1/completions", json={"prompt": "a"}, headers={"traceparent": parent})
    assert response.status_code == 200
    (span,) = traced.spans()
    assert span.parent is None


def test_a_trace_that_is_not_sampled_stays_so(traced: Traced) -> None:
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"}
    traced.served.http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
    assert traced.spans(at_least=0) == []


def test_a_refused_call_is_a_span_that_failed(traced: Traced) -> None:
    traced.served.complete(prompt="x" * 1000)
    (span,) = traced.spans()
    assert (span.attributes["error.type"], span.status.status_code) == ("context_length_exceeded", StatusCode.ERROR)
    assert span.attributes["http.response.status_code"] == 400


def test_calls_that_generate_nothing_have_no_span(traced: Traced) -> None:
    for path in ("/metrics", "/v1/models", "/nowhere"):
        traced.served.http.get(path)
    assert traced.spans(at_least=0) == []


def test_spans_reach_a_collector_by_the_end_of_the_process() -> None:
    received: list[tuple[str, ExportTraceServiceRequest]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        tracer = build_tracer(ServerConfig(otlp_traces_endpoint=f"http://127.0.0.1:{collector.server_port}"))
        assert tracer is not None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(app_module, "build_tracer", lambda config: tracer)
            with serving() as served:
                served.complete(prompt="a")
        tracer.close()  # as the end of the process does
        collector.shutdown()
    ((path, request),) = received
    (span,) = request.resource_spans[0].scope_spans[0].spans
    assert (path, span.name) == ("/v1/traces", "text_completion specmamba-demo")


def test_an_exporter_that_fails_does_not_delay_calls(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(SpanExporter):
        def export(self, spans: object) -> SpanExportResult:
            raise ConnectionError("no collector")

        def shutdown(self) -> None:
            raise ConnectionError("no collector")

    tracer = Tracer(Failing(), "m")
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.CRITICAL):
        patch.setattr(app_module, "build_tracer", lambda config: tracer)
        with serving() as served:
            for _ in range(3):
                assert served.complete(prompt="a").status_code == 200
                tracer._provider.force_flush()
    tracer.close()


@pytest.mark.parametrize("endpoint", ["nonsense", "ftp://127.0.0.1/", "http://", "grpc://127.0.0.1:4317"])
def test_an_endpoint_must_be_an_http_address(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint"):
        check_tracing(ServerConfig(otlp_traces_endpoint=endpoint))


def test_a_missing_package_is_reported_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(name: str) -> object:
        if name.startswith("opentelemetry.sdk"):
            raise ModuleNotFoundError(name)
        return importlib.util.find_spec(name)

    monkeypatch.setattr("specmamba.server.observe.tracing.find_spec", find_spec)
    with pytest.raises(ConfigError, match=r"specmamba\[otel\]"):
        check_tracing(ServerConfig(otlp_traces_endpoint="http://127.0.0.1:4318/v1/traces"))
    check_tracing(ServerConfig())
    assert build_tracer(ServerConfig()) is None
