"""The quality of forms of weights: how text is cut and compared, and runs with a model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3_5ForCausalLM

from specmamba import RequestOutput, SpecStats
from specmamba.bench import quality
from specmamba.checkpoints.gguf import gguf_folder
from specmamba.config import DEMO_MODEL
from specmamba.core import TokenLogprob
from specmamba.errors import SpecmambaError
from specmamba.measure.command import repeated_flags
from specmamba.measure.prompts import bundled_texts
from specmamba.models.text.tokenizer import Tokenizer
from tests.gguf_files import write_gguf

SMALL = ["--num-threads", "1", "--text", "prompts", "--window", "40", "--windows", "3", "--max-running-requests", "2"]


class Letters:
    """A tokenizer with a token for each character."""

    has_chat_template = False

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def apply_chat_template(self, messages: list[dict[str, Any]]) -> list[int]:
        raise NotImplementedError


def run(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    file = tmp_path / "quality.json"
    assert quality.main([*SMALL, "--json", str(file), *arguments]) == 0
    report: dict[str, Any] = json.loads(file.read_text("utf8"))
    return report


def losses(report: dict[str, Any]) -> dict[str, float]:
    return {row["form"]: row["loss"] for row in report["results"]}


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        quality.main(list(arguments))
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_lists_behind_flags() -> None:
    given = ["--forms", "a", "b c", "--decode", "--gguf", "x", "y", "--window=4", "z", "--forms"]
    words = ["--forms", "a", "--forms", "b c", "--decode", "--gguf", "x", "--gguf", "y", "--window=4", "z", "--forms"]
    assert repeated_flags(given, ("--forms", "--gguf")) == words


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "float32"], "--dtype: --forms sets it"),
        (["--forms", "bf16", "int9"], "--forms int9: --quantization: "),
        (["--forms", "INT8"], "--forms: 'INT8' is no form of weights"),
        (["--gguf", "none.gguf"], "--gguf: there is no file none.gguf"),
        (["--gguf", __file__, __file__], "is given twice"),
        (["--window", "1"], "--window"),
        (["--speculative-algorithm", "mtp"], "--speculative-algorithm"),
    ],
)
def test_flags_that_cannot_be(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in error_of(capsys, *arguments)


def test_windows() -> None:
    texts = ["abcdefg", "", "hi", "j", "klmnop"]
    cut = [bytes(window).decode() for window in quality.windows_of(texts, Letters(), 3, 99)]
    assert cut == ["abc", "def", "hi", "klm", "nop"]
    assert [bytes(window).decode() for window in quality.windows_of(texts, Letters(), 3, 2)] == ["abc", "hi"]
    assert quality.windows_of(["", "a"], Letters(), 3, 2) == []


def test_what_is_scored_of_an_output() -> None:
    scores = (TokenLogprob(5, -1.5), TokenLogprob(6, -0.5))
    fields: dict[str, Any] = {"text": "", "num_cached_tokens": 0, "spec": SpecStats(), "finish_reason": "length"}
    read = RequestOutput(token_ids=(), prompt_token_ids=(4, 5, 6), prompt_logprobs=(None, *scores), **fields)
    decoded = RequestOutput(token_ids=(5, 6), prompt_token_ids=(4,), logprobs=scores, **fields)
    assert quality.losses_of(read, is_decode=False) == quality.losses_of(decoded, is_decode=True) == [1.5, 0.5]
    failed = RequestOutput(token_ids=(), prompt_token_ids=(4,), error="not finite", **fields)
    with pytest.raises(SpecmambaError, match="could not be scored: not finite"):
        quality.losses_of(failed, is_decode=False)


def test_the_error_of_a_difference() -> None:
    """Windows of one token: the usual standard error; windows of equal differences: none."""
    assert quality.difference_error([[1.0], [2.0], [6.0]], [[0.0], [0.0], [0.0]]) == pytest.approx(
        torch.tensor([1.0, 2.0, 6.0]).std().item() / math.sqrt(3)
    )
    assert quality.difference_error([[1.5, 2.5], [3.5]], [[1.0, 2.0], [3.0]]) == 0
    assert math.isnan(quality.difference_error([[1.0]], [[1.0]]))


def test_losses_are_those_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the prompt in one step, and of decoding step by step."""
    report = run(tmp_path, "--forms", "fp32")
    texts = [text.text + (text.continuation or "") for text in bundled_texts()]
    windows = quality.windows_of(texts, Tokenizer(DEMO_MODEL), 40, 3)
    model = Qwen3_5ForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    with torch.no_grad():
        logits = [model(torch.tensor([window])).logits[0, :-1] for window in windows]
    targets = torch.tensor([token for window in windows for token in window[1:]])
    expected = float(torch.nn.functional.cross_entropy(torch.cat(logits), targets))
    assert (report["windows"], report["tokens"]) == (3, 3 * 39)
    assert losses(report)["fp32"] == pytest.approx(expected, abs=1e-5)
    assert report["results"][0]["perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)
    assert losses(run(tmp_path, "--forms", "fp32", "--decode"))["fp32"] == pytest.approx(expected, abs=1e-5)
    assert "3 windows, 117 tokens; steps of decoding" in capsys.readouterr().out


def test_forms_beside_the_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gguf_folder, "cache_folder", lambda: tmp_path / "cache")
    file = write_gguf(DEMO_MODEL, tmp_path / "demo.gguf")
    report = run(tmp_path, "--forms", "bf16", "int8", "--gguf", str(file))
    bf16, int8, gguf = report["results"]
    assert [row["form"] for row in report["results"]] == ["bf16", "int8", "demo.gguf"]
    assert (report["model"], report["steps"], report["text"]) == ("specmamba-demo", "prefill", "23 bundled prompts")
    assert int8["weight_bytes"] < bf16["weight_bytes"]
    assert (bf16["difference"], bf16["difference_error"]) == (0, 0)
    assert 0 < abs(int8["difference"]) < 0.05
    assert int8["difference"] == int8["loss"] - bf16["loss"]
    assert gguf["loss"] == bf16["loss"]  # the same weights
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [line.split("|")[1].strip() for line in table] == ["form", "---", "bf16", "int8", "demo.gguf"]
    assert {line.count("|") for line in table} == {7}


def test_text_of_a_file_of_prompts(tmp_path: Path) -> None:
    prompts = tmp_path / "own.jsonl"
    prompts.write_text('{"prompt": "import ", "continuation": "os"}\n{"prompt": "x"}\n')
    report = run(tmp_path, "--forms", "bf16", "--prompts", str(prompts))
    assert (report["text"], report["windows"]) == ("2 texts of own.jsonl", 1)
    assert report["results"][0]["difference_error"] is None  # JSON has no NaN
    prompts.write_text('{"prompt": "x"}\n')
    with pytest.raises(SystemExit):
        run(tmp_path, "--forms", "bf16", "--prompts", str(prompts))
