"""The prefix cache against a model without nodes, edges or lists, which knows only which texts have KV and states.

Hypothesis makes the histories. Every step is followed by ``check()`` and by a comparison of everything that is cached.
Under ``lru`` the model says exactly what is evicted; under ``flops`` it says what may be. ``SPECMAMBA_TEST_FULL=1``
runs hundreds of thousands of steps.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from specmamba.cache.prefix.eviction import PolicyName
from specmamba.cache.prefix.node import Match, Node, TokenSlots
from specmamba.cache.state_pool import PREFIX_CACHE
from tests.radix import NUM_ROWS, Text, World, array

IS_FULL = os.environ.get("SPECMAMBA_TEST_FULL") == "1"
MAX_LENGTH = 10
SALTS: tuple[str | None, ...] = (None, "other")
PICK = st.integers(0, 1000)
CUT = st.integers(0, MAX_LENGTH)
TAIL = st.lists(st.integers(0, 1), max_size=4).map(tuple)
SALT = st.sampled_from([None, None, None, "other"])
# Allocations that fail for a new request; "only one": no slot is free, and only the state of the match can be evicted.
FAULTS = [None, None, "no row", "no state", "only one", "only one"]
OWNER = "request"


@dataclass(frozen=True)
class Place:
    """A text under a salt. Its prefixes are the places above it; the empty text is the root."""

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
    gone: set[Place] = field(default_factory=set)  # first tokens of evicted edges, while the place above has KV
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
        """Remove this place if it has no state, no lock and nothing below it, then the places above it likewise."""
        while place in self.kv and place not in self.states and self.is_leaf(place) and not self.is_locked(place):
            self.drop_kv(place)
            place = place.up()

    def free_pages(self) -> int:
        size = self.world.page_size
        cached = {slot // size for slot in self.kv.values()}
        return self.world.allocator.num_pages - len(cached | self.world.table.held_pages().keys())

    def available_pages(self) -> int:
        size = self.world.page_size
        pinned = {slot // size for place, slot in self.kv.items() if self.is_locked(place)}
        return self.world.allocator.num_pages - len(pinned | self.world.table.held_pages().keys())

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

    def put_kv(self, place: Place, slot: int) -> int:
        """Set the KV slot of a place, unless it has one already."""
        self.gone.discard(place)
        return self.kv.setdefault(place, slot)

    def drop_kv(self, place: Place) -> None:
        """Remove a place of an evicted edge; called from the edge's end on, so that ``gone`` keeps its first token."""
        del self.kv[place]
        self.lost.discard(place)
        self.gone = {each for each in self.gone if each.up() != place} | {place}

    def drop_state(self, place: Place) -> None:
        del self.states[place]
        self.lost.add(place)

    def why_no_longer(self, place: Place) -> str | None:
        """Why a match of a text is not longer."""
        length, kv_length = self.match(place)
        if length == len(place.text):
            return None
        next_one = Place(place.salt, place.text[: kv_length + 1])
        if next_one in self.gone or any(each in self.lost and len(each.text) > length for each in place.above()):
            return "evicted"
        others = [Place(salt, place.text) for salt in SALTS if salt != place.salt]
        return "salt" if not length and any(self.match(each)[0] for each in others) else "never_stored"

    def reset(self) -> int:
        before = len(self.kv)
        self.states = {place: used for place, used in self.states.items() if place in self.state_locks}
        self.kv = {place: slot for place, slot in self.kv.items() if self.is_locked(place)}
        self.lost.clear()
        self.gone.clear()
        return before - len(self.kv)


@dataclass
class Request:
    """One that runs: it has locked ``node``, and has a row and a state for what comes after."""

    place: Place
    node: Node
    row: int
    num_pages: int  # that its positions take, those of the cache counted
    state_slot: int

    @property
    def done(self) -> Place:
        return Place(self.place.salt, self.place.text[: self.node.end])


class CacheMachine(RuleBasedStateMachine):
    page_size = 1
    policy: PolicyName = "lru"

    def __init__(self) -> None:
        super().__init__()
        num_pages = {1: 16, 3: 8, 16: 5}[self.page_size]
        self.world = World(self.page_size, num_pages, 4, self.policy, MAX_LENGTH + 1)  # and so the last page is cut
        self.cache = self.world.cache
        self.model = Model(self.world)
        self.texts: list[Text] = [(0, 0, 1, 0, 1, 1)]  # that were asked for before
        self.requests: list[Request] = []
        self.held: list[tuple[Place, Node]] = []
        self.held_states: list[tuple[Place, Node]] = []

    def text(self, pick: int, cut: int, tail: Text) -> Text:
        """Draw a text that usually shares a prefix with an earlier one."""
        text = (*self.texts[pick % len(self.texts)][:cut], *tail)[:MAX_LENGTH] or (1,)
        self.texts.append(text)
        return text

    # -- looking --

    @rule(pick=PICK, cut=CUT, tail=TAIL, salt=SALT)
    def match(self, pick: int, cut: int, tail: Text, salt: str | None) -> None:
        self.look(Place(salt, self.text(pick, cut, tail)))

    def look(self, place: Place) -> None:
        text, salt, model = place.text, place.salt, self.model
        (length, kv_length), miss = model.match(place), model.why_no_longer(place)
        assert self.cache.peek(array(text), salt) == (length, kv_length)
        match = self.world.match(text, salt)
        assert (match.length, match.kv_length) == (length, kv_length)
        found = Place(salt, text[:length])
        model.touch(found)
        if length:
            model.touch_state(found)
        assert match.miss == miss

    # -- requests --

    def pages_of(self, num_positions: int) -> int:
        return -(-num_positions // self.page_size)

    def want_row(self, borrowed: TokenSlots, num_positions: int) -> int | None:
        """Allocate a row for ``num_positions``, evicting pages if necessary."""
        missing = self.pages_of(num_positions) - len(borrowed) // self.page_size
        assert self.world.table.num_missing_pages(None, num_positions, len(borrowed)) == missing
        num_free, can_have_row = self.world.allocator.num_free, self.world.table.num_free_rows > 0
        row = self.world.row(num_positions, borrowed)
        assert (row is not None) == (can_have_row and missing <= num_free)
        if row is None:
            self.evict_pages(missing)
            row = self.world.row(num_positions, borrowed)
        return row

    def grow(self, request: Request, num_positions: int, ahead: int = 0) -> bool:
        """Allocate pages for ``num_positions``, and for some more if that needs no eviction."""
        table, allocator = self.world.table, self.world.allocator
        missing = table.num_missing_pages(request.row, num_positions)
        assert missing == max(0, self.pages_of(num_positions) - request.num_pages)
        if not missing:
            return True
        wanted = min(num_positions + ahead, table.max_positions)
        if table.num_missing_pages(request.row, wanted) > allocator.num_free:
            wanted = num_positions
            self.evict_pages(missing)
        is_there = missing <= allocator.num_free
        assert table.ensure(request.row, wanted) == is_there
        request.num_pages = self.pages_of(wanted) if is_there else request.num_pages
        return is_there

    def want_slot(self, owner: str) -> int | None:
        slot = self.world.states.reserve(owner)
        if slot is None:
            self.evict_states(1)
            slot = self.world.states.reserve(owner)
        return slot

    @precondition(lambda self: len(self.requests) < NUM_ROWS)
    @rule(pick=PICK, cut=CUT, tail=TAIL, salt=SALT, room=CUT, fault=st.sampled_from(FAULTS))
    def admit(self, pick: int, cut: int, tail: Text, salt: str | None, room: int, fault: str | None) -> None:
        self.start(self.text(pick, cut, tail), salt, room, fault)

    @rule(pick=PICK, cut=CUT, tail=TAIL, salt=SALT, chunk=st.integers(1, MAX_LENGTH))
    def run_whole(self, pick: int, cut: int, tail: Text, salt: str | None, chunk: int) -> None:
        """A request from its beginning to its end."""
        before = len(self.requests)
        self.start(self.text(pick, cut, tail), salt, MAX_LENGTH, None)
        if len(self.requests) > before:
            self.run_chunk(before, chunk, ahead=0, moves_lock=True, fault=False)
            self.end_request(before, keeps=True)

    def start(self, text: Text, salt: str | None, room: int, fault: str | None) -> None:
        """Match, lock, allocate row and state; if something fails (or is made to fail), drop everything again.

        The row has room for what it borrows and at most ``room`` tokens more.
        """
        match = self.world.match(text[:-1], salt)
        place = Place(salt, text)
        found = Place(salt, text[: match.length])
        self.model.touch(found)
        self.cache.lock(match.node)
        self.model.locks.append(found)
        if match.length:
            self.model.touch_state(found)
        num_positions = min(len(text), match.length + room)
        row = None if fault == "no row" else self.want_row(match.slots, num_positions)
        slot = None if row is None or fault == "no state" else self.want_state(found, match, fault == "only one")
        if row is not None and slot is not None:
            num_pages = max(self.pages_of(num_positions), match.length // self.page_size)
            self.requests.append(Request(place, match.node, row, num_pages, slot))
            return
        if row is not None:
            self.world.release(row)
        self.unlock(found, match.node)

    def want_state(self, found: Place, match: Match, is_only_one: bool) -> int | None:
        """Get a slot with the matched state: a copy, or the cache's own slot if no other can be allocated."""
        states, node = self.world.states, match.node
        if not match.length:
            slot = self.want_slot(OWNER)
            if slot is not None:
                states.end_write(slot, 0)
            return slot
        self.cache.lock_state(node)
        self.model.state_locks.append(found)
        slot = None if is_only_one else self.want_slot(OWNER)
        if slot is not None:
            assert node.state_slot is not None
            states.copy(node.state_slot, slot, match.length)
        self.unlock_state(found, node)
        return self.take_over(found, node) if slot is None else slot

    def take_over(self, found: Place, node: Node) -> int | None:
        """Take a state out of the cache if no other request has locked it; this request's lock keeps the KV."""
        if found in self.model.state_locks:
            before = self.cache.stats
            with pytest.raises(RuntimeError, match="cannot give its state away"):
                self.cache.give_state(node)
            assert self.cache.stats == before
            return None
        slot = self.cache.give_state(node)
        self.world.states.take(slot, OWNER, node.end)
        self.model.drop_state(found)
        self.look(found)
        return slot

    @precondition(lambda self: self.requests)
    @rule(pick=PICK, count=st.integers(0, 5), ahead=st.integers(0, 4), moves_lock=st.booleans(), fault=st.booleans())
    def run_chunk(self, pick: int, count: int, ahead: int, moves_lock: bool, fault: bool) -> None:
        """Run some tokens and store a copy of the state at their end."""
        request = self.requests[pick % len(self.requests)]
        place, start = request.place, request.node.end
        end = min(len(place.text), start + count)
        if not self.grow(request, end, ahead):
            return
        self.world.write(request.row, place.salt, place.text, start, end)
        self.world.states.end_write(request.state_slot, end)
        slot = None if fault or end == 0 else self.want_slot(PREFIX_CACHE)
        if slot is None:  # the chunk's KV stays the row's own, and is run again in the next one
            self.world.states.end_write(request.state_slot, start)
            return
        self.world.states.fork(request.state_slot, OWNER, end, slot)
        self.leave(request, end, slot, moves_lock)

    def leave(self, request: Request, end: int, slot: int, moves_lock: bool = True) -> None:
        """Insert what the request has run up to ``end``, with the state in ``slot``, and move the lock there."""
        place, start = request.place, request.node.end
        self.world.state[slot] = place.salt, place.text[:end]
        slots = self.world.slots(request.row, start, end)
        insertion = self.cache.insert(request.node, array(place.text[start:end]), slots, slot)
        reached = Place(place.salt, place.text[:end])
        between = [Place(place.salt, place.text[: position + 1]) for position in range(start, end)]
        due = [self.model.put_kv(each, own) for each, own in zip(between, slots.tolist(), strict=True)]
        assert insertion.slots.tolist() == due
        assert insertion.node is self.node_of(reached)
        assert insertion.takes_state == (reached not in self.model.states)
        if not insertion.takes_state:
            self.world.free_state(slot)
        self.model.lost.discard(reached)
        self.model.touch_state(reached)
        self.model.touch(reached)
        if moves_lock:
            self.cache.move_lock(request.node, insertion.node)
        else:
            self.cache.lock(insertion.node)
            self.cache.unlock(request.node)
        self.model.locks.append(reached)
        self.model.locks.remove(request.done)
        self.model.touch(reached)
        request.node = insertion.node
        self.world.table.settle(request.row, start, insertion.slots)

    @precondition(lambda self: self.requests)
    @rule(pick=PICK, keeps=st.booleans())
    def end_request(self, pick: int, keeps: bool) -> None:
        """Finish (the state is donated), or abort."""
        request = self.requests[pick % len(self.requests)]
        place, end = request.place, len(request.place.text)
        if keeps and self.grow(request, end):
            self.world.write(request.row, place.salt, place.text, request.node.end, end)
            self.world.states.end_write(request.state_slot, end)
            self.world.states.donate(request.state_slot, OWNER, end)
            self.leave(request, end, request.state_slot)
        else:
            self.world.states.free(request.state_slot, OWNER)
        self.requests.remove(request)
        self.world.release(request.row)
        self.unlock(request.done, request.node)

    @precondition(lambda self: self.requests)
    @rule(pick=PICK, kind=st.sampled_from(["free page", "other position", "other owner", "other's state"]))
    def insert_what_is_wrong(self, pick: int, kind: str) -> None:
        """Check that the call is refused and changes nothing."""
        request = self.requests[pick % len(self.requests)]
        start, end = request.node.end, min(len(request.place.text), request.num_pages * self.page_size)
        if start == end or not self.world.states.num_free:
            return
        place = Place(request.place.salt, request.place.text[:end])
        slot = self.world.new_state(place.salt, place.text)
        assert slot is not None
        tokens, slots, offered = array(place.text[start:]), self.world.slots(request.row, start, end), slot
        if kind == "free page":
            if place in self.model.kv or not self.world.allocator.num_free:
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

    @rule(more=st.sampled_from([1, 1, 1, 2, 2, 3, 5, 9, 16]))
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
        """Compare what was evicted with what may be evicted, and remove it from the model."""
        kv, states = self.world.contents()
        for place in list(self.model.states):
            if place.text not in states[place.salt]:
                assert place not in self.model.state_locks
                self.model.drop_state(place)
        for place in sorted(self.model.kv, key=lambda each: -len(each.text)):
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

    @invariant()
    def rows_are_what_requests_need(self) -> None:
        """The first slots of a row are the cache's; the others are its own, in pages that only this row writes."""
        held: Counter[int] = Counter()
        cached = set(self.model.kv.values())
        for request in self.requests:
            num_done, size = request.node.end, self.page_size
            num_positions = min(request.num_pages * size, self.world.table.max_positions)
            slots = self.world.slots(request.row, 0, num_positions).tolist()
            done = [self.model.kv[each] for each in request.done.above()[::-1]]
            own = slots[num_done:]
            assert slots[:num_done] == done
            assert [slot % size for slot in own] == [position % size for position in range(num_done, num_positions)]
            assert not cached & set(own)
            pages = {slot // size for slot in own}
            assert len(pages) == request.num_pages - num_done // size
            held.update(pages)
        assert self.world.table.held_pages() == held
        assert all(count == 1 for count in held.values())

    def teardown(self) -> None:
        """When all requests have ended, all memory can be freed."""
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


@pytest.mark.fast_cases("3-lru")
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
