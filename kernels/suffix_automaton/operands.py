"""Values that go into the drafts of suffix automata, and come out of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

ROOT = 0  # the place where a text begins
MAX_EDGES = 64  # continuations of a context that are looked at, those that were seen first
MAX_LEVELS = 4  # contexts of one automaton that are blended
MAX_TOKENS = 1 << 29  # of an automaton: its states, at most two per token, and its edges, three, have 32-bit numbers
LEAST_REST = 0.01  # of probability, for which no shorter context is looked at

Tokens = NDArray[np.int32]


class Node(NamedTuple):
    """A node of a tree of drafts."""

    token: int
    parent: int  # 0: the root, 1 + i: node i
    depth: int  # 1: below the root
    probability: float  # given its parent


@dataclass(frozen=True, eq=False)
class DraftRule:
    """What a tree of drafts may have, and how much a context says about what follows it; README.md has the formula.

    Without a fixed value, acceptance hardly depends on it: half and twice of ``doubt`` and ``newest``, ``decay`` from
    0.5 to 0.9 and ``max_match`` from 32 to 128 gave the same on edits, an agent's calls and code within 2 %.
    """

    max_nodes: int  # of a tree, the root not counted
    max_children: int  # of a node
    max_depth: int  # below the root
    max_width: int  # nodes of a depth
    max_match: int = 64  # tokens of a context
    min_match: int = 1
    factor: float = 6.0  # depth below the root for each token of the longest context there
    min_probability: float = 0.0  # of a path from the root
    newest: float = 0.5  # occurrences that the newest continuation counts for besides its own
    doubt: float = 4.0  # occurrences that all shorter contexts count for beside one of no tokens
    decay: float = 0.8  # factor of this number for each token of the context
    least_doubt: float = 0.1
    handicap: int = 2  # tokens that a context must have more to come before one of the first automaton
    doubts: NDArray[np.float64] = field(init=False, repr=False)  # by tokens of the context

    def __post_init__(self) -> None:
        """Fill in ``doubts``."""
        lengths = range(self.max_match + 1)
        doubts = [max(self.doubt * self.decay**length, self.least_doubt) for length in lengths]
        object.__setattr__(self, "doubts", np.array(doubts))
