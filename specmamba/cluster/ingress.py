"""The deployment of Ray Serve: the whole HTTP application, in front of replicas that are actors."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from fastapi import FastAPI
from ray import serve

from specmamba.cluster.cluster_config import ClusterConfig, config_of_args
from specmamba.cluster.ray_replica import RayReplica, cluster_tasks
from specmamba.engine.thread import EngineThread
from specmamba.replicas.replicated_engine import ReplicatedEngine
from specmamba.server.app import create_app
from specmamba.server.observe.logs import configure_logging
from specmamba.server.observe.tracing import check_tracing

logger = logging.getLogger("specmamba")

NAME = "specmamba"
_CLOSE_TIMEOUT_S = 20.0  # for the replicas to end
# of the one deployment that this process is: its ASGI application is made by a function without arguments
_served: list[Ingress] = []


class Ingress:
    """The HTTP server, its tokenizer and the engine that places requests. There is one in a process."""

    def __init__(self, config: ClusterConfig) -> None:
        """Start the replicas, and wait until all are ready.

        Raises:
            SpecmambaError: one cannot start.
        """
        configure_logging(config)
        check_tracing(config)
        self._config = config
        self._engine = EngineThread(
            lambda: ReplicatedEngine(config, cluster_tasks, partial(RayReplica, config=config)),
            config.stream_chunk_interval,
        )
        self._engine.start()
        _served[:] = [self]

    def asgi_app(self) -> FastAPI:
        """The application of ``specmamba serve``."""
        return create_app(self._config, self._engine)

    def check_health(self) -> None:
        """Raise RuntimeError where the engine has ended: Ray Serve then starts another ingress."""
        if self._engine.has_stopped:
            raise RuntimeError("the engine has failed") from self._engine.failed

    def __del__(self) -> None:
        """End the replicas. Ray Serve waits for running requests before."""
        self._engine.shutdown(0.0, _CLOSE_TIMEOUT_S)


def _asgi_app() -> FastAPI:
    return _served[0].asgi_app()


def bound_application(args: Mapping[str, Any]) -> serve.Application:
    """The application of these arguments. Raises ConfigError: as ``config_of_args``."""
    return application_of(config_of_args(args))


def application_of(config: ClusterConfig) -> serve.Application:
    """The application of a configuration."""
    deployment = serve.deployment(
        serve.ingress(_asgi_app)(Ingress),
        name=NAME,
        num_replicas=1,  # it knows where each request is; engines are its replicas
        max_ongoing_requests=config.max_connections,
        ray_actor_options={"num_cpus": config.ingress_cpus},
        graceful_shutdown_timeout_s=config.shutdown_timeout,
    )
    return deployment.bind(config)
