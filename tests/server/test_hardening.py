"""Hostile, broken and impatient requests: each gets a clear error and frees its resources; others are not affected."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from http.client import HTTPConnection
from typing import Any

import httpx
import pytest
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from specmamba.core import OutputDelta
from specmamba.server.http.guards import is_allowed_origin
from specmamba.server.http.limits import MAX_VALUES, LimitBody, LimitCalls, give_back_memory, too_many_values
from specmamba.server.observe.logs import TextFormatter
from tests.fake_engine import TEXT, FakeEngine, Served, serving, wait_until

GOOD = {"prompt": "x", "max_tokens": 2}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(max_request_bytes=1 << 20) as server:
        yield server
        wait_until(lambda: not server.engine.running)


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def events(response: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# ---- keys ------------------------------------------------------------------------------------------------------------


def test_each_of_several_keys_is_accepted_and_none_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    keys = ("first-secret", "second-secret")
    with serving(api_key=keys, log_level="debug") as served:
        answers = [served.http.get("/v1/models", headers=bearer(key)) for key in keys]
        assert [answer.status_code for answer in answers] == [200, 200]
        for wrong in ("first", "first-secret,second-secret", "first-secretsecond-secret"):
            response = served.http.get("/v1/models", headers=bearer(wrong))
            assert error_of(response, 401)["code"] == "invalid_api_key"
            answers.append(response)
        answers.append(served.http.post("/v1/completions", json=GOOD | {"model": 1}, headers=bearer(keys[0])))
        answers += [served.http.get(path, headers=bearer(keys[0])) for path in ("/server_info", "/metrics")]
        shown = "".join(answer.text + str(answer.headers) for answer in answers) + repr(vars(served.server.config))
    assert "-secret" not in shown.replace("first-secret,second", "") + caplog.text
    assert caplog.text


def test_no_query_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with serving(log_level="debug") as served:
        for path in ("/health?key=pineapple", "/health%3Fkey=pineapple", "/v1/models?api_key=pineapple#pineapple"):
            served.http.get(path)
        assert served.http.post("/v1/completions?key=pineapple", json={}).status_code == 400
        served.wait_for_calls()
    ours = [record for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    text = "".join(TextFormatter().format(record) for record in ours)
    assert "GET /health" in text
    assert "pineapple" not in text


def test_paths_that_need_no_key() -> None:
    with serving(api_key="k") as served:
        for path in ("/health", "/ready", "/metrics", "/ping", "/docs"):
            assert served.http.get(path).status_code == 200, path
        for path in ("/events", "/cache", "/v1/models", "/openapi.json", "/version", "/health/", "/page"):
            error_of(served.http.get(path), 401)


# ---- calls at a time -------------------------------------------------------------------------------------------------


def limiter_of(served: Served) -> LimitCalls:
    layer: Any = served.server.config.app.middleware_stack
    while not isinstance(layer, LimitCalls):
        layer = layer.app
    return layer


@pytest.mark.parametrize("api_key", [(), ("a", "b")])
@pytest.mark.parametrize("stream", [False, True])
def test_the_number_of_open_calls_is_limited(api_key: tuple[str, ...], stream: bool) -> None:
    own = bearer("a") if api_key else {}
    with serving(FakeEngine(step_s=0.02, chunk=1), max_calls_per_key=1, api_key=api_key) as served:
        assert served.http.get("/health").status_code == 200
        limiter = limiter_of(served)
        with httpx.Client(base_url=served.url) as leaving:
            with leaving.stream("POST", "/v1/completions", json=GOOD | {"max_tokens": 70, "stream": True}, headers=own):
                response = served.http.post("/v1/completions", json=GOOD | {"stream": stream}, headers=own)
                assert error_of(response, 429)["code"] == "too_many_calls"
                assert response.headers["retry-after"] == "1"
                for path in ("/tokenize", "/detokenize"):
                    assert error_of(served.http.post(path, json={}, headers=own), 429)["code"] == "too_many_calls"
                assert served.http.get("/v1/models", headers=own).status_code == 200
                if api_key:
                    other = served.http.post("/v1/completions", json=GOOD, headers=bearer("b"))
                    assert other.status_code == 200
        wait_until(lambda: not limiter.num_open)  # the client has disconnected in the middle
        body: dict[str, Any]
        for body in (GOOD, {"prompt": []}, GOOD | {"stream": stream}):
            status = served.http.post("/v1/completions", json=body, headers=own).status_code
            assert status == (400 if body == {"prompt": []} else 200)
            assert not limiter.num_open  # before the client can send its next call
        assert not served.engine.running


# ---- other origins ---------------------------------------------------------------------------------------------------


def test_pages_of_chosen_origins_may_use_the_api() -> None:
    good, bad = {"Origin": "https://a.example"}, {"Origin": "https://b.example"}
    asking = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    with serving(cors_allow_origins=("https://A.example",), api_key="k") as served:
        preflight = served.http.options("/v1/completions", headers=good | asking)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://a.example"
        assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
        for headers in (good, good | bearer("k")):  # a page must be able to read an error too
            answer = served.http.get("/v1/models", headers=headers)
            assert answer.headers["access-control-allow-origin"] == "https://a.example"
            assert "access-control-allow-credentials" not in answer.headers
        assert served.http.options("/v1/completions", headers=bad | asking).status_code == 403
        assert "access-control-allow-origin" not in served.http.get("/health", headers=bad).headers


def test_any_origin_only_when_asked_for() -> None:
    with serving(cors_allow_origins="*") as served:
        answer = served.http.get("/health", headers={"Origin": "https://b.example"})
        assert answer.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize(
    ("headers", "allowed", "verdict"),
    [
        ({}, (), True),
        ({"Origin": "http://host:1"}, (), True),
        ({"Origin": "https://HOST:1"}, (), True),  # behind a proxy that speaks TLS
        ({"Origin": "http://host:2"}, (), False),
        ({"Origin": "null"}, (), False),
        ({"Origin": ""}, (), False),
        ({"Origin": "http://"}, (), False),
        ({"Origin": "file://host:1"}, (), False),
        ({"Origin": "https://a.example"}, ("https://a.example",), True),
        ({"Origin": "https://a.example.evil"}, ("https://a.example",), False),
        ({"Origin": "https://b.example"}, ("*",), True),
    ],
)
def test_allowed_origins_of_changes(headers: dict[str, str], allowed: tuple[str, ...], verdict: bool) -> None:
    request = httpx.Request("POST", "http://host:1/flush_cache", headers=headers)
    from starlette.datastructures import Headers

    assert is_allowed_origin(Headers(request.headers), allowed) is verdict


# ---- time-outs -------------------------------------------------------------------------------------------------------


class HeldEngine(FakeEngine):
    """Takes no step before it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go_on = threading.Event()

    def step(self) -> list[OutputDelta]:
        self.may_go_on.wait(60)
        return super().step()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_waits_too_long(stream: bool) -> None:
    engine = HeldEngine()
    with serving(engine, queue_timeout=0.1) as served, ThreadPoolExecutor() as pool:
        first, second = [pool.submit(served.complete, **GOOD, stream=stream) for _ in range(2)]
        for answer in (first.result(), second.result()):  # one waits for its step, one to be taken at all
            if stream and answer.status_code == 200:
                error = events(answer)[-1]["error"]
            else:
                error = error_of(answer, 503)
                assert answer.headers["retry-after"] == "1"
            assert error["code"] == "queue_timeout"
            assert "--queue-timeout" in error["message"]
        engine.may_go_on.set()
        wait_until(lambda: not served.engine.running)
        wait_until(lambda: "requests_total" in served.http.get("/metrics").text)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_too_long(stream: bool) -> None:
    with serving(FakeEngine(step_s=0.1, chunk=1), request_timeout=1.5) as served:
        answer = served.complete(prompt=["x", "y"], max_tokens=70, stream=stream)
        if stream:
            *chunks, last = events(answer)
            text = "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"][0]["index"] == 0)
            assert text
            assert TEXT.startswith(text)
            error = last["error"]
        else:
            error = error_of(answer, 504)
        assert error["code"] == "request_timeout"
        assert "1.5 s (--request-timeout)" in error["message"]
        wait_until(lambda: not served.engine.running)
        assert len(served.engine.aborted) == 2
        assert served.complete(**GOOD).status_code == 200


def test_an_answer_that_is_complete_in_time() -> None:
    with serving(FakeEngine(step_s=0.01), request_timeout=60, queue_timeout=60) as served:
        assert served.complete(**GOOD).status_code == 200
        assert "error" not in served.complete(**GOOD, stream=True).text


# ---- bodies ----------------------------------------------------------------------------------------------------------

BOMBS = {
    "nested lists": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "nested objects": b'{"prompt": "x", "response_format": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
    "nested, not closed": b'{"prompt": ' + b"[" * 200_000,
    "nested, below the parser's limit": b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}",
    "nested in a known field": b'{"prompt": "x", "stop": ' + b"[" * 900 + b"]" * 900 + b"}",
    "a number of many digits": b'{"prompt": "x", "seed": ' + b"9" * 100_000 + b"}",
    "a float out of range": b'{"prompt": "x", "temperature": 1e400}',
    "a token id out of range of floats": b'{"prompt": [1e400]}',
    "NaN": b'{"prompt": "x", "temperature": NaN}',
    "infinity": b'{"prompt": "x", "top_p": -Infinity}',
    "NaN as a bias": b'{"prompt": "x", "logit_bias": {"5": NaN}}',
    "invalid UTF-8": b'{"prompt": "\xff\xfe"}',
    "UTF-16": '{"prompt": 1}'.encode("utf-16"),
    "a byte-order mark": b'\xef\xbb\xbf{"prompt": 1}',
    "not an object": b"[1, 2]",
    "a string": b'"x"',
    "null": b"null",
    "nothing but blanks": b"   ",
    "a NUL": b'{"prompt": "x", "a\\u0000b": 1}',
    "half a pair as a field": b'{"prompt": "x", "\\ud800": 1}',
    "half a pair as a prompt": b'{"prompt": "\\ud800"}',
    "half a pair as a stop string": b'{"prompt": "x", "stop": "\\udfff"}',
    "half a pair as a user": b'{"prompt": "x", "user": 5, "model": "\\ud800"}',
    "many unknown fields": json.dumps({"prompt": "x"} | {f"f{i}": 1 for i in range(50_000)}).encode(),
    "many stop strings": json.dumps({"prompt": "x", "stop": ["a"] * 100_000}).encode(),
    "an endless stop string": json.dumps({"prompt": "x", "stop": "a" * 500_000}).encode(),
    "a huge bias": json.dumps({"prompt": "x", "logit_bias": {str(i): 1 for i in range(60_000)}}).encode(),
    "negative token": b'{"prompt": [-1]}',
    "bool token": b'{"prompt": [true]}',
    "float token": b'{"prompt": [1.0]}',
    "unknown token": b'{"prompt": [256]}',
    "huge token": b'{"prompt": [9223372036854775808]}',
    "mixed prompts": b'{"prompt": ["a", 1]}',
    "empty list": b'{"prompt": []}',
    "empty lists": b'{"prompt": [[]]}',
    "empty text": b'{"prompt": ""}',
    "negative tokens": b'{"prompt": "x", "max_tokens": -1}',
    "tokens as a bool": b'{"prompt": "x", "max_tokens": true}',
    "many choices": b'{"prompt": "x", "n": 1000000}',
    "many prompts": json.dumps({"prompt": ["x"] * 20_000}).encode(),
    "negative n": b'{"prompt": "x", "n": -1}',
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("name", BOMBS)
def test_a_body_that_cannot_be_answered_is_a_400(served: Served, name: str, path: str) -> None:
    response = served.http.post(path, content=BOMBS[name], headers={"Content-Type": "application/json"})
    error = error_of(response, response.status_code)
    assert response.status_code == (404 if "model" in str(error["param"]) else 400)
    assert len(error["message"]) < 2000
    assert not served.engine.running


@pytest.mark.parametrize("field", ["model", "user", "cache_salt", "prompt", "stop", "suffix", "response_format"])
@pytest.mark.parametrize("value", ["\ud800", "\udc00\ud800", "a\x00b", "\u202e" * 100, "𐀀" * 100])
def test_odd_text_in_any_field(served: Served, field: str, value: str) -> None:
    body = json.dumps(GOOD | {field: value}).encode()
    for path in ("/v1/completions", "/v1/chat/completions"):
        response = served.http.post(path, content=body, headers={"Content-Type": "application/json"})
        assert response.status_code in (200, 400, 404)
        if response.status_code != 200:
            error_of(response, response.status_code)


LARGE = {
    "lists": b'{"prompt": [' + b"[5]," * 70_000 + b"[5]]}",
    "objects": b'{"prompt": "x", "metadata": {"a": [' + b"{}," * 90_000 + b"{}]}}",
    "strings": b'{"prompt": [' + b'"",' * 140_000 + b'""]}',
    "fields": b'{"prompt": "x", "metadata": {' + b'"a":1,' * 140_000 + b'"a":1}}',
    "lists behind quotes": b'{"user": "\\\\\\"[\\\\", "prompt": [' + b"[5]," * 70_000 + b"[5]]}",
}


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/nothing-that-reads-it"])
@pytest.mark.parametrize("name", LARGE)
def test_too_many_values(served: Served, name: str, path: str) -> None:
    response = served.http.post(path, content=LARGE[name], headers={"Content-Type": "application/json"})
    if path == "/nothing-that-reads-it":
        assert error_of(response, 404)["code"] == "not_found"
    else:
        assert error_of(response, 413)["code"] == "request_too_large"
        assert "more than" in response.text


def test_numbers_are_counted_and_texts_are_not() -> None:
    assert too_many_values(b"[" + b"5," * (MAX_VALUES - 1) + b"5]") is None
    assert too_many_values(b"[" + b"5," * MAX_VALUES + b"5]") == f"{MAX_VALUES} values"
    text = '\\"[{,' * MAX_VALUES + "\\"
    assert too_many_values(json.dumps({"prompt": text}).encode()) is None


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("length", [1, 200_000])
@pytest.mark.parametrize("size", [1, 1 << 16])
def test_bodies_in_other_encodings_than_utf8_are_refused(served: Served, encoding: str, length: int, size: int) -> None:
    body = json.dumps({"prompt": "[" * length}).encode(encoding)
    parts = (body[place : place + size] for place in range(0, len(body), size)) if length == 1 else [body]
    response = served.http.post("/v1/completions", content=iter(parts), headers={"Content-Type": "application/json"})
    assert error_of(response, 400)["code"] == "invalid_json"


def test_a_byte_order_mark_of_utf8_is_left_out(served: Served) -> None:
    body = json.dumps({"prompt": "zwölf", "max_tokens": 1}, ensure_ascii=False).encode("utf-8-sig")
    response = served.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert response.json()["usage"]["prompt_tokens"] == 6


def test_a_text_that_cannot_fit_is_not_encoded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.engine.tokenizer, "encode", None)
    text = "é" * (served.engine.context_length + 1)
    for response, param in (
        (served.complete(prompt=text), "prompt"),
        (served.complete(prompt=[text]), "prompt"),
        (served.chat({"role": "user", "content": text}), "messages"),
    ):
        error = error_of(response, 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)


def test_freed_memory_is_returned_to_the_system() -> None:
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(give_back_memory) for _ in range(8)]:
            done.result()


def test_probes_may_ask_without_a_body(served: Served) -> None:
    for path in ("/health", "/ready", "/v1/models"):
        response = served.http.head(path)
        assert (response.status_code, response.content) == (200, b"")
    assert served.http.get("/v1/models/", follow_redirects=False).status_code == 404
    methods = {tuple(operations) for operations in served.http.get("/openapi.json").json()["paths"].values()}
    assert methods == {("get",), ("post",)}


def test_fields_given_twice_count_once(served: Served) -> None:
    body = b'{"prompt": "a", "max_tokens": 1, "prompt": "bcd", "max_tokens": 3}'
    answer = served.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"}).json()
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (3, 3)


def test_a_body_is_counted_however_small_its_parts() -> None:
    """A slow client's parts come one by one; a fast one's may be joined before they are counted."""
    parts = [b"x" * 400] * 3
    reads: list[bytes] = []

    async def read(scope: Scope, receive: Receive, send: Send) -> None:
        while (message := await receive()).get("more_body", False):
            reads.append(message["body"])

    async def receive() -> Message:
        return {"type": "http.request", "body": parts.pop(), "more_body": bool(parts)}

    async def send(message: Message) -> None:
        raise AssertionError(message)

    headers = [(b"content-type", b"application/json"), (b"transfer-encoding", b"chunked")]
    with pytest.raises(HTTPException) as refusal:
        asyncio.run(LimitBody(read, max_bytes=1000)({"type": "http", "headers": headers}, receive, send))
    assert refusal.value.status_code == 413
    assert len(reads) == 2


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate, gzip", "unheard-of"])
def test_compressed_bodies_are_refused(served: Served, encoding: str) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    response = served.http.post("/v1/completions", content=b"\x1f\x8b" + b"0" * 100, headers=headers)
    assert error_of(response, 415)["code"] == "compressed_body"


# ---- addresses, methods, headers -------------------------------------------------------------------------------------


def raw(served: Served, method: str, path: str) -> httpx.Response:
    """Send a request byte for byte; httpx would normalize it."""
    with closing(HTTPConnection(served.http.base_url.host, served.http.base_url.port or 0, timeout=60)) as connection:
        connection.request(method, path)
        answer = connection.getresponse()
        return httpx.Response(answer.status, content=answer.read())


@pytest.mark.parametrize(
    "path",
    [
        "/page/../app.py",
        "/page/..%2f..%2fapp.py",
        "/page/%2e%2e/%2e%2e/server/app.py",
        "/page/....//app.py",
        "/page/%00",
        "/page//etc/passwd",
        "/page/%5c..%5capp.py",
        "/page/vendor/../../app.py",
        "/page/" + "a" * 20_000,
        "/v1/models/" + "../" * 50,
        "/v1/models/%ff%fe",
        "/%2e%2e/%2e%2e/etc/passwd",
        "//health",
        "/" + "%41" * 5_000,
    ],
)
def test_unknown_paths(served: Served, path: str) -> None:
    response = raw(served, "GET", path)
    assert response.status_code in (400, 404)
    error_of(response, response.status_code)


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "TRACE", "PUT", "DELETE", "CONNECT", "BREW", "get"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/nothing"])
def test_unsupported_methods(served: Served, method: str, path: str) -> None:
    response = raw(served, method, path)
    unknown = 400 if method in ("BREW", "get") else 405  # the HTTP parser accepts known methods only
    assert response.status_code in ((200,) if (method, path) == ("HEAD", "/v1/models") else (404, 405, unknown))
    if method != "HEAD":
        error_of(response, response.status_code)


def test_extreme_headers(served: Served) -> None:
    for name, value in (
        ("Authorization", b"\xff" * 1000),
        ("Content-Type", b"\xff\xfe"),
        ("Origin", b"\x80"),
        ("X-Request-Id", b"\xf0\x9f" * 50),
        ("Cookie", b"a" * 20_000),
        ("Accept", b"nothing/at-all"),
        ("Host", b"\xc3\xa9:99999999"),
        ("Range", b"bytes=0-,0-,0-"),
        ("Upgrade", b"websocket"),
        ("Expect", b"a miracle"),
    ):
        status = {"Origin": 403, "Host": 421}.get(name, 200)
        assert served.http.get("/v1/models", headers=[(name.encode(), value)]).status_code == status, name
    refusal = served.http.post("/v1/completions", json=GOOD, headers=[(b"Content-Type", b"\xff")])
    assert error_of(refusal, 415)["code"] == "not_json"


# ---- the end ---------------------------------------------------------------------------------------------------------


class OneAtATime(FakeEngine):
    """Steps the oldest request; the others wait in a queue."""

    def step(self) -> list[Any]:
        waiting = dict(list(self.running.items())[1:])
        self.running = dict(list(self.running.items())[:1])
        deltas = super().step()
        self.running |= waiting
        return deltas


@pytest.mark.parametrize("deadline_s", [10.0, 0.1])
def test_a_drain_finishes_or_refuses_running_and_waiting_requests(deadline_s: float) -> None:
    with serving(OneAtATime(step_s=0.02, chunk=10)) as served, ThreadPoolExecutor() as pool:
        calls = [pool.submit(served.complete, prompt="x", max_tokens=60, stream=i % 2 == 0) for i in range(4)]
        wait_until(lambda: len(served.engine.seen_params) == 4)
        served.thread.drain(deadline_s)
        with suppress(httpx.TransportError):  # the server may have ended meanwhile
            assert error_of(served.complete(**GOOD), 503)["code"] == "engine_stopped"
        answers = [call.result() for call in calls]
    ends = [events(a)[-1] if a.headers["content-type"].startswith("text/event") else a.json() for a in answers]
    finished = [end for end in ends if "error" not in end]
    assert all(end["choices"][0]["finish_reason"] == "length" for end in finished)
    assert all(end["error"]["code"] == "engine_stopped" for end in ends if "error" in end)
    assert len(finished) == 4 if deadline_s == 10.0 else len(finished) < 4
