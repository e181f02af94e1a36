"""Prompts that a prefill server holds for decode servers, in rooms, until they are pulled, given up, or too old."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from specmamba.cache.prefix import MambaRadixCache
from specmamba.cache.prefix.node import Node, Tokens
from specmamba.cache.tiers.entry import DIGEST_BYTES, Entry
from specmamba.cache.tiers.pool_transfer import PoolTransfer
from specmamba.cache.tiers.prefix_hash import PrefixHasher
from specmamba.cache.tiers.tier_stats import TierMiss
from specmamba.cache.tiers.tier_writer import slots_of
from specmamba.errors import EngineStoppedError
from specmamba.transfer.handoff_stats import HandoffCounts, HandoffStats
from specmamba.transfer.peer_link import LinkError
from specmamba.transfer.wanted import Wanted

MAX_ENDED = 4096  # rooms that are over and remembered, so that those who come late need not wait
Between = Callable[[Callable[[], Any]], "Future[Any]"]  # calls a function on the engine's thread between two steps


@dataclass(slots=True, eq=False)
class Lease:
    """A prompt whose state, and the KV before it, stay in the pools."""

    node: Node  # its state is locked
    text: bytes  # hash of the prompt's first ``node.end`` tokens
    deadline: float  # of ``time.monotonic()``


class Leases:
    """The prompts that are held for decode servers. A room holds one, once.

    The tree and the pools are the engine's, so what changes them runs on its thread only. The other methods are for
    threads of senders, and have it run there by ``between``.
    """

    def __init__(
        self,
        cache: MambaRadixCache,
        transfer: PoolTransfer,
        secret: bytes,
        hold_s: float,
        most: int,
        between: Between,
    ) -> None:
        """Hold nothing yet.

        Args:
            cache: the tree.
            transfer: from its pools.
            secret: for the hashes of prompts, which the decode servers have too.
            hold_s: how long a prompt is held.
            most: the most prompts that are held together; the oldest makes room.
            between: calls a function on the engine's thread.
        """
        self._cache, self._transfer, self._secret = cache, transfer, secret
        self._hold_s, self._most, self._between = hold_s, most, between
        self.counts = HandoffCounts()
        self._changed = threading.Condition()  # guards the two fields below
        self._leases: OrderedDict[int, Lease] = OrderedDict()  # by room, the oldest first
        self._ended: OrderedDict[int, TierMiss] = OrderedDict()

    # ---- on the engine's thread --------------------------------------------------------------------------------------

    def hold(self, room: int, node: Node, tokens: Tokens, extra_key: str | None) -> None:
        """Lock the state of a prompt for a decode server that names the room, which must be new.

        Args:
            room: that the request named.
            node: ends where the prompt does, but for its last token; has a state.
            tokens: [n] int64, the text up to there.
            extra_key: of its cached prefixes.
        """
        if room in self._leases or room in self._ended:  # another choice of the same prompt, or it is not wanted
            return
        while len(self._leases) >= self._most:
            self.end_oldest()
        self._cache.lock_state(node)
        text = text_hash(self._secret, extra_key, tokens)
        with self._changed:
            self._leases[room] = Lease(node, text, time.monotonic() + self._hold_s)
            self._changed.notify_all()

    def give_up(self, room: int, reason: TierMiss = "vanished") -> None:
        """End a room: its prompt will not come, or is not wanted."""
        if room not in self._ended:
            self._end(room, reason)

    def take(self, wanted: Wanted) -> Entry:
        """Copy what is asked for out of the pools, and end the lease.

        Raises:
            LinkError: "absent" where the room has another text, "fingerprint" where it is of another model, or as
                ``wait``.
        """
        lease = self._leases.get(wanted.room)
        if lease is None:
            raise LinkError(self._ended.get(wanted.room, "vanished"))
        layout, node = self._transfer.layout, lease.node
        reason: TierMiss | None = None
        if layout.fingerprint.hex() != wanted.layout:
            reason = "fingerprint"
        elif lease.text.hex() != wanted.text or not 0 <= wanted.start < wanted.end == node.end:
            reason = "absent"
        if reason is not None:
            self.give_up(wanted.room, reason)
            raise LinkError(reason)
        assert node.state_slot is not None
        slots, buffers = slots_of(node, wanted.start), layout.new_buffers(wanted.end - wanted.start)
        try:
            return self._transfer.take(lease.text, bytes(DIGEST_BYTES), wanted.start, slots, node.state_slot, buffers)
        finally:
            self._end(wanted.room, "vanished")  # once

    def holds(self, room: int) -> bool:
        """Whether a room has its prompt."""
        return room in self._leases

    def expire(self) -> None:
        """End the leases that are too old."""
        now = time.monotonic()
        for room in [room for room, lease in self._leases.items() if lease.deadline <= now]:
            self.counts.fail("expired")
            self._end(room, "expired")

    def end_oldest(self) -> bool:
        """End the oldest lease for want of room; False: there is none."""
        if not self._leases:
            return False
        self.counts.fail("no_room")
        self._end(next(iter(self._leases)), "no_room")
        return True

    def close(self) -> None:
        """End all leases, and free those who wait."""
        for room in list(self._leases):
            self._end(room, "vanished")

    def stats(self) -> HandoffStats:
        """Return the counts."""
        return self.counts.stats(len(self._leases))

    def _end(self, room: int, reason: TierMiss) -> None:
        with self._changed:
            lease = self._leases.pop(room, None)
            self._ended[room] = reason
            while len(self._ended) > MAX_ENDED:
                self._ended.popitem(last=False)
            self._changed.notify_all()
        if lease is not None:
            self._cache.unlock_state(lease.node)

    # ---- for senders, on any thread ----------------------------------------------------------------------------------

    def wait(self, room: int, timeout_s: float) -> bool:
        """Wait until a room has its prompt; False: it has none yet. Raises LinkError: it is over, and why."""
        with self._changed:
            self._changed.wait_for(lambda: room in self._leases or room in self._ended, timeout_s)
            if (reason := self._ended.get(room)) is not None:
                raise LinkError(reason)
            return room in self._leases

    def pull(self, wanted: Wanted) -> Future[Entry]:
        """Do ``take`` between two steps. Raises LinkError: "vanished", the engine has stopped."""
        try:
            return self._between(lambda: self.take(wanted))
        except EngineStoppedError:
            raise LinkError("vanished") from None

    def abandon(self, room: int, reason: TierMiss = "vanished") -> None:
        """Do ``give_up`` between two steps, soon."""
        self._later(lambda: self.give_up(room, reason))

    def look_after(self) -> None:
        """Do ``expire`` between two steps if a lease is too old; called now and then."""
        with self._changed:
            first = next(iter(self._leases.values()), None)
        if first is not None and first.deadline <= time.monotonic():
            self._later(self.expire)

    def _later(self, function: Callable[[], None]) -> None:
        try:
            self._between(function)
        except EngineStoppedError:  # it ends all leases itself
            return


def text_hash(secret: bytes, extra_key: str | None, tokens: Tokens) -> bytes:
    """Return the hash of a text by which two servers that share a secret know that they mean the same.

    ``tokens``: [n] int64. Tenants are not in it: each server may tell its clients apart in a way of its own.
    """
    return PrefixHasher(secret, None, extra_key, tokens).digest(len(tokens))
