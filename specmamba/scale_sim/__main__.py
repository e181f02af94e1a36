"""How many replicas a load needs: hit rates and waiting times of a trace on 1 to N simulated replicas.

    specmamba bench scale-sim [--trace FILE.jsonl] [--replicas 1,2,4] [--placements prefix,round_robin] [--json FILE]
        [--kv-tokens N] [--states N] [--prefill-rate TOKENS_PER_S] [--step-ms MS] [--step-ms-per-request MS] ...

Nothing is computed and no model is loaded: every replica has the prefix cache that ``specmamba serve`` has, on pools
without content, and a clock that goes by the given speeds. ``specmamba info --model M --plan`` says what pools a GPU
has room for, ``specmamba bench serving`` how fast a server is. Requests come from ``--trace`` (request_trace.py says in
which format), or are made: conversations whose turns repeat what was said. Reported for each number of replicas and
placement: the share of prompt tokens that were resumed from a state, time to the first token, output tokens per second,
and the share of time in which the replicas computed. The last row has one replica with memory for everything.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field, model_validator

from specmamba.config import CommandLine
from specmamba.measure.command import Page, Report, put_out, run_command
from specmamba.measure.report import Count, JsonFile, progress_bar
from specmamba.server_config import Placement

if TYPE_CHECKING:
    from specmamba.scale_sim.request_trace import TraceRequest
    from specmamba.scale_sim.simulated_replica import ReplicaModel

PROG = "specmamba bench scale-sim"
Milliseconds = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
Size = Annotated[int, Field(ge=1, le=1 << 24)]
MADE = {
    *("conversations", "turns", "conversations_per_second", "think_s", "system_tokens", "num_systems", "turn_tokens"),
    *("output_tokens", "seed"),
}
OF_TRACE = {"requests", "block_size"}


class ScaleSimConfig(JsonFile, CommandLine):
    """Replicas simulated from a trace."""

    trace: Annotated[Path | None, Field(description="JSON lines of requests; none: conversations are made")] = None
    requests: Annotated[Count | None, Field(description="only the first ones of --trace")] = None
    block_size: Annotated[Size, Field(description="tokens that an id in hash_ids of --trace stands for")] = 512
    speed: Annotated[Positive, Field(description="of arrivals: with 2, requests come twice as fast")] = 1.0
    replicas: Annotated[
        tuple[Annotated[int, Field(ge=1, le=1024)], ...], Field(min_length=1, description="numbers to try")
    ] = (1, 2, 4)
    placements: Annotated[
        tuple[Placement, ...],
        Field(min_length=1, description="ways to choose a replica, as --dp-placement"),
    ] = ("prefix", "round_robin")
    kv_tokens: Annotated[Size, Field(description="of one replica's KV pool")] = 1 << 18
    states: Annotated[Size, Field(description="state slots of one replica, running requests included")] = 256
    max_running_requests: Annotated[Count, Field(description="of one replica at a time")] = 64
    chunked_prefill_size: Annotated[Size, Field(description="prompt tokens of one step")] = 8192
    spare_states: Annotated[int, Field(ge=0, le=64, description="states left inside a prompt, at most")] = 3
    prefill_rate: Annotated[Positive, Field(description="prompt tokens per second")] = 20_000.0
    step_ms: Annotated[Milliseconds, Field(description="a decoding step, whatever it holds")] = 10.0
    step_ms_per_request: Annotated[Milliseconds, Field(description="and for each request in it")] = 0.1
    tokens_per_step: Annotated[
        float, Field(ge=1, le=64, allow_inf_nan=False, description="of one request, accepted drafts and one more")
    ] = 1.0
    conversations: Annotated[Size, Field(description="to make")] = 128
    turns: Annotated[Count, Field(description="of each conversation")] = 6
    conversations_per_second: Annotated[Positive, Field(description="that begin")] = 2.0
    think_s: Annotated[
        float, Field(ge=0, le=1e6, allow_inf_nan=False, description="from an answer to the next turn")
    ] = 5.0
    system_tokens: Annotated[Size, Field(description="of a system prompt")] = 1000
    num_systems: Annotated[Size, Field(description="different system prompts")] = 4
    turn_tokens: Annotated[Size, Field(description="new ones of a turn, in the mean")] = 300
    output_tokens: Annotated[Size, Field(description="of an answer, in the mean")] = 300
    seed: Annotated[int, Field(ge=0, description="of the made conversations")] = 0

    @model_validator(mode="after")
    def _flags_go_together(self) -> Self:
        without = MADE if self.trace is not None else OF_TRACE
        for name in sorted(without & self.model_fields_set):
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag}: {'the requests are those of --trace' if self.trace else 'this needs --trace'}")
        if not self.step_ms and not self.step_ms_per_request:
            raise ValueError("--step-ms 0 --step-ms-per-request 0: steps take time")
        return self

    def replica_model(self) -> ReplicaModel:
        """What one replica has, and how fast it is."""
        from specmamba.scale_sim.simulated_replica import ReplicaModel

        return ReplicaModel(
            kv_tokens=self.kv_tokens,
            states=self.states,
            max_running=self.max_running_requests,
            chunk_size=self.chunked_prefill_size,
            spare_states=self.spare_states,
            prefill_rate=self.prefill_rate,
            step_s=self.step_ms / 1e3,
            step_s_per_request=self.step_ms_per_request / 1e3,
            tokens_per_step=self.tokens_per_step,
        )

    def read_requests(self) -> list[TraceRequest]:
        """The requests of the trace, or made ones. Raises ConfigError: the trace cannot be read."""
        from specmamba.scale_sim.request_trace import Conversations, make_conversations, read_trace

        if self.trace is not None:
            return read_trace(self.trace, self.block_size, self.requests)
        sizes = Conversations(
            number=self.conversations,
            turns=self.turns,
            per_second=self.conversations_per_second,
            think_s=self.think_s,
            system_tokens=self.system_tokens,
            num_systems=self.num_systems,
            turn_tokens=self.turn_tokens,
            output_tokens=self.output_tokens,
        )
        return make_conversations(sizes, self.seed)


def main(arguments: list[str] | None = None) -> int:
    """Run the simulation; returns the exit status: 0, or 130 after Ctrl-C."""
    return run_command(PROG, ScaleSimConfig, arguments, lambda config: put_out(config, run(config), print_report))


def run(config: ScaleSimConfig) -> dict[str, Any]:
    """Run the trace on all numbers of replicas; the report as a JSON object. Raises ConfigError: no trace."""
    from specmamba.scale_sim.fleet import Fleet

    requests, model = config.read_requests(), config.replica_model()
    ways = [(number, way) for number in config.replicas for way in (config.placements if number > 1 else ("prefix",))]
    with progress_bar("requests of all runs", (len(ways) + 1) * len(requests)) as advance:
        found = [
            {"replicas": number, "placement": placement}
            | Fleet(model, number, placement).run(requests, config.speed, advance)
            for number, placement in ways
        ]
        unbounded = Fleet(_with_room_for(requests, model), 1, "prefix").run(requests, config.speed, advance)
    return {
        "requests": len(requests),
        "prompt_tokens": sum(len(request.prompt) for request in requests),
        "output_tokens": sum(len(request.output) for request in requests),
        "flags": config.model_dump(mode="json", exclude={"json"}),
        "runs": found,
        "unbounded": unbounded,
    }


def _with_room_for(requests: list[TraceRequest], model: ReplicaModel) -> ReplicaModel:
    """A replica that evicts nothing."""
    tokens = sum(len(request.prompt) + len(request.output) for request in requests)
    ends = sum(len(request.prompt) // model.chunk_size + model.spare_states + 4 for request in requests)
    return replace(model, kv_tokens=max(tokens, model.kv_tokens), states=max(ends, model.states))


def print_report(report: Report) -> None:
    """Print the table of runs."""
    page = Page()
    page.lines(
        f"{report['requests']} requests, {report['prompt_tokens']} prompt tokens, {report['output_tokens']} output "
        "tokens; simulated, nothing was computed"
    )
    rows = [
        _row(f"{run['replicas']}, {run['placement']}" if run["replicas"] > 1 else "1", run) for run in report["runs"]
    ]
    rows.append(_row("1, memory for everything", report["unbounded"]))
    page.table(("replicas", "resumed", "first token, s: p50", "p90", "p99", "tokens/s", "busy", "evicted states"), rows)
    if refused := max(run["too_long"] for run in report["runs"]):
        page.lines(f"{refused} requests are longer than --kv-tokens, and were refused")


def _row(name: str, run: Report) -> tuple[str, ...]:
    if not run["requests"]:
        return (name, *["-"] * 7)
    waits = [f"{run['first_token_s'][name]:.3f}" for name in ("p50", "p90", "p99")]
    busy = sum(run["busy"]) / len(run["busy"])
    speed = f"{run['tokens_per_second']:.0f}"
    return (name, f"{run['resumed']:.3f}", *waits, speed, f"{busy:.2f}", str(run["evicted_states"]))


if __name__ == "__main__":
    sys.exit(main())
