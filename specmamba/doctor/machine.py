"""What the machine has (processor, memory, GPUs), and whether the fast forms of operators run on it."""

from __future__ import annotations

import logging
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from specmamba.cache.memory import free_memory
from specmamba.doctor.software import Facts, Problem, error, warning
from specmamba.flags.command_line import readable
from specmamba.kernels import rowwise
from specmamba.kernels.gpu import SWITCH as TRITON_SWITCH
from specmamba.kernels.gpu import choice, has_triton, runs_on
from specmamba.kernels.native.levels import NativeUnavailableError, chosen_level, cpu_flags
from specmamba.kernels.native.library import SHIPPED, cache_folder, open_library, origin, sources
from specmamba.kernels.rowwise import torch_ops
from specmamba.measure.memory_speed import weight_speed
from specmamba.measure.report import machine

# CPU flags that the native kernels need or that matter for their speed.
SHOWN_CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")
DRIVER = Path("/proc/driver/nvidia/version")
LITTLE_MEMORY = 2 << 30  # the demo with torch and its pools takes about 1 GiB


def examine_hardware() -> tuple[Facts, list[Problem]]:
    """{"cpu": {...}, "gpus": [...], "driver", "torch_built_for"}; sizes in bytes."""
    flags = cpu_flags()
    free = free_memory(torch.device("cpu"))
    cpu = {
        "name": machine(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "flags": {name: name in flags for name in SHOWN_CPU_FLAGS},
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
    """The platform that the installed torch is built for: "CPU", or CUDA or ROCm with its version."""
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


NO_COMPILER = (
    "install a C++ compiler (Debian's package g++, or pip install 'specmamba[compiler]'); "
    "until then PyTorch does the same work, only slower"
)


def examine_kernels(device: torch.device) -> tuple[Facts, list[Problem]]:
    """{"native": {...}, "triton": {...}}: what runs, or why not, and the folder of compiled code."""
    native, native_problems = examine_native()
    triton, triton_problems = examine_triton(device)
    return {"native": native, "triton": triton}, native_problems + triton_problems


def examine_native() -> tuple[Facts, list[Problem]]:
    """Build all native kernels that are not built yet, and load them."""
    kernels = sources()
    with ThreadPoolExecutor() as pool:
        reasons = list(pool.map(_why_not, kernels))
    failed = [reason for reason in reasons if reason is not None]
    facts: Facts = {
        "built": [source.parent.name for source, reason in zip(kernels, reasons, strict=True) if reason is None],
        "reason": str(failed[0]) if failed else None,
        **dict.fromkeys(("level", "origin", "folder", "gb_per_second", "threads")),
    }
    if not failed:
        folder = SHIPPED if origin() == "shipped" else cache_folder()
        facts |= {"level": chosen_level().name, "origin": origin(), "folder": str(folder)}
        facts |= {"gb_per_second": round(weight_speed(), 1), "threads": torch.get_num_threads()}
        return facts, []
    return facts, _native_problems(failed[0])


def _why_not(source: Path) -> NativeUnavailableError | None:
    try:
        open_library(source)
        return None
    except NativeUnavailableError as reason:
        return reason


def _native_problems(reason: NativeUnavailableError) -> list[Problem]:
    """Give advice for causes that can be removed: not for an old CPU, nor for kernels that were turned off."""
    what = f"no native kernels: {reason}"
    if reason.level >= logging.WARNING:
        return [warning(what, "remove the cause, or set SPECMAMBA_NATIVE=0 to do without them for good")]
    return [warning(what, NO_COMPILER)] if "compiler" in str(reason) else []


def examine_triton(device: torch.device) -> tuple[Facts, list[Problem]]:
    """Run one kernel, if Triton should run on this device; ``off``: operators that the environment turns off."""
    off = choice().off
    facts: Facts = {"installed": has_triton(), "runs": False, "off": list(off), "reason": None, "folder": None}
    if not has_triton():
        facts["reason"] = "not installed; only GPUs need it"
        advice = "pip install 'specmamba[gpu]'; until then PyTorch does the same work, only slower"
        return facts, [warning("Triton is not installed", advice)] if device.type == "cuda" else []
    if not runs_on(device):
        is_off = os.environ.get(TRITON_SWITCH) == "0"
        facts["reason"] = f"{TRITON_SWITCH}=0 turns it off" if is_off else "no GPU for it to run on"
        return facts, []
    facts["reason"] = why_triton_fails(device)
    if facts["reason"] is None:
        facts |= {"runs": True, "folder": str(triton_folder())}
        return facts, []
    advice = (
        "Triton needs a C compiler and Python's headers (Debian's packages gcc and python3-dev) and a folder to write "
        f"to ($TRITON_CACHE_DIR); {TRITON_SWITCH}=0 does without it"
    )
    return facts, [error(f"Triton does not run: {facts['reason']}", advice)]


def why_triton_fails(device: torch.device) -> str | None:
    """Compile and run a norm; return None when its result equals PyTorch's, else the reason."""
    x = torch.linspace(-2, 2, 4 * 64, device=device).view(4, 64)
    weight = torch.linspace(0.5, 1.5, 64, device=device)
    try:
        got = rowwise.rms_norm(x, weight, 1e-6)
        expected = torch_ops.rms_norm(x, weight, 1e-6)
        difference = (got - expected).abs().amax().item()
    except Exception as failure:  # noqa: BLE001  # Triton, the driver and the C compiler fail in many ways
        return f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else 'no message'}"
    return None if difference < 1e-4 else f"a norm is off by {difference:.3g}"


def triton_folder() -> Path:
    """The folder in which Triton keeps compiled kernels."""
    chosen = os.environ.get("TRITON_CACHE_DIR")
    return Path(chosen) if chosen else Path.home() / ".triton" / "cache"
