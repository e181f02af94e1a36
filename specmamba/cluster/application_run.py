"""An application of Ray Serve from its start to its end: of ``specmamba deploy``, and of ``serve --replicas``."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
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


def cluster_address(given: str | None = None) -> str:
    """The address of the cluster: what is given, what Ray's variable of the environment says, or ``OWN``."""
    return given or os.environ.get("RAY_ADDRESS") or OWN


def run_application(wanted: Wanted, config: ClusterConfig) -> int:
    """Start the application in a cluster, and wait for its end unless it stays. Returns the exit status.

    Raises:
        ConfigError: the cluster is not reached, or Ray Serve cannot listen at the address.
    """
    import ray
    from ray import serve

    from specmamba.cluster.ingress import application_of
    from specmamba.server.observe.logs import configure_logging

    configure_logging(config)
    name, ended = wanted.name, threading.Event()
    _end_at_signals(ended)
    try:
        ray.init(address=wanted.address, num_cpus=wanted.num_cpus, namespace="serve", log_to_driver=True)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(f"the Ray cluster {wanted.address}: {first_line(error)}") from None
    watch, start, is_deployed = None, None, False
    try:
        _end_at_signals(ended)  # Ray has handlers of its own, which end the process at once
        _start_serve(serve, wanted)
        watch = ApplicationWatch(serve, name, wanted.timeout_s)
        start = Start(lambda: serve.run(application_of(config), name=name, route_prefix="/"))
        if (failure := start.wait(watch)) is not None:
            _tell_failure(wanted, failure)
            return 1
        is_deployed = True
        print(_ready_line(name, _reached_at(wanted)), flush=True)
        return 0 if wanted.stays else wait_for_end(watch, wanted, ended)
    finally:
        if watch is not None and not (wanted.stays and (is_deployed or watch.had_forerunner)):
            _end(serve, name, is_own=wanted.address == OWN)
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


def _end_at_signals(ended: threading.Event) -> None:
    """Let the first SIGINT or SIGTERM set an event and interrupt the main thread, as Ctrl-C does."""

    def end(*_: object) -> None:
        if not ended.is_set():
            ended.set()
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)


def wait_for_end(watch: ApplicationWatch, wanted: Wanted, ended: threading.Event) -> int:
    """Wait for a signal, or until the application is given up. Returns the exit status."""
    with suppress(KeyboardInterrupt):
        while not ended.wait(_LOOK_S):
            if (failure := watch.look()) is not None:
                _tell_failure(wanted, failure)
                return 1
    return 0


def _end(serve: Any, name: str, is_own: bool) -> None:
    """Delete the application, whose running requests finish first; and Ray Serve, where this command has started it."""
    with suppress(Exception):  # the cluster may be gone
        serve.delete(name)
    if is_own:
        with suppress(Exception):
            serve.shutdown()
