"""Figures of a comparison with llama.cpp: what is counted, rates, ratios.

**Decode time** of a request is from its first token to its last one: tokens but the first one over this time is its
rate. llama-server reports exactly that (``predicted_ms``, ``predicted_n``); of an engine the times are read when
``Engine.step`` has returned the first and the last token. Reading the prompt is in neither, HTTP in neither. The last
step of a request counts whole, also where it accepts more drafts than were asked for.

**Rate of a batch** is the sum of the rates of its requests. **Rate of a round** is the tokens of all its batches over
the sum of tokens / rate: with one request at a time, all tokens over all time.

**Ratios** are of two rates of one round; the figure is the median over rounds, with the smallest and the largest one.
The best mode of a side is the one with the highest median rate.

**Acceptance length** is tokens per step: tokens but the first one over those that were no accepted drafts.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from specmamba.measure.report import median_with_range


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests that are sent at once, one prompt and one seed each."""

    prompts: Sequence[Sequence[int]]  # token ids
    seeds: Sequence[int]
    max_tokens: int
    temperature: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request of a batch got."""

    tokens: tuple[int, ...]
    first_token_s: float  # from the request to its first delta
    num_decoded: int  # tokens but those of the first delta
    decode_s: float  # from the first delta to the last one
    num_accepted: int  # drafted tokens among them


Round = Sequence[Sequence[Answer]]  # the answers of each batch
Figures = dict[str, Any]


def round_rate(answers: Round) -> float:
    """Decoded tokens per second of one round."""
    tokens, seconds = 0, 0.0
    for batch in answers:
        decoded = sum(answer.num_decoded for answer in batch)
        tokens += decoded
        seconds += decoded / sum(answer.num_decoded / answer.decode_s for answer in batch)
    return tokens / seconds


def accept_length(rounds: Sequence[Round]) -> float:
    """Decoded tokens per step of all rounds."""
    answers = [answer for one in rounds for batch in one for answer in batch]
    decoded = sum(answer.num_decoded for answer in answers)
    return decoded / max(1, decoded - sum(answer.num_accepted for answer in answers))


def mode_figures(rounds: Sequence[Round]) -> Figures:
    """{"tokens_per_s": median with range, "accept_length"} of one way of decoding of one side."""
    rates = median_with_range([round_rate(one) for one in rounds], 2)
    return {"tokens_per_s": rates, "accept_length": round(accept_length(rounds), 3)}


def ratio_figures(own: Sequence[Round], other: Sequence[Round]) -> Figures:
    """Median with range of the ratios of rates in the same round."""
    pairs = zip(own, other, strict=True)
    return median_with_range([round_rate(mine) / round_rate(theirs) for mine, theirs in pairs], 3)


def compared(
    own: Mapping[str, Sequence[Round]], other: Mapping[str, Sequence[Round]], *, is_greedy: bool = False
) -> Figures:
    """The figures of one setting.

    Args:
        own: rounds of this runtime by mode.
        other: rounds of llama.cpp by mode.
        is_greedy: both sides should write the same texts.

    Returns:
        {"specmamba": figures by mode, "llama_cpp": the same, "ratios": by mode that both have, "best": {"specmamba" and
        "llama_cpp": the names of the best modes, "ratio"}, "equal_tokens": ``common_start`` by mode, of greedy texts}.
    """
    best, best_other = _best(own), _best(other)
    return {
        "specmamba": {name: mode_figures(rounds) for name, rounds in own.items()},
        "llama_cpp": {name: mode_figures(rounds) for name, rounds in other.items()},
        "ratios": {name: ratio_figures(own[name], other[name]) for name in own if name in other},
        "best": {
            "specmamba": best,
            "llama_cpp": best_other,
            "ratio": ratio_figures(own[best], other[best_other]),
        },
        "equal_tokens": {name: common_start(own[name][0], other[name][0]) for name in other if is_greedy},
    }


def common_start(own: Round, other: Round) -> Figures:
    """How far the texts of both sides agree: {"median", "range"} of equal tokens before the first other one.

    Sums in another order choose another token where two are nearly as likely, so no length is wrong by itself.
    """
    pairs = [pair for batches in zip(own, other, strict=True) for pair in zip(*batches, strict=True)]
    return median_with_range([_equal_tokens(mine.tokens, theirs.tokens) for mine, theirs in pairs], 1)


def first_token_figures(own: Sequence[float], other: Sequence[float]) -> Figures:
    """Milliseconds of both sides, and their ratios in the same round; each median with range.

    Args:
        own: seconds of this runtime, one a round.
        other: those of llama.cpp.
    """
    return {
        "specmamba_ms": median_with_range([seconds * 1e3 for seconds in own], 3),
        "llama_cpp_ms": median_with_range([seconds * 1e3 for seconds in other], 3),
        "ratio": median_with_range([mine / theirs for mine, theirs in zip(own, other, strict=True)], 3),
    }


def _best(rounds: Mapping[str, Sequence[Round]]) -> str:
    return max(rounds, key=lambda name: statistics.median(map(round_rate, rounds[name])))


def _equal_tokens(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
