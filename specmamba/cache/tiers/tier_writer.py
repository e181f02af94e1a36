"""What goes from the pools into tiers, and from one tier into the next: which states, when, and the KV with each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from specmamba.cache.prefix.node import Node, Tokens, TokenSlots, text_of
from specmamba.cache.tiers.entry import Entry
from specmamba.cache.tiers.pool_transfer import PoolTransfer
from specmamba.cache.tiers.prefix_hash import HEAD_TOKENS, PrefixHasher, grid_below
from specmamba.cache.tiers.tier import Tier, WritePolicy

Hashes = Callable[[Tokens, str | None, str | None], PrefixHasher]  # of a text, its salt and its tenant
MIN_GAIN = 16  # tokens that an entry adds to those before it, or to what is in memory: each has a whole state


class TierWriter:
    """Copies states that were left, hit or evicted, with their KV, into the tiers whose policies ask for them."""

    def __init__(self, transfer: PoolTransfer, tiers: Sequence[Tier], hashes: Hashes) -> None:
        """Write from the pools of ``transfer`` into ``tiers``, the fastest first; ``hashes`` finds entries in them."""
        self._transfer, self._tiers, self._hashes = transfer, tiers, hashes

    def write_where(self, policy: WritePolicy, node: Node) -> None:
        """Write the state of a node to the tiers with this policy."""
        for tier in self._tiers:
            if tier.policy == policy:
                self.write(node, tier)

    def write_evicted(self, node: Node) -> None:
        """Write the state of a node that leaves the pools to the first tier that takes such states.

        The states above it are written before it, so that each entry has only the KV behind the one above.
        """
        tier = self.below(None)
        if tier is None or node.is_spare:
            return
        tokens, root = text_of(node)
        chain = tier.find(self._hashes(tokens, root.extra_key, root.tenant))
        tier.note_use(chain)
        known = chain[-1].end if chain else 0
        for each in list(node.path())[::-1]:
            if each.end > known:
                self.write(each, tier)

    def below(self, tier: Tier | None) -> Tier | None:
        """Return the tier that takes what leaves ``tier``, or the pools (None); None: it is lost."""
        rest = self._tiers if tier is None else self._tiers[self._tiers.index(tier) + 1 :]
        return next((each for each in rest if each.policy == "write_back"), None)

    def write(self, node: Node, tier: Tier, deadline: float | None = None) -> bool:
        """Write the state of a node to a tier, with the KV since the nearest state that the tier has.

        Args:
            node: of the tree; one without a state, or with a spare one, is left out.
            tier: that it is written to.
            deadline: of ``time.monotonic()``: wait until then for what is written before it. None: do not wait, and
                count a write that is lost.

        Returns:
            False where it has waited in vain, and is to be called again.
        """
        tokens, root = text_of(node)
        if len(tokens) <= HEAD_TOKENS or node.state_slot is None or node.is_spare:
            return True
        text = self._hashes(tokens, root.extra_key, root.tenant)
        chain = tier.find(text)
        tier.note_use(chain)
        start = chain[-1].end if chain else 0
        num_tokens = node.end - start
        if num_tokens < MIN_GAIN:
            return True
        key = text.digest(node.end)
        text.restart()
        grid = text.digest(grid_below(node.end))
        if chain:
            parent = chain[-1].key
        else:
            text.restart()
            parent = text.digest(HEAD_TOKENS)
        if not _may_put(tier, num_tokens, deadline):
            return False
        if (buffers := tier.allocate(num_tokens, parent)) is not None:
            slots = slots_of(node, start)
            entry = self._transfer.take(key, parent, start, slots, node.state_slot, buffers)
            tier.put(replace(entry, grid=grid))
        return True

    def copy(self, entries: Iterable[Entry], tier: Tier, deadline: float | None = None) -> bool:
        """Copy entries, parents first, into a tier that lacks them; ``deadline`` and result as of ``write``.

        Those that continue what the tier could not take are left out: no request would find them.
        """
        for entry in entries:
            if tier.has(entry.key) or (entry.start and not tier.has(entry.parent)):
                continue
            num_tokens = entry.end - entry.start
            if not _may_put(tier, num_tokens, deadline):
                return False
            if (buffers := tier.allocate(num_tokens, entry.parent)) is None:
                continue
            assert entry.state is not None
            for target, source in zip((*buffers[0], *buffers[1]), (*entry.tokens, *entry.state), strict=True):
                np.copyto(target, source)
            tier.put(replace(entry, tokens=buffers[0], state=buffers[1]))
        return True


def _may_put(tier: Tier, num_tokens: int, deadline: float | None) -> bool:
    return deadline is None or tier.wait_to_put(num_tokens, max(0.0, deadline - time.monotonic()))


def slots_of(node: Node, start: int) -> TokenSlots:
    """Return the token slots of positions [start, node.end)."""
    parts: list[TokenSlots] = []
    for each in node.path():
        if each.end <= start:
            break
        parts.append(each.slots[max(0, start - each.start) :])
    return np.concatenate(parts[::-1])
