"""Exchanges over shared memory against their definition. Ranks are threads here; in ``tests/parallel`` processes."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from specmamba.kernels.exchange import Exchange, RankGoneError, num_bytes
from specmamba.kernels.native.cpp_compiler import command_of, find_compiler, run_compiler
from specmamba.kernels.native.levels import LEVELS, LEVELS_OF, Level, available_levels
from specmamba.kernels.native.live import live_rows
from specmamba.parallel import shared_memory

pytestmark = pytest.mark.usefixtures("needs_native")

CHECK = Path(__file__).with_name("exchange_check.cpp")
T = TypeVar("T")
PIECE = 256 << 10  # bytes that go at once
Make = Callable[[int], list[Exchange]]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes ranks that share memory; they are closed afterwards."""
    made = list[Exchange]()

    def made_of(size: int, links: Sequence[Sequence[int]] = ()) -> list[Exchange]:
        file = shared_memory._memory(num_bytes(size))
        ranks = [Exchange(file, rank, size, links[rank] if links else ()) for rank in range(size)]
        os.close(file)
        made.extend(ranks)
        return ranks

    yield made_of
    for rank in made:
        rank.close()


def on_all(ranks: Sequence[Exchange], function: Callable[[Exchange], T]) -> list[T]:
    """The results of a function on all ranks; where one fails, the others do not wait for it."""

    def run(rank: Exchange) -> T:
        try:
            return function(rank)
        except BaseException:
            rank.end()
            raise

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(run, ranks))


def sums_of(ranks: Sequence[Exchange], parts: Sequence[Tensor]) -> list[Tensor]:
    return on_all(ranks, lambda rank: rank.sum(parts[rank.rank].clone()))


def random(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul_(3).to(dtype)


def summed(parts: Sequence[Tensor]) -> Tensor:
    """In the order of ranks, in float32, rounded once."""
    sums = parts[0].float()
    for part in parts[1:]:
        sums = sums + part.float()
    return sums.to(parts[0].dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_have_the_bits_of_their_definition(make: Make, size: int, dtype: torch.dtype) -> None:
    ranks = make(size)
    whole = PIECE // dtype.itemsize
    for number, shape in enumerate([(1,), (3, 7), (1, 1, 256), (5, 33), (whole,), (whole + 1,), (3, whole - 5), (0,)]):
        parts = [random(shape, dtype, 10 * number + rank) for rank in range(size)]
        expected = summed(parts)
        found = sums_of(ranks, parts)
        assert all(torch.equal(each, expected) for each in found), shape


def test_sums_of_numbers_that_are_not_finite(make: Make) -> None:
    parts = [torch.tensor([1.0, torch.inf, torch.nan, 3e38]), torch.tensor([2.0, -torch.inf, 0.0, 3e38])]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        own = [part.to(dtype) for part in parts]
        for found in sums_of(make(2), own):
            assert torch.equal(found.isnan(), torch.tensor([False, True, True, False]))
            assert found[0] == 3
            assert found[3].isinf()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("widths", [(5, 4), (3, 3, 3), (1, 0, 2, 7), (300_001, 300_000)], ids=str)
def test_parts_are_joined(make: Make, widths: tuple[int, ...], dtype: torch.dtype) -> None:
    ranks = make(len(widths))
    for rows in ((3,), (2, 1), (1,)):
        parts = [random((*rows, width), dtype, rank) for rank, width in enumerate(widths)]

        def join(rank: Exchange, parts: Sequence[Tensor] = parts) -> Tensor:
            return rank.gather(parts[rank.rank], widths)

        found = on_all(ranks, join)
        assert all(torch.equal(each, torch.cat(parts, -1)) for each in found)


def test_every_rank_gets_what_rank_0_has(make: Make) -> None:
    ranks = make(3)
    for number, size in enumerate((1, 5, PIECE // 8, 3 * PIECE // 8 + 1)):
        given = torch.arange(size) + number

        def tell(rank: Exchange, given: Tensor = given) -> Tensor:
            return rank.broadcast(given.clone() if rank.rank == 0 else torch.zeros_like(given))

        assert all(torch.equal(each, given) for each in on_all(ranks, tell))


def test_exchanges_of_all_kinds_in_turns(make: Make) -> None:
    """Ranks that are late in turns find nothing overwritten, and messages keep their order."""
    ranks, rounds = make(4), 300
    messages = [b"", b"a line\n", b"x" * (PIECE + 9)]

    def run(rank: Exchange) -> None:
        for number in range(rounds):
            if number % 50 == 10 * rank.rank:
                time.sleep(0.003)  # longer than others stay awake
            x = torch.full((257,), float(number + rank.rank))
            assert rank.sum(x)[0] == 4 * number + 6
            told = rank.broadcast(torch.tensor([number if rank.rank == 0 else -1, 2]))
            assert told.tolist() == [number, 2]
            assert rank.gather(torch.tensor([[rank.rank + number]]), (1, 1, 1, 1)).tolist() == [
                [number, number + 1, number + 2, number + 3]
            ]
            message = messages[number % 3]
            if rank.rank == 0:
                rank.tell(message)
            else:
                assert rank.told(10_000) == message

    on_all(ranks, run)
    counts = ranks[1].counts()
    assert (counts["all_reduce"].calls, counts["all_reduce"].nbytes) == (rounds, rounds * 257 * 4)
    assert (counts["all_gather"].calls, counts["broadcast"].calls) == (rounds, rounds)
    assert 0 < counts["all_reduce"].seconds < 60


def test_padding_is_not_exchanged(make: Make) -> None:
    ranks, live = make(2), torch.tensor([3])

    def run(rank: Exchange) -> tuple[Tensor, Tensor]:
        with live_rows(5, live):
            x = rank.sum(torch.ones(1, 5, 6))
            return x, rank.gather(torch.full((1, 5, 2), rank.rank + 1.0), (2, 2))

    for x, joined in on_all(ranks, run):
        assert x[0, :, 0].tolist() == [2, 2, 2, 1, 1]
        assert joined[0, :3].tolist() == [[1, 1, 2, 2]] * 3
    assert ranks[0].counts()["all_reduce"].nbytes == 3 * 6 * 4


def test_what_waits_sleeps(make: Make) -> None:
    """A rank that waits for a long time takes no processor."""
    first, other = make(2)
    began = time.thread_time()
    assert other.told(300) is None
    assert time.thread_time() - began < 0.1
    first.tell(b"late")
    assert other.told(1000) == b"late"


@pytest.mark.parametrize("way", ["closed", "told"])
def test_exchanges_end_with_a_rank(make: Any, way: str) -> None:
    """Where its connection closes, and where a thread says that it is lost."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        first, _ = make(2, [[ours.fileno()], []])
        end = theirs.close if way == "closed" else first.end
        timer = threading.Timer(0.05, end)
        timer.start()
        began = time.monotonic()
        with pytest.raises(RankGoneError, match="another rank has ended"):
            first.sum(torch.ones(4))
        assert time.monotonic() - began < 60  # it would never end
        with pytest.raises(RankGoneError):
            first.told(10_000)
        timer.join()


def test_a_rank_that_has_done_its_part_may_leave(make: Any) -> None:
    """What it has written is still read."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        first, other = make(2, [[ours.fileno()], []])

        def leave() -> None:
            other.sum(torch.ones(4))
            other.close()
            theirs.close()

        leaver = threading.Thread(target=leave)
        leaver.start()
        time.sleep(0.05)
        assert first.sum(torch.ones(4)).tolist() == [2.0] * 4
        leaver.join()


def test_memory_that_is_shared_cannot_shrink() -> None:
    file = shared_memory._memory(num_bytes(2))
    try:
        assert os.fstat(file).st_mode & 0o777 == 0o600
        with pytest.raises(PermissionError):
            os.ftruncate(file, 100)
    finally:
        os.close(file)


def test_operands_that_native_code_cannot_read(make: Make) -> None:
    first, _ = make(2)
    for x in (torch.ones(4, 4).t(), torch.ones(4, dtype=torch.int64)):
        with pytest.raises(ValueError, match="sums take contiguous floats"):
            first.sum(x)
    with pytest.raises(ValueError, match="another width"):
        first.gather(torch.ones(4), (3, 4))
    with pytest.raises(ValueError, match="contiguous"):
        first.broadcast(torch.ones(4, 4).t())


def check(compiler: list[str], level: Level, folder: Path, *options: str) -> Path:
    program = folder / "check"
    run_compiler([*command_of(compiler, level), *options, str(CHECK), "-o", str(program)])
    return program


def assert_runs(*command: str | Path) -> None:
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (run.returncode, run.stdout) == (0, "0 differences\n"), run.stdout + run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
def test_processes_on_this_cpu(level: Level, tmp_path: Path) -> None:
    program = check(find_compiler(), level, tmp_path)
    if level not in available_levels():
        pytest.skip(f"compiled, but untried: this CPU has no {level.name}")
    assert_runs(program)


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS_OF["aarch64"], ids=lambda level: level.name)
def test_processes_on_arm(level: Level, arm_compiler: list[str], arm_emulator: list[str], tmp_path: Path) -> None:
    assert_runs(*arm_emulator, check(arm_compiler, level, tmp_path, "-static"))
