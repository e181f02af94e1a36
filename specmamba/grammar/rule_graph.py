"""What rules show before anything is compiled: that no text belongs to them, endless repetition, left recursion."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any

from specmamba.errors import RequestError

MAX_REPEAT = (
    4096  # as of strings and arrays in schemas: xgrammar's masks and its matcher disagree about far larger ones
)
_TEXT, _CLASS, _CLASS_STAR, _EMPTY, _RULE, _SEQUENCE, _CHOICES, _REPEAT = 0, 1, 2, 3, 4, 5, 6, 8
_OWN_NAME = re.compile(r"^[^\S\n]*([A-Za-z_][\w.-]*)[^\S\n]*::=", re.MULTILINE)

Expression = tuple[int, list[int]]  # a kind of the above, and what it is made of


class RuleGraph:
    """The rules of a grammar as xgrammar has read it."""

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
        """Raise RequestError for a grammar without any text, or with a repetition that is too long."""
        for kind, parts in self._expressions:
            if kind == _REPEAT and max(parts[1:3]) > MAX_REPEAT:
                raise RequestError(
                    f"something is repeated {max(parts[1:3])} times: {MAX_REPEAT} are allowed", "grammar"
                )
        if self._root not in self._closure(self._can_end):
            raise RequestError("no text belongs to the grammar: its root never comes to an end", "grammar")

    def check_left_recursion(self, text: str) -> None:
        """Raise RequestError where a rule that ``text`` defines begins with itself."""
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
        """The rules that have a property which follows from that of other rules."""
        found: set[int] = set()
        left = list(range(len(self._bodies)))
        size = -1
        while len(found) > size:
            size = len(found)
            for rule in reversed(left):  # rules mostly speak of later ones
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
        """The rules that a text of an expression can begin with."""
        kind, parts = self._expressions[index]
        if kind in (_RULE, _REPEAT):
            yield parts[0]
        elif kind in (_SEQUENCE, _CHOICES):
            for part in parts:
                yield from self._first(part, nullable)
                if kind == _SEQUENCE and not self._can_be_empty(part, nullable):
                    return
