"""``specmamba deploy FILE.yaml``: an application of Ray Serve, started as the file declares it."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from specmamba.cluster.application_watch import ApplicationWatch, addresses_of
from specmamba.cluster.cluster_config import ClusterConfig
from specmamba.cluster.deployment_file import DeploymentFile, plan_rows, read_deployment
from specmamba.errors import ConfigError, first_line
from specmamba.server.listener import http_url

logger = logging.getLogger("specmamba")

PROG = "specmamba deploy"
_OWN = "local"  # Ray's word for a cluster that is started here
_LOOK_S = 5.0  # between two looks whether the application still runs,
_START_LOOK_S = 1.0  # and whether it starts
_JOIN_S = 5.0  # for a call that looks once a second
TIMEOUT_S = 1800.0  # large models take long to load, and Ray may have to wait for room


def main(arguments: list[str]) -> int:
    """Deploy, or check, what a file declares. Returns 0, or 1 where the application has failed.

    Raises:
        ConfigError: the file says what cannot be, or Ray is not installed or not reached.
    """
    options = _parser().parse_args(arguments)
    deployment = read_deployment(options.file)
    try:
        config = deployment.config()
    except ConfigError as error:
        raise ConfigError("\n".join(f"{options.file}: {line}" for line in str(error).splitlines())) from None
    if options.check:
        print("\n".join(_lines(deployment, config)))
        return 0
    require_ray()
    address = deployment.ray_address or os.environ.get("RAY_ADDRESS") or _OWN
    if options.stay and address == _OWN:
        raise ConfigError("--stay: a cluster of this command ends with it: name one that runs, by ray_address: auto")
    return _deploy(deployment, config, address, options)


def _parser() -> argparse.ArgumentParser:
    text = "Start replicas on a Ray cluster, behind one address, as a file declares it. Ctrl-C ends them."
    parser = argparse.ArgumentParser(PROG, description=text)
    parser.add_argument("file", type=Path, metavar="FILE.yaml")
    parser.add_argument("--check", action="store_true", help="say what the file comes to, and start nothing")
    parser.add_argument("--stay", action="store_true", help="return when it is ready; it stays in its cluster")
    text = "give it up, with status 1, when it is not ready for so long: at its start, or later"
    parser.add_argument(
        "--timeout", type=_seconds, default=TIMEOUT_S, metavar="SECONDS", help=f"{text} (default: {TIMEOUT_S:g})"
    )
    return parser


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"this is a number of seconds above 0 (got {text!r})")
    return seconds


def _lines(deployment: DeploymentFile, config: ClusterConfig) -> list[str]:
    rows = plan_rows(deployment, config)
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def require_ray() -> None:
    """Raise ConfigError where Ray Serve is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("this needs Ray Serve, which is not installed: pip install 'specmamba[scale]'")


def _deploy(deployment: DeploymentFile, config: ClusterConfig, address: str, options: argparse.Namespace) -> int:
    """Start the application in a cluster, and wait for its end unless it stays. Returns the exit status."""
    import ray
    from ray import serve

    from specmamba.cluster.ingress import application_of
    from specmamba.server.observe.logs import configure_logging

    configure_logging(config)
    name, ended = deployment.name, threading.Event()
    _end_at_signals(ended)
    try:
        ray.init(address=address, namespace="serve", log_to_driver=True)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(f"ray_address {address}: {first_line(error)}") from None
    watch, start, is_deployed = None, None, False
    try:
        _end_at_signals(ended)  # Ray has handlers of its own, which end the process at once
        _start_serve(serve, deployment)
        watch = ApplicationWatch(serve, name, options.timeout)
        start = Start(lambda: serve.run(application_of(config), name=name, route_prefix="/"))
        if (failure := start.wait(watch)) is not None:
            _tell_failure(name, failure)
            return 1
        is_deployed = True
        print(_ready_line(name, _reached_at(deployment)), flush=True)
        return 0 if options.stay else wait_for_end(watch, name, ended)
    finally:
        if watch is not None and not (options.stay and (is_deployed or watch.had_forerunner)):
            _end(serve, name, is_own=address == _OWN)
        if start is not None:
            start.join()
        ray.shutdown()


def _start_serve(serve: Any, deployment: DeploymentFile) -> None:
    """Start Ray Serve, unless it runs. Raises ConfigError: it cannot listen where the file says."""
    http = deployment.http
    try:
        serve.start(http_options={"host": http.host, "port": http.port})
    except Exception as error:  # noqa: BLE001 -- an actor of Ray has raised it, and Ray wraps it
        reason = str(error).strip().rpartition("\n")[2]
        raise ConfigError(f"http: Ray Serve does not start at {http_url(http.host, http.port)}: {reason}") from None


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


def _tell_failure(name: str, failure: str) -> None:
    """Print why an application is given up; not as a log, which would make one line of Ray's pages."""
    print(f"{PROG}: {name} {failure}", file=sys.stderr)


def _ready_line(name: str, urls: list[str]) -> str:
    where = f"at {', '.join(urls)}" if urls else "but Ray Serve takes no HTTP in this cluster"
    return f"specmamba: ready {where} (application: {name})"


def _reached_at(deployment: DeploymentFile) -> list[str]:
    """Where the application is reached: Ray Serve keeps the addresses that it has, whatever the file says."""
    wanted = deployment.http
    try:
        from ray.serve.context import _get_global_client

        details = _get_global_client().get_serve_details()
        urls, options = addresses_of(details), details["http_options"]
        is_kept = (options["host"], options["port"]) != (wanted.host, wanted.port)
    except Exception as error:  # noqa: BLE001 -- no public function says it, and those of other versions may differ
        logger.warning("Ray does not say where Ray Serve listens (%s): the address is the file's", first_line(error))
        return [http_url(wanted.host, wanted.port)]
    if is_kept:
        there = http_url(str(options["host"]), options["port"])
        logger.warning("Ray Serve runs in this cluster already, and listens at %s: http has no effect", there)
    return urls


def _end_at_signals(ended: threading.Event) -> None:
    """Let the first SIGINT or SIGTERM set an event and interrupt the main thread, as Ctrl-C does."""

    def end(*_: object) -> None:
        if not ended.is_set():
            ended.set()
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)


def wait_for_end(watch: ApplicationWatch, name: str, ended: threading.Event) -> int:
    """Wait for a signal, or until the application is given up. Returns the exit status."""
    with suppress(KeyboardInterrupt):
        while not ended.wait(_LOOK_S):
            if (failure := watch.look()) is not None:
                _tell_failure(name, failure)
                return 1
    return 0


def _end(serve: Any, name: str, is_own: bool) -> None:
    """Delete the application, whose running requests finish first; and Ray Serve, where this command has started it."""
    with suppress(Exception):  # the cluster may be gone
        serve.delete(name)
    if is_own:
        with suppress(Exception):
            serve.shutdown()
