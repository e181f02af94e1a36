"""Forks in place of processes of Python are to their test what those are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes.forked import READ_EARLY
from tests.repository import ROOT

pytestmark = pytest.mark.usefixtures("forked_processes")
PYTHON = [sys.executable, "-c"]
IS_FORK = "import sys; assert 'torch' in sys.modules; "


def test_streams_arguments_environment_and_folder(tmp_path: Path) -> None:
    code = (
        IS_FORK + "import os; print(input(), sys.argv, os.environ['GIVEN'], os.getcwd()); print('e', file=sys.stderr)"
    )
    environment = {name: value for name, value in os.environ.items() if name.startswith(READ_EARLY)} | {"GIVEN": "x"}
    done = subprocess.run(
        [*PYTHON, code, "a", "b c"],
        input="in\n",
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == (f"in ['-c', 'a', 'b c'] x {tmp_path}\n", "e\n")


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("sys.exit(7)", 7),
        ("sys.exit()", 0),
        ("sys.exit('why')", 1),
        ("1 / 0", 1),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("raise KeyboardInterrupt", -2),
        ("import atexit, os; atexit.register(os._exit, 5)", 5),
        ("import threading, os; threading.Timer(0.1, os._exit, [6]).start()", 6),
    ],
)
def test_how_it_ends(end: str, status: int) -> None:
    done = subprocess.run([*PYTHON, IS_FORK + end], stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == status
    assert ("ZeroDivisionError" in done.stderr) == (end == "1 / 0")
    assert ("why" in done.stderr) == ("why" in end)


def test_it_is_a_child_with_a_session_and_the_files_that_it_is_given() -> None:
    read, written = os.pipe()
    code = (
        IS_FORK
        + f"import os; os.write({written}, f'{{os.getppid()}} {{os.getsid(0) == os.getpid()}}'.encode()); input()"
    )
    with subprocess.Popen([*PYTHON, code], stdin=subprocess.PIPE, pass_fds=[written], start_new_session=True) as child:
        os.close(written)
        assert os.read(read, 99).decode() == f"{os.getpid()} True"
        assert Path(f"/proc/{child.pid}/cmdline").read_bytes().startswith(os.fsencode("\0".join([*PYTHON, code])))
        assert sorted(os.listdir(f"/proc/{child.pid}/fd")) == sorted(map(str, (0, 1, 2, written)))
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == -signal.SIGTERM
    assert os.read(read, 1) == b""
    os.close(read)


def test_a_module_is_found_by_its_path() -> None:
    command = [sys.executable, "-P", "-m", "specmamba", "--version"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("specmamba ")


def test_what_torch_reads_when_it_is_loaded_starts_anew() -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "3"}
    subprocess.run([*PYTHON, "import sys; assert 'torch' not in sys.modules"], env=environment, check=True)
