"""The connection of a replica on another machine: who does not know the key says nothing, and no line is changed."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from specmamba.cluster import signed_messages
from specmamba.cluster.signed_messages import SignedMessages, accept, connect
from specmamba.parallel.messages import encoded

KEY = b"k" * 32
Pair = tuple[SignedMessages, SignedMessages]


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        opened.settimeout(60.0)
        yield opened


def address_of(listener: socket.socket) -> tuple[str, int]:
    host, port = listener.getsockname()
    return host, port


@pytest.fixture
def pair(listener: socket.socket) -> Iterator[Pair]:
    with ThreadPoolExecutor(1) as other:
        connecting = other.submit(connect, *address_of(listener), KEY)
        server = accept(listener, KEY)
        client = connecting.result(60)
    assert server is not None
    yield server, client
    server.close()
    client.close()


def test_messages_go_both_ways(pair: Pair) -> None:
    for number in range(3):
        for sender, receiver in (pair, pair[::-1]):
            sender.send({"text": "a\nb → c", "number": number})
            assert receiver.receive() == {"text": "a\nb → c", "number": number}


def test_all_that_has_arrived(pair: Pair) -> None:
    server, client = pair
    for number in range(20):
        client.send({"number": number, "long": "x" * 5000})
    client.close()
    found = [message["number"] for message in iter(server.receive, None)]
    assert found == list(range(20))


def sealed(sender: SignedMessages, number: int) -> bytes:
    return sender._sealed(encoded({"number": number}))


CHANGES: dict[str, Callable[[bytes, bytes], bytes]] = {
    "a letter": lambda first, second: first.replace(b"number", b"humber"),
    "another order": lambda first, second: second + first,
    "without signature": lambda first, second: first[64:],
    "empty": lambda first, second: b"\n",
}


@pytest.mark.parametrize("change", sorted(CHANGES))
def test_what_was_changed_is_refused(pair: Pair, change: str) -> None:
    server, client = pair
    lines = sealed(client, 1), sealed(client, 2)
    client._connection.sendall(CHANGES[change](*lines))
    with pytest.raises(ValueError, match="not what the other side has sent"):
        server.receive()


@pytest.mark.parametrize("back", [False, True])
def test_a_line_counts_once_and_in_one_direction(pair: Pair, back: bool) -> None:
    server, client = pair
    line = sealed(client, 1)
    client._connection.sendall(line)
    assert server.receive() == {"number": 1}
    receiver, sender = (client, server) if back else (server, client)
    sender._connection.sendall(line)
    with pytest.raises(ValueError, match="not what the other side has sent"):
        receiver.receive()


def test_another_key_is_refused_on_both_sides(listener: socket.socket) -> None:
    with ThreadPoolExecutor(1) as other:
        connecting = other.submit(connect, *address_of(listener), b"x" * 32)
        assert accept(listener, KEY) is None
        with pytest.raises(OSError, match="refused"):
            connecting.result(60)


def test_a_stranger_who_says_nothing_is_not_waited_for(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signed_messages, "HANDSHAKE_TIMEOUT_S", 0.2)
    with socket.create_connection(listener.getsockname()[:2]):
        assert accept(listener, KEY) is None
    listener.settimeout(0.1)
    with pytest.raises(TimeoutError):
        accept(listener, KEY)
