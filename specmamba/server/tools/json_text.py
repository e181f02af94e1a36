"""JSON that a model or a client has written: read without surprises, and written so that it can be sent."""

from __future__ import annotations

import json
from typing import Any


def read_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError for everything else, NaN and endless nesting included."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def write_json(value: Any) -> str:
    """A JSON text that UTF-8 has bytes for."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which only an escape can write
        return json.dumps(value)
    return text


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
