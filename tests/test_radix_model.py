"""The prefix cache against a model that knows no nodes, edges or lists: only which texts have KV and which have states.

Hypothesis makes the histories. Every step is followed by ``check()`` and by a comparison of everything that is cached.
Under ``lru`` the model says exactly what is evicted; under ``flops`` it says what may be. ``SPECMAMBA_TEST_FULL=1``
runs hundreds of thousands of steps.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from specmamba.cache.radix_eviction import PolicyName
from specmamba.cache.radix_node import Node
from specmamba.cache.state_pool import PREFIX_CACHE
from tests.radix import Row, Text, World, array

IS_FULL = os.environ.get("SPECMAMBA_TEST_FULL") == "1"
MAX_LENGTH = 10
SALTS: tuple[str | None, ...] = (None, "other")
PICK = st.integers(0, 1000)
CUT = st.integers(0, MAX_LENGTH)
TAIL = st.lists(st.integers(0, 1), max_size=4).map(tuple)
SALT = st.sampled_from([None, None, None, "other"])
OWNER = "request"


@dataclass(frozen=True)
class Place:
    """A text under a salt. Its own beginnings are the places above it; the empty text is the root."""

    salt: str | None
    text: Text

    def up(self) -> Place:
        return Place(self.salt, self.text[:-1])

    def above(self) -> list[Place]:
        """This place and all above it, the longest first; without the root."""
        return [Place(self.salt, self.text[:end]) for end in range(len(self.text), 0, -1)]


@dataclass
class Model:
    """What is cached: places, the token slot of each, when each was used last, and what is locked."""

    world: World
    kv: dict[Place, int] = field(default_factory=dict)
    kv_used: dict[Place, int] = field(default_factory=dict)
    states: dict[Place, int] = field(default_factory=dict)  # when it was used last
    lost: set[Place] = field(default_factory=set)  # where states were evicted, and the KV was not
    salts_evicted: set[str | None] = field(default_factory=set)  # from which something was evicted
    locks: list[Place] = field(default_factory=list)
    state_locks: list[Place] = field(default_factory=list)
    clock: int = 0

    def touch(self, place: Place) -> None:
        self.clock += 1
        self.kv_used.update((each, self.clock) for each in place.above())

    def touch_state(self, place: Place) -> None:
        self.clock += 1
        self.states[place] = self.clock

    def is_locked(self, place: Place) -> bool:
        n = len(place.text)
        locks = (*self.locks, *self.state_locks)
        return any(each.salt == place.salt and each.text[:n] == place.text for each in locks)

    def is_leaf(self, place: Place) -> bool:
        return not any(each.up() == place for each in self.kv)

    def match(self, place: Place) -> tuple[int, int]:
        length = max((len(each.text) for each in place.above() if each in self.states), default=0)
        return length, max((len(each.text) for each in place.above() if each in self.kv), default=0)

    def prune(self, place: Place) -> None:
        """Remove what has no state, no lock and nothing below, upwards."""
        while place in self.kv and place not in self.states and self.is_leaf(place) and not self.is_locked(place):
            self.drop_kv(place)
            place = place.up()

    def free_pages(self) -> int:
        size = self.world.page_size
        return self.world.allocator.num_pages - len(
            {*self.world.row_pages, *(slot // size for slot in self.kv.values())}
        )

    def available_pages(self) -> int:
        size = self.world.page_size
        pinned = {slot // size for place, slot in self.kv.items() if self.is_locked(place)}
        return self.world.allocator.num_pages - len({*self.world.row_pages, *pinned})

    def evictable_states(self) -> list[Place]:
        return [place for place in self.states if place not in self.state_locks]

    def evict_pages(self, count: int) -> None:
        while self.free_pages() < count:
            leaves = [place for place in self.kv if self.is_leaf(place) and not self.is_locked(place)]
            victim = min(leaves, key=lambda place: self.kv_used[place])
            self.drop_state(victim)
            self.prune(victim)

    def evict_states(self, missing: int) -> None:
        for _ in range(missing):
            victim = min(self.evictable_states(), key=lambda place: self.states[place])
            self.drop_state(victim)
            self.prune(victim)

    def drop_kv(self, place: Place) -> None:
        del self.kv[place]
        self.lost.discard(place)
        self.salts_evicted.add(place.salt)

    def drop_state(self, place: Place) -> None:
        del self.states[place]
        self.lost.add(place)
        self.salts_evicted.add(place.salt)

    def reset(self) -> int:
        before = len(self.kv)
        self.states = {place: used for place, used in self.states.items() if place in self.state_locks}
        self.kv = {place: slot for place, slot in self.kv.items() if self.is_locked(place)}
        self.lost.clear()
        self.salts_evicted.clear()
        return before - len(self.kv)


@dataclass
class Request:
    """One that runs: it has locked ``node``, and has pages and a state for what comes after."""

    place: Place
    node: Node
    row: Row
    state_slot: int

    @property
    def done(self) -> Place:
        return Place(self.place.salt, self.place.text[: self.node.end])


class CacheMachine(RuleBasedStateMachine):
    page_size = 1
    policy: PolicyName = "lru"

    def __init__(self) -> None:
        super().__init__()
        num_pages = {1: 26, 3: 13, 16: 6}[self.page_size]
        self.world = World(self.page_size, num_pages, num_states=6, policy=self.policy)
        self.cache = self.world.cache
        self.model = Model(self.world)
        self.texts: list[Text] = [(0, 0, 1, 0, 1, 1)]  # that were asked for before
        self.requests: list[Request] = []
        self.held: list[tuple[Place, Node]] = []
        self.held_states: list[tuple[Place, Node]] = []

    def text(self, pick: int, cut: int, tail: Text) -> Text:
        """One that shares its beginning with an earlier one, mostly."""
        text = (*self.texts[pick % len(self.texts)][:cut], *tail)[:MAX_LENGTH] or (1,)
        self.texts.append(text)
        return text

    # -- looking --

    @rule(pick=PICK, cut=CUT, tail=TAIL, salt=SALT)
    def match(self, pick: int, cut: int, tail: Text, salt: str | None) -> None:
        text = self.text(pick, cut, tail)
        place, model = Place(salt, text), self.model
        length, kv_length = model.match(place)
        assert self.cache.peek(array(text), salt) == (length, kv_length)
        match = self.world.match(text, salt)
        assert (match.length, match.kv_length) == (length, kv_length)
        found = Place(salt, text[:length])
        model.touch(found)
        if length:
            model.touch_state(found)
        self.judge_miss(place, length, match.miss)

    def judge_miss(self, place: Place, length: int, miss: str | None) -> None:
        model = self.model
        assert (miss is None) == (length == len(place.text))
        if any(each in model.lost and len(each.text) > length for each in place.above()):
            assert miss == "evicted"
        if miss == "evicted":
            assert place.salt in model.salts_evicted
        elsewhere = [Place(salt, place.text) for salt in SALTS if salt != place.salt]
        if miss == "salt":
            assert length == 0
            assert any(model.match(each)[0] for each in elsewhere)
        if miss == "never_stored" and length == 0:
            assert not any(model.match(each)[0] for each in elsewhere)
        assert miss != "page_grid"

    # -- requests --

    def want_pages(self, start: int, end: int) -> Row | None:
        row = self.world.row(start, end)
        if row is None:
            self.evict_pages(-(-end // self.page_size) - start // self.page_size)
            row = self.world.row(start, end)
        return row

    def want_slot(self, owner: str) -> int | None:
        slot = self.world.states.reserve(owner)
        if slot is None:
            self.evict_states(1)
            slot = self.world.states.reserve(owner)
        return slot

    @precondition(lambda self: len(self.requests) < 3)
    @rule(pick=PICK, cut=CUT, tail=TAIL, salt=SALT, fault=st.sampled_from([None, None, None, "pages", "slot"]))
    def admit(self, pick: int, cut: int, tail: Text, salt: str | None, fault: str | None) -> None:
        self.start(self.text(pick, cut, tail), salt, fault)

    @rule(pick=PICK, cut=CUT, tail=TAIL, salt=SALT, chunk=st.integers(1, MAX_LENGTH))
    def run_whole(self, pick: int, cut: int, tail: Text, salt: str | None, chunk: int) -> None:
        """A request from its beginning to its end."""
        before = len(self.requests)
        self.start(self.text(pick, cut, tail), salt, None)
        if len(self.requests) > before:
            self.run_chunk(before, chunk, moves_lock=True, fault=False)
            self.end_request(before, keeps=True)

    def start(self, text: Text, salt: str | None, fault: str | None) -> None:
        """Match, lock, pages, slot, copy; where something is not to be had (or made to fail), drop it all again."""
        match = self.world.match(text[:-1], salt)
        place = Place(salt, text)
        found = Place(salt, text[: match.length])
        self.model.touch(found)
        self.cache.lock(match.node)
        self.model.locks.append(found)
        if match.length:
            self.model.touch_state(found)
            self.cache.lock_state(match.node)
            self.model.state_locks.append(found)
        row = None if fault == "pages" else self.want_pages(match.length, len(text))
        slot = None if row is None or fault == "slot" else self.want_slot(OWNER)
        if slot is not None:
            if match.length:
                assert match.node.state_slot is not None
                self.world.states.copy(match.node.state_slot, slot, match.length)
            else:
                self.world.states.end_write(slot, 0)
        if match.length:
            self.unlock_state(found, match.node)
        if row is not None and slot is not None:
            self.requests.append(Request(place, match.node, row, slot))
            return
        self.unlock(found, match.node)
        if row is not None:
            self.world.release(row)

    @precondition(lambda self: self.requests)
    @rule(pick=PICK, count=st.integers(0, 5), moves_lock=st.booleans(), fault=st.booleans())
    def run_chunk(self, pick: int, count: int, moves_lock: bool, fault: bool) -> None:
        """Run some tokens and leave a copy of the state at their end."""
        request = self.requests[pick % len(self.requests)]
        place, start = request.place, request.node.end
        end = min(len(place.text), start + count)
        self.world.write(request.row, place.salt, place.text, start, end)
        self.world.states.end_write(request.state_slot, end)
        slot = None if fault or end == 0 else self.want_slot(PREFIX_CACHE)
        if slot is None:  # the chunk's KV stays the row's own, and is run again in the next one
            self.world.states.end_write(request.state_slot, start)
            return
        self.world.states.fork(request.state_slot, OWNER, end, slot)
        self.leave(request, end, slot)
        reached = Place(place.salt, place.text[:end])
        node = self.node_of(reached)
        if moves_lock:
            self.cache.move_lock(request.node, node)
        else:
            self.cache.lock(node)
            self.cache.unlock(request.node)
        self.model.locks.append(reached)
        self.model.locks.remove(request.done)
        self.model.touch(reached)
        request.node = node
        self.world.release(request.row, end)

    def leave(self, request: Request, end: int, slot: int) -> None:
        """Insert what the request has run up to ``end``, with the state in ``slot``."""
        place, start = request.place, request.node.end
        self.world.state[slot] = place.salt, place.text[:end]
        slots = request.row.slots(start, end)
        insertion = self.cache.insert(request.node, array(place.text[start:end]), slots, slot)
        reached = Place(place.salt, place.text[:end])
        for position, own in zip(range(start, end), slots.tolist(), strict=True):
            self.model.kv.setdefault(Place(place.salt, place.text[: position + 1]), own)
        due = [self.model.kv[Place(place.salt, place.text[: position + 1])] for position in range(start, end)]
        assert insertion.slots.tolist() == due
        assert insertion.node.end == end
        assert insertion.takes_state == (reached not in self.model.states)
        if not insertion.takes_state:
            self.world.free_state(slot)
        self.model.lost.discard(reached)
        self.model.touch_state(reached)
        self.model.touch(reached)

    @precondition(lambda self: self.requests)
    @rule(pick=PICK, keeps=st.booleans())
    def end_request(self, pick: int, keeps: bool) -> None:
        """Finish (the state is donated), or abort."""
        request = self.requests.pop(pick % len(self.requests))
        place, end = request.place, len(request.place.text)
        if keeps:
            self.world.write(request.row, place.salt, place.text, request.node.end, end)
            self.world.states.end_write(request.state_slot, end)
            self.world.states.donate(request.state_slot, OWNER, end)
            self.leave(request, end, request.state_slot)
        else:
            self.world.states.free(request.state_slot, OWNER)
        self.unlock(request.done, request.node)
        self.world.release(request.row)

    @precondition(lambda self: self.requests)
    @rule(pick=PICK, kind=st.sampled_from(["free page", "other position", "other owner", "other's state"]))
    def insert_what_is_wrong(self, pick: int, kind: str) -> None:
        """Refused, and nothing has changed."""
        request = self.requests[pick % len(self.requests)]
        start, end = request.node.end, len(request.place.text)
        if start == end or not self.world.states.num_free:
            return
        slot = self.world.new_state(request.place.salt, request.place.text)
        assert slot is not None
        tokens, slots, offered = array(request.place.text[start:]), request.row.slots(start, end), slot
        if kind == "free page":
            if request.place in self.model.kv or not self.world.allocator.num_free:
                self.world.free_state(slot)
                return
            slots[-1] = next(p for p in range(1, 99) if not self.world.allocator.holders(p)) * self.page_size
        elif kind == "other position":
            self.world.states.end_write(slot, end + 1)
        elif kind == "other owner":
            offered = request.state_slot
        elif self.model.states:
            offered = next(iter(self.cache._tree.state_nodes))
        else:
            slots = slots[1:]
        before = self.cache.stats
        with pytest.raises((RuntimeError, ValueError)):
            self.cache.insert(request.node, tokens, slots, offered)
        assert self.cache.stats == before
        self.world.free_state(slot)

    # -- locks --

    def node_of(self, place: Place) -> Node:
        """The node that ends there."""
        node: Node = self.cache.root(place.salt)
        while node.end < len(place.text):
            node = node.children[place.text[node.end]]
        assert node.end == len(place.text)
        return node

    def unlock(self, place: Place, node: Node) -> None:
        self.cache.unlock(node)
        self.model.locks.remove(place)
        self.model.touch(place)
        self.model.prune(place)

    def unlock_state(self, place: Place, node: Node) -> None:
        self.cache.unlock_state(node)
        self.model.state_locks.remove(place)
        self.model.touch(place)
        if place not in self.model.state_locks:
            self.model.touch_state(place)

    @precondition(lambda self: self.model.states and len(self.held) + len(self.held_states) < 3)
    @rule(pick=PICK, is_state=st.booleans())
    def hold(self, pick: int, is_state: bool) -> None:
        place = sorted(self.model.states, key=lambda each: (each.salt or "", each.text))[pick % len(self.model.states)]
        node = self.node_of(place)
        if is_state:
            self.cache.lock_state(node)
            self.model.state_locks.append(place)
            self.held_states.append((place, node))
        else:
            self.cache.lock(node)
            self.model.locks.append(place)
            self.held.append((place, node))

    @precondition(lambda self: self.held)
    @rule(pick=PICK)
    def let_go(self, pick: int) -> None:
        self.unlock(*self.held.pop(pick % len(self.held)))

    @precondition(lambda self: self.held_states)
    @rule(pick=PICK)
    def let_go_of_state(self, pick: int) -> None:
        self.unlock_state(*self.held_states.pop(pick % len(self.held_states)))

    # -- eviction --

    @rule(more=st.sampled_from([1, 1, 1, 2, 2, 3, 5, 9, 26]))
    def want_more_pages(self, more: int) -> None:
        self.evict_pages(self.world.allocator.num_free + more)

    def evict_pages(self, count: int) -> None:
        possible = self.model.available_pages() >= count
        assert self.cache.evict_pages(count) == possible
        if not possible:
            return
        if self.policy == "lru":
            self.model.evict_pages(count)
        else:
            self.adopt()
        assert self.world.allocator.num_free >= count

    @rule(more=st.sampled_from([0, 1, 1, 1, 2, 3]))
    def want_more_states(self, more: int) -> None:
        self.evict_states(self.world.states.num_free + more)

    def evict_states(self, count: int) -> None:
        states = self.world.states
        missing = max(0, count - states.num_free)
        num_states = len(self.model.states)
        possible = missing <= len(self.model.evictable_states())
        assert self.cache.evict_states(count) == possible
        if not possible:
            return
        if self.policy == "lru":
            self.model.evict_states(missing)
        else:
            self.adopt()
        assert len(self.model.states) == num_states - missing
        assert states.num_free >= count

    def adopt(self) -> None:
        """Take over what was evicted, if it was allowed to be."""
        kv, states = self.world.contents()
        for place in list(self.model.states):
            if place.text not in states[place.salt]:
                assert place not in self.model.state_locks
                self.model.drop_state(place)
        for place in list(self.model.kv):
            if place.text not in kv[place.salt]:
                assert not self.model.is_locked(place)
                self.model.drop_kv(place)

    @rule(really=st.integers(0, 7).map(lambda n: n == 7))
    def reset(self, really: bool) -> None:
        if not really:
            return
        assert self.cache.reset() == self.model.reset()

    # -- after every step --

    @invariant()
    def everything_agrees(self) -> None:
        self.world.check()
        kv, states = self.world.contents()
        assert {Place(salt, text) for salt, texts in kv.items() for text in texts} == self.model.kv.keys()
        assert {Place(salt, text) for salt, texts in states.items() for text in texts} == self.model.states.keys()
        assert self.cache.num_evictable_states == len(self.model.evictable_states())
        allocator, stats = self.world.allocator, self.cache.stats
        assert (allocator.num_free, allocator.num_available) == (self.model.free_pages(), self.model.available_pages())
        assert (stats.num_tokens, stats.num_states) == (len(self.model.kv), len(self.model.states))
        assert stats.num_locked_tokens == sum(map(self.model.is_locked, self.model.kv))
        for place, slot in self.model.kv.items():
            assert self.world.kv[slot] == (place.salt, place.text)

    def teardown(self) -> None:
        """When everybody lets go, everything can be had back."""
        while self.requests:
            self.end_request(0, keeps=False)
        while self.held:
            self.let_go(0)
        while self.held_states:
            self.let_go_of_state(0)
        self.everything_agrees()
        assert self.cache.evict_pages(self.world.allocator.num_pages)
        assert self.world.states.num_free == self.world.states.num_slots
        assert self.cache.stats.num_nodes == 0
        self.world.check()


@pytest.mark.parametrize("policy", ["lru", "flops"])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_the_cache_agrees_with_the_model(page_size: int, policy: PolicyName) -> None:
    machine = type("Machine", (CacheMachine,), {"page_size": page_size, "policy": policy})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=1500 if IS_FULL else 50,
            stateful_step_count=60 if IS_FULL else 50,
            suppress_health_check=list(HealthCheck),
        ),
    )
