"""Requests as bytes on a connection: cut into pieces, pipelined, and invalid."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from typing import Any

import pytest

from tests.fake_engine import FakeEngine, Served, serving, wait_until

GOOD = {"prompt": "x", "max_tokens": 2}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
CLOSE = b"Connection: close\r\n"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(read_timeout=5, max_request_bytes=1 << 20) as server:
        yield server
        wait_until(lambda: not server.engine.running and not server.server.server_state.connections)


@contextmanager
def client(served: Served) -> Iterator[socket.socket]:
    with socket.create_connection((served.http.base_url.host, served.http.base_url.port), timeout=60) as connection:
        yield connection


def post(body: object, headers: bytes = b"") -> bytes:
    data = json.dumps(body).encode()
    return HEAD + headers + b"Content-Length: %d\r\n\r\n" % len(data) + data


def answer_of(connection: socket.socket) -> tuple[int, Any]:
    answer = HTTPResponse(connection)
    answer.begin()
    return answer.status, json.loads(answer.read())


def read_all(connection: socket.socket) -> bytes:
    data = b""
    while piece := connection.recv(65536):
        data += piece
    return data


def statuses(data: bytes) -> list[int]:
    return [int(part[:3]) for part in data.split(b"HTTP/1.1 ")[1:]]


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_a_request_may_come_in_any_pieces(served: Served, step: int) -> None:
    data = post(GOOD)
    with client(served) as slow:
        slow.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for place in range(0, len(data), step):
            slow.sendall(data[place : place + step])
        assert answer_of(slow)[0] == 200


def test_a_long_body_comes_through_whole(served: Served) -> None:
    with client(served) as long:
        for size in (1 << 10, 1 << 16, 900_000):
            long.sendall(post({"prompt": "x" * size}))
            status, answer = answer_of(long)
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        long.sendall(post({"prompt": "x" * (1 << 20)}))
        assert answer_of(long)[0] == 413


def test_a_body_in_chunks(served: Served) -> None:
    data = json.dumps(GOOD).encode()
    chunks = b"".join(b"1;note=y\r\n%c\r\n" % byte for byte in data)
    with client(served) as chunked:
        for trailer in (b"", b"Host: evil\r\nX-More: 1\r\n"):
            chunked.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n" + trailer + b"\r\n")
            assert answer_of(chunked)[0] == 200


@pytest.mark.parametrize("endless", [b"0\r\nX: " + b"a" * 40_000, b"1;" + b"a" * 40_000, b"0\r\n" + b"A: b\r\n" * 9000])
def test_the_framing_of_a_chunked_body_is_limited(served: Served, endless: bytes) -> None:
    with client(served) as odd:
        odd.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n" + endless)
        assert statuses(read_all(odd)) == [431]


@pytest.mark.parametrize(
    "data",
    [
        b"GET /health HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
        b"GET /health HTTP/2.0\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\nHost: x\n\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n",
        HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
        HEAD + b"Content-Length: 0x2\r\n\r\n{}",
        b"GET /health HTTP/1.1\r\nHost: x\r\nA: b\0c\r\n\r\n",
    ],
)
def test_ambiguous_requests_are_refused(served: Served, data: bytes) -> None:
    with client(served) as odd:
        odd.sendall(data)
        assert statuses(read_all(odd)) == [400]


def test_other_codings_are_refused(served: Served) -> None:
    for coding in (b"chunked, gzip", b"gzip, chunked", b"identity"):
        with client(served) as odd:
            odd.sendall(HEAD + b"Transfer-Encoding: " + coding + b"\r\n\r\n")
            assert statuses(read_all(odd))[0] in (400, 501)


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
def test_requests_to_upgrade_are_ignored(served: Served, protocol: bytes) -> None:
    wish = b"Connection: Upgrade\r\nUpgrade: " + protocol + b"\r\n"
    with client(served) as hopeful:
        hopeful.sendall(post(GOOD, wish) + GET[:-2] + wish + b"\r\n" + post(GOOD, CLOSE))
        answer = read_all(hopeful)
    assert statuses(answer) == [200, 200, 200]
    assert answer.count(b"text_completion") == 2


def test_old_clients_are_answered_once(served: Served) -> None:
    with client(served) as old:
        old.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert statuses(read_all(old)) == [200]


def test_many_requests_at_once_are_answered_in_turn(served: Served) -> None:
    counts = [1 + number % 5 for number in range(60)]
    with client(served) as eager:
        eager.sendall(
            b"".join(post({"prompt": "x", "max_tokens": count}) for count in counts) + GET[:-2] + CLOSE + b"\r\n"
        )
        answer = read_all(eager)
    assert statuses(answer) == [200] * 61
    assert [int(count) for count in re.findall(rb'"completion_tokens":(\d+)', answer)] == counts


def test_pipelined_requests_are_not_parsed_before_their_turn() -> None:
    with serving(FakeEngine(step_s=0.05)) as served, client(served) as eager:
        eager.sendall(post(GOOD | {"max_tokens": 60}) + GET * 1000 + GET[:-2] + CLOSE + b"\r\n")
        wait_until(lambda: served.engine.running)
        (connection,) = served.server.server_state.connections
        assert len(connection.pipeline) < 100
        assert statuses(read_all(eager)) == [200] * 1002


def test_an_invalid_request_is_answered_after_the_requests_before_it() -> None:
    broken = HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}"
    with serving(FakeEngine(step_s=0.02, chunk=1)) as served:
        for stream in (False, True):
            for rest in (broken, b"hello\r\n\r\n", b"GET /" + b"a" * 40_000):
                with client(served) as odd:
                    odd.sendall(post(GOOD | {"stream": stream}) + rest)
                    odd.sendall(b"more")
                    answer = read_all(odd)
                assert statuses(answer) == [200, 431 if len(rest) > 40_000 else 400]
                assert (b"[DONE]" in answer) is stream


def test_many_answers_on_one_connection(served: Served) -> None:
    """Whole and streamed; each request is sent as soon as the last byte of the previous answer arrives."""
    with client(served) as busy:
        for number in range(200):
            body = GOOD | {"stream": number % 2 == 0}
            busy.sendall(post(body))
            answer = HTTPResponse(busy)
            answer.begin()
            data = answer.read()
            assert answer.status == 200
            assert data.endswith(b"data: [DONE]\n\n") is body["stream"]


@pytest.mark.parametrize("first_is_refused", [False, True])
def test_a_request_behind_a_body_in_chunks_may_be_cut_anywhere(served: Served, first_is_refused: bool) -> None:
    body = b"[]" if first_is_refused else json.dumps(GOOD).encode()
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(body[i : i + 5]), body[i : i + 5]) for i in range(0, len(body), 5))
    data = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n" + post(GOOD, CLOSE)
    for cut in range(len(HEAD), len(data), 3):
        with client(served) as both:
            both.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            both.sendall(data[:cut])
            time.sleep(0.001)
            both.sendall(data[cut:])
            assert statuses(read_all(both)) == [400 if first_is_refused else 200, 200]
