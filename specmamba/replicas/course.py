"""The course of one request over replicas: what its client has got, so that another replica can go on behind it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from specmamba.core import FinishReason, OutputDelta
from specmamba.engine.channels import SentRequest
from specmamba.replicas.placement import Work

MAX_MOVES = 2  # a request that ends one replica after the other must not end all of them


@dataclass(slots=True)
class Course:
    """A request, where it is, and what has come of it."""

    request: SentRequest
    line: bytes | None = None  # of the whole request, until it is sent
    replica: int | None = None  # None: none takes it yet
    num_moves: int = 0
    num_uncached: int = field(init=False)  # tokens of the prompt that a replica has yet to compute
    tokens: list[int] = field(default_factory=list)  # that the client has got
    num_characters: int = 0  # likewise
    latest: OutputDelta | None = None
    _skipped_tokens: int = 0  # of the next deltas: the client has them
    _skipped_characters: int = 0

    def __post_init__(self) -> None:
        self.num_uncached = len(self.request.prompt_token_ids)

    def placed(self, replica: int, num_resumable: int) -> None:
        """Note where it is."""
        self.replica, self.num_uncached = replica, len(self.request.prompt_token_ids) - num_resumable

    def moved(self, is_lost: bool = True) -> bool:
        """Note that its replica is gone; one that ``is_lost`` may have been ended by it.

        Returns:
            Whether it goes on elsewhere; False: replicas were lost with it too often, and it ends.
        """
        self.replica, self.num_moves = None, self.num_moves + is_lost
        self.num_uncached = len(self.request.prompt_token_ids) + len(self.tokens)
        self._skipped_tokens, self._skipped_characters = len(self.tokens), self.num_characters
        return self.num_moves <= MAX_MOVES

    def rest(self) -> SentRequest:
        """The request for the next replica: tokens that the client has are given to it, not chosen again.

        Randomness depends on the seed and the position only, so what follows them is what would have followed.
        """
        forced = self.request.forced_output_ids
        return replace(self.request, forced_output_ids=forced if len(forced) > len(self.tokens) else self.tokens)

    def next_line(self) -> bytes:
        """What the next replica is sent. Raises RequestError: it is too long."""
        line, self.line = self.line, None
        return self.rest().line() if line is None else line

    def take(self, delta: OutputDelta) -> OutputDelta | None:
        """What a delta of the replica adds for the client; None: nothing."""
        self.num_uncached = 0
        count = min(len(delta.token_ids), self._skipped_tokens)
        cut = min(len(delta.text), self._skipped_characters)
        self._skipped_tokens -= count
        self._skipped_characters -= cut
        cached = delta.num_cached_tokens if self.latest is None else self.latest.num_cached_tokens
        if self.latest is not None and (delta.num_cached_tokens != cached or delta.prompt_logprobs is not None):
            delta = replace(delta, prompt_logprobs=None, num_cached_tokens=cached)
        if count or cut:
            delta = replace(
                delta,
                token_ids=delta.token_ids[count:],
                depths=delta.depths[count:],
                logprobs=delta.logprobs[count:],
                text=delta.text[cut:],
            )
            if not (delta.token_ids or delta.text or delta.finish_reason):
                return None
        self.tokens += delta.token_ids
        self.num_characters += len(delta.text)
        self.latest = delta
        return delta

    def last_delta(self, reason: FinishReason, message: str, code: str | None = None) -> OutputDelta:
        """The end of a request that no replica goes on with; ``code``: the request is at fault."""
        latest = self.latest
        num_cached = 0 if latest is None else latest.num_cached_tokens
        ended = OutputDelta(
            self.request.request_id, (), "", len(self.request.prompt_token_ids), num_cached, len(self.tokens)
        )
        ended = replace(ended, finish_reason=reason, error=message, error_code=code)
        return ended if latest is None else replace(ended, spec=latest.spec, rule=latest.rule)


def work_of(courses: Iterable[Course], replicas: Iterable[int]) -> Mapping[int | None, Work]:
    """What each replica has to do, for all ``replicas``, and under None what waits for one."""
    found: dict[int | None, Work] = dict.fromkeys([*replicas, None], Work())
    for course in courses:
        found[course.replica] = found.get(course.replica, Work()).and_one(course.num_uncached)
    return found
