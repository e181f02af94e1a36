"""Grammars for tests: compiled in this process, walked at random, and seeded random schemas over what is supported."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator, FormatChecker
from numpy.typing import NDArray

from specmamba.grammar.compilations import CompiledGrammar
from specmamba.grammar.worker import rules_of
from specmamba.sampling_params import GrammarSpec

# the package's own idea of a time has no zone, which the standard asks for
_FORMATS = FormatChecker([name for name in FormatChecker.checkers if name != "time"])
BYTES = [bytes([i]) for i in range(256)]
BYTE_EOS, BYTE_VOCAB = 256, 260  # three ids of padding


def compile_here(kind: Any, text: str, vocab: list[bytes] | None = None, eos: int = BYTE_EOS) -> CompiledGrammar:
    """A grammar over a vocabulary, by default of single bytes."""
    xgrammar = pytest.importorskip("xgrammar")
    words = vocab or [*BYTES, *[b""] * (BYTE_VOCAB - 256)]
    info = xgrammar.TokenizerInfo(words, vocab_size=len(words), stop_token_ids=[eos])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    return CompiledGrammar(GrammarSpec(kind=kind, text=text), compiler.compile_grammar(rules_of(kind, text)))


def accepts(grammar: CompiledGrammar, text: str) -> bool:
    """Whether a grammar matches this whole text."""
    xgrammar = pytest.importorskip("xgrammar")
    matcher = xgrammar.GrammarMatcher(grammar.compiled)
    return bool((not text or matcher.accept_string(text)) and matcher.is_completed())


def allowed_tokens(bits: NDArray[np.int32], vocab_size: int) -> list[int]:
    """The tokens of one row of a mask."""
    return list(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[:vocab_size]).tolist())


def random_text(grammar: CompiledGrammar, rng: random.Random, most: int = 400) -> str | None:
    """A text of the grammar, byte by byte at random; None when it did not end."""
    xgrammar = pytest.importorskip("xgrammar")
    matcher, text = xgrammar.GrammarMatcher(grammar.compiled), bytearray()
    for _ in range(most):
        bits = np.zeros((1, -(-BYTE_VOCAB // 32)), np.int32)
        matcher.fill_next_token_bitmask(bits)
        choices = allowed_tokens(bits[0], BYTE_VOCAB)
        assert choices, text
        if BYTE_EOS in choices and (len(choices) == 1 or rng.random() < 0.3):
            return text.decode()
        going_on = [token for token in choices if token != BYTE_EOS]
        ending = [token for token in going_on if token in b'"]}' and rng.random() < 0.3]
        token = rng.choice(ending or going_on)
        assert matcher.accept_token(token)
        text.append(token)
    return None


def check_valid(text: str, schema: Any) -> None:
    """Raise an error when a text is not JSON, or not valid against a schema and its formats."""
    Draft202012Validator(schema, format_checker=_FORMATS).validate(json.loads(text))


def random_schema(seed: int) -> dict[str, Any]:
    """A schema of an object whose texts are short."""
    rng = random.Random(seed)
    schema = _object(rng, 2)
    schema["$defs"] = {"shared": _scalar(rng), "chain": _chain()}
    return schema


def _chain() -> dict[str, Any]:
    following = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/chain"}]}
    properties = {"v": {"enum": [1, 2]}, "next": following}
    return {"type": "object", "properties": properties, "required": ["v"], "additionalProperties": False}


def _schema(rng: random.Random, depth: int) -> Any:
    if depth == 0 or rng.random() < 0.5:
        return _scalar(rng)
    makers = [_object, _array, _tuple, _any_of, _one_of, _all_of, _reference, _map]
    return rng.choice(makers)(rng, depth - 1)


def _scalar(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    least = rng.randint(0, 2)
    choices: list[dict[str, Any]] = [
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer"},
        {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 2000)},
        {"type": "integer", "exclusiveMinimum": low},
        {"type": "number", "minimum": low / 4, "exclusiveMaximum": low / 4 + rng.randint(1, 9) / 8},
        {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 6)},
        {"type": "string", "pattern": rng.choice(["^[a-z]{1,8}$", "^\\d{3}-\\d{2}$", "^(yes|no)$", '^"?[^,]{0,5}$'])},
        {"type": "string", "format": rng.choice(["date", "time", "date-time", "ipv4", "uuid", "email"])},
        {"enum": rng.sample(["red", 'gr"een', "blau→", 1, 2.5, True, None, [1, "a"], {"k": 0}], rng.randint(1, 4))},
        {"const": rng.choice(["x", 0, False, "line\nbreak"])},
        {"type": ["string", "null"], "maxLength": 4},
    ]
    return rng.choice(choices)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(["name", "age", "ok", "größe", "a b", "x", "tag", 'q"'], rng.randint(1, 3))
    properties = {name: _schema(rng, depth) for name in names}
    required = [name for name in names if rng.random() < 0.6]
    schema: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
    return schema | ({"additionalProperties": False} if rng.random() < 0.5 else {})


def _map(rng: random.Random, depth: int) -> dict[str, Any]:
    extra = {"additionalProperties": _schema(rng, depth), "maxProperties": 3}
    return {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"], **extra}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    return {"type": "array", "items": _schema(rng, depth), "minItems": least, "maxItems": least + rng.randint(0, 2)}


def _tuple(rng: random.Random, depth: int) -> dict[str, Any]:
    heads = [_schema(rng, depth) for _ in range(rng.randint(1, 3))]
    return {"type": "array", "prefixItems": heads, "items": False, "minItems": rng.randint(0, len(heads))}


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_schema(rng, depth) for _ in range(rng.randint(1, 3))]}


def _one_of(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = rng.sample(["circle", "square", "line"], 2)
    return {"oneOf": [_tagged(kind, _schema(rng, depth)) for kind in kinds] + [{"type": "null"}]}


def _tagged(kind: str, inner: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": kind}, "of": inner}, "required": ["kind"]}


def _all_of(rng: random.Random, depth: int) -> dict[str, Any]:
    more = {"type": "object", "properties": {"extra": _schema(rng, depth)}, "required": ["extra"]}
    base = {"type": "object", "properties": {"base": _schema(rng, depth)}, "required": ["base"]}
    return {"allOf": [base, more]}


def _reference(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"$ref": rng.choice(["#/$defs/shared", "#/$defs/chain"]), "description": f"at {depth}"}
