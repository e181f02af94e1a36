"""A load that swings between numbers of clients and kinds of text, and the figures of servers that have played it."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from specmamba.measure.prompts import bundled_texts, seed_of
from specmamba.measure.settling import FullStep, median_curve, reached_after, settled_after

CODE, NOISE = "code", "noise"
WINDOW, TOLERANCE = 25, 0.1  # steps, and how much slower than steady a window may be
_NOISE_TOKENS = 64  # in a prompt


@dataclass(frozen=True, slots=True)
class Phase:
    """A load that stays the same for a while."""

    number: int  # in its round
    clients: int
    text: str


@dataclass(frozen=True)
class Load:
    """What is asked in each phase of each round."""

    clients: Sequence[int]
    requests: int  # of each client in a phase
    max_tokens: int
    temperatures: Mapping[str, float]  # by kind of text
    seed: int
    vocab_size: int

    @cached_property
    def phases(self) -> list[Phase]:
        """The phases of a round: from each to the next, and to the next round, the clients change or the text."""
        loads = [
            (clients, text)
            for number, clients in enumerate(self.clients)
            for text in ((NOISE, CODE) if number % 2 else (CODE, NOISE))
        ]
        return [Phase(number, *load) for number, load in enumerate(loads)]

    def bodies(self, phase: Phase, round_number: int) -> list[list[dict[str, Any]]]:
        """The bodies that each client sends. No two phases of all rounds have the same seeds."""
        first = (round_number * len(self.phases) + phase.number) * max(self.clients) * self.requests
        numbers = range(first, first + phase.clients * self.requests)
        return [
            [self._body(phase.text, number) for number in numbers[client :: phase.clients]]
            for client in range(phase.clients)
        ]

    def _body(self, text: str, number: int) -> dict[str, Any]:
        texts = bundled_texts()
        noise = random.Random(f"{self.seed} {number}").choices(range(self.vocab_size), k=_NOISE_TOKENS)
        return {
            "prompt": texts[number % len(texts)].text if text == CODE else noise,
            "max_tokens": self.max_tokens,
            "temperature": self.temperatures[text],
            "seed": seed_of(self.seed, number),
            "ignore_eos": True,
            "return_tokens": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@dataclass(frozen=True, slots=True)
class Played:
    """What one server did in one phase of one round."""

    speed: float  # tokens per second
    accept_length: float
    num_steps: int  # as the clients see them
    steps: tuple[FullStep, ...]
    sizing: Mapping[str, int]  # what a server with adaptive sizes has counted; nothing of others


def phase_report(phase: Phase, played: Mapping[str, Sequence[Played]], adaptive: str) -> dict[str, Any]:
    """The figures of one phase: medians over rounds, and the adaptive way over the fixed one that is best here."""
    ways = {way: way_report(rounds) for way, rounds in played.items()}
    best = max((way for way in ways if way != adaptive), key=lambda way: float(ways[way]["tokens_per_second"]))
    ratios = [mine.speed / other.speed for mine, other in zip(played[adaptive], played[best], strict=True)]
    return {
        "clients": phase.clients,
        "text": phase.text,
        "best_static": best,
        "over_best": round(statistics.median(ratios), 3),
        "over_best_range": [round(min(ratios), 3), round(max(ratios), 3)],
        "ways": ways,
    }


def way_report(rounds: Sequence[Played]) -> dict[str, Any]:
    """The figures of one way in one phase. Its windows: their speed over the steady one, median over rounds."""
    curve = median_curve([played.steps for played in rounds], WINDOW)
    return {
        "tokens_per_second": round(statistics.median(played.speed for played in rounds), 1),
        "rounds": [round(played.speed, 1) for played in rounds],
        "accepted": round(statistics.median(played.accept_length for played in rounds), 2),
        "steps": [played.num_steps for played in rounds],
        "full_steps": [len(played.steps) for played in rounds],
        "reached_after": reached_after(curve, WINDOW, TOLERANCE),
        "settled_after": settled_after(curve, WINDOW, TOLERANCE),
        "windows": [round(speed, 3) for speed in curve],
        "sizing": {name: sum(played.sizing[name] for played in rounds) for name in rounds[0].sizing},
    }
