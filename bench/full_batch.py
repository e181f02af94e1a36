"""Steps of full batches: the speed of decoding with nothing else in it, no prompt and no request that is missing.

The time of a step is the median of its stretch. On an idle machine that is one or two percent below the mean, because
now and then a step also folds states; where something else wants the processor for a moment, only the median holds.
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
    num_tokens: int
    seconds: float  # of all steps
    step_ms: float  # of a whole step, as the caller sees it; median
    draft_ms: float  # phases of a step; medians, 0 when the clock was off
    verify_ms: float

    @property
    def accept_length(self) -> float:
        return self.num_tokens / self.num_steps / self.batch_size


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
    engine, names = llm.engine, [f"batch-{i}" for i in range(len(jobs))]
    laps = llm.workbench.clock
    laps.is_on = clock
    try:
        for name, job in zip(names, jobs, strict=True):
            engine.add_request(name, job.prompt, job.params, job.replay)
        _fill(llm, len(jobs))
        laps.reset()
        seconds, num_tokens, is_full = [], 0, True
        while is_full:
            began = time.perf_counter()
            deltas = engine.step()
            seconds.append(time.perf_counter() - began)
            num_tokens += sum(len(delta.token_ids) for delta in deltas)
            is_full = not any(delta.finish_reason for delta in deltas)
            _raise_failures([delta.error for delta in deltas])
        phases = {phase: statistics.median(times or [0.0]) * 1e3 for phase, times in laps.seconds.items()}
    finally:
        laps.is_on = False
        for name in names:
            engine.abort(name)
    step_ms = statistics.median(seconds) * 1e3
    return Stretch(len(jobs), len(seconds), num_tokens, sum(seconds), step_ms, phases["draft"], phases["verify"])


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
