"""Suffix automata: counts against plain counting, trees against the formula, native code against the reference."""

from __future__ import annotations

import random
import resource
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specmamba.kernels.native import library
from specmamba.kernels.suffix_automaton import ROOT, DraftRule, Node, Tokens, native_ops, reference

RULE = DraftRule(max_nodes=8, max_children=4, max_depth=4, max_width=8)
Text = tuple[int, ...]

# texts that grow in turns: which of them, by what
growing = st.integers(1, 4).flatmap(
    lambda letters: st.lists(
        st.tuples(st.integers(0, 2), st.lists(st.integers(0, letters - 1), min_size=1, max_size=8)), max_size=12
    )
)


def array(tokens: Sequence[int]) -> Tokens:
    return np.array(tokens, dtype=np.int32)


def automaton_of(*texts: Sequence[int], max_match: int = 64) -> reference.SuffixAutomaton:
    found = reference.SuffixAutomaton(max_match)
    for text in texts:
        found.extend(ROOT, array(text))
    return found


def substrings(text: Sequence[int], most: int) -> list[Text]:
    return [tuple(text[i : i + n]) for n in range(1, most + 1) for i in range(len(text) + 1 - n)]


class TestAutomaton:
    @given(growing, st.integers(1, 6))
    def test_counts_are_those_of_the_texts(self, turns: list[tuple[int, list[int]]], max_match: int) -> None:
        automaton = reference.SuffixAutomaton(max_match)
        texts: list[list[int]] = [[], [], []]
        places, newest = [ROOT] * 3, dict[Text, int]()
        for number, added in turns:
            text = texts[number]
            for token in added:
                newest.update({tuple(text[-m:]): token for m in range(1, min(max_match, len(text)) + 1)})
                text.append(token)
            places[number] = automaton.extend(places[number], array(added))
        counts = Counter(string for text in texts for string in substrings(text, max_match))
        longer = Counter(string for text in texts for string in substrings(text, max_match + 1))
        for string, count in counts.items():
            state, length = automaton.match(string)
            assert length == len(string)
            assert automaton._count[state] == count
            assert automaton._newest[state] == newest.get(string, reference.NO_TOKEN)
            following, _ = automaton.continuations(state)
            assert dict(following) == {token: longer[*string, token] for token in range(4) if longer[*string, token]}
        for string in (*counts, ()):  # and nothing else is known
            for token in range(5):
                longest = automaton.match((*string, token))[1]
                whole = (*string, token)[-max_match:]
                assert longest == max(n for n in range(len(whole) + 1) if n == 0 or whole[len(whole) - n :] in counts)

    def test_repeated_text_needs_no_memory(self) -> None:
        rng = random.Random(0)
        text = [rng.randrange(20) for _ in range(2000)]
        automaton = automaton_of(text)
        states = len(automaton._length)
        automaton.extend(ROOT, array(text * 3))
        assert len(automaton._length) < states + 2 * 64  # where its end meets its beginning
        assert len(automaton_of([7] * 5000)._length) == 1 + 64 + 1


def named(nodes: Sequence[Node]) -> list[tuple[int, int, int]]:
    return [(node.token, node.parent, node.depth) for node in nodes]


class TestDraft:
    def test_the_formula(self) -> None:
        """After 1 2 the token 3 twice and 4 once, the newest; after 2 alone also 5."""
        text = [1, 2, 3, 1, 2, 3, 9, 2, 5, 1, 2, 4, 1, 2]
        nodes = reference.draft([automaton_of(text)], array(text), replace(RULE, max_depth=1, max_nodes=3))
        deep, flat = float(RULE.doubts[2]), float(RULE.doubts[1])
        assert (deep, flat) == pytest.approx((4 * 0.8**2, 4 * 0.8))
        of_2 = {3: 2 / (4.5 + flat), 4: 1.5 / (4.5 + flat), 5: 1 / (4.5 + flat)}
        own = {3: 2, 4: 1.5, 5: 0}
        expected = {token: (own[token] + deep * of_2[token]) / (3.5 + deep) for token in own}
        assert {node.token: node.probability for node in nodes} == pytest.approx(expected)
        assert [node.token for node in nodes] == [3, 4, 5]

    def test_where_a_text_ends_shorter_contexts_go_on(self) -> None:
        text = [1, 2, 3, 1, 2, 3, 1, 2, 3]
        nodes = reference.draft(
            [automaton_of(text)], array(text), replace(RULE, max_children=1, max_nodes=7, max_depth=7)
        )
        assert named(nodes) == [(1, 0, 1), (2, 1, 2), (3, 2, 3), (1, 3, 4), (2, 4, 5), (3, 5, 6), (1, 6, 7)]

    def test_the_longest_context_decides_and_the_first_automaton_comes_before_others(self) -> None:
        own, other = automaton_of([8, 7, 2, 7]), automaton_of([8, 7, 1])
        rule = replace(RULE, max_depth=1)
        assert [node.token for node in reference.draft([own, other], array([5, 7]), rule)][:2] == [2, 1]
        own, other = automaton_of([7, 2, 3, 4, 5, 6, 7]), automaton_of([3, 4, 5, 6, 7, 1])
        assert [node.token for node in reference.draft([own, other], array([3, 4, 5, 6, 7]), rule)][:2] == [1, 2]

    def test_a_token_behind_the_longest_context_is_counted(self) -> None:
        """Where the context without its first token has been followed by the same token elsewhere."""
        texts = [[2, 1, 9], *[[3, 1, 8]] * 10, [3, 1, 9], [3, 1, 8]]
        automaton = automaton_of(*texts, max_match=2)
        assert min(automaton._count[1:]) == 1
        rule = replace(RULE, max_match=2, max_depth=1)
        nodes = reference.draft([automaton], array([3, 1]), rule)
        deep, flat = float(rule.doubts[2]), float(rule.doubts[1])
        of_1 = {8: 11.5 / (13.5 + flat), 9: 2 / (13.5 + flat)}
        expected = {8: (11.5 + deep * of_1[8]) / (12.5 + deep), 9: (1 + deep * of_1[9]) / (12.5 + deep)}
        assert {node.token: node.probability for node in nodes} == pytest.approx(expected)
        automaton._count = [0] * len(automaton._count)  # nothing that was never seen is drafted
        assert [node.token for node in reference.draft([automaton], array([3, 1]), rule)] == [8]

    def test_the_depth_follows_the_match(self) -> None:
        text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]
        automaton = automaton_of(text)
        for factor, depth in ((0.5, 1), (1.0, 2), (1.5, 3), (9.0, 4)):
            nodes = reference.draft([automaton], array(text), replace(RULE, factor=factor, max_children=1))
            assert max(node.depth for node in nodes) == depth

    def test_limits(self) -> None:
        rng = random.Random(4)
        text = [rng.randrange(4) for _ in range(400)]
        automaton = automaton_of(text)
        nodes = reference.draft([automaton], array(text), replace(RULE, max_nodes=30, max_children=2, max_width=3))
        assert max(Counter(node.parent for node in nodes).values()) == 2
        assert max(Counter(node.depth for node in nodes).values()) == 3
        likely = reference.draft([automaton], array(text), replace(RULE, max_nodes=30, min_probability=0.1))
        whole = [1.0]
        for node in likely:
            whole.append(whole[node.parent] * node.probability)
        assert whole[1:] == sorted(whole[1:], reverse=True)
        assert min(whole) >= 0.1
        assert reference.draft([automaton_of([1, 2])], array([3]), RULE) == []
        assert reference.draft([], array([3]), RULE) == []


@pytest.mark.skipif(native_ops.code() is None, reason="no native code here")
def test_native_code_makes_the_same_states_and_trees() -> None:
    rng, num_nodes = random.Random(1), 0
    for _ in range(120):
        max_match, letters = rng.choice([2, 3, 8, 64]), rng.choice([1, 2, 3, 8])
        shape = rng.choice([1, 3, 20]), rng.choice([1, 2, 4]), rng.choice([1, 3, 8]), rng.choice([1, 3, 99])
        factor, least = rng.choice([0.5, 1.0, 4.0]), rng.choice([0.0, 0.05])
        rule = DraftRule(*shape, max_match=max_match, factor=factor, min_probability=least)
        forms = [[form.SuffixAutomaton(max_match) for _ in range(2)] for form in (reference, native_ops)]
        texts: list[list[int]] = [[], [], []]
        places = [[ROOT] * 3, [ROOT] * 3]
        for _ in range(25):
            number = rng.randrange(3)
            added = [rng.randrange(letters) for _ in range(rng.randrange(1, 9))]
            texts[number] += added
            text = array(texts[number])
            for automata, of_form in zip(forms, places, strict=True):
                of_form[number] = automata[number % 2].extend(of_form[number], array(added))
            assert places[0] == places[1]
            nodes = reference.draft(forms[0], text, rule)
            assert native_ops.draft(forms[1], text, rule) == nodes
            num_nodes += len(nodes)
    assert num_nodes > 5000


@pytest.mark.skipif(native_ops.code() is None or sys.platform != "linux", reason="no native code or /proc here")
def test_memory_that_runs_out_is_an_error() -> None:
    automaton, before = native_ops.SuffixAutomaton(64), resource.getrlimit(resource.RLIMIT_AS)
    tokens = np.arange(1 << 23, dtype=np.int32)  # one state and one edge each
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (64 << 20), before[1]))
    try:
        with pytest.raises(MemoryError, match="a suffix automaton"):
            automaton.extend(ROOT, tokens)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    place = automaton.extend(ROOT, array([3, 4, 5, 3]))  # it can still be used
    assert automaton.extend(place, array([4])) > place
    assert native_ops.draft([automaton], array([3]), RULE)[0].token == 4
    too_many = 1 << 36
    assert library.required(native_ops.code()).suffix_draft(None, too_many, None, 0, None, *[None] * 4) == -1


@pytest.mark.skipif(native_ops.code() is None, reason="no native code here")
def test_native_code_refuses_what_it_cannot_read() -> None:
    automaton = native_ops.SuffixAutomaton(64)
    with pytest.raises(ValueError, match="a text is int32"):
        automaton.extend(ROOT, np.zeros(4, np.int64))
    with pytest.raises(ValueError, match="a text is int32"):
        native_ops.draft([automaton], array([1, 2, 3, 4])[::2], RULE)
    with pytest.raises(ValueError, match="the rule's max_match"):
        native_ops.draft([automaton], array([1]), replace(RULE, max_match=8))
