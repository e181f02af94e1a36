"""Messages of a replica on another machine: both sides prove that they know one key, and every line is signed.

The proof, and the key of a connection that follows from it, are those of ``transfer/peer_link.py``. A signature is an
HMAC of the direction, the number of the line and the line itself, so that none can be forged, repeated or given in
another order. Nothing is encrypted.
"""

from __future__ import annotations

import hmac
import socket
import time
from contextlib import suppress

from specmamba.parallel.messages import Messages
from specmamba.replicas.replica_launch import SEND_TIMEOUT_S
from specmamba.transfer.peer_link import LinkError, PeerLink

HANDSHAKE_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 30.0
_SIGNATURE_CHARACTERS = 64


class SignedMessages(Messages):
    """``Messages`` over a connection whose two sides have proven the key to each other."""

    def __init__(self, link: PeerLink) -> None:
        """Take over the connection of a link."""
        connection, self._signer = link.handed_over()
        connection.settimeout(None)
        # no TCP_USER_TIMEOUT: a server without requests reads nothing, which must not end the connection
        for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 2)):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        super().__init__(connection)

    def _sealed(self, line: bytes) -> bytes:
        return self._signer.of_sent(line).hex().encode() + line

    def _opened(self, line: bytes) -> bytes:
        signature, line = line[:_SIGNATURE_CHARACTERS], line[_SIGNATURE_CHARACTERS:]
        if not hmac.compare_digest(signature, self._signer.of_received(line + b"\n").hex().encode()):
            raise ValueError("a message is not what the other side has sent")
        return line


def connect(host: str, port: int, key: bytes) -> SignedMessages:
    """Connect to a server's address, and prove the key to it. Raises OSError: it is not reached, or has another key."""
    try:
        return SignedMessages(PeerLink.connect(host, port, key, time.monotonic() + CONNECT_TIMEOUT_S))
    except LinkError as error:
        raise OSError(f"the server at {host}:{port}: {error.reason}") from None


def accept(listener: socket.socket, key: bytes) -> SignedMessages | None:
    """Take a connection, as long as the listener's time-out is; None: it is not that of a side that knows the key.

    What is sent then fails after ``SEND_TIMEOUT_S``. Raises TimeoutError: there is none.
    """
    connection, _ = listener.accept()
    try:
        link = PeerLink.accept(connection, key, time.monotonic() + HANDSHAKE_TIMEOUT_S)
        messages = SignedMessages(link)
        messages.limit_sends(SEND_TIMEOUT_S)
    except (LinkError, OSError):
        with suppress(OSError):
            connection.close()
        return None
    return messages
