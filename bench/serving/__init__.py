"""Throughput and latency of a server under load.

    specmamba bench serving [--concurrency 1,2,4,8 | --request-rate 2,4] [--json FILE] [--plot FILE.png]

Without ``--base-url`` it starts ``specmamba serve`` with the engine flags given, and ends it. Every level of load asks
the same requests with the same seeds, after a few that are not counted. Before each level the server is told to forget
its prefix cache (``cache_flushed`` in the report: whether it did, before all of them; not every server can).
load.py says what load is, report.py how each figure is defined. The throughput of a closed loop
includes its drain: near the end of a level clients run out of requests one by one, and the level lasts until its last
answer; more requests make that matter less. This process takes processor time of its own: where it shares a machine
with the server, that is in the figures.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, SecretStr, field_validator
from pydantic_settings import NoDecode

from specmamba.command_line import parse_command_line
from specmamba.config import EngineConfig
from specmamba.core import Temperature
from specmamba.errors import ConfigError
from specmamba.measure.prompts import bundled_texts, read_texts
from specmamba.measure.report import ReportOptions, require, run_command, split_numbers, write_json

PROG = "specmamba bench serving"
DEFAULT_CONCURRENCY = (1, 2, 4, 8)
# With --base-url: which model of the server to ask, and the seeds of requests and arrivals.
FLAGS_OF_THE_CLIENT = {"model", "seed"}


def _levels(value: object) -> object:
    if value in ([], ()):
        raise ValueError("give at least one level")
    return split_numbers(value)


class ServingBenchConfig(ReportOptions):
    """Throughput and latency of a server under load."""

    base_url: Annotated[
        str | None, Field(description="a server that runs already, such as http://127.0.0.1:30000; none: start one")
    ] = None
    api_key: Annotated[SecretStr | None, Field(min_length=1, description="the key that the server asks for")] = None
    concurrency: Annotated[
        tuple[Annotated[int, Field(ge=1, le=4096)], ...] | None,
        NoDecode,
        BeforeValidator(_levels),
        Field(description="closed loop: numbers of clients, one level each; none: 1,2,4,8"),
    ] = None
    request_rate: Annotated[
        tuple[Annotated[float, Field(gt=0, le=1e4, allow_inf_nan=False)], ...] | None,
        NoDecode,
        BeforeValidator(_levels),
        Field(description="open loop: requests per second, Poisson arrivals, one level each"),
    ] = None
    num_requests: Annotated[int, Field(ge=1, description="requests of a level")] = 32
    num_warmup: Annotated[int, Field(ge=0, description="requests before the first level, not counted")] = 2
    prompts: Annotated[
        Path | None,
        Field(description="prompts of this file (JSON lines, or ShareGPT), sent as plain text; none: bundled ones"),
    ] = None
    max_tokens: Annotated[int, Field(ge=1, description="new tokens of a request at the most")] = 64
    temperature: Temperature = 0.8
    ignore_eos: Annotated[
        bool, Field(description="go on after the end-of-text token; an extension that not every server knows")
    ] = False
    request_timeout: Annotated[
        float, Field(gt=0, allow_inf_nan=False, description="seconds of silence after which a request has failed")
    ] = 300.0
    startup_timeout: Annotated[
        float, Field(gt=0, allow_inf_nan=False, description="seconds that a started server may take to load")
    ] = 600.0

    @field_validator("base_url")
    @classmethod
    def _is_an_address(cls, url: str | None) -> str | None:
        if url is None:
            return None
        try:
            parts = urlsplit(url)
            is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # brackets that do not match, or a port that is no number or too large
            is_whole = False
        if not is_whole:
            raise ValueError("give scheme, host and port, such as http://127.0.0.1:30000")
        return url.rstrip("/").removesuffix("/v1")

    @property
    def levels(self) -> tuple[tuple[int | None, float | None], ...]:
        """(clients, None) in a closed loop, (None, requests per second) in an open one."""
        if self.request_rate is not None:
            return tuple((None, rate) for rate in self.request_rate)
        return tuple((clients, None) for clients in self.concurrency or DEFAULT_CONCURRENCY)

    @property
    def mode(self) -> Literal["closed loop", "open loop"]:
        return "closed loop" if self.request_rate is None else "open loop"

    @property
    def key(self) -> str | None:
        return None if self.api_key is None else self.api_key.get_secret_value()


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark. Returns the exit status: 1 when no request of some level was answered, 130 after Ctrl-C."""
    return run_command(PROG, _run, arguments)


def _run(arguments: list[str]) -> int:
    config = parse_command_line(ServingBenchConfig, PROG, arguments)
    _check(config, arguments)
    texts = bundled_texts() if config.prompts is None else read_texts(config.prompts)
    report = _measure(config, [text.text for text in texts])
    _put_out(config, report)
    return 0 if all(level["completed"] for level in report["levels"]) else 1


def _check(config: ServingBenchConfig, arguments: Sequence[str]) -> None:
    """Raises ConfigError: flags that do not go together, or a package that is missing."""
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
            raise ConfigError(f"{', '.join(useless)}: the server at --base-url runs already and cannot be told")


def _measure(config: ServingBenchConfig, prompts: Sequence[str]) -> dict[str, Any]:
    """The report. Raises SpecmambaError."""
    from specmamba.bench.serving.sweep import sweep

    if config.base_url is not None:
        return asyncio.run(sweep(config, prompts, config.base_url))
    from specmamba.bench.serving.server import started_server

    if sys.stderr.isatty():
        print("starting a server", file=sys.stderr)
    with started_server(config, config.key, config.startup_timeout) as (url, server):
        return asyncio.run(sweep(config, prompts, url, server))


def _put_out(config: ServingBenchConfig, report: dict[str, Any]) -> None:
    from specmamba.bench.serving.report import plot_report, print_report

    print_report(report)
    if config.json is not None:
        write_json(config.json, report)
    if config.plot is not None:
        plot_report(config.plot, report)


if __name__ == "__main__":
    sys.exit(main())
