"""JSON as it stands in tool calls: read, written, its end found, and values typed by the schema of a tool."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

_MARKS = re.compile(r'["\\{}\[\]]')
_PYTHON_WORDS = {"True": True, "False": False, "None": None}
MAX_DEPTH = 64  # of JSON values that are passed to templates and grammars, or given to clients as values
MAX_SCHEMAS = 256  # subschemas that are searched for the type of one value


def read_json(text: str) -> Any:
    """Parse JSON. Raises ValueError for anything else, also for NaN and for nesting that is too deep."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def write_json(value: Any) -> str:
    """Serialize to JSON that UTF-8 can encode."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which must be escaped
        return json.dumps(value)
    return text


def is_shallow(value: Any) -> bool:
    """Whether a JSON value is nested at most ``MAX_DEPTH`` deep."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = (one.values() if isinstance(one, dict) else one if isinstance(one, list) else () for one in level)
        level = [part for parts in inner for part in parts]
        if not level:
            return True
    return False


def can_be_written(value: Any) -> bool:
    """Whether an answer can have this JSON value: shallow, with finite numbers, without halves of surrogate pairs."""
    if not is_shallow(value):
        return False
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return False
    return True


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


class JsonScan:
    """Finds the end of a JSON object or array in a text that is still generated.

    Only brackets outside of strings are counted; whether the value is valid JSON is not checked.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._skip_next = False  # the last character of the previous piece was a backslash

    def push(self, text: str) -> int | None:
        """The number of characters of this piece that belong to the value; None when the value goes on after it.

        The first character of the first piece must be the opening bracket.
        """
        at = 1 if self._skip_next and text else 0
        self._skip_next = self._skip_next and not text
        while mark := _MARKS.search(text, at):
            at = mark.end()
            match mark[0]:
                case "\\":
                    at += 1
                case '"':
                    self._in_string = not self._in_string
                case "{" | "[" if not self._in_string:
                    self._depth += 1
                case "}" | "]" if not self._in_string:
                    self._depth -= 1
                    if self._depth == 0:
                        return at
        self._skip_next = self._skip_next or at > len(text)
        return None


def typed_value(text: str, key: str, schema: Mapping[str, Any]) -> Any:
    """The value of a parameter that a model has written without quotes.

    It is parsed as JSON where the schema of the parameter does not allow a string, else it is the text itself.
    """
    types = types_of_value(key, schema)
    bare = text.strip()
    if not types or "string" in types:
        return None if "null" in types and bare == "null" else text
    if bare in _PYTHON_WORDS:
        return _PYTHON_WORDS[bare]
    try:
        return read_json(bare)
    except ValueError:
        return text


def types_of_value(key: str, schema: Mapping[str, Any]) -> set[str]:
    """The JSON types that the schema of a tool allows for one of its parameters; empty when it does not say."""
    properties = schema.get("properties")
    return allowed_types(properties.get(key) if isinstance(properties, dict) else None, schema)


def allowed_types(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """The JSON types that a schema allows; empty when it does not say. References are resolved in ``root``."""
    types: set[str] = set()
    seen: set[int] = set()
    waiting = [schema]
    while waiting and len(seen) < MAX_SCHEMAS:
        one = waiting.pop()
        if not isinstance(one, dict) or id(one) in seen:
            continue
        seen.add(id(one))
        types.update(_own_types(one))
        for name in ("anyOf", "oneOf", "allOf"):
            waiting += one[name] if isinstance(one.get(name), list) else ()
        waiting.append(_referred(one.get("$ref"), root))
    return types


def _own_types(schema: Mapping[str, Any]) -> Iterator[str]:
    kinds = schema.get("type")
    if kinds is not None:
        yield from (kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str))
        return
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    for value in values if isinstance(values, list) else ():
        yield "string" if isinstance(value, str) else "null" if value is None else "number"


def _referred(reference: Any, root: Mapping[str, Any]) -> Any:
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: Any = root
    for part in reference[2:].split("/"):
        found = found.get(part) if isinstance(found, dict) else None
    return found
