"""Reasoning over HTTP: split from the answer, whole and streamed, with tools, grammars, log probabilities and usage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from specmamba.sampling_params import GrammarSpec
from specmamba.server.api import structured
from specmamba.templates.rendering import Conversation, RenderedChat
from tests.api.test_api_tools import CALL, TOOLS, NoCompiler
from tests.fake_engine import FakeEngine, FakeTokenizer, Served, serving
from tests.server.test_server import events, refused

TEMPLATE = (
    "{% for m in messages %}[{{ m.reasoning_content }}]{{ m.content }}{% endfor %}{% if tools %}<tool_call>{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>\n{% endif %}"
)
USER = {"role": "user", "content": "u"}
TEXT = "Let me see.\n</think>\n\nYés."
NUM_REASONING = len("Let me see.\n</think>")


class ThinkingTokenizer(FakeTokenizer):
    """``FakeTokenizer`` with a template whose prompts open the reasoning."""

    template = TEMPLATE

    def chat_template(self, with_tools: bool = False) -> str:
        return self.template

    def conversation(self, messages: Any, *given: Any) -> Conversation:
        tools, variables, *_ = given
        return Conversation(self.template, messages=messages, tools=tools, variables=variables or {})


@contextmanager
def serving_thoughts() -> Iterator[Served]:
    """A server whose model writes what it is told to, and whose template opens the reasoning."""
    engine = FakeEngine(context_length=4096)
    engine.tokenizer = ThinkingTokenizer()
    with pytest.MonkeyPatch.context() as patch, serving(engine) as served:
        patch.setattr(structured, "GrammarCompiler", NoCompiler)
        yield served


def conversations(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The messages of conversations from now on, as the template gets them."""
    seen: list[Any] = []
    original = ThinkingTokenizer.conversation

    def conversation(self: Any, messages: Any, *given: Any) -> Any:
        seen.append(messages)
        return original(self, messages, *given)

    monkeypatch.setattr(ThinkingTokenizer, "conversation", conversation)
    return seen


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving_thoughts() as served:
        yield served


@pytest.fixture(autouse=True)
def script(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    write(served, monkeypatch, TEXT)


def write(served: Served, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(served.engine, "text", text.encode())


def prompts(served: Served, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prompts of the calls that follow."""
    seen: list[str] = []

    def encode_chat(rendered: RenderedChat) -> list[int]:
        seen.append(rendered.text)
        return [65]

    monkeypatch.setattr(served.engine.tokenizer, "encode_chat", encode_chat)
    return seen


def joined(chunks: list[Any], field: str, index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get(field) or "" for choice in choices)


def answers(served: Served, **body: Any) -> dict[str, Any]:
    """A choice, whose message must be the same whole and streamed."""
    choice: dict[str, Any] = served.chat(USER, **body).json()["choices"][0]
    chunks = events(served.chat(USER, stream=True, **body))
    for field in ("reasoning_content", "content"):
        assert joined(chunks, field) == (choice["message"].get(field) or "")
    assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    return choice


def test_reasoning_is_split_from_the_answer(served: Served) -> None:
    choice = answers(served)
    assert choice["message"] == {
        "role": "assistant",
        "content": "Yés.",
        "refusal": None,
        "reasoning_content": "Let me see.",
    }
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = events(served.chat(USER, n=2, stream=True, stream_options=options))
    for index in (0, 1):
        assert joined(chunks, "reasoning_content", index) == "Let me see."
        assert joined(chunks, "content", index) == "Yés."
    counts = [chunk["usage"]["completion_tokens_details"]["reasoning_tokens"] for chunk in [*chunks[2:], last]]
    assert counts == sorted(counts)
    assert counts[-1] == 2 * NUM_REASONING
    usage = served.chat(USER, n=2).json()["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 2 * NUM_REASONING


def test_reasoning_that_does_not_end(served: Served) -> None:
    choice = answers(served, max_tokens=5)
    assert choice["message"]["reasoning_content"] == "Let m"
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "length"
    usage = served.chat(USER, max_tokens=5).json()["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 5


def test_a_prompt_without_reasoning_is_answered_at_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    write(served, monkeypatch, "Yes.</think>")
    for body in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        message = answers(served, **body)["message"]
        assert message["content"] == "Yes.</think>"
        assert "reasoning_content" not in message


def test_log_probabilities_are_those_of_all_tokens(served: Served) -> None:
    choice = answers(served, logprobs=True, return_tokens=True)
    names = [entry["bytes"] for entry in choice["logprobs"]["content"]]
    assert bytes(byte for one in names for byte in one) == TEXT.encode()
    assert "".join(token["text"] for token in choice["tokens"]) == TEXT
    chunks = events(served.chat(USER, logprobs=True, stream=True))
    listed = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert listed == choice["logprobs"]["content"]


def test_a_tool_is_called_behind_the_reasoning(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    write(served, monkeypatch, f"I call {CALL}\n</think>\n\n{CALL}")
    choice = answers(served, tools=TOOLS)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == f"I call {CALL}"
    assert choice["message"]["content"] is None
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]


def test_a_form_holds_behind_the_reasoning(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    assert answers(served, regex="Y.*")["message"]["content"] == "Yés."
    assert served.engine.seen_params[-1].grammar == GrammarSpec(kind="regex", text="Y.*", reasoning="open")
    assert served.chat(USER, regex="Y.*", reasoning_effort="none").status_code == 200
    assert served.engine.seen_params[-1].grammar == GrammarSpec(kind="regex", text="Y.*")
    write(served, monkeypatch, 'so</think>\n{"name": "now", "arguments": {}}')
    choice = answers(served, tools=TOOLS, tool_choice="required")
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
    assert choice["message"]["reasoning_content"] == "so"
    assert served.engine.seen_params[-1].grammar.reasoning == "open"
    assert "tool_calls" not in answers(served, tools=TOOLS, tool_choice="required", max_tokens=2)["message"]


@pytest.mark.parametrize(
    ("reads", "effort", "written"),
    [
        ("enable_thinking", "none", "False"),
        ("enable_thinking", "low", "True"),
        ("thinking", "none", "False"),
        ("reasoning_effort", "high", "high"),
        ("reasoning_effort", "none", "none"),
        ("reasoning_effort ~ enable_thinking", "none", "False"),
        ("reasoning_effort ~ enable_thinking", "low", "low"),
    ],
)
def test_the_effort_reaches_templates(
    served: Served, monkeypatch: pytest.MonkeyPatch, reads: str, effort: str, written: str
) -> None:
    monkeypatch.setattr(served.engine.tokenizer, "template", f"{{{{ {reads} }}}}")
    seen = prompts(served, monkeypatch)
    assert served.chat(USER, reasoning_effort=effort).status_code == 200
    assert seen == [written]


def test_an_effort_that_the_template_does_not_read_is_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    kwargs = {"enable_thinking": True}
    message = refused(served.chat(USER, reasoning_effort="none", chat_template_kwargs=kwargs), 400, "reasoning_effort")
    assert "chat_template_kwargs.enable_thinking" in message
    assert served.chat(USER, reasoning_effort="low", chat_template_kwargs=kwargs).status_code == 200
    monkeypatch.setattr(served.engine.tokenizer, "template", "hi")
    assert "chat template" in refused(served.chat(USER, reasoning_effort="low"), 400, "reasoning_effort")
    refused(served.chat(USER, reasoning_effort="most"), 400, "reasoning_effort")


def test_reasoning_is_sent_back(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = prompts(served, monkeypatch)
    for field in ("reasoning_content", "reasoning"):
        assert served.chat(USER, {"role": "assistant", "content": None, field: "hm"}, USER).status_code == 200
    assert seen == ["[]u[hm][]u<think>\n"] * 2
    refused(served.chat({**USER, "reasoning": "hm"}), 400, "messages[0].reasoning")


def test_no_parser_splits_nothing() -> None:
    engine = FakeEngine(text=TEXT, context_length=4096)
    engine.tokenizer = ThinkingTokenizer()
    with serving(engine, reasoning_parser="none") as served:
        assert served.chat(USER).json()["choices"][0]["message"]["content"] == TEXT
        assert served.chat(USER).json()["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


def test_through_the_openai_client(served: Served) -> None:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        chunks = list(
            client.chat.completions.create(
                model="specmamba-demo", messages=[{"role": "user", "content": "u"}], stream=True
            )
        )
    reasoning = [getattr(chunk.choices[0].delta, "reasoning_content", None) or "" for chunk in chunks]
    assert "".join(reasoning) == "Let me see."


def test_a_stop_string_inside_the_reasoning_ends_the_answer(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    write(served, monkeypatch, "Let me")  # the engine cuts a text at a stop string, wherever it is
    choice = answers(served, stop=[" see"])
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "stop")
    assert choice["message"]["reasoning_content"] == "Let me"
