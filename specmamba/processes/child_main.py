"""The child's side of ``ChildProcess``: the pipes to its parent, its end together with the parent, its memory."""

from __future__ import annotations

import ctypes
import json
import os
import queue
import resource
import signal
import sys
import threading
from typing import Any

_PR_SET_PDEATHSIG = 1


class ParentPipe:
    """Requests of the parent and answers to it, over standard input and output. There is one in a process.

    The process ends when its input ends, also during the work on a request, and when its parent's thread ends.
    """

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        self._output = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)  # other output must not mix with the answers
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._receive, daemon=True).start()

    def read(self) -> bytes:
        """Wait for the next line of the input."""
        return self._lines.get()

    def send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        """Send an answer: the header, which gets the "size" of the payload, and the payload."""
        if payload:
            header = {**header, "size": len(payload)}
        self._output.write(json.dumps(header).encode() + b"\n" + payload)
        self._output.flush()

    def _receive(self) -> None:
        try:
            for line in sys.stdin.buffer:
                self._lines.put(line)
        finally:
            os._exit(0)  # at once: the result of running work could not be read any more


def limit_memory(more: int) -> None:
    """Limit the memory of this process to ``more`` bytes beyond its present use, and write no core files."""
    with open("/proc/self/status", encoding="ascii") as status:
        used = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + more, used + more))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
