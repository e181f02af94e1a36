"""How many values a JSON text has, counted without reading it: each becomes an object that takes time and memory."""

from __future__ import annotations

# Reading and checking as many takes a few tenths of a second, in which no other client is answered.
MAX_VALUES, MAX_STRINGS, MAX_NESTED = 1 << 20, 1 << 17, 1 << 16
# Fewer bytes cannot hold enough values to matter.
SMALL_BODY = 1 << 18


def too_many_values(body: bytes) -> str | None:
    """What a JSON text in UTF-8 has too many of, as a part of a sentence; None: nothing."""
    # Pairs of backslashes first: only a single one escapes the quote behind it.
    body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if body.count(b'"') > 2 * MAX_STRINGS:
        return f"{MAX_STRINGS} strings"
    outside = b"".join(body.split(b'"')[::2])
    if outside.count(b"[") + outside.count(b"{") > MAX_NESTED:
        return f"{MAX_NESTED} lists and objects"
    return f"{MAX_VALUES} values" if outside.count(b",") >= MAX_VALUES else None
