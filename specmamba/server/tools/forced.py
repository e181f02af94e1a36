"""Calls that a request insists on: a grammar makes the whole answer one call, so there is nothing to look for."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import PydanticCustomError

from specmamba.core import MAX_GRAMMAR_CHARACTERS, GrammarSpec
from specmamba.server.tools.events import CallArguments, CallBegin, Content, Event
from specmamba.server.tools.json_scan import JsonScan

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"arguments"\s*:\s*(?=\{)')
# A schema may hold what only looks like a reference where it quotes values.
_QUOTING = frozenset({"const", "default", "enum", "examples"})


class NamedCall:
    """An answer that is the arguments of one tool."""

    def __init__(self, name: str) -> None:
        self._opening: list[Event] = [CallBegin(name)]

    def push(self, text: str) -> list[Event]:
        opening, self._opening = self._opening, []
        return [*opening, CallArguments(text)] if text else opening

    def finish(self) -> list[Event]:
        return self.push("")


class RequiredCall:
    """An answer that is ``{"name": ..., "arguments": {...}}``. Cut off before the arguments it is content."""

    def __init__(self) -> None:
        self._head = ""
        self._scan: JsonScan | None = None
        self._is_done = False

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        if self._scan is None:
            self._head += text
            head = _HEAD.match(self._head)
            if head is None:
                return []
            self._scan, text = JsonScan(), self._head[head.end() :]
            events.append(CallBegin(head[1]))
        if text and not self._is_done:
            size = self._scan.push(text)
            self._is_done = size is not None
            events.append(CallArguments(text[:size]))
        return events

    def finish(self) -> list[Event]:
        return [Content(self._head)] if self._scan is None and self._head else []


def arguments_grammar(parameters: Mapping[str, Any]) -> GrammarSpec:
    """Of the arguments of one tool."""
    return _grammar(dict(parameters))


def any_call_grammar(tools: Sequence[tuple[str, Mapping[str, Any]]]) -> GrammarSpec:
    """Of a call of one of these tools, given by name and parameters."""
    definitions: dict[str, Any] = {}
    calls = []
    for index, (name, parameters) in enumerate(tools):
        own = {key: value for key, value in parameters.items() if key != "$schema"}  # is for a root alone
        definitions[f"{index}"] = _moved(own, index)
        for group in ("$defs", "definitions"):
            inner = parameters.get(group)
            if isinstance(inner, dict):
                definitions |= {f"{index}.{key}": _moved(schema, index) for key, schema in inner.items()}
        properties = {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{index}"}}
        required = ["name", "arguments"]
        calls.append({"type": "object", "properties": properties, "required": required, "additionalProperties": False})
    return _grammar({"anyOf": calls, "$defs": definitions})


def _moved(schema: Any, index: int) -> Any:
    """A part of a tool's schema, less its definitions, with references to where they are now."""
    if isinstance(schema, list):
        return [_moved(one, index) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str):
            moved[key] = _moved_reference(value, index)
        elif key not in ("$defs", "definitions") or not isinstance(value, dict):
            moved[key] = value if key in _QUOTING else _moved(value, index)
    return moved


def _moved_reference(reference: str, index: int) -> str:
    if reference in ("#", "#/"):
        return f"#/$defs/{index}"
    for start in ("#/$defs/", "#/definitions/"):
        if reference.startswith(start) and "/" not in reference.removeprefix(start):
            return f"#/$defs/{index}.{reference.removeprefix(start)}"
    if reference.startswith("#/"):
        return f"#/$defs/{index}/{reference[2:]}"
    raise PydanticCustomError("reference", "$ref must begin with #", {"field": "tools"})


def _grammar(schema: Mapping[str, Any]) -> GrammarSpec:
    text = json.dumps(schema, allow_nan=False)
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        message = "the schemas of the tools have {length} characters, but a forced call can have at most {most}"
        words = {"field": "tools", "length": len(text), "most": MAX_GRAMMAR_CHARACTERS}
        raise PydanticCustomError("too_long", message, words)
    return GrammarSpec(kind="json_schema", text=text)
