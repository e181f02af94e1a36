"""One request inside the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specmamba.cache.prefix.node import Node
from specmamba.core import SpecStats, TokenLogprob
from specmamba.engine.text import TextStream
from specmamba.grammar import GrammarMatcher
from specmamba.sampling_params import SamplingParams


@dataclass(slots=True, eq=False)
class Request:
    """State of a request. ``row``, ``slot`` and ``node`` are set while it holds memory."""

    request_id: str
    sequence_number: int  # order of arrival: the largest is the youngest
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    text: TextStream
    forced_output_ids: tuple[int, ...] = ()  # given instead of chosen, as far as they go
    extra_key: str | None = None  # prefixes are shared with requests of the same key only
    output: list[int] = field(default_factory=list)
    spec: SpecStats = field(default_factory=SpecStats)
    row: int | None = None
    slot: int | None = None
    node: Node | None = None  # its path in the prefix cache, locked
    num_admissions: int = 0
    num_overtakes: int = 0  # younger requests that were admitted before it
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache spared at the first admission
    num_run: int = 0  # tokens that the target has run; the state stands here
    is_verifying: bool = False  # its state is a checkpoint with pending records
    chunk_ends: set[int] = field(default_factory=set)  # where a chunk ends, so that a state is left for others
    leader: tuple[Request, int] | None = None  # the request that computes its first tokens, and how many
    matcher: GrammarMatcher | None = None  # where the output stands in its grammar
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=lambda: [None])  # of the prompt, as far as known
    must_compute: bool = False  # ignore the prefix cache: it does not fit beside the prefix it would borrow
    prompt_array: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_array = np.array(self.prompt, dtype=np.int64)

    @property
    def must_read_prompt(self) -> bool:
        """Prompt logprobs requested and incomplete."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt)

    @property
    def is_only_run(self) -> bool:
        """Nothing is generated: the request ends when its known tokens have been run."""
        return self.params.max_tokens == 0

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

    @property
    def num_to_chunk_end(self) -> int:
        """Tokens to the next position where a chunk must end; a huge number where there is none."""
        return min((end for end in self.chunk_ends if end > self.num_run), default=1 << 62) - self.num_run

    def known_tokens(self, start: int, end: int) -> list[int]:
        """Tokens [start, end) of prompt and output."""
        split = len(self.prompt)
        return [*self.prompt[start:end], *self.output[max(0, start - split) : max(0, end - split)]]

    def token_array(self, start: int, end: int) -> NDArray[np.int64]:
        """Tokens [start, end) as an array."""
        split = len(self.prompt)
        output = self.output[max(0, start - split) : max(0, end - split)]
        prompt = self.prompt_array[start:end]
        return np.concatenate([prompt, np.array(output, dtype=np.int64)]) if output else prompt

    def key(self) -> NDArray[np.int64]:
        """The tokens that a cached prefix can replace: all but the last, which is the root of a verify."""
        return self.token_array(0, self.num_tokens - 1)

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


def forced_ahead(requests: Sequence[Request], depth: int) -> Tensor:
    """The next ``depth`` forced output ids, [B, depth] int64 on the host; -1 where the target chooses."""
    pieces = [r.forced_output_ids[len(r.output) : len(r.output) + depth] for r in requests]
    return torch.tensor([[*piece, *[-1] * (depth - len(piece))] for piece in pieces])


@dataclass(frozen=True, slots=True)
class PrefillRun:
    """Known tokens [start, start + length) of a request, to be run by the next extend."""

    request: Request
    start: int
    length: int
