"""Replicas as actors of a Ray cluster: what they are started with, where, and how they end."""

from __future__ import annotations

import json
from typing import Any

import ray

from specmamba.cluster.cluster_config import ClusterConfig
from specmamba.cluster.engine_actor import EngineActor
from specmamba.cluster.remote_replica import RemoteReplica
from specmamba.config import EngineConfig
from specmamba.errors import ConfigError
from specmamba.replicas.replica_launch import ReplicaTask
from specmamba.server_config import ServerConfig

_ANSWER_S = 1.0  # for what an actor that has ended says


class RayReplica(RemoteReplica):
    """A replica as an actor."""

    def __init__(self, task: ReplicaTask, config: ClusterConfig) -> None:
        """Ask for the actor, which Ray starts where and when there is room. Raises OSError, CheckpointError."""
        num_gpus = config.tp_size if task.flags["device"] == "cuda" else 0
        needs = f"{config.replica_cpus:g} CPUs" + (f" and {num_gpus} GPUs" if num_gpus else "")
        super().__init__(task, ray.util.get_node_ip_address(), needs)
        self.given["cpus"] = None if num_gpus else config.replica_cpus
        options = {
            "num_cpus": config.replica_cpus,
            "num_gpus": num_gpus,
            "max_restarts": 0,  # its requests must move first: the server starts another one
            "scheduling_strategy": "SPREAD",
        }
        self._actor = ray.remote(EngineActor).options(**options).remote()
        self._run: Any = self._actor.run.remote(self.given, self.address, self.key)

    @property
    def end(self) -> str:
        """As ``Launched``."""
        try:
            return f"status {ray.get(self._run, timeout=_ANSWER_S)}"
        except Exception as error:  # noqa: BLE001 -- whatever the actor or Ray has raised
            lines = str(error).strip().splitlines()
            return f"{type(error).__name__}: {lines[-1] if lines else ''}"

    def kill(self) -> None:
        """As ``Launched``."""
        ray.kill(self._actor)

    def wait(self, timeout_s: float | None = None) -> bool:
        """As ``Launched``."""
        return bool(ray.wait([self._run], timeout=timeout_s)[0])


def cluster_tasks(config: ServerConfig, secret: bytes) -> list[ReplicaTask]:
    """What each replica that there can be is started with: on GPUs where there are any, unless ``--device`` is given.

    Raises:
        ConfigError: ``--device cuda`` where the cluster has no GPUs.
    """
    device = chosen_device(config.device, ray.cluster_resources().get("GPU", 0) > 0)
    flags = json.loads(config.model_dump_json(include=set(EngineConfig.model_fields), exclude_unset=True))
    return [
        ReplicaTask(index, flags | {"device": device, "seed": (config.seed + index) % 2**63}, {}, secret)
        for index in range(config.most_replicas)
    ]


def chosen_device(name: str, has_gpus: bool) -> str:
    """The device of all replicas, for that of ``--device``. Raises ConfigError: the cluster has no GPUs."""
    if name == "cuda" and not has_gpus:
        raise ConfigError("--device cuda: no machine of the Ray cluster has a GPU")
    return name if name != "auto" else "cuda" if has_gpus else "cpu"
