"""Native kernels as ctypes libraries, shipped in a wheel or compiled once per machine and user, or why there are none.

A library that was compiled here lies in a folder that only its user can write, under the hash of everything that made
it: sources, flags, the compiler's version and the instruction set. It is written under another name and renamed, so
that processes that build at the same time never load half a file.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal

from specmamba.kernels.native.calls import NativeFunction
from specmamba.kernels.native.cpp_compiler import KERNELS, command_of, find_compiler, run_compiler, version_of
from specmamba.kernels.native.levels import Level, NativeUnavailableError, chosen_level

SHIPPED = Path(__file__).parent / "libraries"  # in wheels that were built with them, see build.py

logger = logging.getLogger("specmamba")


def built_library(source: Path, level: Level) -> Path:
    """The library of a source file for an instruction set, compiled now if it is not in the cache.

    Raises:
        NativeUnavailableError: no compiler, a failed build, or a cache folder that cannot be trusted or written.
    """
    try:
        compiler = find_compiler()
        name = f"{source.parent.name}-{level.name}-{_fingerprint(source, level, compiler)}.so"
        library = cache_folder() / name
        if library.exists():
            _check_owned(library)
        else:
            _compile(source, [*command_of(compiler, level), "-shared"], library)
    except (OSError, ValueError) as error:  # ValueError: quotes in $CXX that do not close
        raise NativeUnavailableError(f"{source.parent.name} cannot be built: {error}", logging.WARNING) from None
    return library


def sources() -> list[Path]:
    """The C++ source of every operator that has one, sorted."""
    return sorted(KERNELS.glob("*/native.cpp"))


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/specmamba`` or ``~/.cache/specmamba``, made with mode 0700 where it does not exist.

    Raises:
        NativeUnavailableError: another user owns it or can write to it, so its code cannot be trusted; or it
            cannot be created.
    """
    home = os.environ.get("XDG_CACHE_HOME", "")
    folder = (Path(home) if os.path.isabs(home) else Path("~/.cache").expanduser()) / "specmamba"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        _check_owned(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home directory
        raise NativeUnavailableError(f"{folder} cannot hold compiled kernels: {error}", logging.WARNING) from None
    return folder


def _check_owned(path: Path) -> None:
    """Raise unless only this user can have written the path: its code is run."""
    status = path.lstat()
    expected = stat.S_ISDIR if path.suffix != ".so" else stat.S_ISREG
    if not expected(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise NativeUnavailableError(
            f"{path} belongs to another user, or others can write to it: remove it, or set XDG_CACHE_HOME to a folder "
            "of your own",
            logging.WARNING,
        )


def _fingerprint(source: Path, level: Level, compiler: list[str]) -> str:
    digest = hashlib.sha256()
    for part in (*command_of(compiler, level), version_of(compiler)):
        digest.update(part.encode() + b"\0")
    for file in (source, *sorted(KERNELS.glob("*/*.h"))):
        digest.update(file.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def _compile(source: Path, command: list[str], library: Path) -> None:
    try:
        handle, unfinished = tempfile.mkstemp(suffix=".so", prefix=f"{library.stem}-", dir=library.parent)
        os.close(handle)
        try:
            run_compiler([*command, str(source), "-o", unfinished])
            os.chmod(unfinished, 0o700)
            os.replace(unfinished, library)
        finally:
            Path(unfinished).unlink(missing_ok=True)
    except OSError as error:
        raise NativeUnavailableError(f"{library.parent} cannot be written: {error}", logging.WARNING) from None


@cache
def load(source: Path) -> ctypes.CDLL | None:
    """The library of a C++ source, or None where it cannot be loaded: then callers use the PyTorch form.

    The reason is logged once per process, not once per operator. ``SPECMAMBA_NATIVE`` in the environment chooses an
    instruction set (``levels.LEVELS``), or turns native kernels off (``0``).
    """
    try:
        return open_library(source)
    except NativeUnavailableError as reason:
        _log_once(reason.level, f"no native kernels, PyTorch's are used: {reason}")
        return None


def load_functions(
    source: Path, signatures: Mapping[str, Sequence[Any]], results: Mapping[str, Any] | None = None
) -> ctypes.CDLL | None:
    """``load``, and make its functions ``NativeFunction``s with these argument types.

    Args:
        source: of the operator.
        signatures: ctypes of the arguments, by function.
        results: ctypes of results, by function; those that are not named return nothing.
    """
    library = load(source)
    if library is not None:
        for name, arguments in signatures.items():
            if not isinstance(getattr(library, name), NativeFunction):
                setattr(library, name, NativeFunction(library, name, arguments, (results or {}).get(name)))
    return library


def required(library: ctypes.CDLL | None) -> ctypes.CDLL:
    """A library that is known to be loaded: callers check the operator's condition first."""
    assert library is not None
    return library


@cache
def preload() -> None:
    """Build and load all native kernels now, side by side, so that no request waits for a compiler."""
    with ThreadPoolExecutor() as pool:
        loaded = list(pool.map(load, sources()))
    if all(library is not None for library in loaded):
        logger.info("native kernels for %s, %s", chosen_level().name, origin())


def open_library(source: Path) -> ctypes.CDLL:
    """Load the kernels of a source, and give them the threads that torch runs: shipped ones, or compiled now.

    Raises:
        NativeUnavailableError: this CPU or system cannot run it, or the user turned it off.
    """
    level = chosen_level()
    library = _shipped(level) or _compiled(source, level)
    library.specmamba_use_runtime(_parallel_region(level))
    return library


def origin() -> Literal["shipped", "compiled here"]:
    """Where the kernels of this process come from, once they are loaded."""
    return "shipped" if _shipped(chosen_level()) is not None else "compiled here"


def shipped_name(level: Level) -> str:
    """The name of the library in a wheel that has all kernels for an instruction set."""
    return f"specmamba-{level.name}.so"


def _shipped(level: Level) -> ctypes.CDLL | None:
    path = SHIPPED / shipped_name(level)
    if not path.exists():
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        message = f"{path} is damaged ({error}): install specmamba anew. Until then its kernels are compiled here"
        _log_once(logging.WARNING, message)
        return None


def _compiled(source: Path, level: Level) -> ctypes.CDLL:
    path = built_library(source, level)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        with suppress(OSError):
            path.unlink()  # the next process builds it anew
        raise NativeUnavailableError(f"{path} cannot be loaded: {error}", logging.WARNING) from None


@cache
def _parallel_region(level: Level) -> ctypes.c_void_p:
    """The function that runs loops on threads: those of a captured step, or torch's (kernels/replay)."""
    replay = _shipped(level) or _compiled(KERNELS / "replay" / "native.cpp", level)
    replay.replay_use_runtime(_openmp_runtime())
    return ctypes.cast(replay.replay_parallel, ctypes.c_void_p)


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
