"""The engine thread: every request and every call gets an answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from specmamba.core import OutputDelta
from specmamba.engine.thread import EngineRequest, EngineThread
from specmamba.errors import ConfigError, EngineStoppedError, QueueFullError, RequestError
from specmamba.sampling_params import SamplingParams
from tests.fake_engine import TEXT, FakeEngine, wait_until

LONG = SamplingParams(max_tokens=10_000)


class Listener:
    def __init__(self, request_id: str, prompt: str = "hi", params: SamplingParams = LONG) -> None:
        self.deltas: list[OutputDelta] = []
        self.ended = threading.Event()
        self.request = EngineRequest(request_id, list(prompt.encode()), params, self.take)

    def take(self, delta: OutputDelta) -> None:
        self.deltas.append(delta)
        if delta.finish_reason is not None:
            self.ended.set()

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)


@contextmanager
def running(engine: FakeEngine) -> Iterator[EngineThread]:
    thread = EngineThread(lambda: engine)  # type: ignore[arg-type, return-value]
    thread.start()
    yield thread
    assert thread.shutdown(0.0)


def test_requests_run_together_to_their_ends() -> None:
    listeners = [Listener(f"r{i}") for i in range(3)]
    with running(FakeEngine()) as thread:
        thread.submit([listener.request for listener in listeners]).result(60)
        assert all(listener.ended.wait(60) for listener in listeners)
    assert [listener.text for listener in listeners] == [TEXT] * 3
    assert [delta.finish_reason for delta in listeners[0].deltas if delta.finish_reason] == ["stop"]


def test_an_idle_thread_does_not_step_and_wakes_up() -> None:
    engine = FakeEngine()
    with running(engine) as thread:
        assert thread.call(lambda engine: engine.stats().num_running).result(60) == 0
        assert engine.num_steps == 0
        listener = Listener("a")
        thread.submit([listener.request]).result(60)
        assert listener.ended.wait(60)
        steps = engine.num_steps
        thread.call(lambda engine: None).result(60)
        assert engine.num_steps == steps


def test_the_engine_is_built_used_and_closed_on_one_thread() -> None:
    used_by: set[int] = set()

    class Watched(FakeEngine):
        def __getattribute__(self, name: str) -> Any:
            if name in ("add_request", "abort", "step", "stats", "close", "describe"):
                used_by.add(threading.get_ident())
            return super().__getattribute__(name)

    engine = Watched()
    with running(engine) as thread:
        listener = Listener("a")
        thread.submit([listener.request]).result(60)
        thread.abort(["a"])
    assert used_by == {thread._thread.ident}
    assert engine.num_closed == 1


def test_an_idle_engine_is_called_as_often_as_it_says() -> None:
    called: list[float] = []

    class Idling(FakeEngine):
        def idle(self) -> float | None:
            called.append(time.monotonic())
            return 0.01 if len(called) < 5 else None

    engine = Idling()
    with running(engine) as thread:
        wait_until(lambda: len(called) == 5)
        time.sleep(0.05)
        assert len(called) == 5
        assert engine.num_steps == 0
        assert called[-1] - called[0] >= 0.04
        thread.submit([Listener("a").request]).result(60)


@pytest.mark.parametrize(("prompt", "expected"), [("", RequestError), ("x" * 1000, RequestError)])
def test_a_batch_with_a_bad_prompt_is_refused_as_a_whole(prompt: str, expected: type[Exception]) -> None:
    engine = FakeEngine()
    with running(engine) as thread:
        future = thread.submit([Listener("good").request, Listener("bad", prompt).request])
        with pytest.raises(expected):
            future.result(60)
        assert not engine.running


def test_a_batch_of_which_half_fits_the_queue_is_refused_as_a_whole() -> None:
    engine = FakeEngine(step_s=0.01)
    engine.config = engine.config.model_copy(update={"max_queued_requests": 2})
    with running(engine) as thread:
        first = Listener("first")
        thread.submit([first.request]).result(60)
        with pytest.raises(QueueFullError):
            thread.submit([Listener("a").request, Listener("b").request]).result(60)
        assert list(engine.running) == ["first"]


def test_abort_takes_effect_between_two_steps() -> None:
    engine = FakeEngine(step_s=0.01)
    with running(engine) as thread:
        gone, stays = Listener("gone"), Listener("stays")
        thread.submit([gone.request, stays.request]).result(60)
        wait_until(lambda: gone.deltas)
        thread.abort(["gone", "never-existed"])
        thread.call(lambda engine: None).result(60)
        seen = len(gone.deltas)
        assert stays.ended.wait(60)
        assert len(gone.deltas) == seen
        assert stays.text == TEXT
        thread.abort(["stays"])  # finished: ignored
    assert engine.aborted == ["gone"]


def test_a_callback_that_raises_ends_only_its_own_request() -> None:
    engine = FakeEngine()

    def take(delta: OutputDelta) -> None:
        raise RuntimeError("Event loop is closed")

    with running(engine) as thread:
        stays = Listener("stays")
        thread.submit([EngineRequest("broken", [1], LONG, take), stays.request]).result(60)
        assert stays.ended.wait(60)
        assert thread.failed is None
    assert engine.aborted == ["broken"]


def test_draining_finishes_what_runs_and_refuses_the_rest() -> None:
    engine = FakeEngine(step_s=0.005)
    with running(engine) as thread:
        listener = Listener("a")
        thread.submit([listener.request]).result(60)
        thread.drain(30.0)
        with pytest.raises(EngineStoppedError, match="shutting down"):
            thread.submit([Listener("b").request])
        assert thread.shutdown(30.0)
        assert listener.text == TEXT
        assert listener.deltas[-1].finish_reason == "stop"
        with pytest.raises(EngineStoppedError):
            thread.call(lambda engine: None)
    assert (engine.num_closed, thread.failed, thread.has_stopped) == (1, None, True)


def test_the_deadline_of_a_drain_aborts_what_still_runs() -> None:
    engine = FakeEngine(step_s=0.02, chunk=1)
    with running(engine) as thread:
        listener = Listener("a")
        thread.submit([listener.request]).result(60)
        wait_until(lambda: listener.deltas)
        assert thread.shutdown(0.05)
        last = listener.deltas[-1]
        assert (last.finish_reason, last.text, last.num_prompt_tokens) == ("abort", "", 2)
        assert last.num_output_tokens == listener.deltas[-2].num_output_tokens
    assert engine.aborted == ["a"]


def test_a_crash_of_a_step_reaches_every_caller() -> None:
    stopped = threading.Event()
    with running(FakeEngine(fail_at_step=2)) as thread:
        thread.on_stop(stopped.set)
        listeners = [Listener("a"), Listener("b")]
        thread.submit([listener.request for listener in listeners]).result(60)
        for listener in listeners:
            assert listener.ended.wait(60)
            assert listener.deltas[-1].finish_reason == "error"
            assert listener.deltas[-1].error == "the engine failed: RuntimeError: scripted failure"
        assert stopped.wait(60)
        assert isinstance(thread.failed, RuntimeError)
        with pytest.raises(EngineStoppedError, match="failed"):
            thread.submit([Listener("c").request])
        late = threading.Event()
        thread.on_stop(late.set)
        assert late.is_set()


def test_queued_calls_are_refused_after_a_crash() -> None:
    entered, go_on = threading.Event(), threading.Event()

    class Crashing(FakeEngine):
        def step(self) -> list[OutputDelta]:
            entered.set()
            go_on.wait(60)
            raise RuntimeError("crash")

    with running(Crashing()) as thread:
        thread.submit([Listener("a").request]).result(60)
        assert entered.wait(60)
        waiting = [thread.submit([Listener("b").request]), thread.call(lambda engine: None)]
        go_on.set()
        for future in waiting:
            with pytest.raises(EngineStoppedError):
                future.result(60)


def test_an_engine_that_forgets_a_request_has_failed() -> None:
    class Forgetful(FakeEngine):
        def step(self) -> list[OutputDelta]:
            self.running.clear()
            return []

    with running(Forgetful()) as thread:
        listener = Listener("a")
        thread.submit([listener.request]).result(60)
        assert listener.ended.wait(60)
        assert "lost track of a" in str(listener.deltas[-1].error)


def test_an_engine_that_cannot_free_a_request_has_failed() -> None:
    class Leaking(FakeEngine):
        def abort(self, request_id: str) -> None:
            raise RuntimeError("slot 3 is not mine")

    with running(Leaking(step_s=0.01)) as thread:
        gone, stays = Listener("gone"), Listener("stays")
        thread.submit([gone.request, stays.request]).result(60)
        thread.abort(["gone"])
        assert stays.ended.wait(60)
        assert "slot 3 is not mine" in str(stays.deltas[-1].error)
        assert isinstance(thread.failed, RuntimeError)


def test_start_raises_what_loading_raises() -> None:
    def build() -> Any:
        raise ConfigError("no such model")

    thread = EngineThread(build)
    with pytest.raises(ConfigError, match="no such model"):
        thread.start()
    assert isinstance(thread.failed, ConfigError)
    assert thread.shutdown(0.0)
