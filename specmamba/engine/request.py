"""One request inside the engine, and what belongs to it: its text, its delta, its grammar, its seed."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specmamba.cache.prefix.node import Node
from specmamba.cache.tiers.prefix_tiers import TierWish
from specmamba.core import ANYONE, FinishReason, Handoff, OutputDelta, Owner, SpecStats, TokenLogprob
from specmamba.draft.drafter import SharedText
from specmamba.draft.predicted_text import PredictedText
from specmamba.errors import GrammarError
from specmamba.grammar import GrammarFollower
from specmamba.kernels.draft_sizing import DRAWN, GREEDY, SAMPLED
from specmamba.models.text.tokenizer import Detokenizer
from specmamba.sampling_params import AcceptRule, SamplingParams

KNOWN_STOPS = 8  # stop tokens of a request that captured steps know


class TextStream:
    """The growing output of one request.

    Tokens are processed one by one, so that a text ends at the same token however many tokens a step brings. Text that
    may be the beginning of a stop string is held back until this is decided.
    """

    def __init__(
        self, detokenizer: Detokenizer, stop_strings: Sequence[str], stop_ids: AbstractSet[int], max_tokens: int
    ) -> None:
        self._detokenizer = detokenizer
        self._stop_strings = stop_strings
        self._stop_ids = stop_ids
        known = sorted(stop_ids)[:KNOWN_STOPS]
        self.known_stops = (*known, *[-1] * (KNOWN_STOPS - len(known)))  # padded with -1
        self._known = frozenset(known)
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._held = ""

    @property
    def num_left(self) -> int:
        """Tokens that the output may still get."""
        return self._max_tokens - self._num_tokens

    def ends_on_device(self, tokens: Sequence[int]) -> bool:
        """Whether the next tokens end the output for a reason that captured steps know: length, or a known stop."""
        return len(tokens) >= self.num_left or not self._known.isdisjoint(tokens)

    def push(self, tokens: Sequence[int]) -> tuple[int, str, FinishReason | None]:
        """Take new tokens.

        Returns:
            The number of tokens that belong to the output, the text that can be sent now, and why the output ends (None
            if it continues). A stop token counts as output, but its text is not sent, and neither is a stop string.
        """
        count, text, reason = self.decide(tokens)
        return count, self.decode(tokens[:count], reason) if text is None else text, reason

    def decide(self, tokens: Sequence[int]) -> tuple[int, str | None, FinishReason | None]:
        """Do ``push``, but leave the text to ``decode`` where the end does not depend on it: its place has None then.

        Raises:
            RequestError: the tokens cannot be decoded.
        """
        return self._push_each(tokens) if self._stop_strings else self._count(tokens)

    def decode(self, tokens: Sequence[int], reason: FinishReason | None) -> str:
        """The text of the tokens that ``decide`` has counted; once for each of its calls, in their order.

        Raises:
            RequestError: the tokens cannot be decoded.
        """
        text = self._detokenizer.push_all(tokens[: len(tokens) - (reason == "stop")])
        return text if reason is None else text + self._detokenizer.flush()

    def _push_each(self, tokens: Sequence[int]) -> tuple[int, str, FinishReason | None]:
        ready = ""
        for i, token in enumerate(tokens):
            self._num_tokens += 1
            if token in self._stop_ids:
                return i + 1, ready + self._finish(), "stop"
            text, stopped = self._release(self._detokenizer.push(token))
            ready += text
            if stopped:
                return i + 1, ready, "stop"
            if self._num_tokens >= self._max_tokens:
                text, stopped = self._flush()
                return i + 1, ready + text, "stop" if stopped else "length"
        return len(tokens), ready, None

    def _count(self, tokens: Sequence[int]) -> tuple[int, None, FinishReason | None]:
        """Do ``decide`` where no text ends the output."""
        left = self._max_tokens - self._num_tokens
        count = len(tokens)
        if count < left and self._stop_ids.isdisjoint(tokens):
            self._num_tokens += count
            return count, None, None
        reason: FinishReason | None = None
        for i, token in enumerate(tokens[:left]):
            if token in self._stop_ids:
                count, reason = i + 1, "stop"
                break
        else:
            if left <= count:
                count, reason = left, "length"
        self._num_tokens += count
        return count, None, reason

    def _finish(self) -> str:
        return self._flush()[0]

    def _flush(self) -> tuple[str, bool]:
        text, stopped = self._release(self._detokenizer.flush())
        return (text, True) if stopped else (text + self._held, False)

    def _release(self, new_text: str) -> tuple[str, bool]:
        """Return the text that can be sent now, and whether a stop string was found."""
        if not self._stop_strings:
            return new_text, False
        self._held += new_text
        found = [at for at in (self._held.find(stop) for stop in self._stop_strings) if at >= 0]
        if found:
            return self._held[: min(found)], True
        keep = _longest_partial_stop(self._held, self._stop_strings)
        ready, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return ready, False


def _longest_partial_stop(text: str, stop_strings: Sequence[str]) -> int:
    """Length of the longest suffix of ``text`` that is the beginning of a stop string."""
    for length in range(min(len(text), max(map(len, stop_strings)) - 1), 0, -1):
        end = text[-length:]
        if any(stop.startswith(end) for stop in stop_strings):
            return length
    return 0


@dataclass(slots=True, eq=False)
class Request:
    """State of a request. ``row``, ``slot`` and ``node`` are set while it holds memory."""

    request_id: str
    sequence_number: int  # order of arrival: the largest is the youngest
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    text: TextStream
    rule: AcceptRule = "target"
    forced_output_ids: tuple[int, ...] = ()  # given instead of chosen, as far as they go
    extra_key: str | None = None  # cached prefixes are shared only with requests of the same key and tenant
    owner: Owner = ANYONE
    output: list[int] = field(default_factory=list)
    spec: SpecStats = field(default_factory=SpecStats)
    shared_text: SharedText = field(init=False)  # from which other requests may draft
    row: int | None = None
    slot: int | None = None
    node: Node | None = None  # its path in the prefix cache, locked
    origin: Node | None = None  # on this path: where it has gone on from, a root or a node with a state
    num_admissions: int = 0
    num_overtakes: int = 0  # younger requests that were admitted before it
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache spared at the first admission
    num_run: int = 0  # tokens that the target has run; the state is at this position
    unread_runs: list[PrefillRun] = field(default_factory=list)  # whether they were finite was not read yet
    is_verifying: bool = False  # its state is a checkpoint with pending records
    chunk_ends: set[int] = field(
        default_factory=set
    )  # positions where a chunk ends, so that a state is cached there for others
    spare_ends: set[int] = field(default_factory=set)  # likewise, where the first text of its kind may be left
    leader: tuple[Request, int] | None = None  # the request that computes its first tokens, and how many
    follower: GrammarFollower | None = None  # follows the output through its grammar
    told_error: GrammarError | None = None  # of its grammar, from rank 0, which alone follows it
    predicted: PredictedText | None = None  # that the output may repeat
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=lambda: [None])  # of the prompt, as far as known
    handoff: Handoff | None = None  # where its prompt goes to, or comes from
    tier_wish: TierWish = field(default_factory=TierWish)
    must_compute: bool = False  # ignore the prefix cache: memory does not hold the request and its cached prefix
    prompt_array: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_array = np.array(self.prompt, dtype=np.int64)
        self.shared_text = SharedText((self.owner.tenant, self.extra_key))

    @property
    def must_read_prompt(self) -> bool:
        """Whether prompt logprobs are requested and incomplete."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt)

    @property
    def is_only_run(self) -> bool:
        """Whether nothing is generated: the request ends when its known tokens have been run."""
        return self.params.max_tokens == 0

    @property
    def may_join(self) -> bool:
        """Whether the host has no part in its steps: they may be launched before the one in front of them was read.

        Nor in the run of its known tokens, but to see whether all was finite.
        """
        params, is_led = self.params, self.follower is not None or self.predicted is not None
        is_led = is_led or bool(self.forced_output_ids) or params.has_penalties or params.max_depth is not None
        return not (is_led or self.is_only_run or params.prompt_logprobs is not None or bool(params.logit_bias))

    @property
    def grammar_error(self) -> GrammarError | None:
        """Why the request cannot go on within its grammar; None: it can."""
        return self.told_error if self.follower is None else self.follower.error

    @property
    def num_tokens(self) -> int:
        """Tokens that are decided: prompt and output so far."""
        return len(self.prompt) + len(self.output)

    @property
    def root_position(self) -> int:
        """Position of the newest decided token; all tokens before it have been run once the request verifies."""
        return len(self.prompt) + len(self.output) - 1

    @property
    def root_token(self) -> int:
        return self.output[-1] if self.output else self.prompt[-1]

    @property
    def num_read(self) -> int:
        """Number of tokens that were run, and of which it is known that all was finite."""
        return self.unread_runs[0].start if self.unread_runs else self.num_run

    @property
    def num_to_extend(self) -> int:
        """Number of known tokens that are not run yet, without the last one, which is the root of the next verify."""
        return self.num_tokens - 1 - self.num_run

    @property
    def num_to_chunk_end(self) -> int:
        """Tokens to the next position where a chunk must end; 2^62 - num_run where there is none."""
        ends = (end for end in (*self.chunk_ends, *self.spare_ends) if end > self.num_run)
        return min(ends, default=1 << 62) - self.num_run

    def known_tokens(self, start: int, end: int) -> list[int]:
        """Return tokens [start, end) of prompt and output."""
        split = len(self.prompt)
        return [*self.prompt[start:end], *self.output[max(0, start - split) : max(0, end - split)]]

    def token_array(self, start: int, end: int) -> NDArray[np.int64]:
        """Return tokens [start, end) of prompt and output as an int64 array."""
        split = len(self.prompt)
        output = self.output[max(0, start - split) : max(0, end - split)]
        prompt = self.prompt_array[start:end]
        return np.concatenate([prompt, np.array(output, dtype=np.int64)]) if output else prompt

    def key(self) -> NDArray[np.int64]:
        """Return the tokens that a cached prefix can replace: all but the last, which is the root of a verify."""
        return self.token_array(0, self.num_tokens - 1)

    def delta(
        self,
        tokens: tuple[int, ...],
        text: str,
        reason: FinishReason | None,
        error: str | None = None,
        is_first: bool = True,
        **more: Any,
    ) -> OutputDelta:
        """Return what a step adds to this request.

        Args:
            tokens: new output tokens; they are in ``output`` already.
            text: new text.
            reason: why the request ends here; None: it goes on.
            error: what went wrong, when the reason is "error".
            is_first: this is the request's first delta, which brings its prompt logprobs.
            more: further fields of ``OutputDelta``.
        """
        wants_prompt = is_first and self.params.prompt_logprobs is not None and error is None
        return OutputDelta(
            request_id=self.request_id,
            token_ids=tokens,
            text=text,
            num_prompt_tokens=len(self.prompt),
            num_cached_tokens=self.num_cached_tokens,
            num_output_tokens=len(self.output),
            finish_reason=reason,
            error=error,
            spec=self.spec,
            rule=self.rule,
            prompt_logprobs=tuple(self.prompt_logprobs) if wants_prompt else None,
            **more,
        )

    def predicted_drafts(self, most: int) -> list[int]:
        """Return up to ``most`` tokens that are predicted to follow; none without a prediction."""
        if self.predicted is None:
            return []
        own = self.params.max_depth
        return self.predicted.drafts(self.output, most if own is None else min(most, own))

    @property
    def mode(self) -> int:
        """The kind of its drafts' acceptance: ``kernels.draft_sizing`` has the numbers."""
        return GREEDY if self.params.is_greedy else DRAWN if self.rule == "rejection" else SAMPLED

    @property
    def held_row(self) -> int:
        """The row, for code that only sees requests which hold one."""
        assert self.row is not None
        return self.row

    @property
    def held_slot(self) -> int:
        """The state slot, for code that only sees requests which hold one."""
        assert self.slot is not None
        return self.slot


def forced_ahead(requests: Sequence[Request], depth: int) -> Tensor:
    """Return the next ``depth`` forced output ids, [B, depth] int64 on the host; -1 where the target chooses."""
    pieces = [r.forced_output_ids[len(r.output) : len(r.output) + depth] for r in requests]
    return torch.tensor([[*piece, *[-1] * (depth - len(piece))] for piece in pieces])


def seed_of_request(engine_seed: int, number: int) -> int:
    """Return a seed for the request of this sequence number; neighbours get unrelated seeds."""
    return (engine_seed * 0x5851F42D4C957F2D + number * 0x9E3779B97F4A7C15) % (1 << 63)


@dataclass(frozen=True, slots=True)
class PrefillRun:
    """Known tokens [start, start + length) of a request, to be run by the next extend."""

    request: Request
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class ChunkState:
    """A copy of the state at the end of a run, on its way to the prefix cache."""

    slot: int
    position: int
    is_spare: bool  # as ``Request.spare_ends``
