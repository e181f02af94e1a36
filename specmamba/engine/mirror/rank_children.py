"""The processes of the other ranks, where rank 0 starts them itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from specmamba.config import EngineConfig
from specmamba.errors import ConfigError
from specmamba.processes.child_process import python_path

END_TIMEOUT_S = 5.0


class RankChildren:
    """Ranks 1 to N - 1. They end when their connection with this process does; signals of a terminal pass them by.

    ``store_file``, in which all ranks find each other, is there until ``close``: threads of NCCL read it at any time.
    """

    def __init__(self, config: EngineConfig, name: str) -> None:
        """Start them; ``config``: of all ranks, ``name``: under which rank 0 listens.

        Raises:
            ConfigError: one cannot be started, or ends at once; none is left then.
        """
        flags = config.model_dump(mode="json", include=set(EngineConfig.model_fields))
        self._size = config.tp_size
        self._folder = tempfile.TemporaryDirectory(prefix="specmamba-ranks-")
        self.store_file = str(Path(self._folder.name, "store"))
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        try:
            for rank in range(1, config.tp_size):
                self._start(rank, json.dumps({"rank": rank, "name": name, "flags": flags}).encode())
        except BaseException:
            self.close(0.0)
            raise

    def _start(self, rank: int, task: bytes) -> None:
        try:
            self._processes[rank] = process = subprocess.Popen(
                [sys.executable, "-P", "-m", "specmamba.engine.mirror.rank_main"],
                stdin=subprocess.PIPE,
                stdout=2,  # standard output belongs to the answers of rank 0
                env={**os.environ, "PYTHONPATH": python_path()},
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(f"--tp-size {self._size}: rank {rank} cannot be started: {error}") from error
        assert process.stdin is not None
        try:
            with process.stdin as stdin:
                stdin.write(task)
        except BrokenPipeError:
            with suppress(subprocess.TimeoutExpired):  # it has closed its input, and ends
                process.wait(END_TIMEOUT_S)
            raise self._ended(rank) from None

    def check(self) -> None:
        """Raise ConfigError where one has ended."""
        for rank, process in self._processes.items():
            if process.poll() is not None:
                raise self._ended(rank)

    def _ended(self, rank: int) -> ConfigError:
        status = self._processes[rank].returncode
        return ConfigError(
            f"--tp-size {self._size}: the process of rank {rank} has ended with status {status} before it was ready"
        )

    def close(self, timeout_s: float = END_TIMEOUT_S) -> None:
        """Wait for their end, and kill those that do not come to it."""
        deadline = time.monotonic() + timeout_s
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.wait()
        self._folder.cleanup()
