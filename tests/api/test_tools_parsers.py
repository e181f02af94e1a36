"""Tool calls are parsed the same for every split of the text, and no text of a model is an error."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specmamba.server.tools.choice import Family, NamedCall, RequiredCall, family_of, new_parser
from specmamba.server.tools.formats import JsonScan, typed_value
from specmamba.server.tools.parsing import AnswerParser, CallArguments, Event, WholeAnswer, WholeCall, whole_answer

PROPERTIES: dict[str, Any] = {
    "city": {"type": "string"}, "days": {"type": "integer"}, "metric": {"type": "boolean"}, "tags": {"type": "array"},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "place": {"$ref": "#/$defs/place"},
    "unit": {"enum": ["C", "F"]}, "level": {"enum": [1, 2]}, "loop": {"$ref": "#/$defs/loop"},
}  # fmt: skip
DEFS = {"place": {"type": "object"}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": ["number", "null"]}]}}
SCHEMAS: dict[str, dict[str, Any]] = {"weather": {"properties": PROPERTIES, "$defs": DEFS}, "now": {}}

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm \\"}</tool_call>"}}\n</tool_call>'
XML = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nUlm\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>"
    "\n</tool_call>"
)
WEATHER = WholeCall("weather", '{"city": "Ulm \\"}</tool_call>"}')
NOW = WholeCall("now", "{}")
IN_ULM = WholeCall("weather", '{"city": "Ulm", "days": 3}')
SHORT_NOW = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'

# family, what the model wrote, what the answer says beside its calls (None: all that was written), its calls
CASES: list[tuple[Family, str, str | None, list[WholeCall]]] = [
    ("hermes", "no call at all \n", None, []),
    ("hermes", "", None, []),
    ("hermes", " \n", None, []),
    ("hermes", CALL, "", [WEATHER]),
    ("hermes", f" \n{CALL}\n{SHORT_NOW}\n", "", [WEATHER, NOW]),
    ("hermes", f"Let me see.\n\n{CALL}", "Let me see.", [WEATHER]),
    ("hermes", f"a {SHORT_NOW} b {SHORT_NOW}\nc ", "a b\nc ", [NOW, NOW]),
    ("hermes", f"{SHORT_NOW} b", "b", [NOW]),
    ("hermes", f"a{' ' * 300}{SHORT_NOW}", f"a{' ' * 44}", [NOW]),
    ("hermes", f"a{SHORT_NOW[:-12]}{' ' * 300}</tool_call>", f"a{' ' * 300}</tool_call>", [NOW]),
    ("hermes", f"{SHORT_NOW}{' ' * 300}b{' ' * 300}", f"b{' ' * 300}", [NOW]),
    ("hermes", SHORT_NOW.removesuffix("</tool_call>"), "", [NOW]),
    ("hermes", SHORT_NOW.removesuffix("call>"), "", [NOW]),
    ("hermes", SHORT_NOW.removesuffix("}</tool_call>"), "", [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "b', "", [WholeCall("now", '{"a": "b')]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "now"}', "", [WholeCall("now", '{"a": 1}')]),
    ("hermes", f'<tool_call>{{{" " * 1100}"name": "now", "arguments": {{}}}}', "", [NOW]),
    ("hermes", '<tool_call>{"arguments": {}, "name": "now"', None, []),
    ("hermes", "x < y <tool_ <<tool_call", None, []),
    ("hermes", "<tool_call>  no JSON</tool_call> ", None, []),
    ("hermes", "a <tool_call>{broken}</tool_call> b", None, []),
    ("hermes", f"<tool_call><tool_call>{SHORT_NOW}", "<tool_call><tool_call>", [NOW]),
    ("hermes", '<tool_call>{"name": "rm", "arguments": {}}</tool_call>', None, []),
    ("hermes", '<tool_call>{"name": "now", "arguments": [1]}', None, []),
    ("hermes", '<tool_call>{"name": ["now"]}', None, []),
    ("hermes", '<tool_call>["now"]', None, []),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": NaN}}', "", [WholeCall("now", '{"a": NaN}')]),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}', "", [WholeCall("now", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "é"}}', "", [WholeCall("now", '{"a": "é"}')]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "\\ud800"}}', "", [WholeCall("now", '{"a": "\\ud800"}')]),
    ("nemotron", f"Sure.<TOOLCALL>[{SHORT_NOW[11:-12]}, {CALL[12:-13]}]</TOOLCALL>", "Sure.", [NOW, WEATHER]),
    ("nemotron", "<TOOLCALL>[]</TOOLCALL>", None, []),
    ("nemotron", '<TOOLCALL>[{"name": "now"}, {"name": "rm"}]', '{"name": "rm"}]', [NOW]),
    ("nemotron", '<TOOLCALL>[{"name": "rm"}, {"name": "now"}]', None, []),
    ("nemotron", '<TOOLCALL>[1, {"name": "now"}]</TOOLCALL> x', None, []),
    ("qwen3-xml", XML, "", [IN_ULM]),
    ("qwen3-xml", f"Hm.\n{XML}\n{XML[:-13]} bye", "Hm. bye", [IN_ULM, IN_ULM]),
    ("qwen3-xml", "<tool_call><function=now></function></tool_call>", "", [NOW]),
    (
        "qwen3-xml",
        "<tool_call><function=now><parameter=q>\n\n</tool_call> <x>\n</parameter></function>",
        "",
        [WholeCall("now", '{"q": "\\n</tool_call> <x>"}')],
    ),
    ("qwen3-xml", "<tool_call><function=rm></function></tool_call>", None, []),
    ("qwen3-xml", "<tool_call><function=now>oops</function>", None, []),
    ("qwen3-xml", "<tool_call><function=" + "x" * 300, None, []),
    ("qwen3-xml", XML[:60], "", [WholeCall("weather", '{"city": "Ulm')]),
    ("qwen3-xml", XML[:40], None, []),
    (
        "qwen3-xml",
        '<tool_call><function=now><parameter=q>a"\\\n</parameter>oops</function>',
        "oops</function>",
        [WholeCall("now", '{"q": "a\\"\\\\"}')],
    ),
    ("qwen3-xml", f"<tool_call>{XML}", "<tool_call>", [IN_ULM]),
]


def read(parser: AnswerParser, pieces: Sequence[str]) -> WholeAnswer:
    events: list[Event] = []
    for piece in pieces:
        events += parser.push(piece)
    return whole_answer(events + parser.finish())


@pytest.mark.parametrize(("family", "text", "content", "calls"), CASES)
def test_calls_whole_and_split_at_every_character(
    family: Family, text: str, content: str | None, calls: list[WholeCall]
) -> None:
    expected = WholeAnswer(text if content is None else content, tuple(calls))
    assert read(new_parser(family, SCHEMAS, 128), [text]) == expected
    assert read(new_parser(family, SCHEMAS, 128), list(text)) == expected
    for cut in range(len(text)):
        assert read(new_parser(family, SCHEMAS, 128), [text[:cut], text[cut:]]) == expected


PIECES = [
    "<tool_call>", "</tool_call>", "<TOOLCALL>", "</TOOLCALL>", "<function=now>", "<function=weather>", "</function>",
    "<parameter=days>", "</parameter>", '{"name": "now", "arguments": ', '{"name": "weather"', "{", "}", "[", "]", '"',
    "\\", ",", " ", " " * 200, "\n", "<", "x", "é", "1", "</tool", "<tool_",
]  # fmt: skip


@settings(max_examples=250, deadline=None)
@given(
    family=st.sampled_from(["hermes", "qwen3-xml", "nemotron"]),
    pieces=st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=30),
    cuts=st.lists(st.integers(0, 500), max_size=10),
)
@example(
    "hermes", ["<tool_call>", "<tool_call>", '{"name": "now", "arguments": ', "{", "}", "}", "</tool", " "], [3, 12]
)
def test_any_text_is_parsed_the_same_in_any_pieces(family: Family, pieces: list[str], cuts: list[int]) -> None:
    text = "".join(pieces)
    whole = read(new_parser(family, SCHEMAS, 128), [text])
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    split = [text[a:b] for a, b in pairwise(bounds)]
    assert read(new_parser(family, SCHEMAS, 128), split) == whole
    assert read(new_parser(family, SCHEMAS, 128), list(text)) == whole
    if not whole.calls:
        assert whole.content == text
    for call in whole.calls:
        assert call.name in SCHEMAS
        assert call.arguments.startswith("{")


def test_text_before_a_call_is_not_held_back() -> None:
    parser = new_parser("hermes", SCHEMAS, 128)
    assert whole_answer(parser.push("Let me ask. <")).content == "Let me ask."
    assert whole_answer(parser.push("b> <tool_c")).content == " <b>"
    assert whole_answer(parser.push("all>")) == WholeAnswer("", ())
    assert whole_answer(parser.push('{"name": "now"}')) == WholeAnswer("", (NOW,))


STREAMED = [
    ("hermes", CALL),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": [1, {"b": "}"}]}}'),
    ("nemotron", f"<TOOLCALL>[{CALL[12:-13]}]</TOOLCALL>"),
    ("qwen3-xml", XML),
]


@pytest.mark.parametrize(("family", "text"), STREAMED)
def test_arguments_are_given_as_they_come(family: Family, text: str) -> None:
    parser = new_parser(family, SCHEMAS, 128)
    events = [parser.push(character) for character in text]
    pieces = [event.text for found in events for event in found if isinstance(event, CallArguments)]
    assert len(pieces) > 8
    assert all(len(piece) <= 12 for piece in pieces)  # a key, or a number
    (whole,) = whole_answer([event for found in events for event in found]).calls
    assert "".join(pieces) == whole.arguments


def test_one_call_at_most() -> None:
    assert read(new_parser("hermes", SCHEMAS, 1), [f"{CALL}{SHORT_NOW} ."]) == WholeAnswer(".", (WEATHER,))


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("city", "3", "3"), ("city", "null", "null"), ("days", " 3 ", 3), ("days", "three", "three"),
        ("metric", "True", True), ("metric", "false", False), ("tags", '["a", 1]', ["a", 1]), ("note", "null", None),
        ("note", "hi", "hi"), ("place", '{"a": {}}', {"a": {}}), ("unit", "C", "C"), ("level", "2", 2),
        ("loop", "1.5", 1.5), ("loop", "None", None), ("other", "7", "7"), ("days", "NaN", "NaN"),
        ("tags", "[" * 100_000, "[" * 100_000),
    ],
)  # fmt: skip
def test_values_without_quotes_are_typed_by_the_schema(key: str, text: str, value: object) -> None:
    assert typed_value(text, key, SCHEMAS["weather"]) == value


@settings(max_examples=60, deadline=None)
@given(
    value=st.dictionaries(st.text(max_size=5), st.recursive(st.text() | st.none(), st.lists, max_leaves=5), max_size=4),
    size=st.integers(1, 7),
)
def test_the_end_of_json_is_found(value: dict[str, object], size: int) -> None:
    text = json.dumps(value, ensure_ascii=False)
    scan, at = JsonScan(), 0
    for start in range(0, len(text), size):
        found = scan.push((text + '}"]')[start : start + size])
        if found is not None:
            at = start + found
            break
    assert at == len(text)


def test_a_named_call_consists_of_arguments() -> None:
    parser = NamedCall("now")
    assert whole_answer(parser.push("")).calls == (WholeCall("now", ""),)
    assert [event.__class__.__name__ for event in parser.push('{"a"')] == ["CallArguments"]
    assert read(NamedCall("now"), ['{"a"', ": 1}"]).calls == (WholeCall("now", '{"a": 1}'),)
    assert read(NamedCall("now"), []).calls == (WholeCall("now", ""),)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('{"name": "now", "arguments": {"a": "}"}}', "", [WholeCall("now", '{"a": "}"}')]),
        (' {\n"name":"now","arguments":{} }\n', "", [NOW]),
        ('{"name": "now", "arguments": {"a": [1,', "", [WholeCall("now", '{"a": [1,')]),
        ('{"name": "no', '{"name": "no', []),
        ("", "", []),
    ],
)
def test_a_required_call_is_split_into_name_and_arguments(text: str, content: str, calls: list[WholeCall]) -> None:
    for cut in range(len(text) + 1):
        assert read(RequiredCall(), [text[:cut], text[cut:]]) == WholeAnswer(content, tuple(calls))
    assert read(RequiredCall(), list(text)) == WholeAnswer(content, tuple(calls))


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("{% if tools %}<tool_call>{}</tool_call>{% endif %}", "hermes"),
        ("{% if tools %}<tool_call><function=x><parameter=y>{% endif %}", "qwen3-xml"),
        ("{% if tools %}<TOOLCALL>{% endif %}", "nemotron"),
        ("{% if tools %}{{ tools }}{% endif %}", None),
        ("<tool_call>", None),
    ],
)
def test_the_family_is_found_from_the_template(template: str, family: str | None) -> None:
    assert family_of(template) == family
