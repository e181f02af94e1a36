"""The state drift benchmark: how it compares logits and states, and a run."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from specmamba.bench import state_drift
from specmamba.bench.state_drift import Drift
from specmamba.cli import SUBCOMMANDS, main
from specmamba.config import DEMO_MODEL
from specmamba.models.text.tokenizer import Tokenizer
from tests.families import FAMILIES

SMALL = ["--tokens", "48", "--texts", "2", "--num-threads", "1", "--context-length", "64"]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text of tokens that the smallest vocabulary has."""
    text = "".join(random.Random(0).choices("0123456789;<?@ABEFJOQYZ^ajuz", k=300))
    assert max(Tokenizer(DEMO_MODEL).encode(text)) < 131
    file = tmp_path_factory.mktemp("text") / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": text}) + "\n")
    return file


def test_how_logits_are_compared() -> None:
    drift = Drift()
    state_drift._compare_logits(drift, torch.tensor([3.0, 1.0, -1.0, 1.0]), torch.tensor([3.0, 1.5, -1.0, 0.5]))
    state_drift._compare_logits(drift, torch.tensor([0.0, 2.0]), torch.tensor([2.0, 2.0 - 1e-3]))
    assert drift.logits_error[0] == pytest.approx((0.5 / 4) ** 0.5 / 2**0.5)
    assert drift.flipped == [False, True]


def test_how_states_are_compared() -> None:
    drift, expected = Drift(), torch.zeros(3, 1, 2, 2)
    state_drift._compare_states(drift, expected, expected)  # before the first fold
    expected[0, 0, 0, 0], expected[1, 0, 1, 1] = 4.0, 3.0
    got = expected.clone()
    got[1, 0, 1, 1] += 0.5
    state_drift._compare_states(drift, expected, got)
    assert drift.state_error == pytest.approx([0.0, 0.1])
    assert drift.layer_error == pytest.approx([0.0, 0.5 / 3])


def test_parts_of_a_text() -> None:
    assert state_drift._by_part(torch.tensor([[1.0, 1, 2, 2, 3, 3, 4, 4]] * 3)) == [1.0, 2.0, 3.0, 4.0]


def run(folder: Path, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    file = tmp_path / "drift.json"
    assert main(["bench", "state-drift", "--model", str(folder), *SMALL, "--json", str(file), *arguments]) == 0
    report: dict[str, Any] = json.loads(file.read_text())
    return report


@pytest.mark.parametrize("family", ["qwen3.5", "mamba2"])
def test_a_run(family: str, tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "tiny-model"
    FAMILIES[family].build(folder)
    report = run(folder, tmp_path, "--prompts", str(prompts))
    assert (report["model"], report["texts"], report["tokens_per_text"]) == ("tiny-model", 2, 48)
    exact, bfloat16, float16 = report["results"]
    assert set(exact) == {"state_dtype", "state_bytes_per_slot", "largest_state_element"}
    assert [x["state_dtype"] for x in report["results"]] == ["float32", "bfloat16", "float16"]
    assert bfloat16["state_bytes_per_slot"] == float16["state_bytes_per_slot"] < exact["state_bytes_per_slot"]
    for name in ("state_error", "state_error_at_the_end", "logits_error"):
        assert 0 < float16[name] < bfloat16[name] / 3 < 0.05  # 8 bits against 11
    assert bfloat16["state_error_largest_layer"] >= bfloat16["state_error_at_the_end"]
    assert bfloat16["logits_error_by_part"][0] < bfloat16["logits_error_by_part"][3]  # nothing is folded at first
    assert str(tmp_path) not in json.dumps(report)
    assert "bfloat16" in capsys.readouterr().out


def test_a_run_of_stored_states(tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tiny-model"
    FAMILIES["qwen3.5"].build(folder)
    monkeypatch.setattr(state_drift, "RESUME_INTERVAL", 40)
    report = run(folder, tmp_path, "--prompts", str(prompts), "--of", "stored-states")
    exact, bfloat16, float16 = report["results"]
    assert bfloat16["state_bytes_per_slot"] == float16["state_bytes_per_slot"] < exact["state_bytes_per_slot"]
    assert bfloat16["logits_error_by_part"][:3] == [0.0] * 3  # before the first rounding
    assert 0 < float16["logits_error_by_part"][3] < bfloat16["logits_error_by_part"][3]


def test_a_run_of_keys_and_values(tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "tiny-model"
    FAMILIES["qwen3.5"].build(folder)
    report = run(folder, tmp_path, "--prompts", str(prompts), "--of", "kv-cache")
    exact, int8, fp8 = report["results"]
    assert set(exact) == {"kv_dtype", "kv_bytes_per_token", "largest_state_element"}
    assert [x["kv_dtype"] for x in report["results"]] == ["auto", "int8", "fp8_e4m3"]
    assert int8["kv_bytes_per_token"] == fp8["kv_bytes_per_token"] < exact["kv_bytes_per_token"]
    assert (
        0 < int8["logits_error"] < fp8["logits_error"] / 2 < 0.05
    )  # seven bits of a head's largest number against four
    assert "fp8_e4m3" in capsys.readouterr().out


def test_snapshots_round_more_often(tmp_path: Path, prompts: Path) -> None:
    folder = tmp_path / "tiny-model"
    FAMILIES["qwen3.5"].build(folder)
    records, snapshots = (
        run(folder, tmp_path, "--prompts", str(prompts), "--speculative-state", state)["results"][1]
        for state in ("records", "snapshots")
    )
    assert snapshots["state_error"] > records["state_error"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mamba-ssm-dtype", "float16"], "--mamba-ssm-dtype: this measures all of its types"),
        (["--of", "kv-cache", "--kv-cache-dtype", "int8"], "--kv-cache-dtype: this measures all of its types"),
        (["--speculative-algorithm", "mtp"], "--speculative-algorithm"),
        (["--tokens", "5000"], "--tokens 5000: with the first token that is more than the 4096 that fit"),
        (["--json", "no/such/folder.json"], "--json: there is no folder no/such"),
    ],
)
def test_mistakes(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        state_drift.main(arguments)
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_it_is_a_command() -> None:
    assert SUBCOMMANDS["bench"]["state-drift"][0] == "specmamba.bench.state_drift"
