"""One server, and a prefill and a decode server that share its threads."""

from __future__ import annotations

import re
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from specmamba.bench.handoffs.options import HandoffsBenchConfig
from specmamba.bench.soak.server import ServerProcess, free_port, server_process
from specmamba.config import EngineConfig
from specmamba.errors import ConfigError, SpecmambaError

ONE, APART = "one server", "apart"
_COUNTED_TIMEOUT_S = 10.0  # in which a prefill server counts what it has sent
_FLAGS = ("--disable-log-requests", "--stream-chunk-interval=0")
_FIGURE = re.compile(r"^specmamba_(handoff\w+?)_total(?:\{reason=\"(\w+)\"\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Counted:
    """What a server says of its handoffs in ``/metrics``, since its start or between two looks."""

    num_handoffs: int
    num_bytes: int
    seconds: float
    failures: Mapping[str, int]  # by reason, without zeros

    def since(self, before: Counted) -> Counted:
        """What was added."""
        failures = {reason: count - before.failures.get(reason, 0) for reason, count in self.failures.items()}
        return Counted(
            self.num_handoffs - before.num_handoffs,
            self.num_bytes - before.num_bytes,
            self.seconds - before.seconds,
            {reason: count for reason, count in failures.items() if count},
        )


@dataclass(frozen=True, slots=True)
class Way:
    """Servers that answer requests: one, or two of which the first computes prompts for the other."""

    name: str
    answering: ServerProcess
    prefill: ServerProcess | None = None
    port: int = 0  # from which the prefill server hands prompts over

    @property
    def servers(self) -> tuple[ServerProcess, ...]:
        """All of them, the answering one last."""
        return (self.answering,) if self.prefill is None else (self.prefill, self.answering)

    def flush(self) -> None:
        """Empty the caches. Raises SpecmambaError."""
        for server in self.servers:
            server.post("/flush_cache", {})

    def counted(self) -> list[Counted]:
        """The handoffs of each server, the answering one last; raises SpecmambaError."""
        return [read_counts(server.text("/metrics")) for server in self.servers]

    def handed_over(self, before: list[Counted], num_prompts: int) -> list[Counted]:
        """What each server has counted since ``before``, when this many prompts were handed over.

        Raises:
            SpecmambaError: fewer or more were.
        """
        deadline = time.monotonic() + _COUNTED_TIMEOUT_S
        while True:  # the decode server has a prompt before the other one has counted it
            added = [after.since(earlier) for after, earlier in zip(self.counted(), before, strict=True)]
            if all(counted.num_handoffs == num_prompts for counted in added):
                return added
            if time.monotonic() > deadline or any(counted.failures for counted in added):
                names = zip(("prefill", "decode"), added, strict=True)
                told = "; ".join(f"{name}: {each.num_handoffs}, failed: {dict(each.failures)}" for name, each in names)
                raise SpecmambaError(f"of {num_prompts} prompts not all were handed over: {told}")
            time.sleep(0.02)


def read_counts(metrics: str) -> Counted:
    """The handoffs in a text of ``/metrics``. Raises SpecmambaError: there are none."""
    found = {(name, reason): float(value) for name, reason, value in _FIGURE.findall(metrics)}
    try:
        return Counted(
            int(found["handoffs", ""]),
            int(found["handoff_bytes", ""]),
            found["handoff_seconds", ""],
            {reason: int(count) for (name, reason), count in found.items() if name == "handoff_failures" and count},
        )
    except KeyError as error:
        raise SpecmambaError(f"the server counts no handoffs: /metrics has no {error}") from None


def threads_of(config: HandoffsBenchConfig) -> tuple[int, int]:
    """Threads of one server, and of each of two. Raises ConfigError: there are too few."""
    import torch

    threads = config.num_threads or torch.get_num_threads()
    if threads < 2:
        raise ConfigError("two servers need a thread each, and there is one: see --num-threads and OMP_NUM_THREADS")
    return threads, threads // 2


@contextmanager
def started(config: HandoffsBenchConfig) -> Iterator[tuple[Way, Way]]:
    """Start all servers, which end with the context: one that has all threads, and two with half of them each.

    Raises:
        SpecmambaError: one does not start.
    """
    every, half = threads_of(config)
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="specmamba-handoffs-") as folder:
        key = Path(folder, "key")
        key.touch(mode=0o600)
        key.write_text(secrets.token_hex())
        shared = (f"--disaggregation-key-file={key}", f"--disaggregation-bootstrap-port={port}")
        with (
            _server(config, ONE, every) as one,
            _server(config, "prefill", half, *shared, "--disaggregation-mode=prefill") as prefill,
            _server(config, "decode", half, *shared, "--disaggregation-mode=decode") as decode,
        ):
            yield Way(ONE, one), Way(APART, decode, prefill, port)


@contextmanager
def _server(config: HandoffsBenchConfig, name: str, threads: int, *flags: str) -> Iterator[ServerProcess]:
    """A server that has so many threads; where no number was given it may choose to use fewer."""
    print(f"starting: {name}", file=sys.stderr)
    given = config.model_dump(include=set(EngineConfig.model_fields))
    engine = EngineConfig(**given | {"num_threads": None if config.num_threads is None else threads})
    variables = {"OMP_NUM_THREADS": str(threads)}
    with server_process(engine, config.startup_timeout, (*_FLAGS, *flags), variables) as server:
        yield server
