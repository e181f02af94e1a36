"""A text whose prompt another server has computed is that of one server, in float32, with drafts accepted as often.

Whatever goes wrong is a miss with its reason and the same text, and nothing is held afterwards on either side.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from specmamba.cache.tiers.codec import _FIXED
from specmamba.cache.tiers.entry import DIGEST_BYTES, EntryLayout
from specmamba.core import Handoff
from specmamba.engine.handoffs import PrefillSide
from specmamba.transfer import tcp_transport
from specmamba.transfer.peer_link import GREETING, NONCE_BYTES, PROOF_BYTES
from tests.drafts import DRAFTS
from tests.fake_engine import wait_until
from tests.transfer.relays import relay, silent_server
from tests.transfer.sides import Side, Text, room_at, side

Tokens = tuple[int, ...]
ROOMS = itertools.count(2**62)  # as large as those of routers


def alone(drafts: str, *texts: Tokens) -> list[Text]:
    """What one server answers, from nothing."""
    found = []
    with side("null", drafts) as one:
        for text in texts:
            found.append(one.run(text))
            one.flush()
    return found


@pytest.mark.fast_cases("chain", "ngram", "plain")
@pytest.mark.parametrize("drafts", sorted(DRAFTS))
def test_texts_and_drafts_are_those_of_one_server(drafts: str, texts: list[Tokens]) -> None:
    text, other = texts[:2]
    expected, of_other = alone(drafts, text, other)
    longer = text + expected.tokens + other[:40]  # whose beginning the decode server will have
    (of_longer,) = alone(drafts, longer)
    with side("prefill", drafts) as prefill, side("decode", drafts, page_size=4) as decode:
        room, early, late = (next(ROOMS) for _ in range(3))
        assert prefill.prefill(text, room).tokens == ()
        found = decode.run(text, room_at(prefill, room))
        assert (found.tokens, found.spec, found.num_cached) == (expected.tokens, expected.spec, len(text) - 1)
        before = decode.stats()
        assert before.num_handoffs == 1

        waits = decode.start(other, room_at(prefill, early))  # before the prefill server has got its request
        wait_until(lambda: decode.stats().num_open == 1)
        prefill.prefill(other, early)
        assert waits.wait() == Text(of_other.tokens, of_other.spec, len(other) - 1, "length")

        prefill.prefill(longer, late)
        turn = decode.run(longer, room_at(prefill, late))
        assert turn.num_cached == len(longer) - 1
        layout = layout_of(decode)
        lacking = len(longer) - len(text) - len(found.tokens)
        assert decode.stats().num_bytes - 2 * before.num_bytes == layout.entry_bytes(lacking)
        assert turn.tokens == of_longer.tokens
        wait_until(lambda: prefill.stats().num_handoffs == 3)
        assert prefill.stats().num_bytes == decode.stats().num_bytes
        assert not prefill.failures()
        assert not decode.failures()
        prefill.check()
        decode.check()


@pytest.fixture(scope="module")
def prefill() -> Iterator[Side]:
    with side("prefill", "chain") as own:
        yield own


@pytest.fixture(scope="module")
def decode() -> Iterator[Side]:
    with side("decode", "chain") as own:
        yield own


@pytest.fixture(scope="module")
def expected(texts: list[Tokens]) -> Text:
    return alone("chain", texts[0])[0]


def miss(decode: Side, text: Tokens, handoff: Handoff, expected: Text) -> str:
    """The reason of the only miss of a request, which has the text of one server."""
    decode.flush()
    before = decode.stats()
    found = decode.run(text, handoff)
    assert (found.tokens, found.spec, found.num_cached) == (expected.tokens, expected.spec, 0)
    decode.check()
    after = decode.stats()
    assert after.num_handoffs == before.num_handoffs
    (reason,) = [name for name, count in after.failures.items() if count > before.failures[name]]
    assert sum(after.failures.values()) == sum(before.failures.values()) + 1
    return reason


def layout_of(decode: Side) -> EntryLayout:
    assert decode.engine.cache_manager.tiers is not None
    return decode.engine.cache_manager.tiers.transfer.layout


def rooms_that_ended(prefill: Side) -> Collection[int]:
    assert isinstance(prefill.engine.handoffs, PrefillSide)
    return prefill.engine.handoffs._leases._ended


def parts_of(decode: Side, num_tokens: int) -> dict[str, range]:
    """Where the parts of an answer are in what a prefill server sends."""
    layout = layout_of(decode)
    sizes = {
        "hello": len(GREETING) + NONCE_BYTES + PROOF_BYTES,
        "message": 4 + PROOF_BYTES + len('{"state":"ready"}'),
        "header": _FIXED.size + len(layout.description) + DIGEST_BYTES,
        "kv": num_tokens * layout.token_bytes,
        "state": layout.state_bytes,
        "signature": PROOF_BYTES,
    }
    ends = list(itertools.accumulate(sizes.values()))
    return {name: range(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)}


@pytest.mark.parametrize("part", ["header", "hello", "kv", "message", "signature", "state"])
@pytest.mark.parametrize("kind", ["cut", "damaged"])
def test_what_is_cut_or_changed_on_its_way_is_a_miss(
    kind: str, part: str, prefill: Side, decode: Side, texts: list[Tokens], expected: Text
) -> None:
    room, where = next(ROOMS), parts_of(decode, len(texts[0]) - 1)[part]
    at = where[len(where) // 2]
    prefill.prefill(texts[0], room)
    with relay(prefill.port, *((at, None) if kind == "cut" else (None, where[-1]))) as between:
        reason = miss(decode, texts[0], Handoff(room, "127.0.0.1", between.port), expected)
    assert reason == ("refused" if (part, kind) == ("hello", "damaged") else kind)
    if part == "hello":
        assert prefill.stats().num_open == 1  # it was not asked for: another one may come
        assert decode.run(texts[0], room_at(prefill, room)).tokens == expected.tokens
    prefill.check()


def test_a_server_with_another_key_is_refused(prefill: Side, texts: list[Tokens], expected: Text) -> None:
    room, before = next(ROOMS), prefill.stats()
    prefill.prefill(texts[0], room)
    with side("decode", "chain", disaggregation_key="another-key-of-16-characters") as other:
        assert miss(other, texts[0], room_at(prefill, room), expected) == "refused"
    wait_until(lambda: prefill.stats().failures["refused"] == before.failures["refused"] + 1)
    assert prefill.stats().num_open == 1
    with side("decode", "chain") as own:
        assert own.run(texts[0], room_at(prefill, room)).num_cached == len(texts[0]) - 1
    prefill.check()


def test_a_prompt_is_held_for_a_time_and_then_gone(decode: Side, texts: list[Tokens], expected: Text) -> None:
    with side("prefill", "chain", disaggregation_timeout=0.3) as short:
        room = next(ROOMS)
        short.prefill(texts[0], room)
        short.check()  # though its engine does nothing
        assert miss(decode, texts[0], room_at(short, room), expected) == "expired"
        assert short.failures() == {"expired": 2}  # the lease, and the question for it


def test_servers_that_do_not_answer_are_not_waited_for_longer(texts: list[Tokens], expected: Text) -> None:
    with side("decode", "chain", disaggregation_timeout=0.5) as decode:
        with silent_server() as port:
            began = time.monotonic()
            assert miss(decode, texts[0], Handoff(next(ROOMS), "127.0.0.1", port), expected) == "slow"
            assert 0.5 <= time.monotonic() - began < 20
        assert miss(decode, texts[0], Handoff(next(ROOMS), "127.0.0.1", port), expected) == "unreachable"


def test_a_room_that_stays_empty_is_left(prefill: Side, texts: list[Tokens], expected: Text) -> None:
    room = next(ROOMS)
    with side("decode", "chain", disaggregation_timeout=0.5) as decode:
        assert miss(decode, texts[0], room_at(prefill, room), expected) == "slow"
        wait_until(lambda: room in rooms_that_ended(prefill))
    prefill.prefill(texts[0], room)  # too late: nothing is held for it
    prefill.check()


def test_other_running_requests_do_not_wait(decode: Side, texts: list[Tokens]) -> None:
    with silent_server() as port:
        waits = decode.start(texts[2], Handoff(next(ROOMS), "127.0.0.1", port))
        wait_until(lambda: decode.stats().num_open == 1)
        decode.run(texts[3])
        assert not waits.deltas
        decode.thread.abort([f"r{decode._numbers - 1}"])
        decode.check()


def test_another_model_and_another_text_are_missed(
    prefill: Side, decode: Side, texts: list[Tokens], expected: Text
) -> None:
    with side("prefill", "chain", kv_cache_dtype="int8") as other:
        room = next(ROOMS)
        other.prefill(texts[0], room)
        assert miss(decode, texts[0], room_at(other, room), expected) == "fingerprint"
        other.check()
    for text, more in ((texts[1], {}), (texts[0][:-1], {}), (texts[0], {"extra_key": "salt"})):
        room = next(ROOMS)
        prefill.run(text, Handoff(room), 0, **more)
        assert miss(decode, texts[0], room_at(prefill, room), expected) == "absent"
    prefill.check()


def test_two_decode_servers_at_once(prefill: Side, decode: Side, texts: list[Tokens]) -> None:
    chosen = texts[:4]
    expected = [each.tokens for each in alone("chain", *chosen)]
    decode.flush()
    with side("decode", "chain") as second:
        rooms = [next(ROOMS) for _ in range(8)]
        servers = [decode, second] * 4
        answers = [
            server.start(text, room_at(prefill, room))
            for server, text, room in zip(servers, [text for text in chosen for _ in range(2)], rooms, strict=True)
        ]
        prefills = [
            prefill.start(text, Handoff(room), 0)
            for text, room in zip([text for text in chosen for _ in range(2)], rooms, strict=True)
        ]
        assert all(answer.wait().reason == "length" for answer in prefills)
        found = [answer.wait() for answer in answers]
        assert [each.tokens for each in found] == [tokens for tokens in expected for _ in range(2)]
        assert all(each.num_cached == len(chosen[0]) - 1 for each in found)
        second.check()
    decode.check()
    prefill.check()


def test_a_prompt_that_is_not_needed_is_given_up(prefill: Side, decode: Side, texts: list[Tokens]) -> None:
    room = next(ROOMS)
    prefill.prefill(texts[4], room)
    decode.run(texts[4])
    before = decode.stats()
    assert decode.run(texts[4], room_at(prefill, room)).num_cached == len(texts[4]) - 1
    assert decode.stats().num_handoffs == before.num_handoffs
    prefill.check()


def test_aborted_requests_leave_nothing(
    prefill: Side, decode: Side, texts: list[Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_transport, "BEAT_S", 0.05)
    room = next(ROOMS)
    decode.start(texts[5], room_at(prefill, room))
    wait_until(lambda: decode.stats().num_open == 1)
    decode.thread.abort([f"r{decode._numbers}"])
    decode.check()
    wait_until(lambda: room in rooms_that_ended(prefill))
    prefill.prefill(texts[5], room)
    prefill.check()

    room = next(ROOMS)
    waits = decode.start(texts[5], room_at(prefill, room))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill.engine.scheduler, "admit", list)  # it stays in the queue
        prefill.start(texts[5], Handoff(room), 0)
        prefill.thread.abort([f"r{prefill._numbers}"])
        prefill.thread.call(lambda _: None).result(30)
    assert waits.wait().num_cached == 0
    assert decode.failures()["vanished"] >= 1
    decode.check()


def test_prompts_that_are_held_leave_room_for_others(texts: list[Tokens], expected: Text) -> None:
    """There are never more of them than half of the states, and the oldest goes where a request fits nowhere."""
    with side("prefill", "chain", max_mamba_cache_size=4, max_running_requests=2) as prefill:
        for text in texts[:5]:
            prefill.prefill(text, next(ROOMS))
            assert prefill.stats().num_open <= 2
        assert prefill.run(texts[0]).tokens == expected.tokens
        assert prefill.failures() == {"no_room": 3}
    with side("prefill", "chain", max_total_tokens=200, context_length=160) as prefill:
        prefill.prefill(texts[1], next(ROOMS))
        assert prefill.run(texts[0]).tokens == expected.tokens
        assert prefill.failures() == {"no_room": 1}
        prefill.check()


def test_a_short_prompt_is_computed_where_it_is_needed(prefill: Side, decode: Side, texts: list[Tokens]) -> None:
    short = texts[0][:1], texts[0][:10]
    for text, own in zip(short, alone("chain", *short), strict=True):
        room = next(ROOMS)
        prefill.prefill(text, room)
        assert decode.run(text, room_at(prefill, room)).tokens == own.tokens
    prefill.check()
    decode.check()


def test_a_folder_of_prefixes_may_be_below_both(texts: list[Tokens], expected: Text, tmp_path: Path) -> None:
    folders = [{"hicache_storage_dir": tmp_path / name} for name in ("prefill", "decode")]
    with side("prefill", "chain", **folders[0]) as prefill, side("decode", "chain", **folders[1]) as decode:
        for number in range(2):  # the second time both have it on disk, and nothing is handed over
            room = next(ROOMS)
            prefill.prefill(texts[0], room)
            found = decode.run(texts[0], room_at(prefill, room))
            assert (found.tokens, found.spec, found.num_cached) == (expected.tokens, expected.spec, len(texts[0]) - 1)
            assert decode.stats().num_handoffs == 1
            disk = decode.thread.call(lambda engine: engine.stats()).result(30).disk
            assert disk is not None
            assert disk.hits == number
            for each in (prefill, decode):
                each.check()
                tiers = each.engine.cache_manager.tiers
                assert tiers is not None
                assert tiers.drain()
                each.flush()
