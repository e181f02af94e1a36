"""A connection between two servers that know one key: who is at the other end is proven, and messages are signed.

Both sides prove that they know the key by an HMAC over two random numbers, one of each side, and neither sends the key.
The same numbers give the key of this connection, by which every message and the header of every entry are signed,
with a direction and a number, so that none can be forged, repeated or given in another order. Nothing is encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from specmamba.cache.tiers.codec import EntryError, encode, read_entry
from specmamba.cache.tiers.entry import Entry, EntryLayout
from specmamba.cache.tiers.tier_stats import TierMiss

GREETING = b"SPMLINK1"
NONCE_BYTES = PROOF_BYTES = 32
MAX_MESSAGE_BYTES = 1 << 16
_LENGTH = struct.Struct("<I")


class LinkError(Exception):
    """A handoff that comes to nothing. ``reason`` is that of the miss."""

    def __init__(self, reason: TierMiss) -> None:
        super().__init__(reason)
        self.reason: TierMiss = reason


class Signer:
    """Signatures of what goes over one connection, each for the next message of its direction."""

    def __init__(self, key: bytes, labels: tuple[bytes, bytes]) -> None:
        """``key``: of the connection; ``labels``: of what is sent, and of what is received."""
        self._key, self._labels, self._counts = key, labels, [0, 0]

    def of_sent(self, data: bytes | bytearray | memoryview) -> bytes:
        """The signature of the next message that is sent."""
        return self._next(0, data)

    def of_received(self, data: bytes | bytearray | memoryview) -> bytes:
        """The signature that the next message must have that is received."""
        return self._next(1, data)

    def _next(self, direction: int, data: bytes | bytearray | memoryview) -> bytes:
        number = self._counts[direction].to_bytes(8, "little")
        self._counts[direction] += 1
        return hmac.digest(self._key, self._labels[direction] + number + bytes(data), "sha256")


class PeerLink:
    """One connection, used by one thread; ``hang_up`` may come from any.

    Every read and write ends at ``deadline``, of ``time.monotonic()``, which its user sets. They raise LinkError:
    "slow" then, "cut" where the other side has ended, "damaged" where what arrives is not what was sent.
    """

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection, self.deadline = connection, deadline
        with suppress(OSError):  # the other side has gone already, which a read tells
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._signer = Signer(b"", (b"", b""))  # until both sides have proven the key

    @classmethod
    def accept(cls, connection: socket.socket, key: bytes, deadline: float) -> PeerLink:
        """Be the side that was connected to. Raises LinkError: "refused" where the other one does not know the key."""
        link, own = cls(connection, deadline), secrets.token_bytes(NONCE_BYTES)
        link.write(GREETING + own)
        nonces = own + link.read(NONCE_BYTES)
        if not hmac.compare_digest(link.read(PROOF_BYTES), _proof(key, b"client", nonces)):
            raise LinkError("refused")
        link.write(_proof(key, b"server", nonces))
        link._begin(key, nonces, (b"server", b"client"))
        return link

    @classmethod
    def connect(cls, host: str, port: int, key: bytes, deadline: float) -> PeerLink:
        """Connect to an address, and prove the key to it.

        Raises:
            LinkError: "unreachable", "refused" where the other side knows another key, "slow", "cut", "damaged".
        """
        try:
            connection = socket.create_connection((host, port), _left(deadline))
        except TimeoutError:
            raise LinkError("slow") from None
        except (OSError, UnicodeError):  # the latter for what can be no name of a host
            raise LinkError("unreachable") from None
        link = cls(connection, deadline)
        try:
            link._prove(key)
        except BaseException:
            link.close()
            raise
        return link

    def _prove(self, key: bytes) -> None:
        """Be the side that has connected."""
        if self.read(len(GREETING)) != GREETING:
            raise LinkError("damaged")
        own = secrets.token_bytes(NONCE_BYTES)
        nonces = self.read(NONCE_BYTES) + own
        self.write(own + _proof(key, b"client", nonces))
        try:
            proof = self.read(PROOF_BYTES)
        except LinkError as error:  # it hangs up on those who do not know its key
            raise LinkError("refused" if error.reason == "cut" else error.reason) from None
        if not hmac.compare_digest(proof, _proof(key, b"server", nonces)):
            raise LinkError("refused")
        self._begin(key, nonces, (b"client", b"server"))

    def _begin(self, key: bytes, nonces: bytes, labels: tuple[bytes, bytes]) -> None:
        self._signer = Signer(_proof(key, b"session", nonces), labels)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message: a few plain values."""
        data = json.dumps(message, separators=(",", ":")).encode()
        self.write(_LENGTH.pack(len(data)) + self._signer.of_sent(data) + data)

    def receive(self) -> dict[str, Any]:
        """Wait for a message."""
        (length,) = _LENGTH.unpack(self.read(_LENGTH.size))
        if length > MAX_MESSAGE_BYTES:
            raise LinkError("damaged")
        signature, data = self.read(PROOF_BYTES), self.read(length)
        if not hmac.compare_digest(signature, self._signer.of_received(data)):
            raise LinkError("damaged")
        with suppress(ValueError, RecursionError):
            if isinstance(message := json.loads(data), dict):
                return message
        raise LinkError("damaged")

    def send_entry(self, entry: Entry, send_parts: Callable[[list[memoryview]], None] | None = None) -> None:
        """Send an entry with its state: the header, KV, the state, and the signature of the header.

        The header has the digests of KV and state, so the signature is that of all. ``send_parts`` sends KV and state
        in another way.
        """
        header, *parts = encode(entry)
        self.write(header)
        if send_parts is not None:
            send_parts(parts)
        else:
            for part in parts:
                self.write(part)
        self.write(self._signer.of_sent(header))

    def read_entry(
        self, layout: EntryLayout, max_tokens: int, readinto: Callable[[memoryview], int] | None = None
    ) -> Entry:
        """Read an entry of this layout and at most so many tokens; the reasons of codec.EntryError are added.

        ``readinto`` reads KV and state, where they come in another way.
        """
        stream = _Recorded(self, readinto or self.readinto)
        try:
            entry = read_entry(stream, layout, max_tokens)
        except EntryError as error:
            raise LinkError(error.fault) from None
        if not hmac.compare_digest(self.read(PROOF_BYTES), self._signer.of_received(stream.header)):
            raise LinkError("damaged")
        return entry

    def read(self, size: int) -> bytes:
        """Read exactly so many bytes."""
        data = bytearray(size)
        view = memoryview(data)
        while len(view):
            view = view[self.readinto(view) :]
        return bytes(data)

    def readinto(self, buffer: memoryview) -> int:
        """Read at least one byte into memory; returns how many."""
        try:
            self._connection.settimeout(_left(self.deadline))
            count = self._connection.recv_into(buffer)
        except TimeoutError:
            raise LinkError("slow") from None
        except OSError:
            raise LinkError("cut") from None
        if not count:
            raise LinkError("cut")
        return count

    def write(self, data: bytes | memoryview) -> None:
        """Send all of these bytes."""
        if not len(data):
            return
        try:
            self._connection.settimeout(_left(self.deadline))
            self._connection.sendall(data)
        except TimeoutError:
            raise LinkError("slow") from None
        except OSError:
            raise LinkError("cut") from None

    def handed_over(self) -> tuple[socket.socket, Signer]:
        """Leave the connection to another protocol."""
        return self._connection, self._signer

    def hang_up(self) -> None:
        """End the connection: the thread that uses it gets "cut", and then closes it.

        A descriptor that another thread closed might be that of another connection already when it is read.
        """
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection, and free it."""
        self.hang_up()
        self._connection.close()


class _Recorded:
    """A stream that remembers what is read of it before the parts that are read into memory: the header."""

    def __init__(self, link: PeerLink, readinto: Callable[[memoryview], int]) -> None:
        self.header = bytearray()
        self.readinto = readinto
        self._read = link.read

    def read(self, size: int, /) -> bytes:
        data = self._read(size)
        self.header += data
        return data


def _proof(key: bytes, label: bytes, nonces: bytes) -> bytes:
    return hmac.new(key, b"specmamba " + label + nonces, hashlib.sha256).digest()


def _left(deadline: float) -> float:
    """The seconds until a deadline. Raises LinkError: it is past."""
    if (left := deadline - time.monotonic()) <= 0:
        raise LinkError("slow")
    return left
