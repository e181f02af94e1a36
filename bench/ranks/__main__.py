"""Several ranks that share one model on a CPU, beside one process with as many threads.

    python -m specmamba.bench.ranks [--model DIR] [--json FILE] [--tp-size 2] [--num-threads 1] [--batch-sizes 1,8]
        [--rounds 5] [any engine flag]

One process with the threads of one rank, one with those of all ranks, and the ranks (``--tp-size``, over gloo) have an
engine each, all of which are loaded all the time; they take turns within a round, on the same prompts, greedily and
without drafts, unless ``--speculative-algorithm`` is given. Reported are medians over rounds: tokens per second after
the first ones, their ratio to the first way in the same round, and of rank 0 the bytes that it sends for a token and
the share of a step that it spends in sums over all ranks. That time includes the wait for the slowest rank. Bytes are
those of the tensors, as gloo's algorithms send them (figures.py), without headers and without the commands of rank 0.

Steps of one process are captured and those of several ranks are not; ``--disable-cuda-graph`` leaves that out.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from specmamba.bench.llama_cpp.engine_process import EngineProcess, started_engine
from specmamba.bench.ranks.figures import Decoded, rows_of
from specmamba.bench.serving.server import signals_end_the_context
from specmamba.config import EngineConfig
from specmamba.errors import ConfigError
from specmamba.measure.command import Page, Report, in_turns, put_out, run_command
from specmamba.measure.prompts import bundled_texts
from specmamba.measure.report import (
    Count,
    JsonOption,
    NoRadixCache,
    machine,
    progress_bar,
    range_text,
    split_numbers,
    three_digits,
    versions,
)

PROG = "python -m specmamba.bench.ranks"
WORKER = (sys.executable, "-P", "-m", "specmamba.bench.ranks.worker")
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class RanksBenchConfig(JsonOption):
    """Ranks that share one model on a CPU."""

    device: Annotated[Literal["cpu"], Field(description="ranks on GPUs are not measured here")] = "cpu"
    tp_size: Annotated[int, Field(ge=2, le=64, description="ranks")] = 2
    num_threads: Annotated[int, Field(ge=1, le=1024, description="CPU threads of each rank")] = 1
    speculative_algorithm: Annotated[
        Literal["auto", "none", "mtp", "eagle", "eagle3", "draft-model", "ngram", "suffix"],
        Field(description="how drafts are made; none here: a step gives each request one token"),
    ] = "none"
    disable_radix_cache: NoRadixCache = True
    batch_sizes: Annotated[
        Annotated[tuple[Count, ...], Field(min_length=1)],
        BeforeValidator(split_numbers),
        Field(description="requests that decode together, one row each"),
    ] = (1, 8)
    prompt_tokens: Annotated[Count, Field(description="tokens of each prompt")] = 64
    max_tokens: Annotated[int, Field(ge=2, description="new tokens of each request")] = 128
    rounds: Annotated[Count, Field(description="rounds of all ways; medians over them are reported")] = 5
    startup_timeout: Annotated[Seconds, Field(description="seconds that loading an engine may take")] = 600.0
    answer_timeout: Annotated[Seconds, Field(description="seconds that a batch may take")] = 600.0


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status: 0, or 130 after Ctrl-C."""
    return run_command(PROG, RanksBenchConfig, arguments, lambda config: put_out(config, run(config), print_report))


def ways_of(config: RanksBenchConfig) -> dict[str, dict[str, int]]:
    """The flags of each way, by its name."""
    threads, every = config.num_threads, config.num_threads * config.tp_size
    return {
        f"1 process, {_counted(threads, 'thread')}": {"tp_size": 1, "num_threads": threads},
        f"1 process, {_counted(every, 'thread')}": {"tp_size": 1, "num_threads": every},
        f"{config.tp_size} ranks, {_counted(threads, 'thread')} each": {
            "tp_size": config.tp_size,
            "num_threads": threads,
        },
    }


def run(config: RanksBenchConfig) -> dict[str, Any]:
    """Load the engines and run all rounds; the report as a JSON object.

    Raises:
        SpecmambaError: an engine cannot be loaded or ends, or more requests are to decode together than it runs.
    """
    if max(config.batch_sizes) > config.max_running_requests:
        raise ConfigError(
            f"--batch-sizes {max(config.batch_sizes)}: only {config.max_running_requests} requests run together; "
            "raise --max-running-requests"
        )
    flags = config.model_dump(mode="json", include=set(EngineConfig.model_fields))
    with signals_end_the_context(), ExitStack() as stack:
        loaded, ways = {}, ways_of(config)
        for way in reversed(ways):  # the ranks first: a model that cannot be divided is refused soon
            print(f"loading: {way}", file=sys.stderr)
            timeouts = config.startup_timeout, config.answer_timeout
            loaded[way] = stack.enter_context(started_engine(flags | ways[way], *timeouts, WORKER))
        engines = {way: loaded[way] for way in ways}
        played = play(config, engines)
        facts = {way: engine.facts for way, engine in engines.items()}
    return report_of(config, facts, played)


def play(config: RanksBenchConfig, engines: Mapping[str, EngineProcess]) -> dict[tuple[int, str], list[Decoded]]:
    """Run all rounds. In the first one steps are recorded: it does not count. Raises SpecmambaError."""
    prompts = _prompts(config, next(iter(engines.values())))
    played: dict[tuple[int, str], list[Decoded]] = {(size, way): [] for size in config.batch_sizes for way in engines}
    with progress_bar("rounds of all ways", (config.rounds + 1) * len(played)) as advance:
        for number in range(config.rounds + 1):
            for size in config.batch_sizes:
                for way in in_turns(list(engines), number):
                    asked = {"prompts": prompts[:size], "max_tokens": config.max_tokens}
                    decoded = engines[way].ask("decode", asked, config.answer_timeout)
                    if number:
                        played[size, way].append(decoded)
                    advance()
    return played


def _prompts(config: RanksBenchConfig, engine: EngineProcess) -> list[list[int]]:
    """Stretches of the bundled prompts."""
    found, _ = engine.encode(bundled_texts())
    text = [token for prompt in found for token in prompt]
    starts = range(0, max(config.batch_sizes) * config.prompt_tokens, config.prompt_tokens)
    text *= (starts[-1] + config.prompt_tokens) // len(text) + 1
    return [text[start : start + config.prompt_tokens] for start in starts]


def report_of(
    config: RanksBenchConfig,
    facts: Mapping[str, Mapping[str, Any]],
    played: Mapping[tuple[int, str], Sequence[Decoded]],
) -> dict[str, Any]:
    """The report, of what each engine says of itself and of all rounds."""
    first = next(iter(facts.values()))
    is_over_memory = any(each["is_over_memory"] for rounds in played.values() for each in rounds)
    return {
        "model": Path(config.model_path).name if config.model else "specmamba-demo",
        "dtype": first["dtype"],
        "machine": machine(),
        "native": first["native"]["level"],
        "versions": versions(("specmamba", "torch")),
        "captured": not config.disable_cuda_graph,
        "exchanges": "shared memory" if is_over_memory else "sockets",
        **config.model_dump(
            include={"tp_size", "num_threads", "speculative_algorithm", "prompt_tokens", "max_tokens", "rounds"}
        ),
        "rows": rows_of(played, config.tp_size),
    }


def print_report(report: Report) -> None:
    """Print the table of batches and ways."""
    page = Page()
    captured = "captured" if report["captured"] else "operator by operator"
    page.lines(
        f"{report['model']}, {report['dtype']}, {report['machine']}, {report['native'] or 'no native kernels'}, drafts "
        f"{report['speculative_algorithm']}; steps {captured}; ranks exchange over {report['exchanges']}"
    )
    names, shares = ("tokens_per_second", "over_first", "step_ms"), ("all_reduce_share", "exchange_share")
    page.table(
        ("", "batch", "tokens/s", "ratio", "step, ms", "in sums", "in exchanges", "KiB/token"),
        [
            (
                row["way"],
                str(row["batch"]),
                *(range_text(row[name], three_digits) for name in names),
                *(_percent(row.get(name)) for name in shares),
                _kibibytes(row),
            )
            for row in report["rows"]
        ],
    )


def _kibibytes(row: Mapping[str, Any]) -> str:
    return f"{row['sent_bytes_per_token']['median'] / 1024:.3g}" if "sent_bytes_per_token" in row else "-"


def _percent(figure: Mapping[str, Any] | None) -> str:
    if figure is None:
        return "-"
    low, high = figure["range"]
    return f"{100 * figure['median']:.0f}% ({100 * low:.0f}-{100 * high:.0f})"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


if __name__ == "__main__":
    sys.exit(main())
