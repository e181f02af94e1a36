"""What reaches a terminal, and what reaches a pipe."""

from __future__ import annotations

import io

import pytest

from specmamba.terminal.answer_source import Reasoning
from specmamba.terminal.safe_text import RowCounter, one_line, safe
from specmamba.terminal.screen import Screen, has_markup

HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b1m\x00\x7f\rx\r\n\ty"


def test_control_characters_are_shown() -> None:
    assert safe(HOSTILE) == "␛]0;title␇␛[2J\\x9b1m␀␡x\n\ty"
    for code in (*range(32), *range(0x7F, 0xA0)):
        shown = safe(chr(code))
        assert shown in ("\n", "\t", "") or shown.isprintable()
    assert safe("é 世界 🙂 ¡") == "é 世界 🙂 ¡"
    assert safe("a\u202ab\u202ec\u2066d\u2069e") == "abcde"  # they would show words in another order


def test_what_a_remote_says_is_one_line_of_bounded_length() -> None:
    assert one_line("a\n\x1b[31m  b", 20) == "a ␛[31m b"
    assert one_line("x" * 1000, 20) == "x" * 20 + "..."


@pytest.mark.parametrize(
    ("text", "breaks"),
    [("", 0), ("x" * 10, 0), ("x" * 11, 1), ("x" * 10 + "\n", 1), ("a\n\nb", 2), ("世" * 5, 0), ("x" + "世" * 5, 1)],
)
def test_rows_are_counted(text: str, breaks: int) -> None:
    counter = RowCounter(10)
    for character in text:
        counter.add(character)
    assert counter.num_breaks == breaks


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\n```\nx\n```\n", True),
        ("this is **bold**.", True),
        ("- one\n- two", True),
        ("1. one", True),
        ("| a | b |\n|---|---|\n| 1 | 2 |", True),
        ("plain text, _or nearly_", False),
        ("# a comment\ndef f(**a, **b):\n    return __init__(*a)\n", False),
        ("<think>\nhm\n</think>\n**bold**", False),  # rich would leave the tags' text out
        ("`<b>` is **bold**", True),
        ("```html\n<b>\n```", True),
        ("**a** [x](http://h/)", True),
        ("- a\n  - b\n    - c", True),
        ("**a**\n\n<!-- hidden -->\n\nb", False),
        ("**a** <?php echo 1 ?> b", False),
        ("**a** \\`<b>\\`", False),
        ("**a**\n\n[foo]: http://hidden.example", False),
        ("**a** ![alt](http://u/x.png)", False),
        ('**a** [x](http://h/ "title")', False),
        ("```py hidden words\nx\n```", False),
        ("| a | b |\n|---|---|\n| 1 | 2 | hidden |", False),
        ("> " * 300 + "**b**", False),
        ("- " * 150 + "**b**", False),
        ("**a** &#x202e;b", False),
    ],
)
def test_only_what_is_certainly_markup_is_shown_as_such(text: str, expected: bool) -> None:
    assert has_markup(text) is expected


def shown(text: str, monkeypatch: pytest.MonkeyPatch, is_terminal: bool, **environment: str) -> str:
    for name, value in ({"COLUMNS": "30", "LINES": "40", "TERM": "xterm"} | environment).items():
        monkeypatch.setenv(name, value)
    out = io.StringIO()
    out.isatty = lambda: is_terminal  # type: ignore[method-assign]
    screen = Screen(out, io.StringIO(), is_terminal)
    screen.begin()
    for start in range(0, len(text), 3):
        screen.show(text[start : start + 3])
    screen.end(text)
    return out.getvalue()


MARKUP = "a **bold**\n\x1b[31mword [x](http://h/)"


def test_a_finished_answer_is_shown_with_its_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _, rest = shown(MARKUP, monkeypatch, True).partition("\r\x1b[1A\x1b[J")
    assert plain == safe(MARKUP)
    assert "\x1b[1mbold\x1b[0m" in rest
    assert "␛[31mword" in rest
    assert "http://h/" in rest
    assert "\x1b]8" not in rest  # no links that hide where they lead
    assert "**" not in rest


@pytest.mark.parametrize(
    ("is_terminal", "environment"),
    [(False, {}), (True, {"TERM": "dumb"}), (True, {"LINES": "2"})],
    ids=["pipe", "dumb", "scrolled away"],
)
def test_elsewhere_it_stays_as_it_came(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, environment: dict[str, str]
) -> None:
    assert shown(MARKUP, monkeypatch, is_terminal, **environment) == safe(MARKUP) + "\n"


def test_reasoning_is_dim_and_above_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def talk(is_terminal: bool, *pieces: str | Reasoning) -> str:
        out = io.StringIO()
        out.isatty = lambda: is_terminal  # type: ignore[method-assign]
        screen = Screen(out, io.StringIO(), is_terminal)
        screen.begin()
        for piece in pieces:
            screen.show(piece)
        screen.end("".join(piece for piece in pieces if isinstance(piece, str)))
        return out.getvalue()

    for name, value in {"COLUMNS": "30", "LINES": "40", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    pieces = (Reasoning("hm\n\x1b"), Reasoning("hm"), "a\n**b**")
    assert talk(False, *pieces) == "hm\n␛hm\n\na\n**b**\n"
    plain, _, rest = talk(True, *pieces).partition("\r\x1b[1A\x1b[J")  # the answer's rows only
    assert plain == "\x1b[2mhm\n␛\x1b[0m\x1b[2mhm\x1b[0m\n\na\n**b**"
    assert "\x1b[1mb\x1b[0m" in rest
    assert talk(True, "**a**", Reasoning("x"), "b") == "**a**\n\n\x1b[2mx\x1b[0m\n\nb\n"
    assert talk(False, Reasoning("x")) == "x\n"


def test_an_answer_ends_with_one_line_break(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown("a\n", monkeypatch, False) == "a\n"
    assert shown("", monkeypatch, False) == ""
