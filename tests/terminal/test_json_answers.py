"""``specmamba generate --json``: what is printed, and the exit status."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest

from specmamba import LLM, SamplingParams
from specmamba.cli import main
from specmamba.core import OutputDelta
from specmamba.errors import CheckpointError
from tests.fake_engine import TEXT, FakeEngine

pytestmark = pytest.mark.usefixtures("no_settings_from_outside")
PROMPTS = ["--prompt", "first", "--prompt", "the second"]
Run = Callable[..., tuple[int, list[dict[str, Any]], str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(engine: object, *arguments: str) -> tuple[int, list[dict[str, Any]], str]:
        def build(config: object) -> object:
            if isinstance(engine, Exception):
                raise engine
            return engine

        monkeypatch.setattr("specmamba.cli._build_engine", build)
        status = main(["generate", "--json", *arguments])
        out, err = capsys.readouterr()
        return status, [json.loads(line) for line in out.splitlines()], err

    return run


def test_one_object_for_each_prompt_in_their_order(run: Run) -> None:
    engine = FakeEngine(context_length=500)
    status, (first, second), err = run(engine, *PROMPTS, "--max-tokens", "200")
    assert (status, err, engine.num_closed) == (0, "", 1)
    assert [first["index"], second["index"]] == [0, 1]
    assert first["prompt"] == "first"
    assert second["text"] == TEXT
    assert bytes(second["token_ids"]).decode() == TEXT
    assert (first["finish_reason"], first["error"], first["accept_rule"]) == ("stop", None, "target")
    usage = first["usage"]
    assert (usage["prompt_tokens"], usage["cached_tokens"], usage["completion_tokens"]) == (5, 3, len(TEXT.encode()))
    assert usage["verify_steps"] + usage["accepted_tokens"] == usage["completion_tokens"]
    assert usage["drafted_tokens"] >= usage["accepted_tokens"] > 0
    assert usage["accept_length"] == round(usage["completion_tokens"] / usage["verify_steps"], 4)
    assert 0 < first["times"]["first_token_s"] <= first["times"]["total_s"]
    assert first["seed"] != second["seed"]


def test_more_prompts_than_the_queue_holds(run: Run) -> None:
    engine = FakeEngine(context_length=500)
    engine.config = engine.config.model_copy(update={"max_queued_requests": 1})
    status, answers, _ = run(engine, *PROMPTS, *PROMPTS)
    assert status == 0
    assert [answer["prompt"] for answer in answers] == ["first", "the second"] * 2


def test_nothing_that_a_model_writes_acts_on_a_terminal(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("specmamba.cli._build_engine", lambda config: FakeEngine(text="\x1b[2J\x9bé\n"))
    assert main(["generate", "--json", "--prompt", "x"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.isascii()
    assert line.isprintable()
    assert json.loads(line)["text"] == "\x1b[2J\x9bé\n"


@pytest.mark.parametrize(
    ("engine", "arguments", "kind", "message"),
    [
        (FakeEngine(), ["--prompt", "x" * 500], "PromptTooLongError", "the prompt has 500 tokens"),
        (FakeEngine(), ["--prompt", "x", "--prompt", ""], "RequestError", "the prompt is empty"),
        (FakeEngine(), ["--prompt", "x", "--stop", ""], "ConfigError", "--stop"),
        (CheckpointError("there is no folder a"), ["--prompt", "x"], "CheckpointError", "there is no folder a"),
        (MemoryError("out of memory"), ["--prompt", "x"], "NotEnoughMemoryError", "the memory does not suffice"),
    ],
)
def test_a_refusal_is_json_on_standard_error_and_status_2(
    run: Run, engine: object, arguments: list[str], kind: str, message: str
) -> None:
    status, answers, err = run(engine, *arguments)
    assert (status, answers) == (2, [])
    error = json.loads(err)["error"]
    assert error["type"] == kind
    assert message in error["message"]


def test_a_prompt_that_is_no_text_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), "utf8", errors="strict"))
    status, answers, err = run(FakeEngine())
    assert (status, answers) == (2, [])
    error = json.loads(err)["error"]
    assert (error["type"], error["param"]) == ("RequestError", "prompt")
    assert "no text in utf-8: there is the byte 0xff" in error["message"]


class BreakingEngine(FakeEngine):
    """Gives its first request up, or is interrupted, after some steps."""

    def __init__(self, interrupt: bool = False) -> None:
        super().__init__(context_length=500)
        self._interrupt = interrupt

    def step(self) -> list[OutputDelta]:
        deltas = super().step()
        if self.num_steps < 3:
            return deltas
        if self._interrupt:
            raise KeyboardInterrupt
        if self.num_steps == 3:
            lost = deltas[0].request_id
            self.abort(lost)
            deltas[0] = OutputDelta(lost, (), "", 5, 3, 4, "error", "out of luck")
        return deltas


def test_a_prompt_that_the_engine_gives_up_has_an_error_and_the_status_is_1(run: Run) -> None:
    status, (first, second), _ = run(BreakingEngine(), *PROMPTS)
    assert status == 1
    assert (first["finish_reason"], first["error"], first["text"]) == ("error", "out of luck", TEXT[:4])
    assert (second["finish_reason"], second["text"]) == ("stop", TEXT)


def test_ctrl_c_leaves_what_there_is_and_the_status_is_130(run: Run) -> None:
    engine = BreakingEngine(interrupt=True)
    status, answers, _ = run(engine, *PROMPTS)
    assert (status, engine.num_closed) == (130, 0)
    assert [answer["finish_reason"] for answer in answers] == ["abort", "abort"]
    assert [answer["text"] for answer in answers] == [TEXT[:4]] * 2


@pytest.mark.slow
def test_the_seed_gives_the_text_again_in_python(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--dtype", "float32", "--context-length", "256", "--speculative-adaptive", "off"]
    flags += ["--speculative-accept", "target"]
    asked = ["--prompt", "def main():\n", "--prompt", "import os\n", "--max-tokens", "12", "--temperature", "0.8"]
    assert main(["generate", "--json", *flags, *asked, "--seed", "5"]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [answer["model"] for answer in answers] == ["specmamba-demo"] * 2
    with LLM(dtype="float32", context_length=256, speculative_adaptive="off") as llm:
        for answer in answers:
            params = SamplingParams(max_tokens=12, temperature=0.8, seed=answer["seed"])
            assert list(llm.generate(answer["prompt"], params)[0].token_ids) == answer["token_ids"]
