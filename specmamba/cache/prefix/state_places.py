"""Where states are left beside the ends of chunks and requests: in the last part of a prompt, and along an output."""

from __future__ import annotations

MIN_SPARE = 64  # tokens: the shortest distance of a spare state to the end of a prompt
TRACKED_PER_DOUBLING = 8  # states of one long output


def spare_ends(start: int, end: int, most: int, chunk_size: int) -> set[int]:
    """Return positions inside a prompt where another text may part from it, so that a state there may spare work.

    They lie at distances from the end that halve, from the half of a chunk or a quarter of what is computed on: who
    parts at a distance d from the end computes less than 2 d again, or a chunk and d. Short distances save little.

    Args:
        start, end: of the tokens that are computed.
        most: positions.
        chunk_size: tokens between two states that are left anyway.
    """
    distance, ends = min(chunk_size // 2, (end - start) // 4), set[int]()
    while distance >= MIN_SPARE and len(ends) < most:
        ends.add(end - distance)
        distance //= 2
    return ends


def is_tracked(count: int) -> bool:
    """Whether a state is left after so many track intervals of one output.

    After each at first, then after every second, fourth and so on: ``TRACKED_PER_DOUBLING`` in each doubling of the
    output's length.
    """
    step = 1 << max(0, (count // TRACKED_PER_DOUBLING).bit_length() - 1)
    return count % step == 0
