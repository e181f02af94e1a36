"""Where a conversation is shown: plain text into a pipe; on a terminal also markup, and nothing that acts on it."""

from __future__ import annotations

import os
import re
import shutil
import sys
from typing import TextIO

from specmamba.terminal.answer_source import Reasoning
from specmamba.terminal.safe_text import TAB_WIDTH, RowCounter, safe

# What is certainly markup. A model that continues code writes comments, underscores and stars that are none.
_MARKUP = re.compile(
    r"^ {0,3}```|^ {0,3}(?:[-*]|\d{1,3}\.) +\S|\*\*\S(?:[^*\n]*\S)?\*\*|^\|.*\|\s*\n\|[ :|-]+\|", re.MULTILINE
)
_LETTERS = re.compile(r"[^\W\d_]+")  # digits and signs may number and mark, letters are text
_LANGUAGE = re.compile(r"[\w+#.-]*")  # behind the fence of a block of code
_HIDDEN = frozenset({"html_block", "html_inline", "image"})  # rich leaves out tags, and the addresses of images
MAX_DEPTH = 12  # a list in a list is two levels deeper


class Screen:
    """Prints answers as they come, and notes about them."""

    def __init__(self, out: TextIO, notes: TextIO, is_terminal: bool) -> None:
        """Answers go to ``out``; remarks to ``notes``, unless both are a terminal, where they follow one another."""
        self._out, self._notes, self._is_terminal = out, out if is_terminal else notes, is_terminal
        self._can_act = is_terminal and os.environ.get("TERM", "dumb") != "dumb"
        self._rows = RowCounter(1)
        self._ends_line = True
        self._is_reasoning: bool | None = None  # None: nothing is shown
        self._num_parts = 0  # reasoning, answer

    def begin(self) -> None:
        """An answer begins."""
        self._rows = RowCounter(shutil.get_terminal_size().columns)
        self._ends_line = True
        self._is_reasoning, self._num_parts = None, 0

    def show(self, piece: str | Reasoning) -> None:
        """Print a piece of an answer, or of the reasoning before it, which is dim on a terminal."""
        is_reasoning = isinstance(piece, Reasoning)
        text = safe(piece.text if isinstance(piece, Reasoning) else piece)
        if not text:
            return
        self._turn_to(is_reasoning)
        text = text.replace("\t", " " * TAB_WIDTH) if self._is_terminal else text
        self._rows.add(text) if self._can_act else None
        self._ends_line = text.endswith("\n")
        self._write(self._dim(text) if is_reasoning else text)

    def _turn_to(self, is_reasoning: bool) -> None:
        """Set answer and reasoning apart by an empty line; the rows of what follows are counted anew."""
        if is_reasoning == self._is_reasoning:
            return
        if self._num_parts:
            self._write("\n" if self._ends_line else "\n\n")
        self._rows = RowCounter(self._rows.num_columns)
        self._is_reasoning, self._num_parts = is_reasoning, self._num_parts + 1

    def _dim(self, text: str) -> str:
        return f"\x1b[2m{text}\x1b[0m" if self._can_act and not os.environ.get("NO_COLOR") else text

    def end(self, text: str | None = None) -> None:
        """An answer ends. With its whole ``text``, markup is shown in its place, if there is some and it is visible."""
        if text is not None and self._can_act and self._is_visible() and has_markup(safe(text)):
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
        print(self._dim(f"[{safe(text)}]"), file=self._notes, flush=True)

    def error(self, text: str) -> None:
        """Print what went wrong."""
        print(f"specmamba chat: {safe(text)}", file=self._notes if self._is_terminal else sys.stderr, flush=True)

    def _is_visible(self) -> bool:
        """Whether all of the answer is on the screen, in one part, with at most its reasoning above."""
        size = shutil.get_terminal_size()
        is_whole = not self._is_reasoning and self._num_parts <= 2
        return is_whole and size.columns == self._rows.num_columns and self._rows.num_breaks < size.lines - 1

    def _print_markup(self, text: str) -> None:
        from rich.console import Console
        from rich.markdown import Markdown

        Console(file=self._out, highlight=False).print(Markdown(text, hyperlinks=False))

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def has_markup(text: str) -> bool:
    """Whether a safe text is certainly Markdown, all of which would be shown."""
    return _MARKUP.search(text) is not None and _is_shown_whole(text)


def _is_shown_whole(text: str) -> bool:
    """Whether rich leaves nothing out, as it does with tags, definitions of links, titles, and what is nested deeply.

    All letters of the text have to be in the content of some block; and every block has to be shown as it is.
    """
    from rich.markdown import Markdown

    blocks = Markdown(text).parsed
    parts = [part for block in blocks for part in block.children or ()]
    if any(token.type in _HIDDEN or token.level > MAX_DEPTH for token in (*blocks, *parts)):
        return False
    if any("title" in part.attrs or safe(part.content) != part.content for part in parts):  # by &#x202e; for example
        return False
    content = "".join(block.info * bool(_LANGUAGE.fullmatch(block.info)) + block.content for block in blocks)
    return "".join(_LETTERS.findall(content)) == "".join(_LETTERS.findall(text))
