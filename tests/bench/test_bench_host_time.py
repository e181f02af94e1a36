"""The benchmark of a step's host time: a small run, and what it needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specmamba import LLM, SamplingParams
from specmamba.bench import host_time
from specmamba.cuda_graphs import NativeReplay
from tests.repository import ROOT

FLAGS = ["--dtype", "float32", "--num-threads", "1", "--context-length", "512", "--max-running-requests", "2"]
SMALL = ["--rounds", "1", "--batches", "2", "--max-tokens", "16", "--temperatures", "0"]


@pytest.mark.usefixtures("needs_native")
def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    assert host_time.main([*FLAGS, *SMALL, "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["results"]
    assert [row["drafts"] for row in rows] == list(host_time.DRAFTS)
    for row in rows:
        assert 0 < row["host_range"][0] <= row["host_ms"] <= row["host_range"][1] < row["step_ms"]
    assert "host ms" in capsys.readouterr().out


@pytest.mark.usefixtures("needs_native")
def test_report_of_stubbed_steps(tmp_path: Path) -> None:
    """What chained steps cost is measured beside that of those that are read first."""
    file = tmp_path / "report.json"
    assert host_time.main([*FLAGS, *SMALL, "--stubbed", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["results"]
    assert [(row["drafts"], row["steps"]) for row in rows] == [
        (d, w) for d in host_time.DRAFTS for w in host_time.STUBBED
    ]
    assert all(0 < row["host_ms"] == row["step_ms"] for row in rows)


@pytest.mark.slow
@pytest.mark.usefixtures("needs_native")
def test_report_beside_another_version(tmp_path: Path) -> None:
    """The other version is this one."""
    file = tmp_path / "report.json"
    assert host_time.main([*FLAGS, *SMALL, "--stubbed", "--against", str(ROOT), "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["results"]
    assert [row["steps"] for row in rows] == [*host_time.STUBBED, host_time.BEFORE] * len(host_time.DRAFTS)
    assert all(0 < row["host_ms"] == row["step_ms"] for row in rows)


@pytest.mark.slow
@pytest.mark.usefixtures("needs_native")
def test_speed_beside_another_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Replayed steps of both: the other version, which is this one, generates the same texts."""
    file = tmp_path / "report.json"
    assert host_time.main([*FLAGS, *SMALL, "--against", str(ROOT), "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    rows = report["results"]
    assert [row["steps"] for row in rows] == [host_time.REPLAYED, host_time.BEFORE] * len(host_time.DRAFTS)
    assert all(0 < row["host_ms"] < row["step_ms"] for row in rows)
    assert [row["drafts"] for row in report["ratios"]] == list(host_time.DRAFTS)
    speeds = [row["tokens_per_second"] for row in rows]
    for row, own, old in zip(report["ratios"], speeds[::2], speeds[1::2], strict=True):
        assert row["range"][0] == row["median"] == pytest.approx(own / old, abs=0.05)
    assert "tokens/s over those of the older version, plain, 2 requests, T 0:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--against", "/nowhere"], "--against: /nowhere is no checkout"),
        (["--stubbed", "--against", "/nowhere"], "--against: /nowhere is no checkout"),
    ],
)
def test_other_versions_that_cannot_be_timed(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        host_time.main([*FLAGS, *SMALL, *flags])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("needs_native")
def test_stubbed_steps_do_nothing_but_the_first_one() -> None:
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    flags: dict[str, Any] = {"speculative_algorithm": "none", "context_length": 128, "max_running_requests": 1}
    with LLM(dtype="float32", num_threads=1, **flags) as llm:
        text = llm.generate("def f(", greedy)[0].token_ids
        for is_chained in (True, False):
            before = llm.engine.cycle.chain.stats.num_chained
            with llm.workbench.stubbed_steps(is_chained) as replay:
                assert llm.generate("def f(", greedy)[0].token_ids == text[:1] * 12
                assert replay.num_stubbed == 11
            assert llm.engine.cycle.chain.stats.num_chained - before == 11 * is_chained
        assert llm.generate("def f(", greedy)[0].token_ids == text


def test_steps_without_replay_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        host_time.main([*FLAGS, *SMALL, "--disable-cuda-graph"])
    assert ended.value.code == 2
    assert "no step was replayed" in capsys.readouterr().err


def test_flags_of_drafts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        host_time.main([*FLAGS, *SMALL, "--speculative-num-steps", "2"])
    assert ended.value.code == 2
    assert "--speculative-num-steps: this benchmark times its own drafts" in capsys.readouterr().err


@pytest.mark.usefixtures("needs_native")
def test_steps_of_a_drafter_are_recorded_once() -> None:
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    with LLM(dtype="float32", num_threads=1, context_length=128, max_running_requests=1) as llm:
        replay = llm.engine.runner.graph_runner.replay
        assert isinstance(replay, NativeReplay)
        counts = []
        for _ in range(3):  # a kind of step is recorded at its second run
            for algorithm in ("mtp", "none", "ngram"):
                flags = {"speculative_num_draft_tokens": 4} if algorithm == "ngram" else {}
                llm.workbench.use_drafts(speculative_algorithm=algorithm, **flags)
                llm.generate("def f(", greedy)
                counts.append(len(replay.tapes))
        assert counts[:2] == [2, 4]  # draft and forward, and the decision
        assert counts[-3:] == [counts[-4]] * 3
