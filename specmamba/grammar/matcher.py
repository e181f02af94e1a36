"""The state of a request in its grammar, and masks of the tokens that may follow each node of a draft tree.

A mask may take long, so each request has a limit of processor time for it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmamba.errors import GrammarError
from specmamba.grammar.compilations import CompiledGrammar

NO_LIMIT = -1.0
_ALL = np.int32(-1)
SLOW_SECONDS, MAX_SLOW = 0.1, 2  # of one mask, or of accepting one token
FREE_SECONDS = 0.02  # of each that does not count, so that long answers are not refused for their length
MAX_SECONDS = 2.0  # of a whole request, beyond the free ones
_LARGE_VOCABULARY = 1 << 15


@dataclass(frozen=True, slots=True)
class TreeMask:
    """The tokens that a grammar allows in one draft tree of N nodes.

    ``bits`` [N, ceil(V / 32)] int32: bit t % 32 of word t // 32 is set where token t may follow the node. Rows of
    refused nodes, of all nodes below them, and of end-of-text tokens allow everything, since no token is chosen there.
    ``is_allowed`` [N] bool: the grammar allows the node and all nodes above it.
    """

    bits: NDArray[np.int32]
    is_allowed: NDArray[np.bool_]


class GrammarMatcher:
    """The grammar of one request, in the state after all tokens of its output. Used by one thread at a time."""

    def __init__(self, grammar: CompiledGrammar, vocab_size: int) -> None:
        import xgrammar

        self._matcher: Any = xgrammar.GrammarMatcher(grammar.compiled)
        self._handle: Any = self._matcher._handle  # takes NumPy arrays, which the public methods do not
        self._stop_ids = frozenset(self._matcher.stop_token_ids)
        self._vocab_size = vocab_size
        self._num_words = -(-vocab_size // 32)
        self._output: list[int] = []
        self._effort = Effort(vocab_size)
        self.seconds_per_node = 0.0  # of the last mask

    @property
    def is_finished(self) -> bool:
        """Whether the output has its end-of-text token."""
        return bool(self._matcher.is_terminated())

    def mask(self, tokens: Sequence[int], parents: Sequence[int], seconds: float | None = None) -> TreeMask:
        """Make the mask of a draft tree in topological order, whose root is the last token of prompt or output.

        The state of the matcher stays the same. The root always gets its row.

        Args:
            tokens: [N], of the nodes.
            parents: [N], indices of the nodes' parents; -1 for the root and for nodes without a parent, which are not
                allowed.
            seconds: nodes that are not reached in this time are not allowed and must not be verified; None: no limit.

        Raises:
            GrammarError: no token may follow the root, or making the mask takes too long.
        """
        limit = NO_LIMIT if seconds is None else seconds
        bits = np.zeros((len(tokens), self._num_words), np.int32)
        began = time.thread_time()  # processor time: the load of the machine must not count
        self._traverse(tokens, parents, bits, limit)
        taken = time.thread_time() - began
        has_row: NDArray[np.bool_] = np.logical_or.reduce(bits, axis=1)
        self.seconds_per_node = taken / max(int(has_row.sum()), 1)
        # the time beyond the limit may all be that of the last node
        self._effort.add(max(self.seconds_per_node, taken - limit if limit >= 0 else 0.0))
        if not has_row[0]:
            raise GrammarError("the grammar allows no token here: no text of it begins with what was written")
        is_allowed = self._is_allowed(tokens, parents, bits, has_row)
        bits[~has_row] = _ALL
        return TreeMask(bits, is_allowed)

    def _is_allowed(
        self, tokens: Sequence[int], parents: Sequence[int], bits: NDArray[np.int32], has_row: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        is_allowed = np.zeros(len(tokens), np.bool_)
        is_allowed[0] = True
        for node in range(1, len(tokens)):
            parent, token = parents[node], tokens[node]
            if parent < 0 or not has_row[parent] or not is_allowed[parent]:
                continue
            if bits[parent, token >> 5] >> (token & 31) & 1:
                is_allowed[node] = has_row[node] or token in self._stop_ids
        return is_allowed

    def distrust(self) -> None:
        """Let the next slow mask end the request. Safe to call from any thread."""
        self._effort.is_distrusted = True

    def advance(self, tokens: Sequence[int]) -> None:
        """Append tokens to the output; tokens behind an end-of-text token are ignored.

        Raises:
            GrammarError: the grammar does not allow one of them, and the state is that before this token; or it takes
                too long.
        """
        began = time.thread_time()
        for token in tokens:
            if self.is_finished:
                return
            if not self._accepts(token):
                raise GrammarError(f"token {token} is not what the grammar allows here")
            self._output.append(token)
        self._effort.add((time.thread_time() - began) / max(len(tokens), 1))

    def _accepts(self, token: int) -> bool:
        try:
            return bool(self._handle.accept_token(token, False))
        except Exception as error:  # native code raises several types of exceptions
            self._return_to_output()
            raise GrammarError(f"the grammar failed: {type(error).__name__}: {error}", "grammar_failed") from error

    def _traverse(self, tokens: Sequence[int], parents: Sequence[int], bits: NDArray[np.int32], seconds: float) -> None:
        """Fill the rows of all allowed nodes; zeros where no token may follow, or the node was not reached."""
        if self.is_finished:
            return
        children, siblings = _links(parents)
        ids = np.asarray(tokens, np.int64)
        try:
            self._handle.traverse_draft_tree(children, siblings, ids, bits, seconds, None)
            if not bits[0].any():  # the time was too short for the root
                self._handle.fill_next_token_bitmask(bits[:1], 0, False)
        # Native code raises several types of exceptions, and may leave the matcher at any node of the tree.
        except Exception as error:
            self._return_to_output()
            raise GrammarError(f"the grammar failed: {type(error).__name__}: {error}", "grammar_failed") from error

    def _return_to_output(self) -> None:
        self._matcher.reset()
        for token in self._output:
            self._handle.accept_token(token, False)


def scale_of(vocab_size: int) -> float:
    """The factor of all time limits for a vocabulary of this size; 1 for small ones."""
    return max(1.0, vocab_size / _LARGE_VOCABULARY)


class Effort:
    """The processor time in seconds that the masks and tokens of one request have taken."""

    def __init__(self, vocab_size: int) -> None:
        self._scale = scale_of(vocab_size)
        self._num_slow = 0
        self._seconds = 0.0
        self.is_distrusted = False  # one slow mask is enough

    def add(self, seconds: float) -> None:
        """Count one mask, or one token.

        Raises:
            GrammarError: the request has used up its time ("grammar_too_complex").
        """
        self._num_slow += seconds > SLOW_SECONDS * self._scale
        self._seconds += max(0.0, seconds - FREE_SECONDS * self._scale)
        if self._num_slow >= (1 if self.is_distrusted else MAX_SLOW) or self._seconds > MAX_SECONDS:
            raise too_complex()


def too_complex() -> GrammarError:
    """The error of a request whose masks take too long."""
    message = "the grammar is too complex: finding out which tokens may follow takes too long here"
    return GrammarError(message, "grammar_too_complex")


def _links(parents: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First child and next sibling of every node: [N] and [N] int64, -1 for none."""
    children, siblings = [-1] * len(parents), [-1] * len(parents)
    last: dict[int, int] = {}
    for node, parent in enumerate(parents):
        if node == 0 or parent < 0:
            continue
        if parent in last:
            siblings[last[parent]] = node
        else:
            children[parent] = node
        last[parent] = node
    return np.array(children, np.int64), np.array(siblings, np.int64)
