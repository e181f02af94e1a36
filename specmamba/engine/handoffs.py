"""Prefill and decode apart, in an engine: prompts are left for decode servers, or come from prefill servers."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from specmamba.cache.tiers.pool_transfer import PoolTransfer
from specmamba.cache.tiers.prefix_hash import PrefixHasher
from specmamba.cache.tiers.prefix_tiers import PrefixTiers
from specmamba.engine.cache_manager import CacheManager
from specmamba.engine.request import Request
from specmamba.errors import ConfigError
from specmamba.transfer.handoff_stats import HandoffStats
from specmamba.transfer.leases import Between, Leases, text_hash
from specmamba.transfer.remote_tier import RemoteTier
from specmamba.transfer.transport import TransferPlan
from specmamba.transfer.wanted import Source

SECRET_BYTES = 32


class Handoffs:
    """Either side. All calls come from the engine's thread; requests without a room are none of its business."""

    def expect(self, request: Request) -> None:
        """Take a new request that names a room."""

    def was_admitted(self, request: Request) -> None:
        """Note that a request has got its memory, with whatever was cached then."""

    def leave(self, request: Request) -> None:
        """Take the prompt of a request that ends when it has been run: the prefix cache has its last state."""

    def was_dropped(self, request: Request) -> None:
        """Note that a request has ended, in any way."""

    def make_room(self) -> bool:
        """Free memory for a request that fits nowhere, though none runs; False: there is none to free."""
        return False

    def stats(self) -> HandoffStats:
        """Return the counts."""
        raise NotImplementedError

    def close(self) -> None:
        """End what is open."""


class PrefillSide(Handoffs):
    """Prompts of requests with a room are held for the decode server that names it."""

    def __init__(self, plan: TransferPlan, between: Between, manager: CacheManager, transfer: PoolTransfer) -> None:
        """Serve prompts from now on.

        Args:
            plan: key, time and transport.
            between: calls a function on the engine's thread between two steps.
            manager: of the engine's memory.
            transfer: from its pools.

        Raises:
            ConfigError: there is no room for a prompt beside a running request.
        """
        self._manager, self._transport = manager, plan.transport
        most = manager.pools.states.num_slots // 2
        if not most:
            raise ConfigError("--max-mamba-cache-size 1: a prefill server needs a state for what it holds: raise it")
        self._leases = Leases(manager.cache, transfer, plan.secret, plan.timeout_s, most, between)
        plan.transport.register(self._leases)

    def leave(self, request: Request) -> None:
        """As ``Handoffs.leave``."""
        if request.handoff is None:
            return
        node, tokens = request.node, request.key()
        if node is not None and node.state_slot is not None and node.end == len(tokens):
            self._leases.hold(request.handoff.room, node, tokens, request.extra_key)
        else:  # there was no slot for the state, or the prompt has one token
            self._leases.give_up(request.handoff.room, "no_room")

    def was_dropped(self, request: Request) -> None:
        """As ``Handoffs.was_dropped``: a room whose prompt was not left is over."""
        if request.handoff is not None and not self._leases.holds(request.handoff.room):
            self._leases.give_up(request.handoff.room)

    def make_room(self) -> bool:
        """As ``Handoffs.make_room``: the oldest prompt goes, unless the request waits for a tier."""
        tiers = self._manager.tiers
        return (tiers is None or not tiers.num_loads) and self._leases.end_oldest()

    def stats(self) -> HandoffStats:
        """As ``Handoffs.stats``."""
        return self._leases.stats()

    def close(self) -> None:
        """As ``Handoffs.close``."""
        self._transport.close()
        self._leases.close()


class DecodeSide(Handoffs):
    """Prompts of requests with a room are asked for at the prefill server that they name."""

    def __init__(self, plan: TransferPlan, manager: CacheManager, new_transfer: Callable[[], PoolTransfer]) -> None:
        """Put a tier of other servers below the prefix cache; arguments as of ``PrefillSide``."""
        self._secret = plan.secret
        if manager.tiers is None:
            transfer, pools, secret = new_transfer(), manager.pools, secrets.token_bytes(SECRET_BYTES)
            manager.tiers = PrefixTiers(
                manager.cache,
                pools.kv,
                pools.states,
                transfer,
                (),
                lambda tokens, extra_key, tenant: PrefixHasher(secret, tenant, extra_key, tokens),
            )
        self._tiers = manager.tiers
        self._remote = RemoteTier(self._tiers.transfer.layout, plan.transport, plan.timeout_s)
        self._tiers.add(self._remote)

    def expect(self, request: Request) -> None:
        """As ``Handoffs.expect``."""
        handoff, tokens = request.handoff, request.key()
        if handoff is None or handoff.host is None or handoff.port is None or not len(tokens):
            return
        text = self._tiers.hashes(tokens, request.extra_key, request.owner.tenant)
        shared = text_hash(self._secret, request.extra_key, tokens).hex()
        self._remote.expect(request.request_id, Source(handoff.host, handoff.port, handoff.room), text, shared)

    def was_admitted(self, request: Request) -> None:
        """As ``Handoffs.was_admitted``: what it has not asked for is not needed."""
        self._remote.dismiss(request.request_id)

    def was_dropped(self, request: Request) -> None:
        """As ``Handoffs.was_dropped``."""
        self._remote.dismiss(request.request_id)

    def stats(self) -> HandoffStats:
        """As ``Handoffs.stats``."""
        return self._remote.handoff_stats()
