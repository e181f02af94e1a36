"""Buckets, inputs that stay, and the watch that tells what could not be captured."""

from __future__ import annotations

from collections.abc import Callable
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
    replay: GraphReplay[int] = GraphReplay(torch.device("cuda"))
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
    replay: GraphReplay[Tensor] = GraphReplay(torch.device("cuda"))
    for number, added in ((1, 5), (2, 5), (3, 7), (4, 5), (5, 7)):
        then = NextPart(added, partial(torch.add, torch.tensor(added)))
        got = replay.run("first", lambda: x * 2, x.zero_, partial(x.fill_, number), then)
        assert got.tolist() == [2 * number + added] * 2
    assert captured == ["first", ("first", 5), ("first", 7)]
    assert seen == [[0, 0]] * 3


@pytest.mark.gpu
class TestGraphs:
    def test_replays_see_new_inputs_and_captures_leave_no_trace(self) -> None:
        device = torch.device("cuda")
        replay: GraphReplay[Tensor] = GraphReplay(device)
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
