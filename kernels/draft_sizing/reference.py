"""The sizing of drafts in NumPy: the specification, and the form for machines without native code."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from specmamba.kernels.draft_sizing.operands import (
    DRAWN,
    LENGTH,
    MAX_DEPTH,
    MAX_RANK,
    NUM_BINS,
    Chosen,
    Drafted,
    Floats,
    Ints,
    Offer,
    SizerState,
    Times,
    TreeArrays,
)

Bools = NDArray[np.bool_]
LARGEST_LOGIT, LARGEST_WEIGHT, LARGEST_OFFSET, LARGEST_OF_ROW = 12.0, 4.0, 8.0, 2.5
RATE_OF_WEIGHT, RATE_OF_ROW, LAST_COUNT = 0.01, 0.25, 100.0
FADING = 0.999  # of old observations in the calibration error, at each new one
WEIGHT_OF_ODDS, WEIGHT_OF_THRESHOLD = 0.05, 0.1
SHARE_BELOW = 1.0  # of how much likelier the last level is than usual, in the levels below it
# of so many drafts in a step one is kept for new requests of its mode, and of so many drafts, once there are some
SHARED, SHARED_LATER = 2, 16


def begin(state: SizerState, row: int, mode: int) -> None:
    """Start a request in a row: it is taken to be like the others of its mode."""
    state.of_row[row] = 0.0
    if not state.values_of_mode[mode].any():
        state.values_of_mode[mode] = filled(state, np.zeros(0), 0, mode, 0.0)
    state.values_of_row[row] = state.values_of_mode[mode]
    state.next_of_row[row] = 0


def choose(state: SizerState, drafted: Drafted, offer: Offer) -> Chosen:
    """Choose the trees of a step.

    Args:
        state: candidates are calibrated by it; their values are added to it.
        drafted: rows, modes, bounds and places are given; the rest is written.
        offer: the candidates.
    """
    began, offer = time.perf_counter(), _used(offer)
    size, count = offer.tokens.shape
    modes = drafted.modes[:size]
    drafted.parents[:size, :count] = offer.parents
    _calibrate(state, drafted, offer)
    values = path_values(drafted.p[:size, :count], offer.parents, offer.depth)
    for i in range(size):
        interval = 1 if state.shared_of_mode[modes[i]] < LENGTH else SHARED_LATER
        is_shared = (int(state.next_of_mode[modes[i]]) + 1) % max(size // SHARED, interval) == 0
        place = int(drafted.rows[i]), int(modes[i]), is_shared
        _remember(state, place, values[i], drafted.p[i, :count], offer.depth)
    if offer.nodes_per_row:
        kept = _fixed(state, values, offer)
    else:
        kept = _paying(state, values, modes == DRAWN, offer)
    drafted.kept[:size, :count] = kept
    _write_trees(drafted, offer, kept)
    counts, numbers = drafted.trees.num_nodes[: offer.batch_size], np.arange(drafted.trees.parents.shape[1])
    follows = (drafted.trees.parents[: offer.batch_size] == numbers - 1) | (numbers >= counts[:, None])
    expected = float(offer.batch_size + values[kept].sum())
    state.seconds += time.perf_counter() - began
    return Chosen(int(counts.sum()), int(counts.max()), bool(follows.all()), expected)


def pack(trees: TreeArrays, padded_size: int, width: int, num_places: int) -> None:
    """Write the packing of chosen trees.

    Args:
        trees: ``places``, ``nodes``, ``firsts`` and ``num_live`` are written.
        padded_size: rows, the last ones padding.
        width: N of the layout, at least that of the largest tree.
        num_places: T, at least the number of nodes; places behind the last node repeat place 0.
    """
    counts = trees.num_nodes[:padded_size]
    first = trees.firsts[:padded_size]
    first[:] = np.cumsum(counts) - counts
    number = np.arange(counts.sum())
    trees.places[:num_places] = 0
    trees.places[: len(number)] = number + np.repeat(np.arange(padded_size) * width - first, counts)
    nodes = first[:, None] + np.minimum(np.arange(width), np.maximum(counts[:, None] - 1, 0))
    trees.nodes[: padded_size * width] = np.minimum(nodes, len(number) - 1).ravel()
    trees.num_live[0] = len(number)


def learn(state: SizerState, drafted: Drafted, offer: Offer, paths: Ints, counts: Ints) -> None:
    """Fit the calibration to the result of a step, by observed nodes only: the kept children of accepted nodes.

    Args:
        state: is fitted.
        drafted: as ``choose`` left it, with its trees.
        offer: as ``choose`` got it; only its sizes, depths and ranks are read.
        paths: [B, W], for each row of the batch the root, the accepted nodes, and padding.
        counts: [B], accepted nodes, the root not counted.
    """
    began, offer = time.perf_counter(), _used(offer)
    size, count = offer.tokens.shape
    depths, ranks = (np.broadcast_to(x, (size, count)) for x in (offer.depths, offer.ranks))
    for i in range(size):
        place = drafted.places[i]
        path = paths[place, 1 : counts[place] + 1]
        accepted = {0, *(int(c) for c in drafted.trees.candidates[place, path])}  # 1 + the candidate of each node
        for c in range(count):
            if drafted.kept[i, c] and int(drafted.parents[i, c]) in accepted:
                _fit(state, drafted, (i, c), (int(depths[i, c]), int(ranks[i, c])), c + 1 in accepted)
    state.seconds += time.perf_counter() - began


def look(state: SizerState, rows: Ints, max_depths: Ints, draws: tuple[int, int], times: Times) -> Floats:
    """Judge drafts of every depth by kept ones.

    Args:
        state: keeps the values.
        rows: [B].
        max_depths: [B], deepest draft of each row.
        draws: number of the first kept draft, and how many are looked at; for chains all are.
        times: of steps.

    Returns:
        [2 (D + 1)], expected tokens per second by depth, 0: without drafts; first of chosen trees, then of chains.
    """
    size, num_depths = len(rows), len(times.trees)
    tokens, seconds = np.zeros(num_depths), np.zeros(num_depths)
    for number in range(draws[0], draws[0] + draws[1]):
        values = state.values_of_row[rows, (number + rows) % LENGTH]
        values = np.where(state.depths <= max_depths[:, None], values, 0.0)
        for depth in range(num_depths):
            known = capped(values[:, state.depths <= depth], state.max_nodes)
            best, rate, _ = best_number(np.sort(known, axis=None)[::-1], size, float(size), times.trees[depth])
            took = times.trees[depth, size + best]
            tokens[depth] += rate * took
            seconds[depth] += took
    of_chains, count = np.zeros(num_depths), len(times.places)
    survival = state.values_of_row[rows][:, :, times.places].mean(1).sum(0)
    of_chains[1 : count + 1] = (size + survival.cumsum()) / times.chains[1 : count + 1]
    return np.concatenate([tokens / seconds, of_chains])


def path_values(p: Floats, parents: Ints, max_depth: int) -> Floats:
    """Multiply probabilities [B', C] down the paths."""
    padded = np.ones((len(p), p.shape[1] + 1))
    for _ in range(max_depth):  # after d rounds all nodes down to depth d are right
        padded[:, 1:] = p * np.take_along_axis(padded, parents, 1)
    values: Floats = padded[:, 1:]
    return values


def capped(values: Floats, max_nodes: int) -> Floats:
    """Set all but the best ``max_nodes - 1`` values of each row to 0."""
    order = np.argsort(-values, axis=1, kind="stable")
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.arange(values.shape[1])[None], 1)
    return np.where(place < max_nodes - 1, values, 0.0)


def best_number(values: Floats, num_nodes: int, tokens: float, seconds: Floats) -> tuple[int, float, float]:
    """Find the number of nodes with the most tokens per second: the global maximum.

    Args:
        values: falling.
        num_nodes: that a step has without them.
        tokens: that a step is expected to bring without them.
        seconds: [T + 1], time of a step by its nodes.

    Returns:
        How many of the values to add, the tokens per second, and the threshold between the last of them and the next.
    """
    values = values[values > 0][: len(seconds) - 1 - num_nodes]
    expected = tokens + np.concatenate([[0.0], np.cumsum(values)])
    rates = expected / seconds[num_nodes : num_nodes + len(expected)]
    best = int(rates.argmax())
    last = values[best - 1] if best else 1.0
    following = values[best] if best < len(values) else 0.0
    return best, float(rates[best]), float(last + following) / 2


def calibration_error(state: SizerState) -> float:
    """The expected calibration error (arXiv 1706.04599, section 2), over bins of equal width; 0 without nodes."""
    total = state.bins[:, 0].sum()
    return float(np.abs(state.bins[:, 1] - state.bins[:, 2]).sum() / total) if total else 0.0


def logits_of(logp: NDArray[np.float32]) -> Floats:
    """Log probabilities to logits, within bounds; NaN counts as impossible."""
    finite = np.minimum(np.nan_to_num(logp.astype(np.float64), nan=-1e4, neginf=-1e4), -1e-9)
    logits: Floats = np.clip(finite - np.log(-np.expm1(finite)), -LARGEST_LOGIT, LARGEST_LOGIT)
    return logits


def bounded_logit(p: float) -> float:
    """The logit of a probability, not beyond those of 1 and 99 %."""
    p = min(max(p, 0.01), 0.99)
    return math.log(p / (1.0 - p))


def filled(state: SizerState, values: Floats, depth: int, mode: int, shift: float) -> Floats:
    """Values [C] of a deepest draft from those of one down to ``depth``; the rest is made of mean odds.

    ``shift``: by how much the logits of this draft's probabilities differ from those of the mean ones.
    """
    result = np.zeros(len(state.depths))
    result[: len(values)] = values
    above = np.ones(1) if depth == 0 else -np.sort(-values[state.depths[: len(values)] == depth])
    for level in range(depth + 1, state.num_depths + 1):
        places = np.flatnonzero(state.depths == level)
        parents = np.arange(len(places)) // state.num_ranks
        odds = state.odds[mode, level - 1][state.ranks[places]]
        odds = odds / (odds + (1.0 - odds) * np.exp(-shift))
        below = above[np.minimum(parents, len(above) - 1)] * odds
        result[places] = below
        above = -np.sort(-below)[: state.width]
    return result


def _used(offer: Offer) -> Offer:
    """The offer without its unused rows."""
    size = offer.num_rows
    depths, ranks = (x if x.ndim == 1 else x[:size] for x in (offer.depths, offer.ranks))
    tokens, parents = offer.tokens[:size], offer.parents[:size]
    return replace(offer, tokens=tokens, parents=parents, logp=offer.logp[:size], depths=depths, ranks=ranks)


def _calibrate(state: SizerState, drafted: Drafted, offer: Offer) -> None:
    """p = sigmoid(w logit(q) + b[depth, rank] + o[row]); 0 where there is no candidate."""
    size, count = offer.tokens.shape
    modes, rows = drafted.modes[:size], drafted.rows[:size]
    places = np.minimum(offer.depths, MAX_DEPTH) - 1, np.minimum(offer.ranks, MAX_RANK - 1)
    logits = logits_of(offer.logp)
    scores = state.weights[modes][:, None] * logits + state.offsets[(modes[:, None], *places)]
    scores = scores + state.of_row[rows][:, None]
    exists = (offer.logp > -np.inf) & (offer.depths <= drafted.max_depths[:size, None])
    drafted.logits[:size, :count] = logits
    drafted.p[:size, :count] = np.where(exists, 1.0 / (1.0 + np.exp(-scores)), 0.0)


def _remember(state: SizerState, of: tuple[int, int, bool], values: Floats, p: Floats, depth: int) -> None:
    """Keep a draft of a row and mode, and whether it is kept for the mode too."""
    row, mode, is_shared = of
    for c in range(len(p)):
        place = mode, state.depths[c] - 1, state.ranks[c]
        if p[c] > 0:  # a node counts by the probability that its parent is accepted
            state.odds[place] += WEIGHT_OF_ODDS * values[c] / p[c] * (p[c] - state.odds[place])
    last = int(np.flatnonzero(state.depths[: len(p)] == depth)[0])
    above = bounded_logit(float(p[last])) - bounded_logit(float(state.odds[mode, depth - 1, state.ranks[last]]))
    found = filled(state, values, depth, mode, float(state.of_row[row]) + SHARE_BELOW * above)
    state.values_of_row[row, state.next_of_row[row] % LENGTH] = found
    state.next_of_row[row] += 1
    state.next_of_mode[mode] += 1
    if is_shared:
        state.values_of_mode[mode, state.shared_of_mode[mode] % LENGTH] = found
        state.shared_of_mode[mode] += 1


def _fixed(state: SizerState, values: Floats, offer: Offer) -> Bools:
    """The same number of nodes of every row: first those of the lowest rank, or by value where levels are wide."""
    order = np.broadcast_to(offer.ranks, values.shape) if state.width == 1 else -values
    place = np.argsort(np.argsort(order, axis=-1, kind="stable"), axis=-1)
    kept: Bools = (place < offer.nodes_per_row - 1) & (values > 0)
    return kept


def _paying(state: SizerState, values: Floats, is_drawn: Bools, offer: Offer) -> Bools:
    """The nodes that add more tokens than their time is worth. README.md says why drawn rows have a threshold."""
    others = offer.batch_size - len(values)
    seconds, size = offer.seconds[others:], len(values)
    values = capped(values, state.max_nodes)
    threshold = state.threshold[0]
    kept: Bools = (values >= threshold) & (values > 0) & is_drawn[:, None]
    number, _, best = best_number(np.sort(values, axis=None)[::-1], size, float(size), seconds)
    state.threshold[0] += WEIGHT_OF_THRESHOLD * (best - threshold)
    rest = np.where(is_drawn[:, None], 0.0, values)
    if is_drawn.any():
        drawn, gain = int(kept.sum()), float(values[kept].sum())
        number, _, _ = best_number(np.sort(rest, axis=None)[::-1], size + drawn, size + gain, seconds)
    kept.reshape(-1)[np.argsort(-rest, axis=None, kind="stable")[:number]] = True
    return kept


def _write_trees(drafted: Drafted, offer: Offer, kept: Bools) -> None:
    size, rows, trees = len(kept), offer.padded_size, drafted.trees
    trees.tokens[:rows], trees.candidates[:rows], trees.parents[:rows] = 0, 0, -1
    trees.num_nodes[:rows] = np.arange(rows) < offer.batch_size
    numbers = np.cumsum(kept, 1)
    row, candidate = np.nonzero(kept)
    node, place = numbers[row, candidate], drafted.places[:size][row]
    padded = np.concatenate([np.zeros((size, 1), np.int64), numbers], 1)
    trees.tokens[place, node] = offer.tokens[row, candidate]
    trees.parents[place, node] = padded[row, offer.parents[row, candidate]]
    trees.candidates[place, node] = candidate + 1
    trees.num_nodes[drafted.places[:size]] = numbers[:, -1] + 1


def _fit(state: SizerState, drafted: Drafted, at: tuple[int, int], node: tuple[int, int], is_accepted: bool) -> None:
    """One step of gradient descent on the log loss; steps of offsets fall with their observations."""
    i, c = at
    mode, row = int(drafted.modes[i]), int(drafted.rows[i])
    p, logit = float(drafted.p[i, c]), float(drafted.logits[i, c])
    place = mode, min(node[0], MAX_DEPTH) - 1, min(node[1], MAX_RANK - 1)
    # other nodes of this step have moved the numbers: with p, many alike would move them too far
    score = state.weights[mode] * logit + state.offsets[place] + state.of_row[row]
    error = float(is_accepted) - 1.0 / (1.0 + float(np.exp(-score)))
    state.counts[place] = count = min(state.counts[place] + 1.0, LAST_COUNT)
    # 4: one over the largest slope of sigmoid
    state.offsets[place] = _clipped(state.offsets[place] + 4.0 * error / count, LARGEST_OFFSET)
    step = RATE_OF_WEIGHT * error * logit / (1.0 + logit * logit / 4.0)
    state.weights[mode] = min(max(state.weights[mode] + step, 0.0), LARGEST_WEIGHT)
    state.of_row[row] = _clipped(state.of_row[row] + RATE_OF_ROW * error, LARGEST_OF_ROW)
    state.bins *= FADING
    state.bins[min(int(p * NUM_BINS), NUM_BINS - 1)] += 1.0, p, float(is_accepted)


def _clipped(x: float, bound: float) -> float:
    return min(max(x, -bound), bound)
