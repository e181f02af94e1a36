"""``specmamba doctor``: a working installation passes; a broken one gets advice and status 1."""

from __future__ import annotations

import json
import re
import sys
from importlib.metadata import version
from typing import Any

import pytest

from specmamba.cli import main
from specmamba.config import EngineConfig
from specmamba.doctor import complete_json_flag, print_report, text_words, waiting
from specmamba.doctor import examine as self_test
from specmamba.doctor.examine import SMALL_POOLS, affordable_tokens, engines_of, examine, guarded, problems_of
from specmamba.kernels.native.library import sources

CHEAP = ["doctor", "--device", "cpu", "--num-threads", "1"]


@pytest.fixture(autouse=True)
def short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "ROUNDS", 2)
    monkeypatch.setattr(self_test, "TOKENS", (12, 12))


def json_of(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, Any]]:
    status = main([*CHEAP, *flags, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_the_demo_passes(capsys: pytest.CaptureFixture[str]) -> None:
    status, report = json_of(capsys)
    assert status == 0, report["problems"]
    assert report["ok"]
    exact, rounded = report["self_tests"]
    assert (exact["dtype"], rounded["dtype"]) == ("float32", "bfloat16")
    for test in (exact, rounded):
        assert (test["drafts"], test["num_prompts"], test["num_tokens"]) == ("mtp", 2, 12)
        assert test["accept_length"] > 1
        assert min(test["speedup"], test["plain_tokens_per_second"], test["speculative_tokens_per_second"]) > 0
    assert exact["texts"] == {"identical": 2, "near_tie": 0, "diverged": 0, "worst": None}
    assert rounded["texts"]["diverged"] == 0
    native = report["kernels"]["native"]
    assert (native["reason"] is None) == (len(native["built"]) == len(sources()))
    print_report(report)
    text = capsys.readouterr().out
    for words in ("torch " + version("torch"), "specmamba-demo", "token for token", "acceptance length", "ready to"):
        assert words in text


def test_texts_that_differ_end_with_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write = self_test._write

    def write_wrongly(llm: Any, prompt: list[int], params: Any) -> Any:
        text, *rest = write(llm, prompt, params)
        is_drafting = llm.engine.draft_plan.max_nodes > 1
        return ((*text[:5], (text[5] + 1) % llm.engine.vocab_size, *text[6:]) if is_drafting else text, *rest)

    monkeypatch.setattr(self_test, "_write", write_wrongly)
    assert main([*CHEAP, "--dtype", "float32"]) == 1
    out = capsys.readouterr().out
    assert "2 different for another reason than rounding" in out
    assert "error: 2 of 2 texts in float32 differ with drafts" in out
    assert "what to do: try SPECMAMBA_NATIVE=0" in out
    assert "parts at token 6" in out
    assert "not fit to serve: 1 error, 0 warnings" in out


@pytest.mark.slow
def test_a_model_that_drafts_nothing_is_tested_with_n_grams(capsys: pytest.CaptureFixture[str]) -> None:
    status, report = json_of(capsys, "--speculative-algorithm", "none", "--dtype", "float32")
    assert status == 0
    (test,) = report["self_tests"]
    assert test["drafts"] == "ngram"
    assert test["texts"]["identical"] == 2


def test_which_engines_are_tested() -> None:
    exact, own = engines_of(EngineConfig(), "mtp")
    assert (exact["dtype"], own["dtype"]) == ("float32", "auto")
    assert exact.items() >= SMALL_POOLS.items()
    exact, own = engines_of(EngineConfig(page_size=16), "mtp")
    assert {name: own[name] for name in SMALL_POOLS} == {name: exact[name] for name in SMALL_POOLS}
    assert len(engines_of(EngineConfig(dtype="bfloat16"), "mtp")) == 1
    (only,) = engines_of(EngineConfig(model="elsewhere"), "none")
    assert (only["model"], only["speculative_algorithm"]) == ("elsewhere", "ngram")


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CHEAP, "--model", "/nowhere/at/all"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"error: the model: .*/nowhere/at/all.*\n +what to do: ", out)
    assert "self-test" not in out


def test_memory_that_is_too_small(capsys: pytest.CaptureFixture[str]) -> None:
    status, report = json_of(capsys, "--mem-fraction-static", "0.0001")
    assert status == 1
    assert report["self_tests"] == []
    (problem,) = (each for each in report["problems"] if each["severity"] == "error")
    assert problem["what"].startswith("the engine does not start: ")
    assert "--mem-fraction-static" in problem["what"]


def test_a_part_that_fails_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Any:
        raise OSError("out of luck")

    assert guarded("the moon", fail)[1][0].what == "the moon: OSError: out of luck"
    monkeypatch.setattr("specmamba.doctor.examine.examine_hardware", fail)
    monkeypatch.setattr("specmamba.doctor.examine.examine_plan", fail)
    report = examine(EngineConfig(device="cpu"))
    whats = [problem["what"] for problem in report["problems"] if problem["severity"] == "error"]
    assert whats == ["the machine: OSError: out of luck", "the model: OSError: out of luck"]
    assert report["kernels"] is not None
    assert report["hardware"] is None
    print_report(report)


def test_packages_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "specmamba.doctor.examine", None)
    assert main([*CHEAP]) == 1
    out = capsys.readouterr().out
    assert "the packages cannot be imported: " in out
    assert f"torch {version('torch')}" in out


def test_a_terminal_shows_the_part_that_is_running(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    monkeypatch.setattr("rich.status.Status.update", lambda self, status: heard.append(status))
    for is_terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda is_terminal=is_terminal: is_terminal)
        with waiting() as say:
            say("the kernels" if is_terminal else "nothing")
    assert heard == ["the kernels"]


@pytest.mark.parametrize(
    ("given", "completed"),
    [
        (["--json"], ["--json", "-"]),
        (["--json", "--dtype", "float32"], ["--json", "-", "--dtype", "float32"]),
        (["--json", "-", "--seed", "1"], ["--json", "-", "--seed", "1"]),
        (["--json", "report"], ["--json", "report"]),
        (["--json=report"], ["--json=report"]),
    ],
)
def test_json_alone_is_standard_output(given: list[str], completed: list[str]) -> None:
    assert complete_json_flag(given) == completed


# Texts


@pytest.mark.parametrize(
    ("dtype", "near_tie", "diverged", "errors"),
    [("float32", 0, 0, 0), ("float32", 1, 0, 1), ("bfloat16", 1, 0, 0), ("bfloat16", 1, 1, 1), ("float16", 0, 2, 1)],
)
def test_what_counts_as_different(dtype: str, near_tie: int, diverged: int, errors: int) -> None:
    texts = {"identical": 2 - near_tie - diverged, "near_tie": near_tie, "diverged": diverged}
    assert len(problems_of({"dtype": dtype, "texts": texts, "num_prompts": 2})) == errors


def test_a_near_tie_is_explained() -> None:
    worst = {"prompt": 1, "position": 9, "logit_shift": 0.0312, "rounding_explains": 0.27}
    texts = {"identical": 1, "near_tie": 1, "diverged": 0, "worst": worst}
    words = text_words({"dtype": "bfloat16", "texts": texts, "num_prompts": 2})
    assert words == (
        "1 equal, 1 parted where two tokens are nearly as likely; text 2 parts at token 10: 0.031 in the logits "
        "decides there, and rounding to bfloat16 moves them by up to 0.27"
    )


def test_slow_models_write_shorter_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert affordable_tokens(0.001) == 64
    assert affordable_tokens(0.25) == 32
    assert affordable_tokens(1000.0) == 24
