"""Buckets, inputs that stay, and the watch that tells what could not be captured."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from specmamba.cuda_graphs import Columns, EagerReplay, GraphReplay, NextPart, StepWatch, bucket_for, bucket_sizes

CPU = torch.device("cpu")


class TestBuckets:
    def test_the_largest_is_what_was_asked_for(self) -> None:
        for largest in (*range(1, 300), 511, 512, 513, 1000, 4095, 4096):
            buckets = bucket_sizes(largest)
            assert buckets[-1] == largest
            assert list(buckets) == sorted(set(buckets))

    def test_a_batch_gets_the_smallest_that_holds_it(self) -> None:
        for largest in (1, 2, 3, 5, 8, 31, 32, 33, 100, 255, 256, 1024):
            buckets = bucket_sizes(largest)
            for size in range(1, largest + 2):
                bucket = bucket_for(size, buckets)
                assert bucket == min((b for b in buckets if b >= size), default=None)
                if bucket is not None and size > 4:  # not much of it is padding
                    assert bucket - size < max(4, size * 0.8)

    def test_sizes(self) -> None:
        assert bucket_sizes(1) == (1,)
        assert bucket_sizes(6) == (1, 2, 4, 6)
        assert bucket_sizes(33) == (1, 2, 4, 8, 16, 24, 32, 33)
        assert bucket_for(5, (1, 2, 4)) is None


class TestColumns:
    def columns(self, dtype: torch.dtype = torch.int64) -> Columns:
        return Columns({"row": 0, "num_pending_tokens": 1}, 4, dtype, CPU)

    def test_what_is_not_written_is_padding(self) -> None:
        columns = self.columns()
        row, num_pending_tokens = columns.read("row", 3), columns.read("num_pending_tokens", 4)
        assert (row.tolist(), num_pending_tokens.tolist()) == ([0, 0, 0], [1, 1, 1, 1])
        columns.write({"row": [7, 8], "num_pending_tokens": [2]})
        assert (row.tolist(), num_pending_tokens.tolist()) == ([7, 8, 0], [2, 1, 1, 1])
        columns.write({"row": [9]})
        assert (row.tolist(), num_pending_tokens.tolist()) == ([9, 0, 0], [1, 1, 1, 1])

    def test_integers_are_exact(self) -> None:
        columns = self.columns()
        columns.write({"row": [2**63 - 1, -(2**63)]})
        assert columns.read("row", 2).tolist() == [2**63 - 1, -(2**63)]

    def test_unknown_columns_are_refused(self) -> None:
        with pytest.raises(KeyError, match="slot"):
            self.columns().write({"slot": [1]})


class TestWatch:
    def trace(self, function: Callable[[], Any], **stays: Tensor) -> Any:
        with StepWatch(stays) as watch:
            function()
        return watch.trace

    @pytest.mark.parametrize(
        "reads",
        [
            lambda x: x.sum().item(),
            lambda x: x.tolist(),
            lambda x: x.numpy(),
            lambda x: x.cpu(),
            lambda x: bool((x > 0).any()),
            lambda x: x.nonzero(),
            lambda x: x[x > 0],
            lambda x: x.masked_select(x > 0),
            lambda x: x.unique(),
            lambda x: torch.equal(x, x),
            lambda x: x.index_put_((x > 0,), torch.zeros(())),
            lambda x: torch.arange(3).repeat_interleave(x.long()),
        ],
    )
    def test_what_the_host_reads(self, reads: Callable[[Tensor], Any]) -> None:
        x = torch.tensor([1.0, 2.0, 0.0])
        assert self.trace(lambda: reads(x)).host_reads

    def test_what_the_host_writes(self) -> None:
        assert self.trace(lambda: torch.tensor([1, 2])).host_writes
        assert self.trace(lambda: torch.zeros(3)).host_writes == []

    def test_what_can_be_captured(self) -> None:
        x, index = torch.randn(4, 3), torch.tensor([1, 0])
        trace = self.trace(lambda: (x[index] @ x.t()).masked_fill(x[index] @ x.t() > 0, 0).argmax(-1).sort())
        assert not trace.host_reads
        assert not trace.host_writes

    def test_two_runs_are_told_apart_by_all_but_numbers_in_tensors(self) -> None:
        x, y = torch.randn(4), torch.randn(4)
        assert self.trace(lambda: x * 2) == self.trace(lambda: y * 2)
        for other in (lambda: x * 3, lambda: x[:3] * 2, lambda: x + 2, lambda: x.double() * 2, lambda: (x * 2) - x):
            assert self.trace(lambda: x * 2) != self.trace(other)
        assert self.trace(lambda: x * 2, x=x, y=y) != self.trace(lambda: y * 2, x=x, y=y)
        assert self.trace(lambda: x[:2] * 2, x=x) != self.trace(lambda: x[1:3] * 2, x=x)


def test_an_eager_replay_fills_and_runs_every_time() -> None:
    done: list[str] = []
    replay: EagerReplay[int] = EagerReplay()
    for _ in range(2):
        result = replay.run("key", lambda: len(done), lambda: done.append("clear"), lambda: done.append("fill"))
    assert (result, done) == (2, ["fill", "fill"])


def test_a_capture_without_memory_is_the_callers_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start it is a refusal that says which flag to lower."""

    def fail(self: GraphReplay[int], key: str, function: Callable[[], int]) -> None:
        raise torch.cuda.OutOfMemoryError("no memory")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(GraphReplay, "_capture", fail)
    replay: GraphReplay[int] = GraphReplay(torch.device("cuda"), 0)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        replay.run("key", lambda: 1, lambda: None, lambda: None)


def test_second_parts_share_a_captured_first_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second part is captured on padding, behind a run of the first part on padding; then both are replayed."""
    captured: list[Any] = []
    x, seen = torch.zeros(2), []

    class FakeGraph:
        def __init__(self, function: Callable[[], Tensor]) -> None:
            self.function, self.result = function, function()

        def replay(self) -> None:
            self.result.copy_(self.function())

    def capture(self: GraphReplay[Tensor], key: Any, function: Callable[[], Tensor]) -> tuple[FakeGraph, Tensor]:
        captured.append(key)
        seen.append(x.tolist())
        graph = FakeGraph(function)
        return graph, graph.result

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(GraphReplay, "_capture", capture)
    replay: GraphReplay[Tensor] = GraphReplay(torch.device("cuda"), 0)
    for number, added in ((1, 5), (2, 5), (3, 7), (4, 5), (5, 7)):
        then = NextPart(added, partial(torch.add, torch.tensor(added)))
        got = replay.run("first", lambda: x * 2, x.zero_, partial(x.fill_, number), then)
        assert got.tolist() == [2 * number + added] * 2
    assert captured == ["first", ("first", 5), ("first", 7)]
    assert seen == [[0, 0]] * 3


class FakeGPU:
    """Stands for what ``GraphReplay`` asks of torch.cuda; notes what is done, and on which stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.current = "main"
        self.ends = True  # captures can be ended
        self.memory = True  # there is memory for a capture
        self.reserved = 0  # bytes
        self.grows = 0  # by a capture
        gpu = self

        class Stream:
            device_index = 3

            def __init__(self, name: object) -> None:
                self.name = str(name)

            def wait_stream(self, other: Stream) -> None:
                gpu.done.append(f"{self.name} waits for {other.name}")

        class Graph:
            function: Callable[[], object]

            def replay(self) -> None:
                gpu.done.append("replay")

        @contextmanager
        def on(stream: Stream) -> Iterator[None]:
            before, gpu.current = gpu.current, stream.name
            try:
                yield
            finally:
                gpu.current = before

        @contextmanager
        def capture(graph: Graph, pool: object, capture_error_mode: str) -> Iterator[None]:
            """As PyTorch's, which does not leave its stream where it cannot end the capture."""
            assert (pool, capture_error_mode) == ("pool", "thread_local")
            before, gpu.current = gpu.current, "capture"
            gpu.done.append("capture")
            if not gpu.memory:
                gpu.current = before
                raise torch.cuda.OutOfMemoryError("no memory")
            yield
            gpu.reserved += gpu.grows
            if not gpu.ends:
                raise RuntimeError("cannot be ended")
            gpu.current = before

        def set_stream(stream: Stream) -> None:
            gpu.current = stream.name

        def end_pool(device: int, pool: object) -> None:
            assert (device, pool) == (3, "pool")
            gpu.done.append("end of pool")
            if gpu.ends:
                raise RuntimeError("not recording")

        for name, value in {
            "Stream": lambda device: Stream("side"),
            "CUDAGraph": Graph,
            "current_stream": lambda device: Stream(gpu.current),
            "stream": on,
            "graph": capture,
            "set_stream": set_stream,
            "graph_pool_handle": lambda: "pool",
            "synchronize": lambda device: None,
            "empty_cache": lambda: None,
            "memory_reserved": lambda device: gpu.reserved,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end_pool)

    def call(self) -> str:
        """A function that is captured."""
        self.done.append(f"call on {self.current}")
        return "result"


class TestCaptures:
    """On a stand-in for a GPU: what is called, captured and replayed, on which stream, and what a failure leaves."""

    def run(self, replay: GraphReplay[str], gpu: FakeGPU, key: str = "key") -> list[str]:
        gpu.done.clear()
        found = replay.run(key, gpu.call, lambda: gpu.done.append("clear"), lambda: gpu.done.append("fill"))
        assert found == "result"
        return list(gpu.done)

    def test_are_made_at_the_first_run_before_requests_are_served(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gpu = FakeGPU(monkeypatch)
        replay: GraphReplay[str] = GraphReplay(torch.device("cuda"), 0)
        warm_up = ["side waits for main", "call on side", "call on side", "main waits for side"]
        assert self.run(replay, gpu) == ["clear", *warm_up, "capture", "call on capture", "fill", "replay"]
        assert self.run(replay, gpu) == ["fill", "replay"]
        assert (gpu.current, replay.num_unreplayed) == ("main", 1)

    def test_take_no_more_than_a_step_while_requests_are_served(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gpu = FakeGPU(monkeypatch)
        replay: GraphReplay[str] = GraphReplay(torch.device("cuda"), 0)
        replay.serve()
        for _ in range(2):
            assert self.run(replay, gpu) == ["fill", "call on main"]
        assert self.run(replay, gpu) == ["clear", "capture", "call on capture", "fill", "replay"]
        assert self.run(replay, gpu) == ["fill", "replay"]
        assert replay.num_unreplayed == 3

    def test_are_of_one_part_a_run_while_requests_are_served(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gpu = FakeGPU(monkeypatch)
        replay: GraphReplay[str] = GraphReplay(torch.device("cuda"), 0)
        replay.serve()
        then, counts = NextPart("decide", lambda given: gpu.call()), list[tuple[int, ...]]()
        for _ in range(5):
            gpu.done.clear()
            replay.run("key", gpu.call, lambda: None, lambda: None, then)
            assert replay.may_follow("key", then) == (len(counts) >= 3)
            counts.append(tuple(gpu.done.count(what) for what in ("call on main", "capture", "replay")))
        # the second part is called behind the captured first one, then captured behind it, too
        assert counts == [(2, 0, 0), (2, 0, 0), (1, 1, 1), (0, 1, 3), (0, 0, 2)]

    @pytest.mark.parametrize("serves", [False, True])
    def test_that_cannot_be_ended_leave_the_stream_and_the_pool(
        self, serves: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gpu = FakeGPU(monkeypatch)
        replay: GraphReplay[str] = GraphReplay(torch.device("cuda"), 0)
        if serves:
            replay.serve()
        gpu.ends = False
        for number in range(3):
            assert self.run(replay, gpu)[-2:] == ["fill", "call on main"]
            assert ("end of pool" in gpu.done) == (number == 2 * serves)
        gpu.ends = True
        assert self.run(replay, gpu, "other")[-1] == ("call on main" if serves else "replay")
        assert gpu.current == "main"

    @pytest.mark.parametrize("serves", [False, True])
    def test_that_take_more_than_planned_warn_once(
        self, serves: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        gpu, warnings = FakeGPU(monkeypatch), list[int]()
        replay: GraphReplay[str] = GraphReplay(torch.device("cuda"), planned_bytes=100 << 20)
        replay.serve(serves)
        for key, grows in (("a", 60), ("b", 40), ("c", 20), ("d", 5)):
            gpu.grows = grows << 20
            for _ in range(4):
                self.run(replay, gpu, key)
            warnings.append(len(caplog.messages))
        assert warnings == [0, 0, 1, 1]
        assert replay.pool_bytes == 125 << 20
        assert "captured steps take 120 MiB, and the memory plan has 100 MiB for them" in caplog.text

    @pytest.mark.parametrize("serves", [False, True])
    def test_without_memory_stop_the_start_and_no_server(self, serves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        gpu = FakeGPU(monkeypatch)
        replay: GraphReplay[str] = GraphReplay(torch.device("cuda"), 0)
        gpu.memory = False
        if not serves:
            with pytest.raises(torch.cuda.OutOfMemoryError):
                self.run(replay, gpu)
            return
        replay.serve()
        for _ in range(4):
            assert self.run(replay, gpu)[-2:] == ["fill", "call on main"]
        assert replay.num_unreplayed == 3

    def test_whose_warm_up_fails_are_waited_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What it has begun on its stream would run beside the step that is called instead."""
        gpu, calls = FakeGPU(monkeypatch), itertools.count()

        def fail() -> str:
            if next(calls) == 1:
                raise RuntimeError("an operator")
            return gpu.call()

        replay: GraphReplay[str] = GraphReplay(torch.device("cuda"), 0)
        assert replay.run("key", fail, lambda: None, lambda: None) == "result"
        assert gpu.done == ["side waits for main", "call on side", "main waits for side", "call on main"]


@pytest.mark.gpu
class TestGraphs:
    def test_replays_see_new_inputs_and_captures_leave_no_trace(self) -> None:
        device = torch.device("cuda")
        replay: GraphReplay[Tensor] = GraphReplay(device, 1 << 30)
        columns = Columns({"x": 0}, 4, torch.int64, device)
        total = torch.zeros(1, dtype=torch.int64, device=device)

        def step() -> Tensor:
            x = columns.read("x", 4)
            total.add_(x.sum())
            return x * 2

        for numbers in ([1, 2], [3], [4, 5, 6, 7]):
            out = replay.run("step", step, lambda: columns.write({}), partial(columns.write, {"x": numbers}))
            assert out.tolist() == [2 * n for n in numbers] + [0] * (4 - len(numbers))
        assert total.item() == 1 + 2 + 3 + 4 + 5 + 6 + 7
        assert list(replay.costs) == ["step"]
