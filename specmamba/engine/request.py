"""One request inside the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from specmamba.core import SamplingParams, SpecStats
from specmamba.engine.text import TextStream


@dataclass(slots=True, eq=False)
class Request:
    """What the scheduler and the step know of a request. ``row`` and ``slot`` are set while it holds memory."""

    request_id: str
    sequence_number: int  # order of arrival: the largest is the youngest
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    text: TextStream
    forced: tuple[int, ...] = ()  # output that is replayed instead of chosen
    output: list[int] = field(default_factory=list)
    spec: SpecStats = field(default_factory=SpecStats)
    row: int | None = None
    slot: int | None = None
    num_cached_tokens: int = 0  # prompt tokens that a prefix cache spared
    num_run: int = 0  # tokens that the target has run; the state stands here

    @property
    def num_tokens(self) -> int:
        """Tokens that are decided: prompt and output so far."""
        return len(self.prompt) + len(self.output)

    @property
    def root_position(self) -> int:
        """Where the newest decided token stands; everything before it has been run once the request verifies."""
        return self.num_tokens - 1

    @property
    def root_token(self) -> int:
        return self.output[-1] if self.output else self.prompt[-1]

    @property
    def num_to_extend(self) -> int:
        """Known tokens that are not run yet, the last one left out: it is the root of the next verify."""
        return self.num_tokens - 1 - self.num_run

    def known_tokens(self, start: int, end: int) -> list[int]:
        """Tokens [start, end) of prompt and output."""
        split = len(self.prompt)
        return [*self.prompt[start:end], *self.output[max(0, start - split) : max(0, end - split)]]

    @property
    def held_row(self) -> int:
        """The row, for code that only sees requests which hold one."""
        assert self.row is not None
        return self.row

    @property
    def held_slot(self) -> int:
        """The state slot, likewise."""
        assert self.slot is not None
        return self.slot
