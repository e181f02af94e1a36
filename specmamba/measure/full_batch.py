"""Steps of full batches: the speed of decoding with nothing else in it, no prompt and no request that is missing.

The time of a step is the mean of its stretch: now and then a step also folds states, which a median would leave out.
What else wants the processor for a moment is for the median over stretches.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from specmamba import LLM, SamplingParams
from specmamba.errors import ConfigError, RequestError


@dataclass(frozen=True)
class Job:
    """One request."""

    prompt: tuple[int, ...]
    params: SamplingParams
    replay: tuple[int, ...] = ()


@dataclass(frozen=True)
class Stretch:
    """Consecutive steps of one full batch."""

    batch_size: int
    num_steps: int
    tokens: tuple[int, ...]  # of each request
    seconds: float  # of all steps
    draft_ms: float  # phases of a step; means, 0 when the clock was off
    verify_ms: float

    @property
    def num_tokens(self) -> int:
        return sum(self.tokens)

    @property
    def step_ms(self) -> float:
        """Of a whole step, as the caller sees it; the mean."""
        return self.seconds / self.num_steps * 1e3


def accept_length(stretches: Sequence[Stretch]) -> float:
    """Tokens per step and request, every request counted as if it had made as many tokens as the others.

    Requests of a full batch make as many steps, so their plain mean would count a text that is easy to guess for more
    tokens than a hard one. A walk along texts of one length counts tokens alike, and so does this: R requests over the
    sum of their steps per token.
    """
    steps_per_token = [s.num_steps / tokens for s in stretches for tokens in s.tokens]
    return len(steps_per_token) / sum(steps_per_token)


def run_full_batch(llm: LLM, jobs: Sequence[Job], clock: bool = False) -> Stretch:
    """Run requests together, and time all steps from when each of them decodes until the first one ends.

    Args:
        llm: has nothing else to do.
        jobs: as many as the batch is to have; for a full batch to last, they end at about the same length.
        clock: time the phases too.

    Raises:
        ConfigError: a request ended before the last one had begun, or a single step of all was left.
        RequestError: a request failed.
    """
    names = [f"batch-{i}" for i in range(len(jobs))]
    laps = llm.workbench.clock
    laps.is_on = clock
    try:
        for name, job in zip(names, jobs, strict=True):
            llm.engine.add_request(name, job.prompt, job.params, job.replay)
        _fill(llm, len(jobs))
        laps.reset()
        times, tokens = _run_until_one_ends(llm, names)
        phases = {phase: statistics.fmean(parts or [0.0]) * 1e3 for phase, parts in laps.seconds.items()}
    finally:
        laps.is_on = False
        for name in names:
            llm.engine.abort(name)
    return Stretch(len(jobs), len(times), tokens, sum(times), phases["draft"], phases["verify"])


def _run_until_one_ends(llm: LLM, names: Sequence[str]) -> tuple[list[float], tuple[int, ...]]:
    """Seconds of every step, and tokens of every request."""
    times, tokens, is_full = [], dict.fromkeys(names, 0), True
    while is_full:
        began = time.perf_counter()
        deltas = llm.engine.step()
        times.append(time.perf_counter() - began)
        for delta in deltas:
            tokens[delta.request_id] += len(delta.token_ids)
        is_full = not any(delta.finish_reason for delta in deltas)
        _raise_failures([delta.error for delta in deltas])
    return times, tuple(tokens.values())


def _fill(llm: LLM, batch_size: int) -> None:
    """Step until all requests have decoded in one step: the next one has no prompt in it."""
    while True:
        deltas = llm.engine.step()
        _raise_failures([delta.error for delta in deltas])
        if any(delta.finish_reason for delta in deltas):
            raise ConfigError(
                f"--max-tokens is too small: a request ended before a batch of {batch_size} was full; raise it, or "
                "give a larger --chunked-prefill-size"
            )
        if len(deltas) == batch_size:
            return


def _raise_failures(errors: Sequence[str | None]) -> None:
    for error in errors:
        if error is not None:
            raise RequestError(error)
