"""Handoffs over TCP: a thread for each connection, on either side. A carrier may bring the bytes of KV and states."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from specmamba.cache.tiers.entry import Entry, EntryLayout
from specmamba.cache.tiers.tier_stats import REMOTE_MISSES
from specmamba.errors import EngineStoppedError
from specmamba.transfer.carrier import Arriving, Carrier, Windows, send_parts
from specmamba.transfer.leases import Leases
from specmamba.transfer.peer_link import LinkError, PeerLink
from specmamba.transfer.wanted import Source, Wanted

logger = logging.getLogger("specmamba")

MAX_CONNECTIONS = 256  # that a prefill server answers at a time; more wait to be accepted
MAX_COPIES = 4  # prompts that are out of the pools and not sent yet
HELLO_S = 10.0  # in which the other side must have proven its key, have asked, or have given a sign of life
BEAT_S = 1.0  # between two signs of life of a prefill server that is waited for
TICK_S = 0.25  # between two looks for leases that are too old


class TcpConnection:
    """``Connection`` over a link."""

    def __init__(self, link: PeerLink, windows: Windows | None = None) -> None:
        self._link, self._deadline, self._windows = link, link.deadline, windows
        self._address: str | None = None  # of the other side's carrier

    def poll(self, wanted: Wanted) -> None:
        """As ``Connection.poll``; without a sign of life for ``HELLO_S`` the other side counts as gone."""
        self._link.send({"do": "pull", **wanted.message(), "by": _name_of(self._windows)})
        while True:
            self._link.deadline = min(self._deadline, time.monotonic() + HELLO_S)
            answer = self._link.receive()
            if answer.get("state") == "ready":
                self._link.deadline = self._deadline
                self._address = answer.get("address")
                return
            if answer.get("state") != "waiting":
                reason = answer.get("reason")
                raise LinkError(next((known for known in REMOTE_MISSES if known == reason), "damaged"))

    def read(self, wanted: Wanted, layout: EntryLayout) -> Entry:
        """As ``Connection.read``."""
        entry = self._read(wanted.end - wanted.start, layout)
        if (entry.key.hex(), entry.start, entry.end) != (wanted.text, wanted.start, wanted.end):
            raise LinkError("damaged")
        return entry

    def _read(self, num_tokens: int, layout: EntryLayout) -> Entry:
        if self._windows is None:
            return self._link.read_entry(layout, num_tokens)
        if not isinstance(self._address, str):
            raise LinkError("damaged")
        arriving = Arriving(self._link, self._windows, self._address)
        try:
            return self._link.read_entry(layout, num_tokens, arriving.readinto)
        finally:
            arriving.close()

    def abort(self, room: int) -> None:
        """As ``Connection.abort``."""
        self._link.send({"do": "abort", "room": room})

    def hang_up(self) -> None:
        """As ``Connection.hang_up``."""
        self._link.hang_up()

    def close(self) -> None:
        """As ``Connection.close``."""
        self._link.close()


class TcpTransport:
    """``Transport`` over TCP sockets."""

    def __init__(
        self, key: bytes, listener: socket.socket | None = None, carrier: Callable[[], Carrier] | None = None
    ) -> None:
        """Serve nothing yet.

        Args:
            key: that both sides know.
            listener: listens where decode servers connect; closed with the transport. None: nothing is served.
            carrier: makes what brings KV and states; both sides have one of its kind. None: they go over TCP.

        Raises:
            ConfigError: the carrier's library is missing, or does not work.
        """
        self._key, self._listener = key, listener
        self._windows = None if carrier is None else Windows(carrier())
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._copies = threading.BoundedSemaphore(MAX_COPIES)
        self._is_closed = self._has_refused = False
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Where decode servers connect, for a prefill server."""
        assert self._listener is not None
        host, port = self._listener.getsockname()[:2]
        return host, port

    def register(self, leases: Leases) -> None:
        """As ``Transport.register``."""
        assert self._listener is not None
        self._listener.settimeout(TICK_S)
        self._thread = threading.Thread(target=self._accept, args=(leases,), name="specmamba-handoffs", daemon=True)
        self._thread.start()

    def connect(self, source: Source, deadline: float) -> TcpConnection:
        """As ``Transport.connect``; the key must be proven in ``HELLO_S``."""
        hello = min(deadline, time.monotonic() + HELLO_S)
        link = PeerLink.connect(source.host, source.port, self._key, hello)
        link.deadline = deadline
        return TcpConnection(link, self._windows)

    def close(self) -> None:
        """As ``Transport.close``. Connections end by themselves: their leases are over."""
        self._is_closed = True
        if self._thread is not None:
            self._thread.join(2 * TICK_S)
        if self._listener is not None:
            self._listener.close()
        if self._windows is not None:
            self._windows.carrier.close()

    # ---- threads of a prefill server ---------------------------------------------------------------------------------

    def _accept(self, leases: Leases) -> None:
        assert self._listener is not None
        while not self._is_closed:
            leases.look_after()
            if not self._places.acquire(timeout=TICK_S):
                continue
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                self._places.release()
            except OSError:  # it is closed, or this process has no descriptor left
                self._places.release()
                time.sleep(TICK_S)
            else:
                self._begin(connection, leases)

    def _begin(self, connection: socket.socket, leases: Leases) -> None:
        """Answer on a thread. Where the system has none left the other side misses; those who come later need not."""
        thread = threading.Thread(target=self._answer, args=(connection, leases), name="specmamba-handoff", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            logger.exception("a handoff cannot be answered")
            connection.close()
            self._places.release()

    def _answer(self, connection: socket.socket, leases: Leases) -> None:
        try:
            with connection:
                self._answer_link(PeerLink.accept(connection, self._key, time.monotonic() + HELLO_S), leases)
        except LinkError as error:
            if error.reason == "refused":
                self._refuse(leases)
        except Exception:
            logger.exception("a handoff has failed")
        finally:
            self._places.release()

    def _refuse(self, leases: Leases) -> None:
        leases.counts.fail("refused")
        if not self._has_refused:  # once: those who may connect must not fill the log
            logger.warning("a handoff was refused: the other side has another key (--disaggregation-key)")
        self._has_refused = True

    def _answer_link(self, link: PeerLink, leases: Leases) -> None:
        message = link.receive()
        room = message.get("room")
        if message.get("do") == "abort" and isinstance(room, int):
            leases.abandon(room)
            return
        wanted = Wanted.of(message)
        try:
            if message.get("by") != _name_of(self._windows):
                raise LinkError("format")
            self._send(link, wanted, leases)
        except LinkError as error:
            leases.counts.fail(error.reason)
            leases.abandon(wanted.room, error.reason)
            if error.reason in ("cut", "slow"):  # the other side is gone, or waits no more
                return
            link.deadline = time.monotonic() + HELLO_S
            with suppress(LinkError):
                link.send({"state": "failed", "reason": error.reason})

    def _send(self, link: PeerLink, wanted: Wanted, leases: Leases) -> None:
        began = time.monotonic()
        link.deadline = began + max(0.0, min(wanted.wait_s, 86_400.0))
        while not leases.wait(wanted.room, BEAT_S):
            link.send({"state": "waiting"})
        while not self._copies.acquire(timeout=BEAT_S):
            link.send({"state": "waiting"})
        try:
            entry = self._pull(link, wanted, leases)
            self._send_entry(link, entry)
        finally:
            self._copies.release()
        leases.counts.add(entry.nbytes, time.monotonic() - began)

    def _send_entry(self, link: PeerLink, entry: Entry) -> None:
        if (windows := self._windows) is None:
            link.send({"state": "ready"})
            link.send_entry(entry)
            return
        link.send({"state": "ready", "address": windows.carrier.address})
        link.send_entry(entry, lambda parts: send_parts(link, windows, parts))

    def _pull(self, link: PeerLink, wanted: Wanted, leases: Leases) -> Entry:
        """Get the prompt out of the pools, which the engine does between two of its steps."""
        copied = leases.pull(wanted)
        while True:
            try:
                return copied.result(BEAT_S)
            except TimeoutError:
                link.send({"state": "waiting"})
            except EngineStoppedError:
                raise LinkError("vanished") from None
            except MemoryError:
                raise LinkError("no_room") from None


def _name_of(windows: Windows | None) -> str | None:
    return None if windows is None else windows.carrier.name
