"""Suggestions for names that are nearly right, and keyword names in place of flags."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_LONGEST = 64  # characters of a name that is compared
_COMPARED = 4  # names that are counted out


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """A half sentence that names the nearest of ``names``, or nothing where none is near.

    Of those that share many characters it is the one that the fewest slips of a hand lead to, then the first.
    """
    given = name[:_LONGEST]
    close = difflib.get_close_matches(given, list(names), n=_COMPARED, cutoff=0.7)
    return f"; did you mean {min(close, key=lambda one: _num_slips(given, one))}?" if close else ""


def _num_slips(given: str, meant: str) -> int:
    """Characters that are missing, too many, wrong, or in each other's place: "prot" is one slip from "port"."""
    before, row = [0] * (len(meant) + 1), list(range(len(meant) + 1))
    for i, char in enumerate(given, 1):
        two_before, before, row = before, row, [i]
        for j, other in enumerate(meant, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (char != other)))
            if i > 1 and j > 1 and (given[i - 2], char) == (other, meant[j - 2]):
                row[j] = min(row[j], two_before[j - 2] + 1)
    return row[-1]


def as_keywords(message: str, names: Iterable[str]) -> str:
    """A message about flags in the words of Python: ``--page-size`` is ``page_size``, where there is such a name."""
    known = set(names)

    def keyword(flag: re.Match[str]) -> str:
        name = flag[1].replace("-", "_")
        return name if name in known else flag[0]

    return re.sub(r"--([a-z][a-z0-9-]*[a-z0-9])", keyword, message)
