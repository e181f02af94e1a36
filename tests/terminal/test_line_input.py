"""Messages out of lines, and the history of messages."""

from __future__ import annotations

import io
import json
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from specmamba.errors import RequestError
from specmamba.terminal import line_input
from specmamba.terminal.line_input import (
    MAX_CHARACTERS,
    MAX_ENTRIES,
    LineEditor,
    PipeReader,
    history_file,
    read_history,
    read_message,
    write_history,
)


def messages(text: str) -> Iterator[str]:
    reader = PipeReader(io.StringIO(text))
    while True:
        try:
            yield read_message(reader.read_line)
        except EOFError:
            return


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\nb\n", ["a", "b"]),
        ("a\r\nb", ["a", "b"]),
        ("a\\\nb\\\nc\nd\n", ["a\nb\nc", "d"]),
        ("a\\\\\nb\n", ["a\\\\", "b"]),
        ("a\\", ["a\n"]),
        ('"""\na\n  b\\\n"""\nc\n', ["a\n  b\\", "c"]),
        ('  """a\n\nb"""  \n', ["a\n\nb"]),
        ('"""a"""\n', ["a"]),
        ('"""\na\n', ["a"]),
        ('x """ y\n', ['x """ y']),
        ("\n", [""]),
        ("", []),
    ],
)
def test_messages(text: str, expected: list[str]) -> None:
    assert list(messages(text)) == expected


@pytest.mark.parametrize(
    "long",
    [
        "x" * (MAX_CHARACTERS + 1),
        '"""' + ("y" * 9999 + "\n") * (MAX_CHARACTERS // 9999 + 2) + '"""',
        ("z" * 9999 + "\\\n") * (MAX_CHARACTERS // 9999 + 2),
    ],
    ids=["line", "quotes", "backslashes"],
)
def test_a_message_that_is_too_long_is_left_out_whole(long: str) -> None:
    reader = PipeReader(io.StringIO(f"{long}\nnext\n"))
    with pytest.raises(RequestError, match=f"more than {MAX_CHARACTERS} characters"):
        read_message(reader.read_line)
    assert read_message(reader.read_line) == "next"


@pytest.fixture
def no_readline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The history of this process is the test run's own."""
    monkeypatch.setattr(line_input, "_readline", lambda: None)


@pytest.mark.usefixtures("no_readline")
def test_the_history_is_kept_for_its_owner_only(tmp_path: Path) -> None:
    file = tmp_path / "state" / "history.jsonl"
    editor = LineEditor(file)
    for message in ("first", "two\nlines é", "two\nlines é", "  ", "x" * 10_000):
        editor.remember(message)
    other = LineEditor(file)  # a chat beside it, which ends first
    other.remember("of another")
    assert other.save() is None
    assert editor.save() is None
    assert read_history(file) == ["of another", "first", "two\nlines é"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert [path.name for path in file.parent.iterdir()] == [file.name]


@pytest.mark.usefixtures("no_readline")
def test_the_history_is_bounded(tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    write_history(file, [str(i) for i in range(MAX_ENTRIES)])
    editor = LineEditor(file)
    editor.remember("new")
    assert editor.save() is None
    assert read_history(file) == [*map(str, range(1, MAX_ENTRIES)), "new"]
    write_history(file, ["x" * 8000] * MAX_ENTRIES)
    assert 0 < file.stat().st_size <= line_input.MAX_FILE_BYTES
    assert read_history(file)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda file: file.write_text('"good"\nno json\n5\n["x"]\n"a\\u0000b"\n' + "[" * 9999 + "\n"),
        lambda file: file.write_text('"good"\n' + json.dumps("x" * 10_000) + "\n"),
    ],
)
def test_spoiled_lines_are_left_out(tmp_path: Path, spoil: Callable[[Path], object]) -> None:
    spoil(file := tmp_path / "history.jsonl")
    assert read_history(file) == ["good"]


@pytest.mark.parametrize("spoil", [lambda file: file.mkdir(), lambda file: file.write_bytes(b'"\xff"\n'), lambda _: 0])
def test_a_file_that_is_no_history_is_an_empty_one(tmp_path: Path, spoil: Callable[[Path], object]) -> None:
    spoil(file := tmp_path / "history.jsonl")
    assert read_history(file) == []


@pytest.mark.usefixtures("no_readline")
def test_a_history_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    editor = LineEditor(tmp_path / "file" / "history.jsonl")
    editor.remember("x")
    assert "cannot be written" in str(editor.save())


def test_where_the_history_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert history_file() == tmp_path / "specmamba" / "chat_history.jsonl"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert history_file() == tmp_path / ".local" / "state" / "specmamba" / "chat_history.jsonl"


def test_without_a_home_there_is_no_history(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", fail)
    assert history_file() is None


def test_entries_that_the_locale_has_not_are_not_called_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class AsciiReadline:
        """readline in a locale without other characters."""

        entries: ClassVar[list[bytes]] = []

        def set_auto_history(self, is_on: bool) -> None:
            assert not is_on

        def add_history(self, entry: str) -> None:
            self.entries.append(entry.encode("ascii"))

    monkeypatch.setattr(line_input, "_readline", AsciiReadline)
    write_history(file := tmp_path / "history.jsonl", ["h\u00e9", "ok"])
    editor = LineEditor(file)
    editor.remember("\u2192")
    editor.remember("new")
    assert AsciiReadline.entries == [b"ok", b"new"]
    assert editor.save() is None
    assert read_history(file) == ["h\u00e9", "ok", "\u2192", "new"]


def test_a_typed_line_that_is_no_text_costs_that_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda prompt: b"a\xff".decode())
    with pytest.raises(RequestError, match="no text in utf-8: there is the byte 0xff"):
        LineEditor(None).read_line("> ")
