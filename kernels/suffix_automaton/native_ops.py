"""Suffix automata in native code (native.cpp). See README.md."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import POINTER, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from specmamba.kernels.native import library
from specmamba.kernels.native.tensors import marshalled, require, struct
from specmamba.kernels.suffix_automaton.operands import DraftRule, Node, Tokens

SOURCE = Path(__file__).parent / "native.cpp"

_Rule = struct(
    "Rule",
    ["doubts"],
    ["max_nodes", "max_children", "max_depth", "max_width", "max_match", "min_match", "handicap"],
    ["factor", "min_probability", "newest"],
)


class SuffixAutomaton:
    """The native form of ``reference.SuffixAutomaton``: the same places."""

    def __init__(self, max_match: int) -> None:
        self.max_match = max_match
        functions: Any = library.required(code())
        self.handle: int = _made(functions.suffix_new(max_match))
        weakref.finalize(self, functions.suffix_free.unrecorded, self.handle)

    @property
    def num_bytes(self) -> int:
        """Memory that it has."""
        return int(library.required(code()).suffix_num_bytes(self.handle))

    def extend(self, place: int, tokens: Tokens) -> int:
        """One call. Raises MemoryError; the place is then still that of the last call."""
        require(tokens.dtype == np.int32 and tokens.flags.c_contiguous, "a text is int32, side by side")
        return _made(library.required(code()).suffix_extend(self.handle, place, tokens.ctypes.data, len(tokens)))


def draft(automata: Sequence[SuffixAutomaton], text: Tokens, rule: DraftRule) -> list[Node]:
    """One call."""
    last = text[-rule.max_match :]
    require(last.dtype == np.int32 and last.flags.c_contiguous, "a text is int32, side by side")
    require(all(automaton.max_match == rule.max_match for automaton in automata), "automata have the rule's max_match")
    handles = (c_void_p * len(automata))(*(automaton.handle for automaton in automata))
    numbers, shares = np.empty((3, rule.max_nodes), np.int64), np.empty(rule.max_nodes)
    outputs = *(row.ctypes.data for row in numbers), shares.ctypes.data
    of_text = last.ctypes.data, len(last)
    of_rule = marshalled(rule, _marshal_rule)
    count = _made(library.required(code()).suffix_draft(handles, len(automata), *of_text, of_rule, *outputs))
    return [Node(*node) for node in zip(*numbers[:, :count].tolist(), shares[:count].tolist(), strict=True)]


def _made(result: int | None) -> int:
    """The result of a call that allocates. Raises MemoryError where memory ran out."""
    if result is None or result < 0:
        raise MemoryError("a suffix automaton: unable to allocate memory for its texts")
    return result


def _marshal_rule(rule: DraftRule) -> Any:
    integers = rule.max_nodes, rule.max_children, rule.max_depth, rule.max_width, rule.max_match, rule.min_match
    return _Rule(
        rule.doubts.ctypes.data, *integers, rule.handicap, rule.factor, rule.min_probability, rule.newest
    )  # fmt: skip


@cache
def code() -> ctypes.CDLL | None:
    """The library of this operator, or None where native code cannot run."""
    signatures: dict[str, list[Any]] = {
        "suffix_new": [c_int64],
        "suffix_free": [c_void_p],
        "suffix_extend": [c_void_p, c_int64, c_void_p, c_int64],
        "suffix_num_bytes": [c_void_p],
        "suffix_draft": [c_void_p, c_int64, c_void_p, c_int64, POINTER(_Rule), *[c_void_p] * 4],
    }
    results = dict.fromkeys(["suffix_extend", "suffix_num_bytes", "suffix_draft"], c_int64)
    return library.load_functions(SOURCE, signatures, {**results, "suffix_new": c_void_p})
