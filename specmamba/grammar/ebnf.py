"""Writing of rules in the notation of xgrammar (GBNF): literals, character classes, choices, repetitions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specmamba.errors import RequestError

Ranges = list[tuple[int, int]]  # of code points, both ends included; ascending, with gaps between them

MAX_RULES_CHARACTERS = 1_000_000
LAST_CODE_POINT = 0x10FFFF
SCALARS: Ranges = [(0, 0xD7FF), (0xE000, LAST_CODE_POINT)]  # halves of surrogate pairs cannot be written in UTF-8


class Rules:
    """A grammar to which rules are added. Equal bodies share one rule."""

    def __init__(self) -> None:
        self._bodies: dict[str, str] = {}
        self._name_of: dict[str, str] = {}
        self._num_characters = 0

    def add(self, body: str) -> str:
        """Add a rule with this body, unless there is one; gives its name."""
        if body not in self._name_of:
            self._name_of[body] = self.reserve()
            self.define(self._name_of[body], body)
        return self._name_of[body]

    def add_recursive(self, body: str) -> str:
        """Add a rule that refers to itself wherever its body has ``{}``; gives its name."""
        if body not in self._name_of:
            self._name_of[body] = self.reserve()
            self.define(self._name_of[body], body.replace("{}", self._name_of[body]))
        return self._name_of[body]

    def reserve(self) -> str:
        """Reserve a name whose body follows later, so that rules can refer to themselves."""
        name = f"r{len(self._bodies)}"
        self._bodies[name] = ""
        return name

    def define(self, name: str, body: str) -> None:
        """Set the body of a reserved name.

        Raises:
            RequestError: the grammar has become too large.
        """
        self._num_characters += len(body)
        if self._num_characters > MAX_RULES_CHARACTERS:
            raise RequestError("the grammar grows too large: use a smaller schema or expression", "grammar")
        self._bodies[name] = body

    def text(self, root: str) -> str:
        """The whole grammar, which matches the texts of ``root``."""
        lines = [f"root ::= {root}", *(f"{name} ::= {body}" for name, body in self._bodies.items())]
        return "\n".join(lines)


def literal(text: str) -> str:
    """The expression for exactly this text."""
    return '"' + "".join(map(_escaped, text)) + '"'


def one_of(choices: Iterable[str]) -> str:
    """The expression for any of these expressions, of which there must be at least one."""
    distinct = list(dict.fromkeys(choices))
    return distinct[0] if len(distinct) == 1 else "(" + " | ".join(distinct) + ")"


def repeated(expression: str, least: int, most: int | None) -> str:
    """The expression for ``least`` to ``most`` repetitions; None: no upper bound."""
    if most == 0:
        return '""'
    return f"({expression}){{{least},{'' if most is None else most}}}"


def char_class(ranges: Ranges) -> str:
    """The expression for one character of these ranges.

    A set up to the last code point is written as its complement: xgrammar's masks are wrong where such a set is written
    as ranges and repeated more than 128 times.
    """
    is_open = bool(ranges) and ranges[-1][1] == LAST_CODE_POINT and len(ranges) > 1
    written = complement(ranges) if is_open else ranges
    return f"[{'^' if is_open else ''}" + "".join(f"{_in_class(low)}-{_in_class(high)}" for low, high in written) + "]"


def union(*sets: Iterable[tuple[int, int]]) -> Ranges:
    """The code points that are in any of the sets."""
    merged: Ranges = []
    for low, high in sorted(r for ranges in sets for r in ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return merged


def complement(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """The code points that are not in the set."""
    gaps, start = [], 0
    for low, high in union(ranges):
        if low > start:
            gaps.append((start, low - 1))
        start = high + 1
    return [*gaps, (start, LAST_CODE_POINT)] if start <= LAST_CODE_POINT else gaps


def minus(ranges: Sequence[tuple[int, int]], taken: Sequence[tuple[int, int]]) -> Ranges:
    """The code points that are in the first set and not in the second."""
    return complement(union(complement(ranges), taken))


_QUOTING = '"\\'


def _escaped(char: str) -> str:
    if char in _QUOTING:
        return f"\\{char}"
    if not char.isascii() or not char.isprintable():
        return _code(ord(char))
    return char


def _in_class(point: int) -> str:
    return chr(point) if chr(point).isascii() and chr(point).isalnum() else _code(point)


def _code(point: int) -> str:
    return f"\\U{point:08x}"  # \\x would also take the digits that follow
