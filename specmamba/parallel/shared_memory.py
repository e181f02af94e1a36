"""Memory that the ranks of one machine share, for exchanges on its CPU.

It has no name in any file system: rank 0 makes it and hands a descriptor of it to every other rank, over a socket that
only processes of the same user reach (``messages.py``). The system frees it when the last rank has ended, however that
was. The sockets stay open; one that closes says that a rank has ended.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress

import torch
from torch import Tensor

from specmamba.kernels import exchange
from specmamba.kernels.exchange import Exchange
from specmamba.parallel.messages import connected, listen, peer_process

logger = logging.getLogger("specmamba")

MEETING_TIMEOUT_S = 60.0
_TOKEN_BYTES = 16
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if hasattr(fcntl, "F_SEAL_SEAL") else 0


class SharedMemory:
    """The exchanges of one rank, and what keeps them going."""

    def __init__(self, exchange: Exchange, sockets: ExitStack) -> None:
        """``sockets``: the connections with other ranks, closed with this."""
        self.exchange, self._sockets = exchange, sockets

    def close(self) -> None:
        """Leave. A second call does nothing."""
        self.exchange.close()
        self._sockets.close()


def share(
    rank: int, size: int, broadcast: Callable[[Tensor], Tensor], smallest: Callable[[int], int]
) -> SharedMemory | None:
    """Meet the other ranks of a machine in memory; None on all ranks where one of them cannot.

    Args:
        rank, size: as for ``Ranks``.
        broadcast, smallest: exchanges of another kind between the same ranks.
    """
    if not smallest(int(exchange.is_available() and exchange.num_bytes(size) > 0)):
        return None
    sockets, made = ExitStack(), None
    token = torch.zeros(_TOKEN_BYTES, dtype=torch.uint8)
    try:
        if rank == 0:
            made = _first(size, token, broadcast, sockets)
        else:
            made = _other(rank, size, bytes(broadcast(token).tolist()), sockets)
    except (OSError, ValueError) as error:
        logger.warning("ranks exchange over sockets: their memory cannot be shared: %s", error)
    if smallest(int(made is not None)):
        assert made is not None
        return SharedMemory(made, sockets)
    if made is not None:
        made.close()
    sockets.close()
    return None


def _first(size: int, token: Tensor, broadcast: Callable[[Tensor], Tensor], sockets: ExitStack) -> Exchange:
    """Make the memory, and give it to the others. Whatever fails, all of them are told the name to meet at."""
    given = secrets.token_bytes(_TOKEN_BYTES)
    with ExitStack() as meeting:
        try:
            server = meeting.enter_context(listen(_name(given), size))
        finally:
            broadcast(token.copy_(torch.frombuffer(bytearray(given), dtype=torch.uint8)))
        file = _memory(exchange.num_bytes(size))
        meeting.callback(os.close, file)
        server.settimeout(MEETING_TIMEOUT_S)
        links = list[int]()
        while len(links) < size - 1:
            connection, _ = server.accept()
            try:
                peer_process(connection)
            except PermissionError:
                connection.close()
                continue
            sockets.enter_context(connection)
            socket.send_fds(connection, [b"\0"], [file])
            links.append(connection.fileno())
        return Exchange(file, 0, size, links)


def _other(rank: int, size: int, token: bytes, sockets: ExitStack) -> Exchange:
    """Get the memory of rank 0."""
    connection = sockets.enter_context(connected(_name(token)))
    connection.settimeout(MEETING_TIMEOUT_S)
    _, files, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if not files:
        raise OSError("rank 0 gave none")
    try:
        return Exchange(files[0], rank, size, [connection.fileno()])
    finally:
        os.close(files[0])


def _memory(num_bytes: int) -> int:
    """A descriptor of memory of this size, all of it there, which no other user opens and no process makes smaller."""
    file = os.memfd_create("specmamba-ranks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(file, 0o600)
        os.posix_fallocate(file, 0, num_bytes)  # so that no exchange ends a process because memory is short
        with suppress(OSError):
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(file)
        raise
    return file


def _name(token: bytes) -> str:
    return f"specmamba-ranks-{token.hex()}"
