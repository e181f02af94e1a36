"""The server of the soak benchmark: a process, what it holds, and how it ends. Linux only: it reads /proc."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from specmamba.bench.serving.server import SERVE, StartedServer, engine_flags, python_path
from specmamba.config import EngineConfig
from specmamba.errors import SpecmambaError

if TYPE_CHECKING:
    import httpx

# Short limits of the server, so that a short run sees it drop clients.
SHUTDOWN_TIMEOUT_S = 2.0
SERVER_FLAGS = (
    *("--read-timeout", "3"),
    *("--write-timeout", "3"),
    *("--shutdown-timeout", f"{SHUTDOWN_TIMEOUT_S:g}"),
)
_END_TIMEOUT_S = 30.0
_SETTLE_TIMEOUT_S = 60.0
_SAMPLE_S = 0.5
_PIPE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Holdings:
    """Resources that the process holds while it is idle and its cache is empty."""

    kv_tokens: int
    states: int
    free_pages: int
    free_states: int
    descriptors: int
    threads: int


class ServerProcess:
    """A running server: its address, its process, and questions to both."""

    def __init__(
        self, url: str, process: subprocess.Popen[bytes], server: StartedServer, key: str | None = None
    ) -> None:
        """``key``: of the operator."""
        self.url, self._process, self._server = url, process, server
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        parts = urlsplit(url)
        self.address = (str(parts.hostname), int(parts.port or 0))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def headers(self) -> Mapping[str, str]:
        """The operator's, for requests."""
        return self._headers

    def check(self, grace_s: float = 0.0) -> None:
        """Raise SpecmambaError if the server has ended or ends within ``grace_s``."""
        self._server.check(grace_s)

    def get(self, path: str) -> dict[str, Any]:
        return dict(self._ask("GET", path).json())

    def text(self, path: str) -> str:
        return self._ask("GET", path).text

    def post(self, path: str, body: Mapping[str, object]) -> dict[str, Any]:
        return dict(self._ask("POST", path, body).json())

    def rss_mb(self) -> float:
        """Resident memory of the process in MiB."""
        return self._status("VmRSS") / 1024

    def settle(self) -> Holdings:
        """Wait until nothing runs, empty the cache, and count what is still held.

        Raises:
            SpecmambaError: requests still run after ``_SETTLE_TIMEOUT_S``.
        """
        deadline = time.monotonic() + _SETTLE_TIMEOUT_S
        while (stats := self._stats())["num_running"] or stats["num_waiting"]:
            if time.monotonic() > deadline:
                raise SpecmambaError(f"after {_SETTLE_TIMEOUT_S:g} s without clients the server still works: {stats}")
            time.sleep(0.1)
        self._ask("POST", "/flush_cache")
        stats, cache = self._stats(), self.get("/cache")
        self._wait_for_connections()  # those of the requests above too
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
        """Wait for the end; the exit status, -9 if the process had to be killed."""
        try:
            return self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _stats(self) -> dict[str, Any]:
        return dict(self.get("/server_info")["stats"])

    def _ask(self, method: str, path: str, body: Mapping[str, object] | None = None) -> httpx.Response:
        import httpx

        options: dict[str, Any] = {"timeout": _END_TIMEOUT_S, "trust_env": False, "headers": self._headers}
        with httpx.Client(base_url=self.url, **options) as client:
            response = client.request(method, path, json=body)
        if response.status_code != httpx.codes.OK:
            raise SpecmambaError(f"{method} {path} was answered {response.status_code}: {response.text[:200]}")
        return response

    def _wait_for_connections(self) -> None:
        """Wait until the number of open files falls no more: the server closes its side of a connection later."""
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
def server_process(
    config: EngineConfig,
    timeout_s: float,
    flags: Sequence[str] = ("--disable-log-requests",),
    variables: Mapping[str, str] | None = None,
    key: str | None = None,
    *,
    stalls_log: bool = False,
) -> Iterator[ServerProcess]:
    """Start a server, which ends with the context.

    Args:
        config: of the engine.
        timeout_s: for its start.
        flags: besides those of ``config`` and ``SERVER_FLAGS``.
        variables: of its environment.
        key: of the operator.
        stalls_log: its standard error is a pipe that is not read.

    Raises:
        SpecmambaError: it does not start in time.
    """
    command = [*SERVE, "--host", "127.0.0.1", "--port", "0", *SERVER_FLAGS, *engine_flags(config), *flags]
    env = os.environ | {"PYTHONPATH": python_path(), **(variables or {})}
    with tempfile.TemporaryFile() as log, _unread_pipe() as pipe:
        errors: Any = pipe if stalls_log else log
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=errors, env=env, start_new_session=True
        )
        server = StartedServer(process, log)
        try:
            yield ServerProcess(server.wait_until_ready(timeout_s), process, server, key)
        finally:
            server.end()


@contextmanager
def _unread_pipe() -> Iterator[int]:
    """The writing end of a small pipe that is never read."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    try:
        yield writing
    finally:
        os.close(reading)
        os.close(writing)


async def sample_rss(server: ServerProcess, samples: list[tuple[float, float]]) -> None:
    """Append (``time.monotonic()``, MiB of resident memory) every ``_SAMPLE_S`` until cancelled."""
    while True:
        try:
            samples.append((time.monotonic(), server.rss_mb()))
        except OSError:
            print("the server's process is gone", file=sys.stderr)
            return
        await asyncio.sleep(_SAMPLE_S)


def free_port() -> int:
    """A port that a server can be told to listen at."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])
