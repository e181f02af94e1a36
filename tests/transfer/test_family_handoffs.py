"""Prompts of every family that another server has computed: all recurrences, ways to guess and ways to undo."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.fake_engine import wait_until
from tests.families import FAMILIES
from tests.parallel.even_variants import build_quarters
from tests.parallel.family_ways import ALL, IS_FULL, chosen, flags_of
from tests.parallel.jobs import prompts
from tests.transfer.sides import Text, room_at, side

ROOMS = itertools.count(2**58)
SMALL = {"context_length": 256, "max_total_tokens": 1024}
TEXT, OTHER, MORE = (tuple(text) for text in prompts(60, (70, 50, 20), seed=4))
CASES = ALL if IS_FULL else chosen(2, 2)


@pytest.mark.fast_cases("mamba2-", "qwen3-next-")
@pytest.mark.parametrize(("family", "way", "state"), CASES)
def test_texts_and_drafts_are_those_of_one_server(family: str, way: str, state: str, tmp_path: Path) -> None:
    build_quarters(tmp_path / family, family)
    flags = {"model": str(tmp_path / family), **SMALL, **flags_of(tmp_path, family, way, state)}
    with side("null", **flags) as one:
        expected, of_other = one.run(TEXT), one.run(OTHER)
        longer = TEXT + expected.tokens + MORE
        one.flush()
        of_longer = one.run(longer)
    with side("prefill", **flags) as prefill, side("decode", **flags) as decode:

        def hand_over(text: tuple[int, ...]) -> Text:
            room = next(ROOMS)
            prefill.prefill(text, room)
            return decode.run(text, room_at(prefill, room))

        found, other = hand_over(TEXT), hand_over(OTHER)
        assert (found.tokens, found.spec, found.num_cached) == (expected.tokens, expected.spec, len(TEXT) - 1)
        assert (other.tokens, other.spec, other.num_cached) == (of_other.tokens, of_other.spec, len(OTHER) - 1)
        turn = hand_over(longer)  # of which the decode server has the beginning
        assert (turn.tokens, turn.num_cached) == (of_longer.tokens, len(longer) - 1)
        wait_until(lambda: prefill.stats().num_handoffs == decode.stats().num_handoffs == 3)
        assert not prefill.failures()
        assert not decode.failures()
        prefill.check()
        decode.check()


def test_usual_runs_have_every_family() -> None:
    assert {family for family, _, _ in chosen(2, 2)} == FAMILIES.keys()
