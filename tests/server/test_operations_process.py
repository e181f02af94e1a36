"""``specmamba serve`` as a process: its log, also where it cannot be written, and an end in time whatever hangs."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.fake_engine import wait_until
from tests.server.test_server_process import FAKE, ROOT, Completion, num_running, process

KILLED = """
import ctypes, signal, sys, threading
from specmamba.server_config import ServerConfig
from specmamba.server.serve import run_server
from tests.fake_engine import FakeEngine
config = ServerConfig(port=0, log_format="json")
engines = []

def build():
    engines.append((FakeEngine(config, step_s=0.2, chunk=1), threading.get_ident()))
    return engines[0][0]

def kill(*_):
    identity = ctypes.c_ulong(engines[0][1])
    ctypes.pythonapi.PyThreadState_SetAsyncExc(identity, ctypes.py_object(SystemExit))

signal.signal(signal.SIGUSR1, kill)
sys.exit(run_server(config, build))
"""


def test_a_killed_engine_thread_ends_the_process_and_every_line_is_json() -> None:
    with process("-c", KILLED) as server:
        assert Completion(server.url, max_tokens=2).result().status_code == 200
        stream, whole = Completion(server.url, stream=True), Completion(server.url)
        wait_until(lambda: num_running(server.url) == 2)
        server.process.send_signal(signal.SIGUSR1)
        assert stream.result().text.endswith('"code":"engine_error"}}\n\ndata: [DONE]\n\n')
        assert whole.result().status_code == 500
        status, err = server.end()
    lines = [json.loads(line) for line in err.splitlines()]
    assert status == 1
    assert [line["finish_reason"] for line in lines if line["message"] == "request"] == ["length", "error", "error"]
    assert [line["message"] for line in lines if line["level"] in ("critical", "error")] == ["the engine failed"] * 2
    assert any("SystemExit" in line.get("exception", "") for line in lines)


@pytest.mark.slow
def test_a_log_that_is_not_read_stops_nothing() -> None:
    """Standard error is a full pipe, standard output a full disk: requests and the shutdown work."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    script = FAKE.replace("port=0", f"port={port}").format(settings={}, script={})
    receiver, sender = os.pipe()
    fcntl.fcntl(sender, fcntl.F_SETPIPE_SZ, 4096)
    with open("/dev/full", "wb") as full:
        running = subprocess.Popen(
            [sys.executable, "-c", script],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=full,
            stderr=sender,
        )
    os.close(sender)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            wait_until(lambda: is_up(http), timeout_s=120)
            for _ in range(60):
                assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
            assert "specmamba_log_lines_dropped_total 0.0" in http.get("/metrics").text  # they wait in the queue
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 0
    finally:
        running.kill()
        running.wait()
        os.close(receiver)


def is_up(http: httpx.Client) -> bool:
    try:
        return http.get("/health").status_code == 200
    except httpx.ConnectError:
        return False


HUNG_THREAD = """
import sys, threading
from specmamba.server import serve, shutdown_watch
from specmamba.server_config import ServerConfig
from tests.fake_engine import FakeEngine, FakeTokenizer
FakeTokenizer.encode = lambda *_, **__: threading.Event().wait()
shutdown_watch._END_S, serve._GRACEFUL_TIMEOUT_S = 0.2, 1
config = ServerConfig(port=0)
sys.exit(serve.run_server(config, lambda: FakeEngine(config)))
"""


@pytest.mark.slow
def test_a_thread_that_hangs_does_not_keep_the_process() -> None:
    with process("-c", HUNG_THREAD) as server:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/tokenize", json={"prompt": "x" * 5000}, timeout=0.3)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        status, err = server.end()
        assert status == 0, err
        assert time.monotonic() - began < 25  # --shutdown-timeout is 30 s
        assert "the shutdown takes too long" not in err


HUNG_PROCESS = """
import sys, time
from specmamba.server import shutdown_watch
shutdown_watch.MARGIN_S, shutdown_watch._SECOND_S = {margin}, {second}
watch = shutdown_watch.ShutdownWatch(0.1)
watch.start()
import signal
signal.signal(signal.SIGTERM, lambda *_: None)
print("ready", flush=True)
while True:
    time.sleep(1)
"""


@pytest.mark.parametrize(("margin", "second", "num_signals"), [(0.2, 60, 1), (60, 0.2, 2)])
def test_a_process_that_hangs_ends_in_time(margin: float, second: float, num_signals: int) -> None:
    command = [sys.executable, "-c", HUNG_PROCESS.format(margin=margin, second=second)]
    with subprocess.Popen(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True
    ) as hung:
        try:
            assert hung.stdout is not None
            assert hung.stdout.readline() == "ready\n"
            for _ in range(num_signals):
                hung.send_signal(signal.SIGTERM)
                time.sleep(0.1)
            assert hung.wait(50) == 1  # the other time is 60 s
        finally:
            hung.kill()


HUNG_STEP = """
import time
from pathlib import Path
from specmamba.server import serve, shutdown_watch
from tests.fake_engine import FakeEngine
serve._HANG_TIMEOUT_S -= 8; shutdown_watch.MARGIN_S -= 8
FakeEngine.step = lambda _: (Path({begun!r}).touch(), time.sleep(120))
"""


@pytest.mark.slow
def test_a_step_that_hangs_ends_the_process_within_the_margin(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    script = f"{HUNG_STEP}{FAKE}".format(begun=str(begun), settings={"shutdown_timeout": 0.5}, script={})
    with process("-c", script) as server:
        running = Completion(server.url)
        wait_until(begun.exists)  # it is in the step
        server.process.send_signal(signal.SIGTERM)
        assert running.result().status_code == 500
        status, err = server.end()
        assert status == 1
        assert "the engine hangs" in err
        assert "the shutdown takes too long" not in err  # which the end of the margin would say
