"""The specification of suffix automata and of their drafts, in plain Python. See README.md."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from specmamba.kernels.suffix_automaton.operands import (
    LEAST_REST,
    MAX_EDGES,
    MAX_LEVELS,
    ROOT,
    DraftRule,
    Node,
    Tokens,
)

NO_STATE = NO_TOKEN = -1
STATE_BYTES, EDGE_BYTES = 24, 24  # of the native form

Match = tuple[int, int]  # a state, and the tokens of the context that it stands for
Pending = tuple[float, int, Node, list[Match]]  # minus the path's probability, number, node, matches of its parent


class Level(NamedTuple):
    """A context that has continuations."""

    rank: tuple[int, int]  # the highest counts first
    length: int  # tokens
    automaton: SuffixAutomaton
    state: int


class SuffixAutomaton:
    """The substrings of some texts, up to ``max_match`` tokens, with the numbers of their occurrences.

    A *place* is the state that a text has reached. Any number of texts may grow in turns. Not thread-safe.
    """

    def __init__(self, max_match: int) -> None:
        self.max_match = max_match
        self._length, self._link = [0], [NO_STATE]
        self._count, self._newest = [0], [NO_TOKEN]
        self._next: list[dict[int, int]] = [{}]  # in order of their first occurrence

    @property
    def num_bytes(self) -> int:
        """Memory that the native form needs at least for as much."""
        return STATE_BYTES * len(self._length) + EDGE_BYTES * sum(map(len, self._next))

    def extend(self, place: int, tokens: Tokens) -> int:
        """Add tokens to a text; returns its new place.

        Args:
            place: of the text so far; ROOT for a new one.
            tokens: [n] int32, not negative.
        """
        for token in tokens.tolist():
            place = self._shortened(place)
            for state in self._contexts(place):
                self._newest[state] = token
            place = self._step(place, token)  # not shortened: the edge to a longer state needs its count
            for state in self._contexts(place):
                self._count[state] += 1
        return self._shortened(place)

    def match(self, tokens: Sequence[int]) -> Match:
        """Find the longest end of a text that is known."""
        match = ROOT, 0
        for token in tokens[-self.max_match :]:
            match = self.follow(match, token)
        return match

    def follow(self, match: Match, token: int) -> Match:
        """Return the match after one more token."""
        state, length = match
        while state != ROOT and token not in self._next[state]:
            state = self._link[state]
            length = self._length[state]
        if token not in self._next[state]:
            return ROOT, 0
        return self._shortened(self._next[state][token]), min(length + 1, self.max_match)

    def levels(self, match: Match, min_match: int) -> Iterator[Match]:
        """Yield the longest contexts of a match that have continuations, at most ``MAX_LEVELS``."""
        (state, length), number = match, 0
        while state != ROOT and length >= min_match and number < MAX_LEVELS:
            if self._next[state]:
                yield state, length
                number += 1
            state = self._link[state]
            length = self._length[state]

    def continuations(self, state: int) -> tuple[list[tuple[int, int]], int]:
        """Return tokens and their numbers after a context, in order of first occurrence, and the newest token."""
        first = islice(self._next[state].items(), MAX_EDGES)
        return [(token, self._count[after]) for token, after in first], self._newest[state]

    def _contexts(self, state: int) -> Iterator[int]:
        while state != ROOT:
            yield state
            state = self._link[state]

    def _shortened(self, state: int) -> int:
        """Return the state of the end of ``max_match`` tokens, or of the whole string where it has fewer."""
        while state != ROOT and self._length[self._link[state]] >= self.max_match:
            state = self._link[state]
        return state

    def _step(self, place: int, token: int) -> int:
        after = self._next[place].get(token)
        if after is not None:
            is_whole = self._length[after] == self._length[place] + 1 or self._length[place] >= self.max_match
            return after if is_whole else self._split(place, token, after)
        new = self._add(self._length[place] + 1, ROOT, 0, NO_TOKEN, {})
        state = place
        while state != NO_STATE and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state != NO_STATE:
            after = self._next[state][token]
            is_whole = self._length[after] == self._length[state] + 1
            self._link[new] = after if is_whole else self._split(state, token, after)
        return new

    def _split(self, state: int, token: int, after: int) -> int:
        """Give the shorter strings of a state, up to those of ``state`` and ``token``, a state of their own."""
        length, following = self._length[state] + 1, dict(self._next[after])
        shorter = self._add(length, self._link[after], self._count[after], self._newest[after], following)
        while state != NO_STATE and self._next[state].get(token) == after:
            self._next[state][token] = shorter
            state = self._link[state]
        self._link[after] = shorter
        return shorter

    def _add(self, length: int, link: int, count: int, newest: int, following: dict[int, int]) -> int:
        self._length.append(length)
        self._link.append(link)
        self._count.append(count)
        self._newest.append(newest)
        self._next.append(following)
        return len(self._length) - 1


def draft(automata: Sequence[SuffixAutomaton], text: Tokens, rule: DraftRule) -> list[Node]:
    """Return the likeliest nodes after a text, the best first. A parent comes before its children.

    Of equal paths the one that was found first comes first.
    """
    last = text[-rule.max_match :].tolist()
    matches = [automaton.match(last) for automaton in automata]
    longest = max((level.length for level in _levels(automata, matches, rule)), default=0)
    deepest = min(rule.max_depth, max(1, int(rule.factor * longest)))
    nodes: list[Node] = []
    pending: list[Pending] = []
    width = [0] * (deepest + 1)
    number = _push(pending, 0, automata, matches, (0, 1, 1.0), rule)
    while pending and len(nodes) < rule.max_nodes:
        path, _, node, before = heapq.heappop(pending)
        if width[node.depth] == rule.max_width:
            continue
        width[node.depth] += 1
        nodes.append(node)
        if node.depth < deepest:
            after = [a.follow(match, node.token) for a, match in zip(automata, before, strict=True)]
            number = _push(pending, number, automata, after, (len(nodes), node.depth + 1, -path), rule)
    return nodes


def _push(
    pending: list[Pending],
    number: int,
    automata: Sequence[SuffixAutomaton],
    matches: list[Match],
    parent: tuple[int, int, float],
    rule: DraftRule,
) -> int:
    """Add the children of a node; returns the number of the next one.

    ``parent``: its number, the depth of its children, and the probability of its path.
    """
    place, depth, path = parent
    for token, probability in _best_tokens(_levels(automata, matches, rule), rule):
        if path * probability >= rule.min_probability:
            node = Node(token, place, depth, probability)
            heapq.heappush(pending, (-(path * probability), number, node, matches))
            number += 1
    return number


def _levels(automata: Sequence[SuffixAutomaton], matches: Sequence[Match], rule: DraftRule) -> list[Level]:
    """Return all contexts, those that come first in front."""
    found = [
        Level((length - rule.handicap * (i > 0), -i), length, automaton, state)
        for i, (automaton, match) in enumerate(zip(automata, matches, strict=True))
        for state, length in automaton.levels(match, rule.min_match)
    ]
    return sorted(found, key=lambda level: level.rank, reverse=True)


def _best_tokens(levels: Sequence[Level], rule: DraftRule) -> list[tuple[int, float]]:
    """Return the likeliest tokens after these contexts, and their probabilities, the likeliest first."""
    rest, mass = 1.0, dict[int, float]()
    for level in levels:
        known, newest = level.automaton.continuations(level.state)
        doubt = float(rule.doubts[level.length])
        total = sum(count for _, count in known) + rule.newest + doubt
        for token, count in known:
            number = count + rule.newest if token == newest else count
            if number > 0:
                mass[token] = mass.get(token, 0.0) + rest * (number / total)
        rest *= doubt / total
        if rest < LEAST_REST:
            break
    return sorted(mass.items(), key=lambda item: -item[1])[: rule.max_children]
