"""Turns of the clients: whose request is admitted next, whose prompt is run next, who gives way when there is no room.

Between clients the rule is max-min fairness: the client that has the least comes first. Within one client the order is
that of its requests.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence

from specmamba.engine.request import PrefillRun, Request


def fair_order(waiting: Sequence[Request], running: Iterable[Request]) -> Iterator[Request]:
    """Order waiting requests: each one is the first of the client that has the fewest running ones by then.

    Args:
        waiting: in the order of admission within each client.
        running: the requests that hold memory.
    """
    queues: dict[str | None, deque[Request]] = {}
    for request in waiting:
        queues.setdefault(request.owner.name, deque()).append(request)
    if len(queues) <= 1:
        yield from waiting
        return
    shares = Counter(request.owner.name for request in running)
    turns = [(shares[name], place, name) for place, name in enumerate(queues)]
    heapq.heapify(turns)
    while turns:
        share, place, name = turns[0]
        yield queues[name].popleft()
        if queues[name]:
            heapq.heapreplace(turns, (share + 1, place, name))
        else:
            heapq.heappop(turns)


def may_displace(request: Request, waiting: Sequence[Request], num_above: int) -> bool:
    """Whether a new request may be added to a full queue, so that another client's request leaves it (``surplus``).

    Args:
        request: is not in the queue yet.
        waiting: the queue, with ``num_above`` requests more than it holds.
        num_above: as many will leave it.

    Returns:
        True if some client will still have at least two more than the client of ``request``.
    """
    counts = Counter(other.owner.name for other in waiting if not other.num_admissions)
    counts.subtract(other.owner.name for other in surplus(waiting, num_above))
    return max(counts.values(), default=0) >= counts[request.owner.name] + 2


def surplus(waiting: Iterable[Request], num_above: int) -> list[Request]:
    """The requests that leave a queue with ``num_above`` too many: each is the youngest of the client with the most.

    This is the rule of longest queue drop (Suter et al., 1999, "Buffer management schemes for supporting TCP in gigabit
    routers with per-flow queueing"): a full queue is shared evenly by the clients that want it, and one client alone
    may have all of it. Requests that ran before never leave.
    """
    queues: dict[str | None, list[Request]] = {}
    for request in waiting:
        if not request.num_admissions:
            queues.setdefault(request.owner.name, []).append(request)
    leaving = []
    for _ in range(min(num_above, sum(map(len, queues.values())))):
        largest = max(queues.values(), key=len)
        leaving.append(max(largest, key=lambda request: request.sequence_number))
        largest.remove(leaving[-1])
    return leaving


def next_preempted(running: Iterable[Request]) -> Request:
    """The running request that gives up its memory: the youngest of the client that has the most running.

    The oldest request of all is never chosen before the others, so the engine always makes progress.
    """
    requests = list(running)
    counts = Counter(request.owner.name for request in requests)
    return max(requests, key=lambda request: (counts[request.owner.name], request.sequence_number))


def yielding(waiting: Iterable[Request], running: Sequence[Request], most_tokens: int) -> Request | None:
    """The running request that gives its place to a client that has at least two fewer, or None.

    A place that becomes free by itself goes to that client too, but the answers of others may take minutes until then.
    A request that waits for a prefix which another one computes has its turn.

    Args:
        waiting: requests that found no room.
        running: the requests that hold memory.
        most_tokens: size of the KV pool. A request that needs more than an even share of it for each client waits for
            its place, else one long prompt would empty the batch.
    """
    counts = Counter(request.owner.name for request in running)
    wanting = [request for request in waiting if request.leader is None]
    share = even_share(most_tokens, [*running, *wanting])
    least = min((counts[request.owner.name] for request in wanting if request.num_tokens <= share), default=None)
    if least is None or not running:
        return None
    request = next_preempted(running)
    return request if counts[request.owner.name] >= least + 2 else None


def even_share(num_tokens: int, requests: Iterable[Request]) -> int:
    """What each client of these requests has of a KV pool that is divided evenly, in tokens."""
    return num_tokens // max(1, len({request.owner.name for request in requests}))


class PrefillTurns:
    """The order in which prompts are run: clients take turns chunk by chunk, each with its oldest request."""

    def __init__(self) -> None:
        self._num_chunks = 0
        self._latest: dict[str | None, int] = {}  # number of the last chunk, of clients with a prompt to run

    def in_order(self, extending: Sequence[Request]) -> list[Request]:
        """Requests with known tokens to run, the next one first."""
        if not extending:
            self._latest.clear()
            return []
        names = {request.owner.name for request in extending}
        self._latest = {name: latest for name, latest in self._latest.items() if name in names}
        return sorted(
            extending, key=lambda request: (self._latest.get(request.owner.name, -1), request.sequence_number)
        )

    def count(self, runs: Sequence[PrefillRun]) -> None:
        """Count the chunk that these runs make up."""
        self._latest |= {run.request.owner.name: self._num_chunks for run in runs}
        self._num_chunks += 1
