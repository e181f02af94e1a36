"""The decode benchmark: a small run, and the figures of its report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specmamba.bench import decode

FLAGS = ["--dtype", "float32", "--device", "cpu", "--num-threads", "1", "--context-length", "512"]
SMALL = ["--rounds", "2", "--num-prompts", "1", "--max-tokens", "12"]


@pytest.mark.slow
def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    assert decode.main([*FLAGS, *SMALL, "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert set(report["results"]) == {"0", "0.8"}
    for rows in report["results"].values():
        assert set(rows) == {"transformers", "plain", "mtp"}
        assert rows["transformers"]["ratio_to_transformers"] == rows["plain"]["accept_length"] == 1.0
        assert rows["mtp"]["accept_length"] >= 1.0
        assert all(row["tokens_per_second"] > 0 for row in rows.values())
    assert report["threads"] == {"transformers": 1, "plain": 1, "mtp": 1}
    assert report["prefix_cache"] is False
    assert "tokens/s" in capsys.readouterr().out


def test_distinct_4grams() -> None:
    assert decode.Sample(1.0, [1, 2, 3, 4] * 8, 1.0).distinct_4gram_ratio == pytest.approx(4 / 29)
    assert decode.Sample(1.0, list(range(32)), 1.0).distinct_4gram_ratio == 1.0


def test_a_wrong_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        decode.main(["--rounds", "0"])
    assert ended.value.code == 2
    assert "--rounds" in capsys.readouterr().err
