"""How many nodes of which requests one verify takes: those that add more tokens than their time is worth.

All candidates of a step are pooled. The value of a node is the probability that its whole path is accepted, never above
its parent's, so the best nodes of the pool always form trees. For every number of them the expected tokens and the time of
the step are known, and the number with the most tokens per second is taken: the global maximum, because times rise in
steps.

Rows that are decided under ``rejection`` take the nodes whose value reaches a threshold from earlier steps: which nodes
are kept may then depend on nothing that depends on their drawn tokens. The value of a node depends on the tokens above
it, and a number chosen for the whole pool would look at all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specmamba.draft.candidates import Bools, Floats, Ints


@dataclass(frozen=True, slots=True)
class Limits:
    """What one verify may take."""

    max_nodes: int  # of a row, the root included
    seconds: Floats  # [T + 1], time of the step by its number of nodes; T is the largest number
    threshold: float  # value that a node of a row under ``rejection`` must reach


@dataclass(frozen=True, slots=True)
class Budget:
    """The candidates that a verify takes."""

    kept: Bools  # [B, C]
    expected_tokens: float  # of all rows, one of each row's own included
    best_threshold: float  # between the values of the last node that pays and of the first that does not


def path_values(p: Floats, parents: Ints, max_depth: int) -> Floats:
    """Multiply probabilities [B, C] down the paths; ``parents`` [B, C] as in ``Candidates``."""
    padded = np.ones((len(p), p.shape[1] + 1))
    for _ in range(max_depth):  # after d rounds all nodes down to depth d are right
        padded[:, 1:] = p * np.take_along_axis(padded, parents, 1)
    return padded[:, 1:]


def choose(values: Floats, is_drawn: Bools, limits: Limits) -> Budget:
    """Choose the nodes of a step.

    Args:
        values: [B, C], not above the parent's; 0: no candidate.
        is_drawn: [B], rows that are decided under ``rejection``.
        limits: of this step.
    """
    size, num_candidates = values.shape
    order = np.argsort(-values, axis=1, kind="stable")
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.arange(num_candidates)[None], 1)
    values = np.where(place < limits.max_nodes - 1, values, 0.0)
    kept = (values >= limits.threshold) & (values > 0) & is_drawn[:, None]
    num_best, _, threshold = _best_number(np.sort(values, axis=None)[::-1], size, float(size), limits.seconds)
    room = len(limits.seconds) - 1 - size
    if kept.sum() > room:  # the largest trees do not fit: keep the roots alone
        kept[:] = False
    rest = np.where(is_drawn[:, None], 0.0, values)
    drawn, gain = int(kept.sum()), float(values[kept].sum())
    if not is_drawn.any():
        number = num_best
    else:
        number, _, _ = _best_number(np.sort(rest, axis=None)[::-1], size + drawn, size + gain, limits.seconds)
    best = np.argsort(-rest, axis=None, kind="stable")[:number]
    kept.reshape(-1)[best] = True
    return Budget(kept, float(size + values[kept].sum()), threshold)


def _best_number(values: Floats, num_nodes: int, tokens: float, seconds: Floats) -> tuple[int, float, float]:
    """Return how many of the falling ``values`` to add, the tokens per second, and the threshold between them."""
    values = values[values > 0][: len(seconds) - 1 - num_nodes]
    expected = tokens + np.concatenate([[0.0], np.cumsum(values)])
    rates = expected / seconds[num_nodes : num_nodes + len(expected)]
    best = int(rates.argmax())
    last = values[best - 1] if best else 1.0
    following = values[best] if best < len(values) else 0.0
    return best, float(rates[best]), float(last + following) / 2


def best_rate(values: Floats, seconds: Floats, max_nodes: int) -> tuple[int, float]:
    """Return how many nodes of [B, C] values pay, and the tokens per second with them."""
    size = len(values)
    if values.shape[1] >= max_nodes:
        values = -np.sort(-values, axis=1)[:, : max_nodes - 1]
    number, rate, _ = _best_number(np.sort(values, axis=None)[::-1], size, float(size), seconds)
    return number, rate
