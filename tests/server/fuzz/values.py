"""Random hostile values of JSON: texts, numbers, nesting, expressions, rules and schemas, messages and tools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any


@dataclass(frozen=True)
class RawJson:
    """JSON as it stands in the body, valid or not."""

    text: str


TEXTS = (
    *("", " ", "\0", "a\nb\r\n", "\x1b[31m", "\u2028", "\ud800", "\udfff\ud800", "\ufeff", "é🙂", "\U0010ffff"),
    *("<|im_end|>", "<|endoftext|>", "<s>", "{{ 1 }}", "{% for", "../../x", "null", "%s%n", "def f(x):\n", "x" * 257),
    *("x" * 1025, "x" * 70_000, "{" * 500, "\\" * 99, "'\"", "data: [DONE]\n\n", "a" * 16 + "\u0301" * 300),
)
NUMBERS = (
    *(0, 1, 2, 3, -1, 16, 17, 20, 21, 64, 100, 101, 256, 257, 1024, 1025, 2**31 - 1, 2**31, 2**53 + 1),
    *(2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 10**60, 0.0, -0.0, 0.5, 1.0, 1.5, 2.0, 2.1, -2.0, 100.5, 1e308, 5e-324),
)
_NO_FLOATS = tuple(map(RawJson, ("1e999", "-1e999", "9" * 4000, "1" + "0" * 400 + ".0", "-0")))
_NO_JSON = tuple(map(RawJson, ("NaN", "Infinity", "-Infinity", "9" * 5000, "1e", "01", "tru", "'x'", '"\\x"', "")))


def _nested(random: Random) -> RawJson:
    depth, (opening, closing) = random.choice((10, 70, 300, 5000, 40_000)), random.choice((("[", "]"), ('{"a":', "}")))
    return RawJson(opening * depth + "1" + closing * (depth - random.choice((0, 0, 0, 1))))


def any_value(random: Random, depth: int = 0) -> Any:
    """Any JSON, and rarely what is none."""
    if random.random() < 0.04:
        return random.choice((_nested(random), *_NO_JSON))
    match random.randrange(9 if depth < 3 else 6):
        case 0 | 1:
            return random.choice(TEXTS)
        case 2 | 3:
            return random.choice((*NUMBERS, *_NO_FLOATS))
        case 4 | 5:
            return random.choice((None, True, False, [], {}))
        case 6:
            return [any_value(random, depth + 1) for _ in range(random.choice((1, 2, 17)))]
    return {random.choice(TEXTS[:18]): any_value(random, depth + 1) for _ in range(random.choice((1, 2, 5)))}


def _pieces(pieces: Sequence[str], most: int = 12) -> Callable[[Random], str]:
    return lambda random: "".join(random.choices(pieces, k=random.randint(1, most)))


_EXPRESSIONS = r"a b . * + ? {2,5} {0,99999} {5,2} ( ) [ ] [^ a-z z-a | ^ $ \d \w \p{L} \1 \b \x (?: (?= (?<n> (?i) 🙂"
_RULES = r'"a" "\x41" " "" [a-z] [^ ] root x | ( ) * + ? {1,3} {1,99999} . ::= 🙂'
random_regex = _pieces([*_EXPRESSIONS.split(), "\\u{110000}", "\ud800"])
random_rules = _pieces(
    [*_RULES.split(), "root ::= ", "x ::= ", "\n", "# note\n", "\0", 'root ::= "a" x\n', 'x ::= "b" | "c"\n']
)


def random_schema(random: Random, depth: int = 0) -> Any:
    """A JSON schema, often a wrong one."""
    if random.random() < 0.1:
        return any_value(random, 2)
    inner = (lambda: random_schema(random, depth + 1)) if depth < 3 else dict
    keywords: dict[str, Callable[[], Any]] = {
        "type": lambda: random.choice(["object", "array", "string", "integer", "number", "null", "x", ["string"], 3]),
        "properties": lambda: {random.choice(("a", "b", "", "é", "$ref")): inner() for _ in range(2)},
        "required": lambda: random.choice((["a"], ["zz"], "a", [1])),
        "additionalProperties": lambda: random.choice((False, True, inner())),
        "items": inner,
        "prefixItems": lambda: [inner(), inner()],
        "enum": lambda: [any_value(random, 3) for _ in range(random.choice((0, 1, 3)))],
        "const": lambda: any_value(random, 2),
        "pattern": lambda: random_regex(random),
        "format": lambda: random.choice(("date", "email", "uuid", "x", 1)),
        "$ref": lambda: random.choice(("#", "#/$defs/a", "#/$defs/none", "http://x/y", 1)),
        "$defs": lambda: {"a": inner()},
        **{name: lambda: [inner(), inner()] for name in ("anyOf", "oneOf", "allOf")},
        "not": inner,
        **{name: lambda: random.choice(NUMBERS) for name in ("minimum", "maximum", "exclusiveMinimum", "multipleOf")},
        **{name: lambda: random.choice(NUMBERS) for name in ("minLength", "maxLength", "minItems", "maxItems")},
    }
    return {name: keywords[name]() for name in random.sample(list(keywords), random.randint(0, 4))}


def random_function(random: Random) -> dict[str, Any]:
    """The definition of a function that can be called."""
    name = random.choice(("f", "g", "", "a b", "x" * 65))
    function = {"name": name, "parameters": random.choice((None, {"type": "object"}, random_schema(random)))}
    return function | random.choice(({}, {"strict": True}, {"description": random.choice(TEXTS)}))


def _tool_call(random: Random) -> dict[str, Any]:
    arguments = random.choice(("{}", "", "[1]", '{"a": 1}', "{", '{"a":' * 99 + "1" + "}" * 99, "NaN"))
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}


def random_message(random: Random) -> dict[str, Any]:
    """A message of a chat."""
    role = random.choice(("system", "user", "assistant", "tool", "developer", "x"))
    content = random.choice((random.choice(TEXTS), [{"type": "text", "text": random.choice(TEXTS)}], None, []))
    more: tuple[dict[str, Any], ...] = (
        {},
        {},
        {"tool_calls": [_tool_call(random)]},
        {"tool_call_id": "c"},
        {"name": random.choice(TEXTS)},
    )
    return {"role": role, "content": content} | random.choice(more)


def random_format(random: Random) -> dict[str, Any]:
    """A ``response_format``."""
    named = {"name": random.choice(("a", "", "a b")), "schema": random_schema(random)}
    kind = random.choice(("text", "json_object", "json_schema", "json_schema", "x"))
    return {"type": kind} | ({"json_schema": named} if kind == "json_schema" else {})
