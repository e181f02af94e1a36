"""Replay on a CPU: functions are recorded as tapes of native calls and run without Python between them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from typing import TypeVar

import torch

from specmamba.cuda_graphs.arena import Arena
from specmamba.cuda_graphs.replay import Replay
from specmamba.cuda_graphs.step_recorder import NotRecordableError, StepRecorder
from specmamba.kernels.replay import Tape, Threads, is_available

MAX_RECORDS = 512  # each keeps a result; what is dropped is recorded again when it is needed
T = TypeVar("T")
logger = logging.getLogger("specmamba")


class NativeReplay(Replay[T]):
    """Calls a function at its first run, records it at the second, and from then on replays the record.

    The first run makes what is made once, as packed weights. A function that cannot be recorded is called every time.
    All records share one arena: they never run at the same time, and the result of one is read before the next runs.
    """

    has_fixed_shapes = True

    def __init__(self, num_threads: int | None = None) -> None:
        """``num_threads``: of replays; None: as many as torch's."""
        self._num_threads = num_threads or torch.get_num_threads()
        self._threads = Threads(self._num_threads)
        self._arena = Arena()
        self._records: dict[Hashable, tuple[Tape, T] | None] = {}
        self._seen: set[Hashable] = set()

    @staticmethod
    def is_available() -> bool:
        """Whether native code runs on this machine."""
        return is_available()

    @property
    def tapes(self) -> dict[Hashable, Tape]:
        """The records so far, by key."""
        return {key: record[0] for key, record in self._records.items() if record is not None}

    def run(self, key: Hashable, function: Callable[[], T], clear: Callable[[], None], fill: Callable[[], None]) -> T:
        fill()
        record = self._records.get(key)
        if record is None:
            self.num_unreplayed += key not in self._records  # what cannot be recorded takes as long every time
            return self._run_directly(key, function)
        tape, result = record
        began = time.perf_counter()
        tape.run(self._threads)
        self.seconds += time.perf_counter() - began
        return result

    def close(self) -> None:
        self._threads.stop()
        self._records.clear()

    def _run_directly(self, key: Hashable, function: Callable[[], T]) -> T:
        if key in self._records:  # it cannot be recorded
            return function()
        if key in self._seen:
            while len(self._records) >= MAX_RECORDS:
                oldest = next(iter(self._records))
                del self._records[oldest]
                self._seen.discard(oldest)
            return self._record(key, function)
        self._seen.add(key)
        return function()

    def _record(self, key: Hashable, function: Callable[[], T]) -> T:
        before = torch.get_num_threads()
        torch.set_num_threads(self._num_threads)  # native calls are told it, and their record keeps it
        try:
            record: tuple[Tape, T] = StepRecorder(self._arena).record(function)
        except NotRecordableError as error:
            logger.warning("some steps run operator by operator: %s", error)
            self._records[key] = None
            return function()  # what it has written already, it writes again
        finally:
            torch.set_num_threads(before)
        self._records[key] = record
        return record[1]
