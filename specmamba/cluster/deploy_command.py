"""``specmamba deploy FILE.yaml``: an application of Ray Serve, started as the file declares it."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from specmamba.cluster.cluster_config import ClusterConfig
from specmamba.cluster.deployment_file import DeploymentFile, plan_rows, read_deployment
from specmamba.errors import ConfigError

logger = logging.getLogger("specmamba")

PROG = "specmamba deploy"
_OWN = "local"  # Ray's word for a cluster that is started here
_LOOK_S = 5.0  # between two looks whether the application still runs


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
    return _deploy(deployment, config, address, options.stay)


def _parser() -> argparse.ArgumentParser:
    text = "Start replicas on a Ray cluster, behind one address, as a file declares it. Ctrl-C ends them."
    parser = argparse.ArgumentParser(PROG, description=text)
    parser.add_argument("file", type=Path, metavar="FILE.yaml")
    parser.add_argument("--check", action="store_true", help="say what the file comes to, and start nothing")
    parser.add_argument("--stay", action="store_true", help="return when it is ready; it stays in its cluster")
    return parser


def _lines(deployment: DeploymentFile, config: ClusterConfig) -> list[str]:
    rows = plan_rows(deployment, config)
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def require_ray() -> None:
    """Raise ConfigError where Ray Serve is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("this needs Ray Serve, which is not installed: pip install 'specmamba[scale]'")


def _deploy(deployment: DeploymentFile, config: ClusterConfig, address: str, stays: bool) -> int:
    """Start the application in a cluster, and wait for its end unless it ``stays``. Returns the exit status."""
    import ray
    from ray import serve

    from specmamba.cluster.ingress import application_of

    ended = threading.Event()
    _end_at_signals(ended)
    try:
        ray.init(address=address, namespace="serve", log_to_driver=True)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(f"ray_address {address}: {_first_line(error)}") from None
    was_there = is_begun = is_deployed = False
    try:
        _end_at_signals(ended)  # Ray has handlers of its own, which end the process at once
        serve.start(http_options={"host": deployment.http.host, "port": deployment.http.port})
        was_there = deployment.name in serve.status().applications
        is_begun = True
        try:
            serve.run(application_of(config), name=deployment.name, route_prefix="/")
        except RuntimeError as error:
            logger.error("%s has not started: %s", deployment.name, _first_line(error))
            return 1
        is_deployed = True
        url = f"http://{deployment.http.host}:{deployment.http.port}"
        print(f"specmamba: ready at {url} (application: {deployment.name})", flush=True)
        return 0 if stays else _wait(serve, deployment.name, ended)
    finally:
        if is_begun and not (stays and (is_deployed or was_there)):
            _end(serve, deployment.name, is_own=address == _OWN)
        ray.shutdown()


def _end_at_signals(ended: threading.Event) -> None:
    """Let the first SIGINT or SIGTERM set an event and interrupt the main thread, as Ctrl-C does."""

    def end(*_: object) -> None:
        if not ended.is_set():
            ended.set()
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)


def _wait(serve: Any, name: str, ended: threading.Event) -> int:
    """Wait for a signal, or until the application is gone. Returns the exit status."""
    with suppress(KeyboardInterrupt):
        while not ended.wait(_LOOK_S):
            if (failure := _failure_of(serve, name)) is not None:
                logger.error("%s %s", name, failure)
                return 1
    return 0


def _failure_of(serve: Any, name: str) -> str | None:
    """Return why an application serves no more, for good; None: it does, or Ray mends it."""
    try:
        found = serve.status().applications.get(name)
    except Exception as error:  # noqa: BLE001 -- of a cluster that is gone, Ray raises many
        return f"cannot be seen any more: {_first_line(error)}"
    if found is None:
        return "was deleted"
    return f"has failed: {found.message}" if str(found.status).endswith("DEPLOY_FAILED") else None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _end(serve: Any, name: str, is_own: bool) -> None:
    """Delete the application, whose running requests finish first; and Ray Serve, where this command has started it."""
    with suppress(Exception):  # the cluster may be gone
        serve.delete(name)
    if is_own:
        with suppress(Exception):
            serve.shutdown()
