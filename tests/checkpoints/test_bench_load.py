"""``bench.load``: what loading takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specmamba.bench.load import main
from tests.checkpoints.formats import FORMATS, write_base
from tests.pairwise import IS_FULL
from tests.tiny import FULL, LINEAR, write_tiny_checkpoint

pytestmark = pytest.mark.usefixtures("forked_processes")

MODEL = {"hidden_size": 1024, "intermediate_size": 4096, "layer_types": [LINEAR, FULL] * 4}
MOST_BESIDE = 64 << 20  # of memory: what is read or decoded at a time is one matrix, of 16 MiB in float32


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


@pytest.mark.slow
# The others decode into the same form, as tests of the operators show.
@pytest.mark.parametrize("form", ["FP8 blocks of Qwen", "GGUF Q8_0", "GGUF Q4_K"] if IS_FULL else ["GGUF Q4_K"])
def test_memory(form: str, tmp_path: Path) -> None:
    """Of loading, beside the weights that are kept: what one matrix takes, and a seventh of all."""
    base = write_base(tmp_path / "base", **MODEL)
    model, file = FORMATS[form](base, tmp_path / "model"), tmp_path / "load.json"
    assert main(["--rounds", "1", "--json", str(file), "--models", str(model)]) == 0
    (load,) = json.loads(file.read_text())["models"][0]["loads"]
    assert load["weight_bytes"] > 64 << 20
    assert load["peak_bytes"] < 1.15 * load["weight_bytes"] + MOST_BESIDE
