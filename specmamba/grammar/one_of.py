"""When no value is valid against two schemas: then "exactly one of them" is "any of them", which rules can say."""

from __future__ import annotations

from typing import Any

from specmamba.grammar.schema_reader import Schema, SchemaReader, has_type, is_same, types_of

_MAX_DEPTH = 4


def are_disjoint(reader: SchemaReader, one: Schema, other: Schema, place: str, depth: int = 0) -> bool:
    """Whether it is sure that no value is valid against both. The schemas are as ``reader.read`` gives them."""
    values, more = one.get("enum"), other.get("enum")
    if isinstance(values, list) and isinstance(more, list):
        return not any(is_same(a, b) for a in values for b in more)
    types, others = types_of(one, place), types_of(other, place)
    if isinstance(values, list) or isinstance(more, list):
        constants, names = (values, others) if isinstance(values, list) else (more, types)
        return names is not None and not any(has_type(value, name) for value in constants or () for name in names)
    if types is None or others is None:
        return False
    if not _overlap(types, others):
        return True
    is_about_objects = types == ["object"] and others == ["object"] and depth < _MAX_DEPTH
    return is_about_objects and (
        _differ_in_a_property(reader, one, other, place, depth) or _refuses(one, other) or _refuses(other, one)
    )


def _overlap(types: list[str], others: list[str]) -> bool:
    wide = {"number", "integer"}
    return bool(set(types) & set(others)) or bool(wide & set(types) and wide & set(others))


def _differ_in_a_property(reader: SchemaReader, one: Schema, other: Schema, place: str, depth: int) -> bool:
    """Whether both ask for a property whose values cannot be the same."""
    mine, theirs = _properties(one), _properties(other)
    for name in _required(one) & _required(other) & mine.keys() & theirs.keys():
        inner = f"{place}/properties/{name}"
        if are_disjoint(reader, reader.read(mine[name], inner), reader.read(theirs[name], inner), inner, depth + 1):
            return True
    return False


def _refuses(one: Schema, other: Schema) -> bool:
    """Whether one schema closes its objects to a property that the other asks for."""
    return one.get("additionalProperties") is False and bool(_required(other) - _properties(one).keys())


def _properties(schema: Schema) -> dict[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


def _required(schema: Schema) -> set[str]:
    found = schema.get("required")
    return {name for name in found if isinstance(name, str)} if isinstance(found, list) else set()
