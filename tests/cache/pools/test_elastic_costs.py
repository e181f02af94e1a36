"""Moves of elastic pools, and their steps beside those of fixed ones: ``bench prefix --workloads elastic``."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest

from specmamba.bench.prefix import __main__ as prefix
from specmamba.bench.prefix.elastic_costs import measure_moves
from tests.elastic import LARGE_STATES, WIDE, FakeDriver, Memory
from tests.tiny import write_tiny_checkpoint


@pytest.mark.parametrize("is_mapped", [False, True])
def test_moves_copy_what_is_held_and_leave_the_pools_as_they_were(is_mapped: bool) -> None:
    driver, shape = (FakeDriver(4096), WIDE) if is_mapped else (None, LARGE_STATES)
    pools = Memory.made(1, "lru", 2000, 40, 200, shape, driver=driver).pools
    assert pools.split is not None
    sizes = pools.kv.allocator.num_pages, pools.states.num_slots
    moves = measure_moves(pools, 2)
    page_bytes, slot_bytes = pools.split.bounds.page_bytes, pools.split.bounds.slot_bytes
    assert {(move["to"], move["kind"]) for move in moves} == {
        (to, kind) for to in ("states", "pages") for kind in ("free", "held")
    }
    assert {move["slots"] for move in moves} >= {1, 2, 4}
    for move in moves:
        of_slots = move["slots"] * slot_bytes
        if move["to"] == "states":
            assert move["moved_bytes"] == of_slots
            copied = -(-of_slots // page_bytes) * page_bytes  # whole pages, of which part was spare before
            assert (
                move["copied_bytes"] == 0
                if move["kind"] == "free"
                else abs(move["copied_bytes"] - copied) <= page_bytes
            )
        else:
            assert of_slots - page_bytes < move["moved_bytes"] <= of_slots + page_bytes
            assert move["copied_bytes"] == (0 if move["kind"] == "free" else of_slots)
        assert move["ms"]["median"] > 0
    assert (pools.kv.allocator.num_pages, pools.states.num_slots) == sizes
    assert pools.kv.is_unused
    assert pools.states.is_unused
    if driver is not None:  # all memory goes back, also for the tests behind this one
        del pools
        gc.collect()
        assert driver.counts == (0, 0, 0)


def test_the_command_measures_moves_and_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_checkpoint(tmp_path / "tiny", seed=0, vocab_size=4096)
    flags = ["--model", str(model), "--device", "cpu", "--num-threads", "1", "--max-running-requests", "4"]
    flags += ["--workloads", "elastic", "--swing-tokens", "1200", "--concurrency", "2", "--rounds", "1"]
    file = tmp_path / "report.json"
    assert prefix.main([*flags, "--json", str(file)]) == 0
    elastic = json.loads(file.read_text())["elastic"]
    assert [each["requests"] for each in elastic["steps"]] == [1, 2]
    assert all(each["ratio"]["median"] > 0 for each in elastic["steps"])
    assert {move["to"] for move in elastic["moves"]} == {"pages", "states"}
    assert "elastic pools over fixed ones" in capsys.readouterr().out


def test_pools_that_are_not_elastic_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_checkpoint(tmp_path / "tiny", seed=0, vocab_size=4096)
    flags = ["--model", str(model), "--device", "cpu", "--max-running-requests", "4", "--swing-tokens", "90000"]
    with pytest.raises(SystemExit):
        prefix.main([*flags, "--workloads", "elastic"])
    assert "pools are not elastic here" in capsys.readouterr().err
