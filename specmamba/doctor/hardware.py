"""What the machine has: processor, memory, GPUs."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

from specmamba.cache.memory import free_memory
from specmamba.console import readable
from specmamba.doctor.problems import Facts, Problem, warning
from specmamba.kernels.native.build import cpu_flags
from specmamba.measure.report import machine

# What the native kernels need, and what tells a fast processor from a slow one.
TELLING_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
DRIVER = Path("/proc/driver/nvidia/version")
LITTLE_MEMORY = 2 << 30  # the demo with torch and its pools takes about one


def examine_hardware() -> tuple[Facts, list[Problem]]:
    """{"cpu": {...}, "gpus": [...], "driver", "torch_built_for"}; sizes in bytes."""
    flags = cpu_flags()
    free = free_memory(torch.device("cpu"))
    cpu = {
        "name": machine(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "flags": {name: name in flags for name in TELLING_FLAGS},
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "free_bytes": free,
    }
    gpus = [_gpu(index) for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    facts = {"cpu": cpu, "gpus": gpus, "driver": driver_version(), "torch_built_for": built_for()}
    return facts, _problems(facts)


def _gpu(index: int) -> Facts:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "free_bytes": torch.cuda.mem_get_info(index)[0],
    }


def _problems(facts: Facts) -> list[Problem]:
    problems = []
    free = facts["cpu"]["free_bytes"]
    if free < LITTLE_MEMORY:
        advice = "end other programs, or raise the container's limit"
        problems.append(warning(f"only {readable(free)} of memory are free", advice))
    if facts["driver"] is not None and not facts["gpus"]:
        torch_name = f"torch (built for {facts['torch_built_for']})"
        what = f"there is an NVIDIA driver ({facts['driver']}), but {torch_name} has no GPU"
        advice = (
            "install a torch that is built for CUDA, or a newer driver; in a container ask for the GPU (--gpus all)"
        )
        problems.append(warning(what, advice))
    return problems


def built_for() -> str:
    """What the installed torch can run on: "CPU", or CUDA or ROCm with its version."""
    if torch.version.cuda is not None:
        return f"CUDA {torch.version.cuda}"
    return "CPU" if torch.version.hip is None else f"ROCm {torch.version.hip}"


def driver_version(file: Path = DRIVER) -> str | None:
    """The version of the NVIDIA kernel driver, or None where there is none."""
    try:
        found = re.search(r"\b\d{3,}\.[\d.]+", file.read_text("utf8"))
    except OSError:
        return None
    return found.group() if found else "of unknown version"
