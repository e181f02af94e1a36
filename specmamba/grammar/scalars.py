"""Constants, strings and numbers of JSON schemas as rules. All raise RequestError for what rules cannot promise."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from specmamba.grammar import json_text as write
from specmamba.grammar.expressions import Expression
from specmamba.grammar.formats import FORMATS
from specmamba.grammar.number_ranges import Bounds, decimals, integers
from specmamba.grammar.rules import Rules, one_of, repeated
from specmamba.grammar.schema_reader import ASSERTING, Schema, has_type, refusal, types_of

MAX_COUNT = 4096


def string(rules: Rules, schema: Schema, place: str) -> str:
    """Strings of a schema."""
    least, most = count(schema, "minLength", place) or 0, count(schema, "maxLength", place)
    if most is not None and least > most:
        raise refusal("'minLength' is more than 'maxLength'", place)
    if "format" in schema and "pattern" in schema:
        raise refusal("'format' beside 'pattern' is not supported", place)
    if "format" in schema:
        return _formatted(schema["format"], least, most, place)
    if "pattern" in schema:
        return _patterned(schema["pattern"], least, most, place)
    return write.string(rules, least, most)


def enum(schema: Schema, place: str) -> str:
    """The constants of a schema that names them."""
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
    return one_of(map(write.constant, values))


def number(name: str, schema: Schema, place: str) -> str:
    """Numbers, or integers, of a schema."""
    if "multipleOf" in schema and not (name == "integer" and schema["multipleOf"] == 1):
        raise refusal("'multipleOf' is not supported", place)
    low, low_open = _bound(schema, "minimum", "exclusiveMinimum", place, max)
    high, high_open = _bound(schema, "maximum", "exclusiveMaximum", place, min)
    if low is None and high is None:
        return write.INTEGER if name == "integer" else write.NUMBER
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
    return write.quoted(expression.whole(write.one_character))


def _patterned(pattern: Any, least: int, most: int | None, place: str) -> str:
    if not isinstance(pattern, str):
        raise refusal("'pattern' is not a text", place)
    expression = Expression(pattern)
    if _fits(expression, least, most) and (expression.is_anchored or (least == 0 and most is None)):
        return write.quoted(expression.anywhere(write.one_character))
    repeat = expression.single_repeat()
    if repeat is None:
        raise refusal("'minLength' or 'maxLength' beside 'pattern' is not supported; write the length into it", place)
    ranges, fewest, longest = repeat
    least = max(least, fewest)
    most = min((bound for bound in (most, longest) if bound is not None), default=None)
    if most is not None and least > most:
        raise refusal("no text is as long as 'pattern', 'minLength' and 'maxLength' ask for", place)
    return write.quoted(repeated(write.one_character(ranges), least, most))


def _fits(expression: Expression, least: int, most: int | None) -> bool:
    """Whether whatever matches has a length within the bounds."""
    longest = expression.max_length
    return expression.min_length >= least and (most is None or (longest is not None and longest <= most))


def count(schema: Schema, keyword: str, place: str) -> int | None:
    """What a keyword says that counts; None where it is not there."""
    value = schema.get(keyword)
    if value is None and keyword not in schema:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0 or value != int(value):
        raise refusal(f"'{keyword}' is not a number of at least 0 without a fraction", place)
    if value > MAX_COUNT:
        raise refusal(f"'{keyword}' is above {MAX_COUNT}", place)
    return int(value)
