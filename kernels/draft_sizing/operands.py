"""What the sizing of drafts knows and decides, as NumPy arrays of the host; README.md names the shapes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.uint8]

GREEDY, SAMPLED, DRAWN = range(3)  # modes: sampled and decided under ``target``; decided under ``rejection``
NUM_MODES = 3
MAX_DEPTH, MAX_RANK = 8, 4  # deeper nodes and higher ranks share the last offset
NUM_BINS = 10  # of the calibration error
LENGTH = 24  # drafts that are kept, for each row and for each mode
FIRST_ODDS = (0.6, 0.12, 0.05, 0.03)  # of ranks, before anything is known
FIRST_COUNT, FIRST_THRESHOLD = 8.0, 0.3


@dataclass(eq=False)
class SizerState:
    """What was learned: the calibration of probabilities, and the values of recent candidates."""

    depths: Ints  # [C], of the candidates of the deepest draft, level by level
    ranks: Ints  # [C], among siblings
    width: int  # nodes of a level that have children
    max_nodes: int  # of a tree, the root included
    num_rows: int
    weights: Floats = field(init=False)  # [M]
    offsets: Floats = field(init=False)  # [M, MAX_DEPTH, MAX_RANK]
    counts: Floats = field(init=False)  # the same shape: observations of each offset, with a bound
    of_row: Floats = field(init=False)  # [rows], offsets of requests
    bins: Floats = field(init=False)  # [NUM_BINS, 3]: faded observations, sums of p, accepted nodes
    odds: Floats = field(init=False)  # [M, D, K], mean probabilities given the parent
    values_of_mode: Floats = field(init=False)  # [M, LENGTH, C]
    values_of_row: Floats = field(init=False)  # [rows, LENGTH, C]
    next_of_mode: Ints = field(init=False)  # [M], drafts so far
    shared_of_mode: Ints = field(init=False)  # [M], of these those that were kept for the mode
    next_of_row: Ints = field(init=False)  # [rows]
    threshold: Floats = field(init=False)  # [1], value that a node of a drawn row must reach
    seconds: Floats = field(init=False)  # [1], time of all choices and of what was learned from them

    def __post_init__(self) -> None:
        self.weights = np.ones(NUM_MODES)
        self.offsets = np.zeros((NUM_MODES, MAX_DEPTH, MAX_RANK))
        self.counts = np.full((NUM_MODES, MAX_DEPTH, MAX_RANK), FIRST_COUNT)
        self.of_row = np.zeros(self.num_rows)
        self.bins = np.zeros((NUM_BINS, 3))
        ranks = np.minimum(np.arange(self.num_ranks), len(FIRST_ODDS) - 1)
        self.odds = np.tile(np.array(FIRST_ODDS)[ranks], (NUM_MODES, self.num_depths, 1))
        self.values_of_mode = np.zeros((NUM_MODES, LENGTH, len(self.depths)))
        self.values_of_row = np.zeros((self.num_rows, LENGTH, len(self.depths)))
        self.next_of_mode, self.shared_of_mode = (np.zeros(NUM_MODES, np.int64) for _ in range(2))
        self.next_of_row = np.zeros(self.num_rows, np.int64)
        self.threshold, self.seconds = np.full(1, FIRST_THRESHOLD), np.zeros(1)

    @property
    def num_depths(self) -> int:
        """D."""
        return int(self.depths[-1])

    @property
    def num_ranks(self) -> int:
        """K."""
        return int(self.ranks.max()) + 1


@dataclass(eq=False)
class TreeArrays:
    """Trees of a batch, and their packing (``core.Packing``). Arrays are large enough for every step."""

    tokens: Ints  # [rows, N]; those of the roots are not set
    parents: Ints  # [rows, N]; -1 for roots and padding
    candidates: Ints  # [rows, N], 1 + the candidate of each node; 0 for roots and padding
    num_nodes: Ints  # [rows]; 0 for rows of padding
    places: Ints  # [rows * N], the first T are used
    nodes: Ints  # [rows * N], row after row of the width that the packing has
    firsts: Ints  # [rows]
    num_live: Ints  # [1], nodes that are packed

    @classmethod
    def empty(cls, num_rows: int, max_nodes: int) -> TreeArrays:
        """Allocate zeros."""
        tokens, parents, candidates = (np.zeros((num_rows, max_nodes), np.int64) for _ in range(3))
        places, nodes = (np.zeros(num_rows * max_nodes, np.int64) for _ in range(2))
        num_nodes, firsts = (np.zeros(num_rows, np.int64) for _ in range(2))
        return cls(tokens, parents, candidates, num_nodes, places, nodes, firsts, np.zeros(1, np.int64))


class Chosen(NamedTuple):
    """What ``choose`` has written."""

    num_nodes: int  # of all rows, roots included
    width: int  # nodes of the largest tree
    is_chain: bool  # every node is the child of the one before it
    expected_tokens: float


class Times(NamedTuple):
    """Predicted seconds of steps."""

    trees: Floats  # [D + 1, T + 1], by depth of the draft and by nodes
    places: Ints  # [D'], the candidates of a chain
    chains: Floats  # [D + 1], steps with a chain for every request, by depth; infinite where they are not known


@dataclass(eq=False)
class Drafted:
    """One draft and what is decided of it. Arrays are large enough for every step; the first B' rows are used."""

    max_rows: int
    num_candidates: int  # C of the deepest draft
    trees: TreeArrays
    # given
    rows: Ints = field(init=False)  # [B'], of the request table
    modes: Ints = field(init=False)
    max_depths: Ints = field(init=False)
    places: Ints = field(init=False)  # [B'], in the batch
    # decided
    parents: Ints = field(init=False)  # [B', C], a copy of the candidates', whose memory the verify may use again
    logits: Floats = field(init=False)  # [B', C]
    p: Floats = field(init=False)
    kept: Flags = field(init=False)

    def __post_init__(self) -> None:
        size, count = self.max_rows, self.num_candidates
        self.rows, self.modes, self.max_depths, self.places = (np.zeros(size, np.int64) for _ in range(4))
        self.parents = np.zeros((size, count), np.int64)
        self.logits, self.p = np.zeros((size, count)), np.zeros((size, count))
        self.kept = np.zeros((size, count), np.uint8)


@dataclass(eq=False)
class Offer:
    """The candidates of B' rows in one step, and the rules of the choice.

    A captured step offers in the same memory every time; then rules and numbers of rows are changed between steps.
    """

    tokens: Ints  # [R, C'], of which the first B' rows are used
    parents: Ints  # [R, C'], 0 for the root, 1 + c for candidate c
    logp: NDArray[np.float32]  # [R, C']
    depths: Ints  # [C'] or [R, C']
    ranks: Ints  # [C'] or [R, C']
    batch_size: int  # B, rows that are not drafted for included
    padded_size: int  # rows of the trees, the last ones padding
    depth: int  # of the draft
    seconds: Floats  # [T + 1], time of a step by its nodes; T is the largest number
    nodes_per_row: int = 0  # take so many of every row; 0: those that pay
    num_rows: int = -1  # B'; -1: R
    written: Any = None  # has the ``num_nodes`` of the newest call of ``choose``, or of a replay of it, in little time

    def __post_init__(self) -> None:
        self.num_rows = len(self.tokens) if self.num_rows < 0 else self.num_rows
