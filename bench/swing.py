"""A load that swings: drafts whose size is decided in each step beside fixed sizes, through HTTP.

    python -m specmamba.bench.swing [--model DIR] [--json FILE] [--clients 1,16,1] [--rounds 5] [any engine flag]

One server per way to draft runs on this machine; only one of them works at a time. A round has two phases for each
number of clients: code (the bundled prompts) and noise (random tokens, at a temperature at which drafts are seldom
accepted). From phase to phase either the clients change or the text. In each phase the servers take turns with the same
requests, which bring seeds, so all are decided under ``target``. The first round records steps and does not count.

Reported are medians over rounds: tokens per second of a phase from its first request to its last token, adaptive over
the best fixed way in the same round, and the steps after which the speed is steady (specmamba/measure/settling.py). A
fixed size has nothing to settle: its figure says what the load and the noise of texts and machine do to this measure.
Clients ask for the depth of each token in its draft, which tells the steps of an event, and the servers send every step
by itself (``--stream-chunk-interval 0``). The clients take a little processor time of the same machine.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any

from pydantic import Field

from specmamba.bench.adaptive import ADAPTIVE, KEPT_FLAGS, PLAIN, WAYS
from specmamba.bench.http_overhead.client import TimedAnswer, ask_all_timed, num_tokens, request_bytes
from specmamba.bench.serving.server import signals_end_the_context
from specmamba.bench.soak.server import ServerProcess, server_process
from specmamba.config import EngineConfig
from specmamba.errors import ConfigError, SpecmambaError
from specmamba.measure.command import Page, Report, in_turns, put_out, run_command
from specmamba.measure.prompts import model_name
from specmamba.measure.report import (
    Count,
    JsonOption,
    NoRadixCache,
    machine,
    progress_bar,
    refuse_draft_flags,
    require,
    versions,
)
from specmamba.measure.settling import Arrival, full_steps, steps_of, tokens_by_step
from specmamba.measure.swings import CODE, NOISE, TOLERANCE, WINDOW, Load, Phase, Played, phase_report
from specmamba.sampling_params import Temperature

PROG = "python -m specmamba.bench.swing"
SERVED = {
    way: flags for way, flags in WAYS.items() if way != "chain of 2"
}  # each server takes memory, and each turn time
TARGET_RATIO, TARGET_STEPS = 0.9, 50
SERVER_FLAGS = ("--disable-log-requests", "--stream-chunk-interval", "0")
_EVENT = re.compile(rb"^data: (\{.*\})", re.MULTILINE)
_BREAKDOWN_S = 5.0  # the process of a server that breaks down may take this long to end


class SwingConfig(JsonOption):
    """A load that swings: adaptive sizes of drafts beside fixed ones, through HTTP."""

    disable_radix_cache: NoRadixCache = True
    max_total_tokens: Annotated[int | None, Field(ge=1, description="size of the KV pool of each server")] = 32_768
    clients: Annotated[
        tuple[Count, ...], Field(min_length=1, description="clients at a time, two phases for each number")
    ] = (1, 16, 1)
    rounds: Annotated[Count, Field(description="rounds of all phases; medians over them are reported")] = 5
    requests: Annotated[Count, Field(description="requests of each client in a phase, one after the other")] = 1
    max_tokens: Annotated[Count, Field(description="new tokens of every request")] = 256
    temperature: Temperature = 0.8
    noise_temperature: Annotated[Temperature, Field(description="of noise; high: drafts are seldom accepted")] = 1.5
    startup_timeout: Annotated[
        float, Field(gt=0, allow_inf_nan=False, description="seconds that each server may take to load")
    ] = 600.0


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status: 0, or 130 after Ctrl-C."""
    return run_command(PROG, SwingConfig, arguments, lambda config: put_out(config, run(config), print_report))


def run(config: SwingConfig) -> dict[str, Any]:
    """Start the servers and run all rounds; the report as a JSON object.

    Raises:
        ConfigError: flags of drafts were given, or fewer requests can run than there are clients.
        SpecmambaError: a server does not start, or breaks down.
    """
    require("httpx", PROG)
    _check(config)
    with signals_end_the_context(), ExitStack() as stack:
        servers = {way: _start(config, way, stack) for way in SERVED}
        described = servers[ADAPTIVE].get("/server_info")["engine"]
        played = play_rounds(load_of(config, int(described["vocab_size"])), servers, config.rounds)
    phases = [phase_report(phase, by_way, ADAPTIVE) for phase, by_way in played.items()]
    settled = [phase["ways"][ADAPTIVE]["settled_after"] for phase in phases]
    asked = {"clients", "rounds", "requests", "max_tokens", "temperature", "noise_temperature"}
    return {
        "model": model_name(described),
        "dtype": described["dtype"],
        "machine": machine(),
        "versions": versions(("specmamba", "torch")),
        **config.model_dump(include=asked),
        "window_steps": WINDOW,
        "tolerance": TOLERANCE,
        "targets": {"over_best": TARGET_RATIO, "settled_after": TARGET_STEPS},
        "phases": phases,
        "worst_over_best": min(phase["over_best"] for phase in phases),
        "slowest_to_settle": None if None in settled else max(settled),
    }


def _check(config: SwingConfig) -> None:
    """Raise ConfigError when flags do not fit."""
    refuse_draft_flags(config, KEPT_FLAGS, f"chooses its own drafts: {', '.join(SERVED)}")
    if max(config.clients) > config.max_running_requests:
        raise ConfigError(f"--clients {max(config.clients)} needs as many --max-running-requests")


def engine_of(config: SwingConfig, way: str) -> EngineConfig:
    """The flags of the server that drafts in this way; flags of drafts go only to servers that can use them."""
    flags = config.model_dump(include=set(EngineConfig.model_fields))
    unused = {PLAIN: KEPT_FLAGS - {"speculative_state"}, ADAPTIVE: set[str]()}.get(way, {"speculative_costs"})
    return EngineConfig(**{name: value for name, value in flags.items() if name not in unused} | SERVED[way])


def _start(config: SwingConfig, way: str, stack: ExitStack) -> ServerProcess:
    """Start the server of one way, which ends with the stack."""
    print(f"starting a server: {way}", file=sys.stderr)
    with _errors_of(way):
        return stack.enter_context(server_process(engine_of(config, way), config.startup_timeout, SERVER_FLAGS))


@contextmanager
def _errors_of(way: str) -> Iterator[None]:
    """Let errors say which server it was; if its process has ended the last lines of its log are shown."""
    try:
        yield
    except SpecmambaError as error:
        print(*getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
        raise SpecmambaError(f"{way}: {error}") from None


def load_of(config: SwingConfig, vocab_size: int) -> Load:
    """What is asked."""
    temperatures = {CODE: config.temperature, NOISE: config.noise_temperature}
    return Load(config.clients, config.requests, config.max_tokens, temperatures, config.seed, vocab_size)


def play_rounds(
    load: Load, servers: Mapping[str, ServerProcess], num_rounds: int
) -> dict[Phase, dict[str, list[Played]]]:
    """Let all servers play every phase in turns; by phase and way, an entry for each round that counts."""
    played: dict[Phase, dict[str, list[Played]]] = {phase: {way: [] for way in servers} for phase in load.phases}
    with progress_bar("phases", (num_rounds + 1) * len(played) * len(servers)) as advance:
        for number in range(num_rounds + 1):
            for phase in load.phases:
                bodies = load.bodies(phase, number)
                for way in in_turns(list(servers), number + phase.number):
                    with _errors_of(way):
                        found = play(servers[way], phase, bodies)
                    if number:
                        played[phase][way].append(found)
                    advance()
            print(f"round {number} of {num_rounds} done", file=sys.stderr)
    return played


def play(server: ServerProcess, phase: Phase, bodies: Sequence[Sequence[Mapping[str, Any]]]) -> Played:
    """Send the requests of one phase to one server. Raises SpecmambaError: an answer is not complete."""
    host = "{}:{}".format(*server.address)
    requests = [[request_bytes(host, body) for body in of_one] for of_one in bodies]
    before, began = _sizing(server), time.perf_counter()
    try:
        answers = asyncio.run(ask_all_timed(server.address, requests))
    except (SpecmambaError, OSError) as error:
        server.check(_BREAKDOWN_S)  # why it has ended, if it has
        raise SpecmambaError(f"a request failed: {error}") from None
    seconds = max(answer.times[-1] for of_one in answers for answer in of_one) - began
    sizing = {name: value - before[name] for name, value in _sizing(server).items()}
    arrivals = [
        each for stream, of_one in enumerate(answers) for answer in of_one for each in arrivals_of(stream, answer)
    ]
    asked = sum(body["max_tokens"] for of_one in bodies for body in of_one)
    return played_of(arrivals, phase.clients, asked, seconds, sizing)


def _sizing(server: ServerProcess) -> dict[str, int]:
    """What an adaptive server has counted so far; nothing for the others."""
    stats = server.get("/server_info")["stats"]["sizing"] or {}
    return {name: value for name, value in stats.items() if name.startswith("num_")}


def arrivals_of(stream: int, answer: TimedAnswer) -> list[Arrival]:
    """The tokens of an answer as they arrived. Raises SpecmambaError: the answer is an error, or broke off."""
    num_tokens(answer.data)
    found: list[Arrival] = []
    for match in _EVENT.finditer(answer.data):
        depths = [t["depth"] for choice in json.loads(match[1])["choices"] for t in choice["tokens"] or ()]
        if depths:
            at, drafted = answer.arrived_at(match.end()), sum(map(bool, depths))
            found.append(Arrival(at, stream, tokens_by_step(depths), drafted, is_first=not found))
    return found


def played_of(
    arrivals: Sequence[Arrival], clients: int, asked: int, seconds: float, sizing: Mapping[str, int]
) -> Played:
    """What the arrivals of a phase say. Raises SpecmambaError: there are not as many tokens as were asked for."""
    tokens = sum(sum(each.tokens_by_step) for each in arrivals)
    if tokens != asked:
        raise SpecmambaError(f"{tokens} tokens came, but {asked} were asked for")
    steps = steps_of(arrivals, clients)
    decided = tokens - sum(each.num_drafted for each in arrivals)
    return Played(tokens / seconds, tokens / max(1, decided), len(steps), tuple(full_steps(steps)), sizing)


def print_report(report: Report) -> None:
    """Print the table of phases."""
    page = Page()
    asked = f"{report['requests']} x {report['max_tokens']} tokens per client and phase"
    page.lines(
        f"{report['model']}, {report['dtype']}, {asked}; tokens/s, median of {report['rounds']} rounds (*: best fixed)",
        report["machine"],
    )
    columns = ("clients", "text", *SERVED, "over best (range)", "reached", "settled (fixed)")
    page.table(columns, [_row(phase) for phase in report["phases"]], text_columns=(1,))
    page.lines(
        f"worst: {report['worst_over_best']:.3f} of the best fixed (target: {TARGET_RATIO:g})",
        f"slowest to settle: {_or_dash(report['slowest_to_settle'])} steps (target: {TARGET_STEPS})",
    )


def _row(phase: Mapping[str, Any]) -> tuple[str, ...]:
    ways = phase["ways"]
    speeds = [f"{ways[way]['tokens_per_second']:.1f}{'*' if way == phase['best_static'] else ''}" for way in SERVED]
    low, high = phase["over_best_range"]
    over = f"{phase['over_best']:.2f} ({low:.2f}-{high:.2f})"
    reached, settled = (_or_dash(ways[ADAPTIVE][name]) for name in ("reached_after", "settled_after"))
    fixed = "/".join(_or_dash(ways[way]["settled_after"]) for way in SERVED if way != ADAPTIVE)
    return str(phase["clients"]), phase["text"], *speeds, over, reached, f"{settled} ({fixed})"


def _or_dash(steps: int | None) -> str:
    """A dash: not within the phase, or the phase has too few steps to say."""
    return "-" if steps is None else str(steps)


if __name__ == "__main__":
    sys.exit(main())
