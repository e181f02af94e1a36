"""The bytes of single tokens, and the length of the longest text that one token can stand for.

The second bounds the text of a number of tokens: a longer text need not be encoded to be refused.
"""

from __future__ import annotations

import json
import re
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Canonical composition (NFC) writes up to four code points as one.
_MOST_COMPOSED = 4
_SAME_LENGTH = frozenset({"ByteLevel", "NFC", "Prepend"})
_DROP_NOTHING = frozenset({"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"})


def byte_of_character() -> dict[str, int]:
    """The characters by which byte-level BPE writes bytes: printable Latin-1 as itself, the rest from U+0100 on."""
    prints = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in prints]
    return {chr(byte): byte for byte in prints} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


class TokenBytes:
    """The bytes of each token of a backend (``tokenizers.Tokenizer``) inside a text.

    They follow from the decoder of the backend: of byte-level vocabularies, and of those that write a space as "▁" and
    unknown characters as ``<0xE4>``. Added tokens stand for their own text. Safe to share between threads.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._added: dict[int, str] = {i: str(token.content) for i, token in backend.get_added_tokens_decoder().items()}
        steps = _decoder_steps(backend)
        self._byte_of = byte_of_character() if any(step["type"] == "ByteLevel" for step in steps) else None
        self._replacements = [pair for step in steps if (pair := _replacement(step)) is not None]

    def of(self, token_id: int) -> bytes | None:
        """The bytes of a token; None where the vocabulary has no such token."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token: str | None = self._backend.id_to_token(token_id)
        if token is None:
            return None
        if self._byte_of is not None:
            return _joined(self._byte_of, token)
        if byte := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(byte[1], 16)])
        for old, new in self._replacements:
            token = token.replace(old, new)
        return token.encode()


def _joined(byte_of: dict[str, int], token: str) -> bytes:
    """The bytes of a byte-level token; a character that stands for no byte is itself, as in the decoder."""
    return b"".join(bytes([byte_of[c]]) if c in byte_of else c.encode() for c in token)


def _decoder_steps(backend: Any) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    decoder = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return steps


def _replacement(step: dict[str, Any]) -> tuple[str, str] | None:
    match step:
        case {"type": "Replace", "pattern": {"String": old}, "content": new}:
            return old, new
        case {"type": "Metaspace", "replacement": old}:
            return old, " "
        case {"type": "WordPiece", "prefix": old}:
            return old, ""
    return None


def longest_token(backend: Any) -> int | None:
    """The most characters of a text that one token of a backend (``tokenizers.Tokenizer``) can stand for.

    None where there is no bound: the tokenizer drops characters, or has one token for any unknown word.
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
