"""How values of JSON are written: one way of several, so that an output is always valid and comes to an end.

Characters stand for themselves wherever JSON allows it, numbers have a bounded number of digits, and there is at most
one space, behind a comma or a colon.
"""

from __future__ import annotations

import json
from typing import Any

from specmamba.errors import RequestError
from specmamba.grammar.rules import SCALARS, Ranges, Rules, char_class, literal, minus, one_of, repeated

COMMA, COLON = '"," " "?', '":" " "?'
INTEGER = '("0" | "-"? [1-9] [0-9]{0,14})'
NUMBER = '"-"? ("0" | [1-9] [0-9]{0,14}) ("." [0-9]{1,15})? ([eE] [+\\-]? [0-9]{1,2})?'
_BLOCK = 32  # characters
_QUOTE, _BACKSLASH = '"', "\\"
_ESCAPED = {_QUOTE: _QUOTE, _BACKSLASH: _BACKSLASH, "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
_CONTROL: Ranges = [(0, 31)]
PLAIN = minus(SCALARS, [*_CONTROL, (34, 34), (92, 92)])  # what a string holds as it is


def one_character(ranges: Ranges) -> str:
    """One character of a set, as it is written inside of a string. Controls without a short form are left out."""
    escapes = [(ord(short), ord(short)) for char, short in _ESCAPED.items() if _has(ranges, ord(char))]
    choices = [f"{literal(_BACKSLASH)} {char_class(escapes)}"] if escapes else []
    plain = minus(ranges, minus(SCALARS, PLAIN))
    if plain:
        choices.append(char_class(plain))
    if not choices:
        raise RequestError("JSON schema: a pattern asks for control characters, which are not supported", "grammar")
    return one_of(choices)


def string(rules: Rules, least: int, most: int | None) -> str:
    """Any string of so many characters.

    A rule for every number of characters that may follow, each up to the closing quote: then no token that ends a
    string, or runs on behind it, has to be tried out while text is made.
    """
    char, quote, blocks = one_character(SCALARS), literal(_QUOTE), ""
    if most is None:
        rest = rules.add_recursive(f"{quote} | {char} {{}}")
        most = least
    else:
        rest = rules.add(quote)
        if most - least > 3 * _BLOCK:  # every rule costs compile time: most characters of a long string share some
            length = least + _BLOCK + (most - least) % _BLOCK
            block = rules.add(" ".join([char] * _BLOCK))
            blocks, most = repeated(block, 0, (most - length) // _BLOCK), length
    for used in reversed(range(most)):
        rest = rules.add(f"{char} {rest}" if used < least else f"{quote} | {char} {rest}")
    return f"{quote} {blocks} {rest}"


def quoted(expression: str) -> str:
    """A string whose inside is what the expression says."""
    return f"{literal(_QUOTE)} ({expression}) {literal(_QUOTE)}"


def constant(value: Any) -> str:
    """Exactly this value."""
    if isinstance(value, dict):
        entries = [f"{constant(key)} {COLON} {constant(inner)}" for key, inner in value.items()]
        return '"{" ' + f" {COMMA} ".join(entries) + ' "}"'
    if isinstance(value, list):
        return '"[" ' + f" {COMMA} ".join(map(constant, value)) + ' "]"'
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode("utf8")
    except ValueError:
        raise RequestError(f"JSON schema: the constant {value!r:.80} cannot be written", "grammar") from None
    return literal(text)


def anything(rules: Rules) -> str:
    """Any value at all."""
    text = rules.add(string(rules, 0, None))
    array, entries = container("[", "]", "{}", 0, None), container("{", "}", f"{text} {COLON} {{}}", 0, None)
    return rules.add_recursive(f'"true" | "false" | "null" | {NUMBER} | {text} | {array} | {entries}')


def any_object(rules: Rules) -> str:
    """Any object."""
    value, text = anything(rules), rules.add(string(rules, 0, None))
    return rules.add(container("{", "}", f"{text} {COLON} {value}", 0, None))


def container(opening: str, closing: str, item: str, least: int, most: int | None) -> str:
    """So many items between brackets, with commas between them."""
    if most == 0:
        return f"{literal(opening)} {literal(closing)}"
    more = repeated(f"{COMMA} {item}", max(least - 1, 0), None if most is None else most - 1)
    inside = f"{item} {more}" if least else f"({item} {more})?"
    return f"{literal(opening)} {inside} {literal(closing)}"


def key_except(rules: Rules, names: list[str]) -> str:
    """Any key but these, with its quotes."""
    return f"{literal(_QUOTE)} {_rest_except(rules, sorted(set(names)))}"


def _rest_except(rules: Rules, words: list[str]) -> str:
    """What may follow in a key when it must not go on with one of these words; the closing quote included."""
    rest_of: dict[str, list[str]] = {}
    for word in words:
        if word and _has(PLAIN, ord(word[0])):
            rest_of.setdefault(word[0], []).append(word[1:])
    free = char_class(minus(PLAIN, [(ord(char), ord(char)) for char in rest_of]))
    choices = [f"{free} {char_class(PLAIN)}* {literal(_QUOTE)}"]
    choices += [f"{literal(char)} {_rest_except(rules, rest)}" for char, rest in rest_of.items()]
    if "" not in words:
        choices.append(literal(_QUOTE))
    return rules.add(" | ".join(choices))


def _has(ranges: Ranges, point: int) -> bool:
    return any(low <= point <= high for low, high in ranges)
