"""No tenant learns another's text: not by counts of cached tokens, by events, reports or metrics, nor by time."""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from specmamba.cache.prefix.inspection import MAX_BEGINNING, View
from specmamba.config import EngineConfig
from specmamba.engine.engine import Engine
from specmamba.server.page import feed as live_feed
from specmamba.server.page.samples import MAX_TEXT
from tests.fake_engine import Served, serving, wait_until
from tests.server.test_events import events_of, first

SECRET = "The pin of the vault is 4711, and it must not be told. " * 8
GUESSES = [SECRET.replace("4711", pin) for pin in ("4710", "4711", "4712", "1234")]
SETTINGS = EngineConfig(
    dtype="float32", num_threads=1, max_running_requests=4, max_total_tokens=8192, context_length=1024
)
VICTIM, ATTACKER, OPERATOR = ({"Authorization": f"Bearer {name}"} for name in ("victim", "attacker", "operator"))


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(SETTINGS)


@pytest.fixture(scope="module")
def served(engine: Engine) -> Iterator[Served]:
    with serving(engine, api_key=("victim", "attacker"), admin_key="operator") as server:
        yield server


@pytest.fixture
def cached(served: Served) -> Served:
    """A server that has the victim's text, and no other, in its prefix cache."""
    served.http.post("/flush_cache", headers=OPERATOR).raise_for_status()
    for body in ({"prompt": SECRET}, {"prompt": SECRET, "cache_salt": "s"}):
        complete(served, VICTIM, **body)
    assert complete(served, VICTIM, prompt=SECRET)["prompt_tokens_details"]["cached_tokens"] > 100
    return served


def complete(served: Served, headers: dict[str, str], **body: Any) -> dict[str, Any]:
    answer = served.http.post("/v1/completions", json={"max_tokens": 1, **body}, headers=headers)
    answer.raise_for_status()
    usage: dict[str, Any] = answer.json()["usage"]
    return usage


def shape(tree: str) -> list[str]:
    """The lines of a tree without ages and slots, which only the operator's view counts over all tenants."""
    return [re.sub(r", age \d+|(?<=state) \d+", "", line) for line in tree.splitlines()]


def counted_misses(served: Served, viewer: dict[str, str], caller: dict[str, str], **body: Any) -> set[str]:
    """The reasons of misses whose counts, as ``viewer`` reads them, change by a completion of ``caller``."""

    def counts() -> set[tuple[str, str]]:
        text = served.http.get("/metrics", headers=viewer).text
        return set(re.findall(r'^specmamba_prefix_cache_miss_total{reason="(\w+)"} (\S+)$', text, re.MULTILINE))

    before = counts()
    assert before
    complete(served, caller, **body)
    return {reason for reason, _ in counts() - before}


class TestOracles:
    @pytest.mark.fast_cases(1)
    @pytest.mark.parametrize("salt", [None, "s", "other"])
    def test_cached_tokens_do_not_tell_which_guess_is_right(self, cached: Served, salt: str | None) -> None:
        found = set()
        for guess in GUESSES:
            usage = complete(cached, ATTACKER, prompt=guess, cache_salt=salt, max_tokens=1)
            found.add(usage["prompt_tokens_details"]["cached_tokens"])
            cached.http.post("/flush_cache", headers=OPERATOR).raise_for_status()  # its own guesses
            complete(cached, VICTIM, prompt=SECRET)
        assert found == {0}

    def test_chats_are_apart_too(self, cached: Served) -> None:
        body = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 1}
        cached.http.post("/v1/chat/completions", json=body, headers=VICTIM).raise_for_status()
        answer = cached.http.post("/v1/chat/completions", json=body, headers=ATTACKER)
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

    def test_scores_of_prompts_do_not_come_from_others(self, cached: Served) -> None:
        usage = complete(cached, ATTACKER, prompt=SECRET, echo=True, logprobs=0, max_tokens=0)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0

    def test_a_hit_of_another_takes_no_less_time(self, cached: Served) -> None:
        """By work, not by clock: the attacker's request computes every token of its prompt."""
        engine: Engine = cached.engine
        lengths: list[int] = []
        extend = engine.runner.extend

        def counting(runs: Any) -> Any:
            lengths.append(sum(run.length for run in runs))
            return extend(runs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.runner, "extend", counting)
            counts = []
            for guess in GUESSES:
                usage = complete(cached, ATTACKER, prompt=guess)
                counts.append(sum(lengths) - (usage["prompt_tokens"] - 1))
                lengths.clear()
                cached.http.post("/flush_cache", headers=OPERATOR).raise_for_status()
                complete(cached, VICTIM, prompt=SECRET)
                lengths.clear()
        assert counts == [0] * len(GUESSES)

    @pytest.mark.slow
    def test_a_hit_of_another_takes_no_less_time_by_the_clock(self, cached: Served) -> None:
        taken: dict[str, list[float]] = {"right": [], "wrong": []}
        for number in range(24):
            for name, guess in (("right", SECRET), ("wrong", SECRET.replace("4711", "4712"))):
                body = f"{guess} {number}"  # its own text is not cached from the round before
                began = time.perf_counter()
                complete(cached, ATTACKER, prompt=body, cache_salt=f"{number} {name}")
                taken[name].append(time.perf_counter() - began)
        right, wrong = (statistics.median(taken[name]) for name in ("right", "wrong"))
        assert 0.5 < right / wrong < 2

    def test_metrics_do_not_tell_that_another_salt_has_a_text(self, cached: Served) -> None:
        for headers in ({}, ATTACKER):
            changes = []
            for guess in GUESSES:
                changes.append(counted_misses(cached, headers, ATTACKER, prompt=guess))
                cached.http.post("/flush_cache", headers=OPERATOR).raise_for_status()
                complete(cached, VICTIM, prompt=SECRET)
            assert all(change == changes[0] for change in changes)
        for number, headers in enumerate(({}, ATTACKER)):  # salts of one key, which may be those of its own clients
            text = f"{number} {SECRET}"
            complete(cached, ATTACKER, prompt=text, cache_salt="one")
            assert counted_misses(cached, headers, ATTACKER, prompt=text, cache_salt="two") == {"never_stored"}
        complete(cached, VICTIM, prompt=SECRET, cache_salt="the newest")
        assert counted_misses(cached, OPERATOR, VICTIM, prompt=SECRET, cache_salt="another") == {"salt"}


class TestReports:
    def test_a_tenant_sees_the_cache_of_its_own_requests(self, cached: Served) -> None:
        whole = cached.http.get("/cache", headers=OPERATOR).json()
        assert whole["num_tokens"] > 200
        before = cached.http.get("/cache", headers=ATTACKER).json()
        assert set(before) == {
            *("enabled", "strategy", "track_interval", "policy", "hit_rate", "query_tokens", "hit_tokens", "misses")
        }
        complete(cached, VICTIM, prompt=SECRET)
        assert cached.http.get("/cache", headers=ATTACKER).json() == before
        complete(cached, ATTACKER, prompt=SECRET)
        after = cached.http.get("/cache", headers=ATTACKER).json()
        assert after["query_tokens"] > before["query_tokens"]
        assert after["misses"]["salt"] == 0
        assert after["misses"]["never_stored"] == before["misses"]["never_stored"] + 1

    def test_a_tenant_sees_its_own_trees(self, cached: Served) -> None:
        assert cached.http.get("/cache?format=text", headers=ATTACKER).text == "empty\n"
        own, whole = (shape(cached.http.get("/cache?format=text", headers=key).text) for key in (VICTIM, OPERATOR))
        assert own == whole != ["empty"]
        complete(cached, ATTACKER, prompt="def main():\n    return 1")
        text = cached.http.get("/cache?format=text", headers=ATTACKER).text
        assert len(shape(text)) == 3
        assert set(shape(text)) < set(shape(cached.http.get("/cache?format=text", headers=OPERATOR).text))
        complete(cached, VICTIM, prompt="class Stack:")
        assert cached.http.get("/cache?format=text", headers=ATTACKER).text == text  # ages and slots of others neither

    @pytest.mark.parametrize(("method", "path"), [("GET", "/server_info"), ("POST", "/flush_cache")])
    def test_what_belongs_to_the_operator(self, served: Served, method: str, path: str) -> None:
        answer = served.http.request(method, path, headers=ATTACKER)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "operator_only")
        assert served.http.request(method, path).status_code == 401
        assert served.http.request(method, path, headers=OPERATOR).status_code == 200

    def test_the_operator_may_use_the_api(self, served: Served) -> None:
        assert complete(served, OPERATOR, prompt="x")["completion_tokens"] == 1


class TestEvents:
    def test_beginnings_of_texts_are_shown_to_those_who_sent_them(
        self, cached: Served, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """To the key whose text it is, but for what it sent with a salt, and to the operator."""
        monkeypatch.setattr(live_feed, "INTERVAL_S", 0.02)
        monkeypatch.setattr(live_feed, "TREE_INTERVAL_S", 0.02)
        texts: dict[str, list[str | None]] = {}
        for name, key in (("victim", VICTIM), ("attacker", ATTACKER), ("operator", OPERATOR)):
            with cached.http.stream("GET", "/events", headers=key) as events:
                tree = first(events_of(events), "tree")
            texts[name] = [node["text"] for node in tree["nodes"] if node["depth"] == 1]
        begun = cached.engine.tokenizer.decode(cached.engine.tokenizer.encode(SECRET)[:MAX_BEGINNING])[:MAX_TEXT]
        assert SECRET.startswith(begun)
        assert sorted(texts["victim"], key=str) == [None, begun]
        assert texts["attacker"] == []
        assert texts["operator"] == [begun, begun]
        assert cached.http.get("/events").status_code == 401

    def test_drafts_and_figures_of_others_are_not_shown(self, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(live_feed, "INTERVAL_S", 0.02)
        monkeypatch.setattr(live_feed, "TREE_INTERVAL_S", 0.02)
        served.http.post("/flush_cache", headers=OPERATOR).raise_for_status()
        prompt = "import os\n\ndef read_file(path):\n    "
        with (
            served.http.stream("GET", "/events", headers=ATTACKER) as seen_by_attacker,
            served.http.stream("GET", "/events", headers=VICTIM) as seen_by_victim,
            served.http.stream("GET", "/events", headers=OPERATOR) as seen_by_operator,
        ):
            attacker, victim, operator = map(events_of, (seen_by_attacker, seen_by_victim, seen_by_operator))
            began = first(attacker, "stats")
            complete(served, VICTIM, prompt=prompt, max_tokens=48, ignore_eos=True)
            own, whole = first(victim, "draft"), first(operator, "draft")
            assert own["drafts"]
            assert whole["drafts"]
            # What the attacker gets until its own request has a draft is all that it learns of the victim's.
            complete(served, ATTACKER, prompt=prompt + "x = 1", max_tokens=24, ignore_eos=True)
            learned = []
            for name, event in attacker:
                if name == "draft":
                    break
                learned.append((name, event))
        drafts = event["drafts"]
        assert {draft["request"] for draft in drafts}.isdisjoint(draft["request"] for draft in own["drafts"])
        for name, shown in learned:
            assert name in ("stats", "tree")
            if name == "stats" and shown["spec"]["tokens"] == began["spec"]["tokens"]:
                rest = {"running", "waiting", "time", "cache"}  # of its own request
                assert {k: v for k, v in shown.items() if k not in rest} == {
                    k: v for k, v in began.items() if k not in rest
                }

    def test_a_tenant_cannot_take_all_places(self, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(live_feed, "MAX_LISTENERS_OF_TENANT", 1)
        wait_until(lambda: served.engine.runner.on_draft is None)  # the listeners of the test before have left
        with served.http.stream("GET", "/events", headers=ATTACKER) as one:
            events = events_of(one)  # kept: the response is closed with it
            first(events, "hello")
            assert served.http.get("/events", headers=ATTACKER).status_code == 429
            with served.http.stream("GET", "/events", headers=VICTIM) as other:
                assert first(events_of(other), "hello")["model"]


class TestWhoOperates:
    @pytest.mark.fast_cases(5)
    @pytest.mark.parametrize(
        ("settings", "headers", "status"),
        [
            ({}, {}, 200),
            ({}, {"X-Forwarded-For": "192.0.2.7"}, 403),
            ({}, {"X-Forwarded-Host": "llm.example.com"}, 403),
            ({"allowed_hosts": ("llm.example.com",)}, {"Host": "llm.example.com"}, 403),  # a proxy that says nothing
            ({}, {"Authorization": "Bearer anything"}, 200),
            ({"admin_key": "operator"}, {}, 403),
            ({"admin_key": "operator"}, {"Authorization": "Bearer operator"}, 200),
            ({"admin_key": "operator"}, {"Authorization": "Bearer wrong"}, 403),
            ({"api_key": "k"}, {"Authorization": "Bearer k"}, 403),
            ({"api_key": "k"}, {}, 401),
            ({"host": "0.0.0.0"}, {}, 403),
            ({"host": "0.0.0.0", "admin_key": "operator"}, {"Authorization": "Bearer operator"}, 200),
        ],
    )
    def test_who_operates(self, settings: dict[str, Any], headers: dict[str, str], status: int) -> None:
        with serving(**settings) as served:
            url = served.url.replace("0.0.0.0", "127.0.0.1")
            for method, path in (("GET", "/server_info"), ("POST", "/flush_cache")):
                assert httpx.request(method, url + path, headers=headers).status_code == status, path
            if status == 403 and not settings.get("api_key"):
                for path in ("/events", "/cache"):
                    assert httpx.get(url + path, headers=headers).status_code == 403
                completed = httpx.post(url + "/v1/completions", json={"prompt": "x"}, headers=headers)
                assert completed.status_code == 200

    def test_one_trusted_tenant_shares_its_prefixes(self) -> None:
        with serving(api_key=("a", "b"), prefix_cache_scope="shared") as served:
            for key in ("a", "b"):
                headers = {"Authorization": f"Bearer {key}"}
                assert served.http.post("/v1/completions", json={"prompt": "x"}, headers=headers).status_code == 200
            assert [owner.tenant for owner in served.engine.seen_owners] == [None, None]
            assert [owner.name for owner in served.engine.seen_owners] == ["key 0", "key 1"]

    def test_tenants_by_key(self) -> None:
        names = []
        for keys in (("a", "b"), ("b", "c", "a")):
            with serving(api_key=keys) as served:
                headers = {"Authorization": "Bearer a"}
                assert served.http.post("/v1/completions", json={"prompt": "x"}, headers=headers).status_code == 200
                names.append(served.engine.seen_owners[0].tenant)
        assert names[0] == names[1]  # it outlives a restart with other keys
        assert "a" != names[0] is not None

    def test_views(self) -> None:
        assert View("a").shows("a")
        assert not View("a").shows("b")
        assert not View("a").shows(None)
        assert View(is_whole=True).shows("b")


def test_choices_count_as_calls() -> None:
    from tests.fake_engine import FakeEngine

    with serving(FakeEngine(step_s=0.01, chunk=1), max_calls_per_key=4, api_key=("a", "b")) as served:
        a, b = ({"Authorization": f"Bearer {key}"} for key in "ab")
        for body in ({"prompt": "x", "n": 5}, {"prompt": ["x"] * 5}, {"prompt": "x", "best_of": 5}):
            refused = served.http.post("/v1/completions", json=body, headers=a)
            assert refused.status_code == 400
            assert "--max-calls-per-key" in refused.json()["error"]["message"]
        body = {"prompt": "x", "n": 3, "max_tokens": 60, "stream": True}
        with served.http.stream("POST", "/v1/completions", json=body, headers=a):
            wait_until(lambda: len(served.engine.running) == 3)
            many = served.http.post("/v1/completions", json={"prompt": "x", "n": 2}, headers=a)
            assert (many.status_code, json.loads(many.text)["error"]["code"]) == (429, "too_many_calls")
            one = {"prompt": "x", "max_tokens": 1}
            assert served.http.post("/v1/completions", json=one, headers=a).status_code == 200
            assert served.http.post("/v1/completions", json=one | {"n": 4}, headers=b).status_code == 200
        wait_until(lambda: not served.engine.running)
        served.wait_for_calls()
        assert served.http.post("/v1/completions", json=one | {"n": 4}, headers=a).status_code == 200
