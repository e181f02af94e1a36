"""Where a request stands in its grammar, and what may follow every node of a draft tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specmamba.grammar.compiler import CompiledGrammar


@dataclass(frozen=True, slots=True)
class TreeMask:
    """What a grammar says of one draft tree of N nodes.

    ``bits`` [N, ceil(V / 32)] int32: bit t % 32 of word t // 32 is set where token t may follow the node. Rows of nodes
    that the grammar refuses, and of all below them, allow everything: nobody gets there. ``is_allowed`` [N] bool:
    the node itself and all above it keep to the grammar.
    """

    bits: NDArray[np.int32]
    is_allowed: NDArray[np.bool_]


class GrammarMatcher:
    """The grammar of one request, after all tokens of its output. Used on the engine thread alone."""

    def __init__(self, grammar: CompiledGrammar, vocab_size: int) -> None:
        raise NotImplementedError

    def mask(self, tokens: Sequence[int], parents: Sequence[int]) -> TreeMask:
        """Of a draft tree in topological order, whose root ``tokens[0]`` is the last token of prompt or output.

        Leaves the matcher where it was. Raises GrammarError when nothing at all may follow the root.
        """
        raise NotImplementedError

    def advance(self, tokens: Sequence[int]) -> None:
        """The output goes on with these tokens. Raises GrammarError for a token that the grammar does not allow."""
        raise NotImplementedError
