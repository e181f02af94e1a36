"""``specmamba serve`` as a process: its log, also where it cannot be written, and an end in time whatever hangs."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys

import httpx

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
    engines.append((FakeEngine(config, step_s=0.02, chunk=1), threading.get_ident()))
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
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10) as http:
            wait_until(lambda: is_up(http), timeout_s=30)
            for _ in range(60):
                assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
            assert "specmamba_log_lines_dropped_total 0.0" in http.get("/metrics").text  # they wait in the queue
        running.send_signal(signal.SIGTERM)
        assert running.wait(20) == 0
    finally:
        running.kill()
        running.wait()
        os.close(receiver)


def is_up(http: httpx.Client) -> bool:
    try:
        return http.get("/health").status_code == 200
    except httpx.ConnectError:
        return False
