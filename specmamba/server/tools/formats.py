"""Tool calls as models write them: JSON objects, or ``<function=NAME><parameter=KEY>VALUE</parameter></function>``."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from specmamba.server.tools.parsing import Body, WholeCall

_MARKS = re.compile(r'["\\{}\[\]]')
_PYTHON_WORDS = {"True": True, "False": False, "None": None}
MAX_SCHEMAS = 256  # subschemas that are searched for the type of one value
FUNCTION, PARAMETER = "<function=", "<parameter="
FUNCTION_END, PARAMETER_END = "</function>", "</parameter>"
MAX_NAME = 256


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
    properties = schema.get("properties")
    types = allowed_types(properties.get(key) if isinstance(properties, dict) else None, schema)
    bare = text.strip()
    if not types or "string" in types:
        return None if "null" in types and bare == "null" else text
    if bare in _PYTHON_WORDS:
        return _PYTHON_WORDS[bare]
    try:
        return read_json(bare)
    except ValueError:
        return text


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


class JsonCalls:
    """``BodyReader`` of one JSON value: a call, or an array of calls. Calls of unknown tools are not calls."""

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
    """The calls of a JSON value; none when one of them is invalid."""
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
    if isinstance(arguments, str):  # a string that contains JSON, as in OpenAI's messages
        arguments = read_json(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("no arguments")
    return WholeCall(name, write_json(arguments))


class XmlCall:
    """``BodyReader`` of one call in XML notation.

    A value ends at the first ``</parameter>``. It is plain text, so that its type comes from the tool's schema.
    """

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        """``schemas``: of the tools' parameters, by the names of the tools."""
        self._schemas = schemas
        self._raw: list[str] = []  # parsed
        self._left = ""  # not parsed yet
        self._searched = 0  # characters of ``_left`` that were searched for the end of a value
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
        """The name before the next ">"; empty when it is too long, None when it is incomplete."""
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
        value = self._left[:at].removeprefix("\n").removesuffix("\n")  # templates put the value on lines of its own
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
