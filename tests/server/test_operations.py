"""For operators: request ids, the log, metrics, health, and the description of the server."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from specmamba.core import SpecStats
from specmamba.server.observe.logs import JsonFormatter, TextFormatter, configure_logging
from specmamba.server.observe.metrics import Histogram, vllm_counters
from specmamba.server_config import ServerConfig
from tests.fake_engine import FakeEngine, Served, serving, wait_until

ID = "x-request-id"
SECRETS = {"authorization": "Bearer sk-secret", "cookie": "session=secret"}
CANARY = "pineapple"


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Served]:
    with serving(
        api_key="sk-secret", admin_key="operator", metrics_compat="vllm", served_model_name="org/model"
    ) as served:
        served.http.headers.update(SECRETS)
        yield served


@pytest.fixture
def served(shared_server: Served) -> Served:
    shared_server.wait_for_calls()  # else calls of the test before are logged and counted in this one
    return shared_server


@contextmanager
def log_lines(formatter: logging.Formatter, level: int = logging.INFO) -> Iterator[list[str]]:
    """The lines that the package's logger writes inside of the block."""
    lines: list[Any] = []
    stream = io.StringIO()
    handler, logger = logging.StreamHandler(stream), logging.getLogger("specmamba")
    handler.setFormatter(formatter)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield lines
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
        lines += stream.getvalue().splitlines()


def logged(served: Served, *calls: dict[str, Any], headers: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """The log's JSON lines about calls of POST /v1/completions, which run one after the other."""
    with log_lines(JsonFormatter()) as lines:
        for body in calls:
            served.http.post("/v1/completions", json=body, headers=headers)
            served.wait_for_calls()
    return [json.loads(line) for line in lines]


def metrics(served: Served) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    served.wait_for_calls()
    families = text_string_to_metric_families(served.http.get("/metrics").text)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


# ---- request ids -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [{"prompt": "a"}, {"prompt": "a", "stream": True}, {"prompt": ""}, {}])
def test_a_request_id_comes_back_whatever_the_answer_is(served: Served, body: dict[str, Any]) -> None:
    response = served.http.post("/v1/completions", json=body, headers={ID: "client:1/a.b"})
    assert response.headers.get_list(ID) == ["client:1/a.b"]


@pytest.mark.parametrize("path", ["/health", "/metrics", "/nowhere", "/v1/models"])
def test_calls_without_an_id_get_a_fresh_one(served: Served, path: str) -> None:
    first, second = (served.http.get(path, headers={"authorization": "Bearer wrong"}).headers[ID] for _ in range(2))
    assert first != second
    assert len(first) == 32


@pytest.mark.parametrize("bad", ["", "x" * 129, "a b", 'a"b', "a;b", b"\xff\xfe", b"a\tb"])
def test_an_id_that_is_not_plain_is_replaced(served: Served, bad: str | bytes) -> None:
    response = served.http.get("/health", headers={ID: bad})  # type: ignore[arg-type]
    assert len(response.headers[ID]) == 32


def test_two_calls_may_come_with_one_id(served: Served) -> None:
    answers = [
        served.http.post("/v1/completions", json={"prompt": "a"}, headers={ID: "same"}).json()["id"] for _ in range(2)
    ]
    assert len(set(answers)) == 2


def test_the_answers_id_holds_a_fresh_request_id(served: Served) -> None:
    response = served.complete(prompt="a")
    assert response.json()["id"] == f"cmpl-{response.headers[ID]}"


# ---- the log ---------------------------------------------------------------------------------------------------------


def test_a_call_is_logged_with_its_figures_and_nothing_of_its_text(served: Served) -> None:
    prompt = CANARY + "x"
    plain, streamed, several = logged(
        served,
        {"prompt": prompt, "max_tokens": 10, "user": CANARY},
        {"prompt": prompt, "max_tokens": 10, "stream": True},
        {"prompt": [prompt, prompt], "max_tokens": 4},
        headers={ID: "mine"},
    )
    for line in (plain, streamed):
        assert {key: line[key] for key in ("level", "logger", "message", "endpoint", "request_id", "status")} == {
            "level": "info",
            "logger": "specmamba",
            "message": "request",
            "endpoint": "POST /v1/completions",
            "request_id": "mine",
            "status": 200,
        }
        assert line["id"].startswith("cmpl-")
        assert (line["prompt_tokens"], line["cached_tokens"], line["output_tokens"]) == (len(prompt), 3, 10)
        assert (line["accept_length"], line["finish_reason"]) == (2.0, "length")
        assert 0 < line["ttft_s"] <= line["total_s"]
        assert "error" not in line
    assert (several["prompt_tokens"], several["output_tokens"]) == (2 * len(prompt), 8)
    text = json.dumps([plain, streamed, several])
    assert not any(secret in text for secret in (CANARY, "secret", "def main", "Bearer"))


def test_refused_and_failed_calls_are_logged_with_their_code(served: Served) -> None:
    wrong, unknown = logged(served, {"prompt": "a", "temperature": CANARY}, {"prompt": "a", "model": CANARY})
    assert (wrong["status"], wrong["error"]) == (400, "float_type")
    assert (unknown["status"], unknown["error"]) == (404, "model_not_found")
    assert CANARY not in json.dumps([wrong, unknown])


def test_a_stream_that_fails_is_logged_with_its_code() -> None:
    with log_lines(JsonFormatter()) as lines, serving(FakeEngine(fail_at_step=3)) as served:
        assert '"error"' in served.complete(prompt="a", max_tokens=60, stream=True).text
    (line,) = (json.loads(line) for line in lines if json.loads(line)["message"] == "request")
    assert (line["status"], line["error"], line["finish_reason"]) == (200, "engine_error", "error")


def test_calls_that_only_read_are_logged_at_level_debug(served: Served) -> None:
    with log_lines(JsonFormatter()) as lines:
        served.http.get("/health")
        served.http.get("/nowhere")
        served.wait_for_calls()
    assert [json.loads(line)["endpoint"] for line in lines] == ["GET /nowhere"]
    with log_lines(JsonFormatter(), logging.DEBUG) as lines:
        served.http.get("/health")
        served.wait_for_calls()
    assert [json.loads(line).get("endpoint") for line in lines] == ["GET /health"]


def test_request_lines_can_be_turned_off() -> None:
    with log_lines(JsonFormatter()) as lines, serving(disable_log_requests=True) as served:
        served.complete(prompt="a")
    assert lines == []


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_clients_cannot_forge_log_lines(served: Served, formatter: logging.Formatter) -> None:
    forged = "/x%0A2026-01-01 00:00:00,000 CRITICAL specmamba: forged%1B[2J%C2%85%E2%80%A8 status=200 %22"
    with log_lines(formatter) as lines:
        served.http.get(forged, headers={ID: "a%0Ab"})
        served.wait_for_calls()
    # not through a logger: what pytest catches there goes to another process, as UTF-8
    said = {"name": "specmamba", "levelname": "INFO", "msg": "it says %s", "args": ("one\ntwo\r\u2028\udc80",)}
    lines.append(formatter.format(logging.makeLogRecord(said)))
    assert len(lines) == 2
    assert all(line.isascii() and line.isprintable() for line in lines)
    assert sum(" status=404" in line for line in lines) == isinstance(formatter, TextFormatter)
    assert not any(line.startswith("2026-01-01 00:00:00,000") for line in lines)


def test_a_text_line() -> None:
    record = logging.makeLogRecord({"name": "specmamba", "levelname": "INFO", "msg": "request"})
    record.fields = {"id": "cmpl-1", "endpoint": "POST /v1/completions", "ttft_s": 0.25}
    line = TextFormatter().format(record)
    assert line.endswith(' INFO specmamba: request id=cmpl-1 endpoint="POST /v1/completions" ttft_s=0.25')


def test_a_traceback_is_part_of_its_json_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        values = {"name": "uvicorn.error", "levelname": "ERROR", "msg": "oh %s", "args": ("no",)}
        record = logging.makeLogRecord({**values, "exc_info": (type(error), error, error.__traceback__)})
    line = JsonFormatter().format(record)
    assert "\n" not in line
    fields = json.loads(line)
    assert (fields["level"], fields["logger"], fields["message"]) == ("error", "uvicorn.error", "oh no")
    assert fields["exception"].endswith("ValueError: two\nlines")


@pytest.mark.parametrize(("log_format", "formatter"), [("text", TextFormatter), ("json", JsonFormatter)])
def test_every_logger_of_the_process_writes_in_the_chosen_format(
    log_format: Any, formatter: type[logging.Formatter], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, ours = logging.getLogger(), logging.getLogger("specmamba")
    monkeypatch.setattr(root, "handlers", [])
    before = ours.level
    try:
        configure_logging(ServerConfig(log_format=log_format, log_level="error"))
        (handler,) = root.handlers
        assert isinstance(handler.formatter, formatter)
        assert ours.level == logging.ERROR
        assert logging.getLogger("uvicorn.error").propagate
    finally:
        logging.captureWarnings(False)
        ours.setLevel(before)


# ---- metrics ---------------------------------------------------------------------------------------------------------


def test_every_documented_metric_exists(served: Served) -> None:
    served.complete(prompt="a")
    served.complete(prompt=[])  # errors are counted by their reason: without one there is no line
    names = {name for name, _ in metrics(served)}
    assert names >= {
        "specmamba_spec_decode_num_drafts_total",
        "specmamba_spec_decode_num_draft_tokens_total",
        "specmamba_spec_decode_num_accepted_tokens_total",
        "specmamba_spec_decode_num_accepted_tokens_per_pos_total",
        "specmamba_spec_accept_length",
        "specmamba_time_to_first_token_seconds_bucket",
        "specmamba_inter_token_latency_seconds_bucket",
        "specmamba_e2e_request_latency_seconds_bucket",
        "specmamba_request_errors_total",
        "specmamba_running_requests",
        "specmamba_waiting_requests",
        "specmamba_kv_used_tokens",
        "specmamba_state_used_slots",
        "specmamba_prefix_cache_hit_tokens_total",
        "specmamba_prefix_cache_miss_total",
        "specmamba_log_lines_dropped_total",
    }


def test_benchmarks_for_vllm_compute_our_acceptance_length(served: Served) -> None:
    served.complete(prompt="abc", max_tokens=9)
    text = served.http.get("/metrics").text
    found = {"drafts": 0.0, "draft_tokens": 0.0, "accepted_tokens": 0.0}
    per_position: dict[int, float] = {}
    for line in text.splitlines():  # such tools sum up whatever line begins so, and know a position by its label
        if line.startswith("vllm:spec_decode_num_accepted_tokens_per_pos"):
            per_position[int(line.split('position="')[1].split('"')[0])] = float(line.split()[-1])
        elif line.startswith("vllm:spec_decode_num_"):
            name = line.removeprefix("vllm:spec_decode_num_").partition("_total{")[0]
            assert 'model_name="org/model"' in line
            found[name] += float(line.split()[-1])
    ours = {name: value for (name, _), value in metrics(served).items()}
    assert found["drafts"] > 0
    assert 1 + found["accepted_tokens"] / found["drafts"] == ours["specmamba_spec_accept_length"]
    assert found["draft_tokens"] == ours["specmamba_spec_decode_num_draft_tokens_total"]
    assert sum(per_position.values()) == found["accepted_tokens"]
    assert sorted(per_position) == list(range(len(per_position)))


def test_a_tree_counts_as_one_draft_under_vllms_names() -> None:
    values = {
        (sample.name, sample.labels.get("position")): sample.value
        for family in vllm_counters(SpecStats(8, 18, 8, (4, 1, 2, 1), num_drafts=6), "m")
        for sample in family.samples
    }
    assert values[("vllm:spec_decode_num_drafts_total", None)] == 6
    assert values[("vllm:spec_decode_num_accepted_tokens_total", None)] == 8
    assert [values[("vllm:spec_decode_num_accepted_tokens_per_pos_total", str(i))] for i in range(3)] == [4, 3, 1]


def test_vllms_names_are_given_on_demand_only() -> None:
    with serving() as served:
        served.complete(prompt="a")
        assert "vllm:" not in served.http.get("/metrics").text


def test_calls_without_an_answer_are_counted_by_reason(served: Served) -> None:
    def count(reason: str) -> float:
        return metrics(served).get(("specmamba_request_errors_total", (("reason", reason),)), 0.0)

    whole = metrics(served)[("specmamba_e2e_request_latency_seconds_count", ())]
    before = {reason: count(reason) for reason in ("invalid_request", "context_length_exceeded", "invalid_api_key")}
    served.complete(prompt="a", temperature="hot")
    served.complete(prompt="a", top_p=7)
    served.complete(prompt="x" * 1000)
    served.http.post("/v1/completions", json={"prompt": "a"}, headers={"authorization": "Bearer no"})
    served.complete(prompt="a")
    assert {reason: count(reason) - before[reason] for reason in before} == {
        "invalid_request": 2,
        "context_length_exceeded": 1,
        "invalid_api_key": 1,
    }
    assert metrics(served)[("specmamba_e2e_request_latency_seconds_count", ())] == whole + 1


def test_a_client_that_disconnects_is_counted_and_logged() -> None:
    with log_lines(JsonFormatter()) as lines, serving(FakeEngine(step_s=0.02, chunk=1)) as served:
        with httpx.stream("POST", f"{served.url}/v1/completions", json={"prompt": "a", "stream": True}) as response:
            next(response.iter_bytes())
        left = ("specmamba_request_errors_total", (("reason", "disconnect"),))
        wait_until(lambda: metrics(served).get(left) == 1)
    (line,) = map(json.loads, lines)
    assert (line["status"], line["error"], line["finish_reason"]) == (200, "disconnect", "abort")


def test_a_histogram_counts_like_prometheus() -> None:
    histogram = Histogram("h", "text", (0.5, 1.0))
    for value, times in ((0.5, 1), (0.6, 3), (7.0, 2)):
        histogram.observe(value, times)
    (metric,) = histogram.collect()
    values = {(sample.name, sample.labels.get("le")): sample.value for sample in metric.samples}
    assert [values[("h_bucket", bound)] for bound in ("0.5", "1.0", "+Inf")] == [1, 4, 6]
    assert values[("h_count", None)] == 6
    assert values[("h_sum", None)] == pytest.approx(0.5 + 1.8 + 14)


# ---- health and descriptions -----------------------------------------------------------------------------------------


def test_ready_until_the_server_drains() -> None:
    with serving(FakeEngine(step_s=0.05, chunk=1)) as served:
        assert served.http.get("/ready").json() == {"status": "ready"}
        with served.http.stream("POST", "/v1/completions", json={"prompt": "a", "max_tokens": 30, "stream": True}):
            served.thread.drain(30.0)
            with httpx.Client(base_url=served.url) as other:
                assert other.get("/health").json() == {"status": "draining"}
                assert other.get("/ready").status_code == 503
                assert other.get("/server_info").json()["status"] == "draining"


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_server_info_has_the_keys_that_routers_read(served: Served, path: str) -> None:
    assert served.http.get(path).status_code == 403
    operator = {"Authorization": "Bearer operator"}
    info = served.http.get(path, headers=operator).json()
    assert info["model_path"] == info["tokenizer_path"] == "fake"
    assert (info["served_model_name"], info["dp_size"], info["tp_size"]) == ("org/model", 1, 1)
    assert info["disaggregation_mode"] == "null"
    assert isinstance(info["max_running_requests"], int)
    served.complete(prompt="abc", max_tokens=8)
    info = served.http.get(path, headers=operator).json()
    assert info["internal_states"][0]["avg_spec_accept_length"] > 1.0
    # One reader takes "model" for another name of "model_id", and stumbles over both.
    assert not {"model", "model_id"} & set(info)
    assert "secret" not in json.dumps(info)


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_model_info_has_the_keys_that_routers_read(served: Served, path: str) -> None:
    info = served.http.get(path).json()
    assert (info["model_path"], info["is_generation"], info["architectures"]) == ("fake", True, [])
    assert served.http.get(path, headers={"authorization": ""}).status_code == 401


def test_the_page_can_be_disabled() -> None:
    with serving(disable_page=True) as served:
        assert served.http.get("/").status_code == served.http.get("/events").status_code == 404
