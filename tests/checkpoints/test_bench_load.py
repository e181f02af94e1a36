"""``bench.load``: what loading takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specmamba.bench.load import main
from tests.tiny import write_tiny_checkpoint


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two models, twice each; and one that is none."""
    models = [str(write_tiny_checkpoint(tmp_path / name, seed)) for seed, name in enumerate(("one", "two"))]
    file = tmp_path / "load.json"
    assert main(["--rounds", "2", "--json", str(file), "--models", *models]) == 0
    report = json.loads(file.read_text())
    assert [each["model"] for each in report["models"]] == ["one", "two"]
    for each in report["models"]:
        assert len(each["loads"]) == 2
        assert all(0 < load["weight_bytes"] <= load["peak_bytes"] < 1 << 30 for load in each["loads"])
    assert "one" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--models", str(tmp_path / "nothing")])
    assert "nothing" in capsys.readouterr().err
