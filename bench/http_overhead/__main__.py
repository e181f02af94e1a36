"""What HTTP costs: tokens per second through the server over those of ``LLM.generate`` with the same batch.

    python -m specmamba.bench.http_overhead [--concurrency 1,8,32] [--rounds 5] [--json FILE] [any engine flag]

``LLM`` runs in this process; the server is another one with the same flags; only one of them works at a time. In every
round, at every level, three ways take turns: ``generate`` with a batch of the level's size; the server with as many
clients that ask for the same prompts with the same seeds and take whole answers; the same with streams. Batches are
asked until there were ``--num-requests``, and every request gives the same number of tokens. The figures are medians
over rounds of tokens per second and of the ratio to ``generate`` in the same round, with drafts and without.

The clients (client.py) run in this process and take a little of its processor time; that is in the figures.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field

from specmamba.bench.http_overhead.client import ask_all, num_tokens, request_bytes
from specmamba.bench.serving.server import started_server
from specmamba.config import EngineConfig
from specmamba.errors import SpecmambaError
from specmamba.measure.command import Page, Report, put_out, run_command
from specmamba.measure.prompts import PLAIN_FLAGS, bundled_texts, model_name, seed_of
from specmamba.measure.report import JsonOption, NoRadixCache, machine, progress_bar, split_numbers, versions
from specmamba.sampling_params import Temperature

if TYPE_CHECKING:  # --help must not wait for torch
    from specmamba.llm import LLM

PROG = "specmamba bench http-overhead"
WAYS = ("generate", "whole", "streamed")
Batch = Callable[[int], float]  # clients -> tokens per second


class HttpOverheadConfig(JsonOption):
    """Tokens per second through HTTP over those of LLM.generate."""

    disable_radix_cache: NoRadixCache = True
    max_running_requests: Annotated[int, Field(ge=1, description="requests in a batch at the most")] = 32
    concurrency: Annotated[
        tuple[Annotated[int, Field(ge=1, le=1024)], ...],
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
    return run_command(PROG, HttpOverheadConfig, arguments, _run)


def _run(config: HttpOverheadConfig) -> int:
    report = run(config)
    put_out(config, report, print_report)
    return 0 if config.at_least is None or lowest_ratio(report) >= config.at_least else 1


def lowest_ratio(report: Report) -> float:
    """The lowest ratio to ``generate`` of all ways and levels of a report."""
    return min(float(row[way]["ratio"]) for row in report["results"] for way in ("whole", "streamed"))


def run(config: HttpOverheadConfig) -> dict[str, Any]:
    """Run all rounds; the report as a JSON object. Raises SpecmambaError."""
    flags = config.model_dump(include=set(EngineConfig.model_fields))
    settings = [flags | PLAIN_FLAGS]
    if config.speculative_algorithm != "none":
        settings.insert(0, flags)
    measured = [_measure(config, EngineConfig(**each)) for each in settings]
    described = measured[0][0]
    return {
        "model": model_name(described),
        "machine": machine(),
        "versions": versions(("specmamba", "torch", "uvicorn", "starlette")),
        "dtype": described["dtype"],
        "rounds": config.rounds,
        "max_tokens": config.max_tokens,
        "temperature": config.temperature,
        "results": [row for _, rows in measured for row in rows],
    }


def _measure(config: HttpOverheadConfig, engine: EngineConfig) -> tuple[dict[str, object], list[dict[str, Any]]]:
    """Measure one setting of drafts: the description of its engine, and a row per level."""
    from specmamba.llm import LLM

    with started_server(engine, None, config.startup_timeout) as (url, server), LLM(**engine.model_dump()) as llm:
        described = llm.engine.describe()
        batches = dict(zip(WAYS, _batches(config, llm, url), strict=True))
        rates = _play(config, batches, str(described["speculative_algorithm"]))
        server.check()
    rows = [summary(str(described["speculative_algorithm"]), clients, rates[clients]) for clients in config.concurrency]
    return described, rows


def _play(config: HttpOverheadConfig, batches: dict[str, Batch], label: str) -> dict[int, list[dict[str, float]]]:
    """Tokens per second by level, round and way. The first round only warms up and is not counted."""
    rates: dict[int, list[dict[str, float]]] = {clients: [] for clients in config.concurrency}
    with progress_bar(label, (config.rounds + 1) * len(config.concurrency)) as advance:
        for number in range(config.rounds + 1):
            for clients in config.concurrency:
                turns = WAYS if number % 2 else WAYS[::-1]
                rate = {way: batches[way](clients) for way in turns}
                if number:
                    rates[clients].append(rate)
                advance()
    return rates


def _batches(config: HttpOverheadConfig, llm: LLM, url: str) -> tuple[Batch, Batch, Batch]:
    """Functions that run one level once, in the order of ``WAYS``."""
    parts = urlsplit(url)
    address = (str(parts.hostname), int(parts.port or 0))
    prompts = [text.text for text in bundled_texts()]

    def generate(clients: int) -> float:
        return _timed(config, clients, lambda: _generated(config, llm, prompts, clients))

    def ask(clients: int, stream: bool) -> float:
        bodies = [_body(config, number, prompt, stream) for number, prompt in _numbered(config, prompts, clients)]
        requests = [request_bytes(parts.netloc, body) for body in bodies]
        shares = [requests[client::clients] for client in range(clients)]
        return _timed(config, clients, lambda: sum(map(num_tokens, asyncio.run(ask_all(address, shares)))))

    return generate, lambda clients: ask(clients, False), lambda clients: ask(clients, True)


def _timed(config: HttpOverheadConfig, clients: int, work: Callable[[], int]) -> float:
    """Tokens per second of ``work``, which returns a number of tokens. Raises SpecmambaError: some are missing."""
    began = time.perf_counter()
    tokens = work()
    elapsed_s = time.perf_counter() - began
    asked = _count(config, clients) * config.max_tokens
    if tokens != asked:
        raise SpecmambaError(f"{tokens} tokens came, but {asked} were asked for")
    return tokens / elapsed_s


def _generated(config: HttpOverheadConfig, llm: LLM, prompts: Sequence[str], clients: int) -> int:
    from specmamba import SamplingParams

    texts = [prompt for _, prompt in _numbered(config, prompts, clients)]
    params = [SamplingParams(**_sampling(config, number)) for number in range(len(texts))]
    batches = [slice(begin, begin + clients) for begin in range(0, len(texts), clients)]
    outputs = [output for batch in batches for output in llm.generate(texts[batch], params[batch], use_tqdm=False)]
    return sum(len(output.token_ids) for output in outputs)


def _count(config: HttpOverheadConfig, clients: int) -> int:
    return clients * max(1, config.num_requests // clients)


def _numbered(config: HttpOverheadConfig, prompts: Sequence[str], clients: int) -> list[tuple[int, str]]:
    return list(enumerate(islice(cycle(prompts), _count(config, clients))))


def _sampling(config: HttpOverheadConfig, number: int) -> dict[str, Any]:
    return {
        "max_tokens": config.max_tokens,
        "temperature": config.temperature,
        "seed": seed_of(config.seed, number),
        "ignore_eos": True,
    }


def _body(config: HttpOverheadConfig, number: int, prompt: str, stream: bool) -> dict[str, Any]:
    streamed = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    return {"prompt": prompt, **_sampling(config, number), **streamed}


def summary(drafts: str, clients: int, rounds: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The row of a level: medians of its tokens per second, and of the ratios to ``generate`` in the same round.

    Args:
        drafts: the name of the drafts.
        clients: the level.
        rounds: tokens per second by way, one mapping per round.
    """
    row: dict[str, Any] = {"drafts": drafts, "concurrency": clients}
    for way in WAYS:
        ratios = [rates[way] / rates["generate"] for rates in rounds]
        row[way] = {
            "tokens_per_s": round(statistics.median(rates[way] for rates in rounds), 1),
            "ratio": round(statistics.median(ratios), 4),
            "ratio_range": [round(min(ratios), 4), round(max(ratios), 4)],
        }
    return row


def print_report(report: Report) -> None:
    """Print a table with a row per level."""
    page = Page()
    page.lines(
        f"{report['model']}, {report['dtype']}, {report['max_tokens']} tokens per request, temperature "
        f"{report['temperature']:g}; tokens/s, median of {report['rounds']} rounds (over generate; its range)"
    )
    rows = [
        (row["drafts"], str(row["concurrency"]), *(_cell(row[way], way) for way in WAYS)) for row in report["results"]
    ]
    page.table(("drafts", "clients", *WAYS), rows)


def _cell(figures: Mapping[str, Any], way: str) -> str:
    rate = f"{figures['tokens_per_s']:.0f}"
    if way == "generate":
        return rate
    low, high = figures["ratio_range"]
    return f"{rate} ({figures['ratio']:.2f}; {low:.2f} to {high:.2f})"


if __name__ == "__main__":
    sys.exit(main())
