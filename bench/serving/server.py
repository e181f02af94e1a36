"""A server that is started for a benchmark and ended with it."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any, NoReturn

import specmamba
from specmamba.config import EngineConfig
from specmamba.errors import SpecmambaError

SERVE = (sys.executable, "-m", "specmamba", "serve")
READY = "specmamba: ready at "
_POLL_S = 0.05
_LOG_BYTES = 1 << 16  # read from the end of the log
_NOTED_LINES = 6  # of the log
_END_TIMEOUT_S = 15.0


class StartedServer:
    """A server process on a free port of this machine. ``ready``: what its log says before its address."""

    def __init__(self, process: subprocess.Popen[bytes], log: IO[bytes], ready: str = READY) -> None:
        self._process = process
        self._log = log
        self._ready = ready

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self, timeout_s: float) -> str:
        """Return the server's address. Raises SpecmambaError when it ends, or takes longer than ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.check()
            for line in self._lines():
                if found := line.partition(self._ready)[2].split():
                    return found[0]
            time.sleep(_POLL_S)
        raise self._error(f"the server was not ready after {timeout_s:g} s (--startup-timeout)")

    def check(self, grace_s: float = 0.0) -> None:
        """Raise SpecmambaError, with the last line of its log, when the server has ended or ends within ``grace_s``."""
        with suppress(subprocess.TimeoutExpired):
            status = self._process.wait(grace_s)
            lines = [line for line in self._lines() if line.strip()]
            words = lines[-1] if lines else "it said nothing"
            raise self._error(f"the server ended with status {status}: {words}")

    def end(self) -> None:
        """Terminate the process, and kill it when it does not react."""
        self._process.terminate()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _error(self, message: str) -> SpecmambaError:
        """An error with the last lines of the log as a note, for callers that show more than its message."""
        error = SpecmambaError(message)
        error.add_note("\n".join(self._lines()[-_NOTED_LINES:]))
        return error

    def _lines(self) -> list[str]:
        # The server writes through the same file description, so the position in the file must stay as it is.
        size = os.fstat(self._log.fileno()).st_size
        tail = os.pread(self._log.fileno(), _LOG_BYTES, max(0, size - _LOG_BYTES))
        return tail.decode("utf8", "replace").splitlines()


@contextmanager
def started_server(config: EngineConfig, api_key: str | None, timeout_s: float) -> Iterator[tuple[str, StartedServer]]:
    """Start a server with the engine flags of ``config``; it ends with the context, also after an error or a signal.

    Yields:
        Its address and the server.

    Raises:
        SpecmambaError: it cannot start; the message has the last line of its log.
    """
    command = [*SERVE, "--host", "127.0.0.1", "--port", "0", "--shutdown-timeout", "0", *engine_flags(config)]
    with tempfile.TemporaryFile() as log, signals_end_the_context():
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=_environment(config, api_key),
            start_new_session=True,  # Ctrl-C reaches the benchmark only, which then ends the server
        )
        server = StartedServer(process, log)
        try:
            yield server.wait_until_ready(timeout_s), server
        finally:
            server.end()


def engine_flags(config: EngineConfig) -> list[str]:
    """The engine's flags that were set, on the command line, in the environment or in a file, as a command line."""
    flags = []
    for name in EngineConfig.model_fields:
        value = getattr(config, name)
        if name not in config.model_fields_set or value is None:
            continue
        flag = name.replace("_", "-")
        flags.append(f"--{'' if value else 'no-'}{flag}" if isinstance(value, bool) else f"--{flag}={_text(value)}")
    return flags


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _environment(config: EngineConfig, api_key: str | None) -> Mapping[str, str]:
    """This process's environment with the path of this package, and with the key, which a flag would show.

    Variables of flags stay behind: those of the engine are given as flags, others belong to the benchmark.
    It is the operator's key, because the benchmark empties the cache and reads ``/server_info``.
    """
    key = {} if api_key is None else {"SPECMAMBA_API_KEY": secrets.token_hex(), "SPECMAMBA_ADMIN_KEY": api_key}
    flags = {f"SPECMAMBA_{name.upper()}" for name in type(config).model_fields}
    kept = {name: value for name, value in os.environ.items() if name.upper() not in flags}
    return kept | {"PYTHONPATH": python_path()} | key


def python_path() -> str:
    """``PYTHONPATH`` for a child process that imports this package, also from a checkout."""
    paths = [str(Path(specmamba.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(filter(None, paths))


@contextmanager
def signals_end_the_context() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack, as Ctrl-C does, so that the server is ended too."""

    def leave(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # handlers can be set in the main thread only
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGHUP)
    former = [signal.signal(number, leave) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, former, strict=True):
            signal.signal(number, handler)
