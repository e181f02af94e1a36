"""The benchmark of ``--deterministic``: a small run, and flags that it sets itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specmamba.bench import deterministic

SMALL = ["--rounds", "2", "--max-tokens", "16", "--batches", "1,2", "--num-threads", "1", "--max-total-tokens", "2048"]


@pytest.mark.slow
@pytest.mark.usefixtures("needs_native")
def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    assert deterministic.main([*SMALL, "--json", str(file)]) == 0
    cells = json.loads(file.read_text())["cells"]
    assert [(cell["requests"], cell["drafts"]) for cell in cells] == [
        (n, of) for n in (1, 2) for of in deterministic.SHAPES
    ]
    for cell in cells:
        assert cell["step_ms"] > 0
        for figures in (cell["step"], cell["token"]):
            least, most = figures["range"]
            assert 0 < least <= figures["interval"][0] <= figures["median"] <= figures["interval"][1] <= most
    assert "tree of 8" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--deterministic"], "this benchmark runs with it and without"),
        (["--speculative-num-steps", "2"], "chooses its own drafts"),
    ],
)
def test_flags_that_it_sets(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        deterministic.main(flags)
    assert message in capsys.readouterr().err
