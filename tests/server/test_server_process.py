"""``specmamba serve`` as a process: its start, its end, and its output."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from specmamba.server.listener import listen
from tests.fake_engine import wait_until

ROOT = Path(__file__).parents[2]
FAKE = """
import sys
from specmamba.server_config import ServerConfig
from specmamba.server.serve import run_server
from tests.fake_engine import FakeEngine
config = ServerConfig(port=0, **{settings!r})
sys.exit(run_server(config, lambda: FakeEngine(config, **{script!r})))
"""


class Server:
    """A server process that has printed its ready line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        self.ready_line = process.stdout.readline()
        assert self.ready_line.startswith("specmamba: ready at http://"), self.ready_line + self.end()[1]
        self.url = self.ready_line.split()[3]

    def end(self, timeout_s: float = 60.0) -> tuple[int, str]:
        """Exit status and the text on standard error; standard output must hold nothing more."""
        out, err = self.process.communicate(timeout=timeout_s)
        assert out == ""
        return self.process.returncode, err


@contextmanager
def process(*arguments: str) -> Iterator[Server]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, *arguments]
    running = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield Server(running)
    finally:
        running.kill()
        running.communicate()


@contextmanager
def fake_process(script: dict[str, Any], **settings: Any) -> Iterator[Server]:
    with process("-c", FAKE.format(settings=settings, script=script)) as server:
        yield server


class Completion(threading.Thread):
    """A completion that runs while the test does something else."""

    def __init__(self, url: str, **body: object) -> None:
        super().__init__()
        self.url, self.body = url, {"prompt": "x", "max_tokens": 60, **body}
        self.answer: httpx.Response | None = None
        self.start()

    def run(self) -> None:
        self.answer = httpx.post(f"{self.url}/v1/completions", json=self.body, timeout=120)

    def result(self) -> httpx.Response:
        self.join(120)
        assert self.answer is not None, "the connection broke"
        return self.answer


def num_running(url: str) -> int:
    return int(httpx.get(f"{url}/server_info").json()["stats"]["num_running"])


def test_the_demo_served_through_the_openai_client() -> None:
    arguments = ["--port", "0", "--dtype", "float32", "--context-length", "512", "--num-threads", "1"]
    with process("-m", "specmamba", "serve", *arguments) as server:
        with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            body: dict[str, Any] = {
                "model": "specmamba-demo",
                "prompt": "def main():",
                "max_tokens": 12,
                "temperature": 0,
            }
            text = client.completions.create(**body).choices[0].text
            assert text
            streamed = client.completions.create(**body, stream=True)
            assert "".join(chunk.choices[0].text for chunk in streamed) == text
            chat = client.chat.completions.create(
                model="specmamba-demo",
                messages=[{"role": "user", "content": "def main():"}],
                max_tokens=12,
                temperature=0,
            )
            body["prompt"] = "<|im_start|>user\ndef main():<|im_end|>\n<|im_start|>assistant\n<think></think>\n"
            assert chat.choices[0].message.content == client.completions.create(**body).choices[0].text
        server.process.send_signal(signal.SIGTERM)
        status, err = server.end()
        assert status == 0, err
        assert "Traceback" not in err


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_requests_finish(number: signal.Signals, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with fake_process({"step_s": 0.01, "chunk": 1, "gate": str(gate)}) as server:
        running = [Completion(server.url), Completion(server.url, stream=True)]
        wait_until(lambda: num_running(server.url) == 2)
        server.process.send_signal(number)
        wait_until(lambda: httpx.get(f"{server.url}/health").json() == {"status": "draining"})
        refusal = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"})
        assert refusal.status_code == 503
        gate.touch()
        whole, streamed = (completion.result() for completion in running)
        assert whole.json()["usage"]["completion_tokens"] == 60
        assert '"finish_reason":"length"' in streamed.text
        status, err = server.end()
        assert status == 0, err
        assert f"{number.name}: finishing the running requests, for 30 s at the most" in err


def test_the_deadline_of_a_shutdown() -> None:
    with fake_process({"step_s": 0.5, "chunk": 1}, shutdown_timeout=0.3) as server:
        running = Completion(server.url)
        wait_until(lambda: num_running(server.url) == 1)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert running.result().status_code == 503
        assert server.end()[0] == 0
        assert time.monotonic() - began < 20  # of the 30 s that its answer takes


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once() -> None:
    with fake_process({"step_s": 0.5, "chunk": 1}) as server:
        running = Completion(server.url, stream=True)
        wait_until(lambda: num_running(server.url) == 1)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{server.url}/health").json() == {"status": "draining"})
        server.process.send_signal(signal.SIGTERM)
        assert '"error"' in running.result().text
        status, err = server.end()
        assert status == 0, err
        assert time.monotonic() - began < 20  # of the 30 s that its answer takes


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("stream", [False, True])
def test_a_crash_of_the_engine_ends_the_process_with_1(stream: bool) -> None:
    with fake_process({"step_s": 0.02, "fail_at_step": 5}) as server:
        answer = Completion(server.url, stream=stream).result()
        assert answer.status_code == (200 if stream else 500)
        assert "scripted failure" in answer.text
        status, err = server.end()
        assert status == 1
        assert "RuntimeError: scripted failure" in err
        assert err.endswith("specmamba: the engine failed\n")


def test_a_port_in_use_is_reported_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "specmamba", "serve", "--port", str(port), "--model", "/nowhere"]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert (
        ended.stderr
        == f"specmamba serve: error: --host, --port: cannot listen on 127.0.0.1:{port}: Address already in use\n"
    )


@pytest.mark.slow
def test_the_api_key_and_the_name_from_the_environment() -> None:
    with fake_process({}, api_key="secret", served_model_name="mine", host="localhost") as server:
        assert "(model: mine)" in server.ready_line
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        models = httpx.get(f"{server.url}/v1/models", headers={"Authorization": "Bearer secret"})
        assert models.json()["data"][0]["id"] == "mine"


# Its start: a signal, and an address that is taken

AT_IMPORT = """
import os, sys

class Watch:
    def find_spec(self, name, *_):
        if name == {module!r}:
            print("importing", flush=True)
            os.kill(os.getpid(), {number})

sys.meta_path.insert(0, Watch())
sys.argv = ["specmamba", "serve", "--port", "0"]
from specmamba.cli import main
sys.exit(main())
"""
IN_NATIVE_CODE = """
import os, sys, threading
import torch
from specmamba.server_config import ServerConfig
from specmamba.server.serve import run_server

def build():
    threading.Timer(0.2, os.kill, (os.getpid(), {number})).start()
    print("importing", flush=True)
    matrix = torch.ones(300, 300)
    while True:
        matrix = (matrix @ matrix).clamp(0, 1)

sys.exit(run_server(ServerConfig(port=0), build))
"""


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    "module",
    ["specmamba.flags.command_line", "pydantic", "uvicorn", "torch", "transformers", "specmamba.engine.engine"],
)
@pytest.mark.fast_cases("pydantic-Signals.SIGINT", "torch-Signals.SIGTERM", "engine.engine-Signals.SIGTERM")
def test_a_signal_at_any_moment_of_the_start_ends_it_well(module: str, number: signal.Signals) -> None:
    ended = run_python(AT_IMPORT.format(module=module, number=int(number)))
    assert (ended.returncode, ended.stdout) == (0, "importing\n")
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_native_code_loads_the_model(number: signal.Signals) -> None:
    ended = run_python(IN_NATIVE_CODE.format(number=int(number)))
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "importing\n", "")


def test_a_port_that_another_server_waits_at_while_it_loads() -> None:
    """Said before torch is imported."""
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        code = f"import sys\nfrom specmamba.cli import main\ntry: main(['serve', '--port', '{port}'])\n"
        ended = run_python(code + "finally: print('torch' in sys.modules, 'uvicorn' in sys.modules)")
    assert (ended.returncode, ended.stdout) == (2, "False False\n")
    expected = f"specmamba serve: error: --host, --port: cannot listen on 127.0.0.1:{port}: Address already in use\n"
    assert ended.stderr == expected


@pytest.mark.parametrize(("settings", "warns"), [({}, True), ({"api_key": "k"}, False)])
def test_a_server_that_others_reach_without_a_key(settings: dict[str, Any], warns: bool) -> None:
    with fake_process({}, host="0.0.0.0", **settings) as server:
        server.process.send_signal(signal.SIGTERM)
        assert ("--host 0.0.0.0 without --api-key" in server.end()[1]) == warns
