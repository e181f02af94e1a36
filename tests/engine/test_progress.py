"""The progress bar of ``LLM.generate`` and ``chat``: where it is shown, what it says, and that it ends."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import pytest
from tqdm import tqdm

from specmamba import LLM, SamplingParams
from specmamba.calls.collector import Collector
from specmamba.calls.progress import wait_for

PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
MESSAGES = [{"role": "user", "content": "Sort a list."}]


class Stream(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(dtype="float32", device="cpu", context_length=128, max_running_requests=2) as llm:
        yield llm


def shown(llm: LLM, monkeypatch: pytest.MonkeyPatch, is_terminal: bool, **options: Any) -> list[str]:
    """What two calls of three and one texts write to standard error, the last state of each bar."""
    lines = []
    for call in (
        partial(llm.generate, ["a", "b", "c"], PARAMS, **options),
        partial(llm.chat, MESSAGES, PARAMS, **options),
    ):
        stream = Stream(is_terminal)
        monkeypatch.setattr(sys, "stderr", stream)
        call()
        monkeypatch.undo()
        if text := stream.getvalue():
            assert text.endswith("\n")
            lines.append(text.rstrip("\n").split("\r")[-1])
    return lines


def test_at_a_terminal_by_default(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = shown(llm, monkeypatch, is_terminal=True)
    assert "3/3" in first
    assert "1/1" in second
    assert "tokens/s" in first


def test_else_only_where_it_is_asked_for(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(llm, monkeypatch, is_terminal=False) == []
    assert shown(llm, monkeypatch, is_terminal=True, use_tqdm=False) == []
    assert len(shown(llm, monkeypatch, is_terminal=False, use_tqdm=True)) == 2
    monkeypatch.setattr(sys, "stderr", None)  # a process without a console
    assert len(llm.generate("x", PARAMS)) == 1


def test_a_bar_of_the_callers_own(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    bars = []

    def make(**options: Any) -> Any:
        bars.append(tqdm(**{**options, "file": io.StringIO()}))
        return bars[-1]

    several = PARAMS.model_copy(update={"n": 3})
    assert llm.generate([], PARAMS, use_tqdm=make) == []
    llm.generate(["a", "b"], several, use_tqdm=make)
    assert [(bar.n, bar.total) for bar in bars] == [(6, 6)]


def test_what_ends_while_the_bar_is_drawn_is_counted() -> None:
    class Counter:
        num_calls, num_tokens, num_ended = 2, 9, 1

    counter, ended, shown = Counter(), threading.Event(), []

    class Bar(tqdm):  # type: ignore[misc]
        def update(self, n: float | None = 1) -> bool | None:
            shown.append(n)
            counter.num_ended = 2
            ended.set()
            return super().update(n)

    wait_for(ended, cast("Collector", counter), partial(Bar, file=io.StringIO()))
    assert shown == [1, 1]


def test_an_interrupted_call_closes_its_bar(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, wait = Stream(True), threading.Event.wait

    def interrupt(event: threading.Event, timeout: float | None = None) -> bool:
        if threading.current_thread() is threading.main_thread() and stream.getvalue():
            raise KeyboardInterrupt
        return wait(event, timeout)

    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(threading.Event, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], PARAMS.model_copy(update={"max_tokens": 100}))
    assert stream.getvalue().endswith("\n")
