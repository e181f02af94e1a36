"""The server under siege: a process of its own, what it holds, and how it ends. Linux only: it reads /proc."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

import specmamba
from specmamba.bench.serving.server import SERVE, StartedServer, engine_flags
from specmamba.config import EngineConfig
from specmamba.errors import SpecmambaError

# What a client may do to the server before it is dropped, short enough for a run to see that happen.
SERVER_FLAGS = (
    *("--read-timeout", "3"),
    *("--write-timeout", "3"),
    *("--shutdown-timeout", "2"),
    "--disable-log-requests",
)
_END_TIMEOUT_S = 30.0
_SETTLE_TIMEOUT_S = 60.0
_SAMPLE_S = 0.5


@dataclass(frozen=True, slots=True)
class Holdings:
    """What the process holds when nobody asks it anything and its cache is empty."""

    kv_tokens: int
    states: int
    free_pages: int
    free_states: int
    descriptors: int
    threads: int


class Besieged:
    """A running server and its process."""

    def __init__(self, url: str, process: subprocess.Popen[bytes], server: StartedServer) -> None:
        self.url, self._process, self._server = url, process, server
        self.address = (str(httpx.URL(url).host), int(httpx.URL(url).port or 0))

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """Raises SpecmambaError when it has ended."""
        self._server.check()

    def get(self, path: str) -> dict[str, Any]:
        return self._ask("GET", path)

    def rss_mb(self) -> float:
        """Memory that the process has in use, in MiB."""
        return self._status("VmRSS") / 1024

    def settle(self) -> Holdings:
        """Wait until nothing runs, empty the cache, and see what is left. Raises SpecmambaError: something runs on."""
        deadline = time.monotonic() + _SETTLE_TIMEOUT_S
        while (stats := self._stats())["num_running"] or stats["num_waiting"]:
            if time.monotonic() > deadline:
                raise SpecmambaError(f"after {_SETTLE_TIMEOUT_S:g} s without clients the server still works: {stats}")
            time.sleep(0.1)
        self._ask("POST", "/flush_cache")
        stats, cache = self._stats(), self.get("/cache")
        self._wait_for_connections()  # these questions' own among them
        return Holdings(
            kv_tokens=int(stats["kv_used_tokens"] + stats["kv_cached_tokens"]),
            states=int(stats["state_used_slots"] + stats["state_cached_slots"]),
            free_pages=int(cache["num_free_pages"]),
            free_states=int(cache["num_free_state_slots"]),
            descriptors=self._num_descriptors(),
            threads=self._status("Threads"),
        )

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        """The exit status; -9 when it had to be killed."""
        try:
            return self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _stats(self) -> dict[str, Any]:
        return dict(self.get("/server_info")["stats"])

    def _ask(self, method: str, path: str) -> dict[str, Any]:
        with httpx.Client(base_url=self.url, timeout=_END_TIMEOUT_S, trust_env=False) as client:
            response = client.request(method, path)
        if response.status_code != httpx.codes.OK:
            raise SpecmambaError(f"{method} {path} was answered {response.status_code}: {response.text[:200]}")
        return dict(response.json())

    def _wait_for_connections(self) -> None:
        """Descriptors of connections go when the server notices that they are closed: give it a few seconds."""
        fewest, quiet_since = self._num_descriptors(), time.monotonic()
        while time.monotonic() < quiet_since + 1:
            time.sleep(0.1)
            if (number := self._num_descriptors()) < fewest:
                fewest, quiet_since = number, time.monotonic()

    def _num_descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def _status(self, name: str) -> int:
        text = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(rf"^{name}:\s+(\d+)", text, re.MULTILINE)
        return int(found.group(1)) if found else 0


@contextmanager
def besieged_server(config: EngineConfig, timeout_s: float) -> Iterator[Besieged]:
    """Start a server with the engine flags of ``config`` and ``SERVER_FLAGS``. Raises SpecmambaError."""
    command = [*SERVE, "--host", "127.0.0.1", "--port", "0", *SERVER_FLAGS, *engine_flags(config)]
    paths = [str(Path(specmamba.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True
        )
        server = StartedServer(process, log)
        try:
            yield Besieged(server.wait_until_ready(timeout_s), process, server)
        finally:
            server.end()


async def sample_rss(server: Besieged, samples: list[tuple[float, float]]) -> None:
    """Append (seconds of time.monotonic(), MiB) until cancelled."""
    while True:
        try:
            samples.append((time.monotonic(), server.rss_mb()))
        except OSError:
            print("the server's process is gone", file=sys.stderr)
            return
        await asyncio.sleep(_SAMPLE_S)
