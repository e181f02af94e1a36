"""The benchmark of state bytes: it may not import the cache, so its formulas are held against the cache's own here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specmamba.bench import state_bytes
from specmamba.bench.state_bytes import LayerShape
from specmamba.cache.shapes import CacheShape, KVShape, StateShape, pending_capacity
from specmamba.draft.base import chain_shape
from specmamba.errors import SpecmambaError
from specmamba.kernels.state_records import torch_ops as record_ops
from tests.test_state_backends import CPU, Bench


@pytest.mark.parametrize("num_nodes", [1, 7, 8, 9, 64])
def test_memory(num_nodes: int) -> None:
    assert state_bytes.capacity(num_nodes) == pending_capacity(num_nodes)
    for sizes in ((4, 4, 64, 64), (2, 6, 10, 14)):
        layer = LayerShape(*sizes)
        for dtype in (torch.float32, torch.bfloat16):
            shape = CacheShape((KVShape(1, 1, 2),), 1, StateShape(*sizes, conv_width=layer.conv_width), dtype)
            held = [
                f(layer, num_nodes, dtype.itemsize) for f in (state_bytes.record_memory, state_bytes.snapshot_memory)
            ]
            assert held == [shape.record_bytes(num_nodes), shape.snapshot_bytes(num_nodes)]


@pytest.mark.parametrize(("num_nodes", "accept_length"), [(1, 1), (8, 3), (8, 8), (16, 5), (64, 1)])
def test_how_often_it_folds(num_nodes: int, accept_length: int) -> None:
    state = StateShape(num_key_heads=1, num_value_heads=1, key_dim=1, value_dim=1, conv_width=1)
    bench = Bench(["records"], 1, num_nodes, state=state)
    bench.begin(1)
    shape, buffers = chain_shape(1, num_nodes, CPU), bench.buffers["records"]
    path, accepted, folds = torch.arange(num_nodes)[None], accept_length - 1, []
    for number in range(3 * state_bytes.capacity(num_nodes) + 1):
        before = buffers.positions(1)[0]
        plan = buffers.plan([1], shape)
        folds += [number] if buffers.positions(1)[0] > before else []
        buffers.commit(plan, path, torch.tensor([accepted]), [accepted])
    period = state_bytes.verifies_per_fold(num_nodes, accept_length)
    assert folds == list(range(period, 3 * state_bytes.capacity(num_nodes) + 1, period))


def test_traffic() -> None:
    """A shape whose bytes can be counted by hand: S = 4, a window 36, r = 24; 8 nodes, all accepted."""
    layer = LayerShape(1, 1, 1, 1)
    assert (layer.state, layer.window(4), layer.record(4)) == (4, 36, 24)
    verify = 4 + 8 * 36 + 4 * 24 + 8 * 24  # 0 or 8 records are pending, 4 on average
    commit, fold = 2 * 8 * 24, 4 + 16 * 24 + 36 + 4 + 2 * 36
    assert state_bytes.record_traffic(layer, 8, 8, 4) == verify + commit + fold / 2
    assert state_bytes.snapshot_traffic(layer, 8, 4) == 8 * 40 + 8 * 40 + 40 + 40


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "report.json"
    small = ["--timed-shape", "demo", "--layers", "1", "--batch-size", "2", "--rounds", "2", "--timed-nodes", "6"]
    arguments = [*small, "--accept-length", "3", "--num-threads", "1", "--json", str(file)]
    assert state_bytes.main(arguments) == 0
    report = json.loads(file.read_text())
    assert report["passed"]
    assert set(report["counted"]) == {"demo", "qwen3.5-0.8b", "qwen3-next"}
    worst = report["worst_ratio_at_16_nodes"]
    assert 0 < worst <= 0.2
    timed = report["timed"]
    assert {row["trees"] for row in timed["results"]} == {"trees", "chains"}
    assert all(row["ratio_range"][0] <= row["ratio"] <= row["ratio_range"][1] for row in timed["results"])
    assert "as required" in capsys.readouterr().out
    monkeypatch.setattr(state_bytes, "LIMIT", 0.9 * worst)
    assert state_bytes.main(["--no-time"]) == 1
    assert "TOO MUCH" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--rounds", "0"], "--rounds"),
        (["--json", "/nowhere/report.json", "--no-time"], "there is no folder /nowhere"),
        (
            ["--accept-length", "4", "--timed-nodes", "4", "--timed-shape", "demo"],
            "a tree needs two nodes for each",
        ),
    ],
)
def test_what_is_refused(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        state_bytes.main(arguments)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_a_kernel_that_computes_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: Tensor) -> Tensor:
        return fold(*arguments).mul_(1.001)

    fold = record_ops.fold
    monkeypatch.setattr(record_ops, "fold", wrong)
    small = {"timed_shape": "demo", "layers": 1, "rounds": 1, "timed_nodes": 8, "num_threads": 1}
    with pytest.raises(SpecmambaError, match=r"records .* and snapshots end in states that differ by"):
        state_bytes.run(state_bytes.StateBytesConfig(**small))
