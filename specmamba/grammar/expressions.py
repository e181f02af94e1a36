r"""Translation of regular expressions to rules, with the meaning that Python and ECMAScript have in common.

Where the two differ, the rules match the texts that both match: ``\d``, ``\w`` and ``\s`` are ASCII, their opposites
match what is outside of both definitions, and ``.`` matches no line break of either. What is not regular is refused by
name.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

from specmamba.errors import RequestError
from specmamba.grammar.ebnf import SCALARS, Ranges, char_class, complement, literal, minus, one_of, repeated, union

_parser: Any = importlib.import_module("re._parser")  # another parser would differ from Python in details
_UNBOUNDED = _parser.MAXREPEAT

_ABOVE_ASCII: Ranges = [(0x80, 0x10FFFF)]
_LINE_BREAKS: Ranges = [(10, 10), (13, 13), (0x2028, 0x2029)]
_WIDE_SPACES: Ranges = union(((c, c) for c in range(0x10000) if chr(c).isspace()), [(0xFEFF, 0xFEFF)])
_NARROW: dict[str, Ranges] = {
    "DIGIT": [(48, 57)],
    "WORD": [(48, 57), (65, 90), (95, 95), (97, 122)],
    "SPACE": [(9, 13), (32, 32)],
}
_WIDE: dict[str, Ranges] = {
    "DIGIT": union(_NARROW["DIGIT"], _ABOVE_ASCII),
    "WORD": union(_NARROW["WORD"], _ABOVE_ASCII),
    "SPACE": _WIDE_SPACES,
}
_STARTS, _ENDS = ("AT_BEGINNING", "AT_BEGINNING_STRING"), ("AT_END", "AT_END_STRING")

OneOf = Callable[[Ranges], str]  # the expression for one character of a set


class Expression:
    """A parsed regular expression.

    Raises:
        RequestError: it is invalid, or uses something that is not regular.
    """

    def __init__(self, pattern: str) -> None:
        try:
            self._tree = _parser.parse(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise _refusal(pattern, str(error) or "it nests too deep") from None
        if self._tree.state.flags & ~re.UNICODE:
            raise _refusal(pattern, "flags are not supported")
        self.pattern = pattern
        low, high = self._tree.getwidth()
        self.min_length: int = low
        self.max_length: int | None = None if high >= _UNBOUNDED else high  # of matching texts, in code points

    def whole(self, one: OneOf | None = None) -> str:
        """The expression for texts that match as a whole."""
        return self._alternatives(one or _one_character, None)

    def anywhere(self, one: OneOf) -> str:
        """The expression for texts with a match anywhere; ``^`` and ``$`` tie it to the ends."""
        return self._alternatives(one, f"{one(SCALARS)}*")

    @property
    def is_anchored(self) -> bool:
        """Whether every match is a whole text."""
        return all(b and _is_at(b[0], _STARTS) and _is_at(b[-1], _ENDS) for b in self._branches())

    def single_repeat(self) -> tuple[Ranges, int, int | None] | None:
        """The characters, m and n of an anchored ``^[...]{m,n}$``; None for other expressions."""
        items = list(self._tree)
        if len(items) != 3 or not _is_at(items[0], _STARTS) or not _is_at(items[2], _ENDS):
            return None
        name, value = str(items[1][0]), items[1][1]
        if name not in ("MAX_REPEAT", "MIN_REPEAT") or len(value[2]) != 1:
            return None
        ranges = self._set(value[2][0])
        return None if ranges is None else (ranges, int(value[0]), _most(value[1]))

    def _alternatives(self, one: OneOf, around: str | None) -> str:
        try:
            return one_of([f"({self._anchored(branch, one, around)})" for branch in self._branches()])
        except RecursionError:
            raise _refusal(self.pattern, "it nests too deep") from None

    def _branches(self) -> list[list[Any]]:
        items = list(self._tree)
        is_choice = len(items) == 1 and str(items[0][0]) == "BRANCH"
        return [list(branch) for branch in items[0][1][1]] if is_choice else [items]

    def _anchored(self, items: list[Any], one: OneOf, around: str | None) -> str:
        before = after = around
        if items and _is_at(items[0], _STARTS):
            items, before = items[1:], None
        if items and _is_at(items[-1], _ENDS):
            items, after = items[:-1], None
        return " ".join(part for part in (before, self._sequence(items, one), after) if part is not None)

    def _sequence(self, items: Any, one: OneOf) -> str:
        return " ".join(self._item(item, one) for item in items) or '""'

    def _item(self, item: Any, one: OneOf) -> str:
        name, value = str(item[0]), item[1]
        ranges = self._set(item)
        if ranges is not None:
            return one(ranges)
        if name in ("MAX_REPEAT", "MIN_REPEAT"):  # greedy or not, the same texts match
            return repeated(self._sequence(value[2], one), int(value[0]), _most(value[1]))
        if name == "BRANCH":
            return one_of([f"({self._sequence(branch, one)})" for branch in value[1]])
        if name == "SUBPATTERN" and not value[1] and not value[2]:
            return f"({self._sequence(value[3], one)})"
        raise _refusal(self.pattern, f"{_NAMES.get(name, name.lower())} is not supported")

    def _set(self, item: Any) -> Ranges | None:
        """The characters that an item matches, where it matches exactly one character, else None."""
        name, value = str(item[0]), item[1]
        if name == "LITERAL":
            return self._some(minus([(value, value)], complement(SCALARS)))
        if name == "NOT_LITERAL":
            return minus(SCALARS, [(value, value)])
        if name == "ANY":
            return minus(SCALARS, _LINE_BREAKS)
        if name != "IN":
            return None
        is_negated = str(value[0][0]) == "NEGATE"
        members = union(*(_members(member, wide=is_negated) for member in value[is_negated:]))
        return self._some(minus(SCALARS, members if is_negated else complement(members)))

    def _some(self, ranges: Ranges) -> Ranges:
        if not ranges:
            raise _refusal(self.pattern, "it has a class without any character")
        return ranges


_NAMES = {
    "ASSERT": "a lookahead or lookbehind",
    "ASSERT_NOT": "a lookahead or lookbehind",
    "AT": "an anchor that is not at an end of the expression, or a word boundary,",
    "GROUPREF": "a back reference",
    "GROUPREF_EXISTS": "a conditional group",
    "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive quantifier",
    "SUBPATTERN": "a group with flags",
}


def _members(member: Any, wide: bool) -> Ranges:
    name, value = str(member[0]), member[1]
    if name == "LITERAL":
        return [(value, value)]
    if name == "RANGE":
        return [(value[0], value[1])]
    category = str(value).removeprefix("CATEGORY_")
    opposite = category.removeprefix("NOT_")
    if opposite != category:
        return complement((_NARROW if wide else _WIDE)[opposite])
    return (_WIDE if wide else _NARROW)[category]


def _is_at(item: Any, places: tuple[str, ...]) -> bool:
    return str(item[0]) == "AT" and str(item[1]) in places


def _most(value: Any) -> int | None:
    return None if value is _UNBOUNDED or value >= _UNBOUNDED else int(value)


def _one_character(ranges: Ranges) -> str:
    single = len(ranges) == 1 and ranges[0][0] == ranges[0][1]
    return literal(chr(ranges[0][0])) if single else char_class(ranges)


def _refusal(pattern: str, reason: str) -> RequestError:
    return RequestError(f"the regular expression {pattern!r:.80} cannot be used: {reason}", "grammar")
