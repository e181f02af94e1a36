"""Acceptance length and speed-up of drafts, and whether the text stays the same.

    specmamba bench acceptance [--configs 1,1 3,1 4,4,8 | --sweep steps=1,2,3 topk=1,4 nodes=8] [--adaptive]
                               [--replay] [--prompts FILE] [--json FILE] [--plot FILE.png] [any engine flag]

One engine runs every prompt plain and with each draft shape, in turns, so that a slow minute of the machine affects all
of them. specmamba/measure/acceptance/figures.py defines every figure, judge.py says how texts are compared, and
specmamba/measure/prompts.py what a file of prompts looks like.

With ``--replay`` the output is not chosen but taken from the text that follows each prompt in its source: acceptance on
real text, which does not loop. Nothing is sampled then.

With ``--adaptive`` drafts whose size is decided in each step take turns with the others, as an engine with these flags
and ``--speculative-adaptive auto`` would make them. What is learned stays from round to round.
"""

from __future__ import annotations

import sys
from typing import Any

from specmamba.measure.acceptance.options import AcceptanceBenchConfig, largest_flags, variants_of
from specmamba.measure.command import run_command
from specmamba.measure.prompts import texts_of
from specmamba.measure.report import write_json

PROG = "specmamba bench acceptance"
LISTS = ("--configs", "--sweep")  # flags that take all words up to the next flag


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark. Returns the exit status: 1 when a text diverged, 130 after Ctrl-C."""
    given = join_lists(sys.argv[1:] if arguments is None else arguments)
    return run_command(PROG, AcceptanceBenchConfig, given, _run)


def _run(config: AcceptanceBenchConfig) -> int:
    report = measure_and_report(config)
    put_out(config, report)
    found = [*report["configurations"], *([report["adaptive"]] if config.adaptive else [])]
    return 1 if any(one["lossless"] and one["lossless"]["diverged"] for one in found) else 0


def join_lists(arguments: list[str], lists: tuple[str, ...] = LISTS) -> list[str]:
    """Join ``--sweep steps=1,2 topk=4`` into two arguments, as the parser of flags expects them."""
    joined: list[str] = []
    is_open = False
    for argument in arguments:
        flag = argument.partition("=")[0]
        if is_open and not argument.startswith("-"):
            joined[-1] = f"{joined[-1]} {argument}".strip()
            continue
        joined.append(argument)
        is_open = flag in lists
        if argument in lists:
            joined.append("")
    return joined


def measure_and_report(config: AcceptanceBenchConfig) -> dict[str, Any]:
    """Measure all figures, as ``full_report`` describes them. Raises SpecmambaError."""
    texts = texts_of(config)
    variants, notes = variants_of(config)
    from specmamba.measure.acceptance.figures import full_report
    from specmamba.measure.acceptance.run import measure, select_tasks, start_engine

    with start_engine(config, largest_flags(variants)) as llm:
        description = llm.engine.describe()
        tasks, more_notes = select_tasks(config, llm, texts)
        result = measure(config, llm, tasks, variants)
        return full_report(config, description, tasks, result, notes + more_notes)


def put_out(config: AcceptanceBenchConfig, report: dict[str, Any]) -> None:
    """Print the table, write JSON and picture. A single configuration, without others, is the whole JSON object."""
    from specmamba.measure.acceptance.tables import plot_report, print_report

    print_report(report)
    found = report["configurations"]
    if config.json is not None:
        whole = {"configurations": found} | ({"adaptive": report["adaptive"]} if config.adaptive else {})
        write_json(config.json, found[0] if len(found) == len(whole) == 1 else whole)
    if config.plot is not None:
        plot_report(config.plot, report)


if __name__ == "__main__":
    sys.exit(main())
