"""The comparison of drafters: counts are those of each drafter, rounds repeat them, and mistakes are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specmamba.bench import drafters
from specmamba.config import DEMO_MODEL
from specmamba.measure.acceptance.judge import Difference
from specmamba.measure.acceptance.run import Result
from specmamba.measure.prompts import PromptText
from tests.blocks import write_block_head

SMALL = ["--dtype", "float32", "--num-threads", "1", "--num-prompts", "1", "--max-tokens", "24", "--rounds", "2"]


def run(tmp_path: Path, *flags: str) -> dict[str, Any]:
    file = tmp_path / "report.json"
    assert drafters.main([*SMALL, *flags, "--json", str(file)]) == 0
    report: dict[str, Any] = json.loads(file.read_text())
    return report


def test_texts_are_drafted_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "".join(f"def add_{name}(a, b):\n    return a + b\n\n" for name in ("one", "two"))
    monkeypatch.setattr(drafters, "prompts_of", lambda *_: [PromptText(code, code)])
    report = run(tmp_path, "--texts", "edit", "--shapes", "1,1", "4,2,6")
    runs = report["runs"]
    shapes = [(one["drafter"], one["num_steps"], one["topk"], one["num_draft_tokens"]) for one in runs]
    assert shapes == [("suffix", 1, 1, 2), ("ngram", 1, 1, 2), ("suffix", 4, 2, 6), ("ngram", 4, 2, 6)]
    for first, one in zip((runs[0], runs[0], runs[2], runs[2]), runs, strict=True):
        assert one["output_tokens"] == 2 * 24
        assert all(count % 2 == 0 for count in one["accept_length_histogram"])  # rounds repeat each other
        assert 1 < one["accept_length"] <= one["num_steps"] + 1
        assert one["accept_length_over_first"] == round(one["accept_length"] / first["accept_length"], 3)
        low, high = one["speedup_range"]
        assert 0 < low <= one["speedup"] <= high
    assert runs[2]["accept_length"] > runs[0]["accept_length"]


@pytest.mark.slow
def test_heads_beside_each_other(tmp_path: Path) -> None:
    """A random head is seldom right where the demo's own is often; both leave the text as it is."""
    head = write_block_head(tmp_path / "head", DEMO_MODEL, seed=1)
    ways = ["--ways", "greedy,replayed", "--texts", "held-out", "--shapes", "3,1"]
    report = run(tmp_path, "--drafters", f"mtp,random={head.folder}", *ways)
    of = {(one["way"], one["drafter"]): one for one in report["runs"]}
    assert len(of) == 4
    for way in ("greedy", "replayed"):
        assert of[way, "mtp"]["accept_length"] > of[way, "random"]["accept_length"] >= 1
    assert of["replayed", "mtp"]["lossless"] is None
    for drafter in ("mtp", "random"):
        assert of["greedy", drafter]["lossless"]["diverged"] == 0
    assert str(tmp_path) not in json.dumps(report)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--drafters", "suffixes"], "suffixes: not mtp, suffix, ngram or NAME=FOLDER"),
        (["--drafters", "mtp,head=missing"], "there is no folder missing"),
        (["--speculative-num-steps", "3"], "drafts as --drafters and --shapes say"),
        (["--texts", "poems"], "held-out"),
        (["--shapes", "3"], "--shapes: '3' is not steps,topk"),
        (["--drafters", "suffix,mtp,suffix"], "two have the same name"),
    ],
)
def test_mistakes_are_refused(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        drafters.main([*SMALL, *flags])
    assert error.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_the_worst_difference_of_all_rounds_stays() -> None:
    tie = Difference(0, 1, 1, 2, 3, shift=0.1, bound=1.0)
    wrong = replace(tie, shift=2.0)
    found = [None, tie, None], [tie, wrong, None], [None, tie, None]
    rounds = [Result((), {}, {"3,1,4": list(each)}, 1) for each in found]
    assert drafters.merged(rounds).differences == {"3,1,4": [tie, wrong, None]}
