"""What a parser makes of the text of an answer, piece by piece."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call of a tool begins."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the JSON text that the latest call hands to its tool."""

    text: str


Event = Content | CallBegin | CallArguments


class AnswerParser(Protocol):
    """Reads one answer as it comes. However the text is cut into pieces, the events say the same in the end.

    Nothing that a model writes is an error: what is no call is content.
    """

    def push(self, text: str) -> list[Event]: ...
    def finish(self) -> list[Event]: ...


class PlainText:
    """An answer without tools: all of it is content."""

    def push(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return []


@dataclass(frozen=True, slots=True)
class WholeCall:
    """A call with all of its arguments, a JSON object written out."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """All that the events of an answer say."""

    content: str
    calls: tuple[WholeCall, ...]


def whole_answer(events: Iterable[Event]) -> WholeAnswer:
    """Put the pieces together."""
    content: list[str] = []
    calls: list[tuple[str, list[str]]] = []
    for event in events:
        match event:
            case Content(text):
                content.append(text)
            case CallBegin(name):
                calls.append((name, []))
            case CallArguments(text):
                calls[-1][1].append(text)
    return WholeAnswer("".join(content), tuple(WholeCall(name, "".join(pieces)) for name, pieces in calls))
