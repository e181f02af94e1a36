"""The HTTP interface over a scripted engine, and over the real one on the demo."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

import specmamba
from specmamba.core import OutputDelta, SpecStats
from specmamba.flags.other_names import OTHER_FIELDS
from specmamba.server.api.conversation import ChatCompletionRequest
from specmamba.server.api.requests import CompletionRequest
from specmamba.server.observe.metrics import accepted_per_position
from tests.fake_engine import TEXT, FakeEngine, Served, serving, wait_until

NUM_TOKENS = len(TEXT.encode())


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as served:
        yield served


@pytest.fixture(autouse=True)
def _nothing_is_left_over(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "served" in request.fixturenames:
        engine = request.getfixturevalue("served").engine
        wait_until(lambda: not engine.has_unfinished_requests)


def events(response: httpx.Response) -> list[Any]:
    """The events of a stream; its bytes must be well-formed."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.text.endswith("data: [DONE]\n\n")
    parts = response.text.removesuffix("\n\n").split("\n\n")
    assert all(part.startswith("data: ") and "\n" not in part for part in parts)
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-1]]


def refused(response: httpx.Response, status: int, param: str | None = None, code: str | None = None) -> str:
    """The message of an error, which must have OpenAI's shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert list(response.json()) == ["error"]
    error = response.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["param"] == param
    assert code is None or error["code"] == code
    assert "Traceback" not in response.text
    return str(error["message"])


# ---- completions -----------------------------------------------------------------------------------------------------


def test_completion(served: Served) -> None:
    answer = served.complete(prompt="hello", max_tokens=1000, model="specmamba-demo").json()
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == "specmamba-demo"
    assert answer["choices"] == [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop"}]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (
        5,
        NUM_TOKENS,
        5 + NUM_TOKENS,
    )
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
    details = usage["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"] == NUM_TOKENS
    assert details["accepted_prediction_tokens"] == NUM_TOKENS // 2


def test_defaults_of_completions(served: Served) -> None:
    answer = served.complete(prompt="hello", temperature=None, max_tokens=None, n=1, stop=None).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 16
    params = served.engine.seen_params[-1]
    assert (params.temperature, params.top_p, params.seed, params.stop) == (1.0, 1.0, None, ())


def test_sampling_fields_reach_the_engine(served: Served) -> None:
    fields = {
        "max_tokens": 3, "temperature": 0, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "presence_penalty": 1,
        "frequency_penalty": -1.5, "repetition_penalty": 1.25, "seed": -5, "stop": ["a", "b"],
        "stop_token_ids": [1, 2], "ignore_eos": True,
    }  # fmt: skip
    assert served.complete(prompt="x", **fields).status_code == 200
    params = served.engine.seen_params[-1].model_dump(exclude_unset=True)
    assert params == fields | {"stop": ("a", "b"), "stop_token_ids": (1, 2)}


@pytest.mark.parametrize(
    ("prompt", "lengths"),
    [("abc", [3]), ([1, 2], [2]), (["a", "bb", "ccc"], [1, 2, 3]), ([[1], [2, 3]], [1, 2])],
)
def test_prompts_may_be_texts_or_token_ids(served: Served, prompt: object, lengths: list[int]) -> None:
    answer = served.complete(prompt=prompt, max_tokens=4).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(lengths)))
    assert [choice["text"] for choice in answer["choices"]] == [TEXT[:4]] * len(lengths)
    assert answer["usage"]["prompt_tokens"] == sum(lengths)
    assert answer["usage"]["completion_tokens"] == 4 * len(lengths)


def test_a_long_prompt_is_encoded_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(context_length=10_000)
    used_by: list[str] = []
    encode = engine.tokenizer.encode

    def encode_and_tell(*given: Any) -> list[int]:
        used_by.append(threading.current_thread().name)
        return encode(*given)

    monkeypatch.setattr(engine.tokenizer, "encode", encode_and_tell)
    with serving(engine) as served:
        assert served.complete(prompt="x" * 5000).json()["usage"]["prompt_tokens"] == 5000
    assert used_by[0].startswith("asyncio_")


def test_stream(served: Served) -> None:
    response = served.complete(prompt="hello", max_tokens=1000, stream=True)
    assert response.headers["cache-control"] == "no-cache"
    chunks = events(response)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == TEXT
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert all("usage" not in chunk for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_stream_of_several_prompts_with_usage(served: Served) -> None:
    body = {"prompt": ["a", "bb"], "max_tokens": 50, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(served.complete(**body))
    texts = ["", ""]
    for chunk in chunks:
        assert chunk["usage"] is None
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    whole = served.complete(prompt=["a", "bb"], max_tokens=50).json()
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]


def test_a_slow_reader_gets_fewer_chunks_and_the_whole_text() -> None:
    with serving(FakeEngine(text="x" * 100_000, chunk=10, context_length=200_000)) as served:
        body = {"prompt": "a", "max_tokens": 100_000, "stream": True}
        with served.http.stream("POST", "/v1/completions", json=body) as response:
            time.sleep(0.5)
            text = response.read().decode()
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "x" * 100_000
    assert len(chunks) < 10_000  # of as many steps


# ---- chat ------------------------------------------------------------------------------------------------------------


def test_chat(served: Served) -> None:
    answer = served.chat({"role": "system", "content": "s"}, {"role": "user", "content": "u"}).json()
    assert answer["object"] == "chat.completion"
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert answer["usage"]["prompt_tokens"] == len("<system>s<user>u<assistant>")
    room = served.engine.context_length - answer["usage"]["prompt_tokens"]
    assert served.engine.seen_params[-1].max_tokens == room


def test_chat_stream(served: Served) -> None:
    chunks = events(served.chat({"role": "user", "content": "u"}, stream=True, max_completion_tokens=30))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
    assert "".join(delta.get("content", "") for delta in deltas) == TEXT[:30]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert chunks[0]["object"] == "chat.completion.chunk"


def test_chat_takes_parts_and_earlier_answers(served: Served) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    earlier: dict[str, Any] = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "annotations": [],
        "tool_calls": None,
        "audio": None,
    }
    answer = served.chat({"role": "user", "content": parts}, earlier, {"role": "user", "content": "c"}).json()
    assert answer["usage"]["prompt_tokens"] == len("<user>a\nb<assistant>x<user>c<assistant>")


def test_chat_without_a_template_is_refused_clearly() -> None:
    with serving(FakeEngine(has_chat_template=False)) as served:
        message = refused(served.chat({"role": "user", "content": "u"}), 400, "messages", "no_chat_template")
        assert "/v1/completions" in message


# ---- what is refused -------------------------------------------------------------------------------------------------

NOT_YET_CHAT: list[tuple[str, Any]] = [
    ("functions", [{}]), ("function_call", {"name": "f"}), ("audio", {}), ("modalities", ["text", "audio"]),
    ("store", True), ("service_tier", "flex"), ("verbosity", "high"),
    ("web_search_options", {}),
]  # fmt: skip


def test_unsupported_fields_of_completions(served: Served) -> None:
    message = refused(served.complete(prompt="x", suffix="y"), 400, "suffix", "not_supported")
    assert message.startswith("suffix: this model's tokenizer has no tokens for a gap in a text")


@pytest.mark.parametrize(("field", "value"), NOT_YET_CHAT)
def test_unsupported_fields_of_chat(served: Served, field: str, value: object) -> None:
    refused(served.chat({"role": "user", "content": "u"}, **{field: value}), 400, field, "not_supported")


def test_neutral_values_of_unsupported_fields_are_accepted() -> None:
    neutral: dict[str, Any] = {
        "n": 1, "user": "me", "metadata": {"a": "b"}, "stream": False, "stream_options": None,
    }  # fmt: skip
    CompletionRequest.model_validate({"prompt": "x", **neutral, "suffix": ""})
    chat = {
        "messages": [{"role": "user", "content": "x"}], "logprobs": False, "top_logprobs": 0, "tools": [],
        "response_format": {"type": "text"}, "tool_choice": "none", "parallel_tool_calls": True, "store": False,
        "modalities": ["text"], "service_tier": "auto", "functions": [], "function_call": "auto", "verbosity": "medium",
        "safety_identifier": "x", "prompt_cache_key": "y", "max_tokens": 5, "max_completion_tokens": 5,
    }  # fmt: skip
    ChatCompletionRequest.model_validate(chat | neutral)
    for model, required in (
        (CompletionRequest, {"prompt": "x"}),
        (ChatCompletionRequest, {"messages": chat["messages"]}),
    ):
        model.model_validate(dict.fromkeys(model.model_fields) | required)


# what version 0.3.2 of SGLang's router makes of a request with nothing but a prompt
FROM_ROUTER = {"stream": False, "no_stop_trim": False, "ignore_eos": False, "skip_special_tokens": True}
FROM_ROUTER |= {"return_hidden_states": False}
CHAT_FROM_ROUTER = {"logprobs": False, "continue_final_message": False, "separate_reasoning": True}
CHAT_FROM_ROUTER |= {"stream_reasoning": True}


def test_what_a_router_passes_on_is_accepted(served: Served) -> None:
    served.complete(prompt="x", echo=False, **FROM_ROUTER).raise_for_status()
    served.chat({"role": "user", "content": "u"}, **FROM_ROUTER, **CHAT_FROM_ROUTER).raise_for_status()


@pytest.mark.parametrize(
    "field", sorted((FROM_ROUTER | CHAT_FROM_ROUTER).keys() - {"stream", "ignore_eos", "logprobs"})
)
def test_other_values_of_a_routers_fields_are_refused(served: Served, field: str) -> None:
    other = {field: not (FROM_ROUTER | CHAT_FROM_ROUTER)[field]}
    refused(served.chat({"role": "user", "content": "u"}, **other), 400, field, "not_supported")
    if field in FROM_ROUTER:
        refused(served.complete(prompt="x", **other), 400, field, "not_supported")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"prompt": ["a", 1]}, "prompt[1]"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [999]}, "prompt"),
    ({"prompt": [2**70]}, "prompt[0]"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"prompt": "x", "bogus": 1}, "bogus"),
    ({"prompt": "x", "\ud800": 1}, "?"),
    ({"prompt": "x", "temperature": -1}, "temperature"),
    ({"prompt": "x", "temperature": "1"}, "temperature"),
    ({"prompt": "x", "temperature": float("nan")}, "temperature"),
    ({"prompt": "x", "temperature": float("inf")}, "temperature"),
    ({"prompt": "x", "top_p": 0}, "top_p"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "x", "max_tokens": 2.5}, "max_tokens"),
    ({"prompt": "x", "seed": 2**63}, "seed"),
    ({"prompt": "x", "stop": ""}, "stop"),
    ({"prompt": "x", "stop": ["a", 1]}, "stop[1]"),
    ({"prompt": "x", "stop": ["a"] * 17}, "stop"),
    ({"prompt": "x", "stream": "yes"}, "stream"),
    ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "x", "stream": True, "stream_options": {"bogus": 1}}, "stream_options.bogus"),
]


@pytest.mark.parametrize(("body", "param"), WRONG, ids=str)
def test_errors_name_the_invalid_field(served: Served, body: dict[str, Any], param: str) -> None:
    response = served.http.post(
        "/v1/completions", content=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    refused(response, 400, param)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": "x", "extra": 1}], "messages[0].extra"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls"),
        ([{"role": "user", "content": "x"}, 5], "messages[1]"),
    ],
)
def test_errors_name_the_invalid_message(served: Served, messages: object, param: str) -> None:
    refused(served.http.post("/v1/chat/completions", json={"messages": messages}), 400, param)


def test_two_limits_that_disagree(served: Served) -> None:
    response = served.chat({"role": "user", "content": "x"}, max_tokens=1, max_completion_tokens=2)
    refused(response, 400, "max_tokens")


@pytest.mark.parametrize("body", [b"{", b"", b"[1]", b'"x"', b"\xff\xfe", b"[" * 100_000, b"null"])
def test_a_body_must_be_a_json_object(served: Served, body: bytes) -> None:
    refused(served.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"}), 400)


def test_a_body_must_say_that_it_is_json(served: Served) -> None:
    refused(served.http.post("/v1/completions", content=b'{"prompt": "x"}'), 415)
    refused(served.http.post("/v1/completions", data={"prompt": "x"}), 415)


def test_a_prompt_longer_than_the_context_names_both_numbers(served: Served) -> None:
    most = served.engine.context_length - 1
    for response, param in (
        (served.complete(prompt="x" * (most + 1)), "prompt"),
        (served.complete(prompt="x" * (most + 1), stream=True), "prompt"),
        (served.chat({"role": "user", "content": "x" * (most + 1)}), "messages"),
    ):
        message = refused(response, 400, param, "context_length_exceeded")
        assert str(most) in message
        assert str(most + 1) in message or param == "messages"
    assert served.complete(prompt="x" * most, max_tokens=5).json()["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(("typo", "meant"), [("max_token", "max_tokens"), ("tempreature", "temperature")])
def test_a_field_that_is_nearly_right(served: Served, typo: str, meant: str) -> None:
    message = refused(served.complete(prompt="x", **{typo: 1}), 400, typo, "unknown_field")
    assert message == f"{typo}: there is no such field; did you mean {meant}?"


@pytest.mark.parametrize(("field", "here"), OTHER_FIELDS.items())
def test_a_field_of_another_server(served: Served, field: str, here: str) -> None:
    asked = [served.chat({"role": "user", "content": "x"}, **{field: 1})]
    if here in CompletionRequest.model_fields:
        asked.append(served.complete(prompt="x", **{field: 1}))
    for response in asked:
        message = refused(response, 400, field, "unknown_field")
        assert message == f"{field}: there is no such field; it is {here} here"


def test_unknown_model_and_unknown_addresses(served: Served) -> None:
    assert "specmamba-demo" in refused(served.complete(prompt="x", model="gpt-9"), 404, "model", "model_not_found")
    refused(served.http.get("/v1/models/gpt/9"), 404, "model", "model_not_found")
    refused(served.http.get("/v1/nothing"), 404)
    near = refused(served.http.post("/v1/chat/completion", json={}), 404, code="not_found")
    assert near == "there is nothing at this address; did you mean /v1/chat/completions?"
    assert refused(served.http.get("/xyz"), 404) == "there is nothing at this address; /docs lists what there is"
    for method, path, allowed in (
        ("GET", "/v1/completions", "POST"),
        ("PUT", "/health", "GET and HEAD"),
        ("DELETE", "/v1/models/x", "GET"),
        ("POST", "/openapi.json", "GET and HEAD"),
        ("PUT", "/ping", "GET and POST"),
    ):
        response = served.http.request(method, path)
        message = refused(response, 405, code="method_not_allowed")
        assert message == f"this address does not know {method}; it knows {allowed}"
        assert response.headers["allow"] == allowed.replace(" and ", ", ")


def test_the_list_of_addresses_loads_nothing(served: Served) -> None:
    answer = served.http.get("/docs")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    paths = served.http.get("/openapi.json").json()["paths"]
    assert re.findall(r"<code>(.*?)</code>", answer.text) == [path for path, methods in paths.items() for _ in methods]
    assert "<td>POST</td><td><code>/v1/completions</code></td><td>Continue one prompt or several.</td>" in answer.text
    assert re.findall(r"(?:src|href)=\"(.*?)\"", answer.text) == ["openapi.json"]


def test_version_and_ping(served: Served) -> None:
    assert served.http.get("/version").json() == {"version": specmamba.__version__}
    assert served.http.get("/ping").json() == served.http.post("/ping").json() == {"status": "ok"}


@pytest.mark.parametrize("announced", [True, False])
def test_the_size_of_a_body_is_limited(announced: bool) -> None:
    with serving(max_request_bytes=4096) as served:
        body = json.dumps({"prompt": "x" * 100_000}).encode()
        content = body if announced else (body[i : i + 1000] for i in range(0, len(body), 1000))
        headers = {"Content-Type": "application/json"}
        refused(served.http.post("/v1/completions", content=content, headers=headers), 413, code="request_too_large")
        assert served.complete(prompt="x").status_code == 200


def test_api_key() -> None:
    with serving(api_key="sécret") as served:
        right: Any = {"Authorization": "Bearer sécret".encode()}
        headers: Any
        for headers in (
            {},
            {"Authorization": "Bearer nope"},
            {"Authorization": "Bearer é".encode()},
            {"Authorization": "sécret".encode()},
        ):
            response = served.http.get("/v1/models", headers=headers)
            assert "sécret" not in refused(response, 401, code="invalid_api_key")
            assert response.headers["www-authenticate"] == "Bearer"
            refused(served.http.post("/v1/completions", json={"prompt": "x"}, headers=headers), 401)
            refused(served.http.get("/server_info", headers=headers), 401)
        assert served.http.get("/v1/models", headers=right).status_code == 200
        assert served.http.get("/health").status_code == 200
        assert served.http.get("/metrics").status_code == 200
        assert "sécret" not in served.http.get("/server_info", headers=right).text


def test_a_full_queue() -> None:
    with (
        serving(FakeEngine(step_s=0.05), max_queued_requests=2, max_running_requests=1) as served,
        ThreadPoolExecutor() as pool,
    ):
        running = pool.submit(served.complete, prompt="a", max_tokens=30)
        wait_until(lambda: served.engine.running)
        for body in ({"prompt": ["b", "c"]}, {"prompt": ["b", "c"], "stream": True}):
            response = served.complete(**body)
            assert "--max-queued-requests" in refused(response, 429, code="queue_full")
            assert int(response.headers["retry-after"]) >= 1
            assert len(served.engine.running) == 1
        assert running.result().status_code == 200
        refused(served.complete(prompt=["a", "b", "c", "d"]), 400, "prompt")  # it would never fit


def test_an_unexpected_exception_hides_its_details_and_keeps_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as served:
        served.engine.tokenizer.encode = lambda *_: 1 / 0
        for _ in range(2):
            message = refused(served.complete(prompt="x"), 500, code="internal_error")
            assert "division" not in message
        assert served.http.get("/health").status_code == 200
    assert "ZeroDivisionError" in caplog.text


def test_no_cross_origin_headers(served: Served) -> None:
    response = served.http.get("/v1/models", headers={"Origin": "http://evil.example"})
    assert not [name for name in response.headers if name.startswith("access-control")]


# ---- clients that leave, engines that fail, servers that stop --------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("num_prompts", [1, 3])
def test_a_client_that_disconnects_frees_the_engine(stream: bool, num_prompts: int) -> None:
    with serving(FakeEngine(step_s=0.02, chunk=1)) as served:
        body = json.dumps({"prompt": ["x"] * num_prompts, "max_tokens": 70, "stream": stream})
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        with socket.create_connection((served.http.base_url.host, served.http.base_url.port)) as client:
            client.sendall((head + body).encode())
            wait_until(lambda: len(served.engine.running) == num_prompts)
            if stream:
                assert client.recv(20).startswith(b"HTTP/1.1 200")
        wait_until(lambda: not served.engine.running)
        assert len(served.engine.aborted) == num_prompts
        wait_until(lambda: f'requests_total{{finish_reason="abort"}} {num_prompts}' in served.http.get("/metrics").text)


def test_a_crash_of_the_engine_reaches_every_client() -> None:
    with serving(FakeEngine(step_s=0.05)) as served, ThreadPoolExecutor() as pool:
        whole = pool.submit(served.complete, prompt="a", max_tokens=70)
        streamed = pool.submit(served.complete, prompt="a", max_tokens=70, stream=True)
        wait_until(lambda: len(served.engine.running) == 2)
        served.engine.fail_at_step = served.engine.num_steps + 3
        message = refused(whole.result(), 500, code="engine_error")
        assert message == "the engine failed: RuntimeError: scripted failure"
        *chunks, last = events(streamed.result())
        assert chunks[0]["choices"][0]["text"]
        assert last["error"]["message"] == message
        wait_until(lambda: served.server.should_exit)
    assert isinstance(served.thread.failed, RuntimeError)


def test_after_a_crash_health_fails_and_requests_are_refused() -> None:
    with serving(FakeEngine(fail_at_step=1)) as served:
        served.server.should_exit = False
        served.server._stop = lambda: None  # type: ignore[method-assign]
        served.thread._stop_callbacks.clear()  # the server of this test outlives its engine
        refused(served.complete(prompt="a"), 500)
        wait_until(lambda: served.thread.has_stopped)
        refused(served.http.get("/health"), 503, code="engine_failed")
        refused(served.complete(prompt="a"), 503, code="engine_stopped")
        assert served.http.get("/metrics").status_code == 200
        assert served.http.get("/server_info").json()["stats"] == {}
        served.server.should_exit = True


def test_draining_finishes_streams_and_refuses_new_requests() -> None:
    with serving(FakeEngine(step_s=0.02)) as served, ThreadPoolExecutor() as pool:
        running = pool.submit(served.complete, prompt="a", max_tokens=70, stream=True)
        wait_until(lambda: served.engine.running)
        served.thread.drain(30.0)
        assert served.http.get("/health").json() == {"status": "draining"}
        refused(served.complete(prompt="b"), 503, code="engine_stopped")
        chunks = events(running.result())
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        wait_until(lambda: served.server.should_exit)
    assert served.thread.failed is None


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_cut_off_by_the_deadline_is_an_error(stream: bool) -> None:
    with serving(FakeEngine(step_s=0.05, chunk=1)) as served, ThreadPoolExecutor() as pool:
        running = pool.submit(served.complete, prompt="a", max_tokens=70, stream=stream)
        wait_until(lambda: served.engine.num_steps > 2)
        served.thread.drain(0.0)
        response = running.result()
        error = events(response)[-1]["error"] if stream else response.json()["error"]
        assert response.status_code == (200 if stream else 503)
        assert "cut off" in error["message"]


# ---- for operators ---------------------------------------------------------------------------------------------------


def test_models(served: Served) -> None:
    listed = served.http.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["specmamba-demo"]
    assert listed["data"][0]["max_model_len"] == served.engine.context_length
    assert served.http.get("/v1/models/specmamba-demo").json() == listed["data"][0]


def test_a_model_name_with_slashes() -> None:
    with serving(served_model_name="org/model") as served:
        assert served.http.get("/v1/models/org/model").json()["id"] == "org/model"
        assert served.http.get("/v1/models/org%2Fmodel").json()["id"] == "org/model"
        assert served.complete(prompt="x", model="org/model").json()["model"] == "org/model"


def test_health_and_info(served: Served) -> None:
    assert served.http.get("/health").json() == {"status": "ok"}
    info = served.http.get("/server_info").json()
    assert info["engine"] == {"model": "fake", "dtype": "float32"}
    assert info["stats"]["num_running"] == 0
    assert info["context_length"] == served.engine.context_length


def test_metrics() -> None:
    with serving() as served:
        served.complete(prompt="abc", max_tokens=10)
        text = served.http.get("/metrics").text
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}
    assert values["specmamba_time_to_first_token_seconds_count"] == 1
    assert values["specmamba_inter_token_latency_seconds_count"] == 8  # the first step gave two
    assert values["specmamba_prompt_tokens_total"] == 3
    assert values["specmamba_generation_tokens_total"] == 10
    assert values['specmamba_requests_total{finish_reason="length"}'] == 1
    assert values["specmamba_spec_decode_num_drafts_total"] == 5
    assert values["specmamba_spec_decode_num_draft_tokens_total"] == 10
    assert values["specmamba_spec_decode_num_accepted_tokens_total"] == 5
    assert values['specmamba_spec_decode_num_accepted_tokens_per_pos_total{position="0"}'] == 5
    assert values['specmamba_spec_decode_num_accepted_tokens_per_pos_total{position="1"}'] == 0
    assert values["specmamba_spec_accept_length"] == 2.0
    for name in ("running_requests", "waiting_requests", "kv_used_tokens", "state_used_slots"):
        assert values[f"specmamba_{name}"] == 0
    assert (values["specmamba_kv_cached_tokens"], values["specmamba_state_cached_slots"]) == (70, 3)
    cache = {name.removeprefix("specmamba_prefix_cache_"): value for name, value in values.items() if "_cache_" in name}
    assert cache == {
        "query_tokens_total": 200,
        "hit_tokens_total": 150,
        "evicted_tokens_total": 40,
        "evicted_states_total": 6,
        'miss_total{reason="never_stored"}': 2,
        'miss_total{reason="evicted"}': 1,
        'miss_total{reason="page_grid"}': 0,
        'miss_total{reason="salt"}': 3,
    }


def test_accepted_per_position_counts_every_depth_above() -> None:
    assert accepted_per_position(SpecStats(6, 18, 8, (2, 1, 2, 1))) == [4, 3, 1]
    assert accepted_per_position(SpecStats()) == []
    spec = SpecStats(6, 18, 8, (2, 1, 2, 1))
    assert sum(accepted_per_position(spec)) == spec.num_accepted_tokens


def test_the_openapi_schema_matches_the_routes(served: Served) -> None:
    schema = served.http.get("/openapi.json").json()
    assert "/v1/completions" in schema["paths"]
    for path in ("/v1/completions", "/v1/chat/completions"):
        responses = schema["paths"][path]["post"]["responses"]
        assert {"200", "400", "401", "404", "413", "415", "429", "500", "503", "504"} == set(responses)
        assert set(responses["200"]["content"]) == {"application/json", "text/event-stream"}
    assert "HTTPValidationError" not in schema["components"]["schemas"]
    assert schema["components"]["schemas"]["CompletionRequest"]["additionalProperties"] is False


# ---- the real engine -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo() -> Iterator[Served]:
    from specmamba.config import EngineConfig
    from specmamba.engine.engine import Engine

    engine = Engine(EngineConfig(dtype="float32", max_running_requests=4, max_total_tokens=2048, context_length=512))
    with serving(engine) as served:
        yield served
        wait_until(lambda: not engine.has_unfinished_requests)
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_used_tokens) == (0, 0, 0)


def test_demo_through_the_openai_client(demo: Served) -> None:
    client = openai.OpenAI(base_url=demo.url + "/v1", api_key="none", max_retries=0)
    with client:
        assert [model.id for model in client.models.list()] == ["specmamba-demo"]
        body: dict[str, Any] = {
            "model": "specmamba-demo",
            "prompt": "def main():\n",
            "max_tokens": 24,
            "temperature": 0,
        }
        whole = client.completions.create(**body)
        streamed = list(client.completions.create(**body, stream=True, stream_options={"include_usage": True}))
        assert "".join(chunk.choices[0].text for chunk in streamed[:-1]) == whole.choices[0].text != ""
        assert whole.usage is not None
        assert whole.usage.prompt_tokens_details is not None
        whole.usage.prompt_tokens_details.cached_tokens = whole.usage.prompt_tokens - 1  # the second time
        assert streamed[-1].usage == whole.usage
        assert whole.usage.completion_tokens == 24
        details = whole.usage.completion_tokens_details
        assert details is not None
        assert details.accepted_prediction_tokens
        with pytest.raises(openai.BadRequestError) as refusal:
            client.completions.create(**body | {"prompt": [1] * 600})
        assert refusal.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError):
            client.completions.create(**body | {"model": "gpt-9"})


def test_demo_chat_answers_the_rendered_messages(demo: Served) -> None:
    client = openai.OpenAI(base_url=demo.url + "/v1", api_key="none", max_retries=0)
    with client:
        message: Any = {"role": "user", "content": "Who are you?"}
        ids = demo.http.post("/tokenize", json={"messages": [message]}).json()["tokens"]
        body: dict[str, Any] = {"model": "specmamba-demo", "max_tokens": 24, "temperature": 0}
        chat = client.chat.completions.create(messages=[message], **body)
        completion = client.completions.create(prompt=ids, **body)
        assert chat.choices[0].message.content == completion.choices[0].text
        stream = client.chat.completions.create(messages=[message], stream=True, **body)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == completion.choices[0].text


def test_the_demo_gives_the_same_text_in_a_batch_and_alone(demo: Served) -> None:
    prompts = ["import os\n", "class A:\n", "def f(x):\n    return"]
    body = {"max_tokens": 16, "temperature": 0.8, "seed": 7}
    together = [choice["text"] for choice in demo.complete(prompt=prompts, **body).json()["choices"]]
    assert [demo.complete(prompt=p, **body).json()["choices"][0]["text"] for p in prompts] == together


def test_demo_disconnect_frees_its_slots(demo: Served) -> None:
    body = {"prompt": "x = 1\n", "max_tokens": 400, "stream": True, "ignore_eos": True}
    with demo.http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    wait_until(lambda: "specmamba_running_requests 0.0" in demo.http.get("/metrics").text)
    assert demo.thread.call(lambda engine: engine.stats().kv_used_tokens).result(60) == 0


def test_merging_deltas_loses_nothing() -> None:
    from specmamba.server.api.streaming import merge

    first = OutputDelta("a", (1, 2), "he", 3, 0, 2)
    second = OutputDelta("a", (3,), "y", 3, 0, 3, "stop")
    assert merge(first, second) == OutputDelta("a", (1, 2, 3), "hey", 3, 0, 3, "stop")
    assert merge(None, first) is first
