"""An application of Ray Serve from its start to its end: of ``specmamba deploy``, and of ``serve --replicas``."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from specmamba.cluster.application_watch import ApplicationWatch, addresses_of
from specmamba.cluster.cluster_config import ClusterConfig
from specmamba.errors import ConfigError, first_line
from specmamba.server.listener import http_url

logger = logging.getLogger("specmamba")

OWN = "local"  # Ray's word for a cluster that is started here
_LOOK_S = 5.0  # between two looks whether the application still runs,
_START_LOOK_S = 1.0  # and whether it starts
_JOIN_S = 5.0  # for a call that looks once a second
_END_LOOK_S, _END_MARGIN_S = 0.5, 30.0  # between two looks whether it has ended; beyond the time for running requests
TIMEOUT_S = 1800.0  # large models take long to load, and Ray may have to wait for room


@dataclass(frozen=True, slots=True)
class Wanted:
    """How an application is to run."""

    prog: str  # the command that is told of
    name: str  # of the application
    host: str  # where Ray Serve is to listen
    port: int
    listens: str  # what says so, in messages
    address: str  # of the cluster, or ``OWN``
    num_cpus: int | None = None  # of a cluster that is started here; None: as Ray counts them
    timeout_s: float = TIMEOUT_S  # how long it may not be ready
    stays: bool = False  # when the command has ended
    replaces: bool = True  # one of this name that runs


def cluster_address(given: str | None = None) -> str:
    """The address of the cluster: what is given, what Ray's variable of the environment says, or ``OWN``."""
    return given or os.environ.get("RAY_ADDRESS") or OWN


def run_application(wanted: Wanted, config: ClusterConfig) -> int:
    """Start the application in a cluster, and wait for its end unless it stays. Returns the exit status.

    The log is configured already.

    Raises:
        ConfigError: the cluster is not reached, Ray Serve cannot listen at the address, or an application that is not
            to be replaced has this name.
    """
    import ray
    from ray import serve

    from specmamba.cluster.ingress import application_of

    name, signals = wanted.name, Signals()
    signals.take()
    try:
        ray.init(address=wanted.address, num_cpus=wanted.num_cpus, namespace="serve", log_to_driver=True)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(f"the Ray cluster {wanted.address}: {first_line(error)}") from None
    watch, start, is_deployed = None, None, False
    try:
        signals.take()  # Ray has handlers of its own, which end the process at once
        _start_serve(serve, wanted)
        watch = ApplicationWatch(serve, name, wanted.timeout_s)
        if watch.had_forerunner and not wanted.replaces:
            watch = None  # the end of that one is not this command's
            raise ConfigError(f"the cluster {wanted.address} runs an application {name} already: end that one first")
        start = Start(lambda: serve.run(application_of(config), name=name, route_prefix="/"))
        if (failure := start.wait(watch)) is not None:
            _tell_failure(wanted, failure)
            return 1
        is_deployed = True
        print(_ready_line(name, _reached_at(wanted)), flush=True)
        return 0 if wanted.stays else wait_for_end(watch, wanted, signals.ended)
    finally:
        if watch is not None and not (wanted.stays and (is_deployed or watch.had_forerunner)):
            end_application(serve, name, config.shutdown_timeout + _END_MARGIN_S, signals.hurry)
            if wanted.address == OWN:
                with suppress(Exception):
                    serve.shutdown()
        if start is not None:
            start.join()
        ray.shutdown()


def _start_serve(serve: Any, wanted: Wanted) -> None:
    """Start Ray Serve, unless it runs. Raises ConfigError: it cannot listen where it is to."""
    try:
        serve.start(http_options={"host": wanted.host, "port": wanted.port})
    except Exception as error:  # noqa: BLE001 -- an actor of Ray has raised it, and Ray wraps it
        reason = str(error).strip().rpartition("\n")[2]
        where = http_url(wanted.host, wanted.port)
        raise ConfigError(f"{wanted.listens}: Ray Serve does not start at {where}: {reason}") from None


class Start:
    """The call that starts an application, on a thread of its own: it does not return where Ray tries for ever."""

    def __init__(self, call: Callable[[], object]) -> None:
        """``call``: returns when the application is ready."""
        self._call = call
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="specmamba-deploy", daemon=True)

    def join(self) -> None:
        """Wait for the end of the call, where there is no application any more.

        What it asks of Ray after the end of this connection would connect anew, or start a cluster.
        """
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            self._call()
        except Exception as error:  # noqa: BLE001 -- the other thread tells of any
            self._error = error

    def wait(self, watch: ApplicationWatch) -> str | None:
        """Make the call, and look at the application meanwhile. Returns why it is given up; None: it is ready."""
        self._thread.start()
        while True:
            self._thread.join(_START_LOOK_S)
            has_ended = not self._thread.is_alive()
            if (failure := watch.look()) is not None:  # with more to say than the error of the call
                return failure
            if has_ended:
                return None if self._error is None else f"has not started: {first_line(self._error)}"


def _tell_failure(wanted: Wanted, failure: str) -> None:
    """Print why an application is given up; not as a log, which would make one line of Ray's pages."""
    print(f"{wanted.prog}: {wanted.name} {failure}", file=sys.stderr)


def _ready_line(name: str, urls: list[str]) -> str:
    where = f"at {', '.join(urls)}" if urls else "but Ray Serve takes no HTTP in this cluster"
    return f"specmamba: ready {where} (application: {name})"


def _reached_at(wanted: Wanted) -> list[str]:
    """Where the application is reached: Ray Serve keeps the addresses that it has, whatever is wanted."""
    try:
        from ray.serve.context import _get_global_client

        details = _get_global_client().get_serve_details()
        urls, options = addresses_of(details), details["http_options"]
        is_kept = (options["host"], options["port"]) != (wanted.host, wanted.port)
    except Exception as error:  # noqa: BLE001 -- no public function says it, and those of other versions may differ
        logger.warning(
            "Ray does not say where Ray Serve listens (%s): the address is the wanted one", first_line(error)
        )
        return [http_url(wanted.host, wanted.port)]
    if is_kept:
        there = http_url(str(options["host"]), options["port"])
        logger.warning(
            "Ray Serve runs in this cluster already, and listens at %s: %s has no effect", there, wanted.listens
        )
    return urls


class Signals:
    """SIGINT and SIGTERM. The first one interrupts the main thread, as Ctrl-C does; a second one ends waits."""

    def __init__(self) -> None:
        """Nothing is taken yet."""
        self.ended, self.hurry = threading.Event(), threading.Event()

    def take(self) -> None:
        """Put handlers in the place of any others."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._come)

    def _come(self, *_: object) -> None:
        if self.ended.is_set():
            self.hurry.set()
            return
        self.ended.set()
        raise KeyboardInterrupt


def wait_for_end(watch: ApplicationWatch, wanted: Wanted, ended: threading.Event) -> int:
    """Wait for a signal, or until the application is given up. Returns the exit status."""
    with suppress(KeyboardInterrupt):
        while not ended.wait(_LOOK_S):
            if (failure := watch.look()) is not None:
                _tell_failure(wanted, failure)
                return 1
    return 0


def end_application(serve: Any, name: str, most_s: float, hurry: threading.Event) -> None:
    """Delete the application, and wait until its running requests have finished.

    Ray's own wait ends after a minute, before the time that requests may have here.
    """
    end = time.monotonic() + most_s
    with suppress(Exception):  # the cluster may be gone
        serve.delete(name, _blocking=False)
        while name in serve.status().applications and time.monotonic() < end:
            if hurry.wait(_END_LOOK_S):
                return
