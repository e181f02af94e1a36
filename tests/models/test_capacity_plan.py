"""``specmamba info --plan``: the figures of an engine on one of several ranks, for memory that need not be there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specmamba.cli import main
from specmamba.config import EngineConfig
from specmamba.engine import capacity_plan
from specmamba.engine.capacity_plan import plan_capacity
from specmamba.engine.engine import Engine
from specmamba.engine.model_report import model_info
from specmamba.errors import ConfigError
from tests.tiny import write_tiny_checkpoint

MIB = 1 / 1024  # in GiB


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), 1)


def plans_of(folder: Path, memory: float | None = 64 * MIB, tokens: tuple[int, ...] = (64,), **flags: Any) -> list[Any]:
    plans: list[Any] = plan_capacity(EngineConfig(model=str(folder), **flags), memory, tokens)["plans"]
    return plans


@pytest.mark.parametrize("algorithm", ["mtp", "none"])
def test_one_rank_is_what_info_says(tiny: Path, algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("specmamba.engine.capacity_plan", "specmamba.engine.model_report"):
        monkeypatch.setattr(f"{module}.free_memory", lambda device: 64 << 20)
    flags: dict[str, Any] = {"device": "cpu", "speculative_algorithm": algorithm}
    for size in (1, 2):
        plan = plans_of(tiny, None, tp_size=size, **flags)[-1]
        info = model_info(EngineConfig(model=str(tiny), tp_size=size, mem_fraction_static=0.5 / size, **flags))
        pools = info["memory"]
        assert plan["tp_size"] == size
        assert plan["weights"] == pools["weight_bytes"]
        assert plan["kv_pool_tokens"] == pools["kv_pool_tokens"]
        assert plan["state_slots"] == pools["state_slots"]
        assert plan["total"] == pools["total_bytes"]
        assert plan["state_per_request"] == info["bytes"]["state_per_slot"] + info["bytes"]["draft_per_slot"]
        assert plan["kv_per_token"] == info["bytes"]["kv_per_token"] + info["bytes"]["draft_kv_per_token"]


def test_so_many_requests_fit_and_no_more(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 6 << 20
    monkeypatch.setattr(capacity_plan, "free_memory", lambda device: free)
    monkeypatch.setattr("specmamba.engine.engine.free_memory", lambda device: free)
    flags: dict[str, Any] = {"device": "cpu", "disable_radix_cache": True, "speculative_adaptive": "off"}
    number = plans_of(tiny, None, (100,), tp_size=1, **flags)[0]["requests_at_once"][100]
    assert 1 < number < capacity_plan.MOST_REQUESTS
    # elastic pools also keep tables for the largest pool, which are not in the count
    engine = Engine(EngineConfig(model=str(tiny), max_running_requests=number, elastic_pools="off", **flags))
    pages = engine.memory_plan.num_pages
    engine.close()
    lookahead = engine.memory_plan.num_lookahead_slots
    assert pages // (100 + lookahead) >= number
    more = EngineConfig(
        model=str(tiny), max_running_requests=number + 1, max_total_tokens=(number + 1) * (100 + lookahead), **flags
    )
    with pytest.raises(ConfigError, match="weights and the smallest pools need"):
        Engine(more)


def test_limits_of_the_flags_are_kept(tiny: Path) -> None:
    assert plans_of(tiny, 1, tp_size=1, max_mamba_cache_size=3)[0]["requests_at_once"] == {64: 3}
    assert plans_of(tiny, 1, tp_size=1, max_total_tokens=300)[0]["requests_at_once"] == {64: 4}
    assert plans_of(tiny, 1, (64, 4096), tp_size=1)[0]["requests_at_once"][4096] is None


def test_ranks_that_cannot_run_it_are_named(tiny: Path) -> None:
    plans = plans_of(tiny, 1)
    assert [plan["tp_size"] for plan in plans] == [1, 2, 4, 8]
    problems = [plan.get("problem") for plan in plans]
    assert problems[0] is None
    assert problems[-1].startswith("--tp-size 8: the model has ")
    assert [plan["tp_size"] for plan in plans_of(tiny, 1, tp_size=3)] == [1, 2, 3]


def test_a_memory_that_is_too_small(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "weights and the smallest pools need" in plans_of(tiny, 0.1 * MIB)[0]["problem"]
    assert main(["info", "--model", str(tiny), "--plan", "--tp", "1", "--gpu-memory", "0.0001"]) == 0
    assert "1 rank: weights and the smallest pools need" in capsys.readouterr().out


def test_a_gpu_has_its_own_defaults(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    report = plan_capacity(EngineConfig(model=str(tiny)), 1, (64,))
    assert (report["device"], report["memory_bytes"], report["mem_fraction_static"]) == ("cuda", 1 << 30, 0.85)


def test_the_table_and_json(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["info", "--model", str(tiny), "--plan", "--tp", "2", "--gpu-memory", "1", "--plan-tokens", "64,4096"]
    assert main(flags) == 0
    shown = capsys.readouterr().out
    for part in ("85% of the 1.0 GiB of one GPU", "1 rank ", "2 ranks", "requests of 64 tokens at once"):
        assert part in shown
    assert "too long" in shown
    assert main([*flags, "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [plan["tp_size"] for plan in report["plans"]] == [1, 2]
    assert f"{report['plans'][0]['requests_at_once']['64']:,}" in shown


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpu-memory", "80"], "--gpu-memory: this is a flag of --plan: add --plan"),
        (["--plan-tokens", "80"], "--plan-tokens: this is a flag of --plan: add --plan"),
        (["--plan", "--gpu-memory", "80", "--device", "cpu"], "--gpu-memory: --device cpu has no GPU"),
        (["--plan", "--gpu-memory", "0"], "--gpu-memory"),
        (["--plan", "--gpu-memory", "nan"], "--gpu-memory"),
        (["--plan", "--plan-tokens", "0"], "--plan-tokens"),
        (["--plan", "--context-length", "100000"], "is more than the"),
    ],
)
def test_mistakes(tiny: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["info", "--model", str(tiny), *flags])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
