"""The bytes that every token stands for, which is what a grammar is matched against."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specmamba.models.tokenizer import Tokenizer


def token_bytes(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    """By token id, ``vocab_size`` of them; empty where no text may have the token: special ones, padding."""
    return [_bytes_of(tokenizer, index) for index in range(vocab_size)]


def _bytes_of(tokenizer: Tokenizer, index: int) -> bytes:
    if tokenizer.is_silent(index, skip_special_tokens=True):
        return b""
    return tokenizer.token_bytes(index) or b""
