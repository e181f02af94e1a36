"""Calls written as JSON: ``{"name": ..., "arguments": {...}}``, or an array of such objects."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from specmamba.server.tools.events import WholeCall
from specmamba.server.tools.json_scan import JsonScan
from specmamba.server.tools.json_text import read_json, write_json
from specmamba.server.tools.marked import Body


class JsonCalls:
    """Reads one JSON value behind an opening mark. Calls of tools that nobody offered are no calls."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._pieces: list[str] = []
        self._scan: JsonScan | None = None

    def push(self, text: str) -> Body | None:
        if self._scan is None:
            bare = text.lstrip()
            self._pieces.append(text[: len(text) - len(bare)])
            if not bare:
                return None
            if bare[0] not in "{[":
                return Body((), "".join(self._pieces), bare)
            self._scan, text = JsonScan(), bare
        size = self._scan.push(text)
        self._pieces.append(text[:size])
        if size is None:
            return None
        raw = "".join(self._pieces)
        return Body(_calls(raw, self._names), raw, text[size:])

    def finish(self) -> Body:
        return Body((), "".join(self._pieces), "")


def _calls(raw: str, names: Collection[str]) -> tuple[WholeCall, ...]:
    """All calls of a value, or none when anything is wrong with one of them."""
    try:
        value = read_json(raw)
        values = value if isinstance(value, list) else [value]
        return tuple(_call(one, names) for one in values)
    except ValueError:
        return ()


def _call(value: Any, names: Collection[str]) -> WholeCall:
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or name not in names:
        raise ValueError("no call")
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):  # JSON within JSON, as in OpenAI's own messages
        arguments = read_json(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("no arguments")
    return WholeCall(name, write_json(arguments))
