"""Which waiting request is next, and which should wait for another's prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from specmamba.cache.prefix.node import Tokens, common_length
from specmamba.engine.prefixes import Prefixes
from specmamba.engine.request import Request

MAX_ORDERED = 128  # requests whose prefixes are looked up in every step; the others keep their order behind them
MIN_SHARED = 16  # tokens that must be saved for a request to wait for another's,
MIN_SHARE = 0.25  # and of those that it would compute


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


def is_computed_by_another(request: Request, extending: Sequence[Request], prefixes: Prefixes) -> bool:
    """Whether waiting saves a request work: one that extends now will leave a state where the two part."""
    if request.leader is None or not _is_ahead(*request.leader, extending):
        request.leader = _find_leader(request, extending, prefixes)
    return request.leader is not None


def _find_leader(request: Request, extending: Sequence[Request], prefixes: Prefixes) -> tuple[Request, int] | None:
    """The request that computes the most of another's tokens, and how many; it is told to leave a state there."""
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
    """Where a request leaves a state for another that shares so many tokens; one place serves those that are near."""
    near = [end for end in leader.chunk_ends if num_shared - MIN_SHARED < end <= num_shared and end > leader.num_run]
    return max(near, default=num_shared)


def _num_common(a: Tokens, b: Tokens) -> int:
    """Length of the common prefix of two texts; 0 where it is too short to matter, which is found out at once."""
    if min(len(a), len(b)) < MIN_SHARED or (a[:MIN_SHARED] != b[:MIN_SHARED]).any():
        return 0
    return common_length(a, b)


def _is_ahead(leader: Request, num_shared: int, extending: Sequence[Request]) -> bool:
    """Whether a request is still on its way to the point where another parts from it."""
    return leader in extending and leader.num_run < num_shared
