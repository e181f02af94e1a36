"""Which waiting request is next, and which should wait for another's prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from specmamba.engine.prefixes import Prefixes
from specmamba.engine.request import Request

MAX_ORDERED = 128  # requests whose prefixes are looked up in every step; the others keep their order behind them
MIN_SHARED = 16  # tokens that must be saved for a request to wait for another's


def longest_prefix_first(
    waiting: Iterable[Request], cached: Callable[[Request], int], max_overtakes: int
) -> list[Request]:
    """Waiting requests in the order in which they are admitted.

    Those that have run before or were overtaken often enough come first, in order of arrival: nobody is starved.
    """
    requests = list(waiting)
    first = [r for r in requests if r.num_admissions or r.num_overtakes >= max_overtakes]
    others = [r for r in requests if not r.num_admissions and r.num_overtakes < max_overtakes]
    ordered = sorted(others[:MAX_ORDERED], key=cached, reverse=True)
    return first + ordered + others[MAX_ORDERED:]


class Leaders:
    """Finds requests whose prefix another request is computing right now."""

    def __init__(self, prefixes: Prefixes) -> None:
        self._prefixes = prefixes
        self._followed: dict[str, tuple[Request, int]] = {}  # by id: who computes, and tokens that are shared

    def is_computing_for(self, request: Request, extending: Sequence[Request]) -> bool:
        """Whether waiting saves a request work: one that extends will leave a state where the two part."""
        followed = self._followed.get(request.request_id)
        if followed is None or not _is_ahead(*followed, extending):
            followed = self._find(request, extending)
        if followed is None:
            self._followed.pop(request.request_id, None)
            return False
        self._followed[request.request_id] = followed
        return True

    def _find(self, request: Request, extending: Sequence[Request]) -> tuple[Request, int] | None:
        if not self._prefixes.is_on or not extending:
            return None
        key = request.key()
        shared = {other: num_common(key, other.key()) for other in extending if other.extra_key == request.extra_key}
        leader = max((o for o in shared if _is_ahead(o, shared[o], extending)), key=shared.__getitem__, default=None)
        if leader is None or shared[leader] < self._prefixes.peek(request) + MIN_SHARED:
            return None
        leader.chunk_ends.add(shared[leader])
        return leader, shared[leader]


def num_common(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    """Length of the common prefix of two token arrays."""
    size = min(len(a), len(b))
    differs = a[:size] != b[:size]
    return int(differs.argmax()) if differs.any() else size


def _is_ahead(leader: Request, num_shared: int, extending: Sequence[Request]) -> bool:
    """Whether a request is still on its way to the point where another parts from it."""
    return leader in extending and leader.num_run < num_shared
