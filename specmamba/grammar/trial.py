"""Random walks through a compiled grammar, so that what would hold up an engine is refused before it gets there."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmamba.errors import RequestError
from specmamba.grammar.effort import scale_of

NUM_WALKS, MAX_STEPS = 3, 200
MAX_SECONDS = 0.5  # of all walks; those of most grammars take a hundredth
SLOW_SECONDS = 0.03  # of one step; with a large vocabulary more
GROWTH, STEPS_AHEAD = 3.0, 5  # the last steps of a walk against its first; how many walks long an answer may be


def check_by_trial(compiled: Any, vocab_size: int) -> None:
    """Walk some seeded ways through a grammar.

    Raises:
        RequestError: nothing may follow at the very start; the masks disagree with the matcher; or (caused by
            TimeoutError) a step takes too long, or would in a longer text.
    """
    slow = SLOW_SECONDS * scale_of(vocab_size)
    end = time.thread_time() + MAX_SECONDS
    for seed in range(NUM_WALKS):
        costs: list[float] = []
        for cost in _steps(compiled, vocab_size, random.Random(seed)):
            costs.append(cost)
            if cost > slow:
                raise _too_complex()
            if time.thread_time() > end:
                break
        if _grows(costs, slow):
            raise _too_complex()
        if time.thread_time() > end:
            return


def _steps(compiled: Any, vocab_size: int, rng: random.Random) -> Iterator[float]:
    """Seconds of each step of one walk: a mask, and a token that it allows."""
    import xgrammar

    matcher = xgrammar.GrammarMatcher(compiled)
    stop_ids = matcher.stop_token_ids
    bits = np.zeros((1, -(-vocab_size // 32)), np.int32)
    for step in range(MAX_STEPS):
        began = time.thread_time()
        matcher.fill_next_token_bitmask(bits)
        seconds = time.thread_time() - began
        if step == 0 and not bits.any():
            raise RequestError("no token of this model can begin a text of the grammar", "grammar")
        token = _choose(bits, vocab_size, stop_ids, rng)
        if token is None:
            yield seconds
            return
        began = time.thread_time()
        if not matcher.accept_token(token):
            raise RequestError("the grammar is not matched reliably: use fewer and shorter repetitions", "grammar")
        yield seconds + time.thread_time() - began


def _choose(bits: NDArray[np.int32], vocab_size: int, stop_ids: list[int], rng: random.Random) -> int | None:
    """A token that goes on, or None where there is none."""
    allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[:vocab_size])
    allowed = allowed[~np.isin(allowed, stop_ids)]
    return int(allowed[rng.randrange(len(allowed))]) if len(allowed) else None


def _grows(costs: list[float], slow: float) -> bool:
    quarter = len(costs) // 4
    if quarter < 5:
        return False
    first, last = (float(np.median(part)) for part in (costs[:quarter], costs[-quarter:]))
    return last > GROWTH * first and last * STEPS_AHEAD > slow


def _too_complex() -> RequestError:
    error = RequestError("the grammar is too complex: finding out which tokens may follow takes too long", "grammar")
    error.__cause__ = TimeoutError()
    return error
