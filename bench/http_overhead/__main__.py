"""What HTTP costs: tokens per second through the server over those of ``LLM.generate`` with the same batch.

    python -m specmamba.bench.http_overhead [--concurrency 1,8,32] [--rounds 5] [--json FILE] [any engine flag]

``LLM`` runs in this process; the server is another one with the same flags; while one works the other waits. In every
round, at every level, all take turns: ``generate`` with a batch of the level's size, the server with as many clients
that ask for the same prompts with the same seeds and take whole answers, and the same with streams. Batches are asked
until there were ``--num-requests``, and every request gives the same number of tokens. What is reported is the median
over rounds of tokens per second, and of its ratio to ``generate`` in the same round. With drafts and without.

The clients (client.py) run in this process and take a little of the machine; that is in the figures.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_settings import NoDecode

from specmamba.command_line import exit_with_error, parse_command_line
from specmamba.core import Temperature
from specmamba.errors import SpecmambaError
from specmamba.measure.report import JsonOption, NoRadixCache, split_numbers, write_json

PROG = "specmamba bench http-overhead"


class HttpOverheadConfig(JsonOption):
    """Tokens per second through HTTP over those of LLM.generate."""

    disable_radix_cache: NoRadixCache = True
    max_running_requests: Annotated[int, Field(ge=1, description="requests in a batch at the most")] = 32
    concurrency: Annotated[
        tuple[Annotated[int, Field(ge=1, le=1024)], ...],
        NoDecode,
        BeforeValidator(split_numbers),
        Field(min_length=1, description="requests in a batch, and clients at a time"),
    ] = (1, 8, 32)
    rounds: Annotated[int, Field(ge=1, description="rounds; medians over them are reported")] = 5
    num_requests: Annotated[int, Field(ge=1, description="requests of a level in a round, at the least a batch")] = 16
    max_tokens: Annotated[int, Field(ge=1, description="new tokens of every request")] = 64
    temperature: Temperature = 0.8
    at_least: Annotated[
        float | None,
        Field(gt=0, allow_inf_nan=False, description="exit with 1 when a ratio is below this"),
    ] = None
    startup_timeout: Annotated[
        float, Field(gt=0, allow_inf_nan=False, description="seconds that the server may take to load")
    ] = 600.0


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark. Returns the exit status: 1 when a ratio is below ``--at-least``, 130 after Ctrl-C."""
    from specmamba.bench.http_overhead.run import run
    from specmamba.bench.http_overhead.tables import print_report

    try:
        config = parse_command_line(HttpOverheadConfig, PROG, sys.argv[1:] if arguments is None else arguments)
        report = run(config)
        print_report(report)
        if config.json is not None:
            write_json(config.json, report)
    except SpecmambaError as error:
        exit_with_error(PROG, error)
    except KeyboardInterrupt:
        return 130
    return 0 if config.at_least is None or lowest_ratio(report) >= config.at_least else 1


def lowest_ratio(report: dict[str, Any]) -> float:
    """Of all ways and levels in a report."""
    return min(float(row[way]["ratio"]) for row in report["results"] for way in ("whole", "streamed"))


if __name__ == "__main__":
    sys.exit(main())
