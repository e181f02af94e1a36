"""A replay on a CPU that returns before its steps are done, as one on a GPU does."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specmamba.cuda_graphs import EagerReplay, NextPart
from specmamba.engine.captured.ending_rows import EndingRows
from specmamba.engine.captured.step_inputs import StepInputs
from specmamba.engine.engine import Engine
from specmamba.verify.result import StepOutput


class DeferredRead:
    """A read of results that a thread is still to compute."""

    def __init__(self, step: Future[None], copy: Future[list[list[Any]]]) -> None:
        self._step, self._copy = step, copy

    def wait(self) -> list[list[Any]]:
        self._step.result()
        return self._copy.result()


class DeferredReplay(EagerReplay[StepOutput]):
    """Runs whole steps on a thread, after a delay; parts of steps, and those that the host goes on with, run at once.

    The thread does what it is given in order, as a stream does: steps, copies of their results, writes of inputs. The
    first step of a kind is run at once, as a capture is. Later ones write to the memory of its result.
    """

    is_deferred = True

    def __init__(self, delay: Callable[[], float]) -> None:
        """``delay``: seconds between the launch of a step and its first operation, asked on the thread."""
        super().__init__(has_fixed_shapes=True)
        self.num_deferred = 0  # steps so far
        self.num_chained = 0  # of them, those launched before the one before them was read
        self._delay = delay
        self._results: dict[Hashable, Any] = {}
        self._newest: Future[None] = Future()
        self._newest.set_result(None)
        self._last: Future[Any] = self._newest  # that the thread was given
        self._copies: dict[int, Future[Any]] = {}  # the newest to each piece of memory
        self._thread = ThreadPoolExecutor(1, "device")

    def run(
        self,
        key: Hashable,
        function: Callable[[], Any],
        clear: Callable[[], object],
        fill: Callable[[], object] | None,
        then: NextPart | None = None,
    ) -> StepOutput:
        assert isinstance(key, tuple)
        whole = None if then is None or key[1][0] == "given" else (key, then.key)  # drafters observe those behind them
        if fill is not None:
            fill()
        if then is None or whole not in self._results:
            assert fill is not None
            self.drain()
            result = super().run(key, function, clear, None, then)
            if whole is not None:
                self._results[whole] = result = _each(result, Tensor.clone)
            return result
        self.num_chained += fill is None
        result, second = self._results[whole], then.function
        self._last = self._newest = self._thread.submit(self._work, lambda: second(function()), result)
        self.num_deferred += 1
        return result

    def read(self, tensors: Sequence[Tensor]) -> DeferredRead:
        self._last = copy = self._thread.submit(lambda: [tensor.tolist() for tensor in tensors])
        return DeferredRead(self._newest, copy)

    def may_follow(self, key: Hashable, then: NextPart) -> bool:
        return (key, then.key) in self._results

    def queue(self, work: Callable[[], object]) -> None:
        self._last = self._thread.submit(torch.inference_mode()(work))
        if isinstance(work, partial):  # a copy of one of two pieces of memory: the host writes the other one next
            self._copies.setdefault(id(work.args[0]), self._last).exception()
            self._copies[id(work.args[0])] = self._last

    def drain(self) -> None:
        """Wait for all that the thread was given."""
        self._last.exception()

    def close(self) -> None:
        self._thread.shutdown()

    @torch.inference_mode()
    def _work(self, step: Callable[[], Any], result: Any) -> None:
        time.sleep(self._delay())
        _write(step(), result)


class InOrder(TorchDispatchMode):
    """Does every operator of the host's thread behind what the device's thread was given before, as one stream does.

    Only the results are in order: the host waits, where it would go on beside a GPU. What the host writes without an
    operator, as numbers that are to be copied, is written at once.
    """

    def __init__(self, replay: DeferredReplay) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._replay = replay

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self._replay.drain()
        return func(*args, **(kwargs or {}))


def _each(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same value with another tensor in the place of each one in it."""
    if isinstance(value, Tensor):
        return function(value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _each(getattr(value, f.name), function) for f in fields(value)})
    return value


def _write(value: Any, to: Any) -> None:
    """Copy the tensors in a value to those in another one."""
    if isinstance(value, Tensor):
        to.copy_(value)
    elif is_dataclass(value):
        for field in fields(value):
            _write(getattr(value, field.name), getattr(to, field.name))


def random_delays(seed: int, longest: float = 0.004) -> Callable[[], float]:
    """Delays that are often none, and sometimes as long as a step."""
    generator = random.Random(seed)
    return lambda: generator.choice((0.0, 0.0, longest / 4, longest))


@contextmanager
def deferred(engine: Engine, delay: Callable[[], float]) -> Iterator[DeferredReplay]:
    """Let an engine whose steps are captured launch them, and read them later."""
    graphs = engine.runner.graph_runner
    assert graphs is not None
    before, inputs = graphs.replay, graphs.inputs
    graphs.replay = replay = DeferredReplay(delay)
    max_nodes, num_rows = inputs.forced_output_ids.shape[1], graphs.buckets[-1]
    graphs.inputs = StepInputs(num_rows, max_nodes, torch.device("cpu"), is_mirrored=True, queue=replay.queue)
    graphs.inputs.trees = inputs.trees  # a sizer has them, too
    runner, table = engine.runner, engine.pools.table
    ending_rows, on_device = runner.ending_rows, table._on_device
    runner.ending_rows = EndingRows(table.num_rows, torch.device("cpu"), is_mirrored=True, queue=replay.queue)
    table._is_mirrored, table._on_device = True, on_device.clone()
    try:
        with InOrder(replay):
            yield replay
    finally:
        replay.close()
        table._is_mirrored, table._on_device = False, on_device
        runner.ending_rows = ending_rows
        graphs.replay, graphs.inputs = before, inputs
