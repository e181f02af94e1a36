"""Rules for JSON values: any values, constants, and the strings and numbers of JSON schemas.

Each value is written in only one of the ways that JSON allows, so that every output is valid and ends: characters are
not escaped unless they must be, numbers have a bounded number of digits, and there is at most one space, behind a comma
or a colon. All functions raise RequestError for what rules cannot guarantee.
"""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

from specmamba.errors import RequestError
from specmamba.grammar.ebnf import SCALARS, Ranges, Rules, char_class, literal, minus, one_of, repeated
from specmamba.grammar.expressions import Expression
from specmamba.grammar.number_ranges import Bounds, decimals, integers
from specmamba.grammar.schema_reader import ASSERTING, Schema, has_type, refusal, types_of

COMMA, COLON = '"," " "?', '":" " "?'
INTEGER = '("0" | "-"? [1-9] [0-9]{0,14})'
NUMBER = '"-"? ("0" | [1-9] [0-9]{0,14}) ("." [0-9]{1,15})? ([eE] [+\\-]? [0-9]{1,2})?'
_BLOCK = 32  # characters that share one rule
_QUOTE, _BACKSLASH = '"', "\\"
_ESCAPED = {_QUOTE: _QUOTE, _BACKSLASH: _BACKSLASH, "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
_CONTROL: Ranges = [(0, 31)]
PLAIN = minus(SCALARS, [*_CONTROL, (34, 34), (92, 92)])  # characters of strings that need no escape
MAX_COUNT = 4096

# Formats of strings as regular expressions. Each matches a part of what the format's standard allows, and nothing else.
_DATE = (
    r"[0-9]{3}[1-9]-((0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"  # no year 0
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?"
_HOST = rf"({_LABEL}\.){{1,4}}[a-z]{{2,12}}"

FORMATS: dict[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": r"P([0-9]{1,4}D(T[0-9]{1,4}H)?|T[0-9]{1,4}H([0-9]{1,4}M)?|T[0-9]{1,4}M([0-9]{1,4}S)?|T[0-9]{1,4}S)",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
    "ipv6": r"([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}",
    "hostname": _HOST,
    "email": rf"[A-Za-z0-9_+-]{{1,32}}(\.[A-Za-z0-9_+-]{{1,32}})?@{_HOST}",
    "uri": rf"https?://{_HOST}(:[1-9][0-9]{{0,3}})?(/[A-Za-z0-9._~-]{{0,64}}){{0,8}}",
}


def one_character(ranges: Ranges) -> str:
    """One character of a set inside of a string. Control characters without a short escape are left out."""
    escapes = [(ord(short), ord(short)) for char, short in _ESCAPED.items() if _has(ranges, ord(char))]
    choices = [f"{literal(_BACKSLASH)} {char_class(escapes)}"] if escapes else []
    plain = minus(ranges, minus(SCALARS, PLAIN))
    if plain:
        choices.append(char_class(plain))
    if not choices:
        raise RequestError("JSON schema: a pattern asks for control characters, which are not supported", "grammar")
    return one_of(choices)


def any_string(rules: Rules, least: int, most: int | None) -> str:
    """Any string of ``least`` to ``most`` characters; None: no upper bound.

    There is a rule for every number of characters that may follow, each up to the closing quote. Then xgrammar knows at
    compile time which tokens may end the string, and need not try them for every mask.
    """
    char, quote, blocks = one_character(SCALARS), literal(_QUOTE), ""
    if most is None:
        rest = rules.add_recursive(f"{quote} | {char} {{}}")
        most = least
    else:
        rest = rules.add(quote)
        if most - least > 3 * _BLOCK:  # every rule costs compile time, so most characters of a long string share rules
            length = least + _BLOCK + (most - least) % _BLOCK
            block = rules.add(" ".join([char] * _BLOCK))
            blocks, most = repeated(block, 0, (most - length) // _BLOCK), length
    for used in reversed(range(most)):
        rest = rules.add(f"{char} {rest}" if used < least else f"{quote} | {char} {rest}")
    return f"{quote} {blocks} {rest}"


def quoted(expression: str) -> str:
    """A string whose characters match the expression."""
    return f"{literal(_QUOTE)} ({expression}) {literal(_QUOTE)}"


def constant(value: Any) -> str:
    """The expression for exactly this value."""
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
    """The rule for any value."""
    text = rules.add(any_string(rules, 0, None))
    array, entries = container("[", "]", "{}", 0, None), container("{", "}", f"{text} {COLON} {{}}", 0, None)
    return rules.add_recursive(f'"true" | "false" | "null" | {NUMBER} | {text} | {array} | {entries}')


def any_object(rules: Rules) -> str:
    """The rule for any object."""
    value, text = anything(rules), rules.add(any_string(rules, 0, None))
    return rules.add(container("{", "}", f"{text} {COLON} {value}", 0, None))


def container(opening: str, closing: str, item: str, least: int, most: int | None) -> str:
    """``least`` to ``most`` items between brackets, with commas between them; None: no upper bound."""
    if most == 0:
        return f"{literal(opening)} {literal(closing)}"
    more = repeated(f"{COMMA} {item}", max(least - 1, 0), None if most is None else most - 1)
    inside = f"{item} {more}" if least else f"({item} {more})?"
    return f"{literal(opening)} {inside} {literal(closing)}"


def key_except(rules: Rules, names: list[str]) -> str:
    """Any key except these, with its quotes."""
    return f"{literal(_QUOTE)} {_rest_except(rules, sorted(set(names)))}"


def string(rules: Rules, schema: Schema, place: str) -> str:
    """The expression for the strings of a schema."""
    least, most = count(schema, "minLength", place) or 0, count(schema, "maxLength", place)
    if most is not None and least > most:
        raise refusal("'minLength' is more than 'maxLength'", place)
    if "format" in schema and "pattern" in schema:
        raise refusal("'format' beside 'pattern' is not supported", place)
    if "format" in schema:
        return _formatted(schema["format"], least, most, place)
    if "pattern" in schema:
        return _patterned(schema["pattern"], least, most, place)
    return any_string(rules, least, most)


def enum(schema: Schema, place: str) -> str:
    """The expression for the constants of a schema with ``enum``."""
    values, types = schema["enum"], types_of(schema, place)
    if not isinstance(values, list):
        raise refusal("'enum' is not a list", place)
    others = sorted((schema.keys() & ASSERTING) - {"enum", "type"})
    if others:
        raise refusal(f"'{others[0]}' beside 'enum' or 'const' is not supported", place)
    if types is not None:
        values = [value for value in values if any(has_type(value, name) for name in types)]
    if not values:
        raise refusal("'enum' allows no value", place)
    return one_of(map(constant, values))


def number(name: str, schema: Schema, place: str) -> str:
    """The expression for the numbers, or the integers, of a schema."""
    if "multipleOf" in schema and not (name == "integer" and schema["multipleOf"] == 1):
        raise refusal("'multipleOf' is not supported", place)
    low, low_open = _bound(schema, "minimum", "exclusiveMinimum", place, max)
    high, high_open = _bound(schema, "maximum", "exclusiveMaximum", place, min)
    if low is None and high is None:
        return INTEGER if name == "integer" else NUMBER
    bounds = Bounds(low, high, low_open, high_open)
    return integers(bounds) if name == "integer" else decimals(bounds)


def _bound(schema: Schema, closed: str, opened: str, place: str, tighter: Any) -> tuple[Decimal | None, bool]:
    found: dict[str, Decimal] = {}
    for keyword in (closed, opened):
        value = schema.get(keyword)
        if keyword in schema and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise refusal(f"'{keyword}' is not a number", place)
        if keyword in schema:
            found[keyword] = Decimal(repr(value))
    if not found:
        return None, False
    bound = tighter(found.values())
    return bound, found.get(opened) == bound


def _formatted(name: Any, least: int, most: int | None, place: str) -> str:
    if not isinstance(name, str) or name not in FORMATS:
        raise refusal(f"'format' {name!r:.40} is not supported: only {', '.join(FORMATS)} are", place)
    expression = Expression(FORMATS[name])
    if not _fits(expression, least, most):
        raise refusal(f"'minLength' or 'maxLength' beside 'format' {name!r} is not supported", place)
    return quoted(expression.whole(one_character))


def _patterned(pattern: Any, least: int, most: int | None, place: str) -> str:
    if not isinstance(pattern, str):
        raise refusal("'pattern' is not a text", place)
    expression = Expression(pattern)
    if _fits(expression, least, most) and (expression.is_anchored or (least == 0 and most is None)):
        return quoted(expression.anywhere(one_character))
    repeat = expression.single_repeat()
    if repeat is None:
        raise refusal("'minLength' or 'maxLength' beside 'pattern' is not supported; write the length into it", place)
    ranges, fewest, longest = repeat
    least = max(least, fewest)
    most = min((bound for bound in (most, longest) if bound is not None), default=None)
    if most is not None and least > most:
        raise refusal("no text is as long as 'pattern', 'minLength' and 'maxLength' ask for", place)
    return quoted(repeated(one_character(ranges), least, most))


def _fits(expression: Expression, least: int, most: int | None) -> bool:
    """Whether all matches have a length within the bounds."""
    longest = expression.max_length
    return expression.min_length >= least and (most is None or (longest is not None and longest <= most))


def count(schema: Schema, keyword: str, place: str) -> int | None:
    """The value of a keyword that must be a whole number of at least 0; None where it is missing."""
    value = schema.get(keyword)
    if value is None and keyword not in schema:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0 or value != int(value):
        raise refusal(f"'{keyword}' is not a number of at least 0 without a fraction", place)
    if value > MAX_COUNT:
        raise refusal(f"'{keyword}' is above {MAX_COUNT}", place)
    return int(value)


def _rest_except(rules: Rules, words: list[str]) -> str:
    """The rule for the rest of a key that is none of these words, with the closing quote."""
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
