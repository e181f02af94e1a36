"""The fastest static draft tree for each batch size, by measurement.

    specmamba tune tree [--out tree.json] [--batch-sizes 1,2,4,8] [--max-nodes 16] [--compare] [--replay]
                        [--speculative-costs FILE] [--json FILE] [--plot FILE.png] [any engine flag]

1. Texts are sampled at ``--temperature`` (or taken from the prompts' continuations, ``--replay``) and replayed once,
   to record how the draft head ranks every token of the text, 1 to ``--max-depth`` places ahead (texts.py).
2. The costs of a step are measured over numbers of nodes, shapes and batch sizes (costs.py).
3. The best tree of each batch size is searched and written to ``--out``, which ``--speculative-tree`` loads
   (search.py).
4. Each chosen tree runs on text that was not recorded (with ``--replay`` and at temperature 0 there is no other), in
   turns with plain decoding, and with the usual dynamic drafts if ``--compare`` is given, to compare predicted and
   measured figures (figures.py).

With ``--speculative-costs FILE`` an engine is started first, as ``serve --speculative-adaptive auto`` would start it
with these flags; it writes its times of steps to the file, or finds them there, and they are printed. They do not
replace the costs of 2, which are of static trees up to ``--max-nodes``, by shape; the file's are of small trees, chosen
in each step.

Speeds are those of full batches that decode, without prefill. Predictions are for new text. The acceptance is that of
``--speculative-accept target``, under which a node's acceptance does not depend on the other nodes of the tree.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specmamba.errors import ConfigError
from specmamba.measure.command import put_out, run_command
from specmamba.measure.prompts import PLAIN, PLAIN_FLAGS, PromptText, texts_of
from specmamba.measure.report import progress_bar
from specmamba.tune.options import TreeTunerConfig

if TYPE_CHECKING:
    from specmamba import LLM
    from specmamba.trees import TreeFile
    from specmamba.tune.costs import BatchCost, Sample
    from specmamba.tune.figures import ContestFigures
    from specmamba.tune.search import Choice
    from specmamba.tune.texts import Text

PROG = "specmamba tune tree"
# not repeated in a report, which goes to other machines
UNNAMED = {"model", "revision", "speculative_draft_model_path", "speculative_draft_model_revision", "speculative_costs"}


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns the exit status; 130 after Ctrl-C."""
    return run_command(PROG, TreeTunerConfig, arguments, _run)


def _run(config: TreeTunerConfig) -> int:
    report = tune(config, texts_of(config))
    from specmamba.tune.tables import plot_report, print_report

    put_out(config, report, print_report, plot_report)
    return 0


def tune(config: TreeTunerConfig, sources: Sequence[PromptText]) -> dict[str, Any]:
    """Measure, search, write and check the trees; return the report, a JSON object. Raises SpecmambaError."""
    from specmamba.tune.figures import check_room, full_report, provenance, start_engine
    from specmamba.tune.search import candidates, choose, tree_file
    from specmamba.tune.texts import collect_texts, record_ranks

    depth = min(config.max_depth, config.max_nodes - 1)
    sizing = None if config.speculative_costs is None else step_times(config, config.speculative_costs)
    with start_engine(config) as llm:
        say("sampling texts" if not config.replay else "reading texts")
        texts = collect_texts(config, llm, sources)
        check_room(config, llm, texts)
        say(f"recording ranks of {len(texts)} texts of {config.max_tokens} tokens")
        ranks = record_ranks(llm, texts, depth, max(config.batch_sizes))
        costs = measure_costs(config, llm, texts, depth)
        say("searching")
        options = candidates(ranks, config.max_nodes, depth, config.max_rank)
        choices = [choose(size, options, cost) for size, (cost, _) in costs.items()]
        file = tree_file(choices, provenance(config, llm))
        write_trees(config.out, file)
        contests = check(config, llm, texts, choices)
        return full_report(config, llm, texts, ranks, costs, choices, contests, sizing)


def step_times(config: TreeTunerConfig, path: Path) -> dict[str, Any] | None:
    """Start an engine as a server with adaptive sizes would: it reads its times of steps from a file, or writes them.

    Times are looked up by the plan of drafts and what memory allows, which differ for the engine that tunes.

    Returns:
        The times and what they hold for, for the report; None: there is no draft to size.

    Raises:
        ConfigError: the file cannot be read or written, or holds no times.
    """
    from specmamba import LLM
    from specmamba.config import EngineConfig

    given = config.model_dump(include=config.model_fields_set & set(EngineConfig.model_fields))
    say(f"times of steps for {path}")
    before = _identity(path)
    with LLM(**given | {"speculative_adaptive": "auto"}) as llm:
        found = _sizing_report(llm)
    del llm
    gc.collect()  # the tuner's engine needs the memory of this one
    files = {"file": path.name, "is_new": _identity(path) != before, "flags": _flags_given(given)}
    return None if found is None else files | found


def _sizing_report(llm: LLM) -> dict[str, Any] | None:
    sizer, plan = llm.engine.runner.sizer, llm.engine.draft_plan
    if sizer is None:
        return None
    drafts = {"num_steps": plan.num_steps, "topk": plan.topk, "num_draft_tokens": plan.max_nodes}
    return {
        "drafts": {"algorithm": plan.algorithm, **drafts},
        "num_running_requests": llm.engine.memory_plan.num_running_requests,
        "threads": llm.engine.num_threads,
        "times": {
            str(size): {
                "draft_ms": _in_ms(times.drafts),
                "verify_ms": _in_ms(times.verifies),
                "chain_step_ms": _in_ms(times.chains),
            }
            for size, times in sizer.times.costs.times.items()
        },
    }


def _in_ms(seconds: Mapping[int, float]) -> dict[str, float]:
    return {str(x): 1e3 * value for x, value in seconds.items()}


def _identity(path: Path) -> tuple[int, int] | None:
    """What differs for a file that has been written again; None: there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _flags_given(given: Mapping[str, Any]) -> list[str]:
    """Flags of a command line, without those that name files and models."""
    flags = []
    for name, value in given.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            flags.append(flag if value else flag.replace("--", "--no-", 1))
        elif value is not None and name not in UNNAMED:
            flags.append(f"{flag} {value}")
    return flags


def write_trees(path: Path, file: TreeFile) -> None:
    """Write the tree file. Raises ConfigError when that fails; the message names ``--out``."""
    try:
        path.write_text(file.model_dump_json(indent=2, exclude_none=True) + "\n", "utf8")
    except OSError as error:
        raise ConfigError(f"--out: {path} cannot be written: {error.strerror}") from None
    say(f"wrote {path}")


def measure_costs(
    config: TreeTunerConfig, llm: LLM, texts: Sequence[Text], depth: int
) -> dict[int, tuple[BatchCost, list[Sample]]]:
    """Measure and fit the costs of every batch size."""
    from specmamba.tune.costs import fit, measure, probe_trees
    from specmamba.tune.texts import probe_jobs

    trees = probe_trees(config.max_nodes, depth)
    costs = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in config.batch_sizes:
            rounds = [probe_jobs(config, texts, size, number) for number in range(config.rounds)]
            say(f"costs of {len(trees)} trees at batch size {size}")
            with progress_bar("", len(rounds)) as advance:
                samples = measure(llm, trees, rounds, Path(folder), config.seed, advance)
            costs[size] = fit(samples), samples
    return costs


def check(
    config: TreeTunerConfig, llm: LLM, texts: Sequence[Text], choices: Sequence[Choice]
) -> dict[int, dict[str, ContestFigures]]:
    """Run the trees that were written, by batch size."""
    from specmamba.tune.figures import contest, dynamic_flags
    from specmamba.tune.texts import check_jobs

    ours = {"speculative_tree": config.out}
    contestants = {PLAIN: PLAIN_FLAGS, "tree": ours, **(dynamic_flags() if config.compare else {})}
    contests = {}
    for choice in choices:
        size = choice.batch_size
        waves = [check_jobs(config, texts, size, n) for n in range(max(config.rounds, -(-len(texts) // size)))]
        say(f"checking {', '.join(contestants)} at batch size {size}")
        with progress_bar("", len(waves)) as advance:
            contests[size] = contest(llm, contestants, waves, advance)
    return contests


def say(line: str) -> None:
    """Print a line of progress to standard error."""
    print(f"{PROG}: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
