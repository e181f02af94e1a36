"""Checks of a grammar before a request may use it: of its rules, and of its cost by random walks.

The rules show repetitions that are too long, left recursion, and grammars without any text. Random walks through the
compiled grammar find masks that take too long, so that such a grammar is refused before it runs. They do not find all:
what they miss ends its requests later (``matcher.Effort``).
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmamba.errors import RequestError
from specmamba.grammar.matcher import scale_of

# As of strings and arrays in schemas. With far larger repetitions xgrammar's masks and its matcher disagree.
MAX_REPEAT = 4096
NUM_WALKS, MAX_STEPS = 3, 200
MAX_WALK_SECONDS = 0.5  # of all walks; those of most grammars take a hundredth
SLOW_STEP_SECONDS = 0.03  # of one step of a walk; with a large vocabulary more
MAX_SLOW_STEPS, FAR_TOO_SLOW = 2, 5.0  # of all walks: a busy machine can make one step slow, by less than that factor
GROWTH, STEPS_AHEAD = 3.0, 5  # cost of the last steps of a walk relative to the first; walks in the longest answer
_TEXT, _CLASS, _CLASS_STAR, _EMPTY, _RULE, _SEQUENCE, _CHOICES, _REPEAT = 0, 1, 2, 3, 4, 5, 6, 8
_OWN_NAME = re.compile(r"^[^\S\n]*([A-Za-z_][\w.-]*)[^\S\n]*::=", re.MULTILINE)

Expression = tuple[int, list[int]]  # one of the kinds above, and its parts


class RuleGraph:
    """The rules of a grammar as parsed by xgrammar."""

    def __init__(self, grammar: Any) -> None:
        data = json.loads(grammar.serialize_json())
        numbers = data["grammar_expr_data"]
        self._expressions: list[Expression] = [
            (numbers[start], numbers[start + 2 : start + 2 + numbers[start + 1]])
            for start in data["grammar_expr_indptr"]
        ]
        self._names: list[str] = [rule[0] for rule in data["rules"]]
        self._bodies: list[int] = [rule[1] for rule in data["rules"]]
        self._root: int = data["root_rule_id"]

    def check(self) -> None:
        """Raise RequestError for a grammar that matches no text, or has a repetition that is too long."""
        for kind, parts in self._expressions:
            if kind == _REPEAT and max(parts[1:3]) > MAX_REPEAT:
                raise RequestError(
                    f"something is repeated {max(parts[1:3])} times: {MAX_REPEAT} are allowed", "grammar"
                )
        if self._root not in self._closure(self._can_end):
            raise RequestError("no text belongs to the grammar: its root never comes to an end", "grammar")

    def check_left_recursion(self, text: str) -> None:
        """Raise RequestError where a rule that ``text`` defines can begin with itself."""
        own = set(_OWN_NAME.findall(text))
        nullable = self._closure(self._can_be_empty)
        graph = {rule: set(self._first(body, nullable)) for rule, body in enumerate(self._bodies)}
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            names = [self._names[rule] for rule in error.args[1] if self._names[rule] in own]
            if names:
                reason = "write what is repeated in front of it, or use * and +"
                raise RequestError(f"the rule {names[0]!r} can begin with itself: {reason}", "grammar") from None

    def _closure(self, has: Callable[[int, set[int]], bool]) -> set[int]:
        """The rules with a property that depends on which other rules have it: the smallest fixed point of ``has``."""
        found: set[int] = set()
        left = list(range(len(self._bodies)))
        size = -1
        while len(found) > size:
            size = len(found)
            for rule in reversed(left):  # rules mostly refer to later ones
                if has(self._bodies[rule], found):
                    found.add(rule)
            left = [rule for rule in left if rule not in found]
        return found

    def _can_be_empty(self, index: int, nullable: set[int]) -> bool:
        kind, parts = self._expressions[index]
        if kind == _REPEAT:
            return parts[1] == 0 or parts[0] in nullable
        if kind == _TEXT:
            return not parts
        return kind in (_CLASS_STAR, _EMPTY) or (
            kind != _CLASS and self._has(kind, parts, nullable, self._can_be_empty)
        )

    def _can_end(self, index: int, ending: set[int]) -> bool:
        kind, parts = self._expressions[index]
        if kind == _REPEAT:
            return parts[1] == 0 or parts[0] in ending
        return kind not in (_RULE, _SEQUENCE, _CHOICES) or self._has(kind, parts, ending, self._can_end)

    def _has(self, kind: int, parts: list[int], rules: set[int], has: Callable[[int, set[int]], bool]) -> bool:
        if kind == _RULE:
            return parts[0] in rules
        results: Iterable[bool] = (has(part, rules) for part in parts)
        return any(results) if kind == _CHOICES else kind == _SEQUENCE and all(results)

    def _first(self, index: int, nullable: set[int]) -> Iterator[int]:
        """The rules with which a text of an expression can begin."""
        kind, parts = self._expressions[index]
        if kind in (_RULE, _REPEAT):
            yield parts[0]
        elif kind in (_SEQUENCE, _CHOICES):
            for part in parts:
                yield from self._first(part, nullable)
                if kind == _SEQUENCE and not self._can_be_empty(part, nullable):
                    return


def check_by_trial(compiled: Any, vocab_size: int) -> None:
    """Measure some seeded random walks through a grammar.

    Raises:
        RequestError: no token may come first; the masks disagree with the matcher; or (caused by TimeoutError) two
            steps take too long, one takes far too long or the rest of the time of all walks, or a step would take
            too long in a longer text.
    """
    slow = SLOW_STEP_SECONDS * scale_of(vocab_size)
    end = time.thread_time() + MAX_WALK_SECONDS
    num_slow, is_over = 0, False
    for seed in range(NUM_WALKS):
        costs: list[float] = []
        for cost in _steps(compiled, vocab_size, random.Random(seed)):
            costs.append(cost)
            num_slow += cost > slow
            is_over = time.thread_time() > end
            if num_slow == MAX_SLOW_STEPS or cost > FAR_TOO_SLOW * slow or (num_slow and is_over):
                raise too_complex()
            if is_over:
                break
        if _grows(costs, slow):
            raise too_complex()
        if is_over:
            return


def _steps(compiled: Any, vocab_size: int, rng: random.Random) -> Iterator[float]:
    """Walk once; yields the seconds of each step: a mask, and accepting a token that it allows."""
    import xgrammar

    matcher = xgrammar.GrammarMatcher(compiled)
    stop_ids = matcher.stop_token_ids
    bits = np.zeros((1, -(-vocab_size // 32)), np.int32)
    for step in range(MAX_STEPS):
        began = time.thread_time()
        matcher.fill_next_token_bitmask(bits)
        seconds = time.thread_time() - began
        if step == 0 and not bits.any():
            raise RequestError("no token of this model can begin a text of the grammar", "grammar")
        token = _choose(bits, vocab_size, stop_ids, rng)
        if token is None:
            yield seconds
            return
        began = time.thread_time()
        if not matcher.accept_token(token):
            raise RequestError("the grammar is not matched reliably: use fewer and shorter repetitions", "grammar")
        yield seconds + time.thread_time() - began


def _choose(bits: NDArray[np.int32], vocab_size: int, stop_ids: list[int], rng: random.Random) -> int | None:
    """Choose an allowed token other than the end-of-text tokens, or None where there is none."""
    allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[:vocab_size])
    allowed = allowed[~np.isin(allowed, stop_ids)]
    return int(allowed[rng.randrange(len(allowed))]) if len(allowed) else None


def _grows(costs: list[float], slow: float) -> bool:
    quarter = len(costs) // 4
    if quarter < 5:
        return False
    first, last = (float(np.median(part)) for part in (costs[:quarter], costs[-quarter:]))
    return last > GROWTH * first and last * STEPS_AHEAD > slow


def too_complex() -> RequestError:
    """The refusal of a grammar whose masks take too long, caused by TimeoutError."""
    error = RequestError("the grammar is too complex: finding out which tokens may follow takes too long", "grammar")
    error.__cause__ = TimeoutError()
    return error
