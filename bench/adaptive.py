"""Drafts whose size is decided in each step beside fixed sizes, for some numbers of requests and temperatures.

    python -m specmamba.bench.adaptive [--model DIR] [--json FILE] [--batches 1,4,8,16] [--rounds 9] [--replay]
        [any engine flag]

Batches of requests decode together; all ways to draft take turns within a round, and each keeps what it has learned for
the next one. Requests bring seeds, so all are decided under ``target``; with ``--replay`` there are also cells whose
text is given: what follows the bundled prompts in their source. Reported are medians over rounds of tokens per second
over those of plain decoding in the same round; the worst cells, adaptive over the best fixed size and over plain; and
the mix, the geometric mean over all cells of each way.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from specmamba.errors import ConfigError
from specmamba.measure.command import Page, Report, put_out, run_command
from specmamba.measure.prompts import bundled_texts, encode_with_continuation, model_name
from specmamba.measure.report import Count, JsonOption, NoRadixCache, machine, versions

if TYPE_CHECKING:
    from specmamba import LLM
    from specmamba.measure.full_batch import Job

PROG = "python -m specmamba.bench.adaptive"
PLAIN, ADAPTIVE = "plain", "adaptive"
WAYS: dict[str, dict[str, Any]] = {
    PLAIN: {"speculative_algorithm": "none"},
    "chain of 1": {"speculative_num_steps": 1},
    "chain of 2": {"speculative_num_steps": 2},
    "chain of 3": {"speculative_num_steps": 3},
    "tree of 8": {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 8},
    ADAPTIVE: {"speculative_adaptive": "auto"},
}
KEPT_FLAGS = {"speculative_state", "speculative_costs"} | {
    f"speculative_draft_model_{name}" for name in ("path", "revision", "quantization")
}
Cell = tuple[int, float, bool]  # requests, temperature, whether the text is given


class AdaptiveBenchConfig(JsonOption):
    """Adaptive sizes of drafts beside fixed ones."""

    disable_radix_cache: NoRadixCache = True
    rounds: Annotated[Count, Field(description="rounds of all ways; medians over them are reported")] = 9
    batches: Annotated[tuple[Count, ...], Field(description="requests at a time")] = (1, 4, 8, 16)
    max_tokens: Annotated[int, Field(ge=16, description="new tokens of a request")] = 192
    temperatures: Annotated[tuple[float, ...], Field(description="sampling temperatures; 0 is greedy")] = (0.0, 0.8)
    replay: Annotated[bool, Field(description="also time texts that are given")] = False


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status: 0, or 130 after Ctrl-C."""
    return run_command(PROG, AdaptiveBenchConfig, arguments, lambda config: put_out(config, run(config), print_report))


def run(config: AdaptiveBenchConfig) -> dict[str, Any]:
    """Run all rounds; the report as a JSON object.

    Raises:
        ConfigError: flags of drafts were given, or the model has no draft head.
    """
    from specmamba import LLM
    from specmamba.config import EngineConfig

    given = {name for name in config.model_fields_set if name.startswith("speculative_")} - KEPT_FLAGS
    if given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(given))
        raise ConfigError(f"{names}: this benchmark chooses its own drafts: {', '.join(WAYS)}")
    flags = config.model_dump(include=set(EngineConfig.model_fields))
    with LLM(**{**flags, **WAYS[ADAPTIVE]}) as llm:
        described = llm.engine.describe()
        if described["speculative_algorithm"] == "none":
            raise ConfigError("this checkpoint has no draft head: there is nothing whose size could be decided")
        kinds = [(t, False) for t in config.temperatures] + ([(0.0, True)] if config.replay else [])
        cells = [time_cell(llm, config, (size, *kind)) for size in config.batches for kind in kinds]
    return {
        "model": model_name(described),
        "dtype": config.dtype,
        "machine": machine(),
        "versions": versions(("specmamba", "torch")),
        "rounds": config.rounds,
        "cells": cells,
        "worst_over_fixed": min(cell["over_best_fixed"] for cell in cells),
        "worst_over_plain": min(cell["ways"][ADAPTIVE]["over_plain"] for cell in cells),
        "mix": {way: round(statistics.geometric_mean(c["ways"][way]["over_plain"] for c in cells), 3) for way in WAYS},
    }


def time_cell(llm: LLM, config: AdaptiveBenchConfig, cell: Cell) -> dict[str, Any]:
    """Run all ways in turns; the first round, which records steps, does not count."""
    speeds: dict[str, list[float]] = defaultdict(list)
    lengths: dict[str, list[float]] = defaultdict(list)
    for number in range(config.rounds + 1):
        jobs = jobs_of(llm, config, cell, number)
        for way in WAYS:
            speed, length = time_way(llm, jobs, way)
            if number:
                speeds[way].append(speed)
                lengths[way].append(length)
    print(f"{cell[0]} requests, {_text(*cell[1:])} done", file=sys.stderr)
    ways: dict[str, dict[str, Any]] = {}
    for way, found in speeds.items():
        ratios = [speed / plain for speed, plain in zip(found, speeds[PLAIN], strict=True)]
        ways[way] = {
            "tokens_per_second": round(statistics.median(found), 1),
            "over_plain": round(statistics.median(ratios), 3),
            "range": [round(min(ratios), 3), round(max(ratios), 3)],
            "accepted": round(statistics.median(lengths[way]), 2),
        }
    best = max(figures["over_plain"] for way, figures in ways.items() if way != ADAPTIVE)
    over = round(ways[ADAPTIVE]["over_plain"] / best, 3)
    return {"requests": cell[0], "text": _text(*cell[1:]), "over_best_fixed": over, "ways": ways}


def _text(temperature: float, is_given: bool) -> str:
    return "given" if is_given else f"T {temperature:g}"


def jobs_of(llm: LLM, config: AdaptiveBenchConfig, cell: Cell, number: int) -> list[Job]:
    """The requests of a round."""
    from specmamba import SamplingParams
    from specmamba.measure.full_batch import Job

    size, temperature, is_given = cell
    params = SamplingParams(max_tokens=config.max_tokens, temperature=temperature, seed=number, ignore_eos=True)
    texts = [text for text in bundled_texts() if text.continuation]
    rows = [texts[(i + number) % len(texts)] for i in range(size)]
    pairs = [encode_with_continuation(text, llm.engine.tokenizer) for text in rows]
    return [
        Job(tuple(prompt), params, tuple(follows[: config.max_tokens]) if is_given else ()) for prompt, follows in pairs
    ]


def time_way(llm: LLM, jobs: list[Job], way: str) -> tuple[float, float]:
    """Run one batch; returns tokens per second, and tokens per step and request."""
    from specmamba.measure.full_batch import run_full_batch

    llm.workbench.use_drafts(**WAYS[way])
    stretch = run_full_batch(llm, jobs)
    return stretch.num_tokens / stretch.seconds, stretch.num_tokens / stretch.num_steps / len(jobs)


def print_report(report: Report) -> None:
    """Print the table of cells."""
    page = Page()
    page.lines(f"{report['model']}, {report['dtype']}", report["machine"])
    rows = [
        (f"{cell['requests']}", cell["text"], *_columns(cell), f"{cell['over_best_fixed']:.3f}")
        for cell in report["cells"]
    ]
    names = [f"{way} (range)" if way == ADAPTIVE else way for way in WAYS if way != PLAIN]
    page.table(("requests", "text", *names, "adaptive over best"), rows)
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
            text += " ({:.2f}-{:.2f})".format(*figures["range"])
        if way != PLAIN:
            columns.append(text)
    return columns


if __name__ == "__main__":
    sys.exit(main())
