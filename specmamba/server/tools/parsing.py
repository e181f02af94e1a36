"""From the text of an answer, piece by piece, to content and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

MAX_SPACE = (
    256  # characters of white space around calls that are not content; they are held back until more text follows
)


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The beginning of a tool call."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the newest call's arguments, which are JSON."""

    text: str


Event = Reasoning | Content | CallBegin | CallArguments


class AnswerParser(Protocol):
    """Parses one answer while it is generated. The result does not depend on how the text is cut into pieces.

    No text is an error: what is not a valid call is content.
    """

    def push(self, text: str) -> list[Event]: ...
    def finish(self) -> list[Event]: ...


class PlainText:
    """``AnswerParser`` without tools: all text is content."""

    def push(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return []


@dataclass(frozen=True, slots=True)
class WholeCall:
    """A call with all of its arguments, a JSON object as text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """The content, the calls and the reasoning of a complete answer."""

    content: str
    calls: tuple[WholeCall, ...]
    reasoning: str = ""


def whole_answer(events: Iterable[Event]) -> WholeAnswer:
    """Collect the events of a complete answer."""
    reasoning: list[str] = []
    content: list[str] = []
    calls: list[tuple[str, list[str]]] = []
    for event in events:
        match event:
            case Reasoning(text):
                reasoning.append(text)
            case Content(text):
                content.append(text)
            case CallBegin(name):
                calls.append((name, []))
            case CallArguments(text):
                calls[-1][1].append(text)
    whole_calls = tuple(WholeCall(name, "".join(pieces)) for name, pieces in calls)
    return WholeAnswer("".join(content), whole_calls, "".join(reasoning))


class BodyReader(Protocol):
    """Parses the calls behind an opening mark, up to their end.

    Calls are given as they come, so that what turns out wrong behind their beginning cannot be taken back. The end
    depends on the characters only, not on how they are cut into pieces.
    """

    @property
    def has_begun(self) -> bool: ...  # whether a call was given
    @property
    def raw(self) -> str: ...  # all that was read, which is content as long as no call has begun
    def push(self, text: str) -> tuple[list[Event], str | None]: ...  # the rest behind the end; None: it goes on


class MarkedCalls:
    """``AnswerParser`` of answers in which each call, or list of calls, stands between the marks ``begin`` and ``end``.

    White space around a call is not content. A missing ``end`` is accepted. What has an error before a call begins
    (which is when the name of a tool and the beginning of its arguments are known) becomes content, including its
    opening mark; arguments are given as they are written. Calls beyond ``max_calls`` are dropped.
    """

    def __init__(self, begin: str, end: str, new_reader: Callable[[], BodyReader], max_calls: int) -> None:
        self._begin, self._end, self._new_reader, self._calls_left = begin, end, new_reader, max_calls
        self._reader: BodyReader | None = None
        self._held = ""  # possible beginning of a mark, and the white space before it
        self._space = ""  # between content and the call that is being parsed
        self._follows_call = self._has_content = self._end_may_come = self._is_kept = False

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        while text:
            text = self._read_body(text, events) if self._reader is not None else self._read_content(text, events)
        return events

    def finish(self) -> list[Event]:
        events: list[Event] = []
        if self._reader is not None:
            self._end_body(self._reader, events)
        elif not self._end_may_come and not (self._follows_call and self._held.isspace()):
            self._add_content(self._held, events)
        self._held = ""
        return events

    def _read_body(self, text: str, events: list[Event]) -> str:
        assert self._reader is not None
        found, rest = self._reader.push(text)
        for event in found:
            self._add(event, events)
        if rest is None:
            return ""
        self._end_body(self._reader, events)
        return rest

    def _add(self, event: Event, events: list[Event]) -> None:
        """Add what the reader has found, unless it belongs to a call that is dropped."""
        if isinstance(event, Content):
            self._add_content(event.text, events)
            return
        if isinstance(event, CallBegin):
            self._is_kept = self._calls_left > 0
            self._calls_left -= self._is_kept
            self._follows_call = True
        if self._is_kept:
            events.append(event)

    def _end_body(self, reader: BodyReader, events: list[Event]) -> None:
        self._reader = None
        if reader.has_begun:
            self._follows_call = self._end_may_come = True
        else:
            self._add_content(self._space + self._begin + reader.raw, events)
        self._space = ""

    def _read_content(self, text: str, events: list[Event]) -> str:
        text, self._held = self._held + text, ""
        if self._end_may_come:
            text = self._skip_end(text)
        at = text.find(self._begin)
        if at >= 0:
            said = without_space_at_end(text[:at])
            self._space = text[len(said) : at]
            self._add_content(said, events)
            self._reader = self._new_reader()
            self._end_may_come = False
            return text[at + len(self._begin) :]
        keep = len(text) - length_of_partial(text, self._begin)
        said = without_space_at_end(text[:keep]) if not self._end_may_come else ""
        self._held = text[len(said) :]
        self._add_content(said, events)
        return ""

    def _skip_end(self, text: str) -> str:
        """Remove the closing mark of the previous call. While the mark is incomplete, ``_end_may_come`` stays set."""
        bare = text.lstrip()
        is_near = len(text) - len(bare) <= MAX_SPACE
        self._end_may_come = is_near and self._end.startswith(bare) and bare != self._end
        return bare.removeprefix(self._end) if is_near and bare.startswith(self._end) else text

    def _add_content(self, text: str, events: list[Event]) -> None:
        if self._follows_call and not self._has_content:
            text = text.lstrip()
        if text:
            self._follows_call, self._has_content = False, True
            events.append(Content(text))


def without_space_at_end(text: str) -> str:
    """Text without white space at its end, of which at most ``MAX_SPACE`` characters are removed."""
    return text[: max(len(text.rstrip()), len(text) - MAX_SPACE)]


def length_of_partial(text: str, mark: str) -> int:
    """Length of the longest suffix of ``text`` that is a prefix of ``mark``."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
