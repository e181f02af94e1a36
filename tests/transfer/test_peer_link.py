"""Links between servers: nothing is told to those who do not know the key, and nothing that is forged is believed."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from specmamba.transfer.peer_link import GREETING, NONCE_BYTES, PROOF_BYTES, LinkError, PeerLink
from specmamba.transfer.wanted import Wanted

KEY = b"the key of both"


@contextmanager
def links(timeout_s: float = 60.0) -> Iterator[tuple[PeerLink, PeerLink]]:
    """The two ends of a link: of the side that has connected, and of the other one."""
    found: list[PeerLink] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        deadline = time.monotonic() + timeout_s
        thread = threading.Thread(
            target=lambda: found.append(PeerLink.accept(listener.accept()[0], KEY, deadline)), daemon=True
        )
        thread.start()
        client = PeerLink.connect("127.0.0.1", listener.getsockname()[1], KEY, deadline)
        thread.join(60)
    try:
        yield client, found[0]
    finally:
        client.close()
        found[0].close()


def reason_of(function: Callable[[], object]) -> str:
    with pytest.raises(LinkError) as error:
        function()
    return error.value.reason


def test_messages_arrive_in_both_directions() -> None:
    with links() as (client, server):
        for number in range(3):
            client.send({"number": number})
            server.send({"back": [number, None, "ä"]})
            assert server.receive() == {"number": number}
            assert client.receive() == {"back": [number, None, "ä"]}


def test_messages_that_are_repeated_turned_back_or_too_long_are_refused() -> None:
    sent: list[bytes] = []
    with links() as (client, server):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(client, "write", sent.append)
            client.send({"do": "abort"})
        client.write(sent[0] * 2)
        assert server.receive() == {"do": "abort"}
        assert reason_of(server.receive) == "damaged"
    with links() as (client, server):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(client, "write", sent.append)
            client.send({"do": "abort"})
        server.write(sent[-1])  # what one side has signed is nothing that the other one may say
        assert reason_of(client.receive) == "damaged"
    with links() as (client, server):
        client.write((1 << 30).to_bytes(4, "little"))
        assert reason_of(server.receive) == "damaged"


@pytest.mark.parametrize("message", [[1], "a", {"room": 1}, {"room": "1", "text": "", "layout": "", "start": 0}])
def test_what_is_no_question_is_refused(message: Any) -> None:
    with links() as (client, server):
        client.send(message)
        assert reason_of(lambda: Wanted.of(server.receive())) == "damaged"


def test_the_side_that_is_connected_to_says_nothing_before_the_key_is_proven() -> None:
    found: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            connection = listener.accept()[0]
            with connection:
                found.append(reason_of(lambda: PeerLink.accept(connection, KEY, time.monotonic() + 60)))

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        with socket.create_connection(listener.getsockname()) as connection:
            connection.sendall(bytes(NONCE_BYTES + PROOF_BYTES))
            received = b""
            while data := connection.recv(1024):
                received += data
        thread.join(60)
    assert (found, len(received)) == (["refused"], len(GREETING) + NONCE_BYTES)


def test_a_server_that_cannot_prove_the_key_is_not_asked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend() -> None:
            with listener.accept()[0] as connection:
                connection.sendall(GREETING + bytes(NONCE_BYTES))
                connection.recv(1024)
                connection.sendall(bytes(PROOF_BYTES))

        thread = threading.Thread(target=pretend, daemon=True)
        thread.start()
        port = listener.getsockname()[1]
        assert reason_of(lambda: PeerLink.connect("127.0.0.1", port, KEY, time.monotonic() + 60)) == "refused"
        thread.join(60)


def test_each_read_ends_at_the_deadline_however_slowly_bytes_come() -> None:
    with links() as (client, server):
        stop = threading.Event()

        def drip() -> None:
            while not stop.wait(0.02):
                try:
                    client.write(b"\1")
                except LinkError:
                    return

        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        server.deadline = time.monotonic() + 0.3
        assert reason_of(lambda: server.read(1000)) == "slow"
        stop.set()
        thread.join(60)


def test_a_thread_that_reads_is_freed_by_a_hang_up() -> None:
    with links() as (client, _):
        found: list[str] = []
        thread = threading.Thread(target=lambda: found.append(reason_of(client.receive)), daemon=True)
        thread.start()
        client.hang_up()
        thread.join(60)
    assert found == ["cut"]


def test_every_connection_has_another_key() -> None:
    with links() as (first, _), links() as (second, _):
        assert first._signer._key != second._signer._key
