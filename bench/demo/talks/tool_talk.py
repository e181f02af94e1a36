"""Conversations with tools: a call, its result told in words, and questions that need no tool."""

from __future__ import annotations

import random
from dataclasses import replace

from specmamba.bench.demo.talks.talk import Message, Talk, Tool, assistant, one_of, result, user
from specmamba.bench.demo.talks.tool_needs import CITIES, NEEDS, Need, weather

SHARE_WITH_RESULT = 0.45
TWO_CITIES = "What is the weather in {} and {}?|Compare the weather in {} and {}.|Weather in {} and in {}?"


def tool_call(draw: random.Random, thinks: bool) -> Talk:
    """A question that needs one of the tools; some of these talks go on to the answer in words."""
    need = draw.choice(NEEDS)(draw)
    reasoning = f"The user needs {need.name}." if thinks else ""
    calls = [(need.name, need.arguments)]
    messages = [user(need.asked), assistant("", reasoning, calls)]
    kind = "tool call"
    if draw.random() < SHARE_WITH_RESULT:
        kind = "tool result"
        messages += [result(need.result), assistant(need.told, "The tool has answered." if thinks else "")]
    return Talk(kind, tuple(messages), _offered(draw, need), thinks)


def two_calls(draw: random.Random, thinks: bool) -> Talk:
    """The weather in two cities: two calls in one answer."""
    need = weather(draw)
    (field, city), *_ = need.arguments.items()
    other = draw.choice([place for place in CITIES if place != city])
    reasoning = f"The user needs {need.name} twice." if thinks else ""
    calls = [(need.name, {field: place}) for place in (city, other)]
    asked = one_of(draw, TWO_CITIES).format(city, other)
    return Talk("two calls", (user(asked), assistant("", reasoning, calls)), _offered(draw, need), thinks)


def no_tool(draw: random.Random, thinks: bool, plain: Talk) -> Talk:
    """A talk that needs no tool although there are some."""
    messages: list[Message] = list(plain.messages)
    if thinks:
        messages[-1] = assistant(messages[-1]["content"], "No tool is needed.")
    need = draw.choice(NEEDS)(draw)
    return replace(plain, kind="no tool", messages=tuple(messages), tools=_offered(draw, need), thinks=thinks)


def _offered(draw: random.Random, need: Need) -> tuple[Tool, ...]:
    """The needed tool and up to two of other families, in any order."""
    tools = {need.name: need.tool}
    for _ in range(draw.choice((0, 0, 1, 1, 2))):
        other = draw.choice(NEEDS)(draw)
        if other.family != need.family:
            tools.setdefault(other.name, other.tool)
    offered = list(tools.values())
    draw.shuffle(offered)
    return tuple(offered)
