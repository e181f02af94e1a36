"""POST /v1/responses: items in, typed items and events out, through OpenAI's own client; what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel
from pydantic_core import PydanticSerializationError

from specmamba.sampling_params import GrammarSpec
from specmamba.server.api.parsed_choice import ChatOptions
from specmamba.server.http.error_answers import ApiError
from specmamba.server.responses_api.response_fields import FunctionTool, ResponseRequest
from specmamba.server.responses_api.response_format import ResponseFormat
from specmamba.server.tools.choice import ToolPlan
from tests.api.test_api_reasoning import ThinkingTokenizer, conversations, prompts, serving_thoughts, write
from tests.api.test_api_tools import CALL, PARAMETERS
from tests.fake_engine import FakeEngine, FakeTokenizer, Served, serving
from tests.server.test_server import refused

TOOL = {"type": "function", "name": "weather", "description": "d", "parameters": PARAMETERS, "strict": False}
TEXT = "Hm.\n</think>\n\nYés."


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving_thoughts() as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(autouse=True)
def script(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    write(served, monkeypatch, TEXT)


def ask(served: Served, given: Any = "u", **body: Any) -> httpx.Response:
    return served.http.post("/v1/responses", json={"input": given, **body})


def named_events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, which must be numbered, and named as they say."""
    found = []
    for number, part in enumerate(response.text.removesuffix("\n\n").split("\n\n")):
        name, data = part.split("\n")
        event: dict[str, Any] = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        found.append(event)
    return found


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        fields = {key: without_ids(one) for key, one in value.items()}
        return {key: one for key, one in fields.items() if key not in ("id", "call_id", "created_at")}
    return [without_ids(one) for one in value] if isinstance(value, list) else value


def test_an_answer_with_reasoning(client: openai.OpenAI) -> None:
    response = client.responses.create(model="specmamba-demo", input="u", max_output_tokens=99, metadata={"a": "b"})
    assert response.output_text == "Yés."
    assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)
    assert [item.type for item in response.output] == ["reasoning", "message"]
    reasoning = response.output[0]
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert reasoning.content[0].text == "Hm."
    assert response.usage is not None
    assert response.usage.output_tokens == len(TEXT.encode())
    assert response.usage.output_tokens_details.reasoning_tokens == len("Hm.\n</think>")
    assert response.metadata == {"a": "b"}
    assert response.model_extra == {"store": False}


def test_the_sequence_of_events(served: Served) -> None:
    events = named_events(ask(served, stream=True))
    names = [event["type"].removeprefix("response.") for event in events]
    distinct = [name for name, before in zip(names, ["", *names], strict=False) if name != before]
    assert distinct == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "completed",
    ]  # fmt: skip
    texts = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(texts) == "Yés."
    assert events[0]["response"]["status"] == "in_progress"
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    assert without_ids(events[-1]["response"]) == without_ids(ask(served).json())
    assert {event["item_id"] for event in events if "item_id" in event} == {item["id"] for item in done}


def test_a_stream_through_the_client(client: openai.OpenAI) -> None:
    with client.responses.stream(model="specmamba-demo", input="u") as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(texts) == final.output_text == "Yés."


def test_an_answer_that_is_cut_off(served: Served) -> None:
    answer = ask(served, max_output_tokens=2).json()
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in answer["output"]] == ["incomplete"]
    last = named_events(ask(served, max_output_tokens=2, stream=True))[-1]
    assert last["type"] == "response.incomplete"
    assert without_ids(last["response"]) == without_ids(answer)


def test_a_call_and_its_output(served: Served, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    write(served, monkeypatch, f"Hm.</think>Let me see.\n{CALL}")
    tools: Any = [TOOL]
    response = client.responses.create(model="specmamba-demo", input="u", tools=tools)
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    call = response.output[-1]
    assert call.type == "function_call"
    assert (call.name, call.arguments) == ("weather", '{"city": "Köln"}')
    seen = conversations(monkeypatch)
    history: Any = [{"role": "user", "content": "u"}, *response.output]
    history.append({"type": "function_call_output", "call_id": call.call_id, "output": "12°"})
    client.responses.create(model="specmamba-demo", input=history, tools=tools, instructions="Be kind.")
    function = {"name": "weather", "arguments": {"city": "Köln"}}
    assert seen == [
        [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "u"},
            {
                "role": "assistant",
                "content": "Let me see.",
                "reasoning_content": "Hm.",
                "tool_calls": [{"id": call.call_id, "type": "function", "function": function}],
            },
            {"role": "tool", "content": "12°", "tool_call_id": call.call_id},
        ]
    ]


def test_arguments_are_streamed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    write(served, monkeypatch, f"</think>{CALL}")
    events = named_events(ask(served, tools=[TOOL], stream=True))
    arguments = [event for event in events if "function_call_arguments" in event["type"]]
    assert "".join(event["delta"] for event in arguments[:-1]) == arguments[-1]["arguments"] == '{"city": "Köln"}'
    assert events[-1]["response"]["output"][0]["call_id"].startswith("call_")


def test_a_named_function_is_forced(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    write(served, monkeypatch, '</think>{"city": "Ulm"}')
    answer = ask(served, tools=[TOOL], tool_choice={"type": "function", "name": "weather"}).json()
    assert answer["output"][0]["arguments"] == '{"city": "Ulm"}'
    assert answer["tool_choice"] == {"type": "function", "name": "weather"}
    assert served.engine.seen_params[-1].grammar.reasoning == "open"


class Verdict(BaseModel):
    """What the model is made to say."""

    is_ok: bool


def test_a_parsed_answer(served: Served, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    write(served, monkeypatch, '</think>{"is_ok": true}')
    response = client.responses.parse(model="specmamba-demo", input="u", text_format=Verdict)
    assert response.output_parsed == Verdict(is_ok=True)
    grammar: GrammarSpec = served.engine.seen_params[-1].grammar
    assert (grammar.kind, json.loads(grammar.text)["required"]) == ("json_schema", ["is_ok"])


def test_instructions_join_a_system_message(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = prompts(served, monkeypatch)
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "b"}]},
        {"type": "message", "role": "user", "content": "c"},
    ]
    assert ask(served, items, instructions="a", reasoning={"effort": "none"}).status_code == 200
    assert seen == ["[]a\n\nb[]c<think></think>"]


def test_a_failure_ends_the_stream() -> None:
    engine = FakeEngine(text=TEXT, step_s=0.05, fail_at_step=3)
    with serving(engine) as served:
        events = named_events(ask(served, stream=True))
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["status"] == "failed"
    assert events[-1]["response"]["error"]["code"] == "engine_error"
    assert events[-1]["response"]["output"][0]["status"] == "incomplete"


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"properties": value}
    return value


HALF = "\ud800"
FUNCTION = {"type": "function", "name": "a"}
SCHEMA = {"type": "json_schema", "name": "a"}
REPEATED: list[tuple[dict[str, Any], str]] = [
    ({"instructions": HALF}, "instructions"),
    ({"metadata": {"a": HALF}}, "metadata"),
    ({"metadata": {HALF: "a"}}, "metadata"),
    ({"metadata": nested(260)}, "metadata"),
    ({"metadata": {"a": float("nan")}}, "metadata"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"metadata": {str(index): "a" for index in range(17)}}, "metadata"),
    ({"metadata": {"a" * 65: "a"}}, "metadata"),
    ({"metadata": {"a": "a" * 513}}, "metadata"),
    ({"tools": [FUNCTION | {"description": HALF}]}, "tools[0].description"),
    ({"tools": [FUNCTION | {"parameters": {"title": HALF}}]}, "tools[0].parameters"),
    ({"tools": [FUNCTION | {"parameters": {"properties": {HALF: {}}}}]}, "tools[0].parameters"),
    ({"tools": [FUNCTION | {"parameters": nested(64)}]}, "tools[0].parameters"),
    ({"text": {"format": SCHEMA | {"schema": {}, "description": HALF}}}, "text.format.description"),
    ({"text": {"format": SCHEMA | {"schema": {"title": HALF}}}}, "text.format.schema"),
    ({"text": {"format": SCHEMA | {"schema": nested(260)}}}, "text.format.schema"),
    ({"text": {"format": SCHEMA | {"schema": {"default": float("inf")}}}}, "text.format.schema"),
]


@pytest.mark.parametrize(("body", "param"), REPEATED, ids=lambda value: ascii(value)[:50])
@pytest.mark.parametrize("stream", [False, True])
def test_what_no_answer_can_repeat_is_refused(served: Served, body: dict[str, Any], param: str, stream: bool) -> None:
    content = json.dumps({"input": "u", "stream": stream, **body})
    headers = {"Content-Type": "application/json"}
    refused(served.http.post("/v1/responses", content=content, headers=headers), 400, param)


def test_the_largest_metadata_is_given_back(served: Served) -> None:
    metadata = {f"{index:064}": "ü" * 512 for index in range(16)}
    assert ask(served, metadata=metadata).json()["metadata"] == metadata


def test_a_failure_can_always_be_written() -> None:
    body = ResponseRequest.model_construct(
        input="u", instructions=HALF, metadata={"a": HALF}, tools=[FunctionTool.model_construct(description=HALF)]
    )
    options = ChatOptions(ToolPlan(), "none", None, None)
    answer_format = ResponseFormat("resp_1", "m", FakeTokenizer(), options, body)  # type: ignore[arg-type]
    (created, _) = answer_format.opening(1)
    with pytest.raises(PydanticSerializationError):
        created.model_dump_json()
    event = json.loads(answer_format.failure(ApiError(500, HALF)).model_dump_json())
    assert (event["type"], event["response"]["status"]) == ("response.failed", "failed")


def test_reasoning_without_text_is_left_out(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = prompts(served, monkeypatch)
    empty = {"type": "reasoning", "summary": [], "content": []}
    assert ask(served, [empty, {"role": "user", "content": "u"}]).status_code == 200
    assert seen == ["[]u<think>\n"]
    refused(ask(served, [empty]), 400, "input")


def test_errors_have_the_names_of_responses(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused(ask(served, "u" * 5000), 400, "input", "context_length_exceeded")
    call = {"type": "function_call", "call_id": "a", "name": "a", "arguments": "{"}
    message = refused(ask(served, [call]), 400, "input[].arguments")
    assert message == "input[].arguments: must be a JSON object, written out"
    switch = {"enable_thinking": False}
    message = refused(ask(served, reasoning={"effort": "low"}, chat_template_kwargs=switch), 400, "reasoning.effort")
    assert message.startswith("reasoning.effort: 'low'")
    monkeypatch.setattr(ThinkingTokenizer, "template", "<think>")
    message = refused(ask(served, reasoning={"effort": "low"}), 400, "reasoning.effort")
    assert message.startswith("'reasoning.effort' is nothing")
    body = {"tools": [TOOL], "text": {"format": {"type": "json_object"}}}
    refused(ask(served, **body), 400, "text.format")


ITEM = {"type": "item_reference", "id": "x"}
IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"store": True}, "store"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "c"}, "conversation"),
    ({"background": True}, "background"),
    ({"include": ["reasoning.encrypted_content"]}, "include"),
    ({"truncation": "auto"}, "truncation"),
    ({"max_tokens": 3}, "max_tokens"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"input": []}, "input"),
    ({"input": 3}, "input"),
    ({"input": [ITEM]}, "input[0]"),
    ({"input": [IMAGE]}, "input[0].content[0].type"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format"),
    ({"reasoning": {"effort": "most"}}, "reasoning.effort"),
    ({"stream_options": {}}, "stream_options"),
    ({"model": "other"}, "model"),
]


@pytest.mark.parametrize(("body", "param"), REFUSED, ids=lambda value: str(value)[:50])
def test_what_is_not_supported_is_refused_by_name(served: Served, body: dict[str, Any], param: str) -> None:
    response = served.http.post("/v1/responses", json={"input": "u", **body})
    refused(response, 404 if param == "model" else 400, param)


def test_a_model_without_a_template_has_no_responses() -> None:
    engine = FakeEngine(has_chat_template=False)
    assert isinstance(engine.tokenizer, FakeTokenizer)
    with serving(engine) as served:
        refused(ask(served), 400, "input", "no_chat_template")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/embeddings", "no embeddings"),
        ("/v1/images/generations", "no images"),
        ("/v1/audio/speech", "neither hears nor speaks"),
        ("/v1/batches", "no files of requests"),
        ("/v1/responses/resp_1", "/v1/responses: this server stores no answers"),
        ("/v1/chat/completions/chatcmpl-1", "/v1/chat/completions: this server stores no answers"),
    ],
)
def test_other_addresses_of_openai_are_refused_by_name(served: Served, path: str, words: str) -> None:
    for response in (served.http.get(path), served.http.post(path, json={})):
        assert words in refused(response, 404, None, "not_supported")
    assert "did you mean" in refused(served.http.get("/v1/respones"), 404, None, "not_found")


def test_the_client_hears_why_there_are_no_embeddings(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no embeddings"):
        client.embeddings.create(model="specmamba-demo", input="u")
