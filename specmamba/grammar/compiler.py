"""From a schema, an expression or rules to what a matcher walks."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specmamba.core import GrammarSpec

if TYPE_CHECKING:
    from specmamba.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """What xgrammar has made of a specification, for one tokenizer."""

    spec: GrammarSpec
    compiled: Any  # xgrammar.CompiledGrammar


class GrammarCompiler:
    """Compiles off the caller's thread, keeps what it has compiled, and gives up after a time."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int], timeout_s: float, cache_bytes: int
    ) -> None:
        raise NotImplementedError

    def compile(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        """The future raises RequestError: the specification is wrong, unsupported, or takes too long to compile."""
        raise NotImplementedError

    def close(self) -> None:
        """End what still compiles."""
