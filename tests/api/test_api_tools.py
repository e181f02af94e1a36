"""Tools over HTTP: what the chat template gets, calls in whole and in streamed answers, and refused requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import openai
import pytest

from specmamba.grammar import CompiledGrammar
from specmamba.sampling_params import GrammarSpec
from specmamba.server.api import structured
from specmamba.server.api.conversation import MAX_ARGUMENTS
from specmamba.templates.rendering import Conversation
from tests.fake_engine import FakeEngine, Served, serving
from tests.server.test_server import events, refused

HERMES = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}<tool_call>{% endif %}"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": PARAMETERS}}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
NAMED = {"type": "function", "function": {"name": "weather"}}
USER = {"role": "user", "content": "u"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


class NoCompiler:
    """Accepts every grammar; the scripted engine ignores grammars."""

    def __init__(self, *_: object) -> None:
        pass

    def compile(self, spec: GrammarSpec, caller: str | None = None) -> Future[CompiledGrammar]:
        future: Future[CompiledGrammar] = Future()
        future.set_result(CompiledGrammar(spec, None))
        return future

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch, serving(FakeEngine(context_length=4096)) as served:
        patch.setattr(structured, "GrammarCompiler", NoCompiler)
        yield served


@pytest.fixture(autouse=True)
def template_inputs(served: Served, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The messages, tools and variables of every call of the chat template."""
    seen: list[Any] = []

    def conversation(*given: Any) -> Conversation:
        seen.append(given)
        return Conversation("hi")

    monkeypatch.setattr(served.engine.tokenizer, "conversation", conversation)
    monkeypatch.setattr(served.engine.tokenizer, "chat_template", lambda with_tools=False: HERMES, raising=False)
    monkeypatch.setattr(served.engine, "text", f"Let me see.\n{CALL}".encode())
    return seen


def script(served: Served, text: str) -> None:
    served.engine.text = text.encode()


def joined(chunks: list[Any]) -> dict[str, Any]:
    """The message of one choice, joined from its chunks, without ids, and its finish reason."""
    message: dict[str, Any] = {"content": None, "tool_calls": []}
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        if delta.get("content") is not None:
            message["content"] = (message["content"] or "") + delta["content"]
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(message["tool_calls"])
                assert call["id"].startswith("call_")
                assert call["type"] == "function"
                assert call["function"]["arguments"] == ""
                message["tool_calls"].append(dict(call["function"]))
            else:
                assert list(call["function"]) == ["arguments"]
                message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return message | {"finish_reason": chunks[-1]["choices"][0]["finish_reason"]}


def answers(served: Served, **body: Any) -> dict[str, Any]:
    """An answer, which must be the same whole and streamed."""
    choice = served.chat(USER, **body).json()["choices"][0]
    calls = choice["message"].get("tool_calls", [])
    assert len({call["id"] for call in calls}) == len(calls)
    functions = [call["function"] for call in calls]
    whole = {"content": choice["message"]["content"], "tool_calls": functions, "finish_reason": choice["finish_reason"]}
    streamed = joined(events(served.chat(USER, stream=True, **body)))
    assert streamed | {"content": streamed["content"] or None} == whole | {"content": whole["content"] or None}
    return whole


def test_the_model_chooses(served: Served, template_inputs: list[Any]) -> None:
    answer = answers(served, tools=TOOLS)
    arguments = '{"city": "Köln"}'
    assert answer == {
        "content": "Let me see.",
        "tool_calls": [{"name": "weather", "arguments": arguments}],
        "finish_reason": "tool_calls",
    }
    no_parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    assert [tool["function"] for tool in template_inputs[0][1]] == [
        {"name": "weather", "description": "d", "parameters": PARAMETERS},
        {"name": "now", "description": "", "parameters": no_parameters},
    ]
    assert served.engine.seen_params[-1].grammar is None


def test_arguments_are_streamed_as_they_come(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.engine, "step_s", 0.02)  # so that the pieces are not merged
    chunks = events(served.chat(USER, tools=TOOLS, stream=True))
    calls = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert [call["function"].get("name") for call in calls] == ["weather"] + [None] * (len(calls) - 1)
    assert len(calls) > 5


def test_a_call_alone_has_null_for_content(served: Served) -> None:
    script(served, CALL)
    message = served.chat(USER, tools=TOOLS).json()["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"][0]["type"] == "function"


def test_several_calls_or_one_at_most(served: Served) -> None:
    script(served, f'{CALL}\n<tool_call>{{"name": "now", "arguments": {{}}}}</tool_call>')
    assert [call["name"] for call in answers(served, tools=TOOLS)["tool_calls"]] == ["weather", "now"]
    assert [call["name"] for call in answers(served, tools=TOOLS, parallel_tool_calls=False)["tool_calls"]] == [
        "weather"
    ]


@pytest.mark.parametrize(
    "text", ["All fine.", CALL[:30], CALL.replace("weather", "rm"), "<tool_call>{oops}</tool_call>"]
)
def test_text_that_is_not_a_call_is_content(served: Served, text: str) -> None:
    script(served, text)
    assert answers(served, tools=TOOLS) == {"content": text, "tool_calls": [], "finish_reason": "stop"}


def test_no_tools_means_no_parsing(served: Served, template_inputs: list[Any]) -> None:
    script(served, CALL)
    assert answers(served, tools=TOOLS, tool_choice="none")["content"] == CALL
    assert answers(served)["content"] == CALL
    assert [tools for _, tools, *_ in template_inputs] == [None] * 4


def test_a_named_tool_is_forced(served: Served, template_inputs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    script(served, '{"city": "Köln"}')
    answer = answers(served, tools=TOOLS, tool_choice=NAMED)
    call = {"name": "weather", "arguments": '{"city": "Köln"}'}
    assert answer == {"content": None, "tool_calls": [call], "finish_reason": "stop"}
    grammar = served.engine.seen_params[-1].grammar
    assert (grammar.kind, json.loads(grammar.text)) == ("json_schema", PARAMETERS)
    assert len(template_inputs[0][1]) == 2
    monkeypatch.setattr(served.engine, "step_s", 0.05)  # nine steps: they cannot all be merged
    chunks = events(served.chat(USER, tools=TOOLS, tool_choice=NAMED, stream=True))
    role, *deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert role == {"role": "assistant"}
    first, *pieces = [delta["tool_calls"][0]["function"] for delta in deltas if "tool_calls" in delta]
    assert first == {"name": "weather", "arguments": ""}
    assert len(pieces) > 1
    assert "".join(piece["arguments"] for piece in pieces) == call["arguments"]


def test_some_tool_is_required(served: Served) -> None:
    script(served, '{"name": "weather", "arguments": {"city": "Köln}"}}')
    answer = answers(served, tools=TOOLS, tool_choice="required", parallel_tool_calls=True)
    call = {"name": "weather", "arguments": '{"city": "Köln}"}'}
    assert answer == {"content": None, "tool_calls": [call], "finish_reason": "tool_calls"}
    schema = json.loads(served.engine.seen_params[-1].grammar.text)
    assert [branch["properties"]["name"] for branch in schema["anyOf"]] == [{"const": "weather"}, {"const": "now"}]


def test_a_forced_call_that_is_cut_off(served: Served) -> None:
    script(served, '{"city": "Köln"}')
    answer = answers(served, tools=TOOLS, tool_choice=NAMED, max_tokens=9)
    call = {"name": "weather", "arguments": '{"city": '}
    assert answer == {"content": None, "tool_calls": [call], "finish_reason": "length"}


def test_references_of_schemas_move_with_them(served: Served) -> None:
    place = {"type": "object", "properties": {"inner": {"$ref": "#/$defs/place"}, "all": {"$ref": "#"}}}
    parameters = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "properties": {"at": {"$ref": "#/$defs/place"}, "$ref": {"$ref": "#/properties/at"}},
        "$defs": {"place": place},
        "default": {"$ref": "#/stays"},
    }
    tool = {"type": "function", "function": {"name": "go", "parameters": parameters}}
    assert served.chat(USER, tools=[NOW, tool], tool_choice="required").status_code == 200
    schema = json.loads(served.engine.seen_params[-1].grammar.text)
    assert schema["anyOf"][1]["properties"]["arguments"] == {"$ref": "#/$defs/1"}
    assert schema["$defs"]["1"] == {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/1.place"}, "$ref": {"$ref": "#/$defs/1/properties/at"}},
        "default": {"$ref": "#/stays"},
    }
    moved = {"inner": {"$ref": "#/$defs/1.place"}, "all": {"$ref": "#/$defs/1"}}
    assert schema["$defs"]["1.place"] == {"type": "object", "properties": moved}


def test_calls_and_their_answers_are_sent_back(served: Served, template_inputs: list[Any]) -> None:
    arguments = {"city": "Köln" * 20_000}
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": json.dumps(arguments)}}
    earlier = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "reasoning_content": "hm"}
    answer = {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "12°"}]}
    assert served.chat(USER, earlier, answer, {**earlier, "tool_calls": [call | {"index": 0}]}).status_code == 200
    for_template = {**call, "function": {"name": "weather", "arguments": arguments}}
    turn = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [for_template]}
    assert template_inputs[0][0] == [USER, turn, {"role": "tool", "content": "12°", "tool_call_id": "call_1"}, turn]


def test_through_the_openai_client(served: Served) -> None:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        body: dict[str, Any] = {"model": "specmamba-demo", "messages": [USER], "tools": TOOLS}
        message = client.chat.completions.create(**body).choices[0].message
        assert message.tool_calls is not None
        assert [call.function.name for call in message.tool_calls if call.type == "function"] == ["weather"]
        again = client.chat.completions.create(**body | {"messages": [USER, message.model_dump(exclude_none=True)]})
        assert again.choices[0].finish_reason == "tool_calls"
        with client.chat.completions.stream(**body) as stream:
            final = stream.get_final_completion().choices[0].message
        assert final.content == message.content
        assert final.tool_calls is not None
        assert final.tool_calls[0].function.arguments == message.tool_calls[0].function.arguments


def call_with(arguments: str) -> dict[str, object]:
    return {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}


def tool(**function: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": "f", **function}}


LONG = {"description": "x" * 9000}
DEEP: dict[str, Any] = {}
for _ in range(100):
    DEEP = {"properties": {"a": DEEP}}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": {}}, "tools"),
    ({"tools": [1]}, "tools[0]"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [tool(name="a b")]}, "tools[0].function.name"),
    ({"tools": [tool(name="x" * 65)]}, "tools[0].function.name"),
    ({"tools": [tool(extra=1)]}, "tools[0].function.extra"),
    ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
    ({"tools": [tool(parameters={"type": "array"})]}, "tools[0].function.parameters"),
    ({"tools": [tool(parameters=DEEP)]}, "tools[0].function.parameters"),
    ({"tools": [tool(parameters={"description": "x" * 70_000})]}, "tools[0].function.parameters"),
    ({"tools": [tool(strict=True)]}, "tools[0].function.strict"),
    ({"tools": [NOW, NOW]}, "tools"),
    ({"tools": [tool(name=f"f{i}") for i in range(129)]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": NAMED}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": NAMED}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": 1}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
    ({"tools": [NOW], "response_format": {"type": "json_object"}}, "response_format"),
    ({"tools": [NOW], "tool_choice": "required", "regex": "a+"}, "regex"),
    ({"tools": [tool(parameters={"properties": {"a": {"$ref": "http://x"}}})], "tool_choice": "required"}, "tools"),
    ({"tools": [tool(name=f"f{i}", parameters=LONG) for i in range(8)], "tool_choice": "required"}, "tools"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param"), REFUSED, ids=lambda value: str(value)[:60])
def test_errors_name_the_invalid_tool(served: Served, body: dict[str, Any], param: str) -> None:
    response = served.chat(USER, **body)
    if param == "tool_choice":
        assert response.json()["error"]["param"].startswith(param)
        param = response.json()["error"]["param"]
    refused(response, 400, param)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "x"}, "tool_call_id"),
        ({"role": "user", "content": "x", "tool_call_id": "a"}, "tool_call_id"),
        ({"role": "user", "content": "x", "tool_calls": [{}]}, "tool_calls"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "content"),
        ({"role": "assistant", "tool_calls": [{"id": "a", "type": "function"}]}, "tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": [call_with("[1]")]}, "tool_calls[0].function.arguments"),
        ({"role": "assistant", "tool_calls": [call_with("{")]}, "tool_calls[0].function.arguments"),
        ({"role": "assistant", "tool_calls": [call_with(json.dumps(DEEP))]}, "tool_calls[0].function.arguments"),
        ({"role": "assistant", "tool_calls": [call_with("[" * 100_000)]}, "tool_calls[0].function.arguments"),
    ],
)  # fmt: skip
def test_errors_name_the_invalid_message_about_tools(served: Served, message: dict[str, Any], param: str) -> None:
    refused(served.chat(message), 400, f"messages[0].{param}")


@pytest.mark.parametrize("template", ["{{ messages }}", "{{ tools }}", None])
def test_a_model_without_tools_cannot_choose(
    served: Served, monkeypatch: pytest.MonkeyPatch, template_inputs: list[Any], template: str | None
) -> None:
    monkeypatch.setattr(served.engine.tokenizer, "chat_template", lambda with_tools=False: template)
    assert "tool_choice" in refused(served.chat(USER, tools=TOOLS), 400, "tools", "tools_not_supported")
    script(served, '{"city": "Köln"}')
    assert answers(served, tools=TOOLS, tool_choice=NAMED)["tool_calls"]
    assert (template_inputs[0][1] is None) == (template != "{{ tools }}")


def test_the_parser_can_be_named_or_switched_off(template_inputs: list[Any]) -> None:
    text = '<TOOLCALL>[{"name": "now"}]</TOOLCALL>'
    for parser, status in (("nemotron", 200), ("none", 400)):
        engine = FakeEngine(text=text)
        engine.tokenizer.chat_template = lambda with_tools=False: HERMES  # type: ignore[method-assign]
        with serving(engine, tool_call_parser=parser) as served:
            response = served.chat(USER, tools=TOOLS)
            assert response.status_code == status
            if status == 200:
                assert response.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "now"


def test_arguments_of_earlier_calls_are_limited_and_parsed_once(
    served: Served, template_inputs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def turn(length: int) -> dict[str, Any]:
        function = {"name": "now", "arguments": json.dumps({"a": "x" * (length - len('{"a": ""}'))})}
        return {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}

    num_read = 0

    def counted(text: str) -> Any:
        nonlocal num_read
        num_read += 1
        return json.loads(text)

    monkeypatch.setattr("specmamba.server.tools.definitions.read_json", counted)
    half = MAX_ARGUMENTS // 2
    assert served.chat(turn(half), turn(half)).status_code == 200
    assert num_read == 2
    assert [message["tool_calls"][0]["function"]["name"] for message in template_inputs[0][0]] == ["now", "now"]
    assert len(template_inputs[0][0][0]["tool_calls"][0]["function"]["arguments"]["a"]) > half - 20
    refused(served.chat(turn(half), turn(half + 1)), 400, "messages", "too_long")
    assert num_read == 2
