"""Time to first token of a long prompt that shares most of its tokens with others, against the same prompt cold.

In every round three users ask different questions behind one text, and the cache is empty before the first one. The
second one is the first to leave the path of another in the middle: there is KV up to there but no recurrent state, so
it goes on from the end of a chunk and leaves a state where the two part. From the third one on all of the shared text
is spared, which is the figure (``ttft_shared_ratio``). Second and third user also run without the cache, in turns with
the runs with it.
"""

from __future__ import annotations

import random
import statistics
from typing import TYPE_CHECKING, Any

from specmamba import LLM
from specmamba.bench.prefix.engines import Demand, pool_flags, start_engine
from specmamba.bench.prefix.run import Answer, run_wave, warm_up
from specmamba.bench.prefix.texts import TextSource
from specmamba.bench.prefix.workloads import Ask, Tokens
from specmamba.errors import ConfigError

if TYPE_CHECKING:
    from specmamba.bench.prefix.__main__ import PrefixBenchConfig

WARM, COLD = "with_cache", "without_cache"
USERS = 3


def measure_ttft(config: PrefixBenchConfig, cold: LLM, source: TextSource) -> dict[str, Any]:
    """All rounds; figures in milliseconds are medians over them.

    Raises:
        ConfigError: the prompt does not fit the context.
    """
    length = config.ttft_tokens
    if length >= cold.engine.context_length:
        raise ConfigError(
            f"--ttft-tokens {length}: no output fits behind it in a context of {cold.engine.context_length}; lower it "
            "and --ttft-shared-tokens"
        )
    states = USERS * (4 + -(-length // config.chunked_prefill_size))
    kv = USERS * (length + 2 * config.page_size)
    demand = Demand(USERS, 1, length + 1, USERS * length, kv, states)
    with start_engine(config, **pool_flags(config, [demand])) as warm:
        for llm in (cold, warm):
            warm_up(llm, source, config)
        rounds = [_round(config, {WARM: warm, COLD: cold}, source, number) for number in range(config.rounds)]
    return {
        "prompt_tokens": length,
        "shared_tokens": config.ttft_shared_tokens,
        "rounds": config.rounds,
        "different_texts": sum(one["different_texts"] for one in rounds),
        **_figures(rounds, "ttft_shared", 1),
        **_figures(rounds, "ttft_second_user", 0),
    }


def _round(config: PrefixBenchConfig, engines: dict[str, LLM], source: TextSource, number: int) -> dict[str, Any]:
    """Times and cached tokens of the second and the third user of a text, by engine."""
    draw = random.Random(f"{config.seed}/ttft/{number}")
    text = (source.start + source.cut(config.ttft_shared_tokens, draw))[: config.ttft_shared_tokens]
    own = config.ttft_tokens - len(text)
    first, *others = [Ask("user", text + question) for question in _different(source, own, draw, USERS)]
    engines[WARM].flush_cache()
    run_wave(engines[WARM], [first], 1)
    order = [WARM, COLD] if number % 2 else [COLD, WARM]
    answers: dict[str, list[Answer]] = {name: [] for name in order}
    for ask in others:
        for name in order:
            answers[name] += run_wave(engines[name], [ask], 1)
    return {
        "seconds": {name: [answer.ttft_s for answer in given] for name, given in answers.items()},
        "cached": [answer.num_cached_tokens for answer in answers[WARM]],
        "different_texts": sum(a.output != b.output for a, b in zip(answers[WARM], answers[COLD], strict=True)),
    }


def _different(source: TextSource, length: int, draw: random.Random, count: int) -> list[Tokens]:
    """Pieces that part at their first token where the text has enough different tokens."""
    pieces: list[Tokens] = []
    for _ in range(100 * count):
        piece = source.cut(length, draw)
        if piece[0] not in {other[0] for other in pieces}:
            pieces.append(piece)
        if len(pieces) == count:
            return pieces
    raise ConfigError("--prompts: the text has next to no different tokens: give another one")


def _figures(rounds: list[dict[str, Any]], name: str, user: int) -> dict[str, Any]:
    warm, cold = ([one["seconds"][engine][user] for one in rounds] for engine in (WARM, COLD))
    ratios = [a / b for a, b in zip(warm, cold, strict=True)]
    return {
        f"{name}_ratio": round(statistics.median(ratios), 4),
        f"{name}_ratio_range": [round(min(ratios), 4), round(max(ratios), 4)],
        f"{name}_ms": {WARM: round(statistics.median(warm) * 1e3, 3), COLD: round(statistics.median(cold) * 1e3, 3)},
        f"{name}_cached_tokens": min(one["cached"][user] for one in rounds),
    }
