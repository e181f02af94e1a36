"""The prefix cache over HTTP: hits, separate salts and keys, flushes, and the report for operators."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import httpx
import pytest

import specmamba.server.api.operations
from specmamba.config import EngineConfig
from specmamba.core import OutputDelta
from specmamba.engine.engine import Engine
from specmamba.server.api.conversation import ChatCompletionRequest
from specmamba.server.api.operations import CacheReport
from specmamba.server.api.requests import CompletionRequest
from tests.fake_engine import CACHE_STATS, FakeEngine, Served, serving, slow_steps, wait_until

PROMPT = 'class Counter:\n    """Counts words in a text."""\n\n    def __init__(self) -> None:\n        self.'
USER = {"role": "user", "content": "Write a function that adds two numbers."}
LINE = re.compile(
    r" *(no salt|salt [0-9a-f]{8}|\[\d+:\d+\), \d+ tokens?, (tombstone|state \d+))(, (age \d+|\d+ [a-z ]+))*"
)


@pytest.fixture(scope="module", params=[(1, "no_buffer"), (16, "extra_buffer")], ids=str)
def engine(request: pytest.FixtureRequest) -> Engine:
    page_size, strategy = request.param
    tracking: dict[str, Any] = {"mamba_track_interval": 8} if strategy == "extra_buffer" else {}
    return Engine(
        EngineConfig(
            dtype="float32",
            num_threads=1,
            max_running_requests=4,
            max_total_tokens=4096,
            context_length=1024,
            page_size=page_size,
            mamba_radix_cache_strategy=strategy,
            **tracking,
        )
    )


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Served]:
    with serving(engine) as served:
        yield served


@pytest.fixture
def demo(server: Served) -> Iterator[Served]:
    """The real engine on the demo model, with an empty cache; after a test the pools must be consistent and unused."""
    server.http.post("/flush_cache").raise_for_status()
    yield server
    engine = server.engine
    wait_until(lambda: not engine.has_unfinished_requests)
    server.thread.call(lambda engine: engine.cache_manager.cache.check()).result(60)
    stats = server.thread.call(lambda engine: engine.stats()).result(60)
    assert (stats.kv_used_tokens, stats.state_used_slots, stats.prefix_cache.num_locked_tokens) == (0, 0, 0)


@pytest.fixture
def with_slow_steps(engine: Engine) -> Iterator[None]:
    with slow_steps(engine):
        yield


@pytest.fixture(scope="module")
def fake() -> Iterator[Served]:
    with serving() as served:
        yield served


def usage(response: httpx.Response) -> tuple[int, int]:
    """Prompt tokens, and how many of them were cached."""
    response.raise_for_status()
    if response.headers["content-type"].startswith("text/event-stream"):
        *_, last, done = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
        assert done == "[DONE]"
        figures = json.loads(last)["usage"]
    else:
        figures = response.json()["usage"]
    return figures["prompt_tokens"], figures["prompt_tokens_details"]["cached_tokens"]


def report(served: Served) -> dict[str, Any]:
    return dict(served.http.get("/cache").raise_for_status().json())


def metrics(served: Served) -> dict[str, float]:
    lines = [line for line in served.http.get("/metrics").text.splitlines() if line[0] != "#"]
    return {name.removeprefix("specmamba_"): float(value) for name, _, value in (x.rpartition(" ") for x in lines)}


def refusal(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert list(response.json()) == ["error"]
    return dict(response.json()["error"])


# ---- what hits -------------------------------------------------------------------------------------------------------


def test_a_repeated_prompt_is_cached_but_for_its_last_token(demo: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    first = demo.complete(**body)
    num_tokens, num_cached = usage(first)
    assert num_cached == 0
    again = demo.complete(**body)
    assert usage(again) == (num_tokens, num_tokens - 1)
    assert again.json()["choices"] == first.json()["choices"]
    streamed = demo.complete(**body, stream=True, stream_options={"include_usage": True})
    assert usage(streamed) == (num_tokens, num_tokens - 1)


def test_a_conversation_is_cached_with_its_answers(demo: Served) -> None:
    first = demo.chat(USER, max_tokens=20, temperature=0)
    answer = first.json()["choices"][0]["message"]["content"]
    num_tokens, num_cached = usage(first)
    assert num_cached == 0
    assert usage(demo.chat(USER, max_tokens=20, temperature=0)) == (num_tokens, num_tokens - 1)
    history = [USER, {"role": "assistant", "content": answer}, {"role": "user", "content": "Now subtract."}]
    streamed = demo.chat(*history, max_tokens=4, stream=True, stream_options={"include_usage": True})
    assert usage(streamed)[1] >= num_tokens - 1
    assert usage(demo.chat(*history, max_tokens=4))[1] == usage(streamed)[0] - 1


def test_the_usage_of_several_prompts_adds_up(demo: Served) -> None:
    num_tokens, _ = usage(demo.complete(prompt=PROMPT, max_tokens=1))
    other = PROMPT + "total = 0\n"
    other_tokens, other_cached = usage(demo.complete(prompt=other, max_tokens=1))
    assert other_cached == num_tokens  # the first request has run its prompt to the end
    both = demo.complete(prompt=[PROMPT, other, "x"], max_tokens=1)
    single_tokens, single_cached = usage(demo.complete(prompt="x", max_tokens=1))
    assert single_cached == 0  # nothing can be cached of a prompt of one token
    assert usage(both) == (num_tokens + other_tokens + single_tokens, num_tokens - 1 + other_tokens - 1)


def test_prompts_of_one_call_share_what_the_first_computes(demo: Served) -> None:
    total, cached = usage(demo.complete(prompt=[PROMPT] * 3, max_tokens=2))
    assert cached == 2 * (total // 3 - 1)


# ---- tenants ---------------------------------------------------------------------------------------------------------


@pytest.mark.fast_cases(1)
def test_different_salts_and_keys_share_nothing(demo: Served) -> None:
    before = report(demo)
    fields: list[dict[str, str]] = [
        {}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"extra_key": "a"}, {"cache_salt": "a", "extra_key": "b"},
        {"cache_salt": "b", "extra_key": "a"}, {"cache_salt": "null"}, {"cache_salt": 'a", "b'},
    ]  # fmt: skip
    texts = set()
    for salted in fields:
        response = demo.complete(prompt=PROMPT, max_tokens=4, temperature=0, **salted)
        assert usage(response)[1] == 0, salted
        texts.add(response.json()["choices"][0]["text"])
    assert len(texts) == 1
    for salted in fields:
        num_tokens, num_cached = usage(demo.complete(prompt=PROMPT, max_tokens=4, temperature=0, **salted))
        assert num_cached == num_tokens - 1, salted
    after = report(demo)
    assert after["num_salts"] == len(fields)
    assert after["misses"]["salt"] - before["misses"]["salt"] == len(fields) - 1
    assert after["misses"]["never_stored"] - before["misses"]["never_stored"] == 1


def test_salts_also_separate_chats(demo: Served) -> None:
    num_tokens, _ = usage(demo.chat(USER, max_tokens=2, cache_salt="a"))
    assert usage(demo.chat(USER, max_tokens=2)) == (num_tokens, 0)
    assert usage(demo.chat(USER, max_tokens=2, cache_salt="a")) == (num_tokens, num_tokens - 1)


def test_the_key_that_reaches_the_engine(fake: Served) -> None:
    fake.engine.seen_extra_keys.clear()
    fake.complete(prompt=["x", "y"], max_tokens=1).raise_for_status()
    fake.complete(prompt=["x", "y"], max_tokens=1, cache_salt="s").raise_for_status()
    fake.chat({"role": "user", "content": "u"}, max_tokens=1, cache_salt="s").raise_for_status()
    none, _, *salted = fake.engine.seen_extra_keys
    assert none is None
    assert len(salted) == 3
    assert len(set(salted)) == 1
    assert salted[0] is not None


@pytest.mark.parametrize("field", ["cache_salt", "extra_key"])
def test_salts_are_texts_of_1_to_256_characters(fake: Served, field: str) -> None:
    wrongs: list[object] = ["", "x" * 257, 5, ["a"], {}]
    for wrong in wrongs:
        assert refusal(fake.complete(prompt="x", **{field: wrong}), 400)["param"] == field
        assert refusal(fake.chat({"role": "user", "content": "u"}, **{field: wrong}), 400)["param"] == field
    body = json.dumps({"prompt": "x", field: "\ud800"}).encode()
    headers = {"Content-Type": "application/json"}
    assert refusal(fake.http.post("/v1/completions", content=body, headers=headers), 400)["param"] == field
    for right in ("x", "é" * 256):
        assert fake.complete(prompt="x", max_tokens=1, **{field: right}).status_code == 200


def test_the_pair_of_salt_and_key_is_unambiguous() -> None:
    pairs: list[tuple[str | None, str | None]] = [
        (None, None), ("a", None), (None, "a"), ("a", "b"), ("b", "a"), ("a, b", None), ('a", "b', None),
        ("null", None), (None, "null"), ("null", "null"), ("[", "]"),
    ]  # fmt: skip
    bodies: list[tuple[type[CompletionRequest | ChatCompletionRequest], dict[str, Any]]] = [
        (CompletionRequest, {"prompt": "x"}),
        (ChatCompletionRequest, {"messages": [USER]}),
    ]
    keys = [
        [model.model_validate({**rest, "cache_salt": salt, "extra_key": key}).prefix_cache_key for salt, key in pairs]
        for model, rest in bodies
    ]
    assert keys[0] == keys[1]
    assert keys[0][0] is None
    assert len(set(keys[0])) == len(pairs)


# ---- flushing --------------------------------------------------------------------------------------------------------


def test_a_flush_evicts_prefixes_that_no_request_uses(demo: Served) -> None:
    num_tokens, _ = usage(demo.complete(prompt=PROMPT, max_tokens=4, ignore_eos=True))
    held = report(demo)["num_tokens"]
    assert held >= num_tokens - 1
    response = demo.http.post("/flush_cache")
    assert (response.status_code, response.json()) == (200, {"success": True, "flushed_tokens": held})
    assert demo.http.post("/flush_cache").json() == {"success": True, "flushed_tokens": 0}
    after = report(demo)
    assert (after["num_nodes"], after["num_tokens"], after["num_states"]) == (0, 0, 0)
    assert after["num_free_pages"] == after["num_pages"]
    assert after["num_free_state_slots"] == after["num_state_slots"]
    assert usage(demo.complete(prompt=PROMPT, max_tokens=4)) == (num_tokens, 0)


@pytest.mark.usefixtures("with_slow_steps")
@pytest.mark.fast_cases(1)
def test_a_flush_leaves_running_requests_alone(demo: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    alone = demo.complete(**body).json()["choices"][0]["text"]
    demo.complete(prompt="import os\n" * 8, max_tokens=4)
    with demo.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        lines = response.iter_lines()
        pieces = [next(lines)]
        flushed = demo.http.post("/flush_cache").json()["flushed_tokens"]
        during = report(demo)
        pieces += list(lines)
    chunks = [json.loads(line.removeprefix("data: ")) for line in pieces if line.startswith("data: {")]
    assert flushed > 0
    assert during["num_locked_tokens"] == during["num_tokens"] > 0
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == alone


def test_a_flush_of_an_engine_that_hangs_or_has_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specmamba.server.api.operations, "_ENGINE_TIMEOUT_S", 0.05)
    engine, in_step, released = FakeEngine(), threading.Event(), threading.Event()

    def hang() -> list[OutputDelta]:
        in_step.set()
        assert released.wait(60)
        return []

    engine.step = hang  # type: ignore[method-assign]
    with serving(engine) as served:
        with served.http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}):
            assert in_step.wait(60)
            assert refusal(served.http.post("/flush_cache"), 503)["code"] == "engine_busy"
            released.set()
        served.server._stop = lambda: None  # type: ignore[method-assign]
        served.thread._stop_callbacks.clear()  # the server of this test outlives its engine
        served.thread.shutdown(0.0)
        for response in (served.http.post("/flush_cache"), served.http.get("/cache")):
            assert refusal(response, 503)["code"] == "engine_stopped"
        served.server.should_exit = True
        assert engine.num_flushed == 0  # a refused flush is not done later


def test_web_pages_cannot_flush(fake: Served) -> None:
    flushed = fake.engine.num_flushed
    assert (
        refusal(fake.http.post("/flush_cache", headers={"Origin": "http://evil.example"}), 403)["code"] == "forbidden"
    )
    assert fake.http.get("/flush_cache").status_code == 405
    assert fake.engine.num_flushed == flushed
    assert fake.http.post("/flush_cache", json={}).json()["flushed_tokens"] == CACHE_STATS.num_tokens
    assert fake.engine.num_flushed == flushed + 1


# ---- what operators see ----------------------------------------------------------------------------------------------


def test_the_report_has_every_figure(demo: Served, engine: Engine) -> None:
    before = report(demo)
    num_tokens, _ = usage(demo.complete(prompt=PROMPT, max_tokens=1))
    usage(demo.complete(prompt=PROMPT, max_tokens=1))
    answer = report(demo)
    assert set(answer) == set(CacheReport.model_fields)
    assert set(answer) == {"enabled", "strategy", "track_interval", *engine.cache_manager.cache.summary()}
    assert answer["enabled"] is True
    assert (answer["page_size"], answer["strategy"]) in [(1, "no_buffer"), (16, "extra_buffer")]
    assert answer["track_interval"] == (8 if answer["strategy"] == "extra_buffer" else None)
    assert answer["policy"] == "lru"
    assert answer["query_tokens"] - before["query_tokens"] == 2 * (num_tokens - 1)
    assert answer["hit_tokens"] - before["hit_tokens"] == num_tokens - 1
    assert answer["hit_rate"] == pytest.approx(answer["hit_tokens"] / answer["query_tokens"])
    assert list(answer["misses"]) == ["never_stored", "evicted", "page_grid", "salt"]
    assert (answer["num_tokens"], answer["num_states"]) == (
        num_tokens,
        2,
    )  # where the prompt and where the request ends


def test_the_tree_as_text_shows_no_prompt_and_no_salt(demo: Served) -> None:
    assert demo.http.get("/cache?format=text").text == "empty\n"
    for rest in ("name", "total"):
        demo.complete(prompt=PROMPT + rest, max_tokens=2, cache_salt="tenant-of-mine")
    demo.complete(prompt=PROMPT, max_tokens=2)
    response = demo.http.get("/cache", params={"format": "text"})
    assert response.headers["content-type"] == "text/plain; charset=utf-8"
    lines = response.text.removesuffix("\n").split("\n")
    assert all(LINE.fullmatch(line) for line in lines), response.text
    assert sum("1 hit" in line for line in lines if "[" in line) == 1  # the second prompt's
    assert [line.strip()[:4] for line in lines if "salt" in line] in (["no s", "salt"], ["salt", "no s"])
    assert "tenant" not in response.text


def test_wrong_parameters_of_the_report_are_named(fake: Served) -> None:
    for query, param in (("format=xml", "format"), ("format=", "format"), ("fromat=text", "fromat")):
        assert refusal(fake.http.get(f"/cache?{query}"), 400)["param"] == param


def test_only_the_operator_flushes() -> None:
    with serving(api_key="secret", admin_key="operator") as served:
        assert refusal(served.http.get("/cache"), 401)["code"] == "invalid_api_key"
        assert refusal(served.http.post("/flush_cache"), 401)["code"] == "invalid_api_key"
        tenant = served.http.post("/flush_cache", headers={"Authorization": "Bearer secret"})
        assert refusal(tenant, 403)["code"] == "operator_only"
        assert served.engine.num_flushed == 0
        assert served.http.post("/flush_cache", headers={"Authorization": "Bearer operator"}).status_code == 200


def test_the_schema_describes_both_addresses(fake: Served) -> None:
    schema = fake.http.get("/openapi.json").json()
    cache, flush = schema["paths"]["/cache"]["get"], schema["paths"]["/flush_cache"]["post"]
    assert set(cache["responses"]) == {"200", "400", "401", "403", "503"}
    assert set(cache["responses"]["200"]["content"]) == {"application/json", "text/plain"}
    assert [parameter["name"] for parameter in cache["parameters"]] == ["format"]
    assert set(flush["responses"]) == {"200", "401", "403", "503"}


def test_the_metrics_follow_the_cache(demo: Served) -> None:
    before = metrics(demo)
    num_tokens, _ = usage(demo.complete(prompt=PROMPT, max_tokens=1))
    usage(demo.complete(prompt=PROMPT, max_tokens=1))
    usage(demo.complete(prompt=PROMPT, max_tokens=1, cache_salt="s"))
    after = metrics(demo)
    gained = {name: after[name] - before[name] for name in after if name.startswith("prefix_cache")}
    assert gained == {
        "prefix_cache_query_tokens_total": 3 * (num_tokens - 1),
        "prefix_cache_hit_tokens_total": num_tokens - 1,
        "prefix_cache_evicted_tokens_total": 0,
        "prefix_cache_evicted_states_total": 0,
        'prefix_cache_miss_total{reason="never_stored"}': 1,
        'prefix_cache_miss_total{reason="evicted"}': 0,
        'prefix_cache_miss_total{reason="page_grid"}': 0,
        'prefix_cache_miss_total{reason="salt"}': 1,
    }
    page_size = report(demo)["page_size"]
    pages = -(-num_tokens // page_size)
    assert after["kv_cached_tokens"] == 2 * pages * page_size  # one copy for each salt
    assert after["state_cached_slots"] == 4  # each where the prompt and where the request ended
    assert (after["kv_used_tokens"], after["state_used_slots"]) == (0, 0)


@pytest.mark.usefixtures("with_slow_steps")
def test_memory_in_use_and_cached_memory_are_reported_separately(demo: Served) -> None:
    num_tokens, _ = usage(demo.complete(prompt=PROMPT, max_tokens=1))
    cached = metrics(demo)["kv_cached_tokens"]
    body = {"prompt": PROMPT, "max_tokens": 500, "ignore_eos": True, "stream": True}
    with demo.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()  # kept: dropping it closes the connection
        next(lines)
        during = metrics(demo)
    assert during["kv_used_tokens"] >= num_tokens
    assert during["kv_cached_tokens"] < cached  # the prompt's KV is in use now, though it lies in the tree
    assert during["state_used_slots"] >= 1


@pytest.mark.usefixtures("with_slow_steps")
@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_leaves_nothing_locked(demo: Served, stream: bool) -> None:
    body = {"prompt": [PROMPT, PROMPT + "x"], "max_tokens": 900, "ignore_eos": True, "stream": stream}
    aborted = 'requests_total{finish_reason="abort"}'
    before = metrics(demo).get(aborted, 0)
    if stream:
        with demo.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()  # kept: dropping it closes the connection
            next(lines)
            assert report(demo)["num_locked_tokens"] > 0
    else:
        connection = HTTPConnection(demo.http.base_url.host, demo.http.base_url.port)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        wait_until(lambda: metrics(demo)["running_requests"] == 2)
        connection.close()
    wait_until(lambda: metrics(demo).get(aborted, 0) == before + 2)
    wait_until(lambda: metrics(demo)["running_requests"] == 0)
    after = report(demo)
    assert after["num_locked_tokens"] == 0
    assert after["num_evictable_states"] == after["num_states"]
    assert after["num_free_pages"] + after["num_evictable_pages"] == after["num_pages"]
    num_tokens, num_cached = usage(demo.complete(prompt=PROMPT, max_tokens=1))
    if stream:  # its prompt was computed, and stays cached
        assert num_cached == num_tokens - 1


def test_the_report_of_a_disabled_cache() -> None:
    config = EngineConfig(
        dtype="float32", num_threads=1, max_total_tokens=512, context_length=256, disable_radix_cache=True
    )
    with serving(Engine(config)) as served:
        for _ in range(2):
            assert usage(served.complete(prompt=PROMPT, max_tokens=1))[1] == 0
        assert "--disable-radix-cache" in served.http.get("/cache?format=text").text
        answer = report(served)
        assert (answer["enabled"], answer["num_tokens"], answer["query_tokens"]) == (False, 0, 0)
        assert served.http.post("/flush_cache").json() == {"success": True, "flushed_tokens": 0}
