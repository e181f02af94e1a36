"""Python processes of tests as forks of one that has imported torch: an import takes seconds of a core, a fork none.

``forking_processes`` lets ``subprocess.Popen`` start ``python -m MODULE`` and ``python -c CODE`` in this way. What
starts is a child of the test's process as ever: with its own standard streams, environment, folder, session and exit
status. Only packages of others are imported ahead, so that ours read the environment of their process. Processes whose
environment says what torch reads when it is loaded, and those with other options of Python, start as ever.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

AHEAD = (
    *("torch", "torch.distributed", "numpy", "safetensors.torch", "tokenizers", "huggingface_hub", "jinja2"),
    *("pydantic", "fastapi", "uvicorn", "httptools", "prometheus_client", "xgrammar"),
)
# Read by the loader, by Python, by torch and by its libraries before a program could change it.
READ_EARLY = (
    "LD_",
    "OMP_",
    "MKL_",
    "GOMP_",
    "KMP_",
    "OPENBLAS_",
    "CUDA_",
    "TORCH",
    "PYTORCH_",
    "HF_",
    "PYTHONHASHSEED",
    "PYTHONWARNINGS",
    "PYTHONUTF8",
    "PYTHONOPTIMIZE",
    "PYTHONIOENCODING",
    "PYTHONFAULTHANDLER",
    "ATEN_",
    "ONEDNN_",
    "MALLOC_",
    "GLIBC_",
)
PR_SET_CHILD_SUBREAPER = 36
MOST_BYTES, MOST_FDS, FREE_FD = 1 << 20, 32, 200
ROOM_FOR_COMMANDS = 1 << 12
PYTHON = sys.executable  # a test may set another
EXECUTE = subprocess.Popen._execute_child  # type: ignore[attr-defined]
lock = threading.Lock()


@contextmanager
def forking_processes(modules: Collection[str] | None = None) -> Iterator[None]:
    """Fork processes of Python that are started in this context, all or those that run one of some modules."""

    def execute(process: Any, *given: Any) -> None:
        program = _program(given[0])
        if program is None or (modules is not None and program["program"] not in modules):
            EXECUTE(process, *given)
        else:
            _execute_child(process, program, *given)

    with patch.object(subprocess.Popen, "_execute_child", execute):
        yield


def _execute_child(process: Any, program: Mapping[str, Any], *given: Any) -> None:
    """``Popen._execute_child``: sets ``pid`` and closes the child's ends of pipes."""
    (_, executable, preexec_fn, close_fds, pass_fds, cwd, env, *_, shell) = given[:10]
    p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, _, *ids, umask, is_session, group = given[10:]
    others = (executable, preexec_fn, shell, *(None if each == -1 else each for each in (*ids, umask, group)))
    environment = {**(os.environ if env is None else env)}
    with lock:
        _, early = _ancestor()
    if any(others) or not close_fds or _early(environment) != early:
        EXECUTE(process, *given)
        return
    streams = [own if fd == -1 else fd for own, fd in enumerate((p2cread, c2pwrite, errwrite))]
    task = {
        **program,
        "environment": environment,
        "folder": os.fspath(cwd or os.getcwd()),
        "is_session": bool(is_session),
        "numbers": [0, 1, 2, *pass_fds],
    }
    process.pid = _forked(task, [*streams, *pass_fds])
    process._child_created = True
    process._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def _program(args: Any) -> dict[str, Any] | None:
    """What a command runs, where it is this Python with a module or a text, and no option but -P."""
    if isinstance(args, str | bytes | os.PathLike):
        return None
    command = [os.fsdecode(each) for each in args]
    if command[:1] != [PYTHON]:
        return None
    is_safe = command[1:2] == ["-P"]
    options = command[2 if is_safe else 1 :]
    if len(options) < 2 or options[0] not in ("-m", "-c"):
        return None
    shown = "\0".join(command)
    return {"is_safe": is_safe, "kind": options[0], "program": options[1], "arguments": options[2:], "shown": shown}


def _early(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(READ_EARLY)}


@cache
def _ancestor() -> tuple[socket.socket, dict[str, str]]:
    """The connection with the process whose forks are started, and what that has read early; it ends with this one."""
    early = _early(os.environ)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for side in (ours, theirs):
        side.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST_BYTES)
    with theirs, patch.object(subprocess.Popen, "_execute_child", EXECUTE):
        command = [PYTHON, "-P", __file__, str(theirs.fileno()), " " * ROOM_FOR_COMMANDS]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])

    @atexit.register
    def end() -> None:
        ours.close()
        process.wait()

    return ours, early


def _forked(task: Mapping[str, Any], fds: Sequence[int]) -> int:
    """The id of a process that runs ``task``: a child of this process, which adopts it."""
    adopt = ctypes.CDLL(None, use_errno=True).prctl
    with lock:
        ancestor, _ = _ancestor()
        assert adopt(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
        try:
            socket.send_fds(ancestor, [json.dumps(task).encode()], list(fds))
            return int(ancestor.recv(64))
        finally:
            adopt(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


# In the process that is forked


def fork_for(connection: socket.socket) -> dict[str, Any] | None:
    """Fork for each task; returns it in the fork, and None where there will be no more."""
    while True:
        data, fds, _, _ = socket.recv_fds(connection, MOST_BYTES, MOST_FDS)
        if not data:
            return None
        task: dict[str, Any] = json.loads(data)
        read, written = os.pipe()
        between = os.fork()  # ends at once, so that its child is adopted by who asked for it
        if not between:
            ended, child = os.getpid(), os.fork()
            if not child:
                while os.getppid() == ended:
                    time.sleep(0.001)
                return {**task, "fds": fds}
            os.write(written, str(child).encode())
            os._exit(0)
        os.waitpid(between, 0)
        connection.send(os.read(read, 64))
        for fd in (*fds, read, written):
            os.close(fd)


def become(task: Mapping[str, Any], base: Sequence[str]) -> None:
    """Take on all that a process has from its parent."""
    if task["is_session"]:
        os.setsid()
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FREE_FD) for fd in task["fds"]]
    for fd, number in zip(moved, task["numbers"], strict=True):
        os.dup2(fd, number)
    for fd in {*map(int, os.listdir("/proc/self/fd"))} - {*task["numbers"]}:
        with suppress(OSError):
            os.close(fd)
    os.chdir(task["folder"])
    os.environ.clear()
    os.environ.update(task["environment"])
    show(task["shown"].encode()[:ROOM_FOR_COMMANDS])
    open_streams()
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    first = [] if task["is_safe"] else [os.getcwd() if task["kind"] == "-m" else ""]
    sys.path[:] = [*first, *given, *base]


def open_streams() -> None:
    """Open the standard streams as Python does: those that are open know what kind of file the first ones were."""
    sys.stdin = sys.__stdin__ = os.fdopen(0, encoding=sys.stdin.encoding, closefd=False)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", encoding=sys.stdout.encoding, closefd=False)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = os.fdopen(  # type: ignore[misc]
        2, "w", 1, encoding=sys.stderr.encoding, errors="backslashreplace", closefd=False
    )
    if os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)


def show(command: bytes) -> None:
    """Be listed with this command."""
    start, end = map(int, Path("/proc/self/stat").read_text("utf8").rpartition(")")[2].split()[45:47])
    ctypes.memmove(start, command.ljust(end - start, b"\0"), end - start)


def run(task: Mapping[str, Any]) -> NoReturn:
    """Run the program as ``python`` does, but for its last act: to take all modules apart, a second of a core."""
    status: object = 1
    try:
        if task["kind"] == "-m":
            sys.argv[:] = [task["program"], *task["arguments"]]
            runpy.run_module(task["program"], run_name="__main__", alter_sys=True)
        else:
            sys.argv[:] = ["-c", *task["arguments"]]
            exec(compile(task["program"], "<string>", "exec"), {"__name__": "__main__"})
        status = 0
    except SystemExit as ended:
        status = 0 if ended.code is None else ended.code
        if not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except KeyboardInterrupt:
        traceback.print_exc()
        status = signal.SIGINT
    except BaseException:  # noqa: BLE001  # as python does
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if isinstance(status, signal.Signals):  # as python does, so that a shell knows
        signal.signal(status, signal.SIG_DFL)
        os.kill(os.getpid(), status)
    os._exit(status & 0xFF if isinstance(status, int) else 1)


def main() -> None:
    """Import, fork, and run in the forks."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    given = {*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))}
    base = [path for path in sys.path if path not in given]
    for name in AHEAD:
        with suppress(ImportError):
            import_module(name)
    task = fork_for(connection)
    if task is not None:
        become(task, base)
        run(task)


if __name__ == "__main__":
    main()
