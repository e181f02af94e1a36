"""Drafts whose size is decided in each step beside fixed sizes, for some numbers of requests and kinds of text.

    python -m specmamba.bench.adaptive [--model DIR | --family NAME] [--json FILE] [--batches 1,4,8,16] [--rounds 9]
        [--warm-rounds 60] [--temperatures 0,0.8] [--replay] [--synthetic-acceptance 0.1,0.5,0.9] [any engine flag]

Batches of requests decode together; all ways to draft take turns within a round, and each keeps what it has learned for
the next one. Rounds before them, in which steps are recorded and options first tried, do not count; all but the first
ones are of the adaptive way alone. Requests bring seeds, so all are decided under ``target``; with ``--replay`` there
are also cells whose text is given: what follows the bundled prompts in their source. With
``--synthetic-acceptance`` there are cells in which a first child is accepted with a given probability: they show where
drafts begin to pay. ``--family`` takes a checkpoint of
``specmamba.bench.families``, with random weights and n-grams as drafts.

Reported are medians over rounds of tokens per second over those of plain decoding in the same round, and the interval
that holds the median with 90 %; the share of steps of the adaptive way that drafted, and of its time that decisions
took; the worst cells, adaptive over the best fixed size (chosen in the other half of the rounds) and over plain; and
the mix, the geometric mean over all cells of each way.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import Field

from specmamba.errors import ConfigError
from specmamba.measure.command import Page, Report, put_out, run_command
from specmamba.measure.comparison import median_interval, over_best
from specmamba.measure.prompts import continued_prompts, model_name
from specmamba.measure.report import (
    Count,
    JsonOption,
    NoRadixCache,
    machine,
    progress_bar,
    refuse_draft_flags,
    versions,
)

if TYPE_CHECKING:
    from specmamba import LLM
    from specmamba.measure.full_batch import Job

PROG = "python -m specmamba.bench.adaptive"
PLAIN, ADAPTIVE = "plain", "adaptive"
ROUNDS_TO_RECORD = 3  # in which all ways meet their kinds of steps
WAYS: dict[str, dict[str, Any]] = {
    PLAIN: {"speculative_algorithm": "none"},
    "chain of 1": {"speculative_num_steps": 1},
    "chain of 2": {"speculative_num_steps": 2},
    "chain of 3": {"speculative_num_steps": 3},
    "tree of 8": {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 8},
    ADAPTIVE: {"speculative_adaptive": "auto"},
}
KEPT_FLAGS = {"speculative_state", "speculative_costs", "speculative_algorithm"} | {
    f"speculative_draft_model_{name}" for name in ("path", "revision", "quantization")
}


class Cell(NamedTuple):
    """What all ways are timed with."""

    requests: int
    temperature: float = 0.0
    is_given: bool = False  # the text is given
    synthetic: float | None = None  # probability with which a first child is accepted

    @property
    def text(self) -> str:
        """Where the text comes from."""
        if self.synthetic is not None:
            return f"accepted {self.synthetic:g}"
        return "given" if self.is_given else f"T {self.temperature:g}"


Probability = Annotated[float, Field(ge=0.0, le=1.0)]


class AdaptiveBenchConfig(JsonOption):
    """Adaptive sizes of drafts beside fixed ones."""

    disable_radix_cache: NoRadixCache = True
    rounds: Annotated[Count, Field(description="rounds of all ways; medians over them are reported")] = 9
    warm_rounds: Annotated[Count, Field(description="rounds of a cell before them, which do not count")] = 60
    batches: Annotated[tuple[Count, ...], Field(description="requests at a time")] = (1, 4, 8, 16)
    max_tokens: Annotated[int, Field(ge=16, description="new tokens of a request")] = 192
    temperatures: Annotated[tuple[float, ...], Field(description="sampling temperatures; 0 is greedy")] = (0.0, 0.8)
    replay: Annotated[bool, Field(description="also time texts that are given")] = False
    synthetic_acceptance: Annotated[
        tuple[Probability, ...], Field(description="also time drafts that are accepted with these probabilities")
    ] = ()
    family: Annotated[
        str | None, Field(description="a family of specmamba.bench.families instead of --model; drafts are n-grams")
    ] = None

    @property
    def cells(self) -> list[Cell]:
        """All cells, by requests."""
        kinds = [Cell(1, temperature) for temperature in self.temperatures]
        kinds += [Cell(1, is_given=True)] * self.replay + [Cell(1, synthetic=p) for p in self.synthetic_acceptance]
        return [kind._replace(requests=size) for size in self.batches for kind in kinds]


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status: 0, or 130 after Ctrl-C."""
    return run_command(PROG, AdaptiveBenchConfig, arguments, lambda config: put_out(config, run(config), print_report))


def run(config: AdaptiveBenchConfig) -> dict[str, Any]:
    """Run all rounds; the report as a JSON object.

    Raises:
        ConfigError: flags of drafts were given, or the model has no draft head.
    """
    from specmamba.bench.families.shapes import SHAPES, write_family

    refuse_draft_flags(config, KEPT_FLAGS, f"chooses its own drafts: {', '.join(WAYS)}")
    if config.family is None:
        return _run(config, {})
    if config.family not in SHAPES:
        raise ConfigError(f"--family {config.family}: there are {', '.join(SHAPES)}")
    with tempfile.TemporaryDirectory(prefix="specmamba-family-") as folder:
        write_family(config.family, Path(folder))
        report = _run(config, {"model": folder, "speculative_algorithm": "ngram"})
    return report | {"model": config.family}


def _run(config: AdaptiveBenchConfig, changes: dict[str, Any]) -> dict[str, Any]:
    """Run all rounds, with some flags changed."""
    from specmamba import LLM
    from specmamba.config import EngineConfig

    flags = config.model_dump(include=set(EngineConfig.model_fields)) | changes
    num_rounds = len(config.cells) * (config.rounds + config.warm_rounds)
    with progress_bar("rounds of all loads", num_rounds) as advance, LLM(**flags | WAYS[ADAPTIVE]) as llm:
        described = llm.engine.describe()
        if described["speculative_algorithm"] == "none":
            raise ConfigError("this checkpoint has no draft head: there is nothing whose size could be decided")
        cells = [time_cell(llm, config, cell, flags["speculative_algorithm"], advance) for cell in config.cells]
    return {
        "model": model_name(described),
        "drafts": described["speculative_algorithm"],
        "dtype": described["dtype"],
        "machine": machine(),
        "versions": versions(("specmamba", "torch")),
        "rounds": config.rounds,
        "cells": cells,
        "worst_over_fixed": min(cell["over_best_fixed"] for cell in cells),
        "worst_over_plain": min(cell["ways"][ADAPTIVE]["over_plain"] for cell in cells),
        "mix": {way: round(statistics.geometric_mean(c["ways"][way]["over_plain"] for c in cells), 3) for way in WAYS},
    }


def time_cell(
    llm: LLM, config: AdaptiveBenchConfig, cell: Cell, algorithm: str, advance: Callable[[], None]
) -> dict[str, Any]:
    """Run all ways in turns, ``advance`` for each round; the first ones, in which steps are recorded, do not count."""
    _warm_up(llm, config, cell, algorithm, advance)
    speeds: dict[str, list[float]] = defaultdict(list)
    lengths: dict[str, list[float]] = defaultdict(list)
    drafted: list[float] = []
    decided: list[float] = []
    for number in range(config.rounds):
        jobs = jobs_of(llm, config, cell, number)
        for way in in_turn(number):
            found = time_way(llm, jobs, {"speculative_algorithm": algorithm} | WAYS[way], cell)
            speeds[way].append(found.speed)
            lengths[way].append(found.length)
            if way == ADAPTIVE:
                drafted.append(found.drafted)
                decided.append(found.decided)
        advance()
    ways: dict[str, dict[str, Any]] = {}
    for way in WAYS:
        ratios = [speed / plain for speed, plain in zip(speeds[way], speeds[PLAIN], strict=True)]
        ways[way] = {
            "tokens_per_second": round(statistics.median(speeds[way]), 1),
            "over_plain": round(statistics.median(ratios), 3),
            "range": [round(min(ratios), 3), round(max(ratios), 3)],
            "interval": [round(end, 3) for end in median_interval(ratios)],
            "accepted": round(statistics.median(lengths[way]), 2),
        }
    shares = {"drafted": round(statistics.mean(drafted), 3), "decided": round(statistics.median(decided), 5)}
    ways[ADAPTIVE] |= shares
    over = over_best(speeds, ADAPTIVE)
    return {
        "requests": cell.requests,
        "text": cell.text,
        "over_best_fixed": round(statistics.median(over), 3),
        "over_best_interval": [round(end, 3) for end in median_interval(over)],
        "ways": ways,
    }


def _warm_up(llm: LLM, config: AdaptiveBenchConfig, cell: Cell, algorithm: str, advance: Callable[[], None]) -> None:
    """Run the rounds that do not count; arguments as for ``time_cell``."""
    for number in range(config.warm_rounds):
        jobs = jobs_of(llm, config, cell, config.rounds + number)
        for way in WAYS if number < ROUNDS_TO_RECORD else (ADAPTIVE,):
            time_way(llm, jobs, {"speculative_algorithm": algorithm} | WAYS[way], cell)
        advance()


def in_turn(number: int) -> list[str]:
    """All ways in the order of a round: each takes every place in turn, in even rounds and in odd ones alike."""
    names, start = list(WAYS), number // 2 % len(WAYS)
    return names[start:] + names[:start]


def jobs_of(llm: LLM, config: AdaptiveBenchConfig, cell: Cell, number: int) -> list[Job]:
    """The requests of a round."""
    from specmamba import SamplingParams
    from specmamba.measure.full_batch import Job

    params = SamplingParams(max_tokens=config.max_tokens, temperature=cell.temperature, seed=number, ignore_eos=True)
    pairs = continued_prompts(llm.engine.tokenizer, cell.requests, number)
    return [
        Job(tuple(prompt), params, tuple(follows[: config.max_tokens]) if cell.is_given else ())
        for prompt, follows in pairs
    ]


class Timed(NamedTuple):
    """One batch in one way."""

    speed: float  # tokens per second
    length: float  # tokens per step and request
    drafted: float = 0.0  # share of steps that drafted, where that is decided
    decided: float = 0.0  # share of the time that decisions took


def time_way(llm: LLM, jobs: list[Job], flags: dict[str, Any], cell: Cell) -> Timed:
    """Run one batch."""
    from specmamba.measure.full_batch import run_full_batch

    llm.workbench.use_drafts(**flags)
    llm.workbench.use_synthetic_acceptance(cell.synthetic)
    before = llm.engine.stats().sizing
    stretch = run_full_batch(llm, jobs)
    after = llm.engine.stats().sizing
    speeds = stretch.num_tokens / stretch.seconds, stretch.num_tokens / stretch.num_steps / len(jobs)
    if before is None or after is None:
        return Timed(*speeds)
    num_plain = after.num_plain_steps - before.num_plain_steps
    share = 1.0 - num_plain / max(after.num_steps - before.num_steps, 1)
    return Timed(*speeds, share, (after.decision_seconds - before.decision_seconds) / stretch.seconds)


def print_report(report: Report) -> None:
    """Print the table of cells."""
    page = Page()
    page.lines(f"{report['model']}, {report['drafts']}, {report['dtype']}", report["machine"])
    rows = [
        (
            f"{cell['requests']}",
            cell["text"],
            *_columns(cell),
            "{:.3f} ({:.2f}-{:.2f})".format(cell["over_best_fixed"], *cell["over_best_interval"]),
            f"{cell['ways'][ADAPTIVE]['drafted'] * 100:.0f} %",
            f"{cell['ways'][ADAPTIVE]['decided'] * 100:.2f} %",
        )
        for cell in report["cells"]
    ]
    names = [f"{way} (90 %)" if way == ADAPTIVE else way for way in WAYS if way != PLAIN]
    page.table(("requests", "text", *names, "over the best", "drafted", "deciding"), rows)
    page.lines(
        f"worst: {report['worst_over_fixed']:.3f} of the best, {report['worst_over_plain']:.3f} of plain decoding",
        "mix of all cells: " + ", ".join(f"{way} {mean:.3f}" for way, mean in report["mix"].items()),
    )


def _columns(cell: dict[str, Any]) -> list[str]:
    """Speeds over plain decoding."""
    columns = []
    for way, figures in cell["ways"].items():
        text = f"{figures['over_plain']:.2f}"
        if way == ADAPTIVE:
            text += " ({:.2f}-{:.2f})".format(*figures["interval"])
        if way != PLAIN:
            columns.append(text)
    return columns


if __name__ == "__main__":
    sys.exit(main())
