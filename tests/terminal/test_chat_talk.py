"""``specmamba chat`` through pipes, with a fake engine in this process: messages, commands, errors."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specmamba import errors
from specmamba.chat_config import ChatConfig
from specmamba.cli import main
from specmamba.core import OutputDelta, SizingStats
from specmamba.flags.command_line import parse_command_line
from specmamba.server_config import ServerConfig
from tests.fake_engine import FakeEngine, FakeStats

pytestmark = pytest.mark.usefixtures("no_settings_from_outside")
Chat = Callable[..., tuple[int, str, str]]
ANSWER = "An answer.\n"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    engine = FakeEngine(text=ANSWER, context_length=200)
    monkeypatch.setattr("specmamba.local_engine.build_engine", lambda config: engine)
    return engine


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Chat:
    def chat(*lines: str, flags: tuple[str, ...] = ()) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        status = main(["chat", *flags])
        return status, *capsys.readouterr()

    return chat


def asked(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prompts that the engine gets from now on."""
    prompts: list[str] = []
    add = engine.add_request

    def record(request_id: str, prompt: Any, *rest: Any, **more: Any) -> None:
        prompts.append(engine.tokenizer.decode(prompt))
        add(request_id, prompt, *rest, **more)

    monkeypatch.setattr(engine, "add_request", record)
    return prompts


def test_one_message_a_line(engine: FakeEngine, chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = asked(engine, monkeypatch)
    assert chat("one", "", '"""', "two", "lines", '"""', "//etc/passwd") == (0, ANSWER * 3, "")
    first, second = "<user>one", f"<assistant>{ANSWER}<user>two\nlines"
    third = f"<assistant>{ANSWER}<user>/etc/passwd"
    assert prompts == [f"{first}<assistant>", f"{first}{second}<assistant>", f"{first}{second}{third}<assistant>"]
    assert engine.num_closed == 1


def test_flags_reach_the_engine_and_the_requests(
    engine: FakeEngine, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def build(config: object) -> FakeEngine:
        seen.append(config)
        return engine

    monkeypatch.setattr("specmamba.local_engine.build_engine", build)
    flags = ("--context-length", "64", "--no-disable-radix-cache", "--top-k", "5", "--max-tokens", "9", "--stop", "a,b")
    chat("x", flags=(*flags, "--system", "short"))
    assert seen[0].context_length == 64
    (params,) = engine.seen_params
    assert (params.top_k, params.max_tokens, params.stop, params.temperature) == (5, 9, ("a,b",), 0.7)


def test_reset_undo_retry_and_system(engine: FakeEngine, chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = asked(engine, monkeypatch)
    status, out, err = chat(
        "/system Be brief.", "one", "two", "/undo", "/retry", "/reset", "/system none", "three", "/system"
    )
    assert status == 0
    assert prompts == [
        "<system>Be brief.<user>one<assistant>",
        f"<system>Be brief.<user>one<assistant>{ANSWER}<user>two<assistant>",
        "<system>Be brief.<user>one<assistant>",
        "<user>three<assistant>",
    ]
    assert out == ANSWER * 4 + "there is no system message: /system TEXT sets one\n"
    assert "[taken back: two]" in err


def test_set(engine: FakeEngine, chat: Chat) -> None:
    lines = ("/set temperature 0.2", "/set top-p .5", "/set speculative off", "/set stop x y", "/set seed 3", "a")
    status, out, err = chat(*lines, "/set temperature none", "/set stop none", "/set", "b")
    assert status == 0
    first, second = engine.seen_params
    assert (first.temperature, first.top_p, first.speculative, first.stop, first.seed) == (0.2, 0.5, False, ("x y",), 3)
    assert (second.temperature, second.top_p, second.stop, second.max_tokens) == (0.7, 0.5, (), 1024)
    assert "[top_p 0.5]" in err
    assert "temperature 0.7\nstop none\ntop_p 0.5\n" in out
    assert "speculative off\nmarkdown on\n" in out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/set temprature 1", "there is no setting 'temprature'; did you mean temperature?"),
        ("/set xyz 1", "there are max_tokens, temperature"),
        ("/set temperature hot", "temperature: Input should be a valid number"),
        ("/set temperature 300", "temperature: Input should be less than or equal to 100 (got '300')"),
        ("/set speculative 7", "speculative: on or off, not '7'"),
        ("/set top_p", "it is written /set NAME VALUE"),
        ("/rety", "there is no command /rety; did you mean /retry?"),
        ("/", "there is no command /; /help lists them"),
        ("/reset now", "it is written /reset"),
        ("/save", "it is written /save FILE"),
        ("/save x.json", "there is nothing to save"),
        ("/retry", "there is no message to answer again"),
        ("/undo", "there is nothing to take back"),
        (
            "x" * 300,
            "the context is full: this conversation has 317 tokens, and at most 199 leave room for an answer; /reset",
        ),
    ],
)
def test_what_cannot_be_done_is_said_and_the_talk_goes_on(
    engine: FakeEngine, chat: Chat, line: str, message: str
) -> None:
    status, out, err = chat(line, "next")
    assert (status, out) == (1, ANSWER)
    assert err.startswith(f"specmamba chat: {message}") or message in err


def test_help_names_every_command(engine: FakeEngine, chat: Chat) -> None:
    _, out, _ = chat("/help", "/exit", "not sent")
    for name in ("help", "stats", "reset", "system", "retry", "undo", "set", "save", "exit"):
        assert f"\n/{name} " in f"\n{out}"
    assert engine.num_added == 0


def test_stats(engine: FakeEngine, chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    sizing = SizingStats(1, 1, 0, 1, 1, 0, 0.1, 0.1, 0.1, 0.0, 0, (1.0,), "off: drafts are predicted to gain -3 %")
    monkeypatch.setattr(engine, "stats", lambda: FakeStats(0, 0, sizing=sizing))
    _, out, _ = chat("/stats", "one", "two", "/stats", "/set speculative off", "/stats")
    first, _, rest = out.partition(ANSWER * 2)
    assert first.startswith("no answer yet\nspeculation: mtp (off: drafts are predicted")
    assert "last answer: 11 tokens in " in rest
    assert "prompt: 51 tokens, 3 of them from the prefix cache" in rest
    assert "drafts: 12 tokens drafted, 5 accepted, acceptance length 1.83 (rule: target)" in rest
    assert "all 2 answers: 22 tokens" in rest
    assert "context: 62 of 200 tokens after the last answer, 2 exchanges" in rest
    assert "speculation: off by /set speculative; else mtp (off" in rest


def test_save(engine: FakeEngine, chat: Chat, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    (taken := tmp_path / "taken").write_text("mine")
    status, _, err = chat(
        "one", f"/save {file}", "two", f"/save {file}", f"/save {taken}", f"/save {tmp_path}/no/x", "/save a\0b"
    )
    assert status == 1
    saved = json.loads(file.read_text())
    turn = {"role": "assistant", "content": ANSWER}
    assert saved["messages"] == [{"role": "user", "content": "one"}, turn, {"role": "user", "content": "two"}, turn]
    assert (saved["model"], saved["temperature"], saved["max_tokens"]) == ("fake", 0.7, 1024)
    assert taken.read_text() == "mine"
    assert f"{taken} exists: name another file" in err
    assert "cannot be written: No such file" in err
    assert "is no name of a file" in err


def test_why_an_answer_is_cut_off_is_said(engine: FakeEngine, chat: Chat) -> None:
    assert "[cut off: max_tokens is 4; /set max_tokens N allows more]" in chat("x", flags=("--max-tokens", "4"))[2]
    status, out, err = chat("y" * 175)
    assert (status, out) == (0, ANSWER[:8] + "\n")
    assert "[cut off: the context is full (200 tokens); /reset begins a new conversation" in err


def test_escape_sequences_of_a_model_do_not_get_out(engine: FakeEngine, chat: Chat) -> None:
    engine.text = b"a\x1b[2Jb\xc2\x9b1m"
    assert chat("x")[1] == "a␛[2Jb\\x9b1m\n"


def test_an_engine_that_fails_ends_the_talk(engine: FakeEngine, chat: Chat, caplog: pytest.LogCaptureFixture) -> None:
    engine.fail_at_step = 2
    status, out, err = chat("one", "two")
    assert (status, out) == (1, "An\n")
    assert "specmamba chat: the engine failed: RuntimeError: scripted failure" in err
    assert engine.num_added == 1


def test_a_request_that_the_engine_gives_up_costs_one_answer(engine: FakeEngine, chat: Chat) -> None:
    step, broken = engine.step, [True]

    def once_broken() -> list[OutputDelta]:
        (delta,) = step()
        if not broken.pop(0) if broken else True:
            return [delta]
        engine.running.clear()
        return [OutputDelta(delta.request_id, (), "", 1, 0, 0, "error", "out of luck")]

    engine.step = once_broken  # type: ignore[method-assign]
    assert chat("one", "two") == (1, ANSWER, "specmamba chat: out of luck\n")


def test_ctrl_c_in_a_pipe_aborts_the_answer_and_ends(
    engine: FakeEngine, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: object, piece: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("specmamba.terminal.screen.Screen.show", interrupt)
    assert chat("one", "two")[0] == 130
    assert len(engine.aborted) == 1
    assert (engine.running, engine.num_closed) == ({}, 1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--temperature", "-1"), "--temperature"),
        (("--stop", ""), "stop: "),
        (("--url", "localhost:1"), "--url: an address is written like http://127.0.0.1:30000"),
        (("--api-key", "x"), "--api-key: only servers ask for keys; add --url"),
        (
            ("--url", "http://h", "--dtype", "float32", "--no-disable-radix-cache"),
            "--dtype, --no-disable-radix-cache: the server",
        ),
        (("--url", "http://h", "--seed=5"), "(/set seed N seeds answers)"),
        (("--url", "http://h", "--block-size", "4"), "--block-size: the server of --url has its own"),
        (("--url", "http://h", "--tp", "1"), "--tp: the server of --url has its own"),
        (("--url", "http://h", "--speculative-config.method", "mtp"), "--speculative-config.method: the server"),
        (("--skip-tokenizer-init",), "--skip-tokenizer-init: this command reads and writes texts: drop it"),
        (("--url", "http://127.0.0.1:9", "--api-key", "e\u00e9"), "a key is printable ASCII text"),
    ],
)
def test_flags_that_cannot_work(
    flags: tuple[str, ...], message: str, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["chat", *flags])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://bob:secret@h/", "bob:se/cr?et@h", "http://h/?key=secret", "http://h/#secret"])
def test_an_address_is_repeated_without_its_secrets(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["chat", "--url", url])
    err = capsys.readouterr().err
    assert "bob" not in err
    assert "se" not in err.partition("(got ")[2]
    assert re.search(r"like http://127.0.0.1:30000 \(got '(http://)?h/?'\)", err)


@pytest.mark.parametrize("keys", ["a,b", '["a","b"]', "a"])
def test_the_key_is_the_first_one_that_the_server_reads(keys: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECMAMBA_API_KEY", keys)
    key = parse_command_line(ChatConfig, "chat", []).api_key
    assert key == parse_command_line(ServerConfig, "serve", []).api_key[0]


def test_input_that_is_no_text_ends_the_talk_with_a_sentence(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"one\n\xff\n"), "utf8", errors="strict"))
    with pytest.raises(SystemExit, match="2"):
        main(["chat"])
    assert "error: what is read is no text in utf-8: there is the byte 0xff" in capsys.readouterr().err
    assert engine.num_closed == 1


def test_a_file_of_a_home_that_is_not_there(engine: FakeEngine, chat: Chat) -> None:
    status, out, err = chat("one", "/save ~no-such-user/x", "two")
    assert (status, out) == (1, ANSWER * 2)
    assert "~no-such-user/x cannot be written" in err


def test_a_model_without_a_chat_template(
    chat: Chat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine(has_chat_template=False)
    monkeypatch.setattr("specmamba.local_engine.build_engine", lambda config: engine)
    with pytest.raises(SystemExit, match="2"):
        main(["chat"])
    assert (
        "error: this model has no chat template: it continues texts, which specmamba generate does"
        in capsys.readouterr().err
    )
    assert engine.num_closed == 1


def test_an_error_of_loading_speaks_of_flags(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(config: object) -> None:
        raise errors.ConfigError("--page-size 3: no")

    monkeypatch.setattr("specmamba.local_engine.build_engine", fail)
    with pytest.raises(SystemExit, match="2"):
        main(["chat"])
    assert capsys.readouterr().err == "specmamba chat: error: --page-size 3: no\n"
