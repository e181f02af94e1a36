"""The log of ``specmamba serve --log-format json``, and its exit status when the engine thread is killed."""

from __future__ import annotations

import json
import signal

from tests.fake_engine import wait_until
from tests.server.test_server_process import Completion, num_running, process

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
