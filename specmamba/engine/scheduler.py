"""The scheduler: it chooses the requests that run, with chunked prefill and preemption of the youngest.

Clients take turns (``fair_queue``). The requests of one client are admitted in order of arrival, or the longest cached
prefix first; a request may wait for a prefix that another one computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from specmamba.cache.prefix.inspection import CacheStats, RequestStats
from specmamba.cache.prefix.node import Tokens, common_length
from specmamba.cache.split import SplitStats
from specmamba.cache.tiers.tier_stats import TierStats
from specmamba.config import EngineConfig
from specmamba.core import ChainStats, DraftTextStats, SizingStats, SpecStats
from specmamba.engine.cache_manager import CacheManager
from specmamba.engine.fair_queue import (
    PrefillTurns,
    even_share,
    fair_order,
    may_displace,
    next_preempted,
    surplus,
    yielding,
)
from specmamba.engine.replica_control import ReplicaStats
from specmamba.engine.request import PrefillRun, Request
from specmamba.errors import QueueFullError
from specmamba.transfer.handoff_stats import HandoffStats
from specmamba.verify.pools import Pools

# KV tokens that admission leaves to every running request, and to one that joins others, at most as many as its output
# may still get: fewer preemptions, each of which costs more
HEADROOM = 64
GROWTH = 16  # KV tokens that a running request gets ahead while there are free ones: less bookkeeping
MAX_ORDERED = 128  # requests whose prefixes are looked up in every step; the others follow in order of arrival
MIN_SHARED = 16  # a request waits for another's prefix if that saves at least so many tokens,
MIN_SHARE = 0.25  # and at least this share of the tokens that it must compute


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """How much runs at a time, and in which order requests are admitted."""

    num_lookahead_slots: int  # KV positions, from the root's on, that one step may write
    chunk_size: int
    max_waiting: int
    policy: Literal["fcfs", "lpm"]
    max_overtakes: int

    @classmethod
    def of(cls, config: EngineConfig, num_lookahead_slots: int) -> SchedulerLimits:
        """Return the limits that the flags set."""
        return cls(
            num_lookahead_slots=num_lookahead_slots,
            chunk_size=config.chunked_prefill_size,
            max_waiting=config.max_queued_requests,
            policy=config.schedule_policy,
            max_overtakes=config.schedule_max_overtakes,
        )


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of queues, pools and speculation. ``spec`` sums over all steps since the start."""

    num_running: int
    num_waiting: int
    kv_used_tokens: int  # that requests need
    kv_cached_tokens: int  # that the prefix cache alone holds
    kv_total_tokens: int
    state_used_slots: int  # that requests need
    state_cached_slots: int  # that the prefix cache alone holds
    state_total_slots: int
    num_preemptions: int
    spec: SpecStats
    prefix_cache: CacheStats
    split: SplitStats | None = None  # None: the pools keep their sizes
    sizing: SizingStats | None = None  # None: the size of drafts is fixed
    host: TierStats | None = None  # None: no prefixes are in host memory,
    disk: TierStats | None = None  # or on disk,
    store: TierStats | None = None  # or in a store of several machines
    draft_texts: DraftTextStats | None = None  # None: drafts are not copied from suffix automata
    chain: ChainStats | None = None  # None: steps are read where they are launched
    handoffs: HandoffStats | None = None  # None: prefill and decode are not apart
    replicas: ReplicaStats | None = None  # None: requests run in this process


@dataclass(frozen=True, slots=True)
class TenantStats:
    """What one tenant may see of the engine: figures of its own requests."""

    num_running: int
    num_waiting: int
    spec: SpecStats
    requests: RequestStats


class Scheduler:
    """Requests wait, then extend (their known tokens are run chunk by chunk), then verify until they end.

    A request that is admitted holds a row, a state slot, and KV for all its known tokens and one draft. When KV runs
    out later, the youngest request leaves its state in the prefix cache, frees its memory and waits again, ahead of
    those that never ran; its output so far is kept. A request whose prefix another one is computing waits for that.
    Where clients compete, each gets the same share of the batch, of the queue and of the chunks of prompts.
    """

    def __init__(self, cache: CacheManager, limits: SchedulerLimits) -> None:
        self._cache, self._limits = cache, limits
        self.waiting: deque[Request] = deque()
        self.extending: list[Request] = []
        self.verifying: list[Request] = []
        self.num_preemptions = 0
        self._turns = PrefillTurns()
        self._num_changes = 0  # of the queue, and times that memory became free or a prefix became known
        self._stuck_since: int | None = None  # number of changes when nothing more could be admitted

    def add(self, request: Request) -> None:
        """Queue a new request. In a full queue it takes the place of another client's (``take_surplus``).

        Raises:
            QueueFullError: too many are waiting, and no other client has more of them.
        """
        num_above = self._num_above_limit()
        if num_above >= 0 and not may_displace(request, self.waiting, num_above):
            raise QueueFullError(len(self.waiting))
        self.waiting.append(request)
        self._num_changes += 1

    def take_surplus(self) -> list[Request]:
        """Remove and return the waiting requests that must leave for those of other clients.

        Called when all requests of a call have been added, so that a call that is refused displaces none.
        """
        num_above = self._num_above_limit() if self.waiting else 0
        leaving = surplus(self.waiting, num_above) if num_above > 0 else []
        for request in leaving:
            self.waiting.remove(request)
        return leaving

    @property
    def has_room(self) -> bool:
        """Whether the queue takes another request of any client."""
        return len(self.waiting) < self._limits.max_waiting

    def _num_above_limit(self) -> int:
        """Requests above the limit; 0: the queue is full. Those that memory admits at once do not count."""
        return len(self.waiting) - self._cache.num_admissible - self._limits.max_waiting

    def admit(self) -> list[Request]:
        """Admit waiting requests in their order while there is memory for them, so that none is starved.

        Only a request whose prefix is being computed by another, or loaded from disk, lets others pass meanwhile.
        """
        admitted: list[Request] = []
        self._stuck_since = self._num_changes
        if not self.waiting or not self._cache.num_admissible:
            return admitted
        unread = [request for request in self.verifying if request.unread_runs]
        for request in self._in_order():
            ahead = [*self.extending, *unread]
            if is_computed_by_another(request, ahead, self._cache) or self._cache.is_loading(request):
                continue
            if not self._acquire(request):
                if self._may_be_passed(request):
                    continue
                break
            self.waiting.remove(request)
            admitted.append(request)
            (self.extending if request.num_to_extend else self.verifying).append(request)
        self._count_overtakes(admitted)
        return admitted

    def next_runs(self) -> list[PrefillRun]:
        """Return the next chunk: tokens of the request whose turn it is, and others' while they fit the padded size."""
        runs: list[PrefillRun] = []
        longest, chunk_size = 0, self._limits.chunk_size
        for request in self._turns.in_order(self.extending):
            wanted = min(request.num_to_extend, chunk_size, request.num_to_chunk_end)
            room = chunk_size // (len(runs) + 1)
            if runs and max(longest, wanted) > room:
                break
            longest = max(longest, wanted)
            runs.append(PrefillRun(request, request.num_run, wanted))
        return runs

    def finish_runs(self, runs: list[PrefillRun]) -> list[Request]:
        """Count the tokens of runs that are done; returns the requests that are ready to verify now."""
        self._turns.count(runs)
        ready = []
        for run in runs:
            run.request.num_run += run.length
            if run.request.num_to_extend == 0:
                self._num_changes += 1  # others may wait for what it has computed
                self.extending.remove(run.request)
                self.verifying.append(run.request)
                ready.append(run.request)
        return ready

    def note_prefixes(self) -> None:
        """Note that prefixes were cached, or that it is known that they will not be: requests may wait for them."""
        self._num_changes += 1

    def make_room(self) -> Request | None:
        """Give every verifying request KV for its next tree, the oldest first.

        Returns:
            The request that gives way where KV runs out: the caller ends its use of the memory, preempts it and calls
            again. None: all have room.
        """
        lacking = self._cache.lacking(self.verifying, self._limits.num_lookahead_slots)
        for request in sorted(lacking, key=lambda r: r.sequence_number):
            if not self._grow(request):
                # alone it lacks room only because of its borrowed prefix: it fits when it computes everything itself
                request.must_compute |= self.num_running == 1
                return next_preempted((*self.extending, *self.verifying))
        return None

    def is_settled(self) -> bool:
        """Whether the next step is one of the verifying requests: no other runs, or can be admitted now."""
        if self.extending:
            return False
        if not self.waiting:
            return True
        may_load = self._cache.tiers is not None
        return self._stuck_since == self._num_changes and not may_load and self.must_yield() is None

    @property
    def may_join(self) -> bool:
        """Whether all that come and extend may do it behind a step in flight."""
        return self._cache.takes_in_order and all(r.may_join for r in (*self.extending, *self.waiting))

    def grow_ahead(self, num_nodes: int) -> bool:
        """Give every verifying request KV for its next two trees; the first has so many nodes, and may be in flight.

        Returns:
            False, where one lacks it, or will have a state left inside of the first tree.
        """
        if self._cache.may_track(self.verifying, num_nodes):
            return False
        return self._cache.grow_ahead(self.verifying, num_nodes + self._limits.num_lookahead_slots, GROWTH)

    def must_yield(self) -> Request | None:
        """Return a running request that the caller preempts so that a client gets its share of the batch, or None.

        Asked after ``admit``: requests that still wait found no room. Without a prefix cache, which keeps what was
        computed, none yields.
        """
        if not self.waiting or not self._cache.is_on:
            return None
        return yielding(self.waiting, (*self.extending, *self.verifying), self._cache.num_tokens)

    def preempt(self, request: Request) -> None:
        """Free all memory of a request and put it at the head of the waiting queue."""
        self.release(request)
        request.num_run = 0
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def drop(self, request: Request) -> None:
        """Remove a verifying request, whose memory is freed later by ``release``."""
        self.verifying.remove(request)

    def release(self, request: Request) -> None:
        """Remove a request from its queue and free its memory."""
        self._num_changes += 1
        for queue in (self.waiting, self.extending, self.verifying):
            if request in queue:
                queue.remove(request)
        self._cache.release(request)

    @property
    def num_running(self) -> int:
        return len(self.extending) + len(self.verifying)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.extending or self.verifying)

    def stats(self, pools: Pools, spec: SpecStats) -> EngineStats:
        """Return the numbers of these queues and of ``pools`` now, beside the figures of speculation."""
        cache = self._cache.cache
        tiers = {} if self._cache.tiers is None else self._cache.tiers.stats()
        return EngineStats(
            num_running=self.num_running,
            num_waiting=len(self.waiting),
            kv_used_tokens=pools.kv.num_used_tokens,
            kv_cached_tokens=pools.kv.num_cached_tokens,
            kv_total_tokens=pools.kv.num_tokens,
            state_used_slots=cache.num_used_states,
            state_cached_slots=cache.num_evictable_states,
            state_total_slots=pools.states.num_slots,
            num_preemptions=self.num_preemptions,
            spec=spec,
            prefix_cache=cache.stats,
            split=None if pools.split is None else pools.split.stats,
            host=tiers.get("host"),
            disk=tiers.get("disk"),
            store=tiers.get("store"),
        )

    def stats_of(self, tenant: str | None, spec: SpecStats) -> TenantStats:
        """Return the numbers of one tenant's requests in these queues, beside its figures of speculation."""
        running = (*self.extending, *self.verifying)
        return TenantStats(
            num_running=sum(request.owner.tenant == tenant for request in running),
            num_waiting=sum(request.owner.tenant == tenant for request in self.waiting),
            spec=spec,
            requests=self._cache.cache.requests_of(tenant),
        )

    def _in_order(self) -> Iterator[Request]:
        ordered = list(self.waiting)
        if self._limits.policy != "fcfs":
            ordered = longest_prefix_first(self.waiting, self._cache.peek, self._limits.max_overtakes)
        return fair_order(ordered, (*self.extending, *self.verifying))

    def _acquire(self, request: Request) -> bool:
        positions = request.num_tokens + self._limits.num_lookahead_slots
        use_cache = not request.must_compute and not request.must_read_prompt
        running = (*self.extending, *self.verifying)
        growing = (*running, request) if running else ()  # alone it may have everything, and gives way to none
        headroom = sum([min(HEADROOM, each.text.num_left) for each in growing])
        if self._cache.acquire(request, positions, headroom, use_cache):
            return True
        # a request fits alone, but perhaps not beside its cached prefix: then everything cached may be evicted
        return not self.num_running and self._cache.acquire(request, positions, 0, use_cache=False)

    def _grow(self, request: Request) -> bool:
        ahead = min(GROWTH, request.text.num_left)  # what it will not use is the headroom of others
        return self._cache.grow(request, request.root_position + self._limits.num_lookahead_slots, ahead)

    def _may_be_passed(self, request: Request) -> bool:
        """Whether others go before a request that needs more than an even share of the KV for each client."""
        share = even_share(self._cache.num_tokens, (*self.waiting, *self.extending, *self.verifying))
        is_alone = share == self._cache.num_tokens
        return not is_alone and request.num_tokens > share and request.num_overtakes < self._limits.max_overtakes

    def _count_overtakes(self, admitted: list[Request]) -> None:
        if admitted and self.waiting:
            for request in self.waiting:
                request.num_overtakes += sum(a.sequence_number > request.sequence_number for a in admitted)


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


def is_computed_by_another(request: Request, ahead: Sequence[Request], cache: CacheManager) -> bool:
    """Whether a request should wait because another one, in prefill now, will store a state at their common prefix.

    ``ahead``: requests in prefill, and those of which the end of the prefill was not read yet.
    """
    if request.leader is None or not _is_ahead(*request.leader, ahead):
        request.leader = _find_leader(request, ahead, cache)
    return request.leader is not None


def _find_leader(request: Request, ahead: Sequence[Request], cache: CacheManager) -> tuple[Request, int] | None:
    """Find the request in prefill with the longest useful common prefix, and make it store a state at its end.

    Returns:
        That request and the position of the state; None if waiting would save too little.
    """
    if not cache.is_on or not ahead or request.must_read_prompt:
        return None
    key = request.key()
    related = [other for other in ahead if _scope(other) == _scope(request)]
    shared = {other: _num_common(key, other.key()) for other in related}
    ends = {other: _state_end(other, shared[other]) for other in related if _is_ahead(other, shared[other], ahead)}
    leader = max(ends, key=ends.__getitem__, default=None)
    if leader is None:
        return None
    end, cached = ends[leader], cache.peek(request)
    if end - cached < max(MIN_SHARED, MIN_SHARE * (len(key) - cached)):
        return None
    if end > leader.num_run:
        leader.chunk_ends.add(end)
    return leader, end


def _scope(request: Request) -> tuple[str | None, str | None]:
    """Only requests of the same scope share cached prefixes."""
    return request.owner.tenant, request.extra_key


def _state_end(leader: Request, num_shared: int) -> int:
    """Return the position of the state for a common prefix of this length, 0 if there will be none.

    What was not launched yet may end at a planned position nearby, or at a new one; of what was launched, the states
    are those at the ends of runs.
    """
    if num_shared <= leader.num_run:
        ends = (run.start + run.length for run in leader.unread_runs)
        return max((end for end in ends if end <= num_shared), default=0)
    planned = leader.chunk_ends | leader.spare_ends
    near = [end for end in planned if num_shared - MIN_SHARED < end <= num_shared and end > leader.num_run]
    return max(near, default=num_shared)


def _num_common(a: Tokens, b: Tokens) -> int:
    """Length of the common prefix of two texts; 0 if it is shorter than MIN_SHARED, which is cheap to find out."""
    if min(len(a), len(b)) < MIN_SHARED or (a[:MIN_SHARED] != b[:MIN_SHARED]).any():
        return 0
    return common_length(a, b)


def _is_ahead(leader: Request, num_shared: int, ahead: Sequence[Request]) -> bool:
    """Whether a request is in prefill, and it is not known yet that it has reached the end of the common prefix."""
    return leader in ahead and leader.num_read < num_shared
