"""Several simulated replicas behind the placement of ``--dp-size``, and the figures of a run."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specmamba.replicas.placement import Work, choose
from specmamba.scale_sim.request_trace import TraceRequest
from specmamba.scale_sim.simulated_replica import ReplicaModel, Running, SimulatedReplica
from specmamba.server_config import Placement


class Fleet:
    """Runs a trace on replicas. Prefixes are published at once, and requests arrive in the order of their times."""

    def __init__(self, model: ReplicaModel, num_replicas: int, placement: Placement) -> None:
        self.replicas = [SimulatedReplica(model) for _ in range(num_replicas)]
        self._placement, self._num_placed = placement, 0
        self._arrivals: list[tuple[float, int, TraceRequest]] = []
        self._later: defaultdict[Any, deque[tuple[int, TraceRequest]]] = defaultdict(deque)

    def run(self, requests: Sequence[TraceRequest], speed: float, advance: Callable[[], None]) -> dict[str, Any]:
        """Run all requests.

        Args:
            requests: of a trace; one that follows another of its session stands behind it.
            speed: with 2, what has a time arrives in half of it.
            advance: is called for each request that has ended.

        Returns:
            The figures: see ``_figures``.
        """
        for number, request in enumerate(requests):
            if request.arrival_s is None:
                self._later[request.session].append((number, request))
            else:
                heapq.heappush(self._arrivals, (request.arrival_s / speed, number, request))
        ended, num_refused = list[Running](), 0
        while self._arrivals or any(replica.is_busy for replica in self.replicas):
            arrival = self._arrivals[0][0] if self._arrivals else math.inf
            busy = [replica for replica in self.replicas if replica.is_busy and replica.now < arrival]
            if not busy:
                num_refused += not self._place(*heapq.heappop(self._arrivals), advance)
                continue
            first = min(busy, key=lambda replica: replica.now)
            others = [replica.next_end() for replica in busy if replica is not first]
            for running in first.step(min([arrival, *others])):
                ended.append(running)
                self._go_on(running.request, first.now)
                advance()
        return self._figures(ended, num_refused)

    def _place(self, arrival: float, number: int, request: TraceRequest, advance: Callable[[], None]) -> bool:
        running = Running(number, request, arrival)
        if not self.replicas[0].can_hold(running):
            self._go_on(request, arrival)
            advance()
            return False
        self.replicas[self._choose(request)].add(running)
        self._num_placed += 1
        return True

    def _choose(self, request: TraceRequest) -> int:
        if self._placement == "round_robin":
            return self._num_placed % len(self.replicas)
        numbered = dict(enumerate(self.replicas))
        return choose(
            {index: len(request.prompt) - replica.resumable(request) for index, replica in numbered.items()},
            {index: Work(replica.num_requests, replica.num_uncomputed) for index, replica in numbered.items()},
            self.replicas[0].model.max_running,
        )

    def _go_on(self, request: TraceRequest, now: float) -> None:
        """Let the session's next request arrive, if it waits for this one."""
        if request.session is not None and self._later[request.session]:
            number, following = self._later[request.session].popleft()
            heapq.heappush(self._arrivals, (now + following.delay_s, number, following))

    def _figures(self, ended: Sequence[Running], num_refused: int) -> dict[str, Any]:
        """Counts, share of prompt tokens that were resumed, seconds to the first token and speed of what ended.

        ``busy`` is the share of the time until the last end in which a replica computed, for each one.
        """
        figures: dict[str, Any] = {"requests": len(ended), "too_long": num_refused}
        if not ended:
            return figures
        began, end = min(each.arrival for each in ended), max(each.end or 0.0 for each in ended)
        waits = [(each.first_token or 0.0) - each.arrival for each in ended]
        num_read = sum(len(each.request.prompt) for each in ended)
        num_written = sum(len(each.request.output) for each in ended)
        quantiles = np.quantile(waits, [0.5, 0.9, 0.99])
        return figures | {
            "resumed": sum(each.num_cached for each in ended) / num_read,
            "first_token_s": dict(zip(("p50", "p90", "p99"), map(float, quantiles), strict=True)),
            "tokens_per_second": num_written / (end - began) if end > began else 0.0,
            "seconds": end - began,
            "busy": [replica.busy_s / (end - began) if end > began else 0.0 for replica in self.replicas],
            "evicted_states": sum(replica.cache.stats.evicted_states for replica in self.replicas),
        }
