"""Memory of requests: rows, state slots, KV, prefixes borrowed from the prefix cache and states cached there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specmamba.cache.kv_pool import Pages
from specmamba.cache.prefix import MambaRadixCache
from specmamba.cache.prefix.eviction import Costs
from specmamba.cache.prefix.inspection import Outline, View
from specmamba.cache.prefix.node import Match, Node, slots_between
from specmamba.cache.prefix.state_places import is_tracked, spare_ends
from specmamba.cache.state_pool import PREFIX_CACHE
from specmamba.cache.tiers.prefix_tiers import PrefixTiers, TierWish
from specmamba.cache.tiers.saving import Saving
from specmamba.config import EngineConfig
from specmamba.engine.request import ChunkState, Request
from specmamba.models.base import LoadedModel
from specmamba.verify.pools import Pools

SPARE_SHARE = 0.25  # of the state slots, for spare states that no request has gone on from


class CacheManager:
    """Allocates the memory of requests, with the longest cached prefix in it, and caches what they have computed.

    States are cached at the ends of chunks, where a request ends or is preempted, and, if ``track_interval`` is
    set, every so many generated tokens. A request keeps its own path in the tree locked, so that what it borrows stays.
    Nothing here runs a model: ``features`` that a drafter needs to go on at a position are passed in.
    """

    def __init__(
        self,
        pools: Pools,
        cache: MambaRadixCache,
        is_on: bool,
        track_interval: int | None,
        spare_limits: tuple[int, int] = (0, 1),
    ) -> None:
        """Share pools between requests through a prefix cache.

        Args:
            pools: that the cache shares with requests.
            cache: the tree.
            is_on: False: every request computes its whole prompt, and nothing is left.
            track_interval: generated tokens between two states.
            spare_limits: the most spare states of one prompt, and the size of a chunk.
        """
        self.cache, self.is_on = cache, is_on
        self.pools = pools
        self._track_interval = track_interval if is_on else None
        self._spare_limits = min(spare_limits[0], self._max_spare), spare_limits[1]
        self.tiers: PrefixTiers | None = None  # what lies below the cache; None: nothing
        self._running: dict[int, Request] = {}  # by state slot
        if pools.split is not None:
            pools.split.followers.append(self)

    @property
    def _max_spare(self) -> int:
        """Their share of the slots that there are, or were at the start, where pools are elastic."""
        num_slots, split = self.pools.states.num_slots, self.pools.split
        return int(SPARE_SHARE * (num_slots if split is None else max(num_slots, split.num_slots_at_start)))

    def pages_moved(self, now: Pages) -> None:
        """Requests know pages through their rows and nodes alone."""

    def state_moved(self, slot: int, now: int) -> bool:
        """Note that a state has moved to another slot; returns whether it is a running request's."""
        request = self._running.pop(slot, None)
        if request is None:
            return False
        self._running[now], request.slot = request, now
        if request.row is not None:
            self.pools.state_buffers.state_moved(request.row, now)
        return True

    def acquire(self, request: Request, num_positions: int, num_spare: int, use_cache: bool = True) -> bool:
        """Allocate a row, a state slot and KV for the positions of a request, evicting cached prefixes where needed.

        Args:
            request: a waiting one; its ``row``, ``slot``, ``node`` and ``num_run`` are set.
            num_positions: KV positions that it needs room for.
            num_spare: tokens of KV that must stay available for other requests.
            use_cache: False: the request computes everything, so that all cached prefixes can be evicted for it.

        Returns:
            False, with no change but evictions, if there is not enough memory.
        """
        match = self._match(request, use_cache)
        self.cache.lock(match.node)
        is_acquired = False
        try:
            is_acquired = self._take(request, match, num_positions, num_spare)
        finally:
            if not is_acquired:
                self._give_back(request)
                self.cache.unlock(match.node)
        if not is_acquired:
            return False
        request.node, request.origin, request.num_run = match.node, match.node, match.length
        if match.kv_length > match.length:
            request.chunk_ends.add(match.kv_length)  # other texts branch off here: a state helps them
        if self.is_on and request.num_admissions == 0 and not request.must_read_prompt:
            # a request that does not fit beside its cached prefix counts as a miss by eviction
            found = match if use_cache else replace(match, miss="evicted")
            self.cache.count_request(request.num_tokens - 1, found, request.owner.tenant)
            request.num_cached_tokens = match.length
            request.spare_ends = spare_ends(match.length, request.num_tokens - 1, *self._spare_limits)
            self._note_hit(match.node)
        request.num_admissions += 1
        request.must_compute = False
        return True

    def peek(self, request: Request) -> int:
        """Return the number of tokens of a waiting request that are cached now, or can be loaded from a tier."""
        if not self.is_on:
            return 0
        text = request.key(), request.extra_key, request.owner.tenant
        cached = self.cache.peek(*text)[0]
        if self.tiers is None or request.must_read_prompt or request.must_compute:
            return cached
        return max(cached, self.tiers.peek(request.tier_wish, *text))

    def is_loading(self, request: Request) -> bool:
        """Whether a waiting request's prefix is on its way from a tier; begins that where one has more of it."""
        if self.tiers is None or not self.is_on or request.must_read_prompt or request.must_compute:
            return False
        return self.tiers.is_loading(request.tier_wish, request.key(), request.extra_key, request.owner.tenant)

    def outline(self, max_nodes: int, view: View) -> Outline:
        """The shape of the prefix cache for drawing, with the tiers that have its nodes too."""
        if self.tiers is None:
            return self.cache.outline(max_nodes, view)
        return self.cache.outline(max_nodes, view, self.tiers.tiers_of)

    def wait_for_tiers(self) -> None:
        """Wait a short time for prefixes that are loaded, if there are any."""
        if self.tiers is not None:
            self.tiers.wait()

    @property
    def num_admissible(self) -> int:
        """The largest number of new requests that rows and state slots allow."""
        return min(self.pools.table.num_free_rows, self.num_available_states)

    @property
    def num_tokens(self) -> int:
        """Size of the KV pool in tokens, as large as it can become now."""
        return self.cache.most_pages * self.pools.kv.page_size

    @property
    def num_available_states(self) -> int:
        """State slots that a new request can have."""
        return self.cache.num_available_states

    def lacking(self, requests: Iterable[Request], num_lookahead_slots: int) -> list[Request]:
        """The running requests without KV for so many positions from their roots on."""
        num_held = self.pools.table.num_held
        return [r for r in requests if num_held[r.held_row] < r.root_position + num_lookahead_slots]

    def grow(self, request: Request, num_positions: int, num_ahead: int) -> bool:
        """Allocate KV for the positions of a running request, evicting where needed.

        Where pages are free, it gets KV for ``num_ahead`` more positions, which saves calls.

        Returns:
            False, with no change, if there is not enough.
        """
        row, table, allocator = request.held_row, self.pools.table, self.pools.kv.allocator
        missing = table.num_missing_pages(row, num_positions)
        if not missing:
            return True
        ahead = min(num_positions + num_ahead, table.max_positions)
        if table.num_missing_pages(row, ahead) <= allocator.num_free:
            return table.ensure(row, ahead)
        return self.cache.make_room(missing, 0) and table.ensure(row, num_positions)

    def grow_ahead(self, requests: Iterable[Request], num_positions: int, num_ahead: int) -> bool:
        """Allocate KV for so many positions of running requests from their roots on, where nothing moves for it.

        Elastic pools, and those with tiers below them, give free KV alone; others evict, too.

        Args:
            requests: a step of theirs may be in flight.
            num_positions: that each needs.
            num_ahead: more that it gets, where as many are free, and its output may get so many.

        Returns:
            False, where there is too little, or a text has no room for so many.
        """
        table, allocator = self.pools.table, self.pools.kv.allocator
        evicts = self.pools.split is None and self.tiers is None
        for request in self.lacking(requests, num_positions):
            end = request.root_position + num_positions
            if end > table.max_positions:
                return False
            if not evicts and table.num_missing_pages(request.held_row, end) > allocator.num_free:
                return False
            if not self.grow(request, end, min(num_ahead, request.text.num_left)):
                return False
        return True

    def make_slot(self) -> bool:
        """Free a state slot for the prefix cache, by eviction if need be; False if running requests hold all.

        Asked before a drafter computes the features of a state that is to be left.
        """
        return self.is_on and self.cache.make_room(0, 1)

    @property
    def takes_in_order(self) -> bool:
        """Whether requests may get memory behind a step in flight: nothing moves for it, or is read by the host."""
        return self.pools.split is None and self.tiers is None

    def leave_chunk(self, request: Request, features: Tensor | None) -> None:
        """Cache a copy of a request's state at the end of its newest chunk."""
        if (state := self.copy_chunk(request, features)) is not None:
            self.insert_chunk(request, state)

    def copy_chunk(self, request: Request, features: Tensor | None) -> ChunkState | None:
        """Do ``leave_chunk`` up to the copy, for ``insert_chunk`` or ``drop_chunk``; None: there is no slot for it."""
        position, states = request.num_run, self.pools.states
        is_spare = position in request.spare_ends - request.chunk_ends and request.num_to_extend > 0

        def write(slot: int) -> None:  # making room for the copy may have moved the original
            states.fork(request.held_slot, request.request_id, position, slot)

        slot = self._copy(features, write)
        return None if slot is None else ChunkState(slot, position, is_spare)

    def insert_chunk(self, request: Request, state: ChunkState) -> None:
        """Cache a copy of the state at the end of a chunk, and the text up to it."""
        self._insert(request, state.position, state.slot, state.is_spare)

    def drop_chunk(self, state: ChunkState) -> None:
        """Free such a copy."""
        self.pools.states.free(state.slot, PREFIX_CACHE)

    def tracked_positions(self, request: Request, previous: int) -> list[int]:
        """Return the positions of the last step at which ``track_interval`` asks for a state.

        In a long output the distance between two states grows (``is_tracked``).

        Args:
            request: after the step.
            previous: tokens that it had run before the step.
        """
        return self._tracked_between(request, previous, request.num_run)

    def may_track(self, requests: Iterable[Request], num_tokens: int) -> bool:
        """Whether a step that runs up to so many tokens of each request may pass a position to be left."""
        if self._track_interval is None:
            return False
        return any(self._tracked_between(r, r.num_run, r.num_run + num_tokens) for r in requests)

    def _tracked_between(self, request: Request, first: int, last: int) -> list[int]:
        """Positions behind ``first``, up to ``last``, at which ``track_interval`` asks for a state."""
        if self._track_interval is None:
            return []
        offset, interval = len(request.prompt), self._track_interval
        counts = range((first - offset) // interval + 1, (last - offset) // interval + 1)
        return [offset + count * interval for count in counts if count > 0 and is_tracked(count)]

    def leave_at(self, request: Request, position: int, features: Tensor | None) -> None:
        """Materialize the state at a position that the last step has passed, and cache it."""
        row, buffers = request.held_row, self.pools.state_buffers
        slot = self._copy(features, lambda slot: buffers.materialize(row, position, slot))
        if slot is not None:
            self._insert(request, position, slot)

    def leaving(self, requests: Sequence[Request]) -> list[Request]:
        """Return the requests whose last state the prefix cache lacks, for when they end or are preempted."""
        return [request for request in requests if self.is_on and _has_more_than_its_node(request)]

    def leave_last(self, request: Request, features: Tensor | None) -> None:
        """Move the state and the KV of a request that ends, or is preempted, to the prefix cache."""
        slot = request.held_slot
        self._save_features(slot, features)
        if request.is_verifying:
            self.pools.state_buffers.retire(request.held_row, request.num_run)
        self.pools.states.donate(slot, request.request_id, request.num_run)
        self._set_slot(request, None)
        self._insert(request, request.num_run, slot)

    def release(self, request: Request) -> None:
        """Free all memory that a request still holds."""
        self.cancel_load(request.tier_wish)
        request.tier_wish = TierWish()  # one that was preempted asks again: what it left may have gone to a tier
        if request.row is not None:
            self.pools.state_buffers.end(request.row)
            self.pools.counts.end(request.row)
        self._give_back(request)
        request.is_verifying, request.unread_runs = False, []
        if request.node is not None:
            assert request.origin is not None
            self.cache.touch_branches(request.node, request.origin)
            self.cache.unlock(request.node)
            request.node = request.origin = None

    def start_saving(self) -> Saving | None:
        """Return what writes all cached prefixes to the folder on disk; None: there is no folder."""
        return None if self.tiers is None else self.tiers.start_saving()

    def load_prefix(
        self, wish: TierWish, tokens: NDArray[np.int64], extra_key: str | None, tenant: str | None
    ) -> int | None:
        """Bring what host memory and disk have of a text into the pools.

        Args:
            wish: new at first, and the same in later calls.
            tokens: [n] int64, of the text.
            extra_key, tenant: its scope.

        Returns:
            The tokens that are cached in the pools now; None: they are being loaded, and this is to be called again.
        """
        if self.tiers is not None and self.tiers.is_loading(wish, tokens, extra_key, tenant):
            return None
        return self.cache.peek(tokens, extra_key, tenant)[0]

    def cancel_load(self, wish: TierWish) -> None:
        """End a load that is not wanted any more."""
        if self.tiers is not None:
            self.tiers.cancel(wish)

    def flush(self) -> int:
        """Drop every cached prefix that no running request uses, also in host memory; returns the number of tokens.

        What is on disk stays; the tokens are those of the tree.
        """
        if self.tiers is not None:
            self.tiers.forget()
        return self.cache.reset()

    def close(self) -> None:
        """Write what is still to be written to disk, and end the threads that do it."""
        if self.tiers is not None:
            self.tiers.close()
            self.tiers = None

    def _match(self, request: Request, use_cache: bool) -> Match:
        is_used = self.is_on and use_cache
        key = request.key() if is_used else np.empty(0, dtype=np.int64)
        return self.cache.match(key, request.extra_key, request.owner.tenant)

    def _take(self, request: Request, match: Match, num_positions: int, num_spare: int) -> bool:
        """Allocate everything; after a failure the caller frees what was allocated."""
        table = self.pools.table
        needed = table.num_missing_pages(None, num_positions, match.length)
        spare = -(-num_spare // self.pools.kv.page_size)
        if not table.num_free_rows or not self.cache.can_have(needed + spare, 1):
            return False
        request.row = table.allocate_row()
        if request.row is None or not self._take_state(request, match, needed):
            return False
        *_, root = match.node.path()
        table.borrow(request.row, slots_between(root, match.node))  # they may have moved since the match
        return table.ensure(request.row, num_positions)

    def _take_state(self, request: Request, match: Match, num_pages: int) -> bool:
        """Allocate a slot with the state that a request starts from, beside free pages; False if that is impossible."""
        states, cache, node = self.pools.states, self.cache, match.node
        if not match.length:
            if cache.make_room(num_pages, 1):
                self._set_slot(request, states.allocate(request.request_id))
            return request.slot is not None
        cache.lock_state(node)  # so that making room for the copy does not evict the original
        try:
            if cache.make_room(num_pages, 1):
                self._set_slot(request, states.reserve(request.request_id))
            is_last = request.slot is None and cache.make_room(num_pages, 0)
            if request.slot is not None:
                assert node.state_slot is not None
                states.copy(node.state_slot, request.slot, match.length)
        finally:
            cache.unlock_state(node)
        if is_last and not node.state_locks:  # the original is in the only slot that is left
            slot = cache.give_state(node)
            states.take(slot, request.request_id, match.length)
            self._set_slot(request, slot)
        return request.slot is not None

    def _set_slot(self, request: Request, slot: int | None) -> None:
        """Note which slot a request has."""
        if request.slot is not None:
            del self._running[request.slot]
        if slot is not None:
            self._running[slot] = request
        request.slot = slot

    def _give_back(self, request: Request) -> None:
        """Free a request's row and slot, as far as it has them."""
        if request.row is not None:
            self.pools.table.release(request.row)
            request.row = None
        if request.slot is not None:
            self.pools.states.free(request.slot, request.request_id)
            self._set_slot(request, None)

    def _copy(self, features: Tensor | None, write: Callable[[int], None]) -> int | None:
        """A slot of the prefix cache with a state, which ``write`` puts into it; None: there is none."""
        slot = self._reserve()
        if slot is None:
            return None
        try:
            write(slot)
            self._save_features(slot, features)
        except BaseException:
            self.pools.states.free(slot, PREFIX_CACHE)
            raise
        return slot

    def _insert(self, request: Request, end: int, slot: int, is_spare: bool = False) -> None:
        """Insert tokens up to ``end``, and the state there, into the cache, and lock the new node for the request."""
        start, row, table = request.node, request.held_row, self.pools.table
        assert start is not None
        tokens, slots = request.token_array(start.end, end), table.slots_of_positions(row, start.end, end)
        try:
            insertion = self.cache.insert(start, tokens, slots, slot)
        except BaseException:
            self.pools.states.free(slot, PREFIX_CACHE)
            raise
        if not insertion.takes_state:
            self.pools.states.free(slot, PREFIX_CACHE)
        elif is_spare:
            self.cache.mark_spare(insertion.node, self._max_spare)
        if insertion.node is not start and start.end not in request.chunk_ends:  # where others wait to go on
            self.cache.pass_state(start)
        self.cache.move_lock(start, insertion.node)
        request.node = insertion.node
        table.settle(row, start.end, insertion.slots)
        if self.tiers is not None:
            self.tiers.state_was_left(insertion.node)

    def _note_hit(self, node: Node) -> None:
        """Note that a request goes on from a node: a spare state has been worth it, and is one like others now."""
        if node.is_spare:
            self.cache.keep_spare(node)
            if self.tiers is not None:
                self.tiers.state_was_left(node)
        if self.tiers is not None:
            self.tiers.state_was_hit(node)

    def _reserve(self) -> int | None:
        """Reserve a slot for a cached state; None if running requests use all."""
        if not self.make_slot():
            return None
        return self.pools.states.reserve(PREFIX_CACHE)

    def _save_features(self, slot: int, features: Tensor | None) -> None:
        """Store the features that a drafter resumes from beside the state in a slot.

        A draft's features may be not finite where the target's are finite. Zeros are stored then, so that requests
        that resume here draft from zeros.
        """
        stored = self.pools.states.features[0, slot]
        if features is None:
            stored.zero_()
        else:
            stored.copy_(features.where(features.isfinite().all(), 0))


def _has_more_than_its_node(request: Request) -> bool:
    """Whether a request has a state that its node in the cache does not have (any more)."""
    node = request.node
    if node is None or request.slot is None or not request.num_run:
        return False
    return request.num_run > node.end or (request.num_run == node.end and node.state_slot is None)


def build_cache_manager(config: EngineConfig, model: LoadedModel, pools: Pools) -> CacheManager:
    """Build the prefix cache on an engine's pools, with the strategy that the flags choose."""
    shape = model.cache_shape
    costs = Costs(
        state_bytes=shape.state_bytes_per_slot,
        kv_bytes_per_token=shape.kv_bytes_per_token,
        flops_per_token=2.0 * model.num_parameters,
        flops_per_token_squared=4.0 * model.attention_width,  # a product with a key, and one with a value
    )
    kv = pools.kv
    cache = MambaRadixCache(kv.allocator, kv.page_size, pools.states, costs, config.cache_eviction, pools.split)
    tracks = config.mamba_radix_cache_strategy == "extra_buffer"
    return CacheManager(
        pools,
        cache,
        not config.disable_radix_cache,
        config.mamba_track_interval if tracks else None,
        (config.mamba_spare_states, config.chunked_prefill_size),
    )
