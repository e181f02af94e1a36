"""Text of models and servers for a terminal: nothing in it acts on the terminal, and its rows can be counted."""

from __future__ import annotations

TAB_WIDTH = 4
# Line breaks and tabs stay; a carriage return would let a line be written over.
_CONTROLS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t\r"}
_CONTROLS |= {ord("\r"): "", 0x7F: "\u2421"} | {code: f"\\x{code:x}" for code in range(0x80, 0xA0)}
# Embeddings, overrides and isolates of bidirectional text would show words in another order than they have.
_CONTROLS |= dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A)], "")


def safe(text: str) -> str:
    """Replace control characters, of which escape sequences are made, by visible ones."""
    return text.translate(_CONTROLS)


def one_line(text: str, max_characters: int) -> str:
    """Safe text in one line, cut off at its limit: what a remote says inside of a message of ours."""
    line = " ".join(safe(text[: 4 * max_characters]).split())
    return line if len(line) <= max_characters else line[:max_characters] + "..."


class RowCounter:
    """Counts the rows that text takes on a terminal of some columns, piece by piece."""

    def __init__(self, num_columns: int) -> None:
        self.num_columns = max(num_columns, 1)
        self.num_breaks = 0  # rows above the one that the cursor is in
        self._column = 0

    def add(self, text: str) -> None:
        """Take a piece of safe text without tabs."""
        from rich.cells import get_character_cell_size

        for character in text:
            if character == "\n":
                self.num_breaks, self._column = self.num_breaks + 1, 0
                continue
            width = get_character_cell_size(character)
            if self._column + width > self.num_columns:
                self.num_breaks, self._column = self.num_breaks + 1, 0
            self._column += width
