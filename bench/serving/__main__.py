"""Throughput and latency of a server under load.

    specmamba bench serving [--concurrency 1,2,4,8 | --request-rate 2,4] [--json FILE] [--plot FILE.png]

Without ``--base-url`` it starts ``specmamba serve`` with the given engine flags, and ends it. Every level of load sends
the same requests with the same seeds, after a warm-up that is not counted. Before each level the server's prefix cache
is flushed (``cache_flushed`` in the report: whether that worked before all levels; not every server can do it). load.py
defines load, figures.py every figure. The throughput of a closed loop includes its drain: at the end of a level clients
run out of requests one by one, and the level lasts until its last answer; with more requests that matters less. This
process needs processor time too: if it shares a machine with the server, the figures include that.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from specmamba.bench.serving.options import ServingBenchConfig
from specmamba.config import EngineConfig
from specmamba.errors import ConfigError
from specmamba.measure.command import put_out, run_command
from specmamba.measure.prompts import bundled_texts, read_texts
from specmamba.measure.report import require

PROG = "specmamba bench serving"
# Flags that have a meaning with --base-url: the model to ask for, and the seed of requests and arrivals.
FLAGS_OF_THE_CLIENT = {"model", "seed"}


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark. Returns the exit status: 1 when no request of some level was answered, 130 after Ctrl-C."""
    given = sys.argv[1:] if arguments is None else arguments
    return run_command(PROG, ServingBenchConfig, given, lambda config: _run(config, given))


def _run(config: ServingBenchConfig, arguments: Sequence[str]) -> int:
    _check(config, arguments)
    texts = bundled_texts() if config.prompts is None else read_texts(config.prompts)
    report = _measure(config, [text.text for text in texts])
    from specmamba.bench.serving.figures import plot_report, print_report

    put_out(config, report, print_report, plot_report)
    return 0 if all(level["completed"] for level in report["levels"]) else 1


def _check(config: ServingBenchConfig, arguments: Sequence[str]) -> None:
    """Raise ConfigError when flags contradict each other or a package is missing."""
    require("httpx", PROG)
    if config.concurrency is not None and config.request_rate is not None:
        raise ConfigError("choose --concurrency (closed loop) or --request-rate (open loop), not both")
    most = max((clients or 1 for clients, _ in config.levels), default=1)
    if most > config.num_requests:
        raise ConfigError(
            f"{most} clients have nothing to do with --num-requests {config.num_requests}: raise it, or ask for fewer"
        )
    if config.base_url is not None:
        given = {argument.partition("=")[0] for argument in arguments}
        flags = ["--" + name.replace("_", "-") for name in EngineConfig.model_fields if name not in FLAGS_OF_THE_CLIENT]
        useless = [flag for flag in (*flags, "--startup-timeout") if flag in given]
        if useless:
            raise ConfigError(
                f"{', '.join(useless)}: the server at --base-url runs already, so these flags cannot change it"
            )


def _measure(config: ServingBenchConfig, prompts: Sequence[str]) -> dict[str, Any]:
    """Measure all levels; return the report. Raises SpecmambaError."""
    from specmamba.bench.serving.sweep import sweep

    if config.base_url is not None:
        return asyncio.run(sweep(config, prompts, config.base_url))
    from specmamba.bench.serving.server import started_server

    if sys.stderr.isatty():
        print("starting a server", file=sys.stderr)
    with started_server(config, config.key, config.startup_timeout) as (url, server):
        return asyncio.run(sweep(config, prompts, url, server))


if __name__ == "__main__":
    sys.exit(main())
