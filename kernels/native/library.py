"""Native kernels as ctypes libraries, or the reason why there are none."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from specmamba.kernels.native.build import NativeUnavailableError, built_library, cpu_flags

REQUIRED_CPU_FLAGS = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "fma"})
SWITCH = "SPECMAMBA_NATIVE"

logger = logging.getLogger("specmamba")


@cache
def load(source: Path) -> ctypes.CDLL | None:
    """The library of a C++ source, or None where it cannot be loaded: then callers use the PyTorch form.

    The reason is logged once per process, not once per operator. ``SPECMAMBA_NATIVE=0`` in the
    environment turns native kernels off.
    """
    try:
        return open_library(source)
    except NativeUnavailableError as reason:
        _log_once(reason.level, f"no native kernels, PyTorch's are used: {reason}")
        return None


def load_functions(source: Path, signatures: Mapping[str, Sequence[Any]]) -> ctypes.CDLL | None:
    """``load``, and declare the argument types of functions that return nothing."""
    library = load(source)
    if library is not None:
        for name, arguments in signatures.items():
            function = getattr(library, name)
            function.restype, function.argtypes = None, [*arguments]
    return library


def required(library: ctypes.CDLL | None) -> ctypes.CDLL:
    """A library that is known to be loaded: its operator's condition has been asked."""
    assert library is not None
    return library


@cache
def preload() -> None:
    """Build and load all native kernels now, side by side, so that no request waits for a compiler."""
    sources = sorted(Path(__file__).parents[1].glob("*/native.cpp"))
    with ThreadPoolExecutor() as pool:
        list(pool.map(load, sources))


def open_library(source: Path) -> ctypes.CDLL:
    """Build and load a library that includes ``parallel.h``, and give it the threads that torch runs.

    Raises:
        NativeUnavailableError: this CPU or system cannot run it, or the user turned it off.
    """
    if os.environ.get(SWITCH, "").strip().lower() in ("0", "false", "no", "off"):
        raise NativeUnavailableError(f"{SWITCH} turns them off")
    missing = REQUIRED_CPU_FLAGS - cpu_flags()
    if missing:
        raise NativeUnavailableError(f"this CPU has no {', '.join(sorted(missing))}")
    runtime = _openmp_runtime()
    path = built_library(source)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        with suppress(OSError):
            path.unlink()  # the next process builds it anew
        raise NativeUnavailableError(f"{path} cannot be loaded: {error}", logging.WARNING) from None
    library.specmamba_use_runtime.argtypes = [ctypes.c_void_p]
    library.specmamba_use_runtime(runtime)
    return library


def _openmp_runtime() -> ctypes.c_void_p:
    """The entry of the OpenMP runtime that torch loaded into this process."""
    import torch  # noqa: F401  # loads the runtime

    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p)
    except AttributeError:
        raise NativeUnavailableError("torch runs without an OpenMP runtime whose threads they could use") from None


@cache
def _log_once(level: int, message: str) -> None:
    logger.log(level, message)
