"""Random hostile requests to a server with the demo model: every one is answered, and none leaves anything behind."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection, HTTPResponse
from typing import Any

import pytest

from specmamba.config import EngineConfig
from specmamba.engine.engine import Engine
from tests.engine.test_engine import assert_idle
from tests.fake_engine import Served, serving, wait_until
from tests.pairwise import IS_FULL
from tests.server.fuzz.requests import FuzzedRequest, fuzzed_request

pytestmark = pytest.mark.slow

SEED, NUM_REQUESTS, NUM_CLIENTS = 0, 5000 if IS_FULL else 3000, 4
MAX_MESSAGE = 2000  # characters of an error's message
SETTINGS = EngineConfig(
    dtype="float32",
    num_threads=1,
    max_running_requests=4,
    max_total_tokens=2048,
    context_length=128,
    chunked_prefill_size=64,
)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(Engine(SETTINGS), grammar_timeout=1.0, max_request_bytes=1 << 18) as server:
        yield server


def no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def check_error(answer: Any) -> None:
    """Check an error's shape, and that it is no fault of the server's."""
    assert set(answer) == {"error"}
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert 0 < len(error["message"]) < MAX_MESSAGE
    assert error["type"] != "server_error"


def check_events(text: str) -> None:
    """Check a stream: events of JSON, an error at most as the last one before the end."""
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    for place, event in enumerate(events):
        content = json.loads(event, parse_constant=no_constant)
        if "error" in content:
            check_error(content)
            assert place == len(events) - 1


def check(request: FuzzedRequest, response: HTTPResponse) -> None:
    kind = response.headers.get_content_type()
    if request.target.startswith("/events") and response.status == 200:
        response.close()  # it does not end
        return
    text = response.read().decode()
    assert response.status < 500, text
    if request.method == "HEAD":
        return
    if kind == "text/event-stream":
        check_events(text)
    elif kind == "application/json":
        content = json.loads(text, parse_constant=no_constant)
        if response.status >= 400:
            check_error(content)
    else:
        assert response.status < 400, text


def send(connection: HTTPConnection, request: FuzzedRequest) -> HTTPResponse:
    connection.putrequest(request.method, request.target, skip_host="Host" in request.headers)
    for name, value in request.headers.items():
        connection.putheader(name, value.encode("latin1"))
    if request.body is not None:
        connection.putheader("Content-Length", str(len(request.body)))
    connection.endheaders(request.body)
    return connection.getresponse()


def client(served: Served, numbers: range) -> Counter[int]:
    """Send requests one after the other on a connection that is kept; counts of the statuses."""
    statuses: Counter[int] = Counter()
    with closing(HTTPConnection(served.http.base_url.host, served.http.base_url.port or 0, timeout=60)) as connection:
        for number in numbers:
            request = fuzzed_request(SEED, number)
            try:
                response = send(connection, request)
                statuses[response.status] += 1
                check(request, response)
            except Exception as error:
                shown = f"{request.method} {request.target[:500]} {request.headers} {(request.body or b'')[:2000]!r}"
                raise AssertionError(f"fuzzed_request({SEED}, {number}): {error!r}\n{shown}") from error
            if not response.isclosed() or request.target.startswith("/events"):
                connection.close()
    return statuses


@pytest.mark.long
def test_fields(served: Served, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    caplog.set_level(logging.INFO)
    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        parts = [range(start, NUM_REQUESTS, NUM_CLIENTS) for start in range(NUM_CLIENTS)]
        statuses = sum(clients.map(lambda part: client(served, part), parts), Counter[int]())
    assert statuses.total() == NUM_REQUESTS
    # Neither nearly all fine nor nearly all refused at once: else little was tested.
    assert min(statuses[200], statuses[400]) > NUM_REQUESTS // 8, statuses
    wait_until(lambda: not served.engine.has_unfinished_requests)
    served.wait_for_calls()
    served.thread.call(assert_idle).result(60)
    assert "Traceback" not in caplog.text + capfd.readouterr().err
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    answer = served.complete(prompt="import os\n", max_tokens=2).json()
    assert answer["usage"]["completion_tokens"] == 2
