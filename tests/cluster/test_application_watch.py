"""What is noticed of an application while it starts and while it runs: overviews as Ray gives them, and no Ray."""

from __future__ import annotations

import threading
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from specmamba.cluster import application_run
from specmamba.cluster.application_run import OWN, Signals, Start, Wanted, end_application, wait_for_end
from specmamba.cluster.application_watch import ApplicationWatch, addresses_of

WANTED = Wanted("specmamba deploy", "it", "127.0.0.1", 8000, "http", OWN)


class Status(Enum):
    """A status as Ray has it, of an application or of a deployment."""

    DEPLOYING = "DEPLOYING"
    RUNNING = "RUNNING"
    UNHEALTHY = "UNHEALTHY"
    DEPLOY_FAILED = "DEPLOY_FAILED"
    DELETING = "DELETING"
    HEALTHY = "HEALTHY"


class Serve:
    """``ray.serve``, as far as it is looked at."""

    def __init__(self) -> None:
        self.found: Any = None
        self.error: Exception | None = None
        self.num_looks = 0

    def delete(self, name: str, _blocking: bool) -> None:
        assert (name, _blocking) == ("it", False)
        self.say(Status.DELETING)

    def status(self) -> Any:
        if self.error is not None:
            raise self.error
        self.num_looks += 1
        return SimpleNamespace(applications={} if self.found is None else {"it": self.found})

    def say(
        self, status: Status, message: str = "", part: Status = Status.HEALTHY, why: str = "", at: float = 2
    ) -> None:
        deployments = {"specmamba": SimpleNamespace(status=part, message=why)}
        self.found = SimpleNamespace(status=status, message=message, last_deployed_time_s=at, deployments=deployments)


class Scene:
    def __init__(self, timeout_s: float = 60.0, serve: Serve | None = None) -> None:
        self.serve, self.now = serve or Serve(), 1000.0
        self.watch = ApplicationWatch(self.serve, "it", timeout_s, lambda: self.now)

    def look(self, seconds: float = 1.0) -> str | None:
        self.now += seconds
        return self.watch.look()


@pytest.fixture(autouse=True)
def _is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_LOOK_S", "_START_LOOK_S", "_JOIN_S"):
        monkeypatch.setattr(application_run, name, 0.01)


def test_a_start_and_its_end(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    assert scene.look() is None  # Ray has not taken it in yet
    for status in (Status.DEPLOYING, Status.RUNNING):
        scene.serve.say(status)
        assert scene.look() is None
    assert scene.look(1e6) is None  # it is ready
    scene.serve.found = None
    assert scene.look() == "was deleted"
    assert not caplog.records


def test_a_failure_is_told_in_the_words_of_ray() -> None:
    scene = Scene()
    why = "The deployment failed to start 3 times in a row.\nCheckpointError: '/nowhere' is no folder"
    scene.serve.say(Status.DEPLOY_FAILED, "Failed to update the deployments ['specmamba'].", Status.DEPLOY_FAILED, why)
    assert scene.look() == f"has failed: Failed to update the deployments ['specmamba'].\nspecmamba: {why}"


def test_what_is_unhealthy_is_told_once_and_given_up_after_a_time(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    scene.serve.say(Status.RUNNING)
    scene.look()
    ill = ("The deployments ['specmamba'] are UNHEALTHY.", Status.UNHEALTHY, "RuntimeError: the engine has failed")
    scene.serve.say(Status.UNHEALTHY, *ill)
    assert [scene.look(20.0), scene.look(20.0)] == [None, None]
    scene.serve.say(Status.RUNNING)
    assert scene.look(50.0) is None
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"it is unhealthy: {ill[0]}\nspecmamba: {ill[2]}", "it is ready again"]
    scene.serve.say(Status.UNHEALTHY, *ill)
    assert [scene.look(30.0), scene.look(30.0)] == [None, None]
    assert scene.look(1.0) == f"was not ready for 60 s (--timeout), and is unhealthy: {ill[0]}\nspecmamba: {ill[2]}"


def test_a_start_that_takes_too_long_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(30.0)
    scene.serve.say(Status.DEPLOYING)
    assert scene.look(30.0) is None
    assert scene.look() == "was not ready for 30 s (--timeout)"
    scene = Scene(30.0)
    scene.serve.say(Status.DEPLOYING, "", Status.UNHEALTHY, "no node has 64 CPUs")
    assert scene.look() is None
    assert [record.getMessage() for record in caplog.records] == ["it does not start: specmamba: no node has 64 CPUs"]
    assert scene.look(30.0) == "was not ready for 30 s (--timeout), and does not start: specmamba: no node has 64 CPUs"


def test_one_of_the_same_name_is_not_taken_for_it() -> None:
    serve = Serve()
    serve.say(Status.DEPLOY_FAILED, "long ago", at=1)
    scene = Scene(serve=serve)
    assert scene.watch.had_forerunner
    assert scene.look() is None
    serve.say(Status.RUNNING, at=2)
    assert scene.look() is None
    serve.say(Status.DELETING, at=2)
    assert scene.look() == "is being deleted"


def test_a_cluster_that_is_gone_is_noticed() -> None:
    scene = Scene()
    scene.serve.error = ConnectionError("no head\nand pages of reasons")
    assert scene.look() == "cannot be seen any more: no head"


def test_the_command_ends_with_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    scene = Scene()
    scene.serve.say(Status.DEPLOY_FAILED, "no room,\nnowhere")
    assert wait_for_end(scene.watch, WANTED, threading.Event()) == 1
    assert capsys.readouterr().err == "specmamba deploy: it has failed: no room,\nnowhere\n"


def test_a_signal_ends_the_command() -> None:
    scene, ended = Scene(), threading.Event()
    scene.serve.say(Status.RUNNING)
    ended.set()
    assert wait_for_end(scene.watch, WANTED, ended) == 0


def test_the_end_is_that_of_running_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long they take, up to a limit."""

    class Finishing(Serve):
        def status(self) -> Any:
            if self.num_looks == 5:
                self.found = None
            return super().status()

    monkeypatch.setattr(application_run, "_END_LOOK_S", 0.001)
    serve = Finishing()
    end_application(serve, "it", 600, threading.Event())
    assert serve.found is None
    assert serve.num_looks == 6
    endless = Serve()
    end_application(endless, "it", 0.0, threading.Event())
    assert endless.num_looks == 1
    endless.error = ConnectionError("no head")
    end_application(endless, "it", 600, threading.Event())


def test_a_second_signal_ends_the_wait() -> None:
    serve, signals = Serve(), Signals()
    with pytest.raises(KeyboardInterrupt):
        signals._come()
    assert signals.ended.is_set()
    signals._come()
    end_application(serve, "it", 600, signals.hurry)
    assert serve.num_looks == 1


def test_the_start_is_looked_at_meanwhile() -> None:
    """Ray's own call may never return: it waits as long as Ray tries again."""
    scene, held = Scene(), threading.Event()

    def call() -> None:
        scene.serve.say(Status.DEPLOYING)
        assert held.wait(30)

    start = Start(call)
    threading.Timer(0.05, lambda: scene.serve.say(Status.DEPLOY_FAILED, "no room")).start()
    assert start.wait(scene.watch) == "has failed: no room"
    held.set()
    start.join()


@pytest.mark.parametrize(
    ("error", "said"), [(None, None), (RuntimeError("/ is taken\nby"), "has not started: / is taken")]
)
def test_how_the_start_ends(error: Exception | None, said: str | None) -> None:
    scene = Scene()

    def call() -> None:
        if error is not None:
            raise error
        scene.serve.say(Status.RUNNING)

    assert Start(call).wait(scene.watch) == said


PROXIES = {
    "a": {"node_ip": "10.0.0.2", "status": "HEALTHY"},
    "b": {"node_ip": "10.0.0.1", "status": Status.HEALTHY},
    "c": {"node_ip": "10.0.0.3", "status": "STARTING"},
}


@pytest.mark.parametrize(
    ("host", "proxies", "urls"),
    [
        ("127.0.0.1", PROXIES, ["http://127.0.0.1:8123"]),
        ("0.0.0.0", PROXIES, ["http://10.0.0.1:8123", "http://10.0.0.2:8123"]),
        ("0.0.0.0", {"c": PROXIES["c"]}, ["http://10.0.0.3:8123"]),
        ("::", {"d": {"node_ip": "fd00::1", "status": "HEALTHY"}}, ["http://[fd00::1]:8123"]),
        ("0.0.0.0", {"d": {"status": "HEALTHY"}}, ["http://0.0.0.0:8123"]),
        ("machine", PROXIES, ["http://machine:8123"]),
        ("127.0.0.1", {}, []),
        (None, PROXIES, []),
    ],
)
def test_where_it_is_reached(host: str | None, proxies: dict[str, Any], urls: list[str]) -> None:
    assert addresses_of({"http_options": {"host": host, "port": 8123}, "proxies": proxies}) == urls
