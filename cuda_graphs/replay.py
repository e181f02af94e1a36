"""Replay of functions on fixed memory: as CUDA graphs on a GPU, by plain calls on any device."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from specmamba.cuda_graphs.host_reads import DirectRead, HostRead, PinnedReads
from specmamba.cuda_graphs.step_buffers import at_once

WARM_UPS = 2  # runs before a capture: kernels are compiled, libraries take their workspaces
T = TypeVar("T")
logger = logging.getLogger("specmamba")


@dataclass(frozen=True, slots=True)
class CaptureCost:
    """Time and memory of one capture."""

    seconds: float
    num_bytes: int  # that the pool of all graphs grew by


@dataclass(frozen=True, slots=True)
class NextPart:
    """A function that goes on from the result of another one, in the same run."""

    key: Hashable  # tells functions apart that follow the same function
    function: Callable[[Any], Any]


class Replay(ABC, Generic[T]):
    """Runs functions by key.

    A function reads its inputs from fixed buffers, and returns tensors that the next run of the same key overwrites.
    A run may have a second part, which reads what the first one returns: many second parts can follow one first part,
    which is captured once for all of them.
    """

    has_fixed_shapes: bool  # every run of a key has the shapes of its first run, for all inputs
    is_deferred = False  # a run may return before its result is there, and the next one may be given to the device
    seconds = 0.0  # in replays of native calls, since the start
    num_unreplayed = 0  # parts that were called or captured since the start, but for those that cannot be captured

    @abstractmethod
    def run(
        self,
        key: Hashable,
        function: Callable[[], Any],
        clear: Callable[[], object],
        fill: Callable[[], object] | None,
        then: NextPart | None = None,
    ) -> T:
        """Run a function on inputs.

        Args:
            key: tells functions apart; one key always stands for the same function.
            function: depends on no host values that change between runs.
            clear: makes all inputs padding; results of a run on padding alone are never read.
            fill: writes the inputs; None: the last run has left them, and need not have been read.
            then: goes on from the function's result; None: nothing does.

        Returns:
            The result of the last part.
        """

    def read(self, tensors: Sequence[Tensor]) -> HostRead:
        """Begin to read tensors of the result of the newest run."""
        return DirectRead(tensors)

    def may_follow(self, key: Hashable, then: NextPart) -> bool:
        """Whether a run of these parts needs no capture, so that it can be launched behind a run that was not read."""
        return False

    def queue(self, work: Callable[[], object]) -> None:
        """Change fixed buffers on the device, behind all runs so far and before all later ones."""
        at_once(work)

    def serve(self, is_serving: bool = True) -> None:
        """Say whether requests wait for a run from now on: then none captures more than one part."""

    def close(self) -> None:
        """Give back what is not memory; nothing runs after that."""


class EagerReplay(Replay[T]):
    """Calls the function at every run.

    Inputs and padding are those of a graph, so that tests without a GPU find errors in them.
    """

    def __init__(self, has_fixed_shapes: bool = False) -> None:
        self.has_fixed_shapes = has_fixed_shapes

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
        result: T = function() if then is None else then.function(function())
        return result


class GraphReplay(Replay[T]):
    """Captures a function at its first run, and from then on replays it with one launch for each of its parts.

    Once requests are served (``serve``), a part is called at its first runs, which compile its kernels and are of use,
    and captured after so many; a run captures one part at the most. So a kind of step that is seen for the first time
    costs its requests and others some steps that run operator by operator, and one capture at a time.

    All graphs share one memory pool: they never run at the same time, and the result of one is copied (``read``) before
    the next runs. A function whose capture fails is called at every run; where memory ran out before requests are
    served, the error is the caller's.
    """

    has_fixed_shapes = True
    is_deferred = True

    def __init__(self, device: torch.device, planned_bytes: int) -> None:
        """Make a replay without graphs.

        Args:
            device: a CUDA device.
            planned_bytes: memory that the graphs may take without a warning.
        """
        self._reads: PinnedReads | None = None  # made when the first result is read
        self._device, self._side = device, torch.cuda.Stream(device)
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any] | None] = {}  # None: it could not be captured
        self._num_calls = Counter[Hashable]()  # of parts that are not captured yet, while requests are served
        self._is_serving = False
        self._pool: Any = None  # torch gives no type to the handle of a pool
        self.costs: dict[Hashable, CaptureCost] = {}
        self.planned_bytes = planned_bytes

    def run(
        self,
        key: Hashable,
        function: Callable[[], Any],
        clear: Callable[[], object],
        fill: Callable[[], object] | None,
        then: NextPart | None = None,
    ) -> T:
        num_captured = len(self._graphs)
        if self._is_due(key):
            clear()
            self._add(key, function)
        if then is not None and not (key in self._graphs and self._graphs[key] is None):
            is_free = key in self._graphs and not (self._is_serving and len(self._graphs) > num_captured)
            if self._is_due((key, then.key)) and is_free:
                clear()
                self._add((key, then.key), partial(then.function, self._launch(key, function)))
        if fill is not None:
            fill()
        result: T = self._launch(key, function)
        if then is not None:
            result = self._launch((key, then.key), partial(then.function, result))
        return result

    def read(self, tensors: Sequence[Tensor]) -> HostRead:
        if not tensors[0].is_cuda:
            return super().read(tensors)
        self._reads = self._reads or PinnedReads()
        return self._reads.begin(tensors)

    def may_follow(self, key: Hashable, then: NextPart) -> bool:
        return self._graphs.get(key) is not None and self._graphs.get((key, then.key)) is not None

    def serve(self, is_serving: bool = True) -> None:
        self._is_serving = is_serving

    def _is_due(self, key: Hashable) -> bool:
        """Whether this run may capture a part; counts it where the part is called instead."""
        if key in self._graphs:
            return False
        if not self._is_serving:
            return True
        self._num_calls[key] += 1
        self.num_unreplayed += 1
        return self._num_calls[key] > WARM_UPS

    def _add(self, key: Hashable, function: Callable[[], Any]) -> None:
        self._graphs[key] = self._try_to_capture(key, function)
        if not self._num_calls.pop(key, 0):
            self.num_unreplayed += 1

    def _launch(self, key: Hashable, function: Callable[[], Any]) -> Any:
        """Replay the graph of this key; call the function where there is none."""
        captured = self._graphs.get(key)
        if captured is None:
            return function()
        graph, result = captured
        graph.replay()
        return result

    def _try_to_capture(self, key: Hashable, function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any] | None:
        """A graph and its result, or None and a warning.

        Raises:
            torch.cuda.OutOfMemoryError: there is no memory for it, and no request is served yet.
        """
        try:
            return self._capture(key, function)
        except RuntimeError as error:  # of CUDA, or of an operator that cannot be captured
            if isinstance(error, torch.cuda.OutOfMemoryError) and not self._is_serving:
                raise
            reason = str(error).partition("\n")[0]
            logger.warning("a step could not be captured, and runs operator by operator: %s", reason)
            return None

    def _capture(self, key: Hashable, function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        start = time.perf_counter()
        if not self._is_serving:  # else it was called before
            self._warm_up(function)
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # a capture does this too; done before, so that only its own memory is counted
        before = torch.cuda.memory_reserved(self._device)
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        try:
            # other threads of a server may use the device while this one captures
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = function()
        except RuntimeError:
            self._leave_capture(current)
            raise
        grown = torch.cuda.memory_reserved(self._device) - before
        self.costs[key] = CaptureCost(time.perf_counter() - start, grown)
        self._compare_with_plan(grown)
        return graph, result

    @property
    def pool_bytes(self) -> int:
        """Memory that all graphs have taken."""
        return sum(cost.num_bytes for cost in self.costs.values())

    def _compare_with_plan(self, grown: int) -> None:
        """Warn where the newest graph has taken more memory than there was left of the plan."""
        taken, planned = self.pool_bytes, self.planned_bytes
        if taken > planned >= taken - grown:
            text = "captured steps take %d MiB, and the memory plan has %d MiB for them: less is left for other steps"
            logger.warning(text, taken >> 20, planned >> 20)

    def _warm_up(self, function: Callable[[], Any]) -> None:
        """Call a function on a stream of its own. What comes next waits for it, also where it fails in the middle."""
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        try:
            with torch.cuda.stream(self._side):
                for _ in range(WARM_UPS):
                    function()
        finally:
            current.wait_stream(self._side)

    def _leave_capture(self, current: torch.cuda.Stream) -> None:
        """Undo what PyTorch leaves where a capture cannot be ended.

        Its stream would stay the current one, so that later work does not wait for earlier work; and its pool would
        stay in use, so that the allocator can free no cached memory.
        """
        torch.cuda.set_stream(current)
        with suppress(RuntimeError):  # it was ended
            torch._C._cuda_endAllocateToPool(current.device_index, self._pool)
