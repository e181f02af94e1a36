"""A process with one engine, which runs batches for ``engine_process.py`` and times them.

A request is a line of JSON on standard input, {name: arguments}, and its answer a line on standard output. The names
are those of ``Worker``'s methods; "load" comes first. {"error": text} answers a request that failed.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from typing import Any

from specmamba import LLM, SamplingParams
from specmamba.errors import SpecmambaError
from specmamba.kernels.native.levels import NativeUnavailableError, chosen_level
from specmamba.kernels.native.library import origin
from specmamba.measure.memory_speed import BEYOND_CACHES, weight_speed
from specmamba.measure.prompts import PromptText, encode_prompt, encode_with_continuation

_PR_SET_PDEATHSIG = 1
Fields = dict[str, Any]


def main(worker: Worker | None = None) -> None:
    """Answer requests until the input ends; ``worker``: has the methods, a new ``Worker`` if it is None."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # other output must not mix with the answers
    worker = worker or Worker()
    for line in sys.stdin.buffer:
        ((name, arguments),) = json.loads(line).items()
        try:
            answer = getattr(worker, name)(**arguments)
        except SpecmambaError as error:
            answer = {"error": str(error)}
        output.write(json.dumps(answer).encode() + b"\n")
        output.flush()


class Worker:
    """The engine and what is asked of it. All methods raise SpecmambaError."""

    def __init__(self) -> None:
        self.llm: LLM

    def load(self, flags: Fields) -> Fields:
        """Make the engine with the keywords of ``LLM``; what the report says of it."""
        self.llm = LLM(**flags)
        described = self.llm.engine.describe()
        return {
            "checkpoint": str(self.llm.engine.folder),
            "threads": self.llm.engine.num_threads,
            "native": _native(),
            "weight_bytes": described["weight_bytes"],
            "parameters": described["parameters"],
        }

    def encode(self, texts: list[Fields]) -> Fields:
        """Encode fields of ``PromptText``: {"prompts": ids of each, "continued": with what follows them}."""
        tokenizer, given = self.llm.engine.tokenizer, [PromptText(**fields) for fields in texts]
        continued = [encode_with_continuation(text, tokenizer) for text in given]
        return {
            "prompts": [encode_prompt(text, tokenizer) for text in given],
            "continued": [[*prompt, *rest] for prompt, rest in continued],
        }

    def memory_speed(self) -> Fields:
        """{"gb_per_s"}: how fast a product reads weights that no cache holds, with the engine's threads."""
        return {"gb_per_s": weight_speed(BEYOND_CACHES)}

    def run(self, **batch: Any) -> Fields:
        """Run the fields of a ``figures.Batch``: {"answers": the fields of a ``figures.Answer`` for each request}."""
        return {"answers": run(self.llm, batch)}


def _native() -> Fields:
    """{"level", "origin", "reason"}: the kernels of this process, or why there are none."""
    try:
        return {"level": chosen_level().name, "origin": origin(), "reason": None}
    except NativeUnavailableError as error:
        return {"level": None, "origin": None, "reason": str(error)}


def run(llm: LLM, batch: Fields) -> list[Fields]:
    """Run the requests of a ``figures.Batch`` together; the fields of a ``figures.Answer`` for each.

    Raises:
        SpecmambaError: a request is refused, failed, or ended with too few tokens.
    """
    names = [f"bench-{i}" for i in range(len(batch["prompts"]))]
    common = {"max_tokens": batch["max_tokens"], "temperature": batch["temperature"], "ignore_eos": True}
    times: dict[str, list[float]] = {name: [] for name in names}
    tokens: dict[str, list[tuple[int, ...]]] = {name: [] for name in names}
    last = {}
    began = time.perf_counter()
    for name, prompt, seed in zip(names, batch["prompts"], batch["seeds"], strict=True):
        llm.engine.add_request(name, prompt, SamplingParams(seed=seed, **common))
    while llm.engine.has_unfinished_requests:
        deltas = llm.engine.step()
        now = time.perf_counter()
        for delta in deltas:
            times[delta.request_id].append(now)
            tokens[delta.request_id].append(delta.token_ids)
            last[delta.request_id] = delta
    for name in names:
        if last[name].num_output_tokens != batch["max_tokens"]:
            raise SpecmambaError(last[name].error or f"only {last[name].num_output_tokens} tokens came")
    return [
        {
            "tokens": [token for step in tokens[name] for token in step],
            "first_token_s": times[name][0] - began,
            "num_decoded": last[name].num_output_tokens - len(tokens[name][0]),
            "decode_s": times[name][-1] - times[name][0],
            "num_accepted": last[name].spec.num_accepted_tokens,
        }
        for name in names
    ]


if __name__ == "__main__":
    main()
