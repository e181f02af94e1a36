"""Structured output and forced tool calls of the demo: the grammar produces what the demo was not trained on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from specmamba.config import EngineConfig
from specmamba.engine.engine import Engine
from tests.fake_engine import Served, serving, slow_steps, wait_until

pytest.importorskip("xgrammar", reason="structured output needs specmamba[grammar]")

POINT = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": 0, "maximum": 99},
        "name": {"enum": ["a", "b"]},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2},
    },
    "required": ["x", "name", "tags"],
    "additionalProperties": False,
    "$defs": {"tag": {"type": "boolean"}},
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "move", "parameters": POINT, "strict": True}},
    {"type": "function", "function": {"name": "now"}},
]
MESSAGES: Any = [{"role": "user", "content": "import json\n"}]
BODY: dict[str, Any] = {"model": "specmamba-demo", "messages": MESSAGES, "max_tokens": 200, "seed": 3}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    engine = Engine(EngineConfig(dtype="float32", max_running_requests=4, max_total_tokens=4096, context_length=1024))
    with serving(engine) as served:
        yield served
        wait_until(lambda: not engine.has_unfinished_requests)
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_used_tokens) == (0, 0, 0)


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_an_answer_keeps_to_its_schema(client: openai.OpenAI) -> None:
    asked: Any = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT, "strict": True}}
    answer = client.chat.completions.create(**BODY, n=3, response_format=asked)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content or ""), POINT)
    assert len({choice.message.content for choice in answer.choices}) == 3


def test_a_named_tool_is_called(served: Served, client: openai.OpenAI) -> None:
    body = {**BODY, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "move"}}}
    choice = client.chat.completions.create(**body).choices[0]
    (call,) = choice.message.tool_calls or [None]
    assert (choice.finish_reason, choice.message.content, call.type) == ("stop", None, "function")
    assert call.function.name == "move"
    arguments = call.function.arguments
    jsonschema.validate(json.loads(arguments), POINT)
    with slow_steps(served.engine):
        pieces = [
            call.function.arguments
            for chunk in client.chat.completions.create(**body, stream=True)
            for call in chunk.choices[0].delta.tool_calls or ()
            if call.function is not None
        ]
    assert "".join(piece or "" for piece in pieces) == arguments
    assert len(pieces) > 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_some_tool_is_called(client: openai.OpenAI, temperature: float) -> None:
    body = {**BODY, "tools": TOOLS, "tool_choice": "required", "temperature": temperature}
    choice = client.chat.completions.create(**body).choices[0]
    (call,) = choice.message.tool_calls or [None]
    assert choice.finish_reason == "tool_calls"
    assert call.type == "function"
    arguments = json.loads(call.function.arguments)
    jsonschema.validate(arguments, {"move": POINT, "now": {"maxProperties": 0}}[call.function.name])


def test_a_call_that_is_cut_off_has_partial_arguments(client: openai.OpenAI) -> None:
    body = {**BODY, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "move"}}, "max_tokens": 3}
    choice = client.chat.completions.create(**body).choices[0]
    (call,) = choice.message.tool_calls or [None]
    assert choice.finish_reason == "length"
    assert call.function.arguments.startswith("{")


def test_an_unsupported_schema_is_refused_by_name(client: openai.OpenAI) -> None:
    wrong: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "number", "multipleOf": 7}}}
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(**BODY, response_format=wrong)
    assert (refusal.value.param, refusal.value.code) == ("response_format", "invalid_grammar")
    assert "multipleOf" in refusal.value.message


def test_a_predicted_answer_is_drafted_from_the_prediction(client: openai.OpenAI) -> None:
    body: Any = {**BODY, "max_tokens": 48, "temperature": 0}
    own = {"ignore_eos": True}
    plain = client.chat.completions.create(**body, extra_body={**own, "speculative": False})
    text = plain.choices[0].message.content or ""
    answer = client.chat.completions.create(**body, prediction={"type": "content", "content": text}, extra_body=own)
    assert answer.choices[0].message.content == text
    details = answer.usage.completion_tokens_details if answer.usage else None
    assert details is not None
    assert (details.accepted_prediction_tokens or 0) > 24
    with pytest.raises(openai.BadRequestError, match="the prediction has"):
        client.chat.completions.create(**body, prediction={"type": "content", "content": "ab " * 2000})


def test_a_predicted_answer_is_streamed(client: openai.OpenAI) -> None:
    """Given as parts, with a second choice; the usage at the end counts its drafts."""
    body: Any = {**BODY, "max_tokens": 48, "temperature": 0}
    own = {"ignore_eos": True}
    plain = client.chat.completions.create(**body, extra_body={**own, "speculative": False})
    text = plain.choices[0].message.content or ""
    parts: Any = {
        "type": "content",
        "content": [{"type": "text", "text": text[:20]}, {"type": "text", "text": text[20:]}],
    }
    chunks = list(
        client.chat.completions.create(
            **body, n=2, prediction=parts, stream=True, stream_options={"include_usage": True}, extra_body=own
        )
    )
    said = ["", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            said[choice.index] += choice.delta.content or ""
    assert said == [text] * 2
    details = chunks[-1].usage.completion_tokens_details if chunks[-1].usage else None
    assert details is not None
    assert (details.accepted_prediction_tokens or 0) > 48


CHOICES = ["yes", "no", "\u00e9\n"]


@pytest.mark.parametrize("field", [{"guided_choice": CHOICES}, {"structured_outputs": {"choice": CHOICES}}])
def test_the_answer_is_one_of_the_choices(client: openai.OpenAI, field: dict[str, Any]) -> None:
    answer = client.chat.completions.create(**BODY, n=4, extra_body=field)
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    assert {choice.message.content for choice in answer.choices} <= set(CHOICES)


def test_a_grammar_of_vllm_that_is_wrong_is_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(**BODY, extra_body={"structured_outputs": {"regex": "(a"}})
    assert refusal.value.param == "structured_outputs.regex"
