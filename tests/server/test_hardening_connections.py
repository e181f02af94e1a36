"""Clients that send slowly, read slowly, open many connections or send no HTTP: only their connection is affected."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPResponse
from typing import Any

import pytest

from specmamba.server.http.connection_table import Activity, ConnectionTable
from tests.fake_engine import FakeEngine, Served, WaitingEngine, serving, wait_until

LONG_TEXT = "x" * (1 << 18)  # more than the kernel buffers for a client that does not read, with ``narrow``
GOOD = {"prompt": "x", "max_tokens": 2}
LONG = {"prompt": "x", "max_tokens": 8}  # more than the first step of WaitingEngine gives
CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(read_timeout=0.3, write_timeout=0.4, max_connections=12) as server:
        yield server
        wait_until(lambda: not server.engine.running)


@contextmanager
def client(served: Served, receive_buffer: int | None = None) -> Iterator[socket.socket]:
    address = (served.http.base_url.host, served.http.base_url.port)
    with socket.socket() as connection:
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(60)
        connection.connect(address)
        yield connection


@contextmanager
def narrow(engine_class: type[FakeEngine] = FakeEngine, **settings: Any) -> Iterator[Served]:
    """A server with a long answer, and connections with small buffers."""
    engine = engine_class(text=LONG_TEXT, chunk=1 << 12, context_length=len(LONG_TEXT) + 64)
    with serving(engine, **settings) as served:
        served.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        yield served


def post(body: object, path: str = "/v1/completions", headers: str = "") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    return f"{head}{headers}\r\n".encode() + data


def read_all(connection: socket.socket) -> bytes:
    """Read until the server closes; a reset counts as an end."""
    data = b""
    try:
        while piece := connection.recv(65536):
            data += piece
    except ConnectionResetError:
        pass
    return data


def status_of_next(connection: socket.socket) -> int:
    """Read one whole answer from a connection that stays open."""
    answer = HTTPResponse(connection)
    answer.begin()
    answer.read()
    return answer.status


def error_of(answer: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"Content-Type: application/json" in head
    return int(head.split()[1]), json.loads(body)["error"]


def num_connections(served: Served) -> int:
    return len(served.server.server_state.connections)


def is_answering(served: Served) -> bool:
    with client(served) as fresh:
        fresh.sendall(post(GOOD))
        return status_of_next(fresh) == 200


@pytest.fixture(autouse=True)
def _everything_comes_back(served: Served) -> Iterator[None]:
    yield
    wait_until(lambda: num_connections(served) == 0)
    config: Any = served.server.config
    assert not config.lingering
    assert not served.engine.running
    assert is_answering(served)


# ---- slow to send ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", [post({"prompt": "x"})[:40], post({"prompt": "x" * 200})[:-100]])
def test_a_request_that_trickles_in_gets_a_408(served: Served, pieces: bytes) -> None:
    with client(served) as slow:
        stop = threading.Event()

        def trickle() -> None:
            slow.sendall(pieces)
            while not stop.wait(0.05):
                try:
                    slow.sendall(b"a")
                except OSError:
                    return

        thread = threading.Thread(target=trickle)
        thread.start()
        answer = read_all(slow)
        stop.set()
        thread.join()
    assert error_of(answer) == (
        408,
        {
            "message": "the request was not complete after 0.3 s (--read-timeout)",
            "type": "invalid_request_error",
            "param": None,
            "code": "read_timeout",
        },
    )


def test_a_connection_without_a_request_is_closed_without_an_answer(served: Served) -> None:
    with client(served) as silent:
        assert read_all(silent) == b""


def test_the_time_of_a_request_begins_with_its_first_byte(served: Served) -> None:
    """A connection may be idle for longer than a request may take, and each request has the full time."""
    with client(served) as patient:
        for idle_s in (0.0, 0.2, 0.2):  # none before the first: a connection without a request is closed
            time.sleep(idle_s)
            patient.sendall(post({"prompt": "x", "max_tokens": 1}))
            assert status_of_next(patient) == 200
        time.sleep(0.5)
        patient.sendall(post({"prompt": "x", "max_tokens": 1}))
        assert status_of_next(patient) == 200


def test_an_answer_may_take_longer_than_its_request() -> None:
    with serving(FakeEngine(step_s=0.05), read_timeout=0.2) as slow_engine, client(slow_engine) as waiting:
        waiting.sendall(post({"prompt": "x", "max_tokens": 20}))  # in one piece: its parts cannot be apart for so long
        assert status_of_next(waiting) == 200


def test_a_refused_body_that_never_ends_is_cut_off(served: Served) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\nContent-Length: 9999\r\n\r\n"
    with client(served) as endless:
        endless.sendall(head + b"x")
        answer = read_all(endless)
    assert answer.startswith(b"HTTP/1.1 415")
    assert answer.count(b"HTTP/1.1") == 1


def test_a_pipelined_request_has_its_own_time(served: Served) -> None:
    with client(served) as eager:
        eager.sendall(post({"prompt": "x", "max_tokens": 1}) + post({"prompt": "x"})[:50])
        answer = read_all(eager)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"HTTP/1.1 408" in answer


# ---- slow to read ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_stops_reading_is_dropped(stream: bool) -> None:
    with narrow(write_timeout=0.3) as served, client(served, receive_buffer=4096) as stuck:
        stuck.sendall(post({"prompt": "x", "max_tokens": len(LONG_TEXT), "stream": stream}))
        wait_until(lambda: served.engine.seen_params)
        assert is_answering(served)
        wait_until(lambda: num_connections(served) == 0)  # although the client has not closed it
        assert 0 < len(read_all(stuck)) < len(LONG_TEXT)
        wait_until(lambda: not served.engine.running)


def test_a_client_that_reads_slowly_and_steadily_gets_all() -> None:
    with narrow(write_timeout=3) as served, client(served, receive_buffer=4096) as slow:
        slow.sendall(post({"prompt": "x", "max_tokens": len(LONG_TEXT)}, headers="Connection: close\r\n"))
        data, num_rests = b"", 0
        while piece := slow.recv(1 << 16):
            data += piece
            if len(data) > num_rests << 15:
                num_rests += 1
                time.sleep(0.5)
        assert num_rests * 0.5 > 3
        assert json.loads(data.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == LONG_TEXT


def test_events_that_a_slow_reader_has_not_read_are_merged() -> None:
    """The first delta is an event; all that arrive while a client does not read are one event."""
    with narrow(WaitingEngine, write_timeout=5) as served, client(served, receive_buffer=4096) as slow:
        body = {"prompt": "x", "max_tokens": len(LONG_TEXT), "stream": True}
        slow.sendall(post(body, headers="Connection: close\r\n"))
        wait_until(lambda: b"data: {" in slow.recv(4096, socket.MSG_PEEK))
        served.engine.may_go_on.set()
        wait_until(lambda: served.engine.num_steps == len(LONG_TEXT) >> 12)
        answer = read_all(slow)
    events = [line for line in answer.split(b"\n") if line.startswith(b"data: {")]
    assert 1 < len(events) < served.engine.num_steps
    assert sum(len(json.loads(event[6:])["choices"][0]["text"]) for event in events) == len(LONG_TEXT)


# ---- crowds ----------------------------------------------------------------------------------------------------------


def test_one_connection_too_many_gets_a_503_if_all_others_are_answered() -> None:
    with (
        serving(WaitingEngine(), max_connections=2, max_connections_per_address=2) as served,
        client(served) as first,
        client(served) as second,
    ):
        for busy in (first, second):
            busy.sendall(post(LONG))
        wait_until(lambda: [own.is_answering for own in [*served.server.server_state.connections]] == [True, True])
        for _ in range(3):
            with client(served) as third:
                third.sendall(post({"prompt": "x"}))
                status, error = error_of(read_all(third))
                assert (status, error["code"]) == (503, "too_many_connections")
        served.engine.may_go_on.set()
        assert [status_of_next(busy) for busy in (first, second)] == [200, 200]
        assert is_answering(served)  # an idle one has given way


@pytest.mark.parametrize("share", [None, 16])
def test_connections_that_are_idle_give_way(share: int | None) -> None:
    with serving(max_connections=16, max_connections_per_address=share) as served, ExitStack() as stack:
        idle = [stack.enter_context(client(served)) for _ in range(16)]
        wait_until(lambda: num_connections(served) == (share or 12))
        assert is_answering(served)
        for closed in idle[: 16 - (share or 12) + 1]:  # the oldest
            assert read_all(closed) == b""
        idle[-1].sendall(post(GOOD))
        assert status_of_next(idle[-1]) == 200


def test_silent_connections_give_way_before_halves_of_requests() -> None:
    with serving(max_connections=3, max_connections_per_address=3) as served, ExitStack() as stack:
        half, silent, other = (stack.enter_context(client(served)) for _ in range(3))
        for connection in (half, other):
            connection.sendall(post(GOOD)[:30])
        connections: Any = served.server.server_state.connections
        wait_until(lambda: sorted(own.has_half_a_request for own in [*connections]) == [False, True, True])
        fresh = stack.enter_context(client(served))
        assert read_all(silent) == b""
        fresh.sendall(post(GOOD)[:30])
        wait_until(lambda: [own.has_half_a_request for own in [*connections]] == [True, True, True])
        assert is_answering(served)
        status, error = error_of(read_all(half))
        assert (status, error["code"]) == (503, "too_many_connections")
        other.sendall(post(GOOD)[30:])
        assert status_of_next(other) == 200


def test_an_answer_that_is_not_read_yet_keeps_its_connection() -> None:
    with narrow(write_timeout=5, max_connections=1) as served, client(served, receive_buffer=4096) as slow:
        slow.sendall(post({"prompt": "x", "max_tokens": len(LONG_TEXT)}, headers="Connection: close\r\n"))
        wait_until(lambda: any(own.flow.write_paused for own in [*served.server.server_state.connections]))
        with client(served) as late:
            assert error_of(read_all(late))[0] == 503
        assert LONG_TEXT.encode() in read_all(slow)


def test_many_connections_are_refused_and_leave_nothing_behind(served: Served) -> None:
    with ExitStack() as stack:
        for _ in range(150):
            stack.enter_context(client(served))
        config: Any = served.server.config
        wait_until(lambda: num_connections(served) == config.limits.max_per_address == len(config.table) == 9)
    wait_until(lambda: len(config.table) == 0)


class Member:
    def __init__(self) -> None:
        self.is_open = True

    def close(self) -> None:
        self.is_open = False


def test_a_crowded_address_gives_way_to_others() -> None:
    table: ConnectionTable[Member] = ConnectionTable(8, 6, Member.close)
    crowd, others = [Member() for _ in range(20)], [Member() for _ in range(7)]
    assert all(table.add(member, "10.0.0.1") for member in crowd)
    assert [member.is_open for member in crowd] == [False] * 14 + [True] * 6
    assert all(table.add(member, f"10.0.0.{place}") for place, member in enumerate(others, 2))
    assert [member.is_open for member in crowd] == [False] * 19 + [True]
    assert all(member.is_open for member in others)
    assert len(table) == 8
    table.note(crowd[-1], Activity.BUSY)
    for member in others[:-1]:
        table.note(member, Activity.BUSY)
    late = Member()
    assert table.add(late, "10.0.0.1")
    assert not others[-1].is_open
    table.note(late, Activity.BUSY)
    assert not table.add(Member(), "10.0.0.99")
    for member in [*crowd, *others, late]:
        table.remove(member)
        table.note(member, Activity.HALF)  # has no place: nothing happens
    assert len(table) == 0


@pytest.mark.parametrize(
    ("first", "second", "are_one"),
    [
        ("2001:db8::1", "2001:db8::2", True),  # one network of a client
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
        ("10.0.0.1", "10.0.0.2", False),
        (None, None, True),
        ("fe80::1%eth0", "fe80::2%eth0", True),
    ],
)
def test_which_addresses_share_places(first: str | None, second: str | None, are_one: bool) -> None:
    table: ConnectionTable[Member] = ConnectionTable(8, 1, Member.close)
    table.add(one := Member(), first)
    table.add(Member(), second)
    assert one.is_open is not are_one


# ---- broken connections ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_closed_or_reset_connection_frees_the_engine(how: str, stream: bool) -> None:
    """Also while nothing is written to it: the engine of the whole answer waits."""
    with serving(FakeEngine(step_s=0.02, chunk=1) if stream else WaitingEngine()) as served:
        with client(served) as leaving:
            leaving.sendall(post({"prompt": "x", "max_tokens": 70, "stream": stream}))
            wait_until(lambda: served.engine.running)
            if how == "reset":
                leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            leaving.close()
            wait_until(lambda: num_connections(served) == 0)
        if not stream:
            served.engine.may_go_on.set()  # the abort runs between two steps
        wait_until(lambda: served.engine.aborted)


@pytest.mark.parametrize("stream", [False, True])
def test_a_half_closed_connection_gets_its_whole_answer(stream: bool) -> None:
    with serving(WaitingEngine()) as served, client(served) as patient:
        patient.sendall(post({"prompt": "x", "max_tokens": 5, "stream": stream}))
        patient.shutdown(socket.SHUT_WR)
        connections: Any = served.server.server_state.connections
        wait_until(lambda: any(own._has_eof for own in [*connections]))
        served.engine.may_go_on.set()
        interim, _, answer = read_all(patient).rpartition(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert interim.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"") == b""
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") is stream
    assert (b'"completion_tokens":5' in answer) is not stream
    assert not served.engine.aborted


def test_a_half_closed_connection_gets_the_answers_to_all_whole_requests() -> None:
    with serving(FakeEngine(step_s=0.01)) as served:
        for rest, expected in ((b"", [200] * 3), (post(GOOD)[:-3], [200] * 3), (b"hello\r\n\r\n", [200] * 3 + [400])):
            with client(served) as eager:
                eager.sendall(post(GOOD) * 3 + rest)
                eager.shutdown(socket.SHUT_WR)
                answers = read_all(eager).split(b"HTTP/1.1 ")[1:]
            assert [int(answer[:3]) for answer in answers if not answer.startswith(b"100")] == expected


@pytest.mark.parametrize("data", [b"", b"GET /health HT", post(GOOD)[:-3], post(GOOD).replace(b"1.1", b"1.0")])
def test_an_end_without_a_whole_request_closes_the_connection(data: bytes) -> None:
    with serving(WaitingEngine(), read_timeout=60) as served, client(served) as leaving:
        leaving.sendall(data)
        leaving.shutdown(socket.SHUT_WR)
        assert read_all(leaving) == b""
        served.engine.may_go_on.set()


def test_clients_that_connect_and_close_leave_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with serving(WaitingEngine(), max_connections=1) as served, client(served) as busy:
        busy.sendall(post(LONG))
        wait_until(lambda: any(own.is_answering for own in [*served.server.server_state.connections]))
        refused: Any = served.server.config
        for is_reset in [False, True] * 32:
            with client(served) as gone:
                gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", is_reset, 0))
        wait_until(lambda: num_connections(served) == 1 and not refused.lingering)
        served.engine.may_go_on.set()
        assert status_of_next(busy) == 200
    assert caplog.text == ""


@pytest.mark.parametrize("length", [20, -5])
def test_an_incomplete_request_gets_an_error_when_the_server_ends(
    length: int, caplog: pytest.LogCaptureFixture
) -> None:
    with serving() as served, client(served) as slow, client(served) as silent:
        slow.sendall(post(GOOD)[:length])
        connections: Any = served.server.server_state.connections
        wait_until(lambda: sorted(own.has_half_a_request for own in [*connections]) == [False, True])
        served.thread.drain(0.0)
        status, error = error_of(read_all(slow))
        assert (status, error["code"]) == (503, "engine_stopped")
        assert read_all(silent) == b""
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),  # TLS
        (b"hello\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),  # no Host
        (b"GET /health HTTP/1.1\r\nHost: x\r\nBad Header: 1\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
        (b"GET /" + b"a" * 40_000, 431),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 40_000, 431),
        (b"GET /health HTTP/1.1\r\n" + b"A: b\r\n" * 10_000, 431),
        (CHUNKED + b"zz\r\n", 400),
        pytest.param(b"\r\n" * 33, 400, id="empty lines"),
        pytest.param(b"\n" * 100_000, 400, id="many empty lines"),
        pytest.param(b"\r" * 65 + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", 400, id="empty lines and a request"),
    ],
)
def test_invalid_http_is_answered_and_the_connection_closed(served: Served, data: bytes, status: int) -> None:
    with client(served) as odd:
        odd.sendall(data)
        answered, error = error_of(read_all(odd))
    assert (answered, error["code"]) == (status, "invalid_http")


def test_a_few_empty_lines_before_a_request_are_skipped(served: Served) -> None:
    with client(served) as old:
        for _ in range(3):
            old.sendall(b"\r\n" * 16)
            time.sleep(0.01)
            old.sendall(b"\r\n" * 16 + post(GOOD))
            assert status_of_next(old) == 200


def test_pipelined_requests_are_answered_in_turn(served: Served) -> None:
    with client(served) as eager:
        eager.sendall(b"".join(post({"prompt": "x", "max_tokens": n}) for n in (1, 2, 3)) + b"garbage\r\n\r\n")
        answers = read_all(eager).split(b"HTTP/1.1 ")[1:]
    assert [answer[:3] for answer in answers] == [b"200", b"200", b"200", b"400"]
    counts = [json.loads(answer.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] for answer in answers[:3]]
    assert counts == [1, 2, 3]
