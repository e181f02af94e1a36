"""Several drafters on the same texts, in turns: tokens per verify, and speed over plain decoding.

    python -m specmamba.bench.drafters [--drafters suffix,ngram | --drafters mtp,NAME=FOLDER_OF_A_HEAD]
        [--texts edit,agent | --texts held-out] [--ways replayed,sampled,greedy] [--shapes 3,1 4,4,8 8,4,16]
        [--num-prompts 8] [--max-tokens 192] [--rounds 3] [--json FILE] [any engine flag]

All texts are cut from the held-out files, which the demo was not trained on: *held-out* are the bundled prompts with
what follows them, *edit* and *agent* those of ``specmamba.bench.demo.edits``. Outputs are *replayed* (the text's own),
*sampled* at temperature 0.8, or *greedy*. There is an engine for each drafter, all in this process. In each round all
of them run all shapes beside plain decoding, in an order that rotates, so that none is always first.

Every entry of ``runs`` has the counts and figures of ``specmamba/measure/acceptance/figures.py``. Acceptance is a count
that repeats to the digit; speeds are medians of the rounds, with the smallest and the largest.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from specmamba.bench.acceptance import join_lists
from specmamba.config import EngineConfig
from specmamba.errors import ConfigError
from specmamba.measure.acceptance.options import AcceptanceBenchConfig, Variant, largest_flags, variants_of
from specmamba.measure.command import Page, Report, in_turns, put_out, run_command
from specmamba.measure.prompts import PromptText, bundled_texts
from specmamba.measure.report import (
    Count,
    JsonOption,
    NoRadixCache,
    machine,
    refuse_draft_flags,
    split_numbers,
    versions,
)

if TYPE_CHECKING:  # --help must not wait for torch
    from specmamba import LLM
    from specmamba.measure.acceptance.run import Result, Task

PROG = "python -m specmamba.bench.drafters"
ALGORITHMS = ("mtp", "suffix", "ngram")
Texts = Literal["held-out", "edit", "agent"]
Way = Literal["replayed", "sampled", "greedy"]
WAYS: dict[Way, dict[str, Any]] = {
    "replayed": {"replay": True},
    "sampled": {"temperature": 0.8},
    "greedy": {"temperature": 0.0},
}
KEPT = (  # of a configuration of ``full_report``
    *("num_steps", "topk", "num_draft_tokens", "output_tokens", "distinct_4gram_ratio"),
    *("accept_length", "acceptance_per_position", "accept_length_histogram", "lossless"),
    *("plain_tokens_per_second", "speculative_tokens_per_second", "speedup", "speedup_range"),
    *("end_to_end_speedup", "end_to_end_speedup_range", "draft_ms", "verify_ms", "break_even_accept_length"),
)


class DraftersConfig(JsonOption):
    """Tokens per verify of several drafters on the same texts, and their speed over plain decoding, in turns."""

    needs_text = True
    disable_radix_cache: NoRadixCache = True
    context_length: Annotated[int | None, Field(ge=1, description="tokens of one text at the most")] = 4096
    max_running_requests: Annotated[int, Field(ge=1, description="requests in a batch at the most")] = 1
    max_total_tokens: Annotated[int | None, Field(ge=1, description="size of each engine's KV pool in tokens")] = 8192
    drafters: Annotated[
        tuple[str, ...],
        Field(min_length=1, description="mtp, suffix, ngram, or NAME=FOLDER of a head; ratios are over the first"),
        BeforeValidator(split_numbers),
    ] = ("suffix", "ngram")
    texts: Annotated[
        tuple[Texts, ...], Field(min_length=1, description="texts to run"), BeforeValidator(split_numbers)
    ] = ("edit", "agent")
    ways: Annotated[
        tuple[Way, ...], Field(min_length=1, description="where the output is from"), BeforeValidator(split_numbers)
    ] = ("replayed",)
    shapes: Annotated[str, Field(description="draft shapes, steps,topk[,nodes] ...")] = "3,1 4,4,8 8,4,16"
    num_prompts: Annotated[Count, Field(description="prompts of each kind of text")] = 8
    max_tokens: Annotated[Count, Field(description="new tokens of a prompt at the most")] = 192
    rounds: Annotated[Count, Field(description="rounds; speeds are medians over them")] = 3


class Contestant:
    """A drafter: its flags, and its engine once it is opened."""

    llm: LLM

    def __init__(self, config: DraftersConfig, drafter: str) -> None:
        """Read what ``--drafters`` says. Raises ConfigError: it is no drafter, or has no such shape."""
        self.name, _, folder = drafter.partition("=")
        if not self.name or (not folder and self.name not in ALGORITHMS):
            raise ConfigError(f"--drafters {drafter}: not {', '.join(ALGORITHMS)} or NAME=FOLDER of a head")
        if folder and not Path(folder).is_dir():
            raise ConfigError(f"--drafters {drafter}: there is no folder {folder}")
        own = {"speculative_draft_model_path": folder} if folder else {"speculative_algorithm": self.name}
        given = config.model_dump(include=set(EngineConfig.model_fields)) | own
        sizes = {name: getattr(config, name) for name in ("num_prompts", "max_tokens")}
        self._options = {**given, **sizes, "rounds": 1, "configs": config.shapes}
        try:
            self.variants: list[Variant] = variants_of(self.bench({}))[0]
        except ConfigError as error:
            raise ConfigError(str(error).replace("--configs", "--shapes")) from None

    def bench(self, way: dict[str, Any]) -> AcceptanceBenchConfig:
        """The settings of one round."""
        return AcceptanceBenchConfig(**self._options | way)

    def open(self, stack: ExitStack) -> None:
        """Start the engine, with room for all shapes."""
        from specmamba.measure.acceptance.run import start_engine

        self.llm = stack.enter_context(start_engine(self.bench({}), largest_flags(self.variants)))

    def tasks(self, bench: AcceptanceBenchConfig, texts: Sequence[PromptText]) -> list[Task]:
        """The prompts as they are run."""
        from specmamba.measure.acceptance.run import select_tasks

        return select_tasks(bench, self.llm, texts)[0]


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status: 0, 1 if greedy texts differ from plain ones, or 130 after Ctrl-C."""
    given = join_lists(sys.argv[1:] if arguments is None else arguments, ("--shapes",))
    return run_command(PROG, DraftersConfig, given, _run)


def _run(config: DraftersConfig) -> int:
    report = run(config)
    put_out(config, report, print_report)
    return int(any(row["lossless"] is not None and row["lossless"]["diverged"] for row in report["runs"]))


def run(config: DraftersConfig) -> dict[str, Any]:
    """Measure all drafters on all texts; the report as a JSON object. Raises SpecmambaError."""
    refuse_draft_flags(config, (), "drafts as --drafters and --shapes say")
    contestants = [Contestant(config, drafter) for drafter in config.drafters]
    if len({each.name for each in contestants}) < len(contestants):
        raise ConfigError(f"--drafters {','.join(config.drafters)}: two have the same name")
    runs = []
    with ExitStack() as stack:
        for contestant in contestants:
            contestant.open(stack)
        for texts, way in product(config.texts, config.ways):
            prompts = prompts_of(texts, config.num_prompts)
            runs += compared(texts, way, measured(contestants, WAYS[way], prompts, config.rounds))
        description = contestants[0].llm.engine.describe()
    settings = {name: getattr(config, name) for name in ("num_prompts", "max_tokens", "rounds", "seed")}
    about = {"machine": machine(), "versions": versions(), "threads": contestants[0].llm.engine.num_threads}
    return {"dtype": description["dtype"], **about, **settings, "speeds": "medians of interleaved rounds", "runs": runs}


def prompts_of(texts: Texts, count: int) -> list[PromptText]:
    """The texts of a kind, from held-out files."""
    from specmamba.bench.demo.edits import EditSettings, make_prompts
    from specmamba.train.corpus import read_corpus, roots_for

    if texts == "held-out":
        return bundled_texts()
    roots = [root for root in roots_for((), ()) if root.holds_out]
    rows = make_prompts(EditSettings(kind=texts, count=count), read_corpus(roots).held_out)
    return [PromptText(row["prompt"], row["continuation"]) for row in rows]


def measured(
    contestants: Sequence[Contestant], way: dict[str, Any], prompts: Sequence[PromptText], rounds: int
) -> dict[str, list[dict[str, Any]]]:
    """Figures of all shapes, by drafter; the drafters take turns in each round."""
    from specmamba.measure.acceptance.figures import full_report
    from specmamba.measure.acceptance.run import measure

    found: dict[str, list[Result]] = {each.name: [] for each in contestants}
    for number in range(rounds):
        for each in in_turns(contestants, number):
            bench = each.bench(way)
            found[each.name].append(measure(bench, each.llm, each.tasks(bench, prompts), each.variants))
    report = {}
    for each in contestants:
        bench = each.bench(way)
        tasks, whole = each.tasks(bench, prompts), merged(found[each.name])
        report[each.name] = full_report(bench, each.llm.engine.describe(), tasks, whole, [])["configurations"]
    return report


def merged(results: Sequence[Result]) -> Result:
    """The rounds of several results as those of one. Of differences between texts the worst of each prompt stays."""
    from dataclasses import replace

    samples = {name: [one for result in results for one in result.samples[name]] for name in results[0].samples}
    found = [result.differences for result in results if result.differences is not None]
    worst = {
        name: [
            max(column, key=lambda each: (each is not None, each is not None and each.kind == "diverged"))
            for column in zip(*(differences[name] for differences in found), strict=True)
        ]
        for name in (found[0] if found else ())
    }
    return replace(results[0], samples=samples, differences=worst if found else None)


def compared(texts: str, way: str, report: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Rows of a report, each with its acceptance length over that of the first drafter in the same shape."""
    return [
        {"texts": texts, "way": way, "drafter": name}
        | {key: figures[key] for key in KEPT}
        | {"accept_length_over_first": round(figures["accept_length"] / rows[0]["accept_length"], 3)}
        for rows in zip(*report.values(), strict=True)
        for name, figures in zip(report, rows, strict=True)
    ]


def print_report(report: Report) -> None:
    """Print the table of all runs."""
    page = Page()
    page.lines(f"{report['dtype']}; {report['machine']}; medians of {report['rounds']} rounds in turns")
    rows = [
        (
            row["texts"], row["way"], f"{row['num_steps']},{row['topk']},{row['num_draft_tokens']}", row["drafter"],
            f"{row['accept_length']:.2f}", f"{row['accept_length_over_first']:.2f}",
            "{:.2f} ({:.2f}-{:.2f})".format(row["speedup"], *row["speedup_range"]),
            "{:.2f} ({:.2f}-{:.2f})".format(row["end_to_end_speedup"], *row["end_to_end_speedup_range"]),
            f"{row['draft_ms']:.2f}", f"{row['verify_ms']:.2f}",
        )
        for row in report["runs"]
    ]  # fmt: skip
    columns = ("texts", "output", "shape", "drafter", "accepted", "over first", "speed-up, steps", "whole calls")
    page.table((*columns, "draft ms", "verify ms"), rows)


if __name__ == "__main__":
    sys.exit(main())
