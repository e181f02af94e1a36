"""The end of a text and what a client gets of it, against the simplest way: one token at a time, with whole texts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specmamba.core import FinishReason
from specmamba.engine.request import TextStream
from specmamba.models.text.tokenizer import Detokenizer

LATE = "~"  # a piece that ends in it holds its last character back until the next token, as half a character is


class FakeDetokenizer:
    """Token i is ``pieces[i]``; a ``~`` at the end shows only with the next token, or at the very end as ``?``."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = pieces
        self._waits = False
        self.pushed: list[int] = []

    def push(self, token: int) -> str:
        self.pushed.append(token)
        piece = self._pieces[token]
        text = (LATE if self._waits else "") + piece.removesuffix(LATE)
        self._waits = piece.endswith(LATE)
        return text

    def push_all(self, tokens: Sequence[int]) -> str:
        return "".join([self.push(token) for token in tokens])

    def flush(self) -> str:
        text = "?" if self._waits else ""
        self._waits = False
        return text


def naive(
    pieces: Sequence[str], tokens: Sequence[int], stops: Sequence[str], stop_ids: set[int], max_tokens: int
) -> tuple[int, str, FinishReason | None]:
    """Return tokens used, whole text and reason, by searching the whole text again after every token."""
    detokenizer, text = FakeDetokenizer(pieces), ""
    for count, token in enumerate(tokens, 1):
        if token in stop_ids:
            return count, cut(text + detokenizer.flush(), stops)[0], "stop"
        text, stopped = cut(text + detokenizer.push(token), stops)
        if stopped:
            return count, text, "stop"
        if count == max_tokens:
            text, stopped = cut(text + detokenizer.flush(), stops)
            return count, text, "stop" if stopped else "length"
    return len(tokens), text, None


def cut(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    found = [text.find(stop) for stop in stops if stop in text]
    return (text[: min(found)], True) if found else (text, False)


def stream(
    pieces: Sequence[str], stops: Sequence[str] = (), stop_ids: Sequence[int] = (), limit: int = 99
) -> TextStream:
    return TextStream(cast(Detokenizer, FakeDetokenizer(pieces)), stops, set(stop_ids), limit)


def run(text: TextStream, steps: Sequence[Sequence[int]]) -> tuple[int, list[str], FinishReason | None]:
    """Push until the text ends. Tokens used, the texts of the steps, the reason."""
    used, texts = 0, []
    for step in steps:
        count, ready, reason = text.push(step)
        used += count
        texts.append(ready)
        if reason is not None:
            return used, texts, reason
        assert count == len(step)
    return used, texts, None


PIECES = ["a", "b", "ab", "", "ba", "aab", "c", "a~", "~", "b~", "abcab", "é", "\n"]
steps_of_tokens = st.lists(st.lists(st.integers(0, len(PIECES) - 1), max_size=5), max_size=12)
stop_strings = st.lists(st.text("abc~?é\n", min_size=1, max_size=4), max_size=4)


@settings(max_examples=500)
@given(steps_of_tokens, stop_strings, st.sets(st.integers(0, len(PIECES) - 1), max_size=2), st.integers(1, 30))
@example([[0, 1], [0]], ["ba"], set(), 99)
@example([[7], [3]], ["?"], set(), 2)
@example([[7]], ["a?"], set(), 1)
@example([[7, 12]], ["?"], {12}, 99)
@example([[0], [0], [1]], ["aab", "ab"], set(), 99)
def test_the_text_is_that_of_one_token_at_a_time(
    steps: list[list[int]], stops: list[str], stop_ids: set[int], max_tokens: int
) -> None:
    tokens = [token for step in steps for token in step]
    expected_used, expected_text, expected_reason = naive(PIECES, tokens, stops, stop_ids, max_tokens)
    used, texts, reason = run(stream(PIECES, stops, tuple(stop_ids), max_tokens), steps)
    assert (used, reason) == (expected_used, expected_reason)
    text = "".join(texts)
    if reason is not None:
        assert text == expected_text
    else:  # what is held back may begin a stop string, and nothing else
        assert expected_text.startswith(text)
        held = expected_text[len(text) :]
        assert not held or any(stop.startswith(held) for stop in stops)


@settings(max_examples=300)
@given(steps_of_tokens, stop_strings, st.integers(1, 30), st.randoms(use_true_random=False))
def test_the_way_tokens_are_split_into_steps_does_not_matter(
    steps: list[list[int]], stops: list[str], max_tokens: int, rng: random.Random
) -> None:
    tokens = [token for step in steps for token in step]
    one_by_one = run(stream(PIECES, stops, limit=max_tokens), [[token] for token in tokens])
    cuts = sorted(rng.randint(0, len(tokens)) for _ in range(3))
    split = [tokens[a:b] for a, b in zip([0, *cuts], [*cuts, len(tokens)], strict=True)]
    other = run(stream(PIECES, stops, limit=max_tokens), split)
    assert (one_by_one[0], "".join(one_by_one[1]), one_by_one[2]) == (other[0], "".join(other[1]), other[2])


@given(st.lists(st.integers(0, len(PIECES) - 1), max_size=20), stop_strings)
def test_text_that_was_sent_is_never_taken_back(tokens: list[int], stops: list[str]) -> None:
    """After every step: nothing sent belongs to a stop string, whatever may follow."""
    text, sent = stream(PIECES, stops), ""
    for token in tokens:
        _, ready, reason = text.push([token])
        sent += ready
        assert not any(stop in sent for stop in stops)
        if reason is not None:
            return


class TestEnds:
    def test_a_stop_string_across_tokens_and_steps(self) -> None:
        pieces = ["one ST", "O", "P two"]
        assert run(stream(pieces, ["STOP"]), [[0], [1, 2]]) == (3, ["one ", ""], "stop")
        assert run(stream(pieces, ["STOP"]), [[0, 1], [2]]) == (3, ["one ", ""], "stop")
        assert run(stream(pieces, ["STOP"]), [[0, 1, 2]]) == (3, ["one "], "stop")

    def test_tokens_behind_the_end_do_not_count(self) -> None:
        assert run(stream(["x", "END", "y"], ["END"]), [[0, 1, 2, 2]]) == (2, ["x"], "stop")
        assert run(stream(["x", "y"], stop_ids=[1]), [[0, 1, 0, 0]]) == (2, ["x"], "stop")
        assert run(stream(["x"], limit=3), [[0, 0], [0, 0]]) == (3, ["xx", "x"], "length")

    def test_the_earliest_of_several(self) -> None:
        assert run(stream(["abcdef"], ["ef", "cd", "de"]), [[0]]) == (1, ["ab"], "stop")
        assert run(stream(["abcdef"], ["bcd", "cd", "b"]), [[0]]) == (1, ["a"], "stop")

    def test_the_one_that_is_complete_first(self) -> None:
        """Token by token "bc" is met before "abcd" is."""
        assert run(stream(["a", "b", "c", "d"], ["abcd", "bc"]), [[0, 1, 2, 3]]) == (3, ["a"], "stop")

    def test_at_the_very_beginning(self) -> None:
        assert run(stream(["STOP"], ["STOP"]), [[0]]) == (1, [""], "stop")

    def test_together_with_the_last_token_allowed(self) -> None:
        assert run(stream(["a", "b"], ["ab"], limit=2), [[0, 1]]) == (2, [""], "stop")
        assert run(stream(["a", "b"], stop_ids=[1], limit=2), [[0, 1]]) == (2, ["a"], "stop")

    def test_half_a_stop_string_is_released_at_the_end(self) -> None:
        assert run(stream(["x", "ab"], ["abc"], limit=2), [[0], [1]]) == (2, ["x", "ab"], "length")
        assert run(stream(["x", "ab", "!"], ["abc"], stop_ids=[2]), [[0], [1], [2]]) == (3, ["x", "", "ab"], "stop")

    def test_half_a_stop_string_is_released_when_it_goes_on_otherwise(self) -> None:
        assert run(stream(["ab", "x"], ["abc"]), [[0], [1]]) == (2, ["", "abx"], None)
        assert run(stream(["aa"], ["aab"]), [[0], [0], [0]]) == (3, ["", "aa", "aa"], None)

    def test_half_a_character_shows_at_the_end(self) -> None:
        assert run(stream(["a~"], limit=1), [[0]]) == (1, ["a?"], "length")
        assert run(stream(["a~", "!"], stop_ids=[1]), [[0], [1]]) == (2, ["a", "?"], "stop")

    def test_the_text_of_an_ending_token_is_not_decoded(self) -> None:
        detokenizer = FakeDetokenizer(["a", "<eos>"])
        text = TextStream(cast(Detokenizer, detokenizer), (), {1}, 99)
        assert text.push([0, 1, 0]) == (2, "a", "stop")
        assert detokenizer.pushed == [0]

    @pytest.mark.parametrize("num_tokens", [0, 1, 5])
    def test_nothing_is_held_back_without_stop_strings(self, num_tokens: int) -> None:
        assert run(stream(["ab"]), [[0]] * num_tokens) == (num_tokens, ["ab"] * num_tokens, None)

    def test_only_what_may_still_become_a_stop_string_is_held_back(self) -> None:
        text = stream(["x" * 100 + "ab"], ["abc", "b" * 50])
        assert text.push([0]) == (1, "x" * 100, None)
