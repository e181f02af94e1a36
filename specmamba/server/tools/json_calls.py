"""Tool calls that models write as JSON: ``{"name": ..., "arguments": {...}}``, or an array of them."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from specmamba.server.tools.formats import JsonScan, read_json, write_json
from specmamba.server.tools.parsing import CallArguments, CallBegin, Content, Event, WholeCall

# A call up to the beginning of its arguments.
HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"arguments"\s*:\s*(?=\{)')
MAX_HEAD = 1024  # characters; a call with a longer head begins when it is whole
_BETWEEN_CALLS = ", \t\r\n"


class JsonCalls:
    """``BodyReader`` of one JSON value: a call, or an array of calls. Calls of unknown tools are not calls."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._pieces: list[str] = []
        self._scan: JsonScan | None = None
        self._call: _JsonCall | None = None
        self._has_failed = False
        self.has_begun = False

    @property
    def raw(self) -> str:
        return "".join(self._pieces)

    def push(self, text: str) -> tuple[list[Event], str | None]:
        events: list[Event] = []
        if self._scan is None:
            bare = text.lstrip()
            self._pieces.append(text[: len(text) - len(bare)])
            if not bare or bare[0] not in "{[":
                return events, bare or None
            self._scan, text = JsonScan(), bare
            is_list = bare[0] == "["
        else:
            is_list = False
        size = self._scan.push(text)
        self._pieces.append(text[:size])
        self._read(text[is_list:size], events)
        return events, None if size is None else text[size:]

    def _read(self, text: str, events: list[Event]) -> None:
        """Read calls, and what stands between them in an array."""
        while text and not self._has_failed:
            if self._call is None:
                text = text.lstrip(_BETWEEN_CALLS)
                if not text or text[0] == "]":
                    return
                if text[0] != "{":
                    self._has_failed = True
                    break
                self._call = _JsonCall(self._names)
            rest = self._call.push(text, events)
            self.has_begun |= self._call.has_begun
            if rest is None:
                return
            if not self._call.has_begun:
                self._has_failed, rest = True, self._call.head + rest
            self._call, text = None, rest
        if text and self.has_begun:  # what follows the other calls of an array, and is none
            events.append(Content(text))


class _JsonCall:
    """One call as a JSON object. It begins where its arguments do, if these follow the name, else when it is whole."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._scan = JsonScan()
        self._arguments: JsonScan | None = None  # None: not in the arguments
        self.head = ""  # up to the beginning of the call
        self.has_begun = False

    def push(self, text: str, events: list[Event]) -> str | None:
        """Read on; gives the text behind the object, or None where it goes on."""
        size = self._scan.push(text)
        if self.has_begun:
            self._read_arguments(text[:size], events)
        else:
            self._read_head(text[:size], events, is_whole=size is not None)
        return None if size is None else text[size:]

    def _read_head(self, text: str, events: list[Event], *, is_whole: bool) -> None:
        may_match = len(self.head) < MAX_HEAD
        self.head += text
        found = HEAD.match(self.head[:MAX_HEAD]) if may_match else None
        if found is not None and found[1] in self._names:
            self.has_begun, self._arguments = True, JsonScan()
            events.append(CallBegin(found[1]))
            self._read_arguments(self.head[found.end() :], events)
        elif is_whole and (call := _whole_call(self.head, self._names)) is not None:
            self.has_begun = True
            events += [CallBegin(call.name), CallArguments(call.arguments)]

    def _read_arguments(self, text: str, events: list[Event]) -> None:
        if self._arguments is None or not text:
            return
        size = self._arguments.push(text)
        events.append(CallArguments(text[:size]))
        if size is not None:
            self._arguments = None


def _whole_call(text: str, names: Collection[str]) -> WholeCall | None:
    """The call that a JSON object is; None: it is none."""
    try:
        return _call(read_json(text), names)
    except ValueError:
        return None


def _call(value: Any, names: Collection[str]) -> WholeCall:
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or name not in names:
        raise ValueError("no call")
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):  # a string that contains JSON, as in OpenAI's messages
        arguments = read_json(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("no arguments")
    return WholeCall(name, write_json(arguments))
