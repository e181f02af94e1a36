"""Handoffs of a machine that has no thread or no memory left: each is a miss, and the next one is none."""

from __future__ import annotations

import itertools
import threading

import pytest

from specmamba.cache.tiers.entry import EntryLayout
from tests.fake_engine import wait_until
from tests.transfer.sides import Text, room_at, side

ROOMS = itertools.count(2**59)
Tokens = tuple[int, ...]


@pytest.fixture(scope="module")
def expected(texts: list[Tokens]) -> Text:
    with side("null", "chain") as one:
        return one.run(texts[0])


def refuse_threads(patch: pytest.MonkeyPatch, name: str) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    patch.setattr(threading.Thread, "start", refuse)


def refuse_memory(patch: pytest.MonkeyPatch, _: str) -> None:
    def refuse(layout: EntryLayout, num_tokens: int) -> None:
        raise MemoryError

    patch.setattr(EntryLayout, "new_buffers", refuse)


CASES = {"no memory": ("", "no_room"), "specmamba-handoff": ("refused", "cut"), "specmamba-pull": ("", "no_room")}


@pytest.mark.parametrize("what", sorted(CASES))
def test_the_next_handoff_is_none_the_worse(
    what: str, texts: list[Tokens], expected: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    with side("prefill", "chain") as prefill, side("decode", "chain") as decode:
        room = next(ROOMS)
        prefill.prefill(texts[0], room)
        with monkeypatch.context() as patch:
            (refuse_memory if what == "no memory" else refuse_threads)(patch, what)
            found = decode.run(texts[0], room_at(prefill, room))
        assert (found.tokens, found.spec, found.num_cached) == (expected.tokens, expected.spec, 0)
        assert set(decode.failures()) <= set(CASES[what]), decode.failures()
        assert sum(decode.failures().values()) == 1
        if what == "no memory":
            prefill.check()  # though it was not sent
        decode.check()
        decode.flush()
        room = next(ROOMS)
        prefill.prefill(texts[0], room)
        found = decode.run(texts[0], room_at(prefill, room))
        assert (found.tokens, found.num_cached) == (expected.tokens, len(texts[0]) - 1)
        wait_until(lambda: prefill.stats().num_handoffs == 1)
