"""How often text repeats itself, seen without a draft: where it does so more and more, drafts may pay again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

MOST_ROWS = 2  # of a batch that are listened to, the first ones
LONGEST_START = 512  # tokens in front of the decided ones that are looked at
WEIGHT = 1 / 16  # of a token in the share


@dataclass
class _Text:
    """One request's."""

    before: tuple[int, int] = (-1, -1)  # its last two tokens
    after: dict[tuple[int, int], int] = field(default_factory=dict)  # the token that last came after such two
    share: float = 0.0  # of the newest tokens that came after the same two tokens before

    def add(self, tokens: Sequence[int], weight: float = WEIGHT) -> None:
        before, after, share = self.before, self.after, self.share
        for token in tokens:
            share += weight * ((after.get(before) == token) - share)
            after[before] = token
            before = before[1], token
        self.before, self.share = before, share


class Repeats:
    """Owns the texts of the rows, as far as they were told. Not thread-safe."""

    def __init__(self) -> None:
        self._texts: dict[int, _Text] = {}

    def begin(self, row: int, tokens: Sequence[int]) -> None:
        """Start a request, whose known ``tokens`` are no repeats."""
        text = self._texts[row] = _Text()
        text.add(tokens[-LONGEST_START:], weight=0.0)

    def add(self, rows: Sequence[int], steps: Sequence[Sequence[Sequence[int]]]) -> None:
        """Add the tokens that steps decided for each row, for the first rows of them."""
        for place, row in enumerate(rows[:MOST_ROWS]):
            self._texts[row].add([token for decided in steps for token in decided[place]])

    def share(self, rows: Sequence[int]) -> float:
        """Return which share of the newest tokens of these rows repeats their own text: a mean that fades."""
        heard = rows[:MOST_ROWS]
        return sum([self._texts[row].share for row in heard]) / len(heard)
