"""An answer token by token: the text that each one adds, and how deep it was drafted."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from specmamba.core import OutputDelta
from specmamba.models.tokenizer import Detokenizer, Tokenizer
from specmamba.server.responses import TokenPiece


class TokenPieces:
    """The pieces of one choice. ``hidden`` are the tokens that end it; they have no text."""

    def __init__(self, tokenizer: Tokenizer, hidden: Collection[int] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._hidden = hidden

    def push(self, delta: OutputDelta) -> list[TokenPiece]:
        """The pieces of the next delta, one for each of its tokens."""
        depths = delta.depths or (0,) * len(delta.token_ids)
        pieces = [
            TokenPiece(id=token, text=self._text(token), depth=depth)
            for token, depth in zip(delta.token_ids, depths, strict=True)
        ]
        if pieces and delta.finish_reason is not None:
            pieces[-1].text += self._detokenizer.flush()
        return pieces

    def _text(self, token: int) -> str:
        return "" if token in self._hidden else self._detokenizer.push(token)


def prompt_offsets(tokenizer: Tokenizer, tokens: Sequence[int], text: str) -> list[int]:
    """Characters of a prompt's text before each of its tokens.

    The text need not be what the tokens decode to: a tokenizer may add special tokens, which take no room unless they
    stand in the text, and may normalize characters.
    """
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    offsets, at = [], 0
    for token in tokens:
        offsets.append(at)
        piece = detokenizer.push(token)
        if text.startswith(piece, at) or not tokenizer.is_silent(token, skip_special_tokens=True):
            at = min(at + len(piece), len(text))
    return offsets
