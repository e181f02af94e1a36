"""Translation of a JSON schema to rules.

Every text of the rules is valid against the schema, but the rules do not match every valid text. Objects have their
properties in the order in which the schema names them, and other properties only where it has ``additionalProperties``.
A keyword that rules cannot guarantee is refused by name.
"""

from __future__ import annotations

import json
from collections import deque
from itertools import combinations
from typing import Any

from specmamba.grammar.ebnf import Rules, one_of, repeated
from specmamba.grammar.json_values import (
    COLON,
    COMMA,
    any_object,
    anything,
    constant,
    container,
    count,
    enum,
    key_except,
    number,
    string,
)
from specmamba.grammar.schema_reader import (
    OF_TYPE,
    Schema,
    SchemaReader,
    are_disjoint,
    merge,
    refusal,
    schemas,
    types_of,
)

MAX_PROPERTIES, MAX_BRANCHES = 512, 128


def schema_rules(text: str) -> str:
    """Write the rules for the texts of a JSON schema.

    Raises:
        RequestError: it is not a schema, or uses something unsupported; the message names the keyword and the place.
    """
    return _SchemaRules(SchemaReader(text)).text()


def object_rules() -> str:
    """Write the rules for any JSON object."""
    rules = Rules()
    return rules.text(any_object(rules))


class _SchemaRules:
    """Writes the rules of one document. Schemas wait in a queue, so that recursive ones do not recurse here."""

    def __init__(self, reader: SchemaReader) -> None:
        self._reader = reader
        self._rules = Rules()
        self._name_of: dict[str, str] = {}
        self._waiting: deque[tuple[str, Any, str]] = deque()

    def text(self) -> str:
        root = self._rule(self._reader.root, "#")
        while self._waiting:
            name, schema, place = self._waiting.popleft()
            self._rules.define(name, self._value(self._reader.read(schema, place), place))
        return self._rules.text(root)

    def _rule(self, schema: Any, place: str) -> str:
        key = json.dumps(schema)
        if key not in self._name_of:
            self._name_of[key] = self._rules.reserve()
            self._waiting.append((self._name_of[key], schema, place))
        return self._name_of[key]

    def _value(self, schema: Schema, place: str) -> str:
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return self._branches(schema, keyword, place)
        if "enum" in schema:
            return enum(schema, place)
        types = types_of(schema, place)
        if types is None:
            types = [name for name, keywords in OF_TYPE.items() if keywords & schema.keys()]
            if not types:
                return anything(self._rules)
        if "number" in types:
            types = [name for name in types if name != "integer"]
        return one_of([self._typed(name, schema, place) for name in types])

    def _branches(self, schema: Schema, keyword: str, place: str) -> str:
        base = {name: value for name, value in schema.items() if name != keyword}
        options = schemas(schema[keyword], keyword, place)
        if len(options) > MAX_BRANCHES:
            raise refusal(f"'{keyword}' has more than {MAX_BRANCHES} schemas", place)
        places = [f"{place}/{keyword}/{index}" for index in range(len(options))]
        read = [self._reader.read(option, inner) for option, inner in zip(options, places, strict=True)]
        merged = [merge(base, option, inner) for option, inner in zip(read, places, strict=True)]
        if keyword == "oneOf" and not all(are_disjoint(self._reader, *pair, place) for pair in combinations(merged, 2)):
            raise refusal(
                "'oneOf' is supported where no value can be valid against two of its schemas; use 'anyOf'", place
            )
        return one_of([self._rule(option, inner) for option, inner in zip(merged, places, strict=True)])

    def _typed(self, name: str, schema: Schema, place: str) -> str:
        match name:
            case "object":
                return self._object(schema, place)
            case "array":
                return self._array(schema, place)
            case "string":
                return self._rules.add(string(self._rules, schema, place))
            case "number" | "integer":
                return self._rules.add(number(name, schema, place))
            case "boolean":
                return '("true" | "false")'
        return '"null"'

    def _object(self, schema: Schema, place: str) -> str:
        properties, extra = (
            schema.get("properties", {}),
            schema.get("additionalProperties", not schema.get("properties")),
        )
        required = schema.get("required", [])
        if not isinstance(properties, dict):
            raise refusal("'properties' is not an object", place)
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise refusal("'required' is not a list of names", place)
        unnamed = [name for name in dict.fromkeys(required) if name not in properties]
        if unnamed and schema.get("additionalProperties") is False:
            raise refusal(f"{unnamed[0]!r:.80} is required, but 'additionalProperties' forbids it", place)
        allowed = schema.get("additionalProperties", True)
        properties = properties | dict.fromkeys(unnamed, allowed)
        if len(properties) > MAX_PROPERTIES:
            raise refusal(f"there are more than {MAX_PROPERTIES} properties", place)
        return self._entries(properties, set(required), extra, schema, place)

    def _entries(self, properties: Schema, required: set[str], extra: Any, schema: Schema, place: str) -> str:
        least, most = count(schema, "minProperties", place), count(schema, "maxProperties", place)
        room = None if most is None else most - len(properties)
        if (least or 0) > len(required):
            raise refusal("'minProperties' above the number of required properties is not supported", place)
        if room is not None and room < 0:
            raise refusal("'maxProperties' below the number of named properties is not supported", place)
        first, later = '""', '""'
        if extra is not False and room != 0:
            key = key_except(self._rules, list(properties))
            entry = f"{key} {COLON} {self._rule(extra, f'{place}/additionalProperties')}"
            more = f"{COMMA} {entry}"
            later = self._rules.add(repeated(more, 0, room))
            first = self._rules.add(f'"" | {entry} {repeated(more, 0, None if room is None else room - 1)}')
        for name, inner in reversed(properties.items()):
            entry = f"{constant(name)} {COLON} {self._rule(inner, f'{place}/properties/{name:.40}')}"
            is_required = name in required
            first, later = (
                self._rules.add(f"{entry} {later}" if is_required else f"{entry} {later} | {first}"),
                self._rules.add(f"{COMMA} {entry} {later}" + ("" if is_required else f" | {later}")),
            )
        return f'"{{" {first} "}}"'

    def _array(self, schema: Schema, place: str) -> str:
        least, most = count(schema, "minItems", place) or 0, count(schema, "maxItems", place)
        if schema.get("uniqueItems", False) is not False and (most is None or most > 1):
            raise refusal("'uniqueItems' is not supported", place)
        if isinstance(schema.get("items"), list):
            raise refusal("'items' as a list is not supported: use 'prefixItems'", place)
        heads = schemas(schema["prefixItems"], "prefixItems", place) if "prefixItems" in schema else []
        rest = schema.get("items", not heads)
        if rest is False:
            most = len(heads) if most is None else min(most, len(heads))
        if most is not None and least > most:
            raise refusal("'minItems' is more than there may be", place)
        if not heads:
            item = "" if most == 0 else self._rule(rest, f"{place}/items")
            return container("[", "]", item, least, most)
        return self._tuple(heads, rest, least, most, place)

    def _tuple(self, heads: list[Any], rest: Any, least: int, most: int | None, place: str) -> str:
        """Arrays whose first items have schemas of their own."""
        tail = '""'
        if rest is not False and (most is None or most > len(heads)):
            item = self._rule(rest, f"{place}/items")
            tail = repeated(f"{COMMA} {item}", max(least - len(heads), 0), None if most is None else most - len(heads))
        for index in reversed(range(len(heads) if most is None else min(most, len(heads)))):
            item = self._rule(heads[index], f"{place}/prefixItems/{index}")
            body = f"{COMMA if index else ''} {item} {self._rules.add(tail)}"
            tail = body if index < least else f'"" | {body}'
        return f'"[" ({tail}) "]"'
