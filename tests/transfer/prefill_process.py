"""A prefill server's engine in a process of its own, which stops or kills itself in the middle of a prompt it sends.

    python -m tests.transfer.prefill_process BACKEND SECONDS

Questions and answers are lines of JSON. Libraries write to standard output too, so other lines are left out.
"""

from __future__ import annotations

import itertools
import json
import math
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from specmamba.cache.tiers.codec import encode
from specmamba.cache.tiers.entry import Entry
from specmamba.transfer import carrier as carrier_module
from specmamba.transfer.peer_link import PeerLink
from tests.processes import Lines
from tests.repository import ROOT
from tests.transfer.sides import Side, side

SMALL_WINDOW_BYTES = 50_001  # so that a prompt takes several
ANSWER_TIMEOUT_S = 180.0  # for an engine to start, or a prompt to be run, on a busy machine
PARTS = ("header", "kv", "signature", "state")
Write = Callable[[PeerLink, Any], None]
WRITE, SEND_ENTRY = PeerLink.write, PeerLink.send_entry
FAILING = threading.Lock()  # held while a prompt is sent that gets only as far as is asked for


class PrefillProcess:
    """The process, as a test sees it."""

    def __init__(self, backend: str, timeout_s: float) -> None:
        command = [sys.executable, "-m", "tests.transfer.prefill_process", backend, str(timeout_s)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, cwd=ROOT
        )
        self._lines = Lines(self.process.stdout)
        self.port = int(self._answer()["port"])

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        """Ask, and wait for the answer; TimeoutError where the process is stopped."""
        assert self.process.stdin is not None
        print(json.dumps({"do": do, **fields}), file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        while not (line := self._lines.next(ANSWER_TIMEOUT_S)).startswith("{"):
            pass
        found: dict[str, Any] = json.loads(line)
        return found

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._lines.close()
        if self.process.stdin is not None:
            self.process.stdin.close()


@contextmanager
def prefill_process(backend: str, timeout_s: float = 60.0) -> Iterator[PrefillProcess]:
    own = PrefillProcess(backend, timeout_s)
    try:
        yield own
    finally:
        own.close()


def fail_at(part: str, number: int) -> None:
    """Let the next prompt that is sent get as far as the middle of a part, and send a signal to this process then.

    KV and state that a library carries are cut after the other side was told where they are, so while it reads.
    """

    def send_entry(link: PeerLink, entry: Entry, send_parts: Callable[..., None] | None = None) -> None:
        PeerLink.send_entry = SEND_ENTRY  # type: ignore[method-assign]  # one that follows may start before this ends
        pieces = list(encode(entry))[1:]
        windows = math.ceil(entry.nbytes / carrier_module.WINDOW_BYTES)
        num_writes = 2 + (len(pieces) if send_parts is None else windows)
        at = {"header": 0, "kv": 1, "state": num_writes - 2, "signature": num_writes - 1}[part]
        is_whole = send_parts is not None and part in ("kv", "state")
        with _patched(_failing_write(at, is_whole, number)):
            SEND_ENTRY(link, entry, send_parts)

    with FAILING:  # the one before it may still end, after it was stopped
        PeerLink.send_entry = send_entry  # type: ignore[assignment, method-assign]


def _failing_write(at: int, is_whole: bool, number: int) -> Write:
    counter = itertools.count()

    def write(link: PeerLink, data: Any) -> None:
        if next(counter) != at:
            WRITE(link, data)
            return
        whole = memoryview(data).cast("B")
        middle = len(whole) if is_whole else len(whole) // 2
        WRITE(link, whole[:middle])
        signal.pthread_kill(threading.get_ident(), number)  # this thread gets no further before
        WRITE(link, whole[middle:])

    return write


@contextmanager
def _patched(write: Write) -> Iterator[None]:
    """Replace ``PeerLink.write`` once, until a prompt was sent."""
    with FAILING:
        PeerLink.write = write  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            PeerLink.write = WRITE  # type: ignore[method-assign]


def answer(own: Side, question: dict[str, Any]) -> dict[str, Any]:
    match question["do"]:
        case "prefill":
            own.prefill(question["prompt"], question["room"])
        case "fail":
            fail_at(question["part"], question["number"])
        case "check":
            own.check()
            return {"failures": own.failures(), "num_handoffs": own.stats().num_handoffs}
        case other:
            raise ValueError(other)
    return {}


def main(arguments: Sequence[str]) -> None:
    backend, timeout_s = arguments
    carrier_module.WINDOW_BYTES = SMALL_WINDOW_BYTES
    flags = {"disaggregation_transfer_backend": backend, "disaggregation_timeout": float(timeout_s)}
    with side("prefill", "chain", **flags) as own:
        print(json.dumps({"port": own.port}), flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(own, json.loads(line))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
