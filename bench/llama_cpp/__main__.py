"""Decoding and time to first token beside llama.cpp, in turns on one machine.

    specmamba bench llama-cpp --llama-cpp BUILD [--model DIR] [--formats bf16,int8 | --pairs int4:Q4_K_M gguf:Q4_K_M]
                              [--temperatures 0,0.8] [--batch 1,8] [--drafts 0,1,2,3] [--trees "2,2,4 4,4,8"]
                              [--ttft 512,2048] [--json FILE]

BUILD is a build of llama.cpp for this machine; without one the command says how to make it. The checkpoint is converted
to GGUF (BF16, and other types made from it) with the converter of the same sources. ``--pairs`` names what is compared:
a form of this runtime's weights (bf16, or a value of ``--quantization``: int8, int4-g128) or "gguf", which gives it the
same file, and llama.cpp's type. For every pair and batch size, each way of decoding has a process of its own that
stays: an engine of this runtime, and a ``llama-server`` (plain decoding, and drafts of the MTP block). They are given
the same prompts, as token ids, one after the other; only one of them works at a time, and the order rotates. Both
ignore the end-of-text token, draw from the distribution at the same temperature with nothing cut off, keep no prompts,
and have the same number of threads. figures.py defines each figure.

Both sides wait actively between operators, so other programs distort the figures: run it on an idle machine.
``SPECMAMBA_NATIVE=avx2`` forces the level of this side; use a build of llama.cpp for the same instruction set.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specmamba.bench.llama_cpp.build import describe_build, find_build
from specmamba.bench.llama_cpp.figures import compared, first_token_figures
from specmamba.bench.llama_cpp.models import gguf_file
from specmamba.bench.llama_cpp.options import LlamaCppBenchConfig, Pair, modes_of, pairs_of
from specmamba.bench.llama_cpp.rounds import OTHER, OWN, Plan, first_tokens, play, prepare, started_sides
from specmamba.bench.llama_cpp.tables import print_report
from specmamba.bench.serving.server import signals_end_the_context
from specmamba.errors import ConfigError
from specmamba.measure.command import put_out, repeated_flags, run_command
from specmamba.measure.prompts import bundled_texts, read_texts
from specmamba.measure.report import machine, median_with_range, versions

PROG = "specmamba bench llama-cpp"
COUNTED = (
    "decode: tokens but the first one, over the time from the first token to the last one; "
    "first token: from the request, whose tokens are known, to the first token"
)
Report = dict[str, Any]


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark. Returns the exit status: 0, or 130 after Ctrl-C."""
    given = repeated_flags(sys.argv[1:] if arguments is None else arguments, ("--pairs",))
    return run_command(PROG, LlamaCppBenchConfig, given, lambda config: put_out(config, run(config), print_report))


def run(config: LlamaCppBenchConfig) -> Report:
    """Convert, start, measure; the report as a JSON object. Raises SpecmambaError."""
    load_average = os.getloadavg()[0]
    modes, pairs = modes_of(config), pairs_of(config)
    if config.model is not None and Path(config.model).is_file():
        raise ConfigError(
            "--model: give a checkpoint, of which GGUF files are made; --pairs gguf:TYPE runs such a file"
        )
    build = find_build(config.llama_cpp, config.llama_cpp_source)
    description = describe_build(build)
    texts = bundled_texts() if config.prompts is None else read_texts(config.prompts)
    with signals_end_the_context(), _gguf_folder(config.gguf_folder) as folder:
        prompts, checkpoint = prepare(config, pairs, modes, texts)
        plan = Plan(config, build, modes, prompts)
        settings = [(pair, batch) for pair in pairs for batch in config.batch]
        parts = [_measure(plan, checkpoint, folder, pair, batch) for pair, batch in settings]
    facts = parts[0]["facts"]
    return {
        "model": checkpoint.name if config.model else "specmamba-demo",
        "parameters": facts["parameters"],
        "machine": machine(),
        "load_average": load_average,
        "versions": versions(("specmamba", "torch")),
        "native": facts["native"],
        "llama_cpp": description,
        "threads": {"specmamba": facts["threads"], "llama_cpp": config.llama_threads},
        "rounds": config.rounds,
        "num_prompts": config.num_prompts,
        "max_tokens": config.max_tokens,
        "context": plan.context,
        "counted": COUNTED,
        "settings": [setting for part in parts for setting in part["settings"]],
        "first_tokens": [row for part in parts for row in part["first_tokens"]],
    }


def _measure(plan: Plan, checkpoint: Path, folder: Path, pair: Pair, batch: int) -> Report:
    """Measure one pair at one batch size: what the engine says of itself, a setting per temperature, first tokens."""
    print(f"{PROG}: {pair}, batch {batch}: loading", file=sys.stderr)
    model = gguf_file(plan.build, checkpoint, folder, pair.gguf_type)
    with started_sides(plan, model, pair, batch) as (sides, engine):
        results, speeds = play(plan, sides, batch, engine)
        seconds = first_tokens(plan, sides) if batch == plan.config.batch[0] else {}
        facts = engine.facts
    weights = {OWN: facts["weight_bytes"], OTHER: model.stat().st_size}
    named = {"format": pair.form, "gguf": pair.gguf_type}
    head = {**named, "batch": batch, "weight_bytes": weights, "memory_gb_per_s": median_with_range(speeds, 2)}
    return {
        "facts": facts,
        "settings": [
            {**head, "temperature": temperature, **compared(rounds[OWN], rounds[OTHER], is_greedy=temperature == 0)}
            for temperature, rounds in results.items()
        ],
        "first_tokens": [
            {**named, "num_tokens": length, "mode": mode, **first_token_figures(of_one[OWN][mode], other)}
            for length, of_one in seconds.items()
            for mode, other in of_one[OTHER].items()
        ],
    }


@contextmanager
def _gguf_folder(chosen: Path | None) -> Iterator[Path]:
    """The folder of converted models: the chosen one, or one that is removed in the end."""
    if chosen is None:
        with tempfile.TemporaryDirectory(prefix="specmamba-gguf-") as folder:
            yield Path(folder)
        return
    if not chosen.is_dir() or not os.access(chosen, os.W_OK):
        raise ConfigError(f"--gguf-folder: {chosen} is no folder that can be written to")
    yield chosen


if __name__ == "__main__":
    sys.exit(main())
