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
        assert rows["transformers"]["ratio"] == rows["plain"]["accept_length"] == 1.0
        assert rows["mtp"]["accept_length"] >= 1.0
        assert all(row["tokens_per_second"] > 0 for row in rows.values())
    assert report["threads"] == {"transformers": 1, "plain": 1, "mtp": 1}
    assert report["prefix_cache"] is False
    assert "tokens/s" in capsys.readouterr().out


@pytest.mark.slow
def test_forms(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    given = [*FLAGS[2:], *SMALL, "--max-total-tokens", "2048", "--temperatures", "0"]
    assert decode.main([*given, "--forms", "bf16", "int4-g32", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    rows = report["results"]["0"]
    assert list(rows) == ["bf16 plain", "bf16 mtp", "int4-g32 plain", "int4-g32 mtp"]
    assert rows["bf16 plain"]["ratio"] == 1.0
    assert report["forms"] == ["bf16", "int4-g32"]


def test_a_form_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        decode.main(["--forms", "bf16", "int3"])
    assert "--forms int3: --quantization: Input should be 'auto'" in capsys.readouterr().err


def test_forms_set_their_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        decode.main(["--forms", "bf16", "--dtype", "float32"])
    assert "--dtype: --forms sets it; drop it" in capsys.readouterr().err


def test_distinct_4grams() -> None:
    assert decode.Sample(1.0, [1, 2, 3, 4] * 8, 1.0).distinct_4gram_ratio == pytest.approx(4 / 29)
    assert decode.Sample(1.0, list(range(32)), 1.0).distinct_4gram_ratio == 1.0


def test_a_wrong_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        decode.main(["--rounds", "0"])
    assert ended.value.code == 2
    assert "--rounds" in capsys.readouterr().err
