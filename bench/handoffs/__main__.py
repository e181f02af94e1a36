"""Prefill and decode apart, beside one server: what a handoff costs, and what long prompts take from running streams.

    python -m specmamba.bench.handoffs [--model DIR] [--json FILE] [--prompt-tokens 256,1024,4000] [--streams 4]
        [--arrival-tokens 1024] [--arrival-interval 1.0] [--rounds 3] [any engine flag]

One server with all threads runs beside a prefill server and a decode server with half of them each; only one of the two
ways works at a time, and they take turns within a round, with empty caches. There is no router: a request goes to both
servers of the pair, with a room. Reported are medians over rounds.

**Handoffs.** A prompt of each length is sent to one server, to the pair, and to the pair in such a way that the prefill
server has run it before the decode server is asked. The last one shows what a handoff itself takes: the time to its
first token, and bytes and seconds that ``/metrics`` of both servers counts for it.

**Streams.** Greedy streams run on, with and without long prompts that arrive at fixed times. Counted is the time in
which all streams run: the time between two events of a stream, each of which brings the tokens of a step (one with
``--speculative-algorithm none``), and their tokens per second. Arriving prompts get one token.

This process, which reads the streams, shares the cores with the servers.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specmamba.bench.handoffs.options import HandoffsBenchConfig
from specmamba.bench.serving.server import signals_end_the_context
from specmamba.measure.command import Page, Report, put_out, run_command
from specmamba.measure.report import machine, range_text, require, three_digits, versions

if TYPE_CHECKING:
    from specmamba.bench.handoffs.rounds import Played

PROG = "python -m specmamba.bench.handoffs"
NAMES = ("prompt_tokens", "streams", "stream_prompt_tokens", "stream_tokens", "arrival_tokens", "arrival_interval")


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status: 0, or 130 after Ctrl-C."""
    return run_command(PROG, HandoffsBenchConfig, arguments, lambda config: put_out(config, run(config), print_report))


def run(config: HandoffsBenchConfig) -> dict[str, Any]:
    """Start the servers and run all rounds; the report as a JSON object.

    Raises:
        SpecmambaError: httpx is missing, a server does not start or ends, or a prompt is not handed over.
    """
    require("httpx", PROG)
    from specmamba.bench.handoffs.rounds import play
    from specmamba.bench.handoffs.servers import started, threads_of

    every, half = threads_of(config)
    with signals_end_the_context(), started(config) as (one, apart):
        described = one.answering.get("/server_info")["engine"]
        played = asyncio.run(play(config, one, apart))
    return report_of(config, described, {"one_server": every, "each_of_two": half}, played)


def report_of(
    config: HandoffsBenchConfig, described: Mapping[str, Any], threads: Mapping[str, int], played: Played
) -> dict[str, Any]:
    """The report, of an engine's description and the figures of all rounds."""
    from specmamba.bench.handoffs.figures import medians, stream_medians
    from specmamba.measure.prompts import model_name

    return {
        "model": model_name(dict(described)),
        "dtype": described["dtype"],
        "speculative_algorithm": described["speculative_algorithm"],
        "machine": machine(),
        "versions": versions(("specmamba", "torch")),
        "threads": dict(threads),
        **config.model_dump(include={*NAMES, "rounds"}),
        "handoffs": [{"prompt_tokens": length, **medians(rounds)} for length, rounds in played.handoffs.items()],
        "streaming": stream_medians(played.streams),
    }


def print_report(report: Report) -> None:
    """Print the table of handoffs and that of streams."""
    page, threads = Page(), report["threads"]
    page.lines(
        f"{report['model']}, {report['dtype']}, drafts {report['speculative_algorithm']}, {report['machine']}; "
        f"{threads['one_server']} threads for one server, {threads['each_of_two']} for each of two",
        "first token of a prompt, ms; held: of one that the prefill server has run before, and what that handoff takes",
    )
    first = ("first_token_ms_one_server", "first_token_ms_apart", "apart_over_one_server", "first_token_ms_held")
    page.table(
        ("tokens", "one server", "apart", "apart / one", "held", "sending, ms", "taking over, ms", "MB"),
        [
            (
                str(row["prompt_tokens"]),
                *_texts(row, (*first, "sending_ms", "taking_over_ms")),
                f"{row['bytes_taken_over']['median'] / 1e6:.3g}",
            )
            for row in report["handoffs"]
        ],
    )
    page.lines(
        f"{report['streams']} streams, ms between two events of one; a prompt of {report['arrival_tokens']} tokens "
        f"arrives every {report['arrival_interval']:g} s, and gets its first token in so many ms"
    )
    names = ("gap_p50_ms", "gap_p99_ms", "gap_max_ms", "tokens_per_second", "arrivals", "arrival_first_token_ms")
    page.table(
        ("", "p50", "p99", "longest", "tokens/s", "arrivals", "first token"),
        [
            (f"{way}, {load}", *_texts(row, names))
            for way, loads in report["streaming"].items()
            for load, row in loads.items()
        ],
    )


def _texts(row: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    return [range_text(row[name], three_digits) if name in row else "-" for name in names]


if __name__ == "__main__":
    sys.exit(main())
