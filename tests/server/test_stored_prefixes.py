"""Prefixes are written to disk, and brought back, when the operator or a client asks for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from specmamba.cache.prefix.inspection import WHOLE
from specmamba.config import EngineConfig
from specmamba.engine.engine import Engine
from specmamba.server.api import stored_prefixes
from tests.fake_engine import Served, serving, wait_until
from tests.server.test_events import events_of
from tests.server.test_server_cache import PROMPT, refusal, usage

FLAGS: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "max_running_requests": 2,
    "max_total_tokens": 1024,
    "context_length": 512,
    "speculative_algorithm": "none",
}
OPERATOR = {"Authorization": "Bearer operator"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("saved") / "prefixes"
    tiers: dict[str, Any] = {"hicache_storage_dir": folder, "hicache_write_policy": "write_back", "hicache_size": 0.01}
    engine = Engine(EngineConfig(**FLAGS, **tiers))
    with serving(engine, api_key=("first", "second"), admin_key="operator") as server:
        yield server


def complete(served: Served, key: str, **body: Any) -> Any:
    headers = {"Authorization": f"Bearer {key}"}
    request = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0} | body
    return served.http.post("/v1/completions", json=request, headers=headers)


def test_what_is_saved_is_loaded_for_its_client_alone(served: Served) -> None:
    first = complete(served, "first", cache_salt="a")
    served.thread.call(lambda engine: engine.cache_manager.cache.evict_states(8)).result(60)  # to host memory
    complete(served, "first", prompt=PROMPT[::-1])
    saved = served.http.post("/cache/save", headers=OPERATOR).json()
    assert saved["success"]
    assert (saved["written_entries"] >= 2, saved["lost_entries"]) == (True, 0)
    assert served.http.post("/cache/save", headers=OPERATOR).json()["written_entries"] == 0
    served.http.post("/flush_cache", headers=OPERATOR).raise_for_status()
    num_tokens, _ = usage(first)

    def load(key: str, **body: Any) -> Any:
        return served.http.post("/cache/load", json=body, headers={"Authorization": f"Bearer {key}"})

    for key, salt in (("second", "a"), ("first", "b"), ("operator", "a")):
        assert load(key, prompt=PROMPT, cache_salt=salt).json()["prompts"][0]["cached_tokens"] == 0
    loaded = load("first", prompt=[PROMPT, PROMPT + "and more"], cache_salt="a").json()
    assert loaded["prompts"][0] == {"prompt_tokens": num_tokens, "cached_tokens": num_tokens - 1}
    assert loaded["prompts"][1]["cached_tokens"] >= num_tokens - 2
    again = complete(served, "first", cache_salt="a")
    assert usage(again) == (num_tokens, num_tokens - 1)
    assert again.json()["choices"] == first.json()["choices"]


def test_a_load_that_lasts_checks_its_text_once_and_has_few_beside_it(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = served.thread.call(lambda engine: engine).result(60)
    checked: list[int] = []
    polls: list[object] = []
    may_end = threading.Event()

    def load_prefix(wish: Any, *_: object) -> int | None:
        polls.append(wish)
        wish.is_over = may_end.is_set()
        return 7 if wish.is_over else None

    monkeypatch.setattr(engine, "check_prompt", lambda tokens: checked.append(len(tokens)))
    monkeypatch.setattr(engine.cache_manager, "load_prefix", load_prefix)
    monkeypatch.setattr(stored_prefixes, "MAX_LOADS_OF_CLIENT", 1)
    monkeypatch.setattr(stored_prefixes, "MAX_LOADS", 2)

    def load(key: str) -> Any:
        return served.http.post("/cache/load", json={"prompt": [1, 2]}, headers={"Authorization": f"Bearer {key}"})

    with ThreadPoolExecutor(2) as pool:
        try:
            calls = [pool.submit(load, "first")]
            wait_until(lambda: len(polls) > 5)
            assert refusal(load("first"), 429)["code"] == "too_many_loads"
            calls.append(pool.submit(load, "second"))
            wait_until(lambda: len(set(map(id, polls))) == 2)
            error = refusal(load("operator"), 429)
            assert "wait for one of them to end" in error["message"]
        finally:
            may_end.set()
        assert [call.result(60).json()["prompts"][0]["cached_tokens"] for call in calls] == [7, 7]
    assert checked == [2, 2]
    assert load("first").status_code == 200  # the places are free again


def test_calls_that_ask_for_nothing_possible_are_refused(served: Served) -> None:
    assert refusal(served.http.post("/cache/save", headers={"Authorization": "Bearer first"}), 403)
    assert refusal(served.http.post("/cache/save"), 401)
    assert refusal(served.http.post("/cache/load", json={"prompt": PROMPT}), 401)
    body: Any
    for body in ({}, {"prompt": ""}, {"prompt": [4096000]}, {"prompt": PROMPT, "path": "x"}, {"prompt": [1] * 999}):
        assert refusal(served.http.post("/cache/load", json=body, headers=OPERATOR), 400)
    with serving(Engine(EngineConfig(**FLAGS))) as plain:
        for path, body in (("/cache/save", None), ("/cache/load", {"prompt": PROMPT})):
            error = refusal(plain.http.post(path, json=body), 400)
            assert (error["code"], "--hicache-storage-dir" in error["message"]) == ("no_stored_prefixes", True)


def test_the_page_shows_where_a_text_lies(served: Served) -> None:
    served.http.post("/flush_cache", headers=OPERATOR).raise_for_status()
    prompt = PROMPT + "a text that is written to disk"
    complete(served, "first", prompt=prompt).raise_for_status()

    def tiers() -> list[tuple[str, ...]]:
        def sample(engine: Engine) -> list[tuple[str, ...]]:
            (outline,) = engine.sample([WHOLE], 50).outlines.values()
            return [node.tiers for node in outline.nodes if node.has_state]

        return served.thread.call(sample).result(60)

    assert set(tiers()) == {()}  # written when memory is needed
    served.http.post("/cache/save", headers=OPERATOR).raise_for_status()
    assert ("disk",) in tiers()  # those that save too little are not written
    served.thread.call(lambda engine: engine.cache_manager.cache.evict_states(8)).result(60)
    complete(served, "first", prompt=prompt).raise_for_status()  # from host memory, or from disk
    with served.http.stream("GET", "/events", headers=OPERATOR) as events:
        stats = next(data for name, data in events_of(events) if name == "stats")
    assert set(stats["tiers"]) == {"host", "disk"}
    assert stats["tiers"]["disk"]["num_entries"] > 0
    assert stats["tiers"]["disk"]["writes"] > 0
    with served.http.stream("GET", "/events", headers={"Authorization": "Bearer first"}) as events:
        assert next(data for name, data in events_of(events) if name == "stats")["tiers"] == {}
