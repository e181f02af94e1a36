"""``specmamba generate --json``: all prompts in one batch, one JSON object for each on standard output, a line each."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specmamba.errors import NotEnoughMemoryError, SpecmambaError

if TYPE_CHECKING:
    from specmamba.core import OutputDelta
    from specmamba.engine.engine import Engine
    from specmamba.sampling_params import SamplingParams

REFUSED, FAILED, INTERRUPTED = 2, 1, 130


def generate_json(
    build_engine: Callable[[], Engine],
    read_prompts: Callable[[], Sequence[str]],
    sampling_params: Callable[[], SamplingParams],
) -> int:
    """Answer prompts, in their order.

    Returns:
        0; 1 where the engine gave a prompt up, whose object then has an ``error``; 2 where nothing was run, and the
        error is a JSON object on standard error; 130 after Ctrl-C, with what there was of every prompt.
    """
    try:
        params, prompts = sampling_params(), read_prompts()
        engine = build_engine()
        answers = _checked(engine, prompts, params)
    except SpecmambaError as error:
        return _refuse(error)
    except Exception as error:
        if (shortage := NotEnoughMemoryError.found_in(error)) is None:
            raise
        return _refuse(shortage)
    is_whole = _run(engine, answers, params)
    if not is_whole:  # in the middle of a step the engine cannot be closed
        return INTERRUPTED
    engine.close()
    return FAILED if any(answer.error for answer in answers) else 0


@dataclass
class _Answer:
    """One prompt, and what came of it."""

    index: int
    prompt: str
    prompt_ids: list[int]
    seed: int = 0
    added_at: float = 0.0
    first_at: float | None = None
    ended_at: float = 0.0
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    last: OutputDelta | None = None

    @property
    def request_id(self) -> str:
        return f"prompt-{self.index}"

    @property
    def has_ended(self) -> bool:
        return self.last is not None and self.last.finish_reason is not None

    @property
    def error(self) -> str | None:
        return None if self.last is None else self.last.error

    def take(self, delta: OutputDelta) -> None:
        """Add what a step gave."""
        self.ended_at = time.perf_counter()
        if delta.token_ids and self.first_at is None:
            self.first_at = self.ended_at
        self.text.append(delta.text)
        self.token_ids += delta.token_ids
        self.last = delta

    def as_json(self, model: str) -> dict[str, Any]:
        """The object of this prompt; docs/quickstart.md describes it."""
        last = self.last
        return {
            "index": self.index,
            "model": model,
            "prompt": self.prompt,
            "text": "".join(self.text),
            "token_ids": self.token_ids,
            "finish_reason": "abort" if last is None else last.finish_reason or "abort",
            "error": self.error,
            "seed": self.seed,
            "accept_rule": None if last is None else last.rule,
            "usage": self._usage(),
            "times": self._times(),
        }

    def _usage(self) -> dict[str, Any]:
        if (last := self.last) is None:
            return {"prompt_tokens": len(self.prompt_ids), "completion_tokens": 0}
        return {
            "prompt_tokens": last.num_prompt_tokens,
            "cached_tokens": last.num_cached_tokens,
            "completion_tokens": last.num_output_tokens,
            "drafted_tokens": last.spec.num_draft_tokens,
            "accepted_tokens": last.spec.num_accepted_tokens,
            "verify_steps": last.spec.num_verify_steps,
            "accept_length": round(last.spec.accept_length, 4),
        }

    def _times(self) -> dict[str, float | None]:
        """Seconds from the moment when the prompt was queued."""
        total = max(self.ended_at - self.added_at, 0.0) if self.added_at else 0.0
        first = None if self.first_at is None else self.first_at - self.added_at
        per_second = len(self.token_ids) / total if total > 0 else None
        return {
            "first_token_s": None if first is None else round(first, 6),
            "total_s": round(total, 6),
            "tokens_per_second": None if per_second is None else round(per_second, 2),
        }


def _checked(engine: Engine, prompts: Sequence[str], params: SamplingParams) -> list[_Answer]:
    """Encode all prompts. Raises RequestError for one that can never run; then none is run."""
    answers = [_Answer(index, text, engine.tokenizer.encode(text)) for index, text in enumerate(prompts)]
    for answer in answers:
        engine.check_request(answer.prompt_ids, params)
    return answers


def _run(engine: Engine, answers: Sequence[_Answer], params: SamplingParams) -> bool:
    """Print the objects as they are complete, in the order of the prompts. Returns False after Ctrl-C."""
    model = str(engine.describe()["model"])
    unprinted = deque(answers)
    try:
        for _ in _steps(engine, answers, params):
            while unprinted and unprinted[0].has_ended:
                _print(unprinted.popleft(), model)
    except KeyboardInterrupt:
        for answer in unprinted:
            _print(answer, model)
        return False
    return True


def _steps(engine: Engine, answers: Sequence[_Answer], params: SamplingParams) -> Iterator[None]:
    """Run all requests, as many at a time as the engine takes; yields after every step."""
    from specmamba.engine.request import seed_of_request

    waiting = deque(answers)
    by_id = {answer.request_id: answer for answer in answers}
    while waiting or engine.has_unfinished_requests:
        while waiting and engine.has_room:
            answer = waiting.popleft()
            answer.seed = seed_of_request(engine.config.seed, engine.num_added)
            answer.added_at = time.perf_counter()
            engine.add_request(answer.request_id, answer.prompt_ids, params)
        for delta in engine.step():
            by_id[delta.request_id].take(delta)
        yield


def _print(answer: _Answer, model: str) -> None:
    """In ASCII: nothing that a model writes can act on a terminal, and every encoding has it."""
    print(json.dumps(answer.as_json(model)), flush=True)


def _refuse(error: SpecmambaError) -> int:
    message = error.in_flags or str(error)
    described = {"message": message, "type": type(error).__name__, "param": getattr(error, "param", None)}
    print(json.dumps({"error": described}), file=sys.stderr)
    return REFUSED
