"""The probability that a draft node is accepted, from the drafter's own probability and from what was seen.

For a node at depth d and rank r among its siblings, drafted with the probability q for request i (Platt, "Probabilistic
outputs for support vector machines", 1999, with an offset for each place and each request):

    p = sigmoid(w * logit(q) + b[d, r] + o[i])

w and b are shared by all requests of one rule of acceptance and fitted online by the gradient of the log loss, o is a
clipped moving sum of errors. Only observed nodes count: children of accepted nodes that were verified.
"""

from __future__ import annotations

import numpy as np

from specmamba.draft.candidates import Floats, Ints

GREEDY, SAMPLED, DRAWN = range(3)  # modes: sampled and decided under ``target``; decided under ``rejection``
NUM_MODES = 3
MAX_DEPTH, MAX_RANK = 8, 4  # deeper and higher ones share the last offset
NUM_BINS = 10  # of the calibration error
LARGEST_LOGIT, LARGEST_WEIGHT, LARGEST_OFFSET, LARGEST_OF_REQUEST = 12.0, 4.0, 8.0, 2.5
RATE_OF_WEIGHT, RATE_OF_REQUEST = 0.01, 0.25
FIRST_COUNT, LAST_COUNT = 8.0, 400.0  # an offset moves by error / observations, within these bounds
FADING = 0.999  # of old observations in the calibration error, at each new one


class Confidence:
    """The fitted numbers. One owner: the sizer of an engine."""

    def __init__(self, num_rows: int) -> None:
        """Start with p = q; ``num_rows`` of the request table, row 0 included."""
        self.weights = np.ones(NUM_MODES)
        self.offsets = np.zeros((NUM_MODES, MAX_DEPTH, MAX_RANK))
        self.counts = np.full((NUM_MODES, MAX_DEPTH, MAX_RANK), FIRST_COUNT)
        self.of_row = np.zeros(num_rows)
        self.bins = np.zeros((NUM_BINS, 3))  # faded numbers of observations, sums of p, numbers of accepted nodes

    def begin(self, row: int) -> None:
        """Start a request in this row."""
        self.of_row[row] = 0.0

    def probabilities(self, logits: Floats, depths: Ints, ranks: Ints, modes: Ints, rows: Ints) -> Floats:
        """Return the probabilities of nodes, given their parents.

        Args:
            logits: [B, C], of the drafter's probabilities (``logits_of``).
            depths, ranks: [C] or [B, C].
            modes, rows: [B].
        """
        places = np.minimum(depths, MAX_DEPTH) - 1, np.minimum(ranks, MAX_RANK - 1)
        offsets = self.offsets[(modes[:, None], *places)]
        scores = self.weights[modes][:, None] * logits + offsets + self.of_row[rows][:, None]
        result: Floats = 1.0 / (1.0 + np.exp(-scores))
        return result

    def observe(self, mode: int, row: int, place: tuple[int, int], logit: float, p: float, accepted: bool) -> None:
        """Learn from one node.

        Args:
            mode, row: of its request.
            place: depth and rank.
            logit: of the drafter's probability.
            p: as ``probabilities`` said before the verify.
            accepted: whether the verify accepted it.
        """
        depth, rank = min(place[0], MAX_DEPTH) - 1, min(place[1], MAX_RANK - 1)
        error = float(accepted) - p
        count = min(self.counts[mode, depth, rank] + 1.0, LAST_COUNT)
        self.counts[mode, depth, rank] = count
        offset = self.offsets[mode, depth, rank] + 4.0 * error / count  # 4: one over the largest slope of sigmoid
        self.offsets[mode, depth, rank] = _clipped(offset, LARGEST_OFFSET)
        step = RATE_OF_WEIGHT * error * logit / (1.0 + logit * logit / 4.0)
        self.weights[mode] = min(max(self.weights[mode] + step, 0.0), LARGEST_WEIGHT)
        self.of_row[row] = _clipped(self.of_row[row] + RATE_OF_REQUEST * error, LARGEST_OF_REQUEST)
        self.bins *= FADING
        self.bins[min(int(p * NUM_BINS), NUM_BINS - 1)] += 1.0, p, float(accepted)

    @property
    def calibration_error(self) -> float:
        """The expected calibration error (arXiv 1706.04599, section 2), over bins of equal width; 0 without nodes."""
        total = self.bins[:, 0].sum()
        return float(np.abs(self.bins[:, 1] - self.bins[:, 2]).sum() / total) if total else 0.0


def logits_of(logp: Floats) -> Floats:
    """Log probabilities to logits, within bounds; NaN counts as impossible."""
    logp = np.minimum(np.nan_to_num(logp, nan=-np.inf, neginf=-1e4), -1e-9)
    return np.clip(logp - np.log(-np.expm1(logp)), -LARGEST_LOGIT, LARGEST_LOGIT)


def _clipped(x: float, bound: float) -> float:
    return min(max(x, -bound), bound)
