"""Where a JSON object or array ends, in a text that is still being written."""

from __future__ import annotations

import re

_MARKS = re.compile(r'["\\{}\[\]]')


class JsonScan:
    """Counts brackets outside of strings. Whether what they enclose is JSON, a decoder finds out afterwards."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._skip_next = False  # a backslash was the last character of the piece before

    def push(self, text: str) -> int | None:
        """The number of characters of this piece that belong to the value, or None while all do and it goes on.

        The first character of the first piece must be the opening bracket.
        """
        at = 1 if self._skip_next and text else 0
        self._skip_next = self._skip_next and not text
        while mark := _MARKS.search(text, at):
            at = mark.end()
            match mark[0]:
                case "\\":
                    at += 1
                case '"':
                    self._in_string = not self._in_string
                case "{" | "[" if not self._in_string:
                    self._depth += 1
                case "}" | "]" if not self._in_string:
                    self._depth -= 1
                    if self._depth == 0:
                        return at
        self._skip_next = self._skip_next or at > len(text)
        return None
