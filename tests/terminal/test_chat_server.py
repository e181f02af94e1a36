"""``specmamba chat --url``: with a server, on a terminal and through pipes."""

from __future__ import annotations

import io
import json
import re
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from specmamba.chat_config import ChatConfig
from specmamba.cli import main
from specmamba.sampling_params import SamplingParams
from specmamba.terminal import remote_source
from specmamba.terminal.answer_source import AnswerEnd, AnswerError, Piece, Reasoning
from specmamba.terminal.remote_source import RemoteSource, request_fields
from tests.fake_engine import FakeEngine, Served, serving, wait_until
from tests.terminal.terminals import on_terminal

pytestmark = pytest.mark.usefixtures("no_settings_from_outside")
ANSWER = "A **bold** answer\x1b[2J.\n"
KEY = "secret-of-this-test"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(FakeEngine(text=ANSWER, context_length=4000), api_key=(KEY,)) as served:
        yield served


@pytest.fixture
def engine(served: Served) -> Iterator[FakeEngine]:
    engine: FakeEngine = served.engine
    yield engine
    engine.step_s, engine.text = 0.0, ANSWER.encode()
    wait_until(lambda: not engine.running)


@pytest.fixture
def chat(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    def chat(*lines: str, flags: tuple[str, ...] = ()) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        monkeypatch.setenv("SPECMAMBA_API_KEY", f"{KEY},another")
        status = main(["chat", "--url", served.url + "/v1/", *flags])
        return status, *capsys.readouterr()

    return chat


def test_through_pipes(engine: FakeEngine, chat: Callable[..., tuple[int, str, str]]) -> None:
    shown = ANSWER.replace("\x1b", "␛")
    status, out, err = chat("one", "/stats", "/set speculative off", "two", "x" * 5000, flags=("--top-k", "7"))
    assert status == 1
    assert out.startswith(shown + "last answer: 23 tokens in ")
    assert "  prompt: 20 tokens, 3 of them from the prefix cache\n" in out
    assert "24 tokens drafted, 11 accepted, acceptance length 1.92 (rule: target)" in out
    assert "context: 43 of 4000 tokens" in out
    assert "speculation: the server tells its operator only\nmodel: specmamba-demo\n" in out
    assert out.endswith(shown)
    first, second = engine.seen_params[-2:]
    assert (first.top_k, first.temperature, first.max_tokens, first.speculative) == (7, 0.7, 1024, True)
    assert second.speculative is False
    assert "the context is full: " in err
    assert "/reset begins a new conversation" in err


def test_a_wrong_key_is_said_with_the_flag(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["chat", "--url", served.url, "--api-key", "not-this-one"])
    err = capsys.readouterr().err
    assert "--api-key, or SPECMAMBA_API_KEY" in err
    assert "not-this-one" not in err


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(SystemExit, match="2"):
        main(["chat", "--url", f"http://127.0.0.1:{port}"])
    assert f"no server answers at http://127.0.0.1:{port}: Connection refused" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_refused_by_the_server(chat: Callable[..., tuple[int, str, str]]) -> None:
    status, out, err = chat("one", flags=("--model", "other"))
    assert (status, out) == (1, "")
    assert "other" in err


@pytest.mark.slow
def test_on_a_terminal(served: Served, engine: FakeEngine, tmp_path: Path) -> None:
    """A talk of a person: markup, editing, Ctrl-C at both places, history, Ctrl-D."""
    environment = {"XDG_STATE_HOME": str(tmp_path), "SPECMAMBA_API_KEY": KEY}
    with on_terminal("chat", "--url", served.url, environment=environment) as terminal:
        terminal.wait_for(r"specmamba-demo at http://[\d.:]+, context 4000 tokens; /help lists commands.*\n> ")
        terminal.type("hello\n")
        shown = terminal.wait_for("\n> ")
        assert "A **bold** answer␛[2J." in shown
        assert "\x1b[1mbold\x1b[0m answer" in shown
        assert "\x1b[2J" not in shown
        terminal.type("two\\\n")
        terminal.wait_for(r"\n\. ")
        engine.step_s, engine.text = 0.2, b"A * " * 900  # minutes
        terminal.type("lines\n")
        terminal.wait_for(r"A \*")
        num_aborted = len(engine.aborted)
        terminal.type("\x03")
        terminal.wait_for(r"\[stopped; /retry answers again.*\n> ")
        wait_until(lambda: len(engine.aborted) == num_aborted + 1)
        assert engine.running == {}
        engine.step_s = 0.0
        terminal.type("thrown away")
        terminal.wait_for("away")
        terminal.interrupt("\n> ")
        terminal.type("/undo\n")
        terminal.wait_for(r"taken back: two\.\.\.\].*\n> ")
        terminal.type("\x1b[A\x1b[A")
        terminal.wait_for("lines")
        terminal.type("\x15\x04")
        assert terminal.wait_for_end() == 0
        assert "Traceback" not in terminal.shown
        assert KEY not in terminal.shown
    file = tmp_path / "specmamba" / "chat_history.jsonl"
    assert file.read_text() == '"hello"\n"two\\nlines"\n"/undo"\n'
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_without_history_nothing_is_written(served: Served, tmp_path: Path) -> None:
    environment = {"XDG_STATE_HOME": str(tmp_path), "SPECMAMBA_API_KEY": KEY}
    with on_terminal("chat", "--url", served.url, "--no-history", "--no-markdown", environment=environment) as terminal:
        terminal.wait_for("\n> ")
        terminal.type("hello\n")
        assert "\x1b[1mbold" not in terminal.wait_for("\n> ")
        terminal.type("/exit\n")
        assert terminal.wait_for_end() == 0
    assert list(tmp_path.iterdir()) == []


def test_a_server_without_keys_says_what_drafts() -> None:
    with serving(FakeEngine()) as served:
        found = source(served.url)
        assert found.drafting() == "off: nothing drafts"
        for describe, expected in (
            ({"speculative_algorithm": "mtp", "speculative_num_steps": 3}, "mtp, always 3 deep"),
            ({"speculative_algorithm": "none"}, "off: nothing drafts"),
        ):
            served.thread.constants.description.update(describe)
            assert found.drafting() == expected


# Servers that are not ours, or broken


def whole_request(connection: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    length = re.search(rb"Content-Length: (\d+)", data)
    while length and len(data) - data.index(b"\r\n\r\n") - 4 < int(length[1]):
        data += connection.recv(65536)
    return data


@contextmanager
def scripted(*answers: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """A server that gives these answers, each on a connection of its own; and the requests that it got."""
    requests: list[bytes] = []

    def serve(listener: socket.socket) -> None:
        for answer in answers:
            connection, _ = listener.accept()
            with connection:
                requests.append(whole_request(connection))
                connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", requests
        thread.join(60)


def response(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", "Connection: close", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


MODELS = response(b'{"data": [{"id": "m"}, {"id": "other", "max_model_len": 9}]}')
PARAMS = SamplingParams(max_tokens=5, temperature=0.5)


def source(url: str, **flags: str) -> RemoteSource:
    return RemoteSource(ChatConfig(url=url, **flags))  # type: ignore[arg-type]


def answer_of(stream: bytes) -> list[Piece]:
    with scripted(MODELS, response(stream)) as (url, _):
        return list(source(url).answer([{"role": "user", "content": "x"}], PARAMS))


def test_another_server_of_the_interface() -> None:
    """No usage, comments between events, fields that are null."""
    stream = b': hi\n\ndata: {"choices": [{"delta": {"role": "assistant", "content": null}}]}\n\n'
    stream += b'data: {"choices": [{"delta": {"content": "a"}}], "usage": null}\n\n'
    stream += b'data: {"choices": [{"delta": {"content": "b"}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
    assert answer_of(stream) == ["a", "b", AnswerEnd("stop", 0, 0, 0, None, None)]


def events(*bodies: object) -> bytes:
    return b"".join(b"data: " + json.dumps(body).encode() + b"\n\n" for body in bodies) + b"data: [DONE]\n\n"


def talk(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stream: bytes, *lines: str
) -> tuple[int, str, str]:
    """A talk through pipes, in which the server gives one answer."""
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    with scripted(MODELS, response(stream)) as (url, _):
        status = main(["chat", "--url", url])
    return status, *capsys.readouterr()


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_is_no_part_of_the_answer(name: str) -> None:
    stream = events({"choices": [{"delta": {name: "hm"}}]}, {"choices": [{"delta": {"content": "a"}}]}, {"choices": []})
    assert answer_of(stream) == [Reasoning("hm"), "a", AnswerEnd("None", 0, 0, 0, None, None)]


def test_an_answer_that_ends_in_its_reasoning_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    choices = [{"delta": {"reasoning_content": "thinking"}, "finish_reason": "length"}]
    saved = tmp_path / "talk.json"
    status, out, err = talk(monkeypatch, capsys, events({"choices": choices}), "hi", f"/save {saved}")
    assert (status, out) == (0, "thinking\n")
    assert "[cut off in its reasoning, before the answer: max_tokens is 1024; /set max_tokens N allows more]" in err
    assert "thinking" not in saved.read_text()


def test_counts_that_no_server_has_are_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    details = {"accepted_prediction_tokens": 10**400, "rejected_prediction_tokens": 1}
    usage = {"prompt_tokens": 10**400, "completion_tokens": 10**400, "completion_tokens_details": details}
    stream = events({"choices": [{"delta": {"content": "hi"}, "finish_reason": "stop"}]}, {"usage": usage})
    monkeypatch.setattr(RemoteSource, "drafting", lambda _: "")
    status, out, _ = talk(monkeypatch, capsys, stream, "x", "/stats")
    assert status == 0
    assert out.startswith("hi\nlast answer: 0 tokens in ")
    assert "drafts: the server does not say" in out


HOSTILE = "\x1b]0;title\x07\x1b[31mred"


@pytest.mark.parametrize(
    "first",
    [
        response(json.dumps({"error": {"message": HOSTILE + "x" * 5000}}).encode(), "500 Oh no"),
        HOSTILE.encode() + b"x" * 5000 + b"\r\n\r\n",
        b"HTTP/1.1 xx" + HOSTILE.encode() + b"\r\n\r\n",
    ],
)
def test_what_a_server_says_at_the_start_does_not_act_on_the_terminal(
    first: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    with scripted(first) as (url, _), pytest.raises(SystemExit, match="2"):
        main(["chat", "--url", url])
    err = capsys.readouterr().err
    assert "␛]0;title␇␛[31mred" in err
    assert "\x1b" not in err
    assert len(err) < 700


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (b"", "the connection ended before the answer was whole"),
        (b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n', "the connection ended before"),
        (b'data: {"error": {"message": "out of luck"}}\n\n', "out of luck"),
        (b"data: <html>\n\n", "no JSON object: is this the address of an OpenAI-compatible server?"),
        (b"data: [1]\n\n", "no JSON object"),
        (b"data: " + b"x" * 50000, "an event of more than 4096 bytes"),
    ],
)
def test_a_broken_answer(stream: bytes, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_source, "MAX_EVENT_BYTES", 4096)
    with pytest.raises(AnswerError, match=message):
        answer_of(stream)


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (response(b"<html>"), "no JSON object"),
        (response(b'{"data": [{}, 5]}'), "lists no model"),
        (response(b'{"data": [{"id": "' + b"x" * 9999 + b'"}]}'), "lists no model"),
        (response(b'{"err', "500 Oh no", "Content-Length: 999"), "answers with status 500"),
        (response(b"sorry", "503 Unavailable"), "answers with status 503"),
        (response(b"", "302 Found", "Location: http://127.0.0.1:9/v1/models"), "answers with status 302"),
        (b"nonsense\r\n", "no server answers at"),
    ],
)
def test_no_server_of_the_interface(first: bytes, message: str) -> None:
    with scripted(first) as (url, _), pytest.raises(AnswerError, match=message):
        source(url, api_key=KEY)


def test_what_is_sent() -> None:
    done = response(b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n')
    with scripted(MODELS, done) as (url, requests):
        found = source(url, model="other", api_key=KEY)
        assert (found.model, found.context_length) == ("other", 9)
        list(found.answer([{"role": "user", "content": "é"}], PARAMS))
    assert all(f"Authorization: Bearer {KEY}".encode() in request for request in requests)
    assert b'"model": "other"' in requests[1]
    assert b'"max_tokens": 5, "temperature": 0.5}' in requests[1]


def test_only_what_is_set_is_sent() -> None:
    assert request_fields(PARAMS) == {"max_tokens": 5, "temperature": 0.5}
    changed = SamplingParams(top_k=3, stop=("a",), speculative=False, seed=0)
    expected = {"max_tokens": 16, "temperature": 1.0, "top_k": 3, "stop": ["a"], "speculative": False, "seed": 0}
    assert request_fields(changed) == expected
