"""Instruction sets that native kernels are compiled for, and the one that this process uses."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SWITCH = "SPECMAMBA_NATIVE"
_OFF = ("0", "false", "no", "off")


class NativeUnavailableError(Exception):
    """Native code cannot run here; the message says why, ``level`` is the level of the log line."""

    def __init__(self, message: str, level: int = logging.INFO) -> None:
        super().__init__(message)
        self.level = level


@dataclass(frozen=True, slots=True)
class Level:
    """An instruction set; vector.h has a header for each kind of registers."""

    name: str  # a value of ``SPECMAMBA_NATIVE``
    cpu_flags: frozenset[str]  # as Linux names them
    options: tuple[str, ...]  # of GCC and clang
    zig_cpu: str  # the same as zig names it


_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi2"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_BF16 = _AVX512 | {"avx512_vnni", "avx512_bf16"}
_V4 = ("-march=x86-64-v4", "-mprefer-vector-width=512")
_TILES = frozenset({"amx_tile", "amx_bf16"})
_NEON = frozenset({"asimd"})
# By what ``platform.machine`` says; the best first.
LEVELS_OF: Mapping[str, tuple[Level, ...]] = {
    "x86_64": (
        Level(
            "amx_bf16",
            _BF16 | _TILES,
            (*_V4, "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
            "x86_64_v4+avx512vnni+avx512bf16+amx_tile+amx_bf16",
        ),
        Level(
            "avx512_bf16",
            _BF16,
            (*_V4, "-mavx512vnni", "-mavx512bf16"),
            "x86_64_v4+avx512vnni+avx512bf16",
        ),
        Level("avx512_vnni", _AVX512 | {"avx512_vnni"}, (*_V4, "-mavx512vnni"), "x86_64_v4+avx512vnni"),
        Level("avx512", _AVX512, _V4, "x86_64_v4"),
        Level("avx2", _AVX2, ("-march=x86-64-v3",), "x86_64_v3"),
    ),
    "aarch64": (
        Level(
            "neon_bf16",
            _NEON | {"bf16"},
            ("-march=armv8.2-a+bf16",),
            "generic+v8_2a+bf16",
        ),
        Level("neon", _NEON, ("-march=armv8-a",), "generic"),
    ),
}
MACHINE = platform.machine()
LEVELS = LEVELS_OF.get(MACHINE, ())  # of this kind of processor


def chosen_level() -> Level:
    """The best level of this CPU, or the one that ``SPECMAMBA_NATIVE`` names.

    Raises:
        NativeUnavailableError: there is no such level, the CPU does not have it, or the user turned native code off.
    """
    asked = os.environ.get(SWITCH, "").strip().lower()
    if asked in _OFF:
        raise NativeUnavailableError(f"{SWITCH} turns them off")
    flags = cpu_flags()
    if not asked:
        return _best_level(flags)
    level = next((level for level in LEVELS if level.name == asked), None)
    if level is None and not LEVELS:
        return _best_level(flags)
    if level is None:
        names = ", ".join(level.name for level in LEVELS)
        raise NativeUnavailableError(
            f"{SWITCH}={asked} is no instruction set: give one of {names}, or 0", logging.WARNING
        )
    if missing := level.cpu_flags - flags:
        raise NativeUnavailableError(f"{SWITCH}={asked}, but this CPU has no {_listed(missing)}", logging.WARNING)
    return level


def available_levels() -> tuple[Level, ...]:
    """The levels of this CPU, the best first."""
    flags = cpu_flags()
    return tuple(level for level in LEVELS if level.cpu_flags <= flags)


def cpu_flags() -> frozenset[str]:
    """The CPU's features as Linux names them, without those that it keeps from this process; empty on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf8").splitlines()
    except OSError:
        return frozenset()
    names = ("flags", "Features")  # the second is ARM's
    flags = frozenset(next((line.partition(":")[2] for line in lines if line.startswith(names)), "").split())
    return flags if not flags & _TILES or _may_use_tiles() else flags - _TILES


@cache
def _may_use_tiles() -> bool:
    """Ask Linux for tile registers: for all threads of this process and what it forks, not for programs it starts."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return MACHINE == "x86_64" and ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


def _best_level(flags: frozenset[str]) -> Level:
    for level in LEVELS:
        if level.cpu_flags <= flags:
            return level
    if not LEVELS:
        raise NativeUnavailableError(f"there are none for processors of the kind {MACHINE}")
    raise NativeUnavailableError(f"this CPU has no {_listed(LEVELS[-1].cpu_flags - flags)}")


def _listed(flags: frozenset[str]) -> str:
    return ", ".join(sorted(flags))
