"""Adaptive sizes in the tools: their row in the acceptance benchmark, and the times of steps that the tuner leaves."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from specmamba import LLM
from specmamba.bench import acceptance
from specmamba.bench.acceptance import join_lists
from specmamba.core import RequestOutput, SpecStats
from specmamba.engine import cost_measurement
from specmamba.flags.command_line import parse_command_line
from specmamba.measure.acceptance.figures import full_report
from specmamba.measure.acceptance.options import ROOM, AcceptanceBenchConfig, variants_of
from specmamba.measure.acceptance.run import Result, Sample
from specmamba.measure.acceptance.tables import print_report
from specmamba.tune import tables
from specmamba.tune import tree as tune_tree
from tests.tiny import write_tiny_checkpoint

ENGINE: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_threads": 1, "max_running_requests": 1}
FLAGS = [word for name, value in ENGINE.items() for word in (f"--{name.replace('_', '-')}", str(value))]
FLAGS += ["--context-length", "256"]


def variants(*flags: str) -> list[Any]:
    config = parse_command_line(AcceptanceBenchConfig, "bench", join_lists([*FLAGS, "--adaptive", *flags]))
    return variants_of(config)[0]


def test_a_row_for_adaptive_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, costs = tmp_path / "report.json", tmp_path / "costs.json"
    small = ["--rounds", "2", "--num-prompts", "2", "--max-tokens", "24", "--configs", "1,1", "--adaptive"]
    assert acceptance.main([*FLAGS, *small, "--speculative-costs", str(costs), "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    [fixed], found = report["configurations"], report["adaptive"]
    assert (fixed["num_steps"], fixed["topk"], fixed["num_draft_tokens"]) == (1, 1, 2)
    assert (found["num_steps"], found["topk"], found["num_draft_tokens"]) == (4, 3, 8)
    assert found["lossless"] == {"identical": 2, "near_tie": 0, "diverged": 0}
    assert found["output_tokens"] == fixed["output_tokens"] == 2 * 2 * 24
    assert 1.0 <= found["accept_length"] <= found["nodes_per_request"] <= 8.0
    assert 0.0 <= found["plain_share"] <= 1.0
    assert 0.0 <= found["draft_depth"] <= 4.0
    assert found["best_fixed"] == "1,1,2"
    low, high = found["over_best_fixed_range"]
    assert 0 < low <= found["over_best_fixed"] <= high
    out = capsys.readouterr().out
    assert "nodes per request and step" in out
    assert "of (1, 1, 2), the best fixed shape" in out
    assert json.loads(costs.read_text())["entries"]


def output(num_tokens: int, histogram: tuple[int, ...]) -> RequestOutput:
    accepted = sum(i * count for i, count in enumerate(histogram))
    spec = SpecStats(num_verify_steps=sum(histogram), num_accepted_tokens=accepted, accepted_histogram=histogram)
    return RequestOutput(
        prompt_token_ids=(1,),
        token_ids=tuple(range(num_tokens)),
        text="",
        finish_reason="length",
        num_cached_tokens=0,
        spec=spec,
    )


def test_figures_of_adaptive_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    one, two, adaptive = variants("--configs", "1,1", "3,1")
    step = ((0.001, 0.002, 0.001),)
    sizes = Counter(num_steps=4, num_plain_steps=1, num_requests=4, num_nodes=10, num_draft_levels=6)

    def rounds(histogram: tuple[int, ...], *seconds: float, sizes: Counter[str] | None = None) -> list[list[Sample]]:
        steps = () if sizes else step
        return [[Sample((output(6, histogram),), steps, each, sizes or Counter())] for each in seconds]

    samples = {
        "plain": rounds((6,), 1.0, 2.0, 1.0),
        one.name: rounds((0, 3), 0.5, 1.0, 0.8),
        two.name: rounds((2, 2), 0.9, 1.0, 1.0),
        "adaptive": rounds((2, 2), 0.4, 1.0, 0.5, sizes=sizes),
    }
    config = parse_command_line(AcceptanceBenchConfig, "bench", [*FLAGS, "--adaptive"])
    about: dict[str, object] = {"model": "tiny", "dtype": "", "device": "", "speculative_algorithm": "mtp"}
    report = full_report(config, about, [], Result((one, two, adaptive), samples, None, 1), [])
    assert len(report["configurations"]) == 2
    found = report["adaptive"]
    assert (found["nodes_per_request"], found["draft_depth"], found["plain_share"]) == (2.5, 1.5, 0.25)
    assert found["accept_length"] == 1.5
    assert (found["end_to_end_speedup"], found["end_to_end_speedup_range"]) == (2.0, [2.0, 2.5])
    assert found["end_to_end_tokens_per_second"] == 12.0
    assert (found["best_fixed"], found["over_best_fixed"]) == ("1,1,2", 1.25)
    assert found["over_best_fixed_range"] == [1.0, 1.6]
    print_report(report)
    assert "2.00 of plain (2.00-2.50), 1.25 of (1, 1, 2), the best fixed shape (1.00-1.60)" in capsys.readouterr().out


def test_flags_of_a_shape_are_bounds() -> None:
    def shape(*flags: str) -> tuple[int, int, int]:
        *fixed, adaptive = variants(*flags)
        assert not any(one.is_adaptive for one in fixed)
        assert adaptive.flags["speculative_adaptive"] == "auto"
        return adaptive.num_steps, adaptive.topk, adaptive.num_draft_tokens

    assert shape("--configs", "1,1", "4,4,8") == shape() == ROOM
    assert shape("--speculative-num-steps", "2") == (2, 1, 3)
    assert shape("--speculative-algorithm", "ngram") == (4, 4, 8)


def test_adaptive_sizes_need_a_draft_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = write_tiny_checkpoint(tmp_path, seed=0, vocab_size=4096, with_mtp=False)
    with pytest.raises(SystemExit) as ended:
        acceptance.main([*FLAGS, "--adaptive", "--model", str(bare)])
    assert ended.value.code == 2
    assert "this checkpoint has no MTP head" in capsys.readouterr().err


def test_a_server_starts_from_what_the_tuner_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPECMAMBA_SPECULATIVE_ADAPTIVE", raising=False)
    monkeypatch.chdir(tmp_path)
    small = ["--batch-sizes", "1", "--max-nodes", "3", "--rounds", "1", "--num-prompts", "2", "--max-tokens", "16"]
    files = ["--json", "report.json", "--speculative-costs", "times.json"]
    assert tune_tree.main([*FLAGS, *small, *files]) == 0
    out = capsys.readouterr().out
    assert "wrote times of steps to times.json" in out
    assert "--context-length 256 --max-running-requests 1 --speculative-adaptive auto" in out
    assert "mtp drafts of at most 4 steps, topk 3 and 8 nodes, 1 requests" in out
    report = json.loads(Path("report.json").read_text())

    def refuse(engine: object) -> None:
        raise AssertionError("times are measured again")

    monkeypatch.setattr(cost_measurement, "measure_costs", refuse)
    with LLM(**ENGINE, context_length=256, speculative_adaptive="auto", speculative_costs=Path("times.json")) as llm:
        assert llm.engine.runner.sizer is not None
        times = llm.engine.runner.sizer.times.costs.times[1]
    found = report["sizing"]["times"]["1"]
    assert [*map(float, found["verify_ms"].values())] == pytest.approx([1e3 * each for each in times.verifies.values()])
    assert list(found["draft_ms"]) == ["1", "2", "3", "4"]
    found["chain_step_ms"], report["sizing"]["is_new"] = {"1": 5.0, "4": 3.0}, False
    tables.print_report(report)
    out = capsys.readouterr().out
    assert "read times of steps of an earlier run from times.json" in out
    assert "warning: times.json: steps with a longer chain took less time" in out


def test_a_file_that_holds_no_times_is_refused_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("times.json").write_text("{")
    with pytest.raises(SystemExit) as ended:
        tune_tree.main([*FLAGS, "--batch-sizes", "1", "--speculative-costs", "times.json"])
    assert ended.value.code == 2
    assert "--speculative-costs: times.json: Invalid JSON" in capsys.readouterr().err
    assert not Path("tree.json").exists()
