"""The benchmark of start-up: a small run, and a command that ends otherwise than it should."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specmamba.bench import startup

SMALL = ["--runs", "1", "--servers", "1", "--idle-seconds", "0"]
ENGINE = [
    "--context-length",
    "128",
    "--num-threads",
    "1",
    "--max-running-requests",
    "1",
    "--speculative-adaptive",
    "off",
]


@pytest.mark.slow
def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    assert startup.main([*SMALL, *ENGINE, "--json", str(file)]) == 0
    rows = {(row["name"], row["unit"]): row for row in json.loads(file.read_text())["results"]}
    assert len(rows) == len(startup.COMMANDS) + 4
    for row in rows.values():
        assert 0 < row["range"][0] <= row["median"] <= row["range"][1]
        assert row["runs"] == 1
    # It imports PyTorch too, and has given back the pages of libraries and pools: 115 MiB and more above it before.
    of_torch = rows[startup.TORCH_SIZE, "MiB"]["median"]
    assert of_torch / 2 < rows[startup.IDLE, "MiB"]["median"] < of_torch + 60
    assert "idle server" in capsys.readouterr().out


def test_a_command_with_another_status_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(startup, "COMMANDS", {"a wrong flag": ("-c", "print('fine')")})
    with pytest.raises(SystemExit) as ended:
        startup.main(SMALL)
    assert ended.value.code == 2
    assert "a wrong flag: ended with status 0" in capsys.readouterr().err
