"""Reading of JSON schemas: known keywords, references, combination of schemas, and when two exclude each other.

Two schemas that exclude each other (no value is valid against both) make ``oneOf`` the same as ``anyOf``.
"""

from __future__ import annotations

import json
import math
from typing import Any
from urllib.parse import unquote

from specmamba.errors import RequestError

Schema = dict[str, Any]

OF_TYPE: dict[str, frozenset[str]] = {
    "object": frozenset({"properties", "required", "additionalProperties", "minProperties", "maxProperties"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems", "uniqueItems"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
}
TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
COMBINING = frozenset({"$ref", "allOf", "anyOf", "oneOf"})
ASSERTING = frozenset({"type", "enum", "const"}).union(*OF_TYPE.values())
# Keywords that do not change which values are valid.
ANNOTATIONS = frozenset(
    {"$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "examples", "deprecated"}
    | {"readOnly", "writeOnly", "contentEncoding", "contentMediaType", "contentSchema", "discriminator"}
)
DRAFTS = ("draft/2020-12/schema", "draft/2019-09/schema", "draft-07/schema", "draft-06/schema")
MAX_DEPTH, MAX_REFERENCES = 64, 64
_MAX_DISJOINT_DEPTH = 4


class SchemaReader:
    """One JSON schema document.

    Raises:
        RequestError: it is not a JSON schema, nests too deep, or names an unknown draft.
    """

    def __init__(self, text: str) -> None:
        try:
            self.root: Any = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
        except (ValueError, RecursionError) as error:
            raise refusal(f"not valid JSON: {error}") from None
        _check_depth(self.root, MAX_DEPTH)
        draft = self.root.get("$schema") if isinstance(self.root, dict) else None
        name = draft.rstrip("#").partition("json-schema.org/")[2] if isinstance(draft, str) else None
        if draft is not None and name not in DRAFTS:
            raise refusal(f"'$schema' is {draft!r:.80}, but only {', '.join(DRAFTS)} are supported")
        self._has_prefix_items = draft is None or name == DRAFTS[0]

    def read(self, schema: Any, place: str) -> Schema:
        """Rewrite a schema to an equivalent one without ``$ref``, ``allOf`` and ``const``.

        Raises:
            RequestError: it uses a keyword that is not supported, or is not a schema.
        """
        return self._read(schema, place, 0)

    def _read(self, schema: Any, place: str, num_followed: int) -> Schema:
        if num_followed > MAX_REFERENCES:
            raise refusal("it refers to itself without end", place)
        found = self._checked(schema, place)
        parts = [found.pop("$ref")] if "$ref" in found else []
        conditions = [self._target(reference, place) for reference in parts]
        if "allOf" in found:
            conditions += schemas(found.pop("allOf"), "allOf", place)
        if "const" in found:
            conditions.append({"enum": [found.pop("const")]})
        for condition in conditions:
            found = merge(found, self._read(condition, place, num_followed + 1), place)
        return found

    def _checked(self, schema: Any, place: str) -> Schema:
        if schema is True:
            return {}
        if schema is False:
            raise refusal("'false' allows no value at all", place)
        if not isinstance(schema, dict):
            raise refusal(f"a schema is an object, not {schema!r:.40}", place)
        for keyword in schema:
            known = keyword in ASSERTING or keyword in COMBINING or keyword in ANNOTATIONS or keyword.startswith("x-")
            if not known or (keyword == "$id" and schema is not self.root):
                raise refusal(f"'{keyword:.40}' is not supported", place)
        if "prefixItems" in schema and not self._has_prefix_items:
            raise refusal("'prefixItems' is a keyword of draft 2020-12, which '$schema' does not name", place)
        return {k: v for k, v in schema.items() if k not in ANNOTATIONS and not k.startswith("x-")}

    def _target(self, reference: Any, place: str) -> Any:
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise refusal(f"'$ref' to {reference!r:.80} is not supported: only '#/...' is", place)
        found = self.root
        for part in reference.split("/")[1:]:
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif isinstance(found, list) and name.isascii() and name.isdigit() and int(name[:9]) < len(found):
                found = found[int(name)]
            else:
                raise refusal(f"'$ref' to {reference!r:.80} points to nothing", place)
        return found


def refusal(reason: str, place: str = "") -> RequestError:
    """The error for a schema, with the reason and the place."""
    where = f" (at {place:.200})" if place else ""
    return RequestError(f"JSON schema: {reason}{where}", "grammar")


def merge(one: Schema, other: Schema, place: str) -> Schema:
    """Combine two schemas: values are valid against the result if they are valid against both.

    Raises:
        RequestError: both have a keyword, with values that cannot be combined.
    """
    for first, second in ((one, other), (other, one)):
        if first.get("additionalProperties", True) not in (True, {}) and not _names(second) <= _names(first):
            raise refusal("'additionalProperties' beside combined 'properties' is not supported", place)
        if "prefixItems" in first and "items" in second and "prefixItems" not in second:
            raise refusal("'prefixItems' combined with 'items' of another schema is not supported", place)
    merged = dict(one)
    for keyword, value in other.items():
        merged[keyword] = _both(keyword, merged[keyword], value, place) if keyword in merged else value
    return merged


def is_same(one: Any, other: Any) -> bool:
    """Whether two values are equal by the rules of JSON schema: 1 equals 1.0, and neither equals true."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    return bool(one == other)


def has_type(value: Any, name: str) -> bool:
    """Whether a value has this type of JSON schema."""
    if isinstance(value, bool) or value is None:
        return name == ("null" if value is None else "boolean")
    if isinstance(value, (int, float)):
        return name == "number" or (name == "integer" and value == int(value))
    return name == ("string" if isinstance(value, str) else "array" if isinstance(value, list) else "object")


def types_of(schema: Schema, place: str) -> list[str] | None:
    """The types that a schema names; None where it names none."""
    if "type" not in schema:
        return None
    value = schema["type"]
    names = value if isinstance(value, list) else [value]
    if not names or not all(isinstance(name, str) and name in TYPES for name in names):
        raise refusal(f"'type' is {value!r:.80}, but should be one of {', '.join(TYPES)}, or a list of them", place)
    return list(dict.fromkeys(names))


def schemas(value: Any, keyword: str, place: str) -> list[Any]:
    """Check that a value is a list of schemas that is not empty."""
    if not isinstance(value, list) or not value:
        raise refusal(f"'{keyword}' is not a list of schemas", place)
    return value


def are_disjoint(reader: SchemaReader, one: Schema, other: Schema, place: str, depth: int = 0) -> bool:
    """Whether two schemas certainly exclude each other. Both are results of ``reader.read``."""
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
    is_about_objects = types == ["object"] and others == ["object"] and depth < _MAX_DISJOINT_DEPTH
    return is_about_objects and (
        _differ_in_a_property(reader, one, other, place, depth) or _refuses(one, other) or _refuses(other, one)
    )


def _overlap(types: list[str], others: list[str]) -> bool:
    wide = {"number", "integer"}
    return bool(set(types) & set(others)) or bool(wide & set(types) and wide & set(others))


def _differ_in_a_property(reader: SchemaReader, one: Schema, other: Schema, place: str, depth: int) -> bool:
    """Whether both require a property whose schemas exclude each other."""
    mine, theirs = _properties(one), _properties(other)
    for name in _required(one) & _required(other) & mine.keys() & theirs.keys():
        inner = f"{place}/properties/{name}"
        if are_disjoint(reader, reader.read(mine[name], inner), reader.read(theirs[name], inner), inner, depth + 1):
            return True
    return False


def _refuses(one: Schema, other: Schema) -> bool:
    """Whether one schema forbids a property that the other requires."""
    return one.get("additionalProperties") is False and bool(_required(other) - _properties(one).keys())


def _properties(schema: Schema) -> dict[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


def _required(schema: Schema) -> set[str]:
    found = schema.get("required")
    return {name for name in found if isinstance(name, str)} if isinstance(found, list) else set()


def _both(keyword: str, one: Any, other: Any, place: str) -> Any:
    if one == other and is_same(one, other):
        return one
    if keyword == "properties" and isinstance(one, dict) and isinstance(other, dict):
        shared = {
            name: {"allOf": [one[name], other[name]]} for name in one if name in other and one[name] != other[name]
        }
        return one | other | shared
    if keyword == "required" and isinstance(one, list) and isinstance(other, list):
        return [*one, *(name for name in other if name not in one)]
    if keyword == "enum" and isinstance(one, list) and isinstance(other, list):
        return [value for value in one if any(is_same(value, allowed) for allowed in other)]
    if keyword == "type":
        return _both_types(types_of({"type": one}, place) or [], types_of({"type": other}, place) or [], place)
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (one, other))
    if numbers and (keyword.startswith("min") or keyword == "exclusiveMinimum"):
        return max(one, other)
    if numbers and (keyword.startswith("max") or keyword == "exclusiveMaximum"):
        return min(one, other)
    raise refusal(f"'{keyword}' is given twice, with values that cannot be combined", place)


def _both_types(one: list[str], other: list[str], place: str) -> list[str]:
    both = [name for name in one if name in other or (name == "integer" and "number" in other)]
    both += [name for name in other if name == "integer" and "number" in one and name not in both]
    if not both:
        raise refusal("schemas that are combined have no 'type' in common", place)
    return both


def _names(schema: Schema) -> set[str]:
    properties = schema.get("properties")
    return set(properties) if isinstance(properties, dict) else set()


def _check_depth(value: Any, room: int) -> None:
    if room < 0:
        raise refusal(f"it nests deeper than {MAX_DEPTH} levels")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_depth(inner, room - 1)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.40} is too large a number")
    return value
