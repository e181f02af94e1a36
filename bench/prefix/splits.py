"""Elastic pools beside fixed ones, under a load that swings from many short conversations to few long documents.

All engines get the same memory. Those with ``--elastic-pools off`` divide it by ``--mamba-full-memory-ratio``, one for
each of ``RATIOS``; the elastic one starts with the ratio of the flags. In the first half, many chats go on in random
order, whose recurrent states are most of what is worth keeping; in the second, questions about a few long documents
come in random order, whose keys and values are. Figures are counts (tokens of prompts that the cache spared,
preemptions), so that they are the same on every machine; texts are compared. No time is measured.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from specmamba.bench.prefix.engines import PrefixBenchConfig, sharing_memory, start_engine
from specmamba.bench.prefix.texts import TextSource
from specmamba.errors import ConfigError
from specmamba.measure.report import progress_bar
from specmamba.sampling_params import SamplingParams

if TYPE_CHECKING:
    from specmamba import LLM

RATIOS = (0.1, 0.3, 0.9, 2.7)  # of fixed pools
HALVES = ("short", "long")
ELASTIC = "elastic"
Tokens = tuple[int, ...]
Waves = Iterator[tuple[list[Tokens], dict[int, Tokens]]]  # prompts, and where their whole texts are put by place


def measure_swing(config: PrefixBenchConfig, source: TextSource) -> dict[str, Any]:
    """Count on every split, and on elastic pools.

    Raises:
        ConfigError: a document does not fit the memory, or this machine has no elastic pools.
    """
    splits: dict[str, dict[str, Any]] = {str(ratio): _fixed(ratio) for ratio in RATIOS}
    found, texts = {}, []
    with sharing_memory(config, config.swing_tokens), progress_bar("swing", len(splits) + 1) as advance:
        for name, flags in (*splits.items(), (ELASTIC, {"elastic_pools": "auto"})):
            with start_engine(config, **flags) as llm:
                if name == ELASTIC and llm.engine.stats().split is None:
                    raise ConfigError(
                        f"--swing-tokens {config.swing_tokens}: pools are not elastic here, or not in so little: "
                        "raise it, or leave swing out of --workloads"
                    )
                _require_room(config, llm)
                found[name], outputs = _count(config, llm, source)
                texts.append(outputs)
            advance()
    return {
        "tokens": config.swing_tokens,
        "document_tokens": config.swing_document_tokens,
        "splits": found,
        "different_texts": sum(one != texts[0][i] for outputs in texts[1:] for i, one in enumerate(outputs)),
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
    """The figures of one half on elastic pools, beside the best of each on any fixed split."""
    fixed = [figures[half] for name, figures in found.items() if name != ELASTIC]
    own = found[ELASTIC][half]
    return {
        "hit_tokens": own["hit_tokens"],
        "best_fixed_hit_tokens": max(each["hit_tokens"] for each in fixed),
        "preemptions": own["preemptions"],
        "fewest_fixed_preemptions": min(each["preemptions"] for each in fixed),
    }


def _count(config: PrefixBenchConfig, llm: LLM, source: TextSource) -> tuple[dict[str, Any], list[Tokens]]:
    """Run both halves; their counts, and all outputs."""
    figures: dict[str, Any] = {}
    outputs: list[Tokens] = []
    for half, asks in zip(HALVES, (_chats, _documents), strict=True):
        before = llm.engine.stats()
        prompt_tokens = _run(config, llm, asks(config, source), outputs)
        after = llm.engine.stats()
        figures[half] = {
            "prompt_tokens": prompt_tokens,
            "hit_tokens": after.prefix_cache.hit_tokens - before.prefix_cache.hit_tokens,
            "preemptions": after.num_preemptions - before.num_preemptions,
            "evicted_tokens": after.prefix_cache.evicted_tokens - before.prefix_cache.evicted_tokens,
            "evicted_states": after.prefix_cache.evicted_states - before.prefix_cache.evicted_states,
            "kv_pool_tokens": after.kv_total_tokens,
            "state_slots": after.state_total_slots,
        }
    split = llm.engine.stats().split
    moved = {} if split is None else {"moves": split.num_moves, "moved_states": split.moved_states}
    return figures | moved | ({} if split is None else {"moved_tokens": split.moved_tokens}), outputs


def _run(config: PrefixBenchConfig, llm: LLM, waves: Waves, outputs: list[Tokens]) -> int:
    """Run waves of prompts, and give back what became of their texts; returns the tokens of all prompts."""
    greedy = SamplingParams(max_tokens=config.output_tokens, temperature=0.0, ignore_eos=True)
    total = 0
    for prompts, texts in waves:
        answers = llm.generate(prompts, greedy)
        texts.update((i, answer.prompt_token_ids + answer.token_ids) for i, answer in enumerate(answers))
        outputs += [answer.token_ids for answer in answers]
        total += sum(map(len, prompts))
    return total


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
