"""Tool calls that models write as ``<function=NAME><parameter=KEY>VALUE</parameter></function>``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specmamba.server.tools.formats import typed_value, types_of_value, write_json
from specmamba.server.tools.parsing import CallArguments, CallBegin, Event, length_of_partial

FUNCTION, PARAMETER = "<function=", "<parameter="
FUNCTION_END, PARAMETER_END = "</function>", "</parameter>"
MAX_NAME = 256


class XmlCall:
    """``BodyReader`` of one call in XML notation. It begins with its first parameter, or with its end.

    A value ends at the first ``</parameter>``. It is plain text, so that its type comes from the tool's schema; strings
    are given as they come.
    """

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        """``schemas``: of the tools' parameters, by the names of the tools."""
        self._schemas = schemas
        self._raw: list[str] = []  # parsed, before the call began
        self._left = ""  # not parsed yet
        self._searched = 0  # characters of ``_left`` that were searched for the end of a value
        self._name: str | None = None
        self._key: str | None = None
        self._is_string = self._is_at_start = False  # of the value
        self.has_begun = False

    @property
    def raw(self) -> str:
        return "".join(self._raw) + self._left

    def push(self, text: str) -> tuple[list[Event], str | None]:
        self._left += text
        events: list[Event] = []
        while True:
            if self._key is not None:
                if not self._read_value(self._key, events):
                    return events, None
                continue
            options = (FUNCTION,) if self._name is None else (PARAMETER, FUNCTION_END)
            self._skip_space()
            found = next((option for option in options if self._left.startswith(option)), None)
            if found is FUNCTION_END:
                self._move(len(FUNCTION_END))
                self._end(events)
                return events, self._take_rest()
            if found is None and any(option.startswith(self._left) for option in options):
                return events, None
            name = "" if found is None else self._read_name(found)
            if name is None:
                return events, None
            if found is None or not self._take_name(found, name, events):
                if self.has_begun:
                    self._end(events)
                return events, self._take_rest()

    def _take_rest(self) -> str:
        rest, self._left = self._left, ""
        return rest

    def _end(self, events: list[Event]) -> None:
        """End the arguments, also of a call that has an error behind its first parameter."""
        if not self.has_begun:
            self._begin(events)
        events.append(CallArguments("}"))

    def _begin(self, events: list[Event]) -> None:
        assert self._name is not None
        self.has_begun = True
        events += [CallBegin(self._name), CallArguments("{")]

    def _read_name(self, opening: str) -> str | None:
        """The name before the next ">"; empty when it is too long, None when it is incomplete."""
        at = self._left.find(">", len(opening), len(opening) + MAX_NAME)
        if at >= 0:
            return self._left[len(opening) : at]
        return None if len(self._left) < len(opening) + MAX_NAME else ""

    def _take_name(self, opening: str, name: str, events: list[Event]) -> bool:
        if not name or (opening is FUNCTION and name not in self._schemas):
            return False
        self._move(len(opening) + len(name) + 1)
        if opening is FUNCTION:
            self._name = name
        else:
            self._begin_value(name, events)
        return True

    def _begin_value(self, key: str, events: list[Event]) -> None:
        assert self._name is not None
        before = ", " if self.has_begun else ""
        if not self.has_begun:
            self._begin(events)
        types = types_of_value(key, self._schemas[self._name])
        self._key, self._is_at_start = key, True
        self._is_string = "null" not in types and (not types or "string" in types)
        events.append(CallArguments(f"{before}{write_json(key)}: " + ('"' if self._is_string else "")))

    def _read_value(self, key: str, events: list[Event]) -> bool:
        """Read on in a value; True: up to its end."""
        if self._is_at_start and self._left:  # templates put the value on lines of its own
            self._move(self._left.startswith("\n"))
            self._is_at_start = False
        at = self._left.find(PARAMETER_END, self._searched)
        if at < 0 and not self._is_string:
            self._searched = max(0, len(self._left) - len(PARAMETER_END) + 1)
            return False
        value = (
            self._left[:at] if at >= 0 else self._left[: len(self._left) - length_of_partial(self._left, PARAMETER_END)]
        )
        value = value.removesuffix("\n")
        self._move(len(value) if at < 0 else at + len(PARAMETER_END))
        assert self._name is not None
        if self._is_string:
            written = write_json(value)[1:-1] + ('"' if at >= 0 else "")
        else:
            written = write_json(typed_value(value, key, self._schemas[self._name]))
        if written:
            events.append(CallArguments(written))
        if at >= 0:
            self._key, self._searched = None, 0
        return at >= 0

    def _skip_space(self) -> None:
        self._move(len(self._left) - len(self._left.lstrip()))

    def _move(self, size: int) -> None:
        if not self.has_begun:
            self._raw.append(self._left[:size])
        self._left = self._left[size:]
