"""Filling in the middle: prompts of a text with a gap, for models that were trained on such (arXiv 2207.14255)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Tokens before the text, before what follows the gap, and before the answer: Qwen and Granite 4; StarCoder and
# Granite 3; DeepSeek.
_KNOWN = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)
# Tokens with which such models end an answer, besides their end-of-text token.
_ENDS = ("<|endoftext|>", "<|fim_pad|>", "<fim_pad>", "<|repo_name|>", "<|file_sep|>", "<file_sep>")


@dataclass(frozen=True, slots=True)
class Infill:
    """The tokens of a vocabulary that mark a gap in a text."""

    before: str
    behind: str
    middle: str
    end_ids: tuple[int, ...]  # tokens that end the answer

    @classmethod
    def of(cls, vocab: Mapping[str, int]) -> Infill | None:
        """Find them among all tokens and their ids; None: this tokenizer has none."""
        for marks in _KNOWN:
            if all(mark in vocab for mark in marks):
                return cls(*marks, tuple(vocab[token] for token in (*marks, *_ENDS) if token in vocab))
        return None

    def prompt(self, text: str, suffix: str) -> str:
        """The prompt that asks for what stands between two texts."""
        return f"{self.before}{text}{self.behind}{suffix}{self.middle}"
