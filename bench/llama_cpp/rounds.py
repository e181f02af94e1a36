"""Run both sides in turns: start an engine and a server for each way of decoding, give each the same batches."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Protocol

from specmamba.bench.llama_cpp.build import Build
from specmamba.bench.llama_cpp.engine_process import EngineProcess, started_engine
from specmamba.bench.llama_cpp.figures import Answer, Batch, Round
from specmamba.bench.llama_cpp.llama_server import started_llama_server
from specmamba.bench.llama_cpp.options import SAME_FILE, LlamaCppBenchConfig, Mode, Pair, engine_flags
from specmamba.config import MAX_DRAFT_TOKENS
from specmamba.measure.command import in_turns
from specmamba.measure.prompts import PromptText, seed_of
from specmamba.measure.weight_forms import form_flags

OWN, OTHER = "specmamba", "llama_cpp"
SETTLE_S = 0.05  # before each turn: threads of the one before spin for some milliseconds before they sleep
WARM_UP_TOKENS = 16


class Contestant(Protocol):
    """One side in one way of decoding."""

    def run(self, batch: Batch) -> list[Answer]: ...


@dataclass(frozen=True)
class Prompts:
    """Token ids of the prompts."""

    short: Sequence[Sequence[int]]  # that are continued
    source: Sequence[int]  # all texts with their continuations, to cut long prompts from

    def batches(self, size: int) -> list[list[Sequence[int]]]:
        """The short prompts in full batches; the first prompts fill up the last one."""
        starts = range(0, len(self.short), size)
        return [list(islice(cycle(self.short), start, start + size)) for start in starts]

    def long(self, length: int, number: int) -> list[int]:
        """A prompt of ``length`` tokens; the next ``number`` starts at another place of the text."""
        return [self.source[(number * length + i) % len(self.source)] for i in range(length)]


@dataclass(frozen=True)
class Sides:
    """The contestants of both sides by name of their mode."""

    own: Mapping[str, Contestant]
    other: Mapping[str, Contestant]

    @property
    def pairs(self) -> list[tuple[str, str, Contestant]]:
        """(side, mode, contestant); the two sides of a mode follow each other."""
        pairs = []
        for name, contestant in self.own.items():
            pairs.append((OWN, name, contestant))
            if name in self.other:
                pairs.append((OTHER, name, self.other[name]))
        return pairs


Rounds = dict[str, dict[str, list[Round]]]  # by side and mode


@dataclass(frozen=True)
class Plan:
    """What is the same in all settings."""

    config: LlamaCppBenchConfig
    build: Build
    modes: Sequence[Mode]
    prompts: Prompts

    @property
    def common_modes(self) -> dict[str, int]:
        """The modes of both sides: the number of drafts by name."""
        return {mode.name: mode.num_drafts for mode in self.modes if mode.num_drafts is not None}

    @property
    def context(self) -> int:
        """Tokens of one request at the most, for both sides: a multiple of 256, which llama.cpp rounds to."""
        longest = max(self.config.max_tokens + max(map(len, self.prompts.short)), *self.config.ttft, 0)
        return -(-(longest + MAX_DRAFT_TOKENS) // 256) * 256


def prepare(
    config: LlamaCppBenchConfig, pairs: Sequence[Pair], modes: Sequence[Mode], texts: Sequence[PromptText]
) -> tuple[Prompts, Path]:
    """Load an engine once to encode the prompts; also returns the checkpoint's folder.

    Raises:
        SpecmambaError: the engine cannot be loaded, or a prompt cannot be encoded.
    """
    form = next((pair.form for pair in pairs if pair.form != SAME_FILE), "bf16")  # there is no GGUF file yet
    flags = engine_flags(config, form_flags(form, "--pairs"), modes[0], 1, MAX_DRAFT_TOKENS)
    with started_engine(flags, config.startup_timeout, config.answer_timeout) as engine:
        prompts, continued = engine.encode(texts)
        checkpoint = Path(engine.facts["checkpoint"])
    source = [token for tokens in continued for token in tokens]
    return Prompts(list(islice(cycle(prompts), config.num_prompts)), source), checkpoint


@contextmanager
def started_sides(plan: Plan, model: Path, pair: Pair, batch: int) -> Iterator[tuple[Sides, EngineProcess]]:
    """Start an engine for each mode, and a server for each that llama.cpp has; all end with the context.

    Args:
        plan: what to compare.
        model: the GGUF file.
        pair: the form of this runtime's weights, and llama.cpp's.
        batch: requests at a time.

    Yields:
        Both sides, and one of the engines, which can measure the memory.

    Raises:
        SpecmambaError: one of them cannot be started.
    """
    config, context = plan.config, plan.context
    with ExitStack() as stack:
        own = {}
        for mode in plan.modes:
            flags = engine_flags(config, pair.flags(model), mode, batch, context)
            engine = started_engine(flags, config.startup_timeout, config.answer_timeout)
            own[mode.name] = stack.enter_context(engine)
        other = {}
        for name, num_drafts in plan.common_modes.items():
            server = started_llama_server(config, plan.build, model, num_drafts, batch, context)
            other[name] = stack.enter_context(server)
        yield Sides(own, other), next(iter(own.values()))


def play(plan: Plan, sides: Sides, batch: int, memory: EngineProcess) -> tuple[dict[float, Rounds], list[float]]:
    """Run all rounds of decoding.

    Returns:
        Rounds by temperature, and the gigabytes per second of the memory, measured once a round.

    Raises:
        SpecmambaError: a contestant failed.
    """
    config, batches = plan.config, plan.prompts.batches(batch)
    results: dict[float, Rounds] = {t: _no_rounds(sides) for t in config.temperatures}
    speeds = []
    for _, _, contestant in sides.pairs:
        contestant.run(_batch(batches[0], 0.0, config.seed, WARM_UP_TOKENS))
    for number in range(config.rounds):
        speeds.append(memory.memory_speed())
        first = seed_of(config.seed, number * len(batches) * batch)
        for temperature in config.temperatures:
            work = [
                _batch(prompts, temperature, first + i * batch, config.max_tokens) for i, prompts in enumerate(batches)
            ]
            for (side, mode), answers in _play_round(sides, work, number).items():
                results[temperature][side][mode].append(answers)
        print(f"round {number + 1} of {config.rounds} done", file=sys.stderr)
    return results, speeds


def _play_round(sides: Sides, work: Sequence[Batch], number: int) -> dict[tuple[str, str], list[list[Answer]]]:
    """Give every batch to all contestants, one after the other; the answers by side and mode."""
    played: dict[tuple[str, str], list[list[Answer]]] = {(side, mode): [] for side, mode, _ in sides.pairs}
    for i, batch in enumerate(work):
        for side, mode, contestant in in_turns(sides.pairs, number + i):
            time.sleep(SETTLE_S)
            played[side, mode].append(contestant.run(batch))
    return played


def first_tokens(plan: Plan, sides: Sides) -> dict[int, dict[str, dict[str, list[float]]]]:
    """Time the first token of long prompts, one prompt at a time, of plain decoding and the longest common drafts.

    Returns:
        Seconds by length of the prompt, side and mode, one per round after a round that is not counted.

    Raises:
        SpecmambaError: a contestant failed.
    """
    config, common = plan.config, plan.common_modes
    modes = {min(common, key=common.__getitem__), max(common, key=common.__getitem__)}
    pairs = [pair for pair in sides.pairs if pair[1] in modes]
    seconds: dict[int, dict[str, dict[str, list[float]]]] = {
        length: {side: {mode: [] for mode in common if mode in modes} for side in (OWN, OTHER)}
        for length in config.ttft
    }
    for number in range(config.rounds + 1):
        for length in config.ttft:
            work = _batch([plan.prompts.long(length, number)], 0.0, config.seed, 1)
            for side, mode, contestant in in_turns(pairs, number):
                time.sleep(SETTLE_S)
                (answer,) = contestant.run(work)
                if number:
                    seconds[length][side][mode].append(answer.first_token_s)
    if config.ttft:
        print("first tokens done", file=sys.stderr)
    return seconds


def _batch(prompts: Sequence[Sequence[int]], temperature: float, first_seed: int, max_tokens: int) -> Batch:
    return Batch(prompts, [first_seed + i for i in range(len(prompts))], max_tokens, temperature)


def _no_rounds(sides: Sides) -> Rounds:
    return {OWN: {name: [] for name in sides.own}, OTHER: {name: [] for name in sides.other}}
