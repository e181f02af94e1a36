"""Waking an event loop: rarely, but no function waits longer than the interval."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from typing import cast

import pytest

from specmamba.engine.channels import SHARE, LoopWaker
from tests.fake_engine import TEXT, Served, WaitingEngine, serving

Function = Callable[[], object]
INTERVAL_S = 0.05


class ScriptedLoop:
    """An event loop that runs a round, and expires its timers, only when the test calls it."""

    def __init__(self) -> None:
        self.num_wakes = 0
        self.pauses: list[float] = []
        self._ready: list[Function] = []
        self._timers: list[Function] = []

    def call_soon_threadsafe(self, function: Function) -> None:
        self.num_wakes += 1
        self._ready.append(function)

    def call_later(self, delay_s: float, function: Function) -> None:
        self.pauses.append(delay_s)
        self._timers.append(function)

    @property
    def has_timer(self) -> bool:
        return bool(self._timers)

    def turn(self) -> None:
        ready, self._ready = self._ready, []
        for function in ready:
            function()

    def let_time_pass(self) -> None:
        self._ready, self._timers = [*self._ready, *self._timers], []
        self.turn()


class Steps:
    """Steps of an engine, each with a function for the loop, and the functions that the loop has called."""

    def __init__(self, interval_s: float) -> None:
        self.loop, self.called = ScriptedLoop(), list[str]()
        self.waker = LoopWaker(cast("asyncio.AbstractEventLoop", self.loop), interval_s)

    def step(self, news: str, at_once: bool = False) -> None:
        self.waker.add(lambda: self.called.append(news), at_once)
        self.waker.end_step()
        self.loop.turn()


@pytest.fixture
def spent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Processor times that the loop's thread reports, one per call."""
    said: list[float] = []
    monkeypatch.setattr(time, "thread_time", lambda: said.pop(0))
    yield said
    assert not said


def test_without_an_interval_every_step_wakes() -> None:
    steps = Steps(0.0)
    for news in "abc":
        steps.step(news)
    assert steps.called == ["a", "b", "c"]
    assert steps.loop.num_wakes == 3
    assert not steps.loop.has_timer


def test_a_step_without_functions_does_not_wake_the_loop() -> None:
    steps = Steps(0.0)
    steps.waker.end_step()
    assert steps.loop.num_wakes == 0


def test_functions_wait_for_the_timer() -> None:
    steps = Steps(INTERVAL_S)
    for news in "abc":
        steps.step(news)
    assert steps.called == ["a"]
    steps.loop.let_time_pass()
    assert steps.called == ["a", "b", "c"]
    assert steps.loop.num_wakes == 1


def test_the_pause_follows_the_time_of_the_last_round(spent: list[float]) -> None:
    spent += [1.0, 1.0004, 3.0004]
    steps = Steps(INTERVAL_S)
    for news in "abc":
        steps.step(news)
        steps.loop.let_time_pass()
    assert steps.loop.pauses == [INTERVAL_S, pytest.approx(0.0004 / SHARE), INTERVAL_S]


def test_an_urgent_function_takes_the_waiting_ones_along() -> None:
    steps = Steps(INTERVAL_S)
    steps.step("first")
    steps.step("waits")
    steps.step("urgent", at_once=True)
    assert steps.called == ["first", "waits", "urgent"]
    assert steps.loop.num_wakes == 2


def test_a_loop_without_a_timer_is_woken_again() -> None:
    steps = Steps(INTERVAL_S)
    for number, news in enumerate("abc", start=1):
        steps.step(news)
        steps.loop.let_time_pass()
        assert not steps.loop.has_timer  # timers are not set forever
        assert len(steps.called) == steps.loop.num_wakes == number


def test_the_timer_is_set_again_while_there_are_functions() -> None:
    steps = Steps(INTERVAL_S)
    for news in "abcd":
        steps.step(news)
        steps.step(news.upper())
        steps.loop.let_time_pass()
    assert "".join(steps.called) == "aAbBcCdD"
    assert steps.loop.num_wakes == 1


@pytest.fixture
def no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make timers of loops never expire, so that all that arrives was sent at once."""
    monkeypatch.setattr(LoopWaker, "_look", lambda _: None)


def _streamed(served: Served) -> list[str]:
    lines = []
    body = {"prompt": "a", "stream": True, "max_tokens": 1000}
    with served.http.stream("POST", "/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                lines.append(line)
                served.engine.may_go_on.set()
    return lines


@pytest.mark.usefixtures("no_timer")
def test_a_stream_begins_and_ends_at_once_and_gathers_in_between() -> None:
    with serving(WaitingEngine(), stream_chunk_interval=1.0) as served:
        chunks = [json.loads(line.removeprefix("data: ")) for line in _streamed(served)]
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(texts) == TEXT
    assert len(texts) == 2  # the first step's, and all that came after it
    assert len(texts[0]) == 2


@pytest.mark.usefixtures("no_timer")
def test_an_engine_that_fails_tells_streams_at_once() -> None:
    with serving(WaitingEngine(fail_at_step=4), stream_chunk_interval=1.0) as served:
        lines = _streamed(served)
    assert "engine_error" in lines[-1]
