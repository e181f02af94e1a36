"""The order in which waiting requests are admitted, and the choice to wait for a prefix that another one computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from specmamba.cache.prefix.node import Tokens, common_length
from specmamba.engine.cache_manager import CacheManager
from specmamba.engine.request import Request

MAX_ORDERED = 128  # requests whose prefixes are looked up in every step; the others follow in order of arrival
MIN_SHARED = 16  # a request waits for another's prefix if that saves at least so many tokens,
MIN_SHARE = 0.25  # and at least this share of the tokens that it must compute


def longest_prefix_first(
    waiting: Iterable[Request], cached: Callable[[Request], int], max_overtakes: int
) -> list[Request]:
    """Return the waiting requests in the order of admission.

    Those that ran before or were overtaken ``max_overtakes`` times come first, in order of arrival, so that no request
    waits forever. The others follow by ``cached``, the tokens of their cached prefix, largest first.
    """
    requests = list(waiting)
    first = [r for r in requests if r.num_admissions or r.num_overtakes >= max_overtakes]
    others = [r for r in requests if not r.num_admissions and r.num_overtakes < max_overtakes]
    ordered = sorted(others[:MAX_ORDERED], key=cached, reverse=True)
    return first + ordered + others[MAX_ORDERED:]


def is_computed_by_another(request: Request, extending: Sequence[Request], prefixes: CacheManager) -> bool:
    """Whether a request should wait because another one, in prefill now, will store a state at their common prefix."""
    if request.leader is None or not _is_ahead(*request.leader, extending):
        request.leader = _find_leader(request, extending, prefixes)
    return request.leader is not None


def _find_leader(request: Request, extending: Sequence[Request], prefixes: CacheManager) -> tuple[Request, int] | None:
    """Find the request in prefill with the longest useful common prefix, and make it store a state at its end.

    Returns:
        That request and the position of the state; None if waiting would save too little.
    """
    if not prefixes.is_on or not extending or request.must_read_prompt:
        return None
    key = request.key()
    shared = {other: _num_common(key, other.key()) for other in extending if other.extra_key == request.extra_key}
    leader = max((o for o in shared if _is_ahead(o, shared[o], extending)), key=shared.__getitem__, default=None)
    if leader is None or shared[leader] < MIN_SHARED:
        return None
    end = _chunk_end(leader, shared[leader])
    cached = prefixes.peek(request)
    if end - cached < max(MIN_SHARED, MIN_SHARE * (len(key) - cached)):
        return None
    leader.chunk_ends.add(end)
    return leader, end


def _chunk_end(leader: Request, num_shared: int) -> int:
    """Return the position of the state for a common prefix of this length: one that is planned nearby, or a new one."""
    near = [end for end in leader.chunk_ends if num_shared - MIN_SHARED < end <= num_shared and end > leader.num_run]
    return max(near, default=num_shared)


def _num_common(a: Tokens, b: Tokens) -> int:
    """Length of the common prefix of two texts; 0 if it is shorter than MIN_SHARED, which is cheap to find out."""
    if min(len(a), len(b)) < MIN_SHARED or (a[:MIN_SHARED] != b[:MIN_SHARED]).any():
        return 0
    return common_length(a, b)


def _is_ahead(leader: Request, num_shared: int, extending: Sequence[Request]) -> bool:
    """Whether a request is in prefill and has not reached the end of the common prefix yet."""
    return leader in extending and leader.num_run < num_shared
