"""The benchmark of adaptive sizes: a small run, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specmamba.bench import adaptive

FLAGS = ["--dtype", "float32", "--num-threads", "1", "--context-length", "512", "--max-running-requests", "2"]
SMALL = ["--rounds", "1", "--warm-rounds", "8", "--batches", "2", "--max-tokens", "16", "--temperatures", "0"]


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, costs = tmp_path / "report.json", tmp_path / "costs.json"
    assert adaptive.main([*FLAGS, *SMALL, "--json", str(file), "--speculative-costs", str(costs)]) == 0
    report = json.loads(file.read_text())
    [cell] = report["cells"]
    assert list(cell["ways"]) == list(adaptive.WAYS)
    assert cell["ways"]["plain"]["over_plain"] == 1.0
    assert cell["ways"]["chain of 3"]["accepted"] > 1.0
    best = max(figures["over_plain"] for way, figures in cell["ways"].items() if way != adaptive.ADAPTIVE)
    assert cell["over_best_fixed"] == pytest.approx(cell["ways"]["adaptive"]["over_plain"] / best, abs=0.01)
    assert cell["over_best_interval"] == [cell["over_best_fixed"]] * 2
    assert "worst:" in capsys.readouterr().out
    assert json.loads(costs.read_text())["entries"]


@pytest.mark.long
def test_cells_of_given_text_and_given_acceptance(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    more = ["--replay", "--synthetic-acceptance", "0,1", "--json", str(file)]
    assert adaptive.main([*FLAGS, *SMALL, "--speculative-costs", str(tmp_path / "costs.json"), *more]) == 0
    cells = {cell["text"]: cell["ways"] for cell in json.loads(file.read_text())["cells"]}
    assert list(cells) == ["T 0", "given", "accepted 0", "accepted 1"]
    assert [cells[f"accepted {p}"]["chain of 3"]["accepted"] for p in (0, 1)] == [1.0, 4.0]
    assert cells["accepted 0"][adaptive.ADAPTIVE]["accepted"] == 1.0
    assert all(0 <= ways[adaptive.ADAPTIVE]["drafted"] <= 1 for ways in cells.values())


def test_every_way_takes_every_place_of_a_round() -> None:
    for half in (0, 1):  # the rounds that ``over_best`` chooses in, and those that it compares in
        orders = [adaptive.in_turn(number) for number in range(half, 2 * len(adaptive.WAYS), 2)]
        assert all(set(column) == set(adaptive.WAYS) for column in zip(*orders, strict=True))


def test_an_unknown_family_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        adaptive.main([*FLAGS, *SMALL, "--family", "gpt2"])
    assert ended.value.code == 2
    assert "--family gpt2: there are qwen3_5" in capsys.readouterr().err


def test_flags_of_drafts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        adaptive.main([*FLAGS, *SMALL, "--speculative-num-steps", "2"])
    assert ended.value.code == 2
    assert "--speculative-num-steps: this benchmark chooses its own drafts" in capsys.readouterr().err
