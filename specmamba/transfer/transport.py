"""What moves a prompt from a prefill server to a decode server: the contract, whatever carries the bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from specmamba.cache.tiers.entry import Entry, EntryLayout
from specmamba.transfer.leases import Leases
from specmamba.transfer.wanted import Source, Wanted


class Connection(Protocol):
    """A decode server's way to one prefill server, used by one thread; ``hang_up`` may come from any.

    All but ``hang_up`` and ``close`` raise LinkError with the reason of the miss, and end at the connection's deadline.
    """

    def poll(self, wanted: Wanted) -> None:
        """Ask for a prompt, and wait until the prefill server has computed it."""
        ...

    def read(self, wanted: Wanted, layout: EntryLayout) -> Entry:
        """Read what ``poll`` has found, as an entry whose content is checked; its lease has ended."""
        ...

    def abort(self, room: int) -> None:
        """Say that a prompt is not wanted, in place of ``poll``: its lease ends."""
        ...

    def hang_up(self) -> None:
        """End what another thread does with the connection. What it has asked for is given up."""
        ...

    def close(self) -> None:
        """End the connection."""
        ...


class Transport(Protocol):
    """Either side of the transfer."""

    def register(self, leases: Leases) -> None:
        """Serve the prompts that are leased, on threads of its own, until ``close``."""
        ...

    def connect(self, source: Source, deadline: float) -> Connection:
        """Connect to a prefill server.

        Args:
            source: has its address.
            deadline: of ``time.monotonic()``, of all that is done with the connection.

        Raises:
            LinkError: "unreachable", "refused", "slow", "cut" or "damaged".
        """
        ...

    def close(self) -> None:
        """Serve nothing more."""
        ...


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """What the flags ask for."""

    is_prefill: bool  # False: a decode server
    transport: Transport
    secret: bytes  # for the hashes of prompts; both sides have it
    timeout_s: float  # that a request waits for its prompt, and that a prompt is held
