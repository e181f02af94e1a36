"""A wheel with compiled kernels in a virtual environment of its own, where no compiler is found."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from specmamba.kernels.native.cpp_compiler import find_compiler
from specmamba.kernels.native.levels import LEVELS, MACHINE, chosen_level
from specmamba.kernels.native.library import shipped_name
from tests.kernels.native.compilers import less_optimized
from tests.pairwise import IS_FULL
from tests.repository import built_wheel
from tests.tiny import write_tiny_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.usefixtures("needs_native")]
MOST_BYTES = 12 << 20


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel with one library, compiled in a fifth of the time. As they are in a full run."""
    compiler = shlex.join(less_optimized(find_compiler(), "-O0"))
    asked_for = "1" if IS_FULL else chosen_level().name
    return built_wheel(tmp_path_factory.mktemp("wheel"), "--wheel", SPECMAMBA_BUILD_NATIVE=asked_for, CXX=compiler)


@pytest.fixture(scope="module")
def commands(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of commands of an environment that has the wheel, and finds its dependencies in this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    python = folder / "bin/python"
    options = ["--no-deps", "--no-index", "--quiet", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", *options, wheel], check=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


@pytest.fixture
def environment(commands: Path, tmp_path: Path) -> dict[str, str]:
    own = {"PATH": str(commands), "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    # another test has the other core; and steps with these kernels take long to be measured
    return own | {"OMP_NUM_THREADS": "1", "SPECMAMBA_SPECULATIVE_ADAPTIVE": "off"}


def test_its_name_and_contents(wheel: Path) -> None:
    assert re.fullmatch(rf"specmamba-[\d.]+-py3-none-manylinux_2_\d+_{MACHINE}\.whl", wheel.name)
    names = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")}
    levels = LEVELS if IS_FULL else [chosen_level()]
    assert names == {f"specmamba/kernels/native/libraries/{shipped_name(level)}" for level in levels}
    size = sum(info.file_size for info in zipfile.ZipFile(wheel).infolist() if info.filename.endswith(".so"))
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, libraries {size / 1e6:.1f} MB")
    assert size < MOST_BYTES


def test_it_uses_its_kernels(commands: Path, environment: dict[str, str], tmp_path: Path) -> None:
    """With a model whose self-test is soon over; the next test lets the demo write."""
    model = write_tiny_checkpoint(tmp_path / "model", seed=0, vocab_size=4096)
    run = subprocess.run(
        [commands / "specmamba", "doctor", "--json", "--model", str(model)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    native = json.loads(run.stdout)["kernels"]["native"]
    assert (native["level"], native["origin"], native["reason"]) == (chosen_level().name, "shipped", None)
    assert str(commands.parent) in native["folder"]
    assert not list((tmp_path / "cache").glob("specmamba/*.so"))


def test_it_serves(commands: Path, environment: dict[str, str], tmp_path: Path) -> None:
    command = [str(commands / "specmamba"), "serve", "--port", "0"]
    with subprocess.Popen(
        command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            ready = server.stdout.readline()
            found = re.search(r"http://[\d.]+:\d+", ready)
            assert found is not None, ready
            body = json.dumps({"prompt": "import os\n", "max_tokens": 8}).encode()
            headers = {"Content-Type": "application/json"}
            with urlopen(Request(f"{found[0]}/v1/completions", body, headers), timeout=60) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] == 8
        finally:
            server.terminate()
        assert server.wait(60) == 0
        assert server.stderr is not None
        assert f"native kernels for {chosen_level().name}, shipped" in server.stderr.read()
