"""Values of arguments that a model has written without quotes, typed by the tool's schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from specmamba.server.tools.json_text import read_json

_PYTHON_WORDS = {"True": True, "False": False, "None": None}
MAX_SCHEMAS = 256  # that are looked at for one value


def typed_value(text: str, key: str, schema: Mapping[str, Any]) -> Any:
    """What a parameter's text stands for: JSON where its schema wants no string, else the text itself."""
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
    """The JSON types of what a schema allows; empty where it does not say. References are those of ``root``."""
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
