"""A program on a terminal of its own, as a person uses it."""

from __future__ import annotations

import errno
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from tests.repository import ROOT


class Terminal:
    """The person's side: what is typed, and what has been shown."""

    def __init__(self, handle: int, process: subprocess.Popen[bytes]) -> None:
        self._handle, self.process = handle, process
        self._shown = b""
        self._seen = 0

    @property
    def shown(self) -> str:
        return self._shown.decode(errors="replace")

    def type(self, text: str) -> None:
        os.write(self._handle, text.encode())

    def wait_for(self, pattern: str, timeout_s: float = 120.0) -> str:
        """Wait until a pattern is shown behind what was waited for before. Returns what was shown up to its end."""
        deadline = time.monotonic() + timeout_s
        while not (found := re.search(pattern.encode(), self._shown[self._seen :])):
            assert time.monotonic() < deadline, f"not shown: {pattern!r} in {self._shown[self._seen :]!r}"
            assert self._read(0.1), f"the program ended: {self._shown[self._seen :]!r}"
        new = self._shown[self._seen : self._seen + found.end()]
        self._seen += found.end()
        return new.decode(errors="replace")

    def interrupt(self, pattern: str, every_s: float = 10.0, times: int = 6) -> str:
        """Press Ctrl-C until a pattern is shown.

        CPython's readline looks for signals only where one interrupts its wait for a key: one that comes just after the
        last key was read waits for the next (``readline_until_enter_or_signal``).
        """
        for _ in range(times - 1):
            self.type("\x03")
            with suppress(AssertionError):
                return self.wait_for(pattern, every_s)
        self.type("\x03")
        return self.wait_for(pattern, every_s)

    def wait_for_end(self, timeout_s: float = 120.0) -> int:
        """Wait for the program's end. Returns its exit status."""
        deadline = time.monotonic() + timeout_s
        while self._read(0.1):
            assert time.monotonic() < deadline, f"the program does not end: {self._shown[self._seen :]!r}"
        return self.process.wait(timeout_s)

    def _read(self, timeout_s: float) -> bool:
        """Take what is shown within a time. Returns False when the program has closed the terminal."""
        if not select.select([self._handle], [], [], timeout_s)[0]:
            return True
        try:
            data = os.read(self._handle, 65536)
        except OSError as error:
            if error.errno != errno.EIO:  # Linux's end of a terminal
                raise
            data = b""
        self._shown += data
        return bool(data)


@contextmanager
def on_terminal(
    *arguments: str, environment: Mapping[str, str], rows: int = 40, columns: int = 100
) -> Iterator[Terminal]:
    """Run ``specmamba`` with these arguments on a terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    settings = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm", "PYTHONUTF8": "1", **environment}
    process = subprocess.Popen(
        [sys.executable, "-m", "specmamba", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=settings,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 -- one system call: Ctrl-C comes from here
    )
    os.close(theirs)
    try:
        yield Terminal(ours, process)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
