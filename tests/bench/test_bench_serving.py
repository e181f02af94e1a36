"""The load generator: its requests, its figures, and that it always ends the server it started."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from specmamba.bench.serving import __main__ as serving
from specmamba.bench.serving import server as serving_server
from specmamba.bench.serving.figures import accept_length, level_report, print_report
from specmamba.bench.serving.load import Answer, Failure, Outcome, Run, closed_loop, open_loop, poisson_arrivals
from specmamba.bench.serving.options import ServingBenchConfig
from specmamba.bench.serving.sweep import sweep
from specmamba.config import EngineConfig
from specmamba.errors import ConfigError
from specmamba.flags.command_line import parse_command_line
from specmamba.measure import report as report_module
from specmamba.measure.report import percentile
from tests.fake_engine import FakeEngine, wait_until
from tests.fake_engine import serving as fake_server

ROOT = Path(__file__).parents[2]
NAN = math.nan


def json_of(file: Path) -> Any:
    return json.loads(file.read_text("utf8"))


# --- figures ---


@pytest.mark.parametrize(
    ("values", "q", "expected"),
    [
        ([5.0], 99, 5.0),
        ([3.0, 1.0], 50, 2.0),
        ([4.0, 1.0, 3.0, 2.0], 90, 3.7),
        (list(range(101)), 99, 99.0),
        ([1.0, 2.0, 10.0], 100, 10.0),
        ([1.0, 2.0, 10.0], 0, 1.0),
    ],
)
def test_percentiles(values: Sequence[float], q: float, expected: float) -> None:
    assert percentile(values, q) == pytest.approx(expected, abs=1e-12)


def test_percentiles_agree_with_another_implementation() -> None:
    values = [random.Random(i).gauss(10, 3) for i in range(57)]
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    assert [percentile(values, q) for q in range(1, 100)] == pytest.approx(cuts)
    assert math.isnan(percentile([], 50))


def answer(times: Sequence[float], end_s: float, tokens: int, accepted: int | None, text: str = "a b") -> Answer:
    return Answer(tuple(times), end_s, text, 10, 4, tokens, accepted)


def test_the_figures_of_a_level() -> None:
    outcomes: tuple[Outcome, ...] = (
        answer((0.1, 0.2, 0.4, 0.5), 0.6, tokens=8, accepted=4),  # 2 tokens a chunk: 50, 100 and 50 ms each
        answer((0.3,), 0.3, tokens=1, accepted=0),  # no gap
        Failure("HTTP 429", "queue full", 429),
        Failure("HTTP 500", "broken", 500),
        Failure("HTTP 429", "queue still full", 429),
    )
    level = level_report(Run(outcomes, (0.0, 0.5, 1.0, 1.5, 2.0), 2.0), None, 2.5)
    assert (level["requests"], level["completed"], level["failed"], level["rejected_429"]) == (5, 2, 3, 2)
    assert level["errors"]["HTTP 429"] == {"count": 2, "message": "queue full"}
    assert level["errors"]["HTTP 500"] == {"count": 1, "message": "broken"}
    assert level["sent_rate"] == 2.0
    assert (level["request_throughput"], level["output_token_throughput"]) == (1.0, 4.5)
    assert (level["prompt_tokens"], level["cached_prompt_tokens"], level["output_tokens"]) == (20, 8, 9)
    assert level["accept_length"] == pytest.approx(9 / 5)
    assert level["ttft_ms"] == pytest.approx({"mean": 200, "p50": 200, "p90": 280, "p99": 298})
    assert level["inter_token_ms"] == pytest.approx({"mean": 66.667, "p50": 50, "p90": 90, "p99": 99})
    assert level["inter_chunk_ms"] == pytest.approx({"mean": 133.333, "p50": 100, "p90": 180, "p99": 198})
    assert level["end_to_end_ms"]["mean"] == 450


def report_with_cached(*cached: int) -> dict[str, Any]:
    runs = [Run((Answer((0.1,), 0.2, "a", 10, tokens, 2, None),), (0.0,), 1.0) for tokens in cached]
    levels = [level_report(run, clients, None) for clients, run in enumerate(runs, 1)]
    return {"model": "m", "num_requests": 1, "max_tokens": 2, "temperature": 0.0, "levels": levels}


def test_the_cached_share_of_every_level(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(report_with_cached(0, 5))
    out = capsys.readouterr().out
    assert re.search(r"clients +cached ", out)
    assert re.search(r"^ +1 +0% ", out, re.MULTILINE)
    assert re.search(r"^ +2 +50% ", out, re.MULTILINE)
    assert "the levels did not do the same work" in out
    print_report(report_with_cached(5, 5))
    out = capsys.readouterr().out
    assert "prefix cache" in out
    assert "did not do the same work" not in out
    print_report(report_with_cached(0, 0))
    assert "cache" not in capsys.readouterr().out


def test_acceptance_without_figures_of_the_server() -> None:
    assert accept_length([]) is None
    assert accept_length([answer((0.1,), 0.1, tokens=5, accepted=None)]) is None
    assert accept_length([answer((0.1,), 0.1, 5, None), answer((0.1,), 0.1, 6, 4)]) == 3.0


# --- load ---


def test_poisson_arrivals_are_seeded_and_have_the_rate() -> None:
    arrivals = poisson_arrivals(4.0, 4001, seed=7)
    assert arrivals == poisson_arrivals(4.0, 4001, seed=7) != poisson_arrivals(4.0, 4001, seed=8)
    gaps = [after - before for before, after in pairwise(arrivals)]
    assert arrivals[0] == 0.0
    assert min(gaps) > 0
    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.05)  # 3 standard errors
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.1)  # of an exponential: its mean


def test_a_closed_loop_keeps_its_clients_busy_and_no_more() -> None:
    asked: list[int] = []
    busy: list[int] = []
    now = 0

    async def send(number: int, due: float) -> Outcome:
        nonlocal now
        asked.append(number)
        now += 1
        busy.append(now)
        await asyncio.sleep(0)
        now -= 1
        return Failure("x", "y")

    run = asyncio.run(closed_loop(send, 3, 10))
    assert asked == list(range(10))
    assert max(busy) == 3
    assert len(run.outcomes) == len(run.sent_times) == 10


def test_an_open_loop_does_not_wait_for_answers() -> None:
    due_times: list[float] = []
    all_sent = asyncio.Event()

    async def send(number: int, due: float) -> Outcome:
        due_times.append(due)
        if len(due_times) == 3:
            all_sent.set()
        await asyncio.wait_for(all_sent.wait(), 10)  # none is answered before the last one was sent
        return Failure("x", "y")

    run = asyncio.run(open_loop(send, [0.0, 0.01, 0.03]))
    assert [due - due_times[0] for due in due_times] == pytest.approx([0.0, 0.01, 0.03])
    assert run.sent_times[2] >= 0.03
    assert run.duration_s >= 0.03


# --- answers of all kinds ---


def event(**fields: Any) -> str:
    return f"data: {json.dumps(fields)}\n\n"


USAGE = {"prompt_tokens": 5, "completion_tokens": 6, "completion_tokens_details": {"accepted_prediction_tokens": 3}}
GOOD = event(choices=[{"text": "a"}]) + event(choices=[{"text": "bc"}]) + event(choices=[], usage=USAGE)
DONE = "data: [DONE]\n\n"
Handler = Callable[[httpx.Request], httpx.Response]


def scripted(*answers: httpx.Response | Exception) -> Handler:
    """A server that lists a model and gives these answers one after the other."""
    left = list(answers)

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        if request.url.path != "/v1/completions":
            return httpx.Response(404, text="nothing here")
        chosen = left.pop(0)
        if isinstance(chosen, Exception):
            raise chosen
        return chosen

    return handle


def measure(handler: Handler, **settings: Any) -> dict[str, Any]:
    config = ServingBenchConfig(**{"base_url": "http://test", "num_warmup": 0, "concurrency": (1,), **settings})
    return asyncio.run(sweep(config, ["x", "y"], "http://test", transport=httpx.MockTransport(handler)))


def test_every_kind_of_failure_is_counted() -> None:
    answers: list[httpx.Response | Exception] = [
        httpx.Response(200, text=GOOD + DONE),
        httpx.Response(429, json={"error": {"message": "try later"}}),
        httpx.Response(500, text="<html>\n oops</html>"),
        httpx.Response(503),
        httpx.Response(200, text=event(choices=[{"text": "a"}]) + event(error={"message": "gave up"}) + DONE),
        httpx.Response(200, text=GOOD),
        httpx.Response(200, text=event(choices=[{"text": "a"}]) + DONE),
        httpx.Response(200, text="data: {nonsense\n\n"),
        httpx.Response(200, text="data: " + "[" * 100_000 + "\n\n"),
        httpx.Response(200, text=event(choices=[{"delta": {}}]) + DONE),
        httpx.Response(200, text=GOOD.replace('"completion_tokens": 6', '"completion_tokens": 0') + DONE),
        httpx.ReadTimeout("slow"),
        httpx.RemoteProtocolError("hung up"),
    ]
    (level,) = measure(scripted(*answers), num_requests=len(answers))["levels"]
    assert {kind: error["count"] for kind, error in level["errors"].items()} == {
        "protocol": 4,
        "HTTP 429": 1,
        "HTTP 500": 1,
        "HTTP 503": 1,
        "error in the stream": 1,
        "stream cut off": 1,
        "no usage": 1,
        "timeout": 1,
        "connection": 1,
    }
    assert level["errors"]["HTTP 429"]["message"] == "try later"
    assert level["errors"]["HTTP 500"]["message"] == "<html> oops</html>"
    assert level["errors"]["HTTP 503"]["message"] == "Service Unavailable"
    assert level["errors"]["error in the stream"]["message"] == "gave up"
    assert "hung up" in level["errors"]["connection"]["message"]
    assert (level["completed"], level["failed"], level["rejected_429"]) == (1, 12, 1)
    assert level["output_tokens"] == 6
    assert level["accept_length"] == 2.0


def test_the_requests_that_are_sent() -> None:
    bodies: list[dict[str, Any]] = []

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/completions":
            bodies.append(json.loads(request.content))
            assert dict(request.headers.raw)[b"Authorization"] == "Bearer käy".encode()
        return scripted(httpx.Response(200, text=GOOD + DONE))(request)

    settings = {"num_requests": 3, "concurrency": (1, 1), "seed": 40, "temperature": 0.5, "max_tokens": 9}
    report = measure(handle, **settings, ignore_eos=True, api_key="käy")
    assert len(report["levels"]) == 2
    assert bodies[:3] == bodies[3:]  # every level sends the same requests
    assert [(body["prompt"], body["seed"]) for body in bodies[:3]] == [("x", 40), ("y", 41), ("x", 42)]
    assert bodies[0] == {
        "model": "m",
        "prompt": "x",
        "max_tokens": 9,
        "temperature": 0.5,
        "seed": 40,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    assert measure(handle, num_requests=1, model="some/folder/other", api_key="käy")["model"] == "other"
    assert bodies[-1]["model"] == "some/folder/other"
    assert "ignore_eos" not in bodies[-1]


def test_a_report_has_no_paths_of_the_server() -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/server_info":
            told = {"model": "/a/b/m/", "speculative_tree": "/c/t.json", "device": "cpu", "num_threads": None}
            return httpx.Response(200, json={"engine": told})
        return scripted(httpx.Response(200, text=GOOD + DONE))(request)

    server = measure(handle, num_requests=1)["server"]
    assert server == {"model": "m", "speculative_tree": "t.json", "device": "cpu", "num_threads": None}


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (httpx.Response(401, json={"error": {"message": "no key"}}), "HTTP 401: no key"),
        (
            httpx.Response(400, json={"error": {"message": "ignore_eos: extra field"}}),
            "ignore_eos: extra field (leave --ignore-eos out)",
        ),
    ],
)
def test_a_request_that_the_server_refuses_ends_it(response: httpx.Response, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        measure(scripted(response), num_warmup=1, num_requests=1)
    assert message in str(refused.value)


def test_a_temporary_failure_of_a_warm_up_does_not_end_it(capsys: pytest.CaptureFixture[str]) -> None:
    busy, good = httpx.Response(429, text="busy"), httpx.Response(200, text=GOOD + DONE)
    (level,) = measure(scripted(busy, good), num_warmup=1, num_requests=1)["levels"]
    assert (level["completed"], level["failed"]) == (1, 0)
    assert capsys.readouterr().err == "a warm-up request failed: HTTP 429: busy\n"


@pytest.mark.parametrize(
    ("answer", "is_flushed", "said"),
    [
        (httpx.Response(200, json={"flushed_tokens": 9}), True, ""),
        (httpx.Response(404, text="nothing here"), False, ""),  # another kind of server
        (httpx.Response(503, json={"error": {"message": "busy"}}), False, "was not flushed: HTTP 503: busy"),
        (httpx.ReadTimeout("slow"), False, "was not flushed: ReadTimeout: slow"),
    ],
)
def test_every_level_begins_with_an_empty_cache(
    answer: httpx.Response | Exception, is_flushed: bool, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    posted: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            posted.append(request.url.path)
        if request.url.path != "/flush_cache":
            return scripted(httpx.Response(200, text=GOOD + DONE))(request)
        if isinstance(answer, Exception):
            raise answer
        return answer

    report = measure(handle, concurrency=(1, 1), num_requests=2, num_warmup=1)
    assert posted == ["/v1/completions", *(2 * ["/flush_cache", "/v1/completions", "/v1/completions"])]
    assert report["cache_flushed"] is is_flushed
    err = capsys.readouterr().err
    assert err.count(said) == (2 if said else len(err) + 1)


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (httpx.Response(401, json={"error": {"message": "who?"}}), "answers HTTP 401: who? (--api-key)"),
        (httpx.Response(200, text="hello"), "is no OpenAI-compatible server"),
        (httpx.Response(200, json={"data": []}), "is no OpenAI-compatible server"),
    ],
)
def test_an_address_without_an_openai_server(response: httpx.Response, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        measure(lambda request: response)
    assert message in str(refused.value)


# --- the command, against a server ---


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one\u2028line", "x": 1}\n\n{"prompt": "two"}\n', "utf8")
    return file


def test_an_open_loop_against_a_running_server(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    arguments = [
        "--num-requests",
        "6",
        "--max-tokens",
        "8",
        "--seed",
        "3",
        "--prompts",
        str(prompts),
        "--json",
        str(file),
    ]
    with fake_server(FakeEngine(step_s=0.01), api_key="client", admin_key="secret") as server:
        connection = ["--base-url", server.url + "/v1/", "--api-key", "secret"]
        assert serving.main([*connection, "--request-rate", "50,100", *arguments]) == 0
        assert server.engine.num_flushed == 2
        seeds = [params.seed for params in server.engine.seen_params]
    assert [sorted(part) for part in (seeds[:2], seeds[2:8], seeds[8:])] == [[3, 4], [*range(3, 9)], [*range(3, 9)]]
    report = json_of(file)
    assert report["mode"] == "open loop"
    assert report["prompts"] == "prompts.jsonl"
    assert report["server"] == {"model": "fake", "dtype": "float32"}
    assert [level["request_rate"] for level in report["levels"]] == [50.0, 100.0]
    for level in report["levels"]:
        assert (level["completed"], level["output_tokens"], level["accept_length"]) == (6, 48, 2.0)
        assert level["cached_prompt_tokens"] == 18
        assert 0 < level["ttft_ms"]["p50"] < level["end_to_end_ms"]["p50"]
        assert level["sent_rate"] > 0
    out = capsys.readouterr().out
    assert "asked/s" in out
    assert "sent/s" in out
    assert "came from the server's prefix cache" in out


def test_a_full_queue_is_counted(prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    with fake_server(FakeEngine(step_s=0.02), max_queued_requests=1) as server:
        arguments = ["--base-url", server.url, "--concurrency", "4", "--num-requests", "8", "--max-tokens", "8"]
        assert serving.main([*arguments, "--prompts", str(prompts), "--json", str(file)]) == 0
    (level,) = json_of(file)["levels"]
    assert level["rejected_429"] == level["failed"] == level["errors"]["HTTP 429"]["count"] > 0
    assert level["completed"] == 8 - level["failed"] > 0
    out = capsys.readouterr().out
    assert f"4 clients: {level['failed']} failed: HTTP 429: 1 requests are waiting already" in out
    (row,) = re.findall(r"^ +4 .*$", out, re.MULTILINE)
    assert row.split()[-2:] == [str(level["failed"])] * 2


def test_status_1_when_nothing_was_answered(prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(FakeEngine(), max_queued_requests=1) as server:
        server.engine.running["stuck"] = None  # the queue stays full; no step is taken, so it is not read
        server.engine.step = list
        arguments = ["--base-url", server.url, "--concurrency", "1", "--num-requests", "2", "--prompts", str(prompts)]
        assert serving.main(arguments) == 1
        server.engine.running.clear()
    assert "1 client: 2 failed: HTTP 429: " in capsys.readouterr().out


@pytest.mark.slow
def test_the_demo_served_for_the_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a real server process on the demo, which is started and ended here."""
    processes = []
    popen = subprocess.Popen

    def recorded(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        processes.append(popen(*args, **kwargs))
        return processes[-1]

    monkeypatch.setattr(subprocess, "Popen", recorded)
    monkeypatch.setenv("SPECMAMBA_PORT", "1")  # the environment's settings of a server do not reach this one
    engine = ["--dtype", "float32", "--context-length", "512", "--num-threads", "1", "--speculative-num-steps", "2"]
    load = ["--concurrency", "1,2", "--num-requests", "3", "--max-tokens", "8", "--ignore-eos", "--num-warmup", "1"]
    out = ["--json", str(tmp_path / "report.json"), "--plot", str(tmp_path / "load.png")]
    assert serving.main([*engine, *load, "--api-key", "secret", *out]) == 0
    (process,) = processes
    assert process.returncode == 0  # it has ended, and cleanly
    assert not any("secret" in argument for argument in cast(list[str], process.args))
    report = json_of(tmp_path / "report.json")
    assert report["model"] == "specmamba-demo"
    assert report["server"]["dtype"] == "float32"
    assert report["server"]["speculative_num_steps"] == 2
    assert [level["concurrency"] for level in report["levels"]] == [1, 2]
    for level in report["levels"]:
        assert (level["completed"], level["failed"], level["output_tokens"]) == (3, 0, 24)
        assert 1.0 <= level["accept_length"] <= 3.0
        assert 0 < level["inter_token_ms"]["p50"] <= level["inter_chunk_ms"]["p50"]
    first, second = report["levels"]
    assert first["accept_length"] == second["accept_length"]  # same prompts, same seeds: the same text
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")
    table = capsys.readouterr().out
    assert "clients" in table
    assert report["prompts"] == "bundled"


# --- servers that are started ---

SCRIPTS = {
    "ends": (
        "import sys; print('a line', flush=True); sys.exit('specmamba serve: error: no luck')",
        "20",
        "status 1: specmamba serve: ",
    ),
    "never ready": ("import time; time.sleep(60)", "0.5", "not ready after 0.5 s (--startup-timeout)"),
    "deaf": (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)",
        "0.5",
        "not ready after 0.5 s",
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_server_that_does_not_start(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, timeout, message = SCRIPTS[name]
    monkeypatch.setattr(serving_server, "SERVE", (sys.executable, "-S", "-c", script))
    monkeypatch.setattr(serving_server, "_END_TIMEOUT_S", 0.2)
    with pytest.raises(SystemExit) as ended:
        serving.main(["--startup-timeout", timeout])
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


SLOW = """
import os, sys
from specmamba.server_config import ServerConfig
from specmamba.server.serve import run_server
from tests.fake_engine import FakeEngine

class Noted(FakeEngine):
    def step(self):
        with open({pid_file!r}, "w") as file:
            file.write(str(os.getpid()))
        return super().step()

config = ServerConfig(port=0)
sys.exit(run_server(config, lambda: Noted(config, step_s=0.05, chunk=1, fail_at_step={fail_at_step})))
"""
BENCH = """
import sys
from specmamba.bench.serving import __main__ as serving
from specmamba.bench.serving import server as serving_server
serving_server.SERVE = (sys.executable, "-c", {server!r})
sys.exit(serving.main(["--prompts", {prompts!r}, "--concurrency", "1", "--num-requests", "1", "--num-warmup", "1"]))
"""


def bench_process(prompts: Path, pid_file: Path, fail_at_step: int | None = None) -> subprocess.Popen[str]:
    server = SLOW.format(pid_file=str(pid_file), fail_at_step=fail_at_step)
    return subprocess.Popen(
        [sys.executable, "-c", BENCH.format(server=server, prompts=str(prompts))],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.slow
def test_a_signal_ends_the_server_too(number: int, status: int, prompts: Path, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with bench_process(prompts, pid_file) as bench:
        wait_until(lambda: pid_file.exists() and pid_file.read_text(), timeout_s=120)
        server = int(pid_file.read_text())
        assert is_alive(server)
        bench.send_signal(number)
        out, err = bench.communicate(timeout=120)
    assert bench.returncode == status, err
    assert not is_alive(server)
    assert out == ""
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_server_that_ends_during_a_level(prompts: Path, tmp_path: Path) -> None:
    with bench_process(prompts, tmp_path / "pid", fail_at_step=25) as bench:
        out, err = bench.communicate(timeout=120)
    assert bench.returncode == 2, out + err
    assert "specmamba bench serving: error: the server ended with status 1: " in err
    assert err.rstrip().endswith("ERROR specmamba: the engine failed")


def test_the_engine_gets_the_flags_that_were_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECMAMBA_SPECULATIVE_ADAPTIVE", raising=False)
    monkeypatch.setenv("SPECMAMBA_PAGE_SIZE", "16")
    config = ServingBenchConfig(model="a b", speculative_tree=Path("t.json"), num_requests=5)
    assert sorted(serving_server.engine_flags(config)) == [
        "--model=a b",
        "--page-size=16",
        "--speculative-tree=t.json",
    ]
    assert serving_server.engine_flags(EngineConfig(model=None)) == ["--page-size=16"]


# --- mistakes ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--base-url", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9"),
        (["--base-url", "localhost:30000"], "--base-url: give scheme, host and port"),
        (["--base-url", "http://localhost:abc"], "--base-url: give scheme, host and port"),
        (["--base-url", "http://localhost:99999"], "--base-url: give scheme, host and port"),
        (["--base-url", "http://[::1"], "--base-url: give scheme, host and port"),
        (["--base-url", "http://a..b:1"], "--base-url: http://a..b:1 is no address: "),
        (["--base-url", "http://\u2603\u200b:1"], "--base-url: http://\u2603\u200b:1 is no address: "),
        (["--base-url", "http://x", "--startup-timeout", "9"], "--startup-timeout: the server at"),
        (["--concurrency", "2", "--request-rate", "2"], "choose --concurrency (closed loop) or --request-rate"),
        (["--concurrency", "1,0"], "--concurrency: Input should be greater than or equal to 1"),
        (["--concurrency", "1,,2"], "--concurrency: Input should be a valid integer"),
        (["--request-rate", "0"], "--request-rate: Input should be greater than 0"),
        (["--concurrency", "1,64"], "64 clients have nothing to do with --num-requests 32"),
        (["--base-url", "http://x", "--dtype=float32", "--page-size", "4"], "--dtype, --page-size: the server at"),
        (["--temperature", "-1"], "--temperature: "),
        (["--json", "no/such/folder/x.json"], "--json: there is no folder no/such/folder"),
        (["--plot", "x.jpeg"], "--plot: the name of a picture ends with .png or .svg or .pdf"),
        (["--prompts", "no.jsonl"], "--prompts: no.jsonl cannot be read: No such file or directory"),
    ],
)
def test_mistakes(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serving_server, "SERVE", ("/bin/false",))  # nothing may be started
    with pytest.raises(SystemExit) as ended:
        serving.main(arguments)
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("specmamba bench serving: error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ('{"prompt": "x"}\n{"prompt"\n', "line 2: not JSON"),
        ('{"prompt": ' + "[" * 100_000 + "\n", "line 1: not JSON"),
        ('{"text": "x"}\n', "line 1: not of the form"),
    ],
)
def test_bad_prompts(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serving_server, "SERVE", ("/bin/false",))
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(SystemExit) as ended:
        serving.main(["--prompts", str(file)])
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_prompts_of_conversations_are_sent_as_text(tmp_path: Path) -> None:
    file = tmp_path / "chats.json"
    turns = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "good day"}]
    file.write_text(json.dumps([{"prompt": "one\u2028line"}, {"conversations": turns}]))
    engine, seen = FakeEngine(), []
    encode = engine.tokenizer.encode

    def noted(text: str, add_special_tokens: bool = True) -> list[int]:
        seen.append(text)
        return encode(text, add_special_tokens)

    engine.tokenizer.encode = noted  # type: ignore[method-assign]
    with fake_server(engine) as server:
        arguments = ["--base-url", server.url, "--concurrency", "1", "--num-requests", "2", "--num-warmup", "0"]
        assert serving.main([*arguments, "--prompts", str(file)]) == 0
    assert seen == ["one\u2028line", "hello"]


@pytest.mark.parametrize(("package", "arguments"), [("matplotlib", ["--plot", "x.png"]), ("httpx", [])])
def test_a_missing_package_is_reported_before_anything_runs(
    package: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report_module, "find_spec", lambda name: None if name == package else object())
    monkeypatch.setattr(serving_server, "SERVE", ("/bin/false",))
    with pytest.raises(SystemExit) as ended:
        serving.main(arguments)
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert f"needs {package}, which is not installed: pip install 'specmamba[bench]'" in err


def test_levels_from_the_environment_and_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "bench.toml"
    file.write_text('request-rate = 2.5\njson = "a.json"\n')
    parse: Callable[[list[str]], ServingBenchConfig]
    parse = lambda arguments: parse_command_line(ServingBenchConfig, "x", arguments)  # noqa: E731
    config = parse(["--config", str(file)])
    assert config.levels == ((None, 2.5),)
    assert config.json == Path("a.json")
    monkeypatch.setenv("SPECMAMBA_CONCURRENCY", "3,5")
    monkeypatch.setenv("SPECMAMBA_JSON", "b.json")
    config = parse([])
    assert config.levels == ((3, None), (5, None))
    assert config.json == Path("b.json")
    assert parse(["--json", "c.json"]).json == Path("c.json")


def test_nan_and_infinity_become_null_in_a_report(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    report_module.write_json(file, {"a": NAN, "b": [1.5, math.inf], "c": {"d": (2, None)}})
    assert json_of(file) == {"a": None, "b": [1.5, None], "c": {"d": [2, None]}}
    with pytest.raises(ConfigError) as refused:
        report_module.write_json(tmp_path, {})
    assert "--json: " in str(refused.value)
