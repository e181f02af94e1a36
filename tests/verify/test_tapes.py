"""Tapes: what PyTorch does between kernels, recorded once and replayed by native code on other inputs."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from specmamba.cuda_graphs import NativeReplay, NextPart, native_replay
from specmamba.cuda_graphs.arena import Arena
from specmamba.cuda_graphs.step_recorder import NotRecordableError, StepRecorder
from specmamba.kernels import linear, rowwise, sampling
from specmamba.kernels.replay import Tape, Threads
from specmamba.kernels.replay.tape import NativeCall

pytestmark = pytest.mark.usefixtures("needs_native")

Function = Callable[[dict[str, Tensor]], object]
FUNCTIONS: dict[str, Function] = {
    "sums": lambda x: (x["i"] + x["j"], x["i"] + 3, 7 - x["i"], x["f"] + x["g"], x["b"] + x["b"], x["f"] + x["b"]),
    "products": lambda x: (x["i"] * x["j"], x["f"] * x["g"], x["b"] * 0.3, x["i"] * (x["j"] > 0), x["f"] / x["g"]),
    "whole quotients": lambda x: (x["i"] // 3, x["i"] // -4, x["i"] << 2, x["i"] >> 1),
    "bits": lambda x: (x["m"] & (x["i"] > 0), x["m"] | (x["i"] > 0), x["i"] & 6, x["i"] | 8, x["i"] ^ 5, ~x["m"]),
    "comparisons": lambda x: (
        x["i"] == x["j"],
        x["i"] != 2,
        x["f"] < x["g"],
        x["f"] <= 0,
        x["b"] >= 0,
        x["i"] > x["j"],
    ),
    "limits": lambda x: (
        x["i"].clamp(-2, 3),
        x["i"].clamp(min=0),
        x["f"].clamp(max=0.5),
        torch.minimum(x["f"], x["g"]),
        x["i"].maximum(x["j"]),
        x["f"].masked_fill(x["m"], -torch.inf),
    ),
    "activations": lambda x: (
        x["f"].relu(),
        (x["b"] * 0).relu(),
        (x["f"] * -0.0).relu().view(torch.int32),  # the sign of a zero
        x["i"].relu(),
        x["f"].square(),
        x["b"].relu().square(),
    ),
    "choices": lambda x: (
        torch.where(x["m"], x["f"], x["g"]),
        torch.where(x["m"], x["i"], -1),
        x["b"].where(x["m"], 0),
    ),
    "types": lambda x: (x["f"].bfloat16(), x["b"].float(), x["i"].float(), x["m"].long(), x["f"].long(), x["i"].int()),
    "copies": lambda x: (
        torch.cat([x["i"], x["j"]], 1),
        torch.stack([x["f"], x["g"]], -1),
        x["f"].t().contiguous(),
        x["i"].repeat(2, 3),
        torch.nn.functional.pad(x["i"], (1, 2, 0, 1), value=9),
        x["f"][:, 1:].reshape(-1),
    ),
    "indices": lambda x: (
        x["t"][x["row"], :2],
        x["t"][x["row"][:, None], x["column"]],
        x["t"][:, x["column"]],
        x["t"].gather(1, x["column"]),
        x["t"].index_select(0, x["row"]),
        torch.nn.functional.embedding(x["column"], x["t"]),
        x["t"][x["row"] - 5],
    ),
    "reductions": lambda x: (
        x["i"].sum(-1),
        x["i"].sum(),
        x["m"].all(-1),
        x["m"].any(0),
        x["i"].amax(0),
        x["i"].cumsum(-1),
        x["m"].sum(1, keepdim=True),
    ),
    "orders": lambda x: (
        torch.sort(x["f"], dim=-1, descending=True, stable=True),
        torch.sort(x["i"], dim=0, stable=True),
        x["f"].topk(3, -1),
        x["i"].sort(-1)[0],
    ),
    "nothing to do": lambda x: (x["i"][:0] + 1, x["f"].view(-1)[2:5], torch.cat([x["i"][:, :0], x["j"]], 1)),
}
WRITES: dict[str, Function] = {
    "in place": lambda x: (x["i"].add_(x["j"]), x["f"].mul_(2).masked_fill_(x["m"], 0), x["j"].clamp_(0, 4)),
    "filled": lambda x: (x["i"][:, 1].fill_(5), x["f"][0].zero_(), x["j"].copy_(x["i"])),
    "put": lambda x: (
        x["t"].index_put_((x["row"][:, None], torch.arange(2)), x["f"][:3, :2]),
        x["u"].scatter_(1, x["column"], x["f"][:3, :2]),
        x["v"].index_copy_(0, x["row"], x["f"][:3, :4]),
    ),
    "a constant": lambda x: torch.zeros(4, 5).scatter_(1, x["column"], 1.0) + torch.arange(5).mul_(x["i"][0, 0]),
}


def inputs(seed: int) -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    numbers = {name: torch.randint(-9, 9, (4, 5), generator=gen) for name in "ij"}
    numbers |= {name: torch.randn(4, 5, generator=gen) for name in "fg"}
    numbers |= {name: torch.randn(5, 4, generator=gen) for name in "tuv"}
    numbers["f"][0, 0] = numbers["f"][1, 2]
    numbers |= {"b": torch.randn(4, 5, generator=gen).bfloat16(), "m": torch.rand(4, 5, generator=gen) < 0.5}
    return numbers | {
        "row": torch.randperm(5, generator=gen)[:3],
        "column": torch.stack([torch.randperm(4, generator=gen)[:2] for _ in range(3)]),
    }


@pytest.fixture(scope="module")
def threads() -> Iterator[Threads]:
    made = Threads(2)
    yield made
    made.stop()


def record(function: Callable[[], object]) -> tuple[Tape, list[Tensor]]:
    with torch.inference_mode():
        tape, result = StepRecorder(Arena()).record(function)
    return tape, [x for x in tree_leaves(result) if isinstance(x, Tensor)]


def results(function: Function, given: dict[str, Tensor]) -> list[Tensor]:
    return [x for x in tree_leaves(function(given)) if isinstance(x, Tensor)]


def assert_replays(function: Function, threads: Threads) -> None:
    """On the inputs that were recorded, and on others: what PyTorch computes, bit for bit, in memory that stays."""
    given = inputs(0)
    tape, got = record(lambda: function(given))
    assert tape.python_calls == []
    for seed in (1, 2):
        other, expected = inputs(seed), inputs(seed)
        for name, x in given.items():
            x.copy_(other[name])
        want = results(function, expected)
        tape.run(threads)
        for x, y in zip(got, want, strict=True):
            assert (x.dtype, x.shape) == (y.dtype, y.shape)
            assert torch.equal(x, y)
        assert all(torch.equal(given[name], expected[name]) for name in given)


@pytest.mark.parametrize("name", [*FUNCTIONS, *WRITES])
def test_replays_what_pytorch_computes(name: str, threads: Threads) -> None:
    assert_replays((FUNCTIONS | WRITES)[name], threads)


def test_kernels_and_what_is_between_them(threads: Threads) -> None:
    x, weight = torch.randn(3, 64), torch.randn(48, 64)
    norm = torch.rand(48) + 0.5
    packed = linear.native_ops.pack(weight)

    def function() -> Tensor:
        return rowwise.rms_norm(packed(x + 1), norm, 1e-6) + packed(x)

    tape, (got,) = record(function)
    assert tape.python_calls == []
    x.copy_(torch.randn(3, 64))
    tape.run(threads)
    assert torch.equal(got, function())


def test_a_constant_that_a_kernel_reads_stays(threads: Threads) -> None:
    """Kernels may write what they are given, so each replay restores it; later results do not take its place."""
    seeds, x = torch.tensor([5]), torch.arange(64)[None]

    def function() -> tuple[Tensor, Tensor]:
        numbers = sampling.uniform(seeds, torch.arange(64)[None])
        return numbers, x + 1

    tape, (got, _) = record(function)
    for _ in range(2):
        tape.run(threads)
        assert torch.equal(got, function()[0])


def test_what_native_code_lacks_is_pytorchs(threads: Threads) -> None:
    x = torch.randn(4, 6)
    tape, (got, twice) = record(lambda: ((x.softmax(-1) @ x.t()).exp(), x.exp_().add_(1)))
    assert {"aten::_softmax", "aten::mm", "aten::exp", "aten::exp_"} == set(tape.python_calls)
    x.copy_(torch.randn(4, 6))
    before = x.clone()
    with torch.inference_mode():
        tape.run(threads)
    assert torch.equal(got, (before.softmax(-1) @ before.t()).exp())
    assert torch.equal(twice, before.exp() + 1)


def test_constants_are_computed_once_and_restored_where_something_writes_them(threads: Threads) -> None:
    x = torch.zeros(3, dtype=torch.int64)
    tape, (got,) = record(lambda: x + (torch.arange(3) * 2 + torch.ones(3, dtype=torch.int64)))
    assert len(tape) == 1
    tape, (got,) = record(lambda: torch.zeros(3, dtype=torch.int64).add_(x).add_(1))
    for _ in range(3):
        x += 1
        tape.run(threads)
        assert torch.equal(got, x + 1)


def test_memory_of_dropped_results_is_used_again() -> None:
    arena = Arena()

    def function(x: Tensor) -> Tensor:
        for _ in range(50):
            x = x + 1
        return x

    x = torch.zeros(1000)
    with torch.inference_mode():
        _, kept = StepRecorder(arena).record(lambda: function(x))
        assert arena.num_bytes < 4 * x.nbytes
        once = arena.num_bytes
        _, other = StepRecorder(arena).record(lambda: function(x + 1))
    assert arena.num_bytes < 2 * once
    assert kept[0] == 50  # the result of the first is not what the second writes
    assert other[0] == 51


def test_an_index_outside_is_an_error(threads: Threads) -> None:
    table, row = torch.arange(5), torch.tensor([1, 4])
    tape, (got,) = record(lambda: table[row])
    row.copy_(torch.tensor([0, 5]))
    with pytest.raises(RuntimeError, match="an index is outside"):
        tape.run(threads)
    row.copy_(torch.tensor([-5, 2]))
    tape.run(threads)
    assert got.tolist() == [0, 2]


def test_what_reads_the_host_cannot_be_recorded_and_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.ones(2)

    def function() -> Tensor:
        return x * 2 if x[0] > 0 else x

    with torch.inference_mode(), pytest.raises(NotRecordableError, match="reads the device"):
        StepRecorder(Arena()).record(function)
    replay: NativeReplay[Tensor] = NativeReplay(1)
    for number in (1, 2, -3, 4):
        got = replay.run("key", function, lambda: None, partial(x.__setitem__, slice(None), number))
        assert got.tolist() == [2 * number if number > 0 else number] * 2
    assert not replay.tapes
    assert "operator by operator" in caplog.text
    replay.close()


def test_second_parts_follow_first_parts_that_are_recorded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second part reads the memory of the first one's result, which is elsewhere when that was dropped meanwhile."""
    monkeypatch.setattr(native_replay, "MAX_RECORDS", 3)
    x, replay = torch.zeros(3), NativeReplay[Tensor](1)
    for number in range(30):
        factor, added = 2 + number % 2, number % 5
        then = NextPart(added, partial(torch.add, other=added))
        got = replay.run(factor, partial(torch.mul, x, factor), x.zero_, partial(x.fill_, number), then)
        assert got.tolist() == [factor * number + added] * 3
    assert len(replay.tapes) == 3
    monkeypatch.setattr(native_replay, "MAX_RECORDS", 12)
    for number in range(40):
        before = replay.num_unreplayed
        factor, added = 2 + number % 2, number % 5
        then = NextPart(added, partial(torch.add, other=added))
        got = replay.run(factor, partial(torch.mul, x, factor), x.zero_, partial(x.fill_, number), then)
        assert got.tolist() == [factor * number + added] * 3
    assert replay.num_unreplayed == before
    assert len(replay.tapes) == 12  # two first parts, and five second ones of each
    replay.close()


def test_other_threads_are_not_recorded() -> None:
    packed, x = linear.native_ops.pack(torch.randn(8, 8)), torch.randn(1, 8)

    def function() -> Tensor:
        thread = threading.Thread(target=lambda: packed(x))
        thread.start()
        thread.join()
        return packed(x)

    tape, _ = record(function)
    assert len(tape) == 1


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_no_thread_is_left_after_the_end() -> None:
    gc.collect()  # threads of engines that were dropped without close()
    before = num_threads()
    replay: NativeReplay[Tensor] = NativeReplay(4)
    assert num_threads() == before + 3
    replay.close()
    replay.close()
    assert num_threads() == before
    with pytest.raises(RuntimeError, match="have been stopped"):
        Tape([], []).run(replay._threads)
    made = Threads(3)
    assert num_threads() == before + 2
    del made
    assert num_threads() == before


def test_threads_may_end_while_another_step_is_recorded() -> None:
    """The collector may end the threads of a dropped engine at any moment, also during a recording."""
    forgotten = [Threads(2)]

    def function() -> Tensor:
        forgotten.clear()
        return torch.ones(4)

    before = num_threads()
    tape, _ = record(function)
    assert num_threads() == before - 1
    assert len(tape) == 0


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")  # calls are told when they are recorded
def test_every_part_of_a_region_is_done_once(threads: Threads) -> None:
    """Many rows, small and large: regions that one thread does, and regions that both do."""
    weight = torch.randn(256, 128)
    packed = linear.native_ops.pack(weight)
    for rows in (1, 3, 64, 300):
        x = torch.randn(rows, 128)
        tape, (got,) = record(lambda x=x: packed(x))  # type: ignore[misc]
        assert [call.words[-1] for call in tape._calls if isinstance(call, NativeCall)] == [2]
        for _ in range(50):
            x.copy_(torch.randn(rows, 128))
            tape.run(threads)
            assert torch.equal(got, packed(x))


def run_script(script: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONWARNINGS": "ignore"}
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False, env=environment
    )


FORK = """
import os
from specmamba.kernels.replay import Tape, Threads
threads = Threads(2)
Tape([], []).run(threads)
for ends in (lambda: threads.stop(), lambda: globals().pop("threads")):
    if os.fork() == 0:
        try:
            Tape([], []).run(threads)
        except RuntimeError as error:
            print(error, flush=True)
        ends()
        os._exit(0)
    os.wait()
Tape([], []).run(threads)
threads.stop()
print("the parent goes on")
"""
DEATH = """
import ctypes, os, signal, time
from specmamba.kernels.replay import Tape, Threads
before = set(os.listdir("/proc/self/task"))
threads = Threads(2)
(worker,) = set(os.listdir("/proc/self/task")) - before
libc = ctypes.CDLL(None)
libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
libc.signal(signal.SIGUSR1, ctypes.cast(libc.pthread_exit, ctypes.c_void_p))
libc.tgkill(os.getpid(), int(worker), signal.SIGUSR1)
while worker in os.listdir("/proc/self/task"):
    time.sleep(0.01)
Tape([], []).run(threads)
print("still alive")
"""


def test_a_fork_is_refused_and_leaves_the_parent_alone() -> None:
    done = run_script(FORK)
    assert done.returncode == 0, done.stderr
    assert "does not survive a fork" in done.stdout
    assert "the parent goes on" in done.stdout


def test_a_thread_that_dies_ends_the_process() -> None:
    done = run_script(DEATH)
    assert done.returncode < 0
    assert "has died" in done.stderr or "terminate called" in done.stderr  # at once, or by the next step
    assert "still alive" not in done.stdout
