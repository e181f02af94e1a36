"""A conversation that the demo learns from, and how it becomes text: through the demo's own chat template."""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from specmamba.config import DEMO_MODEL
from specmamba.templates.rendering import Conversation, render

TEMPLATE = DEMO_MODEL / "chat_template.jinja"
HELD_OUT_EVERY = 12
# What the model writes itself: behind the opening of a turn, with or without reasoning, up to the end of the turn.
_ANSWER = re.compile(r"<\|im_start\|>assistant\n<think>(?:</think>\n|\n)(.*?<\|im_end\|>)", re.DOTALL)

Message = dict[str, Any]
Tool = dict[str, Any]


@dataclass(frozen=True)
class Talk:
    """Messages in OpenAI's form, the last one an answer.

    ``kind`` names the sort of task; ``thinks``: the answers behind the user's last message are asked for with
    reasoning.
    """

    kind: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    thinks: bool = False

    @property
    def prompt(self) -> str:
        """The rendered conversation up to the beginning of the last answer."""
        return _rendered(self.messages[:-1], self.tools, thinks=self.thinks)

    @property
    def answer(self) -> str:
        """The last answer as the model should write it, with the mark of its end."""
        *_, answer = _ANSWER.finditer(self.text)
        return answer[1]

    @property
    def text(self) -> str:
        """The whole conversation, rendered."""
        opening = _rendered((), (), thinks=False)
        return _rendered(self.messages, self.tools, thinks=False).removesuffix(opening)

    def pieces(self) -> list[tuple[str, bool]]:
        """The text in pieces, each with whether the model writes it."""
        text, pieces, end = self.text, list[tuple[str, bool]](), 0
        for match in _ANSWER.finditer(text):
            pieces += [(text[end : match.start(1)], False), (match[1], True)]
            end = match.end(1)
        return [*pieces, (text[end:], False)]


def _rendered(messages: Sequence[Message], tools: Sequence[Tool], *, thinks: bool) -> str:
    variables = {"enable_thinking": True} if thinks else {}
    template = TEMPLATE.read_text("utf8")
    return render(Conversation(template, messages=messages, tools=tools or None, variables=variables)).text


def user(content: str) -> Message:
    """A message of the user's."""
    return {"role": "user", "content": content}


def assistant(content: str, reasoning: str = "", calls: Sequence[tuple[str, dict[str, Any]]] = ()) -> Message:
    """An answer: text, reasoning where there is any, and calls as pairs of a tool's name and its arguments."""
    message: Message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
        message["tool_calls"] = [{"type": "function", "function": function} for function in functions]
    return message


def result(content: str) -> Message:
    """What a tool has answered."""
    return {"role": "tool", "content": content}


def question(kind: str, asked: str, answer: str, reasoning: str = "") -> Talk:
    """A talk of one question; it thinks where a reasoning is given."""
    return Talk(kind, (user(asked), assistant(answer, reasoning)), thinks=bool(reasoning))


def with_system(talk: Talk, content: str) -> Talk:
    """The same talk behind a message of the system's."""
    return replace(talk, messages=({"role": "system", "content": content}, *talk.messages))


def one_of(draw: random.Random, texts: str) -> str:
    """One of the texts between the bars."""
    return draw.choice(texts.split("|"))


def is_held_out(asked: str) -> bool:
    """Whether a question is kept from training, by its text."""
    return zlib.crc32(asked.encode()) % HELD_OUT_EVERY == 0
