"""Elastic pools beside fixed ones, under a load that swings from many short conversations to few long documents.

All engines get the same memory. Those with ``--elastic-pools off`` divide it by ``--mamba-full-memory-ratio``, one for
each of ``--swing-ratios``; the elastic one starts with the ratio of the flags. In the first half, many chats go on in
random order, whose recurrent states are most of what is worth keeping; in the second, questions about a few long
documents come in random order, whose keys and values are. Tokens of prompts that the cache spared and preemptions are
counts, which are the same on every machine, and reported of the first round; texts are compared. All engines run each
wave of requests in turns, and ``seconds`` of a half is the sum over its waves, of each of ``--swing-rounds`` rounds.
Each round starts its engines anew: where their memory lies makes equal engines differ by 2 %, as long as they live.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from specmamba.bench.prefix.engines import PrefixBenchConfig, sharing_memory, start_elastic_engine, start_engine
from specmamba.bench.prefix.run import warm_up
from specmamba.bench.prefix.texts import TextSource
from specmamba.errors import ConfigError
from specmamba.measure.command import in_turns
from specmamba.measure.report import median_with_range, progress_bar
from specmamba.sampling_params import SamplingParams

if TYPE_CHECKING:
    from specmamba import LLM

HALVES = ("short", "long")
ELASTIC = "elastic"
Tokens = tuple[int, ...]
Waves = Iterator[tuple[list[Tokens], dict[int, Tokens]]]  # prompts, and where their whole texts are put by place
Outputs = dict[str, list[Tokens]]  # by engine


def measure_swing(config: PrefixBenchConfig, source: TextSource) -> dict[str, Any]:
    """Count and measure on every split, and on elastic pools.

    Raises:
        ConfigError: a document does not fit the memory, or this machine has no elastic pools.
    """
    fixed = {f"{ratio:g}": _fixed(ratio) for ratio in config.swing_ratios}
    rounds: list[dict[str, Any]] = []
    outputs: list[Outputs] = []
    with (
        sharing_memory(config, config.swing_tokens),
        progress_bar("swing", config.swing_rounds * _num_waves(config)) as advance,
    ):
        for number in range(config.swing_rounds):
            with ExitStack() as stack:
                engines = {name: stack.enter_context(start_engine(config, **flags)) for name, flags in fixed.items()}
                engines[ELASTIC] = stack.enter_context(start_elastic_engine(config, "swing"))
                for llm in engines.values():
                    _require_room(config, llm)
                    warm_up(llm, source, config)
                texts: Outputs = {name: [] for name in engines}
                rounds.append(_round(config, engines, source, number, texts, advance))
                outputs.append(texts)
    found = _over_rounds(rounds)
    reference = next(iter(outputs[0].values()))
    return {
        "tokens": config.swing_tokens,
        "document_tokens": config.swing_document_tokens,
        "rounds": config.swing_rounds,
        "splits": found,
        "different_texts": sum(
            one != reference[i] for texts in outputs for each in texts.values() for i, one in enumerate(each)
        ),
    } | {half: _against_best(found, half) for half in HALVES}


def _require_room(config: PrefixBenchConfig, llm: LLM) -> None:
    """Raise ConfigError if a document does not fit the KV of one of the splits."""
    longest = config.swing_document_tokens + config.turn_tokens + config.output_tokens + 1
    if longest > llm.engine.context_length:
        raise ConfigError(
            f"--swing-document-tokens {config.swing_document_tokens}: on one of the splits texts have "
            f"{llm.engine.context_length} tokens at the most: lower it, or raise --swing-tokens"
        )


def _fixed(ratio: float) -> dict[str, Any]:
    return {"elastic_pools": "off", "mamba_full_memory_ratio": ratio}


def _against_best(found: dict[str, dict[str, Any]], half: str) -> dict[str, Any]:
    """The figures of one half on elastic pools, beside the best of each on any fixed split.

    ``speed_over_best`` compares with the fixed split whose median is best, round by round.
    """
    fixed = [figures[half] for name, figures in found.items() if name != ELASTIC]
    own = found[ELASTIC][half]
    best = max(fixed, key=lambda each: each["tokens_per_second"]["median"])
    ratios = [theirs / ours for ours, theirs in zip(own["seconds"], best["seconds"], strict=True)]
    return {
        "hit_tokens": own["hit_tokens"],
        "best_fixed_hit_tokens": max(each["hit_tokens"] for each in fixed),
        "preemptions": own["preemptions"],
        "fewest_fixed_preemptions": min(each["preemptions"] for each in fixed),
        "speed_over_best": median_with_range(ratios, 4),
    }


def _round(
    config: PrefixBenchConfig,
    engines: dict[str, LLM],
    source: TextSource,
    number: int,
    outputs: Outputs,
    advance: Any,
) -> dict[str, Any]:
    """Run both halves on all engines, from empty caches and the split of the start; figures by engine and half."""
    for llm in engines.values():
        llm.engine.forget(llm.engine.num_added)
    figures: dict[str, Any] = {name: {} for name in engines}
    moved = {name: _moves(llm) for name, llm in engines.items()}
    for half, asks in zip(HALVES, (_chats, _documents), strict=True):
        before = {name: llm.engine.stats() for name, llm in engines.items()}
        took = _run(config, engines, {name: asks(config, source) for name in engines}, number, outputs, advance)
        for name, llm in engines.items():
            figures[name][half] = took[name] | _counts(before[name], llm.engine.stats())
    for name, llm in engines.items():
        figures[name] |= {kind: number - moved[name][kind] for kind, number in _moves(llm).items()}
    return figures


def _moves(llm: LLM) -> dict[str, int]:
    """What has moved since the start; nothing is known of fixed pools."""
    split = llm.engine.stats().split
    if split is None:
        return {}
    return {"moves": split.num_moves, "moved_states": split.moved_states, "moved_tokens": split.moved_tokens}


def _counts(before: Any, after: Any) -> dict[str, int]:
    """What was counted between two statistics of an engine, and its sizes at the end."""
    cache, then = after.prefix_cache, before.prefix_cache
    return {
        "hit_tokens": cache.hit_tokens - then.hit_tokens,
        "preemptions": after.num_preemptions - before.num_preemptions,
        "evicted_tokens": cache.evicted_tokens - then.evicted_tokens,
        "evicted_states": cache.evicted_states - then.evicted_states,
        "kv_pool_tokens": after.kv_total_tokens,
        "state_slots": after.state_total_slots,
    }


def _run(
    config: PrefixBenchConfig,
    engines: dict[str, LLM],
    waves: dict[str, Waves],
    number: int,
    outputs: Outputs,
    advance: Any,
) -> dict[str, dict[str, Any]]:
    """Run waves of prompts, each on all engines in turns; by engine, tokens and seconds."""
    greedy = SamplingParams(max_tokens=config.output_tokens, temperature=0.0, ignore_eos=True)
    took = {name: {"prompt_tokens": 0, "output_tokens": 0, "seconds": 0.0} for name in engines}
    turns = in_turns(list(engines), number)
    for asked in zip(*(waves[name] for name in engines), strict=True):
        of_engine = dict(zip(engines, asked, strict=True))
        turns = in_turns(turns, 1)  # no engine is always the first
        for name in turns:
            prompts, texts = of_engine[name]
            began = time.perf_counter()
            answers = engines[name].generate(prompts, greedy, use_tqdm=False)
            took[name]["seconds"] += time.perf_counter() - began
            took[name]["prompt_tokens"] += sum(map(len, prompts))
            took[name]["output_tokens"] += sum(len(answer.token_ids) for answer in answers)
            texts.update((i, answer.prompt_token_ids + answer.token_ids) for i, answer in enumerate(answers))
            outputs[name] += [answer.token_ids for answer in answers]
        advance()
    return took


def _over_rounds(rounds: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Counts of the first round, and times of all: prompt and output tokens per second."""
    found: dict[str, dict[str, Any]] = rounds[0]
    for name, figures in found.items():
        for half in HALVES:
            each = figures[half]
            seconds = [one[name][half]["seconds"] for one in rounds]
            speeds = [(each["prompt_tokens"] + each["output_tokens"]) / took for took in seconds]
            each["tokens_per_second"] = median_with_range(speeds, 1)
            each["seconds"] = [round(took, 4) for took in seconds]
    return found


def _num_waves(config: PrefixBenchConfig) -> int:
    size = min(config.concurrency, config.swing_chats)
    return config.swing_chats * config.num_turns // size + config.swing_documents * config.num_questions


def _chats(config: PrefixBenchConfig, source: TextSource) -> Waves:
    """Chats in random order: what was said so far, and a new question."""
    draw = random.Random(f"{config.seed}/swing/short")
    said = [source.start] * config.swing_chats
    size = min(config.concurrency, len(said))
    for _ in range(config.swing_chats * config.num_turns // size):
        wave = draw.sample(range(len(said)), size)
        texts: dict[int, Tokens] = {}
        yield [said[i] + source.cut(config.turn_tokens, draw) for i in wave], texts
        for place, i in enumerate(wave):
            said[i] = texts[place]


def _documents(config: PrefixBenchConfig, source: TextSource) -> Waves:
    """Questions about documents in random order, one at a time."""
    draw = random.Random(f"{config.seed}/swing/long")
    documents = [source.start + source.cut(config.swing_document_tokens, draw) for _ in range(config.swing_documents)]
    for _ in range(config.swing_documents * config.num_questions):
        yield [draw.choice(documents) + source.cut(config.turn_tokens, draw)], {}
