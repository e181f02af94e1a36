"""Replay on a CPU: functions are recorded as tapes of native calls and run without Python between them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from specmamba.cuda_graphs.arena import Arena
from specmamba.cuda_graphs.replay import NextPart, Replay
from specmamba.cuda_graphs.step_recorder import NotRecordableError, StepRecorder
from specmamba.kernels.replay import Tape, Threads, is_available

MAX_RECORDS = 512  # each keeps a result; what is dropped is recorded again when it is needed
T = TypeVar("T")
logger = logging.getLogger("specmamba")


@dataclass(frozen=True, slots=True)
class _Record:
    """A tape, and the result whose memory it writes."""

    tape: Tape
    result: Any
    given: object = None  # the result of the part before it, whose memory it reads


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
        self._records: dict[Hashable, _Record | None] = {}  # None: it cannot be recorded
        self._seen: set[Hashable] = set()

    @staticmethod
    def is_available() -> bool:
        """Whether native code runs on this machine."""
        return is_available()

    @property
    def tapes(self) -> dict[Hashable, Tape]:
        """The records so far, by key."""
        return {key: record.tape for key, record in self._records.items() if record is not None}

    def run(
        self,
        key: Hashable,
        function: Callable[[], Any],
        clear: Callable[[], object],
        fill: Callable[[], object] | None,
        then: NextPart | None = None,
    ) -> T:
        if fill is not None:
            fill()
        result: T
        given, is_kept = self._run(key, function)
        if then is None:
            result = given
        elif is_kept:
            result, _ = self._run((key, then.key), partial(then.function, given), given)
        else:
            self._seen.add((key, then.key))
            result = then.function(given)
        return result

    def _run(self, key: Hashable, function: Callable[[], Any], given: object = None) -> tuple[Any, bool]:
        """Run one part, which reads ``given``; returns its result, and whether later runs return the same object."""
        record = self._records.get(key)
        if record is not None and record.given is not given:  # the part before it was recorded anew
            del self._records[key]
            record = None
        if record is None:
            self.num_unreplayed += key not in self._records  # what cannot be recorded takes as long every time
            return self._run_directly(key, function, given)
        began = time.perf_counter()
        record.tape.run(self._threads)
        self.seconds += time.perf_counter() - began
        return record.result, True

    def close(self) -> None:
        self._threads.stop()
        self._records.clear()

    def _run_directly(self, key: Hashable, function: Callable[[], Any], given: object) -> tuple[Any, bool]:
        if key in self._records:  # it cannot be recorded
            return function(), False
        if key in self._seen:
            while len(self._records) >= MAX_RECORDS:
                oldest = next(iter(self._records))
                del self._records[oldest]
                self._seen.discard(oldest)
            return self._record(key, function, given)
        self._seen.add(key)
        return function(), False

    def _record(self, key: Hashable, function: Callable[[], Any], given: object) -> tuple[Any, bool]:
        before = torch.get_num_threads()
        torch.set_num_threads(self._num_threads)  # native calls are told it, and their record keeps it
        try:
            tape, result = StepRecorder(self._arena).record(function)
        except NotRecordableError as error:
            logger.warning("some steps run operator by operator: %s", error)
            self._records[key] = None
            return function(), False  # what it has written already, it writes again
        finally:
            torch.set_num_threads(before)
        self._records[key] = _Record(tape, result, given)
        return result, True
