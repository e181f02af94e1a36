"""What an operator may do with the replicas of a server, and what is said of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

# "ending": its process still ends; "off": no process; "failed": it could not be started, and stays away
ReplicaState = Literal["starting", "ready", "draining", "ending", "off", "failed"]


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One replica now."""

    id: int
    state: ReplicaState
    held: bool  # an operator has taken it out of service: nothing but an operator's call starts it again
    # Of its process: how many were started for this id, up to it. With the id it names one process for good; process
    # ids are given out again. None, as ``pid``: there is no process, or it is not ready yet.
    generation: int | None
    pid: int | None
    num_requests: int
    queued_tokens: int  # of their prompts, and as much for each request as in the choice of a replica
    reason: str | None = None  # why it has failed


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """The replicas of a server now, and how often their number has followed the load."""

    states: dict[str, int]  # how many are in each state
    queued_tokens: int  # of all requests, those without a replica included
    num_grown: int  # replicas that were started for the load,
    num_shrunk: int  # and that were taken out of service for want of it
    num_started: dict[str, int]  # processes that were started for each replica, by its id


class ReplicaControl(Protocol):
    """Takes replicas out of service and puts them back. All calls come from the engine's thread."""

    def statuses(self) -> list[ReplicaStatus]:
        """All replicas that there can be, by id."""
        ...

    def drain(self, index: int, timeout_s: float | None, generation: int | None = None) -> ReplicaStatus:
        """Take a replica out of service: it gets no more requests, and ends when its own have ended.

        Args:
            index: its id.
            timeout_s: after so many seconds its requests go on at others; None: they finish where they are.
            generation: of the process that is meant; None: whichever it is.

        Raises:
            ReplicaStateError: there is no such replica, its process is another one, or no other one is ready.
        """
        ...

    def resume(self, index: int) -> ReplicaStatus:
        """Put a replica back into service, or start it again. Raises ReplicaStateError: there is no such replica."""
        ...
