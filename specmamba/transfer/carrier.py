"""What can carry the bytes of prompts beside the link: memory of two servers that was registered at the start.

The link carries all else: requests, the signed header with the digests of all bytes, and where bytes are. So a carrier
needs no trust: what it brings is checked as a whole.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from specmamba.cache.tiers.entry import Bytes
from specmamba.errors import ConfigError
from specmamba.transfer.peer_link import LinkError, PeerLink

logger = logging.getLogger("specmamba")

CarrierName = Literal["nixl", "mooncake"]
WINDOW_BYTES = 32 << 20  # of a prompt that is on its way, at the most
NUM_WINDOWS = 8
MAX_WINDOWS = 32  # with those that were allocated for others into which transfers went on too long
LOST_S = 60.0  # after which other memory takes the place of a window into which a transfer still goes on
LOOK_S = 0.1  # between two looks whether a transfer that was given up has ended


class Carrier(Protocol):
    """Reads memory of another process that has a carrier of this kind too. Several threads may call."""

    @property
    def name(self) -> CarrierName: ...

    def register(self, memory: Bytes) -> None:
        """Let others read this memory, and this process write into it; once, before all else."""
        ...

    @property
    def address(self) -> str:
        """What others need for ``read``; a text without secrets."""
        ...

    def read(self, address: str, remote: int, local: int, nbytes: int, deadline: float) -> None:
        """Copy memory of another process into memory of this one.

        Args:
            address: of the other process.
            remote, local: where the bytes begin, in either process's registered memory.
            nbytes: how many.
            deadline: of ``time.monotonic()``.

        Raises:
            LinkError: "cut", or "slow" at the deadline. What is on its way then may still arrive, until ``is_quiet``.
        """
        ...

    def is_quiet(self, local: int) -> bool:
        """Whether a ``read`` to this place that was given up, if there was one, writes nothing any more."""
        ...

    def close(self) -> None:
        """End all transfers."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """A piece of the registered memory."""

    place: int  # its address
    view: Bytes


class Windows:
    """The registered memory of a process, in pieces of one size. Several threads may call."""

    def __init__(self, carrier: Carrier) -> None:
        """Allocate the memory, and register it for good: a transfer may go on when its connection is gone."""
        self.carrier = carrier
        self._changed = threading.Condition()  # guards the fields below
        self._free = deque[Window]()
        self._given_up: list[tuple[float, Window]] = []  # with the time after which other memory takes its place
        self._lost: list[Window] = []  # those whose place was taken
        self._num_all = 0
        self._allocate(NUM_WINDOWS)

    def _allocate(self, count: int) -> None:
        memory = np.zeros(count * WINDOW_BYTES, dtype=np.uint8)
        self.carrier.register(memory)
        first = memory.ctypes.data
        starts = range(0, len(memory), WINDOW_BYTES)
        self._free.extend(Window(first + start, memory[start : start + WINDOW_BYTES]) for start in starts)
        self._num_all += count

    def take(self, deadline: float) -> Window:
        """Wait for a window.

        Raises:
            LinkError: "slow" at the deadline; "no_room" at once where transfers that were given up go on in all.
        """
        with self._changed:
            while True:
                self._look_at_given_up()
                if self._free:
                    return self._free.popleft()
                if len(self._given_up) + len(self._lost) == self._num_all:
                    raise LinkError("no_room")
                if (left := deadline - time.monotonic()) <= 0:
                    raise LinkError("slow")
                self._changed.wait(min(left, LOOK_S))

    def _look_at_given_up(self) -> None:
        """Free those that are quiet. A server that is gone without a word may never let one be."""
        noisy = [pair for pair in self._given_up if not self._free_if_quiet(pair[1])]
        self._lost = [window for window in self._lost if not self._free_if_quiet(window)]
        now, num_more = time.monotonic(), MAX_WINDOWS - self._num_all
        lost = [pair for pair in noisy if pair[0] <= now][:num_more]
        self._given_up = noisy
        if not lost:
            return
        try:
            self._allocate(len(lost))
        except (ConfigError, MemoryError):  # it is tried again
            logger.warning("there is no memory for transfers in place of what is given up")
            return
        self._given_up = [pair for pair in noisy if pair not in lost]
        self._lost += [window for _, window in lost]

    def _free_if_quiet(self, window: Window) -> bool:
        if is_quiet := self.carrier.is_quiet(window.place):
            self._free.append(window)
        return is_quiet

    def give_back(self, window: Window) -> None:
        """Return a window in which nothing is read or written any more."""
        with self._changed:
            self._free.append(window)
            self._changed.notify()

    def give_up(self, window: Window) -> None:
        """Return a window into which a transfer may go on writing: it is used again when the carrier is quiet."""
        with self._changed:
            self._given_up.append((time.monotonic() + LOST_S, window))


def send_parts(link: PeerLink, windows: Windows, parts: Iterable[memoryview]) -> None:
    """Show the bytes of ``parts`` to the other side, window by window. Raises LinkError."""
    window = windows.take(link.deadline)
    try:
        for piece in _pieces(parts, len(window.view)):
            count = 0
            for each in piece:
                window.view[count : count + len(each)] = np.frombuffer(each, dtype=np.uint8)
                count += len(each)
            link.send({"place": window.place, "size": count})
            if link.receive().get("do") != "next":
                raise LinkError("damaged")
    finally:  # a reader whose connection has gone wants it no more, and a digest would refuse other bytes
        windows.give_back(window)


def _pieces(parts: Iterable[memoryview], size: int) -> Iterator[list[memoryview]]:
    """Cut parts into lists of ``size`` bytes together, the last one less."""
    piece, room = list[memoryview](), size
    for part in parts:
        while len(part):
            piece.append(part[:room])
            part = part[room:]
            room -= len(piece[-1])
            if not room:
                yield piece
                piece, room = [], size
    if piece:
        yield piece


class Arriving:
    """What ``send_parts`` shows, as a stream. Read by one thread; raises LinkError."""

    def __init__(self, link: PeerLink, windows: Windows, address: str) -> None:
        """``address``: of the other side's carrier."""
        self._link, self._windows, self._address = link, windows, address
        self._window: Window | None = None
        self._rest: memoryview = memoryview(b"")

    def readinto(self, buffer: memoryview, /) -> int:
        """Read at least one byte into memory; returns how many."""
        if not len(self._rest):
            self._fetch()
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    def _fetch(self) -> None:
        """Bring the next window."""
        if self._window is None:
            self._window = self._windows.take(self._link.deadline)
        window, message = self._window, self._link.receive()
        place, size = message.get("place"), message.get("size")
        if not isinstance(place, int) or not isinstance(size, int) or not 0 < size <= len(window.view):
            raise LinkError("damaged")
        self._window = None
        try:
            self._windows.carrier.read(self._address, place, window.place, size, self._link.deadline)
        except BaseException:
            self._windows.give_up(window)
            raise
        self._window = window
        self._rest = window.view[:size].data
        self._link.send({"do": "next"})

    def close(self) -> None:
        """Return the window."""
        if self._window is not None:
            self._windows.give_back(self._window)
            self._window = None
