"""Schemas and expressions as rules: texts of the rules are valid, and unsupported keywords are refused by name."""

from __future__ import annotations

import json
import os
import random
import re
from datetime import time
from decimal import Decimal
from itertools import product
from typing import Any

import pytest

from specmamba.errors import RequestError
from specmamba.grammar.expressions import Expression
from specmamba.grammar.json_schema import schema_rules
from specmamba.grammar.json_values import FORMATS
from tests.grammar_schemas import accepts, check_valid, compile_here, random_schema, random_text

IS_FULL = bool(os.environ.get("SPECMAMBA_TEST_FULL"))


def compiled(schema: Any) -> Any:
    return compile_here("json_schema", json.dumps(schema))


@pytest.mark.parametrize("seed", range(200 if IS_FULL else 25))
def test_random_texts_of_random_schemas_are_valid(seed: int) -> None:
    schema, rng = random_schema(seed), random.Random(seed)
    grammar = compiled(schema)
    texts = [text for _ in range(6) if (text := random_text(grammar, rng)) is not None]
    assert len(texts) >= 2
    for text in texts:
        check_valid(text, schema)


@pytest.mark.parametrize("name", FORMATS)
def test_texts_of_formats_are_valid(name: str) -> None:
    schema = {"type": "string", "format": name}
    grammar, rng = compiled(schema), random.Random(1)
    for _ in range(10):
        text = random_text(grammar, rng, most=700)
        assert text is not None
        check_valid(text, schema)
        if name == "time":
            assert time.fromisoformat(json.loads(text)).tzinfo is not None


def test_any_object_is_an_object() -> None:
    grammar, rng = compile_here("json_object", ""), random.Random(0)
    texts = [text for _ in range(30) if (text := random_text(grammar, rng)) is not None]
    assert len(texts) >= 10
    assert all(isinstance(json.loads(text), dict) for text in texts)
    for text, is_one in [('{"a": [1, {"b": null}], "c": -1.5e3}', True), ("{}", True), ("[]", False), ("1", False)]:
        assert accepts(grammar, text) == is_one


BOUNDS: list[dict[str, Any]] = [
    {"minimum": 0},
    {"minimum": -7, "maximum": 113},
    {"exclusiveMinimum": -12, "exclusiveMaximum": 3},
    {"maximum": -3},
    {"minimum": 99, "maximum": 101},
    {"exclusiveMinimum": 0, "maximum": 1},
]
FRACTIONS: list[dict[str, Any]] = [
    {"minimum": 0.1, "maximum": 0.5},
    {"minimum": -0.25, "exclusiveMaximum": 1.5},
    {"exclusiveMinimum": 0.25, "exclusiveMaximum": 0.3},
    {"exclusiveMinimum": -1.75, "maximum": -0.05},
]


def is_within(value: Decimal, bounds: dict[str, float]) -> bool:
    limit = {name: Decimal(repr(bound)) for name, bound in bounds.items()}
    return (
        value >= limit.get("minimum", value)
        and value <= limit.get("maximum", value)
        and value > limit.get("exclusiveMinimum", value - 1)
        and value < limit.get("exclusiveMaximum", value + 1)
    )


@pytest.mark.parametrize("bounds", BOUNDS)
def test_integers_within_bounds_and_no_others(bounds: dict[str, float]) -> None:
    grammar = compiled({"type": "integer", **bounds})
    for value in [*range(-130, 130), 999, 1000, 10**9, -(10**9)]:
        assert accepts(grammar, str(value)) == is_within(Decimal(value), bounds), value
    assert not any(accepts(grammar, text) for text in ("", "-", "-0", "01", "1.0", "1e1"))


@pytest.mark.parametrize("bounds", BOUNDS + FRACTIONS)
def test_numbers_within_bounds_and_no_others(bounds: dict[str, float]) -> None:
    grammar = compiled({"type": "number", **bounds})
    for value in range(-260, 260):
        text = f"{Decimal(value) / 100:f}"
        assert accepts(grammar, text) == is_within(Decimal(text), bounds), text
        assert not accepts(grammar, f"{text}.") or "." in text


@pytest.mark.parametrize(("least", "most"), [(0, 3), (2, 2), (0, 200), (5, 131)])
def test_strings_are_counted_in_characters(least: int, most: int) -> None:
    grammar = compiled({"type": "string", "minLength": least, "maxLength": most})
    for length in {0, least - 1, least, least + 1, 64, 96, most - 1, most, most + 1} - {-1}:
        text = json.dumps("é\n🙂" * length, ensure_ascii=False)
        cut = json.dumps(json.loads(text)[:length], ensure_ascii=False)
        assert accepts(grammar, cut) == (least <= length <= most), length


def test_additional_keys_are_not_named_ones() -> None:
    schema = {"properties": {"ab": {"type": "null"}, "a": {"const": 1}}, "additionalProperties": {"type": "boolean"}}
    grammar = compiled({"type": "object", **schema})
    for key, is_free in [("ab", False), ("a", False), ("abc", True), ("b", True), ("", True)]:
        assert accepts(grammar, json.dumps({key: True})) == is_free
    assert accepts(grammar, '{"ab": null,"a":1, "": false, "c": true}')
    assert not accepts(grammar, '{"\\u0061": true}')


EXPRESSIONS = ["a|b+", "(ab)*", "a?b{2,3}", "^[^a]b$", "a.b", "(a|)(b|ab)", "[a-b]{0,2}?a", "(?:a|b)\\.", "\\x61"]


@pytest.mark.parametrize("pattern", EXPRESSIONS)
def test_expressions_match_what_python_matches(pattern: str) -> None:
    grammar = compile_here("regex", pattern)
    for length in range(6):
        for chars in product("ab.\n" if length < 5 else "ab", repeat=length):
            text = "".join(chars)
            assert accepts(grammar, text) == (re.fullmatch(pattern, text) is not None), text


@pytest.mark.parametrize("pattern", ["\\w+@\\w+", "\\d{2}\\s\\D", "[^\\w\\s]{2}", "\\S{1,4}", "[^\\d]\\W", ".{3}"])
def test_texts_of_character_kinds_match_in_python(pattern: str) -> None:
    grammar, rng = compile_here("regex", pattern), random.Random(2)
    texts = [text for _ in range(20) if (text := random_text(grammar, rng)) is not None]
    assert texts
    assert all(re.fullmatch(pattern, text) for text in texts)


@pytest.mark.parametrize("pattern", ["a", "^a", "a$", "^a|b$", 'x["\\\\]y', "^$"])
def test_patterns_are_searched_for(pattern: str) -> None:
    grammar = compiled({"type": "string", "pattern": pattern})
    for text in ["", "a", "b", "ca", "ac", "cb", "bc", 'x"y', "zx\\yz", "c"]:
        assert accepts(grammar, json.dumps(text)) == (re.search(pattern, text) is not None), text


REFUSED_EXPRESSIONS = {
    "(a": "unterminated",
    "(?=a)b": "lookahead",
    "(?<!a)b": "lookahead or lookbehind",
    "(a)\\1": "back reference",
    "a\\bb": "word boundary",
    "a^b": "anchor",
    "(?i)a": "flags",
    "a++": "possessive",
    "(?>a)": "atomic",
    "[\ud800]": "class without any character",
}


@pytest.mark.parametrize("pattern", REFUSED_EXPRESSIONS)
def test_expressions_that_are_refused(pattern: str) -> None:
    with pytest.raises(RequestError, match=REFUSED_EXPRESSIONS[pattern]):
        Expression(pattern).whole()


OBJECT = {"type": "object", "properties": {"a": {}}}
REFUSED_SCHEMAS: list[tuple[Any, str]] = [
    *(
        ({"type": "array", keyword: value}, f"'{keyword}'")
        for keyword, value in [("contains", {}), ("uniqueItems", True)]
    ),
    *(
        ({"type": "object", name: {}}, f"'{name}'")
        for name in ("patternProperties", "propertyNames", "dependentSchemas")
    ),
    *(
        ({name: {}}, f"'{name}'")
        for name in ("not", "if", "then", "else", "unevaluatedProperties", "dependentRequired")
    ),
    ({"$dynamicRef": "#a"}, "'\\$dynamicRef'"),
    ({"type": "integer", "multipleOf": 5}, "'multipleOf'"),
    ({"type": "string", "format": "iri"}, "'format' 'iri'"),
    ({"type": "string", "nullable": True}, "'nullable'"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "'oneOf'"),
    ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, "'oneOf'"),
    ({**OBJECT, "minProperties": 1}, "'minProperties'"),
    ({**OBJECT, "maxProperties": 0}, "'maxProperties'"),
    ({**OBJECT, "required": ["b"], "additionalProperties": False}, "required"),
    ({"type": "string", "pattern": "a(b|c)", "maxLength": 9}, "'maxLength' beside 'pattern'"),
    ({"type": "string", "pattern": "(?=a)"}, "lookahead"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "'minLength'"),
    ({"type": "string", "maxLength": 10**9}, "'maxLength' is above"),
    ({"type": "string", "maxLength": 1.5}, "'maxLength'"),
    ({"type": "text"}, "'type'"),
    ({"type": "number", "minimum": 3, "maximum": 2}, "no number"),
    ({"type": "number", "minimum": 0.123456789}, "digits"),
    ({"type": "number", "minimum": "0"}, "'minimum'"),
    ({"enum": []}, "'enum'"),
    ({"enum": ["a"], "maxLength": 3}, "'maxLength' beside 'enum'"),
    ({"$ref": "#"}, "refers to itself"),
    ({"$ref": "#/$defs/none"}, "points to nothing"),
    ({"$ref": "http://host/schema"}, "'\\$ref'"),
    ({"allOf": [{"type": "string"}, {"type": "null"}]}, "no 'type' in common"),
    ({"allOf": [{**OBJECT, "additionalProperties": False}, {"properties": {"b": {}}}]}, "'additionalProperties'"),
    ({"$schema": "http://json-schema.org/draft-04/schema#"}, "'\\$schema'"),
    ({"$schema": "http://json-schema.org/draft-07/schema#", "prefixItems": [{}]}, "'prefixItems'"),
    ({"type": "array", "items": [{}]}, "'items' as a list"),
    (False, "no value"),
    ([], "a schema is an object"),
    ({"const": "\ud800"}, "cannot be written"),
    ({"properties": {"a": {"properties": {"b": {"not": {}}}}}}, "at #/properties/a/properties/b"),
]


@pytest.mark.parametrize(("schema", "reason"), REFUSED_SCHEMAS)
def test_schemas_that_are_refused(schema: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        schema_rules(json.dumps(schema))
    assert caught.value.param == "grammar"


@pytest.mark.parametrize(
    "text", ["", "{", "nul", '{"maximum": NaN}', '{"maximum": 1e999}', "[" * 60_000, '{"a":' * 100]
)
def test_invalid_json_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="JSON schema: "):
        schema_rules(text)


def test_a_schema_that_nests_too_deep_is_refused() -> None:
    schema: Any = {"type": "null"}
    for _ in range(40):
        schema = {"type": "array", "items": schema}
    schema_rules(json.dumps(schema))
    for _ in range(40):
        schema = {"type": "array", "items": schema}
    with pytest.raises(RequestError, match="nests deeper than 64"):
        schema_rules(json.dumps(schema))


def test_long_chains_of_references_are_followed() -> None:
    chain = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(1500)}
    schema_rules(json.dumps({"$defs": {**chain, "d1500": {"type": "null"}}, "$ref": "#/$defs/d0"}))
