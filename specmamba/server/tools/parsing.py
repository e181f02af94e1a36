"""What a parser makes of the text of an answer, piece by piece.

Calls between two marks, amid text: the part that the formats of all families share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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


MAX_SPACE = 256  # characters around calls that are no content; so much is held back until it is known what follows


@dataclass(frozen=True, slots=True)
class Body:
    """What came after an opening mark: ``raw`` was read, ``rest`` was not. Without calls it was not a body at all."""

    calls: tuple[WholeCall, ...]
    raw: str
    rest: str


class BodyReader(Protocol):
    """Reads from behind an opening mark to the end of what is called there.

    Where it stops depends on the characters alone, not on how they were cut into pieces. ``finish`` leaves no rest.
    """

    def push(self, text: str) -> Body | None: ...
    def finish(self) -> Body: ...


class MarkedCalls:
    """Reads answers in which each call, or list of calls, stands between ``begin`` and ``end``.

    White space before a call, and all there is after it, is no content. A missing ``end`` is forgiven; anything else
    that is wrong with a call makes it content, from the mark on. Calls beyond ``max_calls`` are left out.
    """

    def __init__(self, begin: str, end: str, new_reader: Callable[[], BodyReader], max_calls: int) -> None:
        self._begin, self._end, self._new_reader, self._calls_left = begin, end, new_reader, max_calls
        self._reader: BodyReader | None = None
        self._held = ""  # may be the beginning of a mark, with the white space before it
        self._space = ""  # between content and the call that is being read
        self._follows_call = self._has_content = self._end_may_come = False

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        while text:
            text = self._read_body(text, events) if self._reader is not None else self._read_content(text, events)
        return events

    def finish(self) -> list[Event]:
        events: list[Event] = []
        if self._reader is not None:
            self._take(self._reader.finish(), events)
        elif not self._end_may_come and not (self._follows_call and self._held.isspace()):
            self._say(self._held, events)
        self._held = ""
        return events

    def _read_body(self, text: str, events: list[Event]) -> str:
        assert self._reader is not None
        body = self._reader.push(text)
        return "" if body is None else self._take(body, events)

    def _take(self, body: Body, events: list[Event]) -> str:
        self._reader = None
        if body.calls:
            self._follows_call = self._end_may_come = True
            for call in body.calls[: self._calls_left]:
                events += [CallBegin(call.name), CallArguments(call.arguments)]
            self._calls_left = max(0, self._calls_left - len(body.calls))
        else:
            self._say(self._space + self._begin + body.raw, events)
        self._space = ""
        return body.rest

    def _read_content(self, text: str, events: list[Event]) -> str:
        text, self._held = self._held + text, ""
        if self._end_may_come:
            text = self._skip_end(text)
        at = text.find(self._begin)
        if at >= 0:
            said = _content_of(text[:at])
            self._space = text[len(said) : at]
            self._say(said, events)
            self._reader = self._new_reader()
            self._end_may_come = False
            return text[at + len(self._begin) :]
        keep = len(text) - _partial(text, self._begin)
        said = _content_of(text[:keep]) if not self._end_may_come else ""
        self._held = text[len(said) :]
        self._say(said, events)
        return ""

    def _skip_end(self, text: str) -> str:
        """The text behind the closing mark of the call before, if it comes; it is not known yet while it may."""
        bare = text.lstrip()
        is_near = len(text) - len(bare) <= MAX_SPACE
        self._end_may_come = is_near and self._end.startswith(bare) and bare != self._end
        return bare.removeprefix(self._end) if is_near and bare.startswith(self._end) else text

    def _say(self, text: str, events: list[Event]) -> None:
        if self._follows_call and not self._has_content:
            text = text.lstrip()
        if text:
            self._follows_call, self._has_content = False, True
            events.append(Content(text))


def _content_of(text: str) -> str:
    """Text without the white space at its end, if there is not too much of it."""
    return text[: max(len(text.rstrip()), len(text) - MAX_SPACE)]


def _partial(text: str, mark: str) -> int:
    """Length of the longest end of ``text`` that begins ``mark``."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
