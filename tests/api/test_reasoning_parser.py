"""Reasoning in front of an answer: found however the text is cut into pieces, and counted in tokens."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from specmamba.config import DEMO_MODEL
from specmamba.models.text.tokenizer import Tokenizer
from specmamba.server.tools.choice import NamedCall, new_parser
from specmamba.server.tools.parsing import AnswerParser, PlainText, WholeAnswer, WholeCall, whole_answer
from specmamba.server.tools.reasoning import ReasonedAnswer, ReasoningFormat, ReasoningTokens
from tests.fake_engine import FakeTokenizer

CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
NOW = WholeCall("now", "{}")
Start = Literal["open", "optional"]

CASES: list[tuple[Start, str, str, str, int]] = [  # start, text, reasoning, content, characters up to the end
    ("open", "so\n</think>\n\nYes.", "so", "Yes.", 11),
    ("open", "\n so </think>Yes.\n", "so", "Yes.\n", 13),
    ("open", "<think>\nso</think>Yes.", "so", "Yes.", 18),
    ("open", "so", "so", "", 2),
    ("open", "so </thin", "so </thin", "", 9),
    ("open", "so\n", "so", "", 3),
    ("open", "", "", "", 0),
    ("open", " \n", "", "", 2),
    ("open", "a < b </t </<</think>c</think>", "a < b </t </<", "c</think>", 21),
    ("open", "<thi", "<thi", "", 4),
    ("open", f"{' ' * 300}<think>a{' ' * 300}</think>b", f"<think>a{' ' * 44}", "b", 616),
    ("optional", "<think>\nso\n</think>\n\nYes.", "so", "Yes.", 19),
    ("optional", " <think></think> Yes.", "", "Yes.", 16),
    ("optional", "<think>so", "so", "", 9),
    ("optional", "Yes. <think>no</think>", "", "Yes. <think>no</think>", 0),
    ("optional", " Yes</think>", "", " Yes</think>", 0),
    ("optional", "<thin", "", "<thin", 0),
    ("optional", f"{' ' * 300}<think>a", "", f"{' ' * 300}<think>a", 0),
]


def read(answer: AnswerParser, pieces: list[str]) -> WholeAnswer:
    events = [event for piece in pieces for event in answer.push(piece)]
    return whole_answer([*events, *answer.finish()])


@pytest.mark.parametrize(("start", "text", "reasoning", "content", "end"), CASES)
def test_reasoning_whole_and_split_at_every_character(
    start: Start, text: str, reasoning: str, content: str, end: int
) -> None:
    cuts = [[text], list(text), *([text[:cut], text[cut:]] for cut in range(len(text)))]
    for pieces in cuts:
        answer = ReasonedAnswer(PlainText(), start)
        assert read(answer, pieces) == WholeAnswer(content, (), reasoning)
        assert answer.num_read == end


def test_calls_come_behind_the_reasoning_only() -> None:
    text = f"I call {CALL}.\n</think>\n\n{CALL}"
    for pieces in ([text], list(text)):
        hermes = new_parser("hermes", {"now": {}}, 8)
        assert read(ReasonedAnswer(hermes, "open"), pieces) == WholeAnswer("", (NOW,), f"I call {CALL}.")
    forced = read(ReasonedAnswer(NamedCall("now"), "open"), ["so</think>\n", "{}"])
    assert forced == WholeAnswer("", (NOW,), "so")
    assert read(ReasonedAnswer(NamedCall("now"), "open"), ["so"]) == WholeAnswer("", (), "so")


@pytest.mark.parametrize(("start", "text", "reasoning", "content", "end"), CASES)
def test_tokens_of_the_reasoning_are_counted(start: Start, text: str, reasoning: str, content: str, end: int) -> None:
    tokens = list(text.encode())
    for size in (1, 2, 7, len(tokens) or 1):
        answer = ReasonedAnswer(PlainText(), start)
        counted = ReasoningTokens(FakeTokenizer(), answer)  # type: ignore[arg-type]
        for at in range(0, len(tokens), size):
            answer.push(text[at : at + size])
            counted.read(tokens[at : at + size], is_last=False)
        answer.finish()
        counted.read((), is_last=True)
        assert counted.number == end


class Thinker(FakeTokenizer):
    """A tokenizer with this template and these tokens."""

    def __init__(self, template: str, *tokens: str) -> None:
        super().__init__()
        self._template, self._tokens = template, tokens

    def chat_template(self, with_tools: bool = False) -> str:
        return self._template

    def token_ids(self) -> dict[str, int]:
        return {token: number for number, token in enumerate(self._tokens)}


@pytest.mark.parametrize(
    ("tokenizer", "parser"),
    [
        (Thinker("{{ '<think>' }}"), "qwen3"),
        (Thinker("", "a", "<think>"), "qwen3"),
        (Thinker("think"), "none"),
        (FakeTokenizer(has_chat_template=False), "none"),
    ],
)
def test_the_format_is_found_from_template_and_vocabulary(tokenizer: Any, parser: str) -> None:
    assert ReasoningFormat.of("auto", tokenizer).parser == parser
    assert ReasoningFormat.of("nemotron", tokenizer).parser == "nemotron"


def test_the_demo_thinks_where_it_is_asked_to() -> None:
    tokenizer = Tokenizer(DEMO_MODEL)
    found = ReasoningFormat.of("auto", tokenizer)
    assert found.parser == "qwen3"
    for variables, start in (({}, "none"), ({"enable_thinking": False}, "none"), ({"enable_thinking": True}, "open")):
        ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], None, variables)
        assert found.start(tokenizer.decode(ids, skip_special_tokens=False)) == start


@pytest.mark.parametrize(
    ("prompt", "qwen3", "nemotron"),
    [
        ("<|im_start|>assistant\n", "optional", "open"),
        ("<|im_start|>assistant\n<think>\n", "open", "open"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "none", "none"),
        ("<think>a</think>b<|im_end|>", "optional", "open"),
    ],
)
def test_the_prompt_says_how_the_answer_begins(prompt: str, qwen3: str, nemotron: str) -> None:
    assert ReasoningFormat("qwen3").start(prompt) == qwen3
    assert ReasoningFormat("nemotron").start(prompt) == nemotron
    assert ReasoningFormat("none").start(prompt) == "none"
