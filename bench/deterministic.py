"""What ``--deterministic`` costs: decode steps of two engines, with the flag and without it, in turns.

    python -m specmamba.bench.deterministic [--model DIR] [--batches 1,8] [--rounds 15] [--json FILE] [any engine flag]

Both replay the same texts, what follows the bundled prompts in their source, plainly and with each shape of drafts. A
batch of one is followed by the same batch of the other, and they change places from round to round. Reported is the
time of a step with the flag over that without it, the median over rounds and the interval that holds it with 90 %, and
the same of a token, since rounding may change a draft and so what a step accepts.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field

from specmamba.errors import ConfigError
from specmamba.measure.command import Page, Report, put_out, run_command
from specmamba.measure.comparison import median_interval
from specmamba.measure.prompts import continued_prompts, model_name
from specmamba.measure.report import (
    Count,
    JsonOption,
    NoRadixCache,
    machine,
    progress_bar,
    refuse_draft_flags,
    split_numbers,
    versions,
)

if TYPE_CHECKING:  # --help must not wait for torch
    from specmamba import LLM
    from specmamba.measure.full_batch import Job

PROG = "python -m specmamba.bench.deterministic"
PLAIN = "plain"
SHAPES: dict[str, dict[str, Any]] = {
    PLAIN: {"speculative_algorithm": "none"},
    "chain of 3": {"speculative_num_steps": 3},
    "tree of 8": {"speculative_num_steps": 4, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8},
}
KEPT_FLAGS = {"speculative_algorithm"} | {
    f"speculative_draft_model_{name}" for name in ("path", "revision", "quantization")
}


class DeterministicBenchConfig(JsonOption):
    """The price of the same bits."""

    disable_radix_cache: NoRadixCache = True
    rounds: Annotated[Count, Field(description="rounds; medians over them are reported")] = 15
    batches: Annotated[tuple[Count, ...], BeforeValidator(split_numbers), Field(description="requests at a time")] = (
        1,
        8,
    )
    max_tokens: Annotated[int, Field(ge=16, description="new tokens of a request")] = 64


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status: 0, or 130 after Ctrl-C."""
    return run_command(
        PROG, DeterministicBenchConfig, arguments, lambda config: put_out(config, run(config), print_report)
    )


def run(config: DeterministicBenchConfig) -> dict[str, Any]:
    """Run all rounds; the report as a JSON object.

    Raises:
        ConfigError: flags of drafts were given, or the one that is compared.
        SpecmambaError: an engine cannot start with these flags.
    """
    from specmamba import LLM
    from specmamba.config import EngineConfig

    if "deterministic" in config.model_fields_set:
        raise ConfigError("--deterministic: this benchmark runs with it and without; drop it")
    refuse_draft_flags(config, KEPT_FLAGS, f"chooses its own drafts: {', '.join(SHAPES)}")
    flags = (
        config.model_dump(include=set(EngineConfig.model_fields))
        | {"speculative_adaptive": "off"}
        | SHAPES["tree of 8"]
    )
    with ExitStack() as stack:
        llms = [stack.enter_context(LLM(**flags | {"deterministic": is_exact})) for is_exact in (False, True)]
        described = llms[0].engine.describe()
        shapes = [PLAIN] if described["speculative_algorithm"] == "none" else list(SHAPES)
        cells = [(size, shape) for size in config.batches for shape in shapes]
        advance = stack.enter_context(progress_bar("rounds of all shapes", len(cells) * config.rounds))
        rows = []
        for size, shape in cells:
            for llm in llms:
                llm.workbench.use_drafts(**{"speculative_algorithm": flags["speculative_algorithm"]} | SHAPES[shape])
            rows.append(time_cell(llms, config, size, advance) | {"requests": size, "drafts": shape})
    return {
        "model": model_name(described),
        "dtype": described["dtype"],
        "machine": machine(),
        "versions": versions(("specmamba", "torch")),
        "rounds": config.rounds,
        "cells": rows,
    }


def time_cell(
    llms: Sequence[LLM], config: DeterministicBenchConfig, size: int, advance: Callable[[], None]
) -> dict[str, Any]:
    """Run batches of so many requests on both engines, the one without the flag first in the list, in turns."""
    from specmamba.measure.full_batch import run_full_batch

    of_steps, of_tokens = [], []
    for number in range(-1, config.rounds):  # steps are recorded in the first round, which does not count
        jobs = jobs_of(llms[0], config.max_tokens, size, max(number, 0))
        places = (0, 1) if number % 2 else (1, 0)
        found = {place: run_full_batch(llms[place], jobs) for place in places}
        if number >= 0:
            usual, exact = found[0], found[1]
            of_steps.append(exact.step_ms / usual.step_ms)
            of_tokens.append(exact.seconds / exact.num_tokens / (usual.seconds / usual.num_tokens))
            advance()
    return {"step": _spread(of_steps), "token": _spread(of_tokens), "step_ms": round(usual.step_ms, 3)}


def jobs_of(llm: LLM, max_tokens: int, size: int, number: int) -> list[Job]:
    """The requests of a round."""
    from specmamba import SamplingParams
    from specmamba.measure.full_batch import Job

    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    pairs = continued_prompts(llm.engine.tokenizer, size, number)
    return [Job(tuple(prompt), params, tuple(follows[:max_tokens])) for prompt, follows in pairs]


def print_report(report: Report) -> None:
    """Print the table of cells."""
    page = Page()
    page.lines(
        f"{report['model']}, {report['dtype']}; {report['machine']}",
        f"--deterministic over without, medians of {report['rounds']} rounds",
    )
    rows = [
        (str(cell["requests"]), cell["drafts"], _text(cell["step"]), _text(cell["token"])) for cell in report["cells"]
    ]
    page.table(("requests", "drafts", "time of a step (90 %)", "of a token (90 %)"), rows)


def _spread(ratios: Sequence[float]) -> dict[str, Any]:
    return {
        "median": round(statistics.median(ratios), 3),
        "interval": [round(end, 3) for end in median_interval(ratios)],
        "range": [round(min(ratios), 3), round(max(ratios), 3)],
    }


def _text(figures: dict[str, Any]) -> str:
    return "{:.3f} ({:.2f}-{:.2f})".format(figures["median"], *figures["interval"])


if __name__ == "__main__":
    sys.exit(main())
