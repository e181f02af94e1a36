"""The fastest static draft tree for each batch size, by measurement.

    specmamba tune tree [--out tree.json] [--batch-sizes 1,2,4,8] [--max-nodes 16] [--compare] [--replay]
                        [--json FILE] [--plot FILE.png] [any engine flag]

1. Texts are sampled at ``--temperature`` (or taken from the prompts' continuations, ``--replay``) and replayed once,
   noting how the draft head ranked every token that came, 1 to ``--max-depth`` places ahead (texts.py).
2. The costs of a step are measured over numbers of nodes, shapes and batch sizes (costs.py).
3. The best tree of each batch size is searched and written to ``--out``, which ``--speculative-tree`` loads
   (search.py, choice.py).
4. Each winner runs on text that was not recorded (with ``--replay`` and at temperature 0 there is no other than that),
   in turns with plain decoding, and with the usual dynamic drafts where ``--compare`` is given: predicted against
   measured (contest.py).

Speeds are those of full batches that decode; prompts are not in them. Predictions are for new text. The acceptance is
that of ``--speculative-accept target``, which does not depend on what a tree proposes elsewhere.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_settings import NoDecode

from specmamba.config import MAX_DRAFT_TOKENS
from specmamba.errors import ConfigError
from specmamba.measure.command import put_out, run_command
from specmamba.measure.prompts import PLAIN, PLAIN_FLAGS, PromptText, TextOptions, texts_of
from specmamba.measure.report import checked_file, progress_bar, split_numbers

if TYPE_CHECKING:
    from specmamba import LLM
    from specmamba.trees import TreeFile
    from specmamba.tune.choice import Choice
    from specmamba.tune.contest import Showing
    from specmamba.tune.costs import BatchCost, Sample
    from specmamba.tune.texts import Text

PROG = "specmamba tune tree"
SHAPE_FLAGS = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens", "speculative_tree")


class TreeTunerConfig(TextOptions):
    """The fastest static draft tree for each batch size, by measurement."""

    out: Annotated[Path, Field(description="write the trees to this file, for --speculative-tree")] = Path("tree.json")
    batch_sizes: Annotated[
        Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)],
        NoDecode,
        BeforeValidator(split_numbers),
        Field(description="batch sizes to tune for; batches in between use the tree of the next larger one"),
    ] = (1, 2, 4, 8)
    max_depth: Annotated[int, Field(ge=1, le=16, description="depth of a tree below the root at the most")] = 5
    max_rank: Annotated[int, Field(ge=1, le=64, description="likeliest tokens that may be children of a node")] = 8
    max_nodes: Annotated[
        int, Field(ge=2, le=MAX_DRAFT_TOKENS, description="nodes of a tree at the most, the root counted")
    ] = 16
    num_prompts: Annotated[int, Field(ge=2, description="prompts to record, the first ones that fit")] = 16
    max_tokens: Annotated[int, Field(ge=16, description="new tokens of every prompt")] = 128
    rounds: Annotated[int, Field(ge=1, description="rounds of cost measurements; waves of the final run, or more")] = 5
    compare: Annotated[bool, Field(description="run the usual dynamic drafts beside the chosen trees")] = False

    @field_validator("batch_sizes")
    @classmethod
    def _rise(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(set(sizes)))

    @field_validator("out")
    @classmethod
    def _trees_can_be_written(cls, path: Path) -> Path:
        return checked_file(path)

    @model_validator(mode="after")
    def _can_be_tuned(self) -> TreeTunerConfig:
        problem = _tuning_problem(self)
        if problem is not None:
            raise ValueError(problem)
        return self


def _tuning_problem(config: TreeTunerConfig) -> str | None:
    given = ["--" + name.replace("_", "-") for name in SHAPE_FLAGS if getattr(config, name) is not None]
    if given:
        return f"the shape of the drafts is what is tuned: drop {', '.join(given)}"
    if config.speculative_algorithm not in ("auto", "mtp", "eagle", "eagle3"):
        return (
            f"--speculative-algorithm {config.speculative_algorithm}: only the trees of a draft head can be tuned: "
            "choose auto, mtp, eagle or eagle3"
        )
    if config.speculative_accept != "target":
        return (
            "--speculative-accept rejection: acceptance is predicted for the target rule only, where it does not "
            "depend on how drafts are drawn; drop the flag"
        )
    if max(config.batch_sizes) > config.max_running_requests:
        return (
            f"--batch-sizes {max(config.batch_sizes)}: only {config.max_running_requests} requests run together; "
            "raise --max-running-requests"
        )
    return None


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns the exit status; 130 after Ctrl-C."""
    return run_command(PROG, TreeTunerConfig, arguments, _run)


def _run(config: TreeTunerConfig) -> int:
    report = tune(config, texts_of(config))
    from specmamba.tune.tables import plot_report, print_report

    put_out(config, report, print_report, plot_report)
    return 0


def tune(config: TreeTunerConfig, sources: Sequence[PromptText]) -> dict[str, Any]:
    """Everything; the report as a JSON object. Raises SpecmambaError."""
    from specmamba.tune.choice import candidates, choose, tree_file
    from specmamba.tune.engine import check_room, start_engine
    from specmamba.tune.report import full_report, provenance
    from specmamba.tune.texts import collect_texts, record_ranks

    depth = min(config.max_depth, config.max_nodes - 1)
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
        showings = check(config, llm, texts, choices)
        return full_report(config, llm, texts, ranks, costs, choices, showings)


def write_trees(path: Path, file: TreeFile) -> None:
    """Raises ConfigError: the file cannot be written; the message names ``--out``."""
    try:
        path.write_text(file.model_dump_json(indent=2, exclude_none=True) + "\n", "utf8")
    except OSError as error:
        raise ConfigError(f"--out: {path} cannot be written: {error.strerror}") from None
    say(f"wrote {path}")


def measure_costs(
    config: TreeTunerConfig, llm: LLM, texts: Sequence[Text], depth: int
) -> dict[int, tuple[BatchCost, list[Sample]]]:
    """Fitted and measured costs by batch size."""
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
) -> dict[int, dict[str, Showing]]:
    """Run what was written, by batch size."""
    from specmamba.tune.contest import contest, dynamic_flags
    from specmamba.tune.texts import check_jobs

    ours = {"speculative_tree": config.out}
    contestants = {PLAIN: PLAIN_FLAGS, "tree": ours, **(dynamic_flags() if config.compare else {})}
    showings = {}
    for choice in choices:
        size = choice.batch_size
        waves = [check_jobs(config, texts, size, n) for n in range(max(config.rounds, -(-len(texts) // size)))]
        say(f"checking {', '.join(contestants)} at batch size {size}")
        with progress_bar("", len(waves)) as advance:
            showings[size] = contest(llm, contestants, waves, advance)
    return showings


def say(line: str) -> None:
    """Tell what is being done."""
    print(f"{PROG}: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
