"""Where a conversation is shown: plain text into a pipe; on a terminal also markup, and nothing that acts on it."""

from __future__ import annotations

import os
import re
import shutil
import sys
from typing import TextIO

from specmamba.terminal.safe_text import TAB_WIDTH, RowCounter, safe

# What is certainly markup. A model that continues code writes comments, underscores and stars that are none.
_MARKUP = re.compile(
    r"^ {0,3}```|^ {0,3}(?:[-*]|\d{1,3}\.) +\S|\*\*\S(?:[^*\n]*\S)?\*\*|^\|.*\|\s*\n\|[ :|-]+\|", re.MULTILINE
)
_CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.DOTALL)
_TAG = re.compile(r"</?[a-zA-Z]")  # rich leaves out what is in tags, such as a model's thoughts


class Screen:
    """Prints answers as they come, and notes about them."""

    def __init__(self, out: TextIO, notes: TextIO, is_terminal: bool) -> None:
        """Answers go to ``out``; remarks to ``notes``, unless both are a terminal, where they follow one another."""
        self._out, self._notes, self._is_terminal = out, out if is_terminal else notes, is_terminal
        self._can_act = is_terminal and os.environ.get("TERM", "dumb") != "dumb"
        self._rows = RowCounter(1)
        self._ends_line = True

    def begin(self) -> None:
        """An answer begins."""
        self._rows = RowCounter(shutil.get_terminal_size().columns)
        self._ends_line = True

    def show(self, piece: str) -> None:
        """Print a piece of an answer."""
        text = safe(piece).replace("\t", " " * TAB_WIDTH) if self._is_terminal else safe(piece)
        if text:
            self._rows.add(text) if self._can_act else None
            self._ends_line = text.endswith("\n")
            self._write(text)

    def end(self, text: str | None = None) -> None:
        """An answer ends. With its whole ``text``, markup is shown in its place, if there is some and it is visible."""
        if text is not None and self._can_act and self._is_visible() and has_markup(text):
            rows = self._rows.num_breaks
            self._write("\r" + (f"\x1b[{rows}A" if rows else "") + "\x1b[J")
            self._print_markup(safe(text))
        elif not self._ends_line:
            self._write("\n")
        self._ends_line = True

    def line(self, text: str) -> None:
        """Print what a command was asked for."""
        self._write(safe(text) + "\n")

    def note(self, text: str) -> None:
        """Print a remark."""
        text = f"[{safe(text)}]"
        style = ("\x1b[2m", "\x1b[0m") if self._can_act and not os.environ.get("NO_COLOR") else ("", "")
        print(text.join(style), file=self._notes, flush=True)

    def error(self, text: str) -> None:
        """Print what went wrong."""
        print(f"specmamba chat: {safe(text)}", file=self._notes if self._is_terminal else sys.stderr, flush=True)

    def _is_visible(self) -> bool:
        size = shutil.get_terminal_size()
        return size.columns == self._rows.num_columns and self._rows.num_breaks < size.lines - 1

    def _print_markup(self, text: str) -> None:
        from rich.console import Console
        from rich.markdown import Markdown

        Console(file=self._out, highlight=False).print(Markdown(text, hyperlinks=False))

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def has_markup(text: str) -> bool:
    """Whether a text is certainly Markdown, all of which would be shown."""
    return _MARKUP.search(text) is not None and _TAG.search(_CODE.sub("", text)) is None
