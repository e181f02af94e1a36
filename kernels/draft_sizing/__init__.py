"""The sizing of drafts: calibrated probabilities of candidates, and the nodes of a batch that pay for their time."""

from __future__ import annotations

from typing import Any

from specmamba.kernels.draft_sizing import native_ops, reference
from specmamba.kernels.draft_sizing.operands import (
    DRAWN,
    GREEDY,
    LENGTH,
    NUM_MODES,
    SAMPLED,
    Chosen,
    Drafted,
    Floats,
    Ints,
    Offer,
    SizerState,
    Times,
    TreeArrays,
)
from specmamba.kernels.draft_sizing.reference import WEIGHT_OF_ODDS, begin, calibration_error

__all__ = [
    "DRAWN",
    "GREEDY",
    "LENGTH",
    "NUM_MODES",
    "SAMPLED",
    "WEIGHT_OF_ODDS",
    "Chosen",
    "Drafted",
    "Floats",
    "Ints",
    "Offer",
    "SizerState",
    "Times",
    "TreeArrays",
    "arrange",
    "begin",
    "calibration_error",
    "choose",
    "learn",
    "look",
    "pack",
]


def choose(state: SizerState, drafted: Drafted, offer: Offer) -> Chosen:
    """Choose the trees of a step; see ``reference.choose``.

    Raises:
        ValueError: operands differ in shape or dtype (native form).
    """
    chosen: Chosen = _form().choose(state, drafted, offer)
    offer.written = chosen if native_ops.code() is None else native_ops.written(offer)
    return chosen


def arrange(state: SizerState, drafted: Drafted, offer: Offer) -> None:
    """Let the recorded call of ``choose`` with these operands see what was changed in the offer since.

    Raises:
        ValueError: numbers of rows do not fit (native form).
    """
    if native_ops.code() is not None:
        native_ops.arrange(state, drafted, offer)


def pack(trees: TreeArrays, padded_size: int, width: int, num_places: int) -> None:
    """Write the packing of chosen trees; see ``reference.pack``."""
    _form().pack(trees, padded_size, width, num_places)


def learn(state: SizerState, drafted: Drafted, offer: Offer, paths: Ints, counts: Ints) -> None:
    """Fit the calibration to the result of a step; see ``reference.learn``."""
    _form().learn(state, drafted, offer, paths, counts)


def look(state: SizerState, rows: Ints, max_depths: Ints, draws: tuple[int, int], times: Times) -> Floats:
    """Judge drafts of every depth by kept ones; see ``reference.look``."""
    rates: Floats = _form().look(state, rows, max_depths, draws, times)
    return rates


def _form() -> Any:
    return reference if native_ops.code() is None else native_ops
