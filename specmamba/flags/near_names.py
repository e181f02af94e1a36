"""Suggestions for names that are nearly right, and keyword names in place of flags."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_LONGEST = 64  # characters of a name that is compared


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """A half sentence that names the nearest of ``names``, or nothing where none is near."""
    close = difflib.get_close_matches(name[:_LONGEST], list(names), n=1, cutoff=0.7)
    return f"; did you mean {close[0]}?" if close else ""


def as_keywords(message: str, names: Iterable[str]) -> str:
    """A message about flags in the words of Python: ``--page-size`` is ``page_size``, where there is such a name."""
    known = set(names)

    def keyword(flag: re.Match[str]) -> str:
        name = flag[1].replace("-", "_")
        return name if name in known else flag[0]

    return re.sub(r"--([a-z][a-z0-9-]*[a-z0-9])", keyword, message)
