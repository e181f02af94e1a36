"""Whether bad clients cost good ones anything, and whether the server gives back all it took.

    specmamba bench soak [--minutes 2] [--streams 64] [--json FILE] [any engine flag]

A server of its own, on this machine alone. In phases that take turns, ``--streams`` clients stream answers, one after
the other; in every second phase a tenth of them (``--bad-share``) are bad ones instead, which hang up in the middle,
stop reading or ask for constrained answers (bad_clients.py), and as many again come besides and send what must be
refused, or hardly anything at all (refused.py). So the engine is never asked for more streams than in the phases
without. Each kind of phase takes ``--minutes`` in all. Then the server must be as it was before: nothing runs, no place
in a pool is held, as many open files and threads; memory must not have grown over all phases (slope of a least-squares
line), and the latency of the well-behaved must be within ``--at-most`` of that without bad ones. In the end SIGTERM
comes in the middle of work: every answer finishes or says why not, and the exit status is 0.

What came before the first phase (a phase that is not counted, prompts that fill the KV pool) is warm-up.
"""

from __future__ import annotations

import sys
from typing import Annotated

from pydantic import Field

from specmamba.command_line import exit_with_error, parse_command_line
from specmamba.errors import SpecmambaError
from specmamba.measure.report import JsonOption, require, write_json

PROG = "specmamba bench soak"
Positive = Field(gt=0, allow_inf_nan=False)


class SoakConfig(JsonOption):
    """Good clients with bad ones beside them."""

    max_running_requests: Annotated[int, Field(ge=1, description="requests in a batch at the most")] = 64
    max_total_tokens: Annotated[int | None, Field(ge=1, description="size of the KV pool")] = 32_768
    minutes: Annotated[float, Positive, Field(description="of load without bad clients; and as much with them")] = 2.0
    streams: Annotated[int, Field(ge=2, le=4096, description="clients at a time")] = 64
    rounds: Annotated[int, Field(ge=1, description="phases of each kind that the minutes are cut into")] = 2
    bad_share: Annotated[float, Field(gt=0, lt=1, description="of the streams, that bad clients take")] = 0.1
    max_tokens: Annotated[int, Field(ge=4, description="new tokens of an answer at the most")] = 64
    warmup: Annotated[float, Field(ge=0, allow_inf_nan=False, description="seconds of load before the first phase")] = (
        20.0
    )
    at_most: Annotated[float, Positive, Field(description="latency with bad clients over that without")] = 1.3
    at_most_mb_per_minute: Annotated[float, Positive, Field(description="growth of the server's memory")] = 5.0
    startup_timeout: Annotated[float, Positive, Field(description="seconds that the server may take to load")] = 600.0


def main(arguments: list[str] | None = None) -> int:
    """Run the siege. Returns the exit status: 1 when a bound is broken, 130 after Ctrl-C."""
    try:
        config = parse_command_line(SoakConfig, PROG, sys.argv[1:] if arguments is None else arguments)
        require("httpx", PROG)
        from specmamba.bench.soak.figures import print_report
        from specmamba.bench.soak.run import run

        report = run(config)
        print_report(report)
        if config.json is not None:
            write_json(config.json, report)
    except SpecmambaError as error:
        exit_with_error(PROG, error)
    except KeyboardInterrupt:
        return 130
    return 1 if report["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
