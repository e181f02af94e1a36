"""GET /events: the events for each listener, when drafts are recorded, and that listeners never block the engine."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from specmamba.cache.prefix import MambaRadixCache
from specmamba.cache.prefix.inspection import Outline, OutlineNode, View
from specmamba.core import DraftView, OutputDelta, SizingStats
from specmamba.engine.thread import EngineThread
from specmamba.server.api.service import Service
from specmamba.server.page import feed as live_feed
from specmamba.server.page.feed import Feed, Listener
from specmamba.server.page.routes import LiveStream
from specmamba.server.page.samples import MAX_TEXT, tree_event
from specmamba.server_config import ServerConfig
from tests.fake_engine import FakeEngine, Served, serving, wait_until
from tests.radix import World, array

DRAFT = DraftView("cmpl-1-0", tokens=(65, 66, 67, 228), parents=(-1, 0, 0, 1), path=(0, 1), bonus=68)
PLAIN = DraftView("cmpl-2-0", tokens=(65,), parents=(-1,), path=(0,), bonus=66)
SIZING = SizingStats(
    num_steps=100,
    num_plain_steps=20,
    num_probes=4,
    num_requests=200,
    num_nodes=700,
    num_draft_levels=160,
    predicted_seconds=2.0,
    measured_seconds=2.5,
    decision_seconds=0.01,
    calibration_error=0.0312,
    depth=2,
    gains=(1.0, 1.21, 1.38, 0.0, 0.86, 0.0, 1.18, 1.4, 0.0, 0.0),
    reason="drafts of depth 2: depth 2 is predicted to gain +40 % with 2 requests",
)
Event = tuple[str, dict[str, Any]]


class WatchedEngine(FakeEngine):
    """A fake engine with what the live page samples."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.world = World()
        self.cache_manager = SimpleNamespace(cache=self.world.cache, outline=self.world.cache.outline)
        self.pools = SimpleNamespace(state_buffers=None)
        self.watching: list[bool] = []
        self.views: list[DraftView] = []
        self.sizing: SizingStats | None = None
        self.is_stuck, self.go_on = threading.Event(), threading.Event()

    def watch_drafts(self, views: Sequence[View]) -> None:
        self.watching.append(bool(views))

    def last_drafts(self) -> tuple[DraftView, ...]:
        views, self.views = tuple(self.views), []
        return views

    def stats(self) -> Any:
        return replace(super().stats(), sizing=self.sizing)

    def step(self) -> list[OutputDelta]:
        if self.is_stuck.is_set():
            assert self.go_on.wait(60)
        return super().step()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_feed, "INTERVAL_S", 0.02)
    monkeypatch.setattr(live_feed, "TREE_INTERVAL_S", 0.02)


@pytest.fixture
def server() -> Iterator[Served]:
    with serving(WatchedEngine()) as served:
        yield served


@contextmanager
def listening(server: Served, **headers: str) -> Iterator[Iterator[Event]]:
    with server.http.stream("GET", "/events", headers=headers) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        yield events_of(response)


def events_of(response: httpx.Response) -> Iterator[Event]:
    name = ""
    for line in response.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def first(events: Iterator[Event], name: str) -> dict[str, Any]:
    return next(event for kind, event in events if kind == name)


def put(world: World, *texts: tuple[int, ...]) -> MambaRadixCache:
    """A cache with these texts, and a state at the end of each."""
    for text in texts:
        world.store(text)
    return world.cache


class TestEvents:
    def test_hello_then_figures_then_the_tree(self, server: Served) -> None:
        with listening(server) as events:
            name, hello = next(events)
            assert (name, hello["model"], hello["context_length"]) == (
                "hello",
                "specmamba-demo",
                server.engine.context_length,
            )
            stats, tree = first(events, "stats"), first(events, "tree")
        assert stats["pools"]["kv"] == {"used": 0, "cached": 70, "total": 1000}
        assert stats["pools"]["records"] == {"used": 0, "cached": 0, "total": 0}
        assert stats["cache"]["num_tombstones"] == 1
        assert tree == {"nodes": [], "num_left": 0}

    def test_counters_follow_requests(self, server: Served) -> None:
        server.complete(prompt="ab", max_tokens=8).raise_for_status()
        with listening(server) as events:
            stats = first(events, "stats")
        assert stats["spec"]["tokens"] == 8
        assert stats["spec"]["per_position"] == [4, 0]  # four steps, each with one of two drafted tokens
        for histogram, count in (("first_token", 1), ("inter_token", 6)):
            bound, total = stats["latency"][histogram]["buckets"][-1]
            assert (bound, total) == (None, count)
        assert stats["latency"]["first_token"]["sum"] > 0

    def test_the_size_of_drafts_where_it_is_decided(self, server: Served) -> None:
        with listening(server) as events:
            assert first(events, "stats")["sizing"] is None
            server.engine.sizing = SIZING
            stats = next(event for name, event in events if name == "stats" and event["sizing"])
        assert stats["sizing"] == asdict(SIZING) | {"gains": list(SIZING.gains)}

    def test_a_tenant_does_not_see_what_the_requests_of_all_decide(self) -> None:
        engine = WatchedEngine()
        engine.sizing = SIZING
        with serving(engine, api_key="key", admin_key="operator") as server:
            for key, is_shown in (("key", False), ("operator", True)):
                with listening(server, Authorization=f"Bearer {key}") as events:
                    assert bool(first(events, "stats")["sizing"]) is is_shown

    def test_drafts_with_texts(self, server: Served) -> None:
        with listening(server) as events:
            first(events, "stats")
            server.thread.call(lambda _: server.engine.views.extend([DRAFT, PLAIN])).result(60)
            event = first(events, "draft")
        (draft,) = event["drafts"]  # steps without drafted tokens are left out
        assert [node["text"] for node in draft["nodes"]] == ["A", "B", "C", "bytes:\\xe4"]
        assert draft["parents"] == [-1, 0, 0, 1]
        assert draft["path"] == [0, 1]
        assert draft["bonus"] == {"id": 68, "text": "D"}

    def test_the_tree_when_it_changes(self, server: Served) -> None:
        with listening(server) as events:
            assert first(events, "tree")["nodes"] == []
            server.thread.call(lambda _: put(server.engine.world, (65, 66, 67))).result(60)
            event = first(events, "tree")
        assert [(node["start"], node["end"], node["has_state"]) for node in event["nodes"]] == [
            (0, 0, False),
            (0, 3, True),
        ]
        assert [node["text"] for node in event["nodes"]] == ["", "ABC"]
        assert all("beginning" not in node for node in event["nodes"])

    def test_beginnings_of_texts_are_short(self) -> None:
        tokenizer: Any = SimpleNamespace(
            decode=lambda tokens, skip_special_tokens: "word " * len(tokens), has_text=True
        )
        node = OutlineNode(1, 0, 90, True, 0, 0, 0, 1, beginning=tuple(range(24)))
        event = tree_event(Outline((node,), 0), tokenizer)
        assert event["nodes"][0]["text"] == ("word " * 24)[:MAX_TEXT]

    def test_drafts_are_recorded_while_there_are_listeners(self, server: Served) -> None:
        assert server.engine.watching == []
        with listening(server) as events:
            first(events, "stats")
            with listening(server) as others:
                first(others, "stats")
            first(events, "stats")
            assert server.engine.watching == [True]
        wait_until(lambda: server.engine.watching == [True, False])
        with listening(server) as events:
            first(events, "stats")
            assert server.engine.watching == [True, False, True]

    def test_all_listeners_get_the_same_samples(self, server: Served) -> None:
        with listening(server) as one, listening(server) as other:
            first(one, "stats")
            time = first(other, "stats")["time"]
            while (seen := first(one, "stats")["time"]) < time:
                pass
            while (also := first(other, "stats")["time"]) < seen:
                pass
            assert also == seen

    def test_the_number_of_listeners_is_limited(self, server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(live_feed, "MAX_LISTENERS", 1)
        with listening(server) as events:
            first(events, "stats")
            answer = server.http.get("/events")
            assert answer.status_code == 429
            assert answer.json()["error"]["code"] == "too_many_listeners"
        wait_until(lambda: server.engine.watching == [True, False])
        with listening(server) as events:
            first(events, "stats")

    def test_a_long_step_is_reported_and_does_not_block(self, server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(live_feed, "BUSY_AFTER_S", 0.02)
        engine = server.engine
        with listening(server) as events:
            first(events, "stats")
            engine.is_stuck.set()
            answers: list[httpx.Response] = []
            asking = threading.Thread(target=lambda: answers.append(server.complete(prompt="ab", max_tokens=2)))
            asking.start()
            assert first(events, "busy")["seconds"] > 0
            engine.go_on.set()
            first(events, "stats")
            asking.join(60)
        assert answers[0].status_code == 200

    @pytest.mark.parametrize(("how", "reason"), [("drained", "stopped"), ("failed", "failed")])
    def test_the_end(self, how: str, reason: str) -> None:
        with serving(WatchedEngine(fail_at_step=1)) as server, listening(server) as events:
            first(events, "stats")
            if how == "failed":
                assert server.complete(prompt="ab").status_code == 500
            else:
                server.thread.drain(0.0)
            assert first(events, "end") == {"reason": reason}
            assert next(events, None) is None

    def test_a_sampler_that_fails_ends_only_its_streams(self, server: Served) -> None:
        server.engine.cache_manager = None
        with listening(server) as events:
            assert first(events, "end") == {"reason": "failed"}
            assert next(events, None) is None
        assert server.complete(prompt="ab", max_tokens=2).status_code == 200

    def test_the_key(self) -> None:
        with serving(WatchedEngine(), api_key="secret") as server:
            assert server.http.get("/events").status_code == 401
            with listening(server, Authorization="Bearer secret") as events:
                assert next(events)[0] == "hello"

    def test_there_are_no_events_without_the_page(self) -> None:
        with serving(WatchedEngine(), disable_page=True) as server:
            assert [server.http.get(path).status_code for path in ("/events", "/", "/page/app.js")] == [404] * 3


class TestListener:
    def test_the_newest_event_of_each_kind_is_kept(self) -> None:
        async def take() -> list[tuple[str, str]]:
            listener = Listener({"hello": "0"})
            for number in range(1000):
                listener.put("stats", str(number))
                listener.put("tree", "t")
            listener.close()
            listener.put("stats", "too late")
            return [event async for event in listener]

        assert asyncio.run(take()) == [("hello", "0"), ("stats", "999"), ("tree", "t")]

    def test_a_client_that_disconnects_before_the_answer_is_removed(self) -> None:
        async def serve(feed: Feed) -> int:
            async def gone() -> dict[str, str]:
                return {"type": "http.disconnect"}

            async def never(_: object) -> None:
                await asyncio.Event().wait()

            await LiveStream(feed)({"type": "http"}, gone, never)
            return feed.num_listeners

        engine = WatchedEngine()
        thread = EngineThread(lambda: engine)  # type: ignore[arg-type,return-value]
        thread.start()
        try:
            assert asyncio.run(serve(Feed(Service(ServerConfig(), thread)))) == 0
        finally:
            assert thread.shutdown(0.0)
        assert engine.watching == [True, False]


class TestOutline:
    def test_states_tombstones_hits_and_locks(self) -> None:
        world = World()
        cache = put(world, (1, 2, 3, 4), (1, 2, 5))
        match = cache.match(array((1, 2, 5, 9)))
        cache.count_request(4, match)
        cache.lock_state(match.node)
        nodes = cache.outline().nodes
        assert [(n.depth, n.start, n.end, n.has_state, n.hits, n.locks, n.state_locks) for n in nodes] == [
            (0, 0, 0, False, 0, 1, 0),
            (1, 0, 2, False, 0, 1, 0),
            (2, 2, 3, True, 1, 1, 1),
            (2, 2, 4, True, 0, 0, 0),
        ]
        assert [n.age > 0 for n in nodes] == [False, False, False, True]

    def test_the_most_recent_nodes_come_first_up_to_the_limit(self) -> None:
        cache = put(World(), (1, 2), (3, 4), (5, 6))
        shown = cache.outline(max_nodes=3)
        assert [(n.depth, n.end) for n in shown.nodes] == [(0, 0), (1, 2), (1, 2)]
        assert shown.num_left == 1
        assert shown.nodes[1].age < shown.nodes[2].age

    def test_it_has_the_beginning_of_each_piece_and_no_other_tokens(self) -> None:
        world = World(num_pages=128)
        cache = put(world, (1, 2, *range(100, 160)), (1, 2, 5))
        beginnings = {(node.start, node.end): node.beginning for node in cache.outline().nodes}
        assert beginnings == {(0, 0): (), (0, 2): (1, 2), (2, 3): (5,), (2, 62): tuple(range(100, 124))}
        fields = {"depth", "start", "end", "has_state", "hits", "locks", "state_locks", "age", "beginning", "tiers"}
        assert set(OutlineNode.__dataclass_fields__) == fields

    def test_an_empty_cache(self) -> None:
        assert World().cache.outline().nodes == ()
