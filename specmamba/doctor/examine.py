"""All parts of the examination, in order; one that fails does not keep the others from running.

The last part is the self-test: the model writes the same greedy texts plain and with drafts, which are compared token
for token and in their speed. Runs alternate, so that a slow moment of the machine affects both, and the ratio is the
median over rounds of consecutive runs. ``specmamba/measure/acceptance/judge.py`` decides whether rounding explains a
difference between texts.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from specmamba import LLM, SamplingParams, SpecStats
from specmamba.config import EngineConfig
from specmamba.doctor.machine import examine_hardware, examine_kernels
from specmamba.doctor.software import Facts, Problem, error, examine_software
from specmamba.engine.loading import resolve_device
from specmamba.engine.model_report import model_info
from specmamba.engine.workbench import DRAFT_FIELDS
from specmamba.errors import RequestError, SpecmambaError
from specmamba.measure.acceptance.judge import Difference, Judge
from specmamba.measure.prompts import PLAIN_FLAGS, bundled_texts

# The demo in float32 only has its texts compared: small pools are enough.
SMALL_POOLS: dict[str, Any] = {"max_running_requests": 2, "context_length": 1024, "max_total_tokens": 2048}
SMALL_POOLS |= {"max_mamba_cache_size": 8}
ADVICE_IN_MESSAGE = "the flags, the checkpoint or the memory do not allow it: the message says which"
REPORT = "run with SPECMAMBA_NATIVE=0 (on a GPU: SPECMAMBA_TRITON=0) to see whether a kernel is to blame, and report it"

Part = Callable[[], tuple[Any, list[Problem]]]


def examine(config: EngineConfig, say: Callable[[str], None] = lambda _: None) -> Facts:
    """Examine everything; the result is ready for JSON, "ok" is false when something is broken.

    ``say`` is called with the name of each part before it runs.
    """
    began = time.perf_counter()
    problems: list[Problem] = []

    def run(what: str, part: Part) -> Any:
        say(what)
        facts, found = guarded(what, part)
        problems.extend(found)
        return facts

    software = run("the packages", examine_software)
    hardware = run("the machine", examine_hardware)
    device = run("the device", lambda: (resolve_device(config.device), []))
    kernels = run("the kernels", lambda: examine_kernels(device)) if device is not None else None
    model = run("the model", lambda: examine_plan(config)) if device is not None else None
    engines = (
        [] if model is None or "problem" in model["memory"] else engines_of(config, model["drafts_with"]["algorithm"])
    )
    tests = [run(f"the self-test (--dtype {flags['dtype']})", partial(examine_model, flags)) for flags in engines]
    return {
        "ok": not any(problem.severity == "error" for problem in problems),
        "seconds": time.perf_counter() - began,
        "device": None if device is None else str(device),
        "software": software,
        "hardware": hardware,
        "kernels": kernels,
        "model": model,
        "self_tests": [test for test in tests if test is not None],
        "problems": [asdict(problem) for problem in problems],
    }


def guarded(what: str, part: Part) -> tuple[Any, list[Problem]]:
    """Run a part; if it fails, return None and the failure as a problem."""
    try:
        return part()
    except SpecmambaError as failure:
        return None, [error(f"{what}: {failure}", ADVICE_IN_MESSAGE)]
    except torch.OutOfMemoryError as failure:
        advice = "lower --mem-fraction-static or --max-running-requests, or end what else uses the GPU"
        return None, [error(f"{what}: {failure}", advice)]
    except Exception as failure:  # noqa: BLE001  # any failure is reported to the user
        return None, [error(f"{what}: {type(failure).__name__}: {failure}", REPORT)]


def examine_plan(config: EngineConfig) -> tuple[Facts, list[Problem]]:
    """Describe the model and its memory plan under these flags; no weights are read."""
    info = model_info(config)
    problem = info["memory"].get("problem")
    if problem is None:
        return info, []
    return info, [error(f"the engine does not start: {problem}", "change the flags that the message names")]


def engines_of(config: EngineConfig, algorithm: str) -> list[dict[str, Any]]:
    """The engines to test: the one that these flags start, and of the demo also one in float32.

    In float32 texts are equal token for token. If the flags draft nothing, n-grams draft, which need no head.
    """
    flags = config.model_dump(include=set(EngineConfig.model_fields))
    if algorithm == "none":
        flags["speculative_algorithm"] = "ngram"
    if config.model is not None or config.dtype != "auto":
        return [flags]
    exact = flags | {"dtype": "float32"}
    return [exact | SMALL_POOLS if is_default_pool(config) else exact, flags]


def is_default_pool(config: EngineConfig) -> bool:
    """Whether no flag was given that small pools could contradict."""
    return not config.model_fields_set & (SMALL_POOLS.keys() | {"page_size", "cuda_graph_max_bs"})


NUM_PROMPTS, ROUNDS = 2, 4
PROMPT_TOKENS = 32  # few, because prefill takes the same time in both ways
WARM_UP_TOKENS = 8
TOKENS = (24, 64)  # length of a text: minimum and maximum
SECONDS = 4.0  # for all rounds together; slow models write shorter texts
Text = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """All prompts, one after the other, run once in one way. The speed is that of decoding, behind the first delta."""

    texts: tuple[Text, ...]
    specs: tuple[SpecStats, ...]
    tokens_per_second: float
    seconds: float  # total, prefill included


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
    gc.collect()  # another engine may follow, and needs the memory of this one's pools
    return facts, problems_of(facts)


def _examine(llm: LLM) -> Facts:
    ways = {"plain": PLAIN_FLAGS, "speculative": drafting_flags(llm.engine.config)}
    description = llm.engine.describe()
    prompts = _prompts(llm)
    for flags in ways.values():
        _run(llm, flags, prompts, WARM_UP_TOKENS)
    pace = {name: _run(llm, flags, prompts, WARM_UP_TOKENS) for name, flags in ways.items()}
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
    """The flags of drafting of an engine, as arguments of ``Workbench.use_drafts``."""
    return config.model_dump(include=DRAFT_FIELDS)


def accept_length(stats: Sequence[SpecStats]) -> float:
    """Tokens per verify over all texts."""
    steps = sum(each.num_verify_steps for each in stats)
    return 1 + sum(each.num_accepted_tokens for each in stats) / steps if steps else 1.0


def affordable_tokens(pace_seconds: float) -> int:
    """Choose the length of the texts so that all rounds take about ``SECONDS``, from the time of the warm-up."""
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
    """Generate a text; return it, its stats, and the number of tokens behind the first delta with their seconds."""
    deltas, arrivals = [], []
    for delta in llm.stream(prompt, params):
        deltas.append(delta)
        arrivals.append(time.perf_counter())
    if deltas[-1].finish_reason == "error":
        raise RequestError(deltas[-1].error or "the model's numbers are not finite")
    text = tuple(token for delta in deltas for token in delta.token_ids)
    return text, deltas[-1].spec, len(text) - len(deltas[0].token_ids), arrivals[-1] - arrivals[0]


def compare(llm: LLM, prompts: Sequence[list[int]], rounds: Sequence[Mapping[str, Run]], dtype: str) -> Facts:
    """{"identical", "near_tie", "diverged": numbers of texts, "worst": the least explained difference}."""
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
    """Texts must be equal in float32; in 16 bits they may differ by near ties."""
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
