"""Building native kernels: the cache, processes that race, and everything that can stand against it."""

from __future__ import annotations

import ctypes
import logging
import os
import shlex
import shutil
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

from specmamba.kernels.native import build, cpp_compiler, levels, library
from specmamba.kernels.native.levels import LEVELS, LEVELS_OF, Level, available_levels, chosen_level
from tests.kernels.native.compilers import sources_with_switches
from tests.pairwise import IS_FULL
from tests.repository import ROOT

KERNELS = library.sources()
SOURCE = """
#include "parallel.h"
extern "C" long sum_below(long count, int threads) {
  std::atomic<long> sum{0};
  specmamba::parallel_for(count, 3, threads, [&](long first, long last) {
    for (long i = first; i < last; ++i) sum += i;
  });
  return sum;
}
"""
ADD_ALL = """
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from specmamba.kernels.native import library
loaded = library.open_library(Path(sys.argv[1]))
print(loaded.sum_below(1000, 2))
"""


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache of its own for every test, where nothing is loaded before but the threads; and nothing said yet."""
    monkeypatch.delenv("SPECMAMBA_NATIVE", raising=False)
    with suppress(levels.NativeUnavailableError):
        library._parallel_region(chosen_level())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    library.load.cache_clear()
    library._log_once.cache_clear()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "example"
    folder.mkdir()
    (folder / "native.cpp").write_text(SOURCE)
    return folder / "native.cpp"


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        cpp_compiler.find_compiler()
    except levels.NativeUnavailableError as reason:
        pytest.skip(str(reason))
    if not available_levels():
        pytest.skip("this CPU has no AVX2")


def write_compiler(folder: Path, script: str) -> str:
    file = folder / "fake-compiler"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return str(file)


def test_a_library_is_built_once_and_runs_on_threads(source: Path, compiler: None, tmp_path: Path) -> None:
    loaded = library.open_library(source)
    assert [loaded.sum_below(1000, threads) for threads in (1, 2, 4)] == [499500] * 3
    assert loaded.sum_below(0, 2) == 0
    folder = tmp_path / "cache/specmamba"
    (file,) = folder.iterdir()
    built = file.stat().st_mtime_ns, file.stat().st_ino
    library.open_library(source)
    assert [(f.stat().st_mtime_ns, f.stat().st_ino) for f in folder.iterdir()] == [built]
    assert folder.stat().st_mode & 0o777 == 0o700
    source.write_text(SOURCE + "// changed\n")
    library.open_library(source)
    assert len(list(folder.iterdir())) == 2


def test_one_openmp_runtime_is_loaded(source: Path, compiler: None) -> None:
    library.open_library(source).sum_below(1000, 2)
    maps = Path("/proc/self/maps").read_text()
    runtimes = {
        line.split()[-1] for line in maps.splitlines() if "libgomp" in line or "omp5" in line or "libomp" in line
    }
    assert len(runtimes) == 1, runtimes


def test_processes_that_build_at_once(source: Path, compiler: None, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", ADD_ALL, str(source)]
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0].strip() for process in running] == ["499500", "499500"]
    assert len(list((tmp_path / "cache/specmamba").glob("example-*"))) == 1  # and no unfinished file is left


def expect_log(source: Path, caplog: pytest.LogCaptureFixture, level: int, part: str) -> None:
    """No library, and one line that says why, however often it is asked for."""
    with caplog.at_level(logging.INFO, logger="specmamba"):
        assert library.load(source) is None
        library.load.cache_clear()
        assert library.load(source) is None
    (record,) = caplog.records
    assert record.levelno == level
    assert "PyTorch's are used" in record.getMessage()
    assert part in record.getMessage()


def test_no_compiler(source: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "chosen_level", lambda: LEVELS[-1])
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(cpp_compiler, "find_spec", lambda _: None)
    expect_log(source, caplog, logging.INFO, "no C++ compiler (none of g++, clang++, c++, ziglang is installed)")


def test_cxx_that_is_not_there(source: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "chosen_level", lambda: LEVELS[-1])
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    expect_log(source, caplog, logging.INFO, "$CXX names 'no-such-compiler', which is not installed")


def test_a_build_that_fails(
    source: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(library, "chosen_level", lambda: LEVELS[-1])
    script = '[ "$1" = --version ] && exit 0; echo first >&2; echo "what went wrong" >&2; exit 1'
    monkeypatch.setenv("CXX", write_compiler(tmp_path, script))
    expect_log(source, caplog, logging.WARNING, "does not compile native.cpp: what went wrong")
    assert list((tmp_path / "cache/specmamba").iterdir()) == []


def test_a_library_that_does_not_load(
    source: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(library, "chosen_level", lambda: LEVELS[-1])
    monkeypatch.setenv("CXX", write_compiler(tmp_path, "exit 0"))  # succeeds, and leaves an empty file
    expect_log(source, caplog, logging.WARNING, "cannot be loaded")
    assert list((tmp_path / "cache/specmamba").iterdir()) == []


def test_a_compiler_that_hangs(
    source: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(library, "chosen_level", lambda: LEVELS[-1])
    monkeypatch.setattr(cpp_compiler, "TIMEOUT_SECONDS", 0.2)
    monkeypatch.setenv("CXX", write_compiler(tmp_path, "exec sleep 30"))
    expect_log(source, caplog, logging.WARNING, "does not run")


def test_a_cpu_that_cannot(source: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "cpu_flags", lambda: frozenset({"avx2", "avx512f"}))
    expect_log(source, caplog, logging.INFO, "this CPU has no bmi2, f16c, fma")


def test_an_unknown_level(source: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECMAMBA_NATIVE", "sse4")
    expect_log(
        source, caplog, logging.WARNING, "SPECMAMBA_NATIVE=sse4 is no instruction set: give one of amx_bf16, avx512"
    )


def test_a_level_that_the_cpu_lacks(
    source: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECMAMBA_NATIVE", "avx512")
    monkeypatch.setattr(levels, "cpu_flags", lambda: LEVELS[-1].cpu_flags | {"avx512f"})
    expect_log(
        source, caplog, logging.WARNING, "SPECMAMBA_NATIVE=avx512, but this CPU has no avx512bw, avx512cd, avx512dq"
    )


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
def test_the_best_level_of_a_cpu(level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "cpu_flags", lambda: level.cpu_flags | {"sse4_2", "amx_bf16"})
    assert chosen_level() is level
    assert available_levels()[0] is level
    for lower in available_levels():
        monkeypatch.setenv("SPECMAMBA_NATIVE", f" {lower.name.upper()} ")
        assert chosen_level() is lower


def test_tiles_that_the_system_keeps_are_no_level(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles, others = LEVELS_OF["x86_64"][:2]
    monkeypatch.setattr(levels, "LEVELS", (tiles, others))
    monkeypatch.setattr(Path, "read_text", lambda *_: f"processor: 0\nflags: {' '.join(tiles.cpu_flags)}\n")
    for has_permission, best in ((True, tiles), (False, others)):
        monkeypatch.setattr(levels, "_may_use_tiles", lambda answer=has_permission: answer)
        assert chosen_level() is best


def test_the_cpu_is_asked_once_for_all_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Path] = []
    read = Path.read_text

    def read_text(path: Path, *rest: str) -> str:
        reads.append(path)
        return read(path, *rest)

    monkeypatch.setattr(Path, "read_text", read_text)
    available_levels()
    assert reads == [Path("/proc/cpuinfo")]


def test_levels_have_libraries_of_their_own(source: Path, compiler: None) -> None:
    built = [library.built_library(source, level) for level in LEVELS]
    assert len(set(built)) == len(LEVELS)
    assert [file.name.split("-")[1] for file in built] == [level.name for level in LEVELS]


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
def test_every_kernel_is_valid_for_every_level(
    level: Level, compiler: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Templates included. A full run compiles all of it, in test_native_wheel.py.

    All tests compile for the best level of this CPU, and test_levels.py for some below it: of the others with the same
    vectors as those, only sources that differ are read.
    """
    run = [each for each in available_levels()[:1] + available_levels()[-1:] if not IS_FULL]
    if level in run:
        pytest.skip(f"the tests of operators compile and run all kernels for {level.name}")
    if any(level.options[0] == each.options[0] for each in run):
        monkeypatch.setattr(build, "sources", sources_with_switches)
    build.compiled_objects(level, [*cpp_compiler.find_compiler(), "-fsyntax-only"], tmp_path)


@pytest.mark.parametrize("value", ["0", "off", " False "])
def test_turned_off(
    source: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, value: str, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPECMAMBA_NATIVE", value)
    expect_log(source, caplog, logging.INFO, "SPECMAMBA_NATIVE turns them off")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_cache_that_others_can_write(
    source: Path, caplog: pytest.LogCaptureFixture, compiler: None, mode: int, tmp_path: Path
) -> None:
    folder = tmp_path / "cache/specmamba"
    folder.mkdir(parents=True)
    folder.chmod(mode)
    expect_log(source, caplog, logging.WARNING, "others can write to it")
    assert list(folder.iterdir()) == []


def test_a_cache_that_is_a_link(source: Path, caplog: pytest.LogCaptureFixture, compiler: None, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "cache/specmamba").symlink_to(tmp_path / "elsewhere")
    expect_log(source, caplog, logging.WARNING, "belongs to another user")


def test_a_cache_of_another_user(
    source: Path, caplog: pytest.LogCaptureFixture, compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    expect_log(source, caplog, logging.WARNING, "belongs to another user")


def test_a_cached_library_of_another_user(source: Path, compiler: None, tmp_path: Path) -> None:
    built = library.built_library(source, LEVELS[-1])
    built.chmod(0o777)
    with pytest.raises(levels.NativeUnavailableError, match="others can write to it"):
        library.built_library(source, LEVELS[-1])


def test_a_cache_that_cannot_be_made(
    source: Path, caplog: pytest.LogCaptureFixture, compiler: None, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file")
    expect_log(source, caplog, logging.WARNING, "cannot hold compiled kernels")


def test_a_relative_cache_home_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As the XDG base directory specification asks."""
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert library.cache_folder() == tmp_path / ".cache/specmamba"


def test_the_file_name_follows_the_flags(source: Path, compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    first = library.built_library(source, LEVELS[-1])
    monkeypatch.setattr(cpp_compiler, "FLAGS", (*cpp_compiler.FLAGS, "-DOTHER"))
    assert library.built_library(source, LEVELS[-1]) != first


def test_shipped_kernels_need_no_compiler(
    source: Path, compiler: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    level = chosen_level()
    built = library.built_library(source, level)
    monkeypatch.setattr(library, "SHIPPED", tmp_path / "shipped")
    library.SHIPPED.mkdir()
    built.rename(library.SHIPPED / library.shipped_name(level))
    monkeypatch.setenv("PATH", "/nowhere")
    assert library.open_library(source).sum_below(1000, 2) == 499500
    assert library.origin() == "shipped"
    assert list(built.parent.iterdir()) == []


def test_damaged_shipped_kernels_are_compiled_here(
    source: Path,
    compiler: None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(library, "SHIPPED", tmp_path / "shipped")
    library.SHIPPED.mkdir()
    (library.SHIPPED / library.shipped_name(chosen_level())).write_bytes(b"\x7fELF and no more")
    assert library.open_library(source).sum_below(1000, 2) == 499500
    assert library.origin() == "compiled here"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "is damaged" in record.getMessage()
    assert "install specmamba anew" in record.getMessage()


def test_the_order_of_compilers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """$CXX, then those of the system, GCC first, then the package, which is asked for with this Python."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(cpp_compiler, "find_spec", lambda name: name == "ziglang" or None)
    assert cpp_compiler.find_compiler() == [sys.executable, "-m", "ziglang", "c++"]
    for name in ("c++", "clang++", "g++"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
        assert cpp_compiler.find_compiler() == [name]
    monkeypatch.setenv("CXX", "clang++ --some-option")
    assert cpp_compiler.find_compiler() == ["clang++", "--some-option"]


@pytest.mark.parametrize("level", [level for of_kind in LEVELS_OF.values() for level in of_kind], ids=lambda x: x.name)
def test_zig_names_processors_in_its_own_way(level: Level) -> None:
    cpu = f"-mcpu={level.zig_cpu}"
    for zig in ([sys.executable, "-m", "ziglang", "c++"], ["zig", "c++"]):
        assert cpp_compiler.command_of(zig, level) == [*zig, cpu, *cpp_compiler.FLAGS]
    for other in (["g++"], ["clang++"]):
        assert cpp_compiler.command_of(other, level) == [*other, *level.options, *cpp_compiler.FLAGS]


ZIG = shlex.join([sys.executable, "-m", "ziglang", "c++"])


@pytest.mark.slow
@pytest.mark.parametrize("command", ["clang++", ZIG], ids=["clang", "zig"])
def test_other_compilers_build_every_kernel(
    command: str, source: Path, compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if command == ZIG and find_spec("ziglang") is None:
        pytest.skip("ziglang is not installed (pip install 'specmamba[compiler]')")
    if command == "clang++" and shutil.which(command) is None:
        pytest.skip("clang++ is not installed")
    monkeypatch.setenv("CXX", command)
    assert library.open_library(source).sum_below(1000, 2) == 499500
    for kernel in KERNELS:
        assert isinstance(library.open_library(kernel), ctypes.CDLL)


def test_a_kernel_builds_with_nothing_cached(compiler: None) -> None:
    """The smallest one; the next test builds all of them, but not anew."""
    smallest = min(KERNELS, key=lambda path: path.stat().st_size)
    assert isinstance(library.open_library(smallest), ctypes.CDLL)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda path: path.parent.name)
def test_every_kernel_builds(kernel: Path, compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the cache that the ops' own tests use: those are skipped, and do not fail, where a build fails."""
    monkeypatch.undo()
    monkeypatch.delenv("SPECMAMBA_NATIVE", raising=False)
    assert isinstance(library.open_library(kernel), ctypes.CDLL)
