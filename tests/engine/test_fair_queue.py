"""Turns of the clients: in the queue, in the batch, in the chunks of prompts, and when memory runs out."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from specmamba.core import Owner
from specmamba.engine.engine import Engine
from specmamba.engine.fair_queue import PrefillTurns, fair_order, may_displace, next_preempted, surplus, yielding
from specmamba.errors import QueueFullError
from tests.engine.test_engine import GREEDY, build, change, tiny

__all__ = ["tiny"]  # a fixture


def request(number: int, name: str | None, ran: bool = False, leader: Any = None, num_tokens: int = 4) -> Any:
    owner = Owner(name)
    return SimpleNamespace(
        sequence_number=number, owner=owner, num_admissions=int(ran), leader=leader, num_tokens=num_tokens
    )


def requests(text: str, first: int = 0) -> list[Any]:
    """A request for every letter; the letter is the client."""
    return [request(first + number, name) for number, name in enumerate(text)]


def names(found: Any) -> str:
    return "".join(each.owner.name for each in found)


@pytest.mark.parametrize(
    ("waiting", "running", "expected"),
    [
        ("", "", ""),
        ("aaa", "aaaa", "aaa"),
        ("aaab", "", "abaa"),
        ("aaab", "a", "baaa"),
        ("aaaabbc", "", "abcabaa"),
        ("aabb", "aaab", "bbaa"),
        ("ab", "ab", "ab"),
    ],
)
def test_the_client_with_the_least_comes_first(waiting: str, running: str, expected: str) -> None:
    found = list(fair_order(requests(waiting), requests(running, 100)))
    assert names(found) == expected
    for name in set(waiting):  # the order within a client is its own
        own = [each.sequence_number for each in found if each.owner.name == name]
        assert own == sorted(own)


@pytest.mark.parametrize(
    ("waiting", "running", "expected"),
    [
        ("b", "aaa", 102),
        ("b", "aacccc", 105),
        ("b", "a", None),  # its only request
        ("b", "ac", None),
        ("b", "ab", None),
        ("b", "aab", None),
        ("b", "aaab", 102),
        ("a", "aaa", None),
        ("b", "", None),
        ("", "aaa", None),
    ],
)
def test_who_yields_to_a_client_with_fewer_places(waiting: str, running: str, expected: int | None) -> None:
    found = yielding(requests(waiting), requests(running, 100), 64)
    assert (None if found is None else found.sequence_number) == expected


def test_a_request_that_waits_for_a_prefix_lets_no_other_yield() -> None:
    assert yielding([request(9, "b", leader=(None, 4))], requests("aaa"), 64) is None


def test_no_request_yields_to_one_that_needs_more_than_its_share() -> None:
    assert yielding([request(9, "b", num_tokens=32)], requests("aaa"), 64) is not None
    assert yielding([request(9, "b", num_tokens=33)], requests("aaa"), 64) is None


@pytest.mark.parametrize(
    ("waiting", "new", "expected"),
    [("aaa", "a", None), ("aaa", "b", 2), ("aab", "b", None), ("aaab", "b", 2), ("abab", "c", 2), ("ab", "c", None)],
)
def test_who_leaves_a_full_queue(waiting: str, new: str, expected: int | None) -> None:
    found = may_displace(request(99, new), requests(waiting), 0)
    if expected is None:
        assert not found
    else:
        (leaving,) = surplus([*requests(waiting), request(99, new)], 1)
        assert leaving.owner.name == "a"
        assert leaving.sequence_number == max(e.sequence_number for e in requests(waiting) if e.owner.name == "a")


def test_a_new_request_counts_those_that_will_leave() -> None:
    assert may_displace(request(9, "b"), requests("aaaab"), 1)  # three of a will be left
    assert not may_displace(request(9, "b"), requests("aaabb"), 1)
    assert names(surplus(requests("aaaabbc"), 3)) == "aaa"
    assert surplus(requests("ab"), 0) == []


def test_a_request_that_ran_never_leaves_the_queue() -> None:
    before = [request(number, "a", ran=True) for number in range(5)]
    assert not may_displace(request(9, "b"), before, 0)
    assert surplus(before, 3) == []


@pytest.mark.parametrize(("running", "expected"), [("a", 0), ("aaa", 2), ("aaab", 2), ("aabbb", 4), ("abc", 2)])
def test_who_is_preempted(running: str, expected: int) -> None:
    assert next_preempted(requests(running)).sequence_number == expected


def test_prompts_take_turns_chunk_by_chunk() -> None:
    turns, extending = PrefillTurns(), requests("aaab")
    order = []
    for _ in range(6):
        chosen: Any = turns.in_order(extending)[0]
        turns.count([SimpleNamespace(request=chosen)])  # type: ignore[list-item]
        order.append(chosen.sequence_number)
    assert order == [0, 3, 0, 3, 0, 3]
    assert [each.sequence_number for each in turns.in_order(extending[1:3])] == [1, 2]


class TestEngine:
    def test_a_client_gets_its_share_of_a_full_batch(self, tiny: str) -> None:
        engine = build(tiny, mtp=0, max_running_requests=4)
        for number in range(16):
            add(engine, f"greedy {number}", "greedy", max_tokens=3)
        engine.step()
        for number in range(4):
            add(engine, f"good {number}", "good", max_tokens=3)
        ends = run(engine)
        assert ends[:12].count("good") == 4  # without turns they would be the last
        assert Counter(ends) == {"greedy": 16, "good": 4}

    def test_a_client_without_a_place_gets_one_at_once(self, tiny: str) -> None:
        engine = build(tiny, mtp=0, max_running_requests=3)
        greedy = [f"greedy {number}" for number in range(6)]
        for name in greedy:
            add(engine, name, "greedy", max_tokens=40)
        deltas = engine.step()
        add(engine, "good", "good", max_tokens=2)
        deltas += [delta for _ in range(4) for delta in engine.step()]
        assert "good" in {delta.request_id for delta in deltas if delta.finish_reason is not None}
        assert engine.stats().num_preemptions == 1
        texts: dict[str, list[int]] = {}
        while engine.has_unfinished_requests:
            deltas += engine.step()
        for delta in deltas:
            texts.setdefault(delta.request_id, []).extend(delta.token_ids)
        assert all(texts[name] == texts[greedy[0]] and len(texts[name]) == 40 for name in greedy)

    def test_one_client_cannot_keep_the_queue_full(self, tiny: str) -> None:
        engine = build(tiny, mtp=0, max_running_requests=1, max_queued_requests=4)
        add(engine, "greedy", "greedy", max_tokens=2)
        engine.step()
        for number in range(4):
            add(engine, f"greedy {number}", "greedy", max_tokens=2)
        with pytest.raises(QueueFullError):
            add(engine, "greedy too", "greedy", max_tokens=2)
        for number in range(2):
            add(engine, f"good {number}", "good", max_tokens=2)
        with pytest.raises(QueueFullError):
            add(engine, "good too", "good", max_tokens=2)
        deltas = [delta for _ in range(30) for delta in engine.step()]
        displaced = [delta for delta in deltas if delta.finish_reason == "error"]
        assert [(delta.request_id, delta.error_code) for delta in displaced] == [
            ("greedy 3", "queue_full"),
            ("greedy 2", "queue_full"),
        ]
        finished = {delta.request_id for delta in deltas if delta.finish_reason == "length"}
        assert finished == {"greedy", "greedy 0", "greedy 1", "good 0", "good 1"}
        assert not engine.has_unfinished_requests

    def test_a_call_that_is_refused_displaces_no_request(self, tiny: str) -> None:
        engine = build(tiny, mtp=0, max_running_requests=1, max_queued_requests=4)
        for number in range(5):
            add(engine, f"a {number}", "a", max_tokens=2)
            engine.step() if number == 0 else None
        for number in range(2):
            add(engine, f"b {number}", "b", max_tokens=2)
        with pytest.raises(QueueFullError):
            add(engine, "b 2", "b", max_tokens=2)
        for number in range(2):  # as the engine thread does when a call is not taken whole
            engine.abort(f"b {number}")
        assert Counter(run(engine)) == {"a": 5}

    def test_one_long_prompt_does_not_empty_the_batch(self, tiny: str) -> None:
        engine = build(tiny, mtp=0, max_running_requests=8, max_total_tokens=150)
        for number in range(12):
            add(engine, f"a {number}", "a", max_tokens=8)
        engine.step()
        params = change(GREEDY, max_tokens=2)
        engine.add_request("b", [1] * 100, params, owner=Owner("b"))
        engine.step()
        assert engine.stats().num_running >= 4
        assert engine.stats().num_preemptions == 0
        assert Counter(run(engine)) == {"a": 12, "b": 1}

    @pytest.mark.parametrize(
        ("num_left", "num_tokens", "is_admitted"),
        [
            (20, 100, True),  # what runs may write 20 more, and not 64
            (120, 60, True),  # 64 are left to it, and not 120
            (120, 100, False),
        ],
    )
    def test_admission_leaves_room_to_what_runs(
        self, num_left: int, num_tokens: int, is_admitted: bool, tiny: str
    ) -> None:
        engine = build(tiny, mtp=0, max_running_requests=4, max_total_tokens=160)
        add(engine, "first", "a", max_tokens=num_left)
        engine.step()
        params = change(GREEDY, max_tokens=2, stop=(), stop_token_ids=(), ignore_eos=True)
        engine.add_request("second", [1 + number % 7 for number in range(num_tokens)], params, owner=Owner("a"))
        engine.step()
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting) == ((2, 0) if is_admitted else (1, 1))
        assert sorted(run(engine)) == ["first", "second"]  # it waits, and is not refused
        assert engine.stats().num_preemptions == 0

    def test_nothing_yields_without_a_prefix_cache(self, tiny: str) -> None:
        engine = build(tiny, mtp=0, max_running_requests=2, disable_radix_cache=True)
        for number in range(2):
            add(engine, f"a {number}", "a", max_tokens=8)
        engine.step()
        add(engine, "b", "b", max_tokens=2)
        assert Counter(run(engine)) == {"a": 2, "b": 1}
        assert engine.stats().num_preemptions == 0

    def test_tenants_share_no_prefix_and_no_work(self, tiny: str) -> None:
        engine = build(tiny, mtp=0, max_running_requests=4)
        prompt = [number % 7 + 1 for number in range(60)]
        cached: dict[str, int] = {}
        for number, tenant in enumerate(("a", "b", "a", "b", None)):
            engine.add_request(str(number), prompt, change(GREEDY, max_tokens=1), owner=Owner(tenant, tenant))
        while engine.has_unfinished_requests:
            for delta in engine.step():
                cached[delta.request_id] = delta.num_cached_tokens
        assert [bool(cached[str(number)]) for number in range(5)] == [False, False, True, True, False]
        own = engine.stats_of("a")
        assert own.requests.query_tokens == 2 * 59
        assert own.requests.misses["salt"] == 0
        assert own.spec.num_verify_steps == 2
        assert engine.stats().spec.num_verify_steps == 5


def add(engine: Engine, request_id: str, name: str, max_tokens: int) -> None:
    params = change(GREEDY, max_tokens=max_tokens, stop=(), stop_token_ids=(), ignore_eos=True)
    engine.add_request(request_id, [1, 2, 3], params, owner=Owner(name))


def run(engine: Engine) -> list[str]:
    """The clients of the requests in the order in which these end."""
    ends = []
    while engine.has_unfinished_requests:
        ends += [delta.request_id.split()[0] for delta in engine.step() if delta.finish_reason is not None]
    return ends
