"""The queue of grammars to compile: callers take turns, and cancelled jobs are stopped."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from specmamba.config import DEMO_MODEL
from specmamba.errors import GrammarQueueFullError
from specmamba.grammar import CompiledGrammar, GrammarCompiler
from specmamba.grammar.compilations import Job, Jobs
from specmamba.models.text.tokenizer import Tokenizer
from specmamba.sampling_params import GrammarSpec
from tests.grammar_schemas import accepts

pytest.importorskip("xgrammar")

BOMB = "|".join("".join(f"[^{chr(97 + i * j % 26)}]*" for j in range(20)) for i in range(400))  # takes long to compile


def spec_of(text: str) -> GrammarSpec:
    return GrammarSpec(kind="regex", text=text)


def job_of(text: str, caller: str | None = None) -> Job:
    return Job(spec_of(text), caller, [Future()])


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer(DEMO_MODEL)


def test_callers_take_turns() -> None:
    jobs = Jobs()
    for text, caller in (("1", "a"), ("2", "a"), ("3", "a"), ("4", "b"), ("5", None), ("6", "b")):
        jobs.add(job_of(text, caller))
    order = []
    while (job := jobs.take()) is not None:
        order.append(job.spec.text)
    assert order == ["1", "4", "5", "2", "6", "3"]
    assert len(jobs) == 6  # until they are dropped
    assert len(jobs.drop_all()) == 6
    assert len(jobs) == 0


def test_dropped_jobs_are_not_taken() -> None:
    jobs, first, second = Jobs(), job_of("1", "a"), job_of("2", "a")
    jobs.add(first)
    jobs.add(second)
    jobs.drop(first)
    jobs.drop(first)
    assert jobs.find(first.spec) is None
    assert jobs.num_waiting("a") == 1
    assert jobs.take() is second
    again = job_of("2", "a")
    jobs.drop(second)
    jobs.add(again)
    jobs.drop(second)  # not the one that came after it
    assert jobs.find(again.spec) is again


def test_jobs_per_caller_are_limited(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specmamba.grammar.compiler.MAX_WAITING_OF_CALLER", 2)
    monkeypatch.setattr(GrammarCompiler, "_run", lambda self: None)
    compiler = GrammarCompiler(tokenizer, 4096, (0,), timeout_s=60.0, cache_bytes=1 << 20)
    asked = [compiler.compile(spec_of(text), caller) for text, caller in zip("abcac", "xxxxy", strict=True)]
    assert [future.done() for future in asked] == [False, False, True, False, False]
    with pytest.raises(GrammarQueueFullError):
        asked[2].result()
    assert asked[1].cancel()
    assert not compiler.compile(spec_of("d"), "x").done()  # there is room again


def test_unwanted_jobs_are_stopped(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specmamba.processes.child_process.SPARE_AFTER_S", 0.1)
    compiler = GrammarCompiler(tokenizer, 4096, (0,), timeout_s=600.0, cache_bytes=1 << 20)
    try:
        compiler.compile(spec_of("a")).result(timeout=120)
        worker = compiler._worker
        assert worker is not None
        left = [compiler.compile(spec_of(BOMB)) for _ in range(2)]
        waiting = compiler.compile(spec_of("waiting"))
        wait_until(lambda: worker._child._busy is not None)
        wait_until(lambda: worker._child._spare is not None)  # a spare process is started, as this takes long
        pid = worker.pid
        assert left[0].cancel()
        assert not waiting.done()  # one future is left
        assert left[1].cancel()
        assert accepts(waiting.result(timeout=120), "waiting")
        assert compiler.worker_pid != pid
        again: Future[CompiledGrammar] = compiler.compile(spec_of(BOMB))
        assert not again.done()  # it was not refused
        again.cancel()
        assert accepts(compiler.compile(spec_of("b")).result(timeout=120), "b")
    finally:
        compiler.close()
    assert worker.pid is None
    assert worker._child._spare is None
