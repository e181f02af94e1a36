"""How much text so many tokens can hold at the most: what is longer need not be encoded to be refused."""

from __future__ import annotations

import json
from typing import Any

from specmamba.models.token_bytes import byte_of_character

# Canonical composition (NFC) writes up to four code points as one.
_MOST_COMPOSED = 4
_SAME_LENGTH = frozenset({"ByteLevel", "NFC", "Prepend"})
_DROP_NOTHING = frozenset({"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"})


def longest_token(backend: Any) -> int | None:
    """Characters of a text that one token of a backend (``tokenizers.Tokenizer``) can stand for at the most.

    None where there is no such bound: where a tokenizer leaves characters out, or has one token for any unknown word.
    """
    normalizers = _steps(backend.normalizer, "normalizers")
    splits = _steps(backend.pre_tokenizer, "pretokenizers")
    is_byte_level = any(step["type"] == "ByteLevel" for step in (*normalizers, *splits))
    vocab: dict[str, int] = backend.get_vocab()
    if not _knows_all_bytes(backend, vocab, is_byte_level) or not all(map(_keeps_length, normalizers)):
        return None
    if any(step["type"] not in _DROP_NOTHING or step.get("behavior") == "Removed" for step in splits):
        return None
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None
    composed = _MOST_COMPOSED if any(step["type"] == "NFC" for step in normalizers) else 1
    return composed * max(map(len, vocab))


def _knows_all_bytes(backend: Any, vocab: dict[str, int], is_byte_level: bool) -> bool:
    if is_byte_level:
        return byte_of_character().keys() <= vocab.keys()
    return bool(getattr(backend.model, "byte_fallback", False)) and all(f"<0x{i:02X}>" in vocab for i in range(256))


def _keeps_length(normalizer: dict[str, Any]) -> bool:
    if normalizer["type"] == "Replace":
        old = normalizer["pattern"].get("String")
        return old is not None and len(normalizer["content"]) >= len(old)
    return normalizer["type"] in _SAME_LENGTH


def _steps(part: Any, name: str) -> list[dict[str, Any]]:
    return [] if part is None else _flat(json.loads(part.__getstate__()), name)


def _flat(step: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [one for inner in step[name] for one in _flat(inner, name)] if step["type"] == "Sequence" else [step]
