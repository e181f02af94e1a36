"""One replica, simulated: the prefix cache itself on pools without content, and a clock that goes by given speeds.

Memory is that of the engine: a request holds pages for what it reads and writes and a state slot, finds the deepest
state on its path, and leaves states at the ends of chunks, where it parted from other texts, near the end of its
prompt, and at its own end. What differs: pages for the whole output are taken at admission, so no request is preempted.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch

from specmamba.cache.kv_pool import PageAllocator, Pages
from specmamba.cache.prefix import MambaRadixCache
from specmamba.cache.prefix.eviction import Costs
from specmamba.cache.prefix.node import Match, Node, Tokens
from specmamba.cache.prefix.state_places import spare_ends
from specmamba.cache.shapes import CacheShape, StateShape
from specmamba.cache.state_pool import PREFIX_CACHE, StatePool
from specmamba.engine.cache_manager import SPARE_SHARE
from specmamba.scale_sim.request_trace import TraceRequest

LRU_COSTS = Costs(1, 1, 1.0, 1.0)  # which only another policy reads


@dataclass(frozen=True, slots=True)
class ReplicaModel:
    """What one replica has and how fast it is."""

    kv_tokens: int
    states: int
    max_running: int
    chunk_size: int
    spare_states: int  # the most of one prompt
    prefill_rate: float  # tokens per second
    step_s: float  # of a decoding step, whatever it holds
    step_s_per_request: float
    tokens_per_step: float  # of one request: accepted drafts and one more

    def decode_s(self, num_requests: int) -> float:
        """Seconds of one step of so many requests."""
        return self.step_s + self.step_s_per_request * num_requests if num_requests else 0.0


@dataclass(eq=False, slots=True)
class Running:
    """A request on a replica. Times are seconds from the start; a request keeps what it found and what came of it."""

    number: int
    request: TraceRequest
    arrival: float
    num_cached: int = 0
    num_run: int = 0  # tokens of the prompt, without the last one, that need not be computed any more
    num_written: float = 0.0
    first_token: float | None = None
    end: float | None = None
    node: Node | None = None
    origin: Node | None = None  # where it has gone on from
    slot: int = 0
    pages: Pages = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # of tokens from ``first_page`` on
    first_page: int = 0
    places: set[int] = field(default_factory=set)  # where states are left
    spare: set[int] = field(default_factory=set)

    @property
    def owner(self) -> str:
        return str(self.number)

    @property
    def num_to_run(self) -> int:
        """Tokens that are computed before the first step: the last one of the prompt is that step's root."""
        return len(self.request.prompt) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens that get KV: the last one that is written is never run."""
        return len(self.request.prompt) + len(self.request.output) - 1

    def tokens(self, start: int, end: int) -> Tokens:
        """Tokens start..end-1 of prompt and output."""
        size = len(self.request.prompt)
        of_output = self.request.output[max(start - size, 0) : max(end - size, 0)]
        return np.concatenate([self.request.prompt[start:end], of_output])


class SimulatedReplica:
    """A scheduler by order of arrival, pools, and the prefix cache. ``now`` is the time of its last step's end."""

    def __init__(self, model: ReplicaModel) -> None:
        self.model, self.now, self.busy_s = model, 0.0, 0.0
        shape = CacheShape((), 0, StateShape.window(0, 1), torch.float32)
        self._allocator = PageAllocator(model.kv_tokens)
        self._states = StatePool(shape, model.states, torch.device("cpu"))
        self.cache = MambaRadixCache(self._allocator, 1, self._states, LRU_COSTS)
        self._waiting: deque[Running] = deque()
        self._running: list[Running] = []

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def num_requests(self) -> int:
        return len(self._waiting) + len(self._running)

    @property
    def num_uncomputed(self) -> int:
        """Prompt tokens that are to be computed before a new request's."""
        waiting = sum(each.num_to_run - each.num_cached for each in self._waiting)
        return waiting + sum(each.num_to_run - each.num_run for each in self._running)

    def resumable(self, request: TraceRequest) -> int:
        """Tokens of its prompt that this replica need not compute."""
        return self.cache.peek(request.prompt[:-1])[0]

    def can_hold(self, running: Running) -> bool:
        """Whether it fits into the empty pools."""
        return running.num_tokens <= self.model.kv_tokens

    def add(self, running: Running) -> None:
        """Take a request; it waits until there is room. An idle replica's clock goes to its arrival."""
        if not self.is_busy:
            self.now = max(self.now, running.arrival)
        running.num_cached = self.resumable(running.request)  # an estimate, until it is admitted
        self._waiting.append(running)

    def next_end(self) -> float:
        """When its next request ends, if no other one arrives or is read before."""
        decoding = [each for each in self._running if each.num_run == each.num_to_run]
        return self.now + self._steps_to_end(decoding) * self.model.decode_s(len(decoding)) if decoding else self.now

    def step(self, until: float) -> list[Running]:
        """Run one step, or several at once that only write and end by ``until``. Returns the requests that ended."""
        self._admit()
        began, has_read = self.now, self._read()
        decoding = [each for each in self._running if each.num_run == each.num_to_run]
        cost, steps = self.model.decode_s(len(decoding)), 1
        if decoding and not has_read:
            in_time = int((until - self.now) / cost) if cost and until < float("inf") else self._steps_to_end(decoding)
            steps = max(1, min(in_time, self._steps_to_end(decoding)))
        self.now += cost * steps
        for each in decoding:
            if each.first_token is None:
                each.first_token = self.now - cost * (steps - 1)
            each.num_written += self.model.tokens_per_step * steps
        self.busy_s += self.now - began
        ended = [each for each in decoding if each.num_written >= len(each.request.output)]
        for each in ended:
            self._end(each)
        return ended

    def _steps_to_end(self, decoding: list[Running]) -> int:
        missing = min(len(each.request.output) - each.num_written for each in decoding)
        return max(1, int(-(-missing // self.model.tokens_per_step)))

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.model.max_running and self._acquire(self._waiting[0]):
            self._running.append(self._waiting.popleft())

    def _acquire(self, running: Running) -> bool:
        match = self.cache.match(running.request.prompt[:-1])
        self.cache.lock(match.node)
        missing = running.num_tokens - match.length
        if self.cache.evict_pages(missing) and self.cache.evict_states(1):
            pages, slot = self._allocator.allocate(missing), self._states.reserve(running.owner)
            assert pages is not None
            assert slot is not None
            running.pages, running.slot, running.node = pages, slot, match.node
            running.origin = match.node
            running.num_cached = running.num_run = running.first_page = match.length
            self._plan_states(running, match)
            self.cache.count_request(running.num_to_run, match)
            self.cache.keep_spare(match.node)
            return True
        self.cache.unlock(match.node)
        if self._running:
            return False
        self.cache.reset()  # nothing runs whose end could make room: the request does without its cached prefix
        return self._acquire(running)

    def _plan_states(self, running: Running, match: Match) -> None:
        end, size = running.num_to_run, self.model.chunk_size
        running.spare = spare_ends(match.length, end, self.model.spare_states, size)
        ends, place = {match.kv_length, end, *running.spare}, match.length
        running.places = set()
        while place < end:  # a chunk that ends early moves those behind it
            place = min(place + size, *(each for each in ends if each > place))
            running.places.add(place)

    def _read(self) -> bool:
        """Compute up to a chunk of the prompts, in order of arrival; says whether there was one."""
        room = self.model.chunk_size
        for each in self._running:
            count = min(room, each.num_to_run - each.num_run)
            if count:
                each.num_run += count
                room -= count
                self._leave_states(each, each.num_run - count)
        num_read = self.model.chunk_size - room
        self.now += num_read / self.model.prefill_rate
        return num_read > 0

    def _leave_states(self, running: Running, start: int) -> None:
        for place in sorted(place for place in running.places if start < place <= running.num_run):
            if not self.cache.evict_states(1):
                return
            target = self._states.reserve(PREFIX_CACHE)
            assert target is not None
            self._states.end_write(running.slot, place)
            self._states.fork(running.slot, running.owner, place, target)
            node = self._insert(running, place, target)
            if place in running.spare and node.state_slot == target:
                self.cache.mark_spare(node, int(SPARE_SHARE * self.model.states))

    def _insert(self, running: Running, end: int, state_slot: int) -> Node:
        """Leave the tokens up to ``end`` with the state behind them, and go on from there."""
        node = running.node
        assert node is not None
        start = node.end
        own = running.pages[start - running.first_page : end - running.first_page]
        insertion = self.cache.insert(node, running.tokens(start, end), own, state_slot)
        if not insertion.takes_state:
            self._states.free(state_slot, PREFIX_CACHE)
        if insertion.node is not node:
            self.cache.pass_state(node)
        self.cache.move_lock(node, insertion.node)
        running.node = insertion.node
        return insertion.node

    def _end(self, running: Running) -> None:
        self._states.end_write(running.slot, running.num_tokens)
        self._states.donate(running.slot, running.owner, running.num_tokens)
        self._insert(running, running.num_tokens, running.slot)
        self._allocator.release(running.pages, pinned=True)
        assert running.node is not None
        assert running.origin is not None
        self.cache.touch_branches(running.node, running.origin)
        self.cache.unlock(running.node)
        self._running.remove(running)
        running.end, running.node, running.origin = self.now, None, None
