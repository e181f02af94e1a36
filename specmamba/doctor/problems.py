"""What the doctor finds wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Facts = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong, and what to do about it. Errors make the exit status 1, warnings do not."""

    severity: Literal["error", "warning"]
    what: str
    advice: str


def error(what: str, advice: str) -> Problem:
    """A problem that keeps the server from running."""
    return Problem("error", what, advice)


def warning(what: str, advice: str) -> Problem:
    """A problem that the server runs with."""
    return Problem("warning", what, advice)
