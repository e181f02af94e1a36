"""The demo's conversations: a stream of any length, drawn by a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from specmamba.bench.demo.talks.docstrings import docstring
from specmamba.bench.demo.talks.functions import function
from specmamba.bench.demo.talks.small_talk import arithmetic, chatter, definition, unknown
from specmamba.bench.demo.talks.talk import Talk, is_held_out, one_of, with_system
from specmamba.bench.demo.talks.tool_talk import no_tool, tool_call, two_calls

Maker = Callable[[random.Random, bool], Talk]
PLAIN: dict[Maker, int] = {chatter: 14, definition: 8, unknown: 7, arithmetic: 9, docstring: 30, function: 16}
SHARE_WITH_TOOLS, SHARE_OF_NO_TOOL, SHARE_OF_TWO_CALLS = 0.45, 0.2, 0.06
SHARE_THAT_THINKS, SHARE_WITH_SYSTEM, SHARE_OF_TWO_TURNS = 0.25, 0.2, 0.12
SYSTEMS = (
    "You are a helpful assistant.|Be brief.|You are a friendly assistant.|Answer the question.|You help with Python.|"
    "You are specmamba's demo."
)
ALWAYS_TRAINED = frozenset({"chatter", "definition", "unknown"})  # too few questions to keep some of them


def conversations(seed: int, *, held_out: bool = False) -> Iterator[Talk]:
    """Yield talks without end: those to train on, or those whose last question is kept from training."""
    draw = random.Random(f"{seed} {held_out}")
    while True:
        talk = _talk(draw)
        if _is_held_out(talk) == held_out and not (held_out and talk.kind in ALWAYS_TRAINED):
            yield talk


def _talk(draw: random.Random) -> Talk:
    thinks = draw.random() < SHARE_THAT_THINKS
    if draw.random() < SHARE_WITH_TOOLS:
        talk = _with_tools(draw, thinks)
    else:
        talk = _plain(draw, thinks)
        if draw.random() < SHARE_OF_TWO_TURNS:
            earlier = _plain(draw, False)
            if not _is_held_out(earlier):
                talk = Talk(talk.kind, earlier.messages + talk.messages, thinks=thinks)
    return with_system(talk, one_of(draw, SYSTEMS)) if draw.random() < SHARE_WITH_SYSTEM else talk


def _plain(draw: random.Random, thinks: bool) -> Talk:
    (maker,) = draw.choices(list(PLAIN), list(PLAIN.values()))
    return maker(draw, thinks)


def _with_tools(draw: random.Random, thinks: bool) -> Talk:
    chance = draw.random()
    if chance < SHARE_OF_TWO_CALLS:
        return two_calls(draw, thinks)
    if chance < SHARE_OF_TWO_CALLS + SHARE_OF_NO_TOOL:
        maker = draw.choice((chatter, definition, docstring, function))
        return no_tool(draw, thinks, maker(draw, False))
    return tool_call(draw, thinks)


def _is_held_out(talk: Talk) -> bool:
    questions = [message["content"] for message in talk.messages if message["role"] == "user"]
    return talk.kind not in ALWAYS_TRAINED and is_held_out(questions[-1])
