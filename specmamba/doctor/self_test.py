"""The model writes the same greedy texts plain and with drafts: equal or not, and how fast either way.

Runs alternate, so that a slow moment of the machine hits both, and the ratio is the median over rounds of runs that
followed each other. Where texts differ, plain decoding is led along the other text, and each of its tokens is rounding
or is not (``specmamba/measure/acceptance/judge.py``).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from specmamba import LLM, SamplingParams, SpecStats
from specmamba.config import EngineConfig
from specmamba.doctor.problems import Facts, Problem, error
from specmamba.engine.workbench import DRAFT_FIELDS
from specmamba.errors import RequestError
from specmamba.measure.acceptance.judge import Difference, Judge
from specmamba.measure.prompts import PLAIN_FLAGS, bundled_texts

NUM_PROMPTS, ROUNDS = 2, 4
PROMPT_TOKENS = 32  # few: a prompt takes the same time in both ways
WARM_UP_TOKENS = 8
TOKENS = (24, 64)  # of a text: at the least and at the most
SECONDS = 4.0  # that all rounds should take; slow models write shorter texts
Text = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """All prompts, one after the other, run once in one way. Speed is that of decoding: from the first piece on."""

    texts: tuple[Text, ...]
    specs: tuple[SpecStats, ...]
    tokens_per_second: float
    seconds: float  # of everything, prefill and all


def examine_model(flags: Mapping[str, Any]) -> tuple[Facts, list[Problem]]:
    """Start an engine with these fields of ``EngineConfig`` and test it.

    Raises:
        SpecmambaError: the engine cannot start, or a request fails.
    """
    began = time.perf_counter()
    with LLM(**flags) as llm:
        started = time.perf_counter()
        facts = _examine(llm) | {"start_seconds": started - began}
    del llm
    gc.collect()  # another engine may follow, and this one's pools must be gone
    return facts, problems_of(facts)


def _examine(llm: LLM) -> Facts:
    ways = {"plain": PLAIN_FLAGS, "speculative": drafting_flags(llm.engine.config)}
    description = llm.engine.describe()
    prompts = _prompts(llm)
    pace = {name: _run(llm, flags, prompts, WARM_UP_TOKENS) for name, flags in ways.items()}
    pace = {name: _run(llm, flags, prompts, WARM_UP_TOKENS) for name, flags in ways.items()}  # the first one warmed up
    num_tokens = affordable_tokens(sum(run.seconds for run in pace.values()))
    num_tokens = min(num_tokens, llm.engine.context_length - max(map(len, prompts)))
    rounds: list[dict[str, Run]] = []
    for number in range(ROUNDS):
        order = list(ways) if number % 2 == 0 else list(ways)[::-1]
        rounds.append({name: _run(llm, ways[name], prompts, num_tokens) for name in order})
    return {
        "model": description["model"],
        "dtype": description["dtype"],
        "device": description["device"],
        "drafts": description["speculative_algorithm"],
        "num_prompts": len(prompts),
        "num_tokens": num_tokens,
        "texts": compare(llm, prompts, rounds, str(description["dtype"])),
        "plain_tokens_per_second": median(each["plain"].tokens_per_second for each in rounds),
        "speculative_tokens_per_second": median(each["speculative"].tokens_per_second for each in rounds),
        "speedup": median(each["speculative"].tokens_per_second / each["plain"].tokens_per_second for each in rounds),
        "accept_length": accept_length(rounds[0]["speculative"].specs),
    }


def drafting_flags(config: EngineConfig) -> dict[str, Any]:
    """How the engine was told to draft, as ``Workbench.use_drafts`` wants it."""
    return config.model_dump(include=DRAFT_FIELDS)


def accept_length(stats: Sequence[SpecStats]) -> float:
    """Tokens per verify over all texts."""
    steps = sum(each.num_verify_steps for each in stats)
    return 1 + sum(each.num_accepted_tokens for each in stats) / steps if steps else 1.0


def affordable_tokens(pace_seconds: float) -> int:
    """Tokens of a text so that all rounds take ``SECONDS`` or so, from the time of both ways for a few tokens."""
    per_token = pace_seconds / WARM_UP_TOKENS
    return max(TOKENS[0], min(TOKENS[1], int(SECONDS / ROUNDS / per_token)))


def _prompts(llm: LLM) -> list[list[int]]:
    room = max(1, min(PROMPT_TOKENS, llm.engine.context_length - TOKENS[1]))
    return [llm.engine.tokenizer.encode(text.text)[-room:] for text in bundled_texts()[:NUM_PROMPTS]]


def _run(llm: LLM, flags: Mapping[str, Any], prompts: Sequence[list[int]], num_tokens: int) -> Run:
    llm.workbench.use_drafts(**flags)  # this also empties the prefix cache
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    began = time.perf_counter()
    written = [_write(llm, prompt, params) for prompt in prompts]
    texts, specs, counts, times = zip(*written, strict=True)
    return Run(texts, specs, sum(counts) / max(sum(times), 1e-9), time.perf_counter() - began)


def _write(llm: LLM, prompt: list[int], params: SamplingParams) -> tuple[Text, SpecStats, int, float]:
    """A text, its figures, and the tokens behind its first piece with the seconds that they took."""
    deltas, arrivals = [], []
    for delta in llm.stream(prompt, params):
        deltas.append(delta)
        arrivals.append(time.perf_counter())
    if deltas[-1].finish_reason == "error":
        raise RequestError(deltas[-1].error or "the model's numbers are not finite")
    text = tuple(token for delta in deltas for token in delta.token_ids)
    return text, deltas[-1].spec, len(text) - len(deltas[0].token_ids), arrivals[-1] - arrivals[0]


def compare(llm: LLM, prompts: Sequence[list[int]], rounds: Sequence[Mapping[str, Run]], dtype: str) -> Facts:
    """{"identical", "near_tie", "diverged": numbers of texts, "worst": the difference that needs most explanation}."""
    llm.workbench.use_drafts(**PLAIN_FLAGS)
    judge = Judge(llm.workbench.logits_along, getattr(torch, dtype), 0.0)
    counts = {"identical": 0, "near_tie": 0, "diverged": 0}
    differences: list[Difference] = []
    for number, prompt in enumerate(prompts):
        pairs = {(each["plain"].texts[number], each["speculative"].texts[number]) for each in rounds}
        found = [judge.compare(number, prompt, 0, *pair) for pair in pairs]
        parted = [each for each in found if each is not None]
        worst = max(parted, key=lambda each: each.shift / (each.bound or 1), default=None)
        counts["identical" if worst is None else worst.kind] += 1
        differences += [] if worst is None else [worst]
    worst = max(differences, key=lambda each: each.shift / (each.bound or 1), default=None)
    return {**counts, "worst": None if worst is None else _described(worst)}


def _described(difference: Difference) -> Facts:
    return {
        "prompt": difference.prompt,
        "position": difference.first_position,
        "logit_shift": difference.shift if difference.shift < 1e30 else None,  # JSON has no infinity
        "rounding_explains": difference.bound,
    }


def problems_of(facts: Facts) -> list[Problem]:
    """In float32 texts must be equal, in less they may part where two tokens are nearly as likely."""
    texts, dtype = facts["texts"], facts["dtype"]
    must_be_equal = dtype == "float32"
    wrong = texts["diverged"] + (texts["near_tie"] if must_be_equal else 0)
    if not wrong:
        return []
    why = "which float32 does not explain" if must_be_equal else f"by more than rounding to {dtype} explains"
    advice = (
        "try SPECMAMBA_NATIVE=0 (on a GPU: SPECMAMBA_TRITON=0, --disable-cuda-graph): where texts are equal then, a "
        "kernel is wrong on this machine; serve with --speculative-algorithm none, and report it with this output"
    )
    return [error(f"{wrong} of {facts['num_prompts']} texts in {dtype} differ with drafts, {why}", advice)]
