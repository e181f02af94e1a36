"""What each replica is started with: flags, GPUs and threads of its own."""

from __future__ import annotations

import json
import os

import torch

from specmamba.config import EngineConfig
from specmamba.engine.loading import process_threads, resolve_device
from specmamba.engine.mirror.start import launched_rank
from specmamba.errors import ConfigError
from specmamba.replicas.replica_launch import ReplicaTask
from specmamba.replicas.scaling_policy import ScalingPolicy
from specmamba.server_config import ServerConfig

VISIBLE, THREADS = "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"


def tasks_of(config: ServerConfig, secret: bytes) -> list[ReplicaTask]:
    """Share out the machine among all replicas that there can be.

    On a CPU they share its cores and its memory, on GPUs each has its own.

    Raises:
        ConfigError: there are fewer GPUs than the replicas need, or the ranks of torchrun are to be replicas.
    """
    size = config.most_replicas
    if launched_rank(config) is not None:
        raise ConfigError(f"{_flag(config)} {size}: replicas start their ranks themselves: leave torchrun out")
    device = resolve_device(config.device)
    is_cpu = device.type == "cpu"
    check_count(size, config.tp_size, None if is_cpu else torch.cuda.device_count(), _flag(config))
    chosen = config.on_device(device.type)
    # those that were given: others have defaults that depend on the device and the number of ranks
    flags = json.loads(config.model_dump_json(include=set(EngineConfig.model_fields), exclude_unset=True))
    if is_cpu:
        flags["mem_fraction_static"] = chosen.mem_fraction_static / size
    threads = str(max(1, process_threads() // size))
    return [
        ReplicaTask(
            index,
            flags | {"seed": (config.seed + index) % 2**63},  # so that no two replicas draw alike
            {THREADS: threads} if is_cpu else {VISIBLE: _gpus(index, config.tp_size)},
            secret,
        )
        for index in range(size)
    ]


def _gpus(index: int, tp_size: int) -> str:
    """The GPUs of a replica, of those that this process sees."""
    given = os.environ.get(VISIBLE)
    every = given.split(",") if given else [str(i) for i in range(torch.cuda.device_count())]
    return ",".join(every[index * tp_size : (index + 1) * tp_size])


def check_count(size: int, tp_size: int, num_gpus: int | None, flag: str = "--dp-size") -> None:
    """Raise ConfigError, which names the ``flag``, where GPUs do not suffice; ``num_gpus``: None on a CPU."""
    if num_gpus is not None and num_gpus < size * tp_size:
        raise ConfigError(f"{flag} {size}: each replica needs {tp_size} of the GPUs, and there are {num_gpus} in all")


def policy_of(config: ServerConfig) -> ScalingPolicy | None:
    """What decides on the number of replicas; None: it stays."""
    if config.dp_max_size is None:
        return None
    return ScalingPolicy(
        config.dp_min_size or 1,
        config.dp_max_size,
        config.dp_target_tokens,
        config.dp_grow_delay,
        config.dp_shrink_delay,
    )


def _flag(config: ServerConfig) -> str:
    return "--dp-size" if config.dp_max_size is None else "--dp-max-size"
