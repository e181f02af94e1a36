"""The sizing of drafts in native code (native.cpp): one call for the decisions of a step. See README.md."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from specmamba.kernels.draft_sizing.operands import (
    Chosen,
    Drafted,
    Floats,
    Ints,
    Offer,
    SizerState,
    Times,
    TreeArrays,
)
from specmamba.kernels.native import library
from specmamba.kernels.native.tensors import marshalled, require, struct

SOURCE = Path(__file__).parent / "native.cpp"

_OF_STATE = [
    *("depths", "ranks", "weights", "offsets", "counts", "of_row", "bins", "odds"),
    *("values_of_mode", "values_of_row", "next_of_mode", "shared_of_mode", "next_of_row", "threshold", "seconds"),
]
_OF_DRAFTED = ["rows", "modes", "max_depths", "places", "parents", "logits", "p", "kept"]
_OF_TREES = ["tokens", "parents", "candidates", "num_nodes", "places", "nodes", "firsts", "num_live"]
_State = struct("State", _OF_STATE, ["width", "max_nodes", "num_candidates", "num_depths", "num_ranks"])
_Drafted = struct("Drafted", _OF_DRAFTED, ["stride"])
_Trees = struct("TreeArrays", _OF_TREES, ["stride"])
_Chosen = struct("Chosen", [], ["num_nodes", "width", "is_chain"], ["expected"])
_Offer = struct(
    "Offer",
    ["tokens", "parents", "logp", "depths", "ranks", "seconds"],
    [
        *("rows", "num_candidates", "tokens_row", "parents_row", "logp_row", "depths_row", "ranks_row"),
        *("batch", "padded", "depth", "most_nodes", "nodes_per_row"),
    ],
)


class _Bound(NamedTuple):
    """The structures of a choice."""

    state: SizerState
    drafted: Drafted
    structs: tuple[Any, Any, Any]  # of state, drafted and offer
    trees: Any
    chosen: Any


_BOUND: WeakKeyDictionary[Offer, _Bound] = WeakKeyDictionary()


def choose(state: SizerState, drafted: Drafted, offer: Offer) -> Chosen:
    """One call. Shapes of the offer are checked, parents and places are trusted."""
    arrange(state, drafted, offer)
    bound = _BOUND[offer]
    of_state, of_drafted, of_offer = bound.structs
    library.required(code()).sizing_choose(of_state, of_drafted, bound.trees, of_offer, bound.chosen)
    found = bound.chosen
    return Chosen(found.num_nodes, found.width, bool(found.is_chain), found.expected)


def arrange(state: SizerState, drafted: Drafted, offer: Offer) -> None:
    """Write rules and numbers of rows where a recorded call reads them."""
    require(offer.num_rows <= len(offer.tokens), "there are fewer candidates than rows")
    require(offer.num_rows <= offer.batch_size <= offer.padded_size, "there are more rows than the batch has")
    require(offer.padded_size <= len(drafted.trees.num_nodes), "there are too many rows")
    require(offer.seconds.dtype == np.float64 and offer.seconds.flags.c_contiguous, "seconds are float64, side by side")
    of_offer = _bound(state, drafted, offer).structs[2]
    of_offer.rows, of_offer.batch, of_offer.padded = offer.num_rows, offer.batch_size, offer.padded_size
    of_offer.depth, of_offer.nodes_per_row = offer.depth, offer.nodes_per_row
    of_offer.seconds, of_offer.most_nodes = offer.seconds.ctypes.data, len(offer.seconds) - 1


def written(offer: Offer) -> Any:
    """The structure that the newest call has written, or a replay of it; it stays where it is."""
    return _BOUND[offer].chosen


def pack(trees: TreeArrays, padded_size: int, width: int, num_places: int) -> None:
    """One call."""
    library.required(code()).sizing_pack(marshalled(trees, _marshal_trees), padded_size, width, num_places)


def learn(state: SizerState, drafted: Drafted, offer: Offer, paths: Ints, counts: Ints) -> None:
    """One call."""
    bound = _bound(state, drafted, offer)
    rows = paths.ctypes.data, paths.strides[0] // 8, counts.ctypes.data, counts.strides[0] // 8
    library.required(code()).sizing_learn(*bound.structs, bound.trees, *rows)


def look(state: SizerState, rows: Ints, max_depths: Ints, draws: tuple[int, int], times: Times) -> Floats:
    """One call."""
    seconds, places, chains = times
    depths, most = seconds.shape[0], seconds.shape[1] - 1
    rates = np.empty(2 * depths)
    of_rows, of_trees, of_chains = (rows, max_depths), seconds.ctypes.data, (places.ctypes.data, len(places))
    pointers = [x.ctypes.data for x in of_rows]
    library.required(code()).sizing_look(
        marshalled(state, _marshal_state), *pointers, len(rows), *draws, of_trees, depths, most,
        *of_chains, chains.ctypes.data, rates.ctypes.data,
    )  # fmt: skip
    return rates


def _bound(state: SizerState, drafted: Drafted, offer: Offer) -> _Bound:
    bound = _BOUND.get(offer)
    if bound is not None:
        require(bound.state is state and bound.drafted is drafted, "the offer belongs to another sizer")
        return bound
    require(len(offer.tokens) <= drafted.max_rows, "there are too many rows")
    require(offer.tokens.shape[1] <= drafted.num_candidates, "there are too many candidates")
    structs = marshalled(state, _marshal_state), marshalled(drafted, _marshal_drafted), _marshal_offer(offer)
    trees = marshalled(drafted.trees, _marshal_trees)
    bound = _BOUND[offer] = _Bound(state, drafted, structs, trees, _Chosen())
    return bound


def _marshal_state(x: SizerState) -> Any:
    arrays = [getattr(x, name) for name in _OF_STATE]
    require(all(array.flags.c_contiguous for array in arrays), "the sizer's arrays are contiguous")
    pointers = [array.ctypes.data for array in arrays]
    return _State(*pointers, x.width, x.max_nodes, len(x.depths), x.num_depths, x.num_ranks)


def _marshal_drafted(x: Drafted) -> Any:
    return _Drafted(*(getattr(x, name).ctypes.data for name in _OF_DRAFTED), x.num_candidates)


def _marshal_trees(x: TreeArrays) -> Any:
    arrays = [getattr(x, name) for name in _OF_TREES]
    require(all(array.flags.c_contiguous and array.dtype == np.int64 for array in arrays), "trees are contiguous int64")
    return _Trees(*(array.ctypes.data for array in arrays), x.tokens.shape[1])


def _marshal_offer(x: Offer) -> Any:
    rows, count = x.tokens.shape
    columns: tuple[NDArray[Any], ...] = x.tokens, x.parents, x.logp, x.depths, x.ranks
    require(all(column.shape in ((rows, count), (count,)) for column in columns), "candidates differ in shape")
    require(all(column.strides[-1] == column.itemsize or count == 1 for column in columns), "rows are contiguous")
    require(x.logp.dtype == np.float32 and x.tokens.dtype == x.parents.dtype == np.int64, "candidates' dtypes")
    require(x.depths.dtype == x.ranks.dtype == np.int64, "candidates' dtypes")
    strides = [column.strides[0] // column.itemsize if column.ndim == 2 else 0 for column in columns]
    return _Offer(*(column.ctypes.data for column in columns), None, rows, count, *strides)  # ``arrange`` adds the rest


@cache
def code() -> ctypes.CDLL | None:
    """The library of this operator, or None where native code cannot run."""
    step = [POINTER(_State), POINTER(_Drafted), POINTER(_Offer)]
    signatures: dict[str, list[Any]] = {
        "sizing_choose": [*step[:2], POINTER(_Trees), step[2], POINTER(_Chosen)],
        "sizing_pack": [POINTER(_Trees), *[c_int64] * 3],
        "sizing_learn": [*step, POINTER(_Trees), c_void_p, c_int64, c_void_p, c_int64],
        "sizing_look": [
            step[0],
            *[c_void_p] * 2,
            *[c_int64] * 3,
            c_void_p,
            *[c_int64] * 2,
            c_void_p,
            c_int64,
            *[c_void_p] * 2,
        ],
    }
    return library.load_functions(SOURCE, signatures)
