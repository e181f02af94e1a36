"""POST /v1/messages: Anthropic's blocks in, typed blocks and events out, its errors and its key; what is refused.

Anthropic's own client asks the same scripted server in ``test_anthropic_client``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from specmamba.core import OutputDelta
from specmamba.sampling_params import GrammarSpec
from specmamba.server.messages_api.message_format import StopFinder
from tests.api.test_api_reasoning import ThinkingTokenizer, conversations, prompts, serving_thoughts, write
from tests.api.test_api_tools import CALL, PARAMETERS
from tests.fake_engine import FakeEngine, FakeTokenizer, Served, serving

TOOL = {"name": "weather", "description": "d", "input_schema": PARAMETERS}
TEXT = "Hm.\n</think>\n\nYés."
USER = {"role": "user", "content": "u"}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving_thoughts() as served:
        yield served


@pytest.fixture(autouse=True)
def script(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    write(served, monkeypatch, TEXT)


def ask(served: Served, *messages: Any, **body: Any) -> httpx.Response:
    return served.http.post("/v1/messages", json={"messages": messages or [USER], "max_tokens": 200, **body})


def named_events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, which must be named as they say."""
    parts = [part.split("\n") for part in response.text.removesuffix("\n\n").split("\n\n")]
    found: list[dict[str, Any]] = [json.loads(data.removeprefix("data: ")) for _, data in parts]
    assert [name for name, _ in parts] == [f"event: {event['type']}" for event in found]
    return found


def refused(response: httpx.Response, status: int, kind: str = "invalid_request_error") -> str:
    """The message of an error, which must have Anthropic's shape."""
    assert response.status_code == status, response.text
    answer = response.json()
    assert (list(answer), answer["type"]) == (["type", "error"], "error")
    assert list(answer["error"]) == ["type", "message"]
    assert answer["error"]["type"] == kind
    return str(answer["error"]["message"])


def test_an_answer_with_reasoning(served: Served) -> None:
    answer = ask(served).json()
    assert answer["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "Yés."},
    ]
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "specmamba-demo")
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    cached = answer["usage"]["cache_read_input_tokens"]
    assert answer["usage"] == {
        "input_tokens": len("[]u<think>\n") - cached,
        "cache_read_input_tokens": cached,
        "output_tokens": len(TEXT.encode()),
        "output_tokens_details": {"thinking_tokens": len("Hm.\n</think>")},
    }


def test_the_sequence_of_events(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    write(served, monkeypatch, f"Hm.</think>Let me see.\n{CALL}")
    whole = ask(served, tools=[TOOL]).json()
    events = named_events(ask(served, tools=[TOOL], stream=True))
    names = [event["type"] for event in events]
    distinct = [name for name, before in zip(names, ["", *names], strict=False) if name != before]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert distinct == ["message_start", "ping", *block * 3, "message_delta", "message_stop"]
    assert events[0]["message"]["content"] == []
    pieces = [(event["index"], event["delta"]) for event in events if event["type"] == "content_block_delta"]
    texts = ["".join(next(iter(list(p.values())[1:])) for at, p in pieces if at == index) for index in range(3)]
    assert texts == ["Hm.", "Let me see.", '{"city": "Köln"}']
    started = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [block["type"] for block in started] == [block["type"] for block in whole["content"]]
    assert (started[2]["name"], started[2]["input"]) == ("weather", {})
    assert whole["content"][2] | {"id": ""} == {
        "type": "tool_use",
        "id": "",
        "name": "weather",
        "input": {"city": "Köln"},
    }
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert whole["stop_reason"] == "tool_use"
    assert events[-2]["usage"] == whole["usage"]


def test_a_call_that_is_cut_off_is_no_call(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    write(served, monkeypatch, f"</think>{CALL}")
    answer = ask(served, tools=[TOOL], max_tokens=66).json()
    assert answer["stop_reason"] == "max_tokens"
    assert [block["type"] for block in answer["content"]] == ["text"]
    assert answer["content"][0]["text"].startswith('{"city"')


UNWRITABLE = [r'"\ud800"', "1e999", "[" * 80 + "]" * 80, "[" * 300 + "]" * 300, "Ulm", "NaN"]


@pytest.mark.parametrize("value", UNWRITABLE, ids=lambda value: value[:9])
def test_arguments_that_no_block_can_have_are_text(served: Served, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    arguments = '{"city": ' + value + "}"
    call = '<tool_call>\n{"name": "weather", "arguments": ' + arguments + "}\n</tool_call>"
    write(served, monkeypatch, f"</think>{call}")
    answer = ask(served, tools=[TOOL], max_tokens=1000)
    assert answer.status_code == 200, answer.text
    (block,) = answer.json()["content"]
    assert block["type"] == "text"
    assert block["text"].startswith(arguments)
    events = named_events(ask(served, tools=[TOOL], stream=True, max_tokens=1000))
    assert events[2]["content_block"]["type"] == "tool_use"
    assert (events[-2]["delta"]["stop_reason"], events[-1]["type"]) == ("end_turn", "message_stop")


def test_blocks_become_messages(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = conversations(monkeypatch)
    turn = [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Köln"}},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "12°"}]},
        {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no", "is_error": True},
        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "b"},
    ]
    system = [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]
    messages = [USER, {"role": "assistant", "content": turn}, {"role": "user", "content": results}]
    assert ask(served, *messages, system=system, tools=[TOOL]).status_code == 200
    function = {"name": "weather", "arguments": {"city": "Köln"}}
    assert seen == [
        [
            {"role": "system", "content": "Be kind."},
            USER,
            {
                "role": "assistant",
                "content": "Let me see.",
                "reasoning_content": "Hm.",
                "tool_calls": [{"id": "toolu_1", "type": "function", "function": function}],
            },
            {"role": "tool", "content": "12°", "tool_call_id": "toolu_1"},
            {"role": "tool", "content": "Error: no", "tool_call_id": "toolu_2"},
            {"role": "user", "content": "a\nb"},
        ]
    ]


def test_tools_can_be_forced(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    write(served, monkeypatch, '</think>{"city": "Ulm"}')
    answer = ask(served, tools=[TOOL], tool_choice={"type": "tool", "name": "weather"}).json()
    assert answer["content"][0]["input"] == {"city": "Ulm"}
    assert answer["stop_reason"] == "tool_use"
    assert ask(served, tools=[TOOL], tool_choice={"type": "any"}).status_code == 200
    assert json.loads(served.engine.seen_params[-1].grammar.text)["anyOf"]
    assert ask(served, tools=[TOOL], tool_choice={"type": "none"}).json()["content"][0]["type"] == "text"


def test_thinking_and_form(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = prompts(served, monkeypatch)
    for thinking in ({"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}):
        assert ask(served, thinking=thinking).status_code == 200
    assert [prompt.removeprefix("[]u") for prompt in seen] == ["<think></think>", "<think>\n", "<think>\n"]
    schema = {"type": "object", "properties": {}}
    config = {"format": {"type": "json_schema", "schema": schema}}
    assert ask(served, output_config=config).status_code == 200
    grammar: GrammarSpec = served.engine.seen_params[-1].grammar
    assert (grammar.kind, json.loads(grammar.text), grammar.reasoning) == ("json_schema", schema, "open")


def test_thinking_is_disabled_where_nothing_turns_it_off(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ThinkingTokenizer, "template", "<think>")
    assert ask(served, thinking={"type": "disabled"}).status_code == 200
    message = refused(ask(served, output_config={"effort": "low"}), 400)
    assert message.startswith("'output_config.effort' is nothing")


def test_errors_have_the_names_of_messages(served: Served) -> None:
    switch = {"enable_thinking": True}
    message = refused(ask(served, thinking={"type": "disabled"}, chat_template_kwargs=switch), 400)
    assert message.startswith("thinking: ")
    schema = {"type": "array"}
    message = refused(ask(served, tools=[{"name": "a", "input_schema": schema}]), 400)
    assert message.startswith("tools[0].input_schema: must be the schema of an object")
    config = {"format": {"type": "json_schema", "schema": {}}}
    assert refused(ask(served, tools=[TOOL], output_config=config), 400).startswith("output_config.format: ")


def test_the_stop_sequence_is_named(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    write(served, monkeypatch, "</think>a STOP")
    body: dict[str, Any] = {"stop_sequences": ["no", "STOP"]}
    answer = ask(served, **body).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "STOP")
    assert served.engine.seen_params[-1].stop == ("no", "STOP")
    end = named_events(ask(served, stream=True, **body))[-2]["delta"]
    assert end == {"stop_reason": "stop_sequence", "stop_sequence": "STOP"}


def test_a_stop_sequence_is_found_in_the_tokens() -> None:
    def reason(text: str, *stops: str) -> str | None:
        finder = StopFinder(FakeTokenizer(), stops, {0})  # type: ignore[arg-type]
        ids = [*text.encode()]
        for token in ids[:-1]:
            assert finder.read(OutputDelta("r", (token,), "", 1, 0, 1)) is None
        return finder.read(OutputDelta("r", (ids[-1],), "", 1, 0, 1, "stop"))

    assert reason("abcd", "cd", "d") == "cd"
    assert reason("abcd", "x", "bcd") == "bcd"
    assert reason("abcd\0", "cd") is None  # it would have ended the answer before
    assert reason("abcd") is None


def test_tokens_are_counted(served: Served) -> None:
    response = served.http.post("/v1/messages/count_tokens", json={"messages": [USER], "system": "s"})
    assert response.json() == {"input_tokens": len("[]s[]u<think>\n")}
    body = {"messages": [USER], "max_tokens": 3}
    refused(served.http.post("/v1/messages/count_tokens", json=body), 400)


def test_a_failure_ends_the_stream() -> None:
    with serving(FakeEngine(text=TEXT, step_s=0.05, fail_at_step=3)) as served:
        events = named_events(ask(served, stream=True))
        assert (events[-1]["type"], events[-1]["error"]["type"]) == ("error", "api_error")


def test_either_header_carries_the_key() -> None:
    with serving(FakeEngine(), api_key=("first", "second")) as served:
        for headers in ({"x-api-key": "second"}, {"Authorization": "Bearer first"}):
            body = {"messages": [USER], "max_tokens": 3}
            assert served.http.post("/v1/messages", json=body, headers=headers).status_code == 200
            assert served.http.get("/v1/models", headers=headers).status_code == 200
        for headers in ({}, {"x-api-key": "third"}, {"x-api-key": ""}, {"Authorization": "Basic first"}):
            response = served.http.post("/v1/messages", json={}, headers=headers)
            refused(response, 401, "authentication_error")
        twice = [("x-api-key", "first"), ("x-api-key", "first")]
        assert served.http.get("/v1/models", headers=twice).status_code == 401


IMAGE = {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}
DOCUMENT = {"role": "user", "content": [{"type": "document", "source": {"type": "text", "data": "x"}}]}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": [IMAGE]}, "messages[0].content[0]: only blocks"),
    ({"messages": [DOCUMENT]}, "messages[0].content[0]: only blocks"),
    ({"messages": [USER, {"role": "assistant", "content": "so"}]}, "messages: the last message"),
    ({"messages": [{"role": "system", "content": "u"}]}, "messages[0].role"),
    (
        {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": []}, "messages"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "any"}}, "tool_choice: there are no tools"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"container": "c"}, "container"),
    ({"output_config": {"effort": "max"}}, "output_config.effort"),
    ({"system": [{"type": "image"}]}, "system[0]"),
    ({"n": 2}, "n: there is no such field"),
]


@pytest.mark.parametrize(("body", "words"), REFUSED, ids=lambda value: str(value)[:50])
def test_what_is_not_supported_is_refused_by_name(served: Served, body: dict[str, Any], words: str) -> None:
    response = served.http.post("/v1/messages", json={"messages": [USER], "max_tokens": 9, **body})
    assert refused(response, 400).startswith(words)


def test_other_errors_have_the_same_shape(served: Served) -> None:
    refused(ask(served, model="other"), 404, "not_found_error")
    refused(served.http.post("/v1/messages/batches", json={}), 404, "not_found_error")
    refused(served.http.post("/v1/messages", content="{", headers={"Content-Type": "application/json"}), 400)
    refused(served.http.post("/v1/messages", content="a", headers={"Content-Type": "text/plain"}), 415)
    with serving(FakeEngine()) as plain:
        assert refused(ask(plain, thinking={"type": "enabled", "budget_tokens": 1024}), 400).startswith("thinking")
        assert ask(plain, thinking={"type": "disabled"}).status_code == 200
