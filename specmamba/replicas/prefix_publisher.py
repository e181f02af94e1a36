"""What a replica says of the prefixes that it can go on from, in its pools and in its tiers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specmamba.cache.prefix.node import Node, text_of
from specmamba.cache.tiers.prefix_hash import PrefixHasher
from specmamba.cache.tiers.tier import Tier, TierName
from specmamba.replicas.published_entries import TierIdentity, lines_of

if TYPE_CHECKING:
    from specmamba.engine.engine import Engine

MOST_CHANGES = 2000  # of a tier in one message: a folder may have very many entries at the start
LEARN_S = 0.5  # for a look at entries that other replicas have written


class PrefixPublisher:
    """Says which beginnings of texts have a state in the prefix cache, or in a tier, as keyed hashes."""

    def __init__(self, engine: Engine, secret: bytes) -> None:
        """``secret``: the key of the hashes of what is in the pools; tiers have their own."""
        self._cache, self._secret = engine.cache_manager.cache, secret
        tiers = engine.cache_manager.tiers
        self._tiers = () if tiers is None or tiers.secret is None else tiers.tiers
        self._told: dict[Node, tuple[int, str]] = {}
        self.has_more = False  # than the last call has returned

    def changes(self) -> dict[str, Any]:
        """What was left and what was evicted since the last call: length and hash of each; and so of each tier."""
        now = set(self._cache.nodes_with_state())
        gone = [self._told.pop(node) for node in [node for node in self._told if node not in now]]
        left = {node: self._digest(node) for node in now if node not in self._told}
        self._told |= left
        tiers = {_place_of(tier): lines_of(tier.changes(MOST_CHANGES)) for tier in self._tiers}
        self.has_more = any(len(lines) == MOST_CHANGES for lines in tiers.values())
        return {"left": list(left.values()), "gone": gone, **{name: lines for name, lines in tiers.items() if lines}}

    def learn(self, keys: Sequence[str]) -> None:
        """Look for entries in a folder that another replica has written. May be called from any thread, and waits."""
        for tier in self._tiers:
            tier.learn([bytes.fromhex(key) for key in keys], LEARN_S)

    def _digest(self, node: Node) -> tuple[int, str]:
        tokens, root = text_of(node)
        hasher = PrefixHasher(self._secret, root.tenant, root.extra_key, tokens)
        return node.end, hasher.digest(node.end).hex()


def identity_of(engine: Engine) -> dict[str, Any] | None:
    """What the server must know to compare texts with an engine's tiers; None: it has none."""
    tiers = engine.cache_manager.tiers
    if tiers is None or tiers.secret is None:
        return None
    identity = TierIdentity(tiers.secret, tiers.transfer.layout.fingerprint)
    return {**identity.message(), "has_folder": any(_place_of(tier) == "disk" for tier in tiers.tiers)}


def _place_of(tier: Tier) -> TierName:
    """The name of its place for the server: a store is shared by replicas as a folder is, and stands in its place."""
    return "disk" if tier.name == "store" else tier.name
