"""The places for connections: how many there are for one address, and which connections give way to new ones."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from enum import Enum
from typing import Generic, TypeVar

from specmamba.server.http.callers import network_of

ConnectionT = TypeVar("ConnectionT", bound=Hashable)


class Activity(Enum):
    """What a connection does."""

    SILENT = "silent"  # no byte of a request was received
    HALF = "half"  # a part of a request was received
    BUSY = "busy"  # a request is being answered


class ConnectionTable(Generic[ConnectionT]):
    """The open connections of each client address.

    When all places are taken, the connection that has been idle longest is asked to give way: first one that is
    silent, then one with half a request. Busy connections keep their places.
    """

    def __init__(self, max_total: int, max_per_address: int, evict: Callable[[ConnectionT], None]) -> None:
        """``evict``: closes a connection, which has been removed from the table."""
        self._max_total, self._max_per_address, self._evict = max_total, max_per_address, evict
        self._places: dict[ConnectionT, _Places[ConnectionT]] = {}
        self._of_address: dict[str, _Places[ConnectionT]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def add(self, connection: ConnectionT, host: str | None) -> bool:
        """Give a place to a new connection, which is silent. Returns False if every other one that counts is busy."""
        key = network_of(host or "")
        places = self._of_address.get(key)
        if places is not None and len(places) >= self._max_per_address and not self._make_room(places):
            return False
        if len(self) >= self._max_total and not self._make_room(self._most_crowded()):
            return False
        places = self._of_address.setdefault(key, _Places(key))  # it may have been emptied just now
        self._places[connection] = places
        places.set(connection, Activity.SILENT)
        return True

    def remove(self, connection: ConnectionT) -> None:
        """Free a connection's place. Does nothing when it has none."""
        places = self._places.pop(connection, None)
        if places is not None:
            places.remove(connection)
            if not len(places):
                del self._of_address[places.key]

    def note(self, connection: ConnectionT, activity: Activity) -> None:
        """Note what a connection does now. Does nothing when it has no place."""
        places = self._places.get(connection)
        if places is not None:
            places.set(connection, activity)

    def _most_crowded(self) -> _Places[ConnectionT] | None:
        with_idle = (places for places in self._of_address.values() if places.longest_idle is not None)
        return max(with_idle, key=len, default=None)

    def _make_room(self, places: _Places[ConnectionT] | None) -> bool:
        victim = None if places is None else places.longest_idle
        if victim is None:
            return False
        self.remove(victim)
        self._evict(victim)
        return True


class _Places(Generic[ConnectionT]):
    """The connections of one address, by what they do; of each kind, those that began it first come first."""

    def __init__(self, key: str) -> None:
        self.key = key
        self._activities: dict[ConnectionT, Activity] = {}
        self._queues: dict[Activity, dict[ConnectionT, None]] = {activity: {} for activity in Activity}

    def __len__(self) -> int:
        return len(self._activities)

    @property
    def longest_idle(self) -> ConnectionT | None:
        for activity in (Activity.SILENT, Activity.HALF):
            for connection in self._queues[activity]:
                return connection
        return None

    def set(self, connection: ConnectionT, activity: Activity) -> None:
        before = self._activities.get(connection)
        if before is not activity:
            if before is not None:
                del self._queues[before][connection]
            self._activities[connection] = activity
            self._queues[activity][connection] = None

    def remove(self, connection: ConnectionT) -> None:
        del self._queues[self._activities.pop(connection)][connection]
