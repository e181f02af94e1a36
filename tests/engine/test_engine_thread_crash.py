"""However the engine thread ends, every client gets an error at once, in OpenAI's format, and the server ends."""

from __future__ import annotations

import ctypes
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

from specmamba.core import OutputDelta
from specmamba.engine.thread import EngineRequest, EngineThread
from specmamba.errors import EngineStoppedError, RankLostError
from specmamba.sampling_params import SamplingParams
from tests.fake_engine import FakeEngine, Served, serving, wait_until

NUM_EACH = 4  # streams, whole answers, and calls that wait to be handed over


class HeldEngine(FakeEngine):
    """Its third step waits for the test, and then does what the test wants."""

    def __init__(self) -> None:
        super().__init__(chunk=1)
        self.is_held, self.let_go = threading.Event(), threading.Event()
        self.then: Callable[[], object] = lambda: None

    def step(self) -> list[OutputDelta]:
        if len(self.running) < 2 * NUM_EACH and not self.is_held.is_set():
            time.sleep(0.001)  # until all are there
            return []
        deltas = super().step()
        if self.num_steps == 3:
            self.is_held.set()
            assert self.let_go.wait(60)
            self.then()
        return deltas


def fail() -> None:
    raise RuntimeError("scripted failure\nwith a second line")


def leave() -> None:
    raise SystemExit("scripted end")


def kill(thread: EngineThread) -> None:
    """Raise SystemExit in the engine thread, wherever it is."""
    identity = ctypes.c_ulong(thread._thread.ident or 0)
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(identity, ctypes.py_object(SystemExit)) == 1


def in_step(served: Served) -> None:
    served.engine.then = fail


def in_step_not_an_exception(served: Served) -> None:
    served.engine.then = leave


def in_command(served: Served) -> None:
    def abort(request_id: str) -> None:
        raise RuntimeError("slot 3 is not mine")

    served.engine.abort = abort
    served.thread.abort(["unknown"])


def in_command_not_an_exception(served: Served) -> None:
    served.thread.call(lambda engine: leave())


def in_callback(served: Served) -> None:
    request = next(iter(served.thread._open.values())).request
    take, actions = request.on_delta, iter([leave])

    def leave_once(delta: OutputDelta) -> None:
        next(actions, lambda: None)()
        take(delta)

    object.__setattr__(request, "on_delta", leave_once)


def from_outside(served: Served) -> None:
    kill(served.thread)


CRASHES = [in_step, in_step_not_an_exception, in_command, in_command_not_an_exception, in_callback, from_outside]


@contextmanager
def outliving_its_engine(served: Served) -> Iterator[None]:
    """Keep the server of this block running when its engine ends, so that it can be queried."""
    served.thread._stop_callbacks.clear()
    try:
        yield
    finally:
        served.server.should_exit = True


def ask(served: Served, pool: ThreadPoolExecutor, stream: bool) -> list[Future[httpx.Response]]:
    def one() -> httpx.Response:
        body = {"prompt": "a", "max_tokens": 60, "stream": stream}
        return httpx.post(f"{served.url}/v1/completions", json=body, timeout=60)

    return [pool.submit(one) for _ in range(NUM_EACH)]


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("crash", CRASHES)
def test_every_open_call_is_answered(crash: Callable[[Served], None]) -> None:
    engine = HeldEngine()
    with serving(engine) as served, ThreadPoolExecutor(3 * NUM_EACH) as pool, outliving_its_engine(served):
        streams, wholes = ask(served, pool, stream=True), ask(served, pool, stream=False)
        assert engine.is_held.wait(60)
        crash(served)
        unanswered = served.thread._commands._unanswered
        before = len(unanswered)
        queued = ask(served, pool, stream=False)
        wait_until(lambda: len(unanswered) == before + NUM_EACH)
        engine.let_go.set()
        for stream in streams:
            *chunks, error, done = stream.result(60).text.strip().split("\n\n")
            assert done == "data: [DONE]"
            assert json.loads(error.removeprefix("data: "))["error"]["code"] == "engine_error"
            assert chunks
        for whole in wholes:
            assert (whole.result(60).status_code, whole.result().json()["error"]["code"]) == (500, "engine_error")
        for waiting in queued:
            assert waiting.result(60).status_code == 500
            assert waiting.result().json()["error"]["type"] == "server_error"
        wait_until(lambda: served.thread.has_stopped)
        health = served.http.get("/health")
        assert (health.status_code, health.json()["error"]["code"]) == (503, "engine_failed")
        assert served.http.get("/ready").status_code == 503
        assert served.http.get("/server_info").json()["status"] == "stopped"
        assert served.complete(prompt="a").status_code == 503
    assert served.thread.failed is not None
    assert engine.num_closed == 1


def test_a_thread_killed_while_idle_answers_the_next_request() -> None:
    with serving() as served, outliving_its_engine(served):
        served.complete(prompt="a")
        kill(served.thread)
        answer = served.complete(prompt="a")  # wakes the thread up, which takes the command, and dies
        assert answer.status_code == 500
        wait_until(lambda: served.thread.has_stopped)
        assert served.http.get("/health").status_code == 503


def test_a_crash_ends_the_server() -> None:
    with serving(FakeEngine(fail_at_step=1)) as served:
        assert served.complete(prompt="a").status_code == 500
        wait_until(lambda: served.server.should_exit)


def test_a_step_that_hangs_is_given_up() -> None:
    engine = HeldEngine()
    with serving(engine) as served, ThreadPoolExecutor(3 * NUM_EACH) as pool, outliving_its_engine(served):
        calls = ask(served, pool, stream=True) + ask(served, pool, stream=False)
        assert engine.is_held.wait(60)
        queued = ask(served, pool, stream=False)
        wait_until(lambda: len(served.thread._commands._unanswered) == NUM_EACH)
        stopped = threading.Event()
        served.thread.on_stop(stopped.set)
        assert not served.thread.shutdown(0.0, grace_s=0.05)
        served.thread.give_up()
        assert stopped.is_set()
        for call in calls[:NUM_EACH]:
            assert call.result(60).text.endswith('"code":"engine_error"}}\n\ndata: [DONE]\n\n')
        for call in calls[NUM_EACH:]:
            assert "a step does not end" in call.result(60).json()["error"]["message"]
        assert {call.result(60).status_code for call in queued} == {500}
        assert served.http.get("/health").status_code == 503
        served.thread.give_up()  # again: harmless
        engine.let_go.set()
        assert served.thread.shutdown(0.0)
    assert engine.num_closed == 1


class LosingEngine(HeldEngine):
    """Its third step waits for a process that is lost."""

    def when_lost(self, callback: Callable[[Exception], None]) -> None:
        self.lose = callback


def test_a_step_that_waits_for_a_lost_process_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """All streams get the loss as their error, although the step has not ended."""
    monkeypatch.setattr("specmamba.engine.thread.LOST_GRACE_S", 0.05)
    engine = LosingEngine()
    with serving(engine) as served, ThreadPoolExecutor(2 * NUM_EACH) as pool, outliving_its_engine(served):
        calls = ask(served, pool, stream=True) + ask(served, pool, stream=False)
        assert engine.is_held.wait(60)
        engine.lose(RankLostError("rank 1 is lost"))
        assert all("rank 1 is lost" in call.result(60).text for call in calls)
        assert not engine.let_go.is_set()
        engine.let_go.set()
        assert served.thread.shutdown(0.0)


def test_the_end_of_one_request_does_not_depend_on_the_callback_of_another() -> None:
    ended = threading.Event()

    def never(delta: OutputDelta) -> None:
        raise KeyboardInterrupt

    def note(delta: OutputDelta) -> None:
        if delta.finish_reason == "error":
            ended.set()

    thread = EngineThread(lambda: FakeEngine(step_s=0.01))  # type: ignore[arg-type, return-value]
    thread.start()
    params = SamplingParams(max_tokens=50)
    thread.submit([EngineRequest("a", [1], params, never), EngineRequest("b", [1], params, note)]).result(60)
    assert ended.wait(60)
    assert thread.shutdown(0.0)
    assert isinstance(thread.failed, KeyboardInterrupt)
    with pytest.raises(EngineStoppedError):
        thread.call(lambda engine: None)


def test_exceptions_at_shutdown_do_not_stop_it() -> None:
    class Stuck(FakeEngine):
        def abort(self, request_id: str) -> None:
            raise RuntimeError("abort fails")

        def close(self) -> None:
            raise RuntimeError("close fails")

    told: list[str] = []
    deltas: list[OutputDelta] = []
    thread = EngineThread(lambda: Stuck(step_s=0.02))  # type: ignore[arg-type, return-value]
    thread.start()
    thread.on_stop(lambda: 1 / 0)  # type: ignore[arg-type]
    thread.on_stop(lambda: told.append("stopped"))
    thread.submit([EngineRequest("a", [1], SamplingParams(max_tokens=50), deltas.append)]).result(60)
    assert thread.shutdown(0.0)
    assert deltas[-1].finish_reason == "error"
    assert told == ["stopped"]
    assert "abort fails" in str(thread.failed)
