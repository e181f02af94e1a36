"""What each replica is started with: flags, GPUs and threads of its own."""

from __future__ import annotations

import json
import os

import torch

from specmamba.config import EngineConfig
from specmamba.engine.loading import process_threads, resolve_device
from specmamba.engine.mirror.start import launched_rank
from specmamba.errors import ConfigError
from specmamba.replicas.replica_process import ReplicaTask
from specmamba.server_config import ServerConfig

VISIBLE, THREADS = "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"


def tasks_of(config: ServerConfig, secret: bytes) -> list[ReplicaTask]:
    """Share out the machine. On a CPU replicas share its cores and its memory, on GPUs each has its own.

    Raises:
        ConfigError: there are fewer GPUs than the replicas need, or the ranks of torchrun are to be replicas.
    """
    size = config.dp_size
    if launched_rank(config) is not None:
        raise ConfigError(f"--dp-size {size}: replicas start their ranks themselves: leave torchrun out")
    device = resolve_device(config.device)
    is_cpu = device.type == "cpu"
    check_count(size, config.tp_size, None if is_cpu else torch.cuda.device_count())
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


def check_count(dp_size: int, tp_size: int, num_gpus: int | None) -> None:
    """Raise ConfigError where GPUs do not suffice; ``num_gpus``: None on a CPU."""
    if num_gpus is not None and num_gpus < dp_size * tp_size:
        raise ConfigError(
            f"--dp-size {dp_size}: each replica needs {tp_size} of the GPUs, and there are {num_gpus} in all"
        )
