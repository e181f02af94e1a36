"""The address of a server. Nothing heavy is imported, so that a port in use is reported at once."""

from __future__ import annotations

import ipaddress
import socket

from specmamba.errors import ConfigError

# The kernel buffers at most this for a client that does not read; by default it may be megabytes.
_SEND_BUFFER_BYTES = 128 << 10
_BACKLOG = 2048  # connections that wait to be accepted, also while the model loads


def listen(host: str, port: int, flag: str = "--port") -> socket.socket:
    """A socket that listens on an address; ``flag`` gives the port. Connections wait until they are accepted.

    It must listen and not only be bound: two servers can bind the same port as long as neither listens.

    Raises:
        ConfigError: the host cannot be resolved, or the address is in use or not allowed.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"--host: cannot resolve {host!r}: {error.strerror}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)  # its connections inherit it
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"--host, {flag}: cannot listen on {host}:{port}: {error.strerror}") from None
    return listener


def url_of(listener: socket.socket) -> str:
    """The URL at which a listening socket is reached."""
    return http_url(*listener.getsockname()[:2])


def http_url(host: str, port: int) -> str:
    """The address of an HTTP server; ``host``: a name, or an address of either kind."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_reached_from_outside(listener: socket.socket) -> bool:
    """Whether other machines may reach a listening socket."""
    return not ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback
