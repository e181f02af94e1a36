"""A tape: calls in order, native ones and a few of Python's, over memory that stays."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_int, c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from weakref import finalize

from specmamba.kernels.native import library
from specmamba.kernels.native.calls import NativeFunction

SOURCE = Path(__file__).parent / "native.cpp"
_REASONS = "an index is outside of what it indexes, or another rank has ended"


class NativeCall(NamedTuple):
    """One call of a native function."""

    function: NativeFunction
    words: Sequence[int]
    operands: tuple[Any, ...]  # what the words point at, as far as it is known


class PythonCall(NamedTuple):
    """One operator that only PyTorch has."""

    name: str
    run: Callable[[], object]


class _Entry(ctypes.Structure):
    _fields_ = [("call", c_void_p), ("words", POINTER(c_uint64))]


class Threads:
    """The threads of replays: the calling one, and workers that sleep between steps."""

    def __init__(self, count: int) -> None:
        """``count``: the calling thread included."""
        native = library.required(code())
        self._handle = native.replay_start_threads(count)
        self._process = os.getpid()
        stop: Any = native.replay_stop_threads
        self._stop = finalize(self, _stop_in, self._process, stop.unrecorded, self._handle)
        self._stop.atexit = False  # a process that ends needs no wait for them

    @property
    def handle(self) -> int:
        """The native object.

        Raises:
            RuntimeError: this process is a fork of the one that started the threads, or they were stopped.
        """
        if os.getpid() != self._process:
            raise RuntimeError("an engine does not survive a fork: its threads stay behind. Make it in the new process")
        if not self._stop.alive:
            raise RuntimeError("the threads of captured steps have been stopped")
        return int(self._handle)

    def stop(self) -> None:
        """End the workers. In a fork, which has none, nothing is done."""
        self._stop()


def _stop_in(process: int, stop: Callable[[int], None], handle: int) -> None:
    """End the threads of a process. A fork has none: to wait for them would never end."""
    if os.getpid() == process:
        stop(handle)


class Tape:
    """Calls to be made again and again, in order."""

    def __init__(self, calls: Sequence[NativeCall | PythonCall], kept: Sequence[Any]) -> None:
        """``calls``: in order; ``kept``: memory that they use and that has no other owner."""
        self._calls, self._kept = [*calls], [*kept]
        self._run = library.required(code()).replay_run
        words = [call.words if isinstance(call, NativeCall) else () for call in self._calls]
        self._words = [(c_uint64 * max(1, len(of_call)))(*of_call) for of_call in words]
        self._entries = (_Entry * max(1, len(self._calls)))()
        for entry, call, of_call in zip(self._entries, self._calls, self._words, strict=False):
            if isinstance(call, NativeCall):
                entry.call, entry.words = call.function.entry, of_call
        self._segments = self._cut()

    @property
    def python_calls(self) -> list[str]:
        """The names of operators that PyTorch runs, in order."""
        return [call.name for call in self._calls if isinstance(call, PythonCall)]

    def __len__(self) -> int:
        return len(self._calls)

    def run(self, threads: Threads) -> None:
        """Make all calls.

        Raises:
            RuntimeError: a call failed: an index is outside of what it indexes, or another rank has ended.
        """
        handle = threads.handle
        for first, end, python in self._segments:
            if python is not None:
                python()
                continue
            reached = self._run(self._entries, first, end, handle)
            if reached != end:
                failed = self._calls[reached]
                assert isinstance(failed, NativeCall)
                raise RuntimeError(f"{failed.function.name} of a captured step failed: {_REASONS}")

    def _cut(self) -> list[tuple[int, int, Callable[[], object] | None]]:
        """Runs of native calls, first and end, and Python's calls between them."""
        segments: list[tuple[int, int, Callable[[], object] | None]] = []
        first = 0
        for place, call in enumerate([*self._calls, None]):
            if call is None or isinstance(call, PythonCall):
                if first < place:
                    segments.append((first, place, None))
                if call is not None:
                    segments.append((place, place + 1, call.run))
                first = place + 1
        return segments


def is_available() -> bool:
    """Whether native code runs here."""
    return code() is not None


@cache
def code() -> ctypes.CDLL | None:
    """The library of tapes, or None where native code cannot run."""
    structure = [c_void_p]
    signatures: dict[str, list[Any]] = {
        "replay_start_threads": [c_int],
        "replay_stop_threads": [c_void_p],
        "replay_run": [c_void_p, c_int64, c_int64, c_void_p],
        "replay_map": structure,
        "replay_move": structure,
        "replay_reduce": structure,
        "replay_sort": structure,
    }
    return library.load_functions(SOURCE, signatures, {"replay_start_threads": c_void_p, "replay_run": c_int64})
