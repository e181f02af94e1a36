"""The fields of structured output that completions and chat share: accepted, and refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from specmamba.sampling_params import GrammarSpec
from specmamba.server.api.requests import CompletionRequest
from specmamba.server.http.error_answers import api_error_of_validation

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
NAMED: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}


def asked(**body: object) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": "x", **body})


def spec_of(**body: object) -> tuple[str | None, GrammarSpec | None]:
    request = asked(**body)
    return request.grammar_field, request.grammar_spec


def test_each_field_becomes_a_grammar() -> None:
    of_schema = GrammarSpec(kind="json_schema", text=json.dumps(SCHEMA))
    assert spec_of(response_format=NAMED) == ("response_format", of_schema)
    assert spec_of(json_schema=SCHEMA) == spec_of(json_schema=json.dumps(SCHEMA)) == ("json_schema", of_schema)
    assert spec_of(response_format={"type": "json_object"}) == ("response_format", GrammarSpec(kind="json_object"))
    assert spec_of(regex="a+") == ("regex", GrammarSpec(kind="regex", text="a+"))
    assert spec_of(ebnf="root ::= [a]", ignore_eos=False) == ("ebnf", GrammarSpec(kind="ebnf", text="root ::= [a]"))
    assert spec_of(guided_json=SCHEMA) == ("guided_json", of_schema)
    assert spec_of(guided_regex="a+") == ("guided_regex", GrammarSpec(kind="regex", text="a+"))
    assert spec_of(guided_grammar="root ::= [a]")[1] == GrammarSpec(kind="ebnf", text="root ::= [a]")
    choice = GrammarSpec(kind="ebnf", text=r'root ::= ("yes" | "n\"o")')
    assert spec_of(guided_choice=["yes", 'n"o', "yes"]) == ("guided_choice", choice)
    for field, value, spec in (
        ("json", json.dumps(SCHEMA), of_schema),
        ("regex", "a+", GrammarSpec(kind="regex", text="a+")),
        ("choice", ["yes", 'n"o'], choice),
        ("grammar", "root ::= [a]", GrammarSpec(kind="ebnf", text="root ::= [a]")),
        ("json_object", True, GrammarSpec(kind="json_object")),
    ):
        outputs = {field: value, "disable_fallback": True, "disable_any_whitespace": False, "whitespace_pattern": None}
        assert spec_of(structured_outputs=outputs) == (f"structured_outputs.{field}", spec)
    for nothing in (spec_of(), spec_of(regex=None), spec_of(response_format={"type": "text"}, ignore_eos=True)):
        assert nothing == (None, None)


def test_the_grammar_reaches_the_parameters() -> None:
    request = asked(regex="a+")
    assert request.sampling_params(5, request.grammar_spec).grammar == GrammarSpec(kind="regex", text="a+")


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"regex": "a", "ebnf": "b"}, "ebnf", "regex and ebnf"),
        ({"response_format": NAMED, "json_schema": SCHEMA}, "json_schema", "one of response_format and json_schema"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos", "regex"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "one of guided_regex and guided_choice"),
        ({"regex": "a", "structured_outputs": {"choice": ["b"]}}, "structured_outputs.choice", "regex and structured"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "not regex and choice"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "one of json, regex"),
        ({"structured_outputs": {}, "regex": "a"}, "structured_outputs", "one of json, regex"),
        ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json", "JSON object"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn", "did you mean json?"),
        (
            {"structured_outputs": {"regex": "a", "structural_tag": "{}"}},
            "structured_outputs.structural_tag",
            "not sup",
        ),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
            "leave it out, or send null or false",
        ),
        ({"guided_choice": []}, "guided_choice", "at least 1"),
        ({"guided_choice": [""]}, "guided_choice[0]", "at least 1"),
        ({"guided_choice": ["a" * 40_000, "b" * 40_000]}, "guided_choice", "at most 65536"),
        ({"guided_json": "{"}, "guided_json", "not valid JSON"),
        ({"guided_whitespace_pattern": "x"}, "guided_whitespace_pattern", "no such field"),
        ({"regex": ""}, "regex", "at least 1"),
        ({"regex": "a" * 65_537}, "regex", "at most 65536"),
        ({"regex": "\ud800"}, "regex", "unicode"),
        ({"ebnf": 5}, "ebnf", "string"),
        ({"json_schema": "{"}, "json_schema", "not valid JSON"),
        ({"json_schema": '{"const": NaN}'}, "json_schema", "not valid JSON"),
        ({"json_schema": {"const": float("inf")}}, "json_schema", "not valid JSON"),
        ({"json_schema": "[" * 60_000}, "json_schema", "not valid JSON"),
        ({"json_schema": "[]"}, "json_schema", "JSON object"),
        ({"json_schema": []}, "json_schema", "object or string"),
        ({"json_schema": {"const": "a" * 70_000}}, "json_schema", "at most 65536"),
        ({"response_format": "json"}, "response_format", '"json_object"'),
        ({"response_format": {"type": "x" * 1000}}, "response_format", '"json_object"'),
        ({"response_format": {"type": "json_object", "a": 1}}, "response_format.a", "no such field"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "required",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x y", "schema": {}}}},
            "response_format.json_schema.name",
            "pattern",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema_": {}}}},
            "response_format.json_schema.schema_",
            "no such field",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_invalid_fields_are_refused_by_name(body: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        asked(**body)
    error = api_error_of_validation(refusal.value.errors())
    assert error.detail.param == param
    assert words in str(error)
    assert len(str(error)) < 300


def test_the_schema_names_the_fields() -> None:
    schema = CompletionRequest.model_json_schema()
    assert {"regex", "ebnf", "json_schema", "response_format", "guided_json", "structured_outputs"} <= set(
        schema["properties"]
    )
    assert "schema" in schema["$defs"]["NamedSchema"]["properties"]
    assert schema["properties"]["logit_bias"]["anyOf"][0]["maxProperties"] == 1024
