"""``specmamba deploy FILE.yaml``: an application of Ray Serve, started as the file declares it."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
from contextlib import suppress
from pathlib import Path

from specmamba.cluster.application_run import OWN, TIMEOUT_S, Wanted, cluster_address, run_application
from specmamba.cluster.cluster_config import ClusterConfig, of_server
from specmamba.cluster.deployment_file import DeploymentFile, plan_rows, read_deployment
from specmamba.errors import ConfigError
from specmamba.server.listener import http_url, is_reached_from_outside, listen, url_of
from specmamba.server_config import ServerConfig

PROG, SERVE_PROG = "specmamba deploy", "specmamba serve"
NAME = "specmamba-serve"  # of the application of ``serve --replicas``: no deployment file has it by default


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
    address, http = cluster_address(deployment.ray_address), deployment.http
    if options.stay and address == OWN:
        raise ConfigError("--stay: a cluster of this command ends with it: name one that runs, by ray_address: auto")
    wanted = Wanted(
        PROG, deployment.name, http.host, http.port, "http", address, timeout_s=options.timeout, stays=options.stay
    )
    from specmamba.server.observe.logs import configure_logging

    configure_logging(config)
    return run_application(wanted, config)


def serve_replicas(config: ServerConfig) -> int:
    """Run ``specmamba serve --replicas``: on a cluster of its own, or on the one that ``RAY_ADDRESS`` names.

    In a cluster of its own the replicas share the CPUs, and the server in front reserves none.

    Returns:
        The exit status: 0 after a signal, 1 where the application has failed.

    Raises:
        ConfigError: Ray is not installed or not reached, or the address cannot be listened on.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError("--replicas: replicas start their ranks themselves: leave torchrun out")
    require_ray(f"--replicas {config.replicas}: ", f", or give --dp-size {config.replicas}, which needs no Ray")
    from specmamba.server.http.callers import is_loopback
    from specmamba.server.observe.logs import configure_logging
    from specmamba.server.observe.tracing import check_tracing
    from specmamba.server.serve import warn_of_exposure

    address, num_cpus = cluster_address(), None
    configure_logging(config)
    check_tracing(config)
    if address == OWN:
        with listen(config.host, config.port) as listener:  # what is wrong with it would be told after Ray's start
            warn_of_exposure(config, url_of(listener), is_reached_from_outside(listener))
            port = listener.getsockname()[1]
        num_cpus = len(os.sched_getaffinity(0))
        of_cluster = of_server(config, num_cpus / config.most_replicas, 0.0)
    elif not (port := config.port):
        raise ConfigError("--port 0: all machines of the cluster that RAY_ADDRESS names listen at one port: choose one")
    else:
        warn_of_exposure(config, http_url(config.host, port), not is_loopback(config.host))
        of_cluster = of_server(config)
    wanted = Wanted(SERVE_PROG, NAME, config.host, port, "--host, --port", address, num_cpus, replaces=False)
    with suppress(KeyboardInterrupt):  # a signal during the start
        return run_application(wanted, of_cluster)
    return 0


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


def require_ray(what: str = "", instead: str = "") -> None:
    """Raise ConfigError where Ray Serve is not installed; ``what`` needs it, ``instead``: what else to do."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            f"{what}this needs Ray Serve, which is not installed: pip install 'specmamba[scale]'{instead}"
        )
