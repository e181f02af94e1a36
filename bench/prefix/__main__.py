"""What the prefix cache spares: hit rates against an oracle, time to first token with and without it, and its costs.

    specmamba bench prefix [--workloads shared,chat,branch,agent,pressure,ttft,costs] [--json FILE] [--plot FILE.png]
                           [any engine flag]

Every wave of requests runs on an engine with the cache and on one without, in turns, with greedy decoding; the outputs
are compared. In float32 (the default here) a text that differs is an error: the exit status is 1. Of each workload the
pools hold everything that can be cached, but ``pressure`` gets a share of that, and runs with both eviction policies;
the engine without the cache has roomy memory there too.
workloads.py says what the workloads are, oracle.py what the oracle is, figures.py how each figure
is defined; ``ttft`` is first_token.py, ``costs`` costs.py and decoding.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_settings import NoDecode

from specmamba.command_line import exit_with_error, parse_command_line
from specmamba.errors import SpecmambaError
from specmamba.measure.report import ReportOptions, write_json

PROG = "specmamba bench prefix"
SHARING = ("shared", "chat", "branch", "agent", "pressure")
PARTS = (*SHARING, "ttft", "costs")


def _names(value: object) -> object:
    return tuple(name.strip() for name in value.split(",")) if isinstance(value, str) else value


class PrefixBenchConfig(ReportOptions):
    """What the prefix cache spares, against an oracle and against no cache, and what it costs."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    workloads: Annotated[
        Annotated[tuple[str, ...], Field(min_length=1)],
        NoDecode,
        BeforeValidator(_names),
        Field(description=f"what to run, of {','.join(PARTS)}"),
    ] = PARTS
    prompts: Annotated[
        Path | None,
        Field(description="take the text from the prompts of this file; none: bundled ones and held-out Python files"),
    ] = None
    concurrency: Annotated[
        int, Field(ge=1, description="requests of a wave, at least, while so many ask; the next comes after it")
    ] = 4
    output_tokens: Annotated[int, Field(ge=1, description="new tokens of every request")] = 16
    turn_tokens: Annotated[int, Field(ge=1, description="tokens of a question or a user's turn, usually")] = 48
    shared_tokens: Annotated[int, Field(ge=1, description="tokens of a system prompt, or of agents' instructions")] = (
        600
    )
    num_users: Annotated[int, Field(ge=1, description="shared: users of the system prompt")] = 24
    num_chats: Annotated[int, Field(ge=1, description="chat: conversations")] = 6
    num_turns: Annotated[int, Field(ge=1, description="chat: turns of each")] = 6
    num_documents: Annotated[int, Field(ge=1, description="branch: documents, and as many trees of thought")] = 2
    document_tokens: Annotated[int, Field(ge=1, description="branch: tokens of a document")] = 1000
    num_questions: Annotated[int, Field(ge=1, description="branch: questions to each document")] = 12
    thought_depth: Annotated[int, Field(ge=1, description="branch: levels of a tree of thought")] = 3
    thought_width: Annotated[int, Field(ge=1, description="branch: continuations of a thought that was kept")] = 4
    thoughts_kept: Annotated[int, Field(ge=1, description="branch: thoughts that are kept of a level")] = 2
    num_agents: Annotated[int, Field(ge=1, description="agent: agents")] = 3
    agent_steps: Annotated[int, Field(ge=1, description="agent: steps of each")] = 6
    tool_tokens: Annotated[int, Field(ge=1, description="agent: tokens of a tool's output, usually")] = 96
    pressure_requests: Annotated[int, Field(ge=1, description="pressure: requests, or a few more")] = 64
    pressure_share: Annotated[
        float, Field(gt=0, le=1, description="pressure: size of both pools, as a share of what would hold everything")
    ] = 0.1
    ttft_tokens: Annotated[int, Field(ge=2, description="ttft: tokens of a prompt")] = 2000
    ttft_shared_tokens: Annotated[int, Field(ge=1, description="ttft: tokens of it that others had before")] = 1900
    rounds: Annotated[int, Field(ge=1, description="ttft, costs: rounds; medians over them")] = 5
    cost_tokens: Annotated[int, Field(ge=1024, description="costs: tokens of the longest prompt in the tree")] = 32768
    cost_requests: Annotated[int, Field(ge=1, le=4096, description="costs: requests that decode together")] = 64

    @field_validator("workloads")
    @classmethod
    def _are_known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in PARTS:
                raise ValueError(f"{name!r} is none of {', '.join(PARTS)}")
        return tuple(part for part in PARTS if part in names)

    @model_validator(mode="after")
    def _flags_go_together(self) -> PrefixBenchConfig:
        if self.disable_radix_cache:
            raise ValueError("--disable-radix-cache: the cache is what is measured, and runs without it too; drop it")
        if self.ttft_shared_tokens >= self.ttft_tokens:
            raise ValueError(
                f"--ttft-shared-tokens {self.ttft_shared_tokens}: a prompt of {self.ttft_tokens} tokens needs one of "
                "its own; lower it, or raise --ttft-tokens"
            )
        if self.concurrency > self.max_running_requests:
            raise ValueError(
                f"--concurrency {self.concurrency}: only {self.max_running_requests} requests run together; raise "
                "--max-running-requests"
            )
        if self.plot is not None and not set(SHARING) & set(self.workloads):
            raise ValueError(f"--plot: the picture is of workloads: choose some of {', '.join(SHARING)}")
        return self

    @model_validator(mode="after")
    def _costs_have_pools_of_their_own(self) -> PrefixBenchConfig:
        if "costs" not in self.workloads:
            return self
        sizes = {"--max-total-tokens": self.max_total_tokens, "--max-mamba-cache-size": self.max_mamba_cache_size}
        given = [flag for flag, size in sizes.items() if size is not None]
        if given:
            raise ValueError(
                f"{', '.join(given)}: costs sizes its pools itself, by --cost-tokens and --cost-requests; drop it, or "
                "leave costs out of --workloads"
            )
        is_limited = "max_running_requests" in self.model_fields_set
        if is_limited and self.cost_requests > self.max_running_requests:
            raise ValueError(
                f"--cost-requests {self.cost_requests}: only {self.max_running_requests} requests run together; lower "
                "it, or raise --max-running-requests"
            )
        return self


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark. Returns the exit status: 1 when a text differs in float32, 130 after Ctrl-C."""
    try:
        config = parse_command_line(PrefixBenchConfig, PROG, sys.argv[1:] if arguments is None else arguments)
        report = measure_and_report(config)
        put_out(config, report)
    except SpecmambaError as error:
        exit_with_error(PROG, error)
    except KeyboardInterrupt:
        return 130
    return 1 if report["dtype"] == "float32" and report["different_texts"] else 0


def measure_and_report(config: PrefixBenchConfig) -> dict[str, Any]:
    """All figures, as in the JSON file. Raises SpecmambaError."""
    import torch

    from specmamba.bench.prefix.costs import measure_costs
    from specmamba.bench.prefix.engines import start_cold_engine
    from specmamba.bench.prefix.figures import full_report
    from specmamba.bench.prefix.first_token import measure_ttft
    from specmamba.bench.prefix.run import run_workloads
    from specmamba.bench.prefix.texts import read_source

    with start_cold_engine(config) as cold:
        source = read_source(config.prompts, cold.engine.tokenizer)
        names = [name for name in config.workloads if name in SHARING]
        plays = run_workloads(config, cold, source, names) if names else []
        ttft = measure_ttft(config, cold, source) if "ttft" in config.workloads else None
        description, num_threads = cold.engine.describe(), torch.get_num_threads()
    costs = measure_costs(config, source) if "costs" in config.workloads else None
    return full_report(config, description, num_threads, source, plays, ttft, costs)


def put_out(config: PrefixBenchConfig, report: dict[str, Any]) -> None:
    """Table, JSON and picture."""
    from specmamba.bench.prefix.tables import plot_report, print_report

    print_report(report)
    if config.json is not None:
        write_json(config.json, report)
    if config.plot is not None:
        plot_report(config.plot, report)


if __name__ == "__main__":
    sys.exit(main())
