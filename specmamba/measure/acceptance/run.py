"""Run every prompt plain and with every draft shape, in turns, on one engine."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from specmamba import LLM, RequestOutput, SamplingParams
from specmamba.config import EngineConfig
from specmamba.errors import ConfigError, RequestError
from specmamba.measure.acceptance.judge import Difference, Judge
from specmamba.measure.acceptance.options import ADAPTIVE, AcceptanceBenchConfig, Variant
from specmamba.measure.prompts import PLAIN, PLAIN_FLAGS, PromptText, encode_prompt, encode_with_continuation, seed_of
from specmamba.measure.report import progress_bar

WARM_UP_TOKENS = 8
SIZES = "num_steps", "num_plain_steps", "num_requests", "num_nodes", "num_draft_levels"  # of ``SizingStats``


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt as it is run. ``replay``: the output, if it is given (``--replay``)."""

    number: int  # place among all prompts; the seed depends on it
    prompt: tuple[int, ...]
    replay: tuple[int, ...]
    params: SamplingParams
    seed: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One batch of prompts, run once in one way."""

    outputs: tuple[RequestOutput, ...]
    steps: tuple[tuple[float, float, float], ...]  # seconds of draft, verify and commit of every step of a full batch
    seconds: float  # of the whole call, prefill included
    sizes: Counter[str] = field(default_factory=Counter)  # what was decided, ``SIZES``; empty for fixed shapes


@dataclass(frozen=True, slots=True)
class Result:
    """All that was measured. Names are ``PLAIN`` and those of the variants."""

    variants: tuple[Variant, ...]
    samples: dict[str, list[list[Sample]]]  # by name and round: one per batch
    differences: dict[str, list[Difference | None]] | None  # by name: one per prompt; None: texts cannot be compared
    num_threads: int


def start_engine(config: AcceptanceBenchConfig, draft_flags: dict[str, Any]) -> LLM:
    """Start an engine with room for all drafts.

    Raises:
        ConfigError: there is no draft head, or the engine cannot start with these flags.
    """
    flags = config.model_dump(include=set(EngineConfig.model_fields)) | draft_flags
    try:
        return LLM(**flags)
    except ConfigError as error:
        if "no MTP head" not in str(error):
            raise
        raise ConfigError(
            "this checkpoint has no MTP head: give a draft with --speculative-draft-model-path, or choose "
            "--speculative-algorithm suffix"
        ) from None


def select_tasks(config: AcceptanceBenchConfig, llm: LLM, texts: Sequence[PromptText]) -> tuple[list[Task], list[str]]:
    """The first ``num_prompts`` prompts that can be run, and notes on those that cannot.

    Raises:
        ConfigError: fewer than ``--batch-size`` can be run, or one is not valid Unicode, has no tokens, or is refused
            by the chat template.
    """
    tasks: list[Task] = []
    too_long, lacking = [], []
    for number, text in enumerate(texts):
        if len(tasks) == config.num_prompts:
            break
        prompt, replay = _encode(config, llm, number, text)
        if config.replay and not replay:
            lacking.append(number + 1)
        elif len(prompt) >= llm.engine.context_length:
            too_long.append(number + 1)
        else:
            tasks.append(_task(config, number, prompt, replay))
    notes = _skipped(too_long, f"do not fit the context of {llm.engine.context_length} tokens")
    notes += _skipped(lacking, "have no continuation to replay")
    if not tasks:
        raise ConfigError(f"no prompt can be run: {'; '.join(notes)}")
    if len(tasks) < config.batch_size:
        raise ConfigError(
            f"--batch-size {config.batch_size}: there are only {len(tasks)} prompts to run, which never fill a batch: "
            f"{'; '.join([*notes, 'raise --num-prompts or give more --prompts, or lower --batch-size'])}"
        )
    return tasks, notes


def _encode(config: AcceptanceBenchConfig, llm: LLM, number: int, text: PromptText) -> tuple[list[int], list[int]]:
    """Encode a prompt and the tokens to replay behind it (none without ``--replay``)."""
    engine = llm.engine
    try:
        if config.replay:
            prompt, replay = encode_with_continuation(text, engine.tokenizer)
        else:
            prompt, replay = encode_prompt(text, engine.tokenizer), []
        if len(prompt) < engine.context_length:
            engine.check_prompt(prompt)
        engine.check_tokens(replay, "replay")
    except RequestError as error:
        raise ConfigError(f"prompt {number + 1}: {error}") from None
    return prompt, replay


def _task(config: AcceptanceBenchConfig, number: int, prompt: list[int], replay: list[int]) -> Task:
    seed = seed_of(config.seed, number)
    length = min(config.max_tokens, len(replay)) if config.replay else config.max_tokens
    params = SamplingParams(
        max_tokens=length,
        temperature=0.0 if config.replay else config.temperature,
        seed=seed,
        ignore_eos=config.ignore_eos or config.replay,
    )
    return Task(number, tuple(prompt), tuple(replay[:length]), params, seed)


def _skipped(numbers: Sequence[int], why: str) -> list[str]:
    if not numbers:
        return []
    shown = ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")
    return [f"skipped {len(numbers)} prompts that {why} (number {shown})"]


def measure(config: AcceptanceBenchConfig, llm: LLM, tasks: Sequence[Task], variants: Sequence[Variant]) -> Result:
    """Run all rounds, then compare the texts.

    Raises:
        ConfigError: no step had ``--batch-size`` requests.
        RequestError: the model's numbers are not finite for one of the prompts.
    """
    variants = [_with_bounds(llm, variant) if variant.is_adaptive else variant for variant in variants]
    batches = [tasks[i : i + config.batch_size] for i in range(0, len(tasks), config.batch_size)]
    contestants: list[Variant | None] = [None, *variants]
    samples: dict[str, list[list[Sample]]] = {name_of(contestant): [] for contestant in contestants}
    llm.workbench.clock.is_on = True
    with progress_bar("prompts, in all ways", config.rounds * len(batches) * len(contestants)) as advance:
        for contestant in contestants:
            # with adaptive sizes there are many kinds of steps to record: those warm up with whole texts
            is_long = contestant is not None and contestant.is_adaptive
            run_batch(config, llm, contestant, [task if is_long else _shortened(task) for task in batches[0]])
        for number in range(config.rounds):
            for name in samples:
                samples[name].append([])
            first = number % len(contestants)  # the order rotates, so that no contestant is always first
            for batch in batches:
                for contestant in contestants[first:] + contestants[:first]:
                    samples[name_of(contestant)][-1].append(run_batch(config, llm, contestant, batch))
                    advance()
            for name in samples.keys() - {ADAPTIVE}:  # whose steps are not timed
                require_full_batches(config.batch_size, samples[name][-1])
    differences = compare_texts(config, llm, tasks, samples) if config.texts_can_be_compared else None
    return Result(tuple(variants), samples, differences, llm.engine.num_threads)


def name_of(contestant: Variant | None) -> str:
    """The name of a contestant in the results; None is plain decoding."""
    return PLAIN if contestant is None else contestant.name


def _with_bounds(llm: LLM, variant: Variant) -> Variant:
    """The adaptive variant with its largest draft, which the engine knows; it measures times of steps here, if ever."""
    llm.workbench.use_drafts(**variant.flags)
    plan = llm.engine.draft_plan
    return replace(variant, num_steps=plan.num_steps, topk=plan.topk, num_draft_tokens=plan.max_nodes)


def run_batch(config: AcceptanceBenchConfig, llm: LLM, contestant: Variant | None, batch: Sequence[Task]) -> Sample:
    """Run a batch in one way; the workbench keeps the settings of that way.

    No step is captured while phases are timed: where steps are captured, the batch runs again for the time. Adaptive
    sizes follow the times of steps, so they only run like that.

    Raises:
        RequestError: the model's numbers are not finite.
    """
    bench, is_adaptive = llm.workbench, contestant is not None and contestant.is_adaptive
    bench.use_drafts(**(PLAIN_FLAGS if contestant is None else contestant.flags))
    bench.use_synthetic_acceptance(None if contestant is None else config.synthetic_acceptance)
    bench.clock.reset()
    before = _sizes(llm)
    if not is_adaptive:
        outputs, elapsed = _timed(config, llm, batch)
    if is_adaptive or bench.replays_steps:
        bench.clock.is_on = False
        llm.flush_cache()
        outputs, elapsed = _timed(config, llm, batch)
        bench.clock.is_on = True
    for task, output in zip(batch, outputs, strict=True):
        if output.finish_reason == "error":
            raise RequestError(f"prompt {task.number + 1}: {output.error}")
    laps = bench.clock.seconds
    steps = zip(bench.clock.rows, laps["draft"], laps["verify"], laps["commit"], strict=True)
    full = tuple((draft, verify, commit) for rows, draft, verify, commit in steps if rows == config.batch_size)
    return Sample(tuple(outputs), full, elapsed, _sizes(llm) - before)


def _sizes(llm: LLM) -> Counter[str]:
    """What has been decided so far."""
    sizing = llm.engine.stats().sizing
    return Counter() if sizing is None else Counter({name: getattr(sizing, name) for name in SIZES})


def _timed(config: AcceptanceBenchConfig, llm: LLM, batch: Sequence[Task]) -> tuple[list[RequestOutput], float]:
    """Run a batch; return its outputs and the seconds it took."""
    prompts, params = [task.prompt for task in batch], [task.params for task in batch]
    replay = [task.replay for task in batch] if config.replay else None
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, replay=replay, use_tqdm=False)
    return outputs, time.perf_counter() - began


def require_full_batches(batch_size: int, samples: Sequence[Sample]) -> None:
    """Raise ConfigError if no step of a round had ``batch_size`` requests, so that none was timed."""
    if not any(sample.steps for sample in samples):
        raise ConfigError(
            f"--batch-size {batch_size}: no step had so many requests: one ended before the last one began, or they do "
            "not fit the memory together; raise --max-tokens, --chunked-prefill-size or --max-total-tokens, or give "
            "--ignore-eos"
        )


def _shortened(task: Task) -> Task:
    length = min(WARM_UP_TOKENS, task.params.max_tokens)
    return replace(task, params=task.params.model_copy(update={"max_tokens": length}))


def compare_texts(
    config: AcceptanceBenchConfig, llm: LLM, tasks: Sequence[Task], samples: dict[str, list[list[Sample]]]
) -> dict[str, list[Difference | None]]:
    """Find, for every variant and prompt, the worst difference to the plain text of the same round."""
    llm.workbench.use_drafts(**PLAIN_FLAGS)
    llm.workbench.use_synthetic_acceptance(None)
    dtype: torch.dtype = getattr(torch, str(llm.engine.describe()["dtype"]))
    judge = Judge(llm.workbench.logits_along, dtype, config.temperature)
    judged: dict[tuple[int, Any, Any], Difference | None] = {}  # rounds repeat the same texts
    differences: dict[str, list[Difference | None]] = {name: [] for name in samples if name != PLAIN}
    plain = [_texts(batches) for batches in samples[PLAIN]]
    for name, found in differences.items():
        speculative = [_texts(batches) for batches in samples[name]]
        for i, task in enumerate(tasks):
            pairs = {(a[i], b[i]) for a, b in zip(plain, speculative, strict=True)}
            for pair in pairs - {(a, b) for number, a, b in judged if number == i}:
                judged[i, *pair] = judge.compare(task.number, task.prompt, task.seed, *pair)
            worst = [each for each in (judged[i, *pair] for pair in pairs) if each is not None]
            found.append(max(worst, key=lambda each: each.shift / (each.bound or 1), default=None))
    return differences


def _texts(batches: Sequence[Sample]) -> list[tuple[int, ...]]:
    return [output.token_ids for sample in batches for output in sample.outputs]
