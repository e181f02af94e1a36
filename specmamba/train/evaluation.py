"""The acceptance of a trained head on held-out text: sampled, greedy and replayed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from specmamba.measure.acceptance.figures import full_report
from specmamba.measure.acceptance.options import AcceptanceBenchConfig, largest_flags, variants_of
from specmamba.measure.acceptance.run import measure, select_tasks, start_engine
from specmamba.measure.acceptance.tables import print_report
from specmamba.measure.prompts import read_texts
from specmamba.train.options import TrainDraftConfig
from specmamba.train.texts import REPORT_TOKENS, Tokens

PROMPT_TOKENS = REPORT_TOKENS // 3
WAYS: dict[str, dict[str, Any]] = {
    "sampled": {"temperature": 0.8},
    "greedy": {"temperature": 0.0},
    "replayed": {"replay": True},
}
HALF_CHARACTER = "\ufffd"  # decoded where a piece of text is cut within a character


def prompts_of(pieces: Sequence[Tokens], tokenizer: Any) -> str:
    """Make a file of prompts, as ``specmamba bench acceptance`` reads it, from held-out pieces."""
    rows = []
    for tokens in pieces:
        prompt, rest = (tokenizer.decode(part) for part in (tokens[:PROMPT_TOKENS], tokens[PROMPT_TOKENS:]))
        row = {"prompt": prompt.rstrip(HALF_CHARACTER), "continuation": rest.lstrip(HALF_CHARACTER)}
        rows += [json.dumps(row)] if all(row.values()) else []
    return "\n".join(rows) + "\n"


def measure_head(config: TrainDraftConfig, head: Path, prompts: Path, console: Console) -> dict[str, Any]:
    """Measure the figures of ``bench acceptance``, by way of choosing tokens, and print them.

    Raises:
        SpecmambaError: the head cannot be run, or none of the prompts can.
    """
    flags = config.engine_flags | {
        "speculative_algorithm": "eagle3",
        "speculative_draft_model_path": str(head),
        "speculative_num_steps": config.steps_deep,
    }
    bench = AcceptanceBenchConfig(
        **flags,
        prompts=prompts,
        num_prompts=config.report_prompts,
        max_tokens=REPORT_TOKENS - PROMPT_TOKENS,
        batch_size=1,
        rounds=1,
    )
    texts, (variants, _) = read_texts(prompts), variants_of(bench)
    found = {}
    with start_engine(bench, largest_flags(variants)) as llm:
        description = llm.engine.describe()
        for name, way in WAYS.items():
            this = bench.model_copy(update=way)
            tasks, notes = select_tasks(this, llm, texts)
            figures = full_report(this, description, tasks, measure(this, llm, tasks, variants), notes)
            console.print(f"{name}:", highlight=False)
            print_report(figures)
            found[name] = figures["configurations"][0]
    return found
