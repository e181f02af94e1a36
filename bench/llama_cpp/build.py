"""A build of llama.cpp on this machine: its programs, its sources, what it was built for."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specmamba.errors import ConfigError

PROGRAMS = ("llama-server", "llama-quantize")
CONVERTER = "convert_hf_to_gguf.py"
HOW_TO_BUILD = """\
how to make one (20 to 30 minutes on two cores), for the CPU that it runs on:
  pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36
  tar xf llama_cpp_python-0.3.36.tar.gz
  cmake -S llama_cpp_python-0.3.36/vendor/llama.cpp -B BUILD -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON
  cmake --build BUILD --target llama-server llama-bench llama-quantize -j 2
and for AVX2 only: -DGGML_AVX512=OFF -DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON
in place of -DGGML_NATIVE=ON. Then: --llama-cpp BUILD"""
_SHOWN_OPTIONS = re.compile(
    r"^(CMAKE_BUILD_TYPE|CMAKE_CXX_FLAGS|GGML_(?:NATIVE|AVX2|AVX512|FMA|F16C|OPENMP|BLAS|CPU_ALL_VARIANTS)):\w+=(.+)$",
    re.MULTILINE,
)
_PROBE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Build:
    """Paths of a build of llama.cpp that has been checked."""

    folder: Path
    source: Path  # has the converter

    @property
    def server(self) -> Path:
        return self.folder / "bin" / "llama-server"

    @property
    def quantizer(self) -> Path:
        return self.folder / "bin" / "llama-quantize"


def find_build(folder: Path | None, source: Path | None) -> Build:
    """Check the folder of a build, and find its sources.

    Args:
        folder: ``--llama-cpp``.
        source: ``--llama-cpp-source``; None: where the build's CMakeCache.txt says.

    Raises:
        ConfigError: a program or the converter is missing; the message says how to make a build.
    """
    if folder is None:
        raise ConfigError(f"--llama-cpp: give the folder of a build of llama.cpp; {HOW_TO_BUILD}")
    folder = folder.absolute()
    for program in PROGRAMS:
        if not os.access(folder / "bin" / program, os.X_OK):
            raise ConfigError(f"--llama-cpp: {folder} has no program bin/{program}; {HOW_TO_BUILD}")
    source = (source or _source_of(folder)).absolute()
    if not (source / CONVERTER).is_file():
        raise ConfigError(f"--llama-cpp-source: {source} has no {CONVERTER}: give the sources of the build")
    return Build(folder, source)


def describe_build(build: Build) -> dict[str, Any]:
    """{"version", "compiler", "cpu_features", "cmake"}: what the server and the build's cache say of themselves.

    Raises:
        ConfigError: the server does not run on this machine.
    """
    said = _run(build, "--version")
    found = re.search(r"^version: (.+)$", said, re.MULTILINE)
    if found is None:
        raise ConfigError(f"--llama-cpp: {build.server} --version says {said.strip()[-300:]!r}")
    compiler = re.search(r"^built with (.+)$", said, re.MULTILINE)
    # Without a model it ends at once, but lists before that what its kernels use of the CPU.
    features = re.search(r"system_info:.* CPU : (.+)$", _run(build, "-lv", "4", "-m", "none"), re.MULTILINE)
    return {
        "version": found.group(1),
        "compiler": None if compiler is None else compiler.group(1),
        "cpu_features": None if features is None else re.findall(r"(\w+) = 1", features.group(1)),
        "cmake": dict(_SHOWN_OPTIONS.findall(_cache_of(build.folder))),
    }


def clean_environment() -> dict[str, str]:
    """This process's environment without the variables that set options of llama.cpp."""
    return {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_ARG_")}


def _run(build: Build, *arguments: str) -> str:
    command = [str(build.server), *arguments]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, env=clean_environment(), check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"--llama-cpp: {build.server} cannot be run: {error}") from None
    return ended.stdout + ended.stderr


def _source_of(folder: Path) -> Path:
    found = re.search(r"^CMAKE_HOME_DIRECTORY:INTERNAL=(.+)$", _cache_of(folder), re.MULTILINE)
    if found is None:
        raise ConfigError(
            f"--llama-cpp: {folder}/CMakeCache.txt does not say where the sources are: give --llama-cpp-source"
        )
    return Path(found.group(1))


def _cache_of(folder: Path) -> str:
    try:
        return (folder / "CMakeCache.txt").read_text("utf8", errors="replace")
    except OSError:
        return ""
