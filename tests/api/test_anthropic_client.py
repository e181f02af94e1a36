"""Anthropic's own client against /v1/messages: whole, streamed, with tools, system, stop sequences and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from specmamba.config import EngineConfig
from tests.api.test_api_reasoning import conversations, serving_thoughts, write
from tests.api.test_api_tools import CALL, PARAMETERS
from tests.fake_engine import FakeEngine, Served, serving

if TYPE_CHECKING:
    import anthropic

# its import takes seconds
pytestmark = pytest.mark.slow

MODEL = "specmamba-demo"
TOOL: Any = {"name": "weather", "description": "d", "input_schema": PARAMETERS}
USER: Any = {"role": "user", "content": "u"}
BODY: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "messages": [USER]}
TEXT = "Hm.\n</think>\n\nYés."


def client_of(served: Served, **options: Any) -> anthropic.Anthropic:
    import anthropic

    return anthropic.Anthropic(base_url=served.url, max_retries=0, **{"api_key": "none", **options})


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving_thoughts() as served:
        yield served


@pytest.fixture(autouse=True)
def script(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    write(served, monkeypatch, TEXT)


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[anthropic.Anthropic]:
    with client_of(served) as client:
        yield client


def test_a_whole_answer(served: Served, client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = conversations(monkeypatch)
    message = client.messages.create(**BODY, system="Be kind.")
    thinking, text = message.content
    assert (thinking.type, text.type) == ("thinking", "text")
    assert (thinking.thinking, text.text) == ("Hm.", "Yés.")
    assert (message.role, message.model, message.stop_reason, message.stop_sequence) == (
        "assistant",
        MODEL,
        "end_turn",
        None,
    )
    assert message.usage.output_tokens == len(TEXT.encode())
    assert seen == [[{"role": "system", "content": "Be kind."}, USER]]
    assert client.messages.count_tokens(model=MODEL, messages=[USER]).input_tokens == len("[]u<think>\n")


def test_a_stream(client: anthropic.Anthropic) -> None:
    with client.messages.stream(**BODY) as stream:
        events = list(stream)
        final = stream.get_final_message()
    assert "".join(event.text for event in events if event.type == "text") == "Yés."
    assert "".join(event.thinking for event in events if event.type == "thinking") == "Hm."
    assert final.model_dump(exclude={"id"}) == client.messages.create(**BODY).model_dump(exclude={"id"}) | {
        "usage": final.usage.model_dump()
    }
    assert final.usage.output_tokens == len(TEXT.encode())
    kinds = [event.type for event in client.messages.create(**BODY, stream=True)]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


def test_a_tool_and_its_result(served: Served, client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = conversations(monkeypatch)
    write(served, monkeypatch, f"Hm.</think>Let me see.\n{CALL}")
    with client.messages.stream(**BODY, tools=[TOOL]) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        message = stream.get_final_message()
    assert json.loads("".join(pieces)) == {"city": "Köln"}
    assert message.stop_reason == "tool_use"
    call = message.content[-1]
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("weather", {"city": "Köln"})
    write(served, monkeypatch, "</think>12 degrees.")
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "12°"}
    turns: list[Any] = [USER, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(**BODY | {"messages": turns}, tools=[TOOL])
    assert (answer.content[-1].text, answer.stop_reason) == ("12 degrees.", "end_turn")
    told = seen[-1]
    assert told[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Köln"}}
    assert told[2] == {"role": "tool", "content": "12°", "tool_call_id": call.id}


def test_why_an_answer_ends(served: Served, client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch) -> None:
    write(served, monkeypatch, "</think>a STOP")
    message = client.messages.create(**BODY, stop_sequences=["no", "STOP"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "STOP")
    message = client.messages.create(**BODY | {"max_tokens": 10})
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 10)
    with client.messages.stream(**BODY, stop_sequences=["STOP"]) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", "STOP")


def test_errors_have_the_types_of_the_client(client: anthropic.Anthropic) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError, match="other"):
        client.messages.create(**BODY | {"model": "other"})
    image: Any = {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}
    with pytest.raises(anthropic.BadRequestError, match="only blocks") as refused:
        client.messages.create(**BODY | {"messages": [image]})
    told: Any = refused.value.body
    assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    assert told["error"]["message"].startswith("messages[0].content[0]")
    with (
        serving(FakeEngine(), api_key=("first",)) as other,
        client_of(other) as stranger,
        pytest.raises(anthropic.AuthenticationError),
    ):
        stranger.messages.create(**BODY)
    with serving(FakeEngine(text=TEXT, step_s=0.05, fail_at_step=3)) as failing, client_of(failing) as asking:
        with pytest.raises(anthropic.APIStatusError, match="api_error"), asking.messages.stream(**BODY) as stream:
            stream.get_final_message()


def test_the_demo_streams_what_it_answers_whole() -> None:
    from specmamba.engine.engine import Engine

    body = BODY | {"max_tokens": 24, "messages": [{"role": "user", "content": "x = "}]}
    body["extra_body"] = {"temperature": 0}  # no argument of the client's newest versions
    engine = Engine(EngineConfig(dtype="float32", max_running_requests=2, max_total_tokens=2048))
    with serving(engine) as served, client_of(served) as client:
        whole = client.messages.create(**body)
        with client.messages.stream(**body) as stream:
            final = stream.get_final_message()
    assert [block.text for block in final.content] == [block.text for block in whole.content]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert whole.usage.output_tokens > 0
