"""Calls written as ``<function=NAME><parameter=KEY>VALUE</parameter>...</function>``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specmamba.server.tools.arguments import typed_value
from specmamba.server.tools.events import WholeCall
from specmamba.server.tools.json_text import write_json
from specmamba.server.tools.marked import Body

FUNCTION, PARAMETER = "<function=", "<parameter="
FUNCTION_END, PARAMETER_END = "</function>", "</parameter>"
MAX_NAME = 256


class XmlCall:
    """Reads one call behind an opening mark. ``schemas``: of the tools' parameters, by the names of the tools.

    Values are text as it stands, so the schema says what they are; a value goes to the first ``</parameter>``.
    """

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self._schemas = schemas
        self._raw: list[str] = []  # what has been understood
        self._left = ""  # what has not
        self._searched = 0  # characters of it that hold no end of a value
        self._name: str | None = None
        self._key: str | None = None
        self._arguments: dict[str, Any] = {}

    def push(self, text: str) -> Body | None:
        self._left += text
        while True:
            if self._key is not None:
                if not self._read_value(self._key):
                    return None
                continue
            options = (FUNCTION,) if self._name is None else (PARAMETER, FUNCTION_END)
            self._skip_space()
            found = next((option for option in options if self._left.startswith(option)), None)
            if found is None:
                return None if any(option.startswith(self._left) for option in options) else self._broken()
            if found is FUNCTION_END:
                return self._whole()
            name = self._read_name(found)
            if name is None:
                return None
            if not self._take_name(found, name):
                return self._broken()

    def finish(self) -> Body:
        return Body((), "".join(self._raw) + self._left, "")

    def _read_name(self, opening: str) -> str | None:
        """What stands before the next ">"; empty when it is too far away, None when it may still come."""
        at = self._left.find(">", len(opening), len(opening) + MAX_NAME)
        if at >= 0:
            return self._left[len(opening) : at]
        return None if len(self._left) < len(opening) + MAX_NAME else ""

    def _take_name(self, opening: str, name: str) -> bool:
        if not name or (opening is FUNCTION and name not in self._schemas):
            return False
        self._move(len(opening) + len(name) + 1)
        self._name, self._key = (name, None) if opening is FUNCTION else (self._name, name)
        return True

    def _read_value(self, key: str) -> bool:
        at = self._left.find(PARAMETER_END, self._searched)
        if at < 0:
            self._searched = max(0, len(self._left) - len(PARAMETER_END) + 1)
            return False
        assert self._name is not None
        value = self._left[:at].removeprefix("\n").removesuffix("\n")  # the template puts it on lines of its own
        self._arguments[key] = typed_value(value, key, self._schemas[self._name])
        self._key, self._searched = None, 0
        self._move(at + len(PARAMETER_END))
        return True

    def _skip_space(self) -> None:
        self._move(len(self._left) - len(self._left.lstrip()))

    def _move(self, size: int) -> None:
        self._raw.append(self._left[:size])
        self._left = self._left[size:]

    def _whole(self) -> Body:
        assert self._name is not None
        self._move(len(FUNCTION_END))
        call = WholeCall(self._name, write_json(self._arguments))
        return Body((call,), "".join(self._raw), self._left)

    def _broken(self) -> Body:
        return Body((), "".join(self._raw), self._left)
