"""The benchmark of layouts of KV: both compute and copy the same, and each case has its figures."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from specmamba.bench import kv_layout
from specmamba.bench.kv_layout import KVViews, Model
from specmamba.kernels.paged_attention import LayerKV, attend_layer, native_ops

MODEL = Model(layers=3, heads=4, key_heads=2, head_dim=16)


def same_content(slots: int, dtype: torch.dtype) -> dict[str, KVViews]:
    """Two memories with the same keys and values, by layout."""
    torch.manual_seed(1)
    by_layer, by_token = (kv_layout.new_views(MODEL, dtype, slots) for _ in range(2))
    by_token.by_token.copy_(by_layer.by_layer.permute(2, 1, 0, 3, 4))
    return {"layer-major": by_layer, "token-major": by_token}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("order", ["runs", "scattered"])
def test_both_layouts_are_the_same_attention(dtype: torch.dtype, order: kv_layout.Order, needs_native: None) -> None:
    metadata, write_slots = kv_layout.step_places(order, 2, 19, 3)
    projected = torch.randn(2, 3, 2 * 6 * 16).to(dtype)
    config, found = kv_layout.attention_config(MODEL), []
    for name, views in same_content(1 + 2 * 22, dtype).items():
        pools = [LayerKV(k, v, write_slots) for k, v in views.layers()[name]]
        assert all(native_ops.can_take(projected, kv, metadata) for kv in pools)
        found.append([attend_layer(projected, config, None, kv, metadata) for kv in pools])
    for mine, other in zip(*found, strict=True):
        assert torch.equal(mine, other)
    assert not torch.equal(found[0][0], found[0][1])


def test_copies_bring_a_prefix_back(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[KVViews] = []
    new_views = kv_layout.new_views

    def kept(model: Model, dtype: torch.dtype, slots: int) -> KVViews:
        made.append(new_views(model, dtype, slots))
        return made[-1]

    monkeypatch.setattr(kv_layout, "new_views", kept)
    for layout in ("layer-major", "token-major"):
        runs = kv_layout.copy_runs(MODEL, "fp32", "runs", 5)
        memory = made[-1].memory
        tokens = made[-1].by_layer[:, :, 1:6] if layout == "layer-major" else made[-1].by_token[1:6]
        before, others = tokens.clone(), memory.sum() - tokens.sum()
        runs["take a prefix"][layout]()
        tokens.zero_()
        runs["put a prefix"][layout]()
        assert torch.equal(tokens, before)
        torch.testing.assert_close(memory.sum() - tokens.sum(), others)


def test_a_report_of_all_cases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kv_layout, "MIN_ROUND_S", 0.0)
    monkeypatch.setattr(kv_layout, "MODELS", {"small": MODEL})
    file = tmp_path / "layout.json"
    flags = ["--contexts", "8,4000", "--batches", "1,2", "--nodes", "1,4", "--prefix", "6", "--rounds", "3"]
    flags += ["--dtypes", "bf16", "--max-gib", "0.001", "--clock", "cpu", "--json", str(file)]
    assert kv_layout.main(flags) == 0
    report = json.loads(file.read_text())
    assert report["clock"] == "cpu"
    steps = [row for row in report["results"] if row["what"] == "attention"]
    assert [(row["slots"], row["batch"], row["context"], row["nodes"]) for row in steps] == [
        (order, batch, 8, nodes) for order in ("runs", "scattered") for batch in (1, 2) for nodes in (1, 4)
    ]
    assert {row["what"]: row["tokens"] for row in report["results"][8:]} == {"take a prefix": 6, "put a prefix": 6}
    assert len(report["left_out"]) == 8
    for row in report["results"]:
        assert row["ms"]["layer-major"]["median"] > 0
        assert row["ratio"]["range"][0] <= row["ratio"]["median"] <= row["ratio"]["range"][1]
    assert "8 cases need more memory than --max-gib allows" in capsys.readouterr().out


def test_the_ratio_is_taken_within_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one round the machine is slow for both."""
    seconds = iter([1.0, 1.0, 1.0, 2.0, 30.0, 10.0, 1.0, 3.0])  # the second round begins with token-major
    monkeypatch.setattr(kv_layout, "_seconds", lambda run, count, clock: next(seconds))
    found = kv_layout.compare({"layer-major": int, "token-major": int}, 3, time.perf_counter)
    assert found["ratio"] == {"median": 3.0, "range": [2.0, 3.0]}
    assert found["ms"]["token-major"]["range"] == [2000.0, 30_000.0]
