"""SGLang's router, as docs/scaling.md says: in front of two plain servers, and of a prefill and a decode server."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fake_engine import wait_until
from tests.processes import unassigned_port
from tests.server.test_server_process import Server, process
from tests.transfer.sides import KEY

ROUTER = shutil.which("sglang-router")
FLAGS = ["--dtype=float32", "--num-threads=1", "--max-total-tokens=4096", "--context-length=1024", "--port=0"]
FLAGS += ["--disable-log-requests", "--max-running-requests=4", "--speculative-adaptive=off"]
PROMPTS = [f"def task_{i}(values):\n    # sorts the values and returns them\n    " for i in range(6)]
GREEDY = {"model": "specmamba-demo", "max_tokens": 24, "temperature": 0, "ignore_eos": True}  # it wants a model
START_TIMEOUT_S = 200.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(ROUTER is None, reason="there is no sglang-router (pip install sglang-router)"),
]


def serve(stack: ExitStack, *flags: str) -> Server:
    return stack.enter_context(process("-m", "specmamba", "serve", *FLAGS, *flags))


@contextmanager
def router(*flags: str) -> Iterator[httpx.Client]:
    """A router that is ready; its log is shown where it does not get there."""
    assert ROUTER is not None
    port = unassigned_port()
    command = [ROUTER, "launch", "--host=127.0.0.1", f"--port={port}", f"--prometheus-port={unassigned_port()}", *flags]
    with tempfile.TemporaryFile() as log:
        running = subprocess.Popen(command, stdout=log, stderr=log)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as http:
            try:
                wait_for_start(http, running)
                yield http
            except BaseException:
                log.seek(0)
                print(log.read().decode("utf8", "replace")[-4000:])
                raise
            finally:
                running.kill()
                running.wait()


def wait_for_start(http: httpx.Client, running: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and running.poll() is None:
        try:
            if http.post("/v1/completions", json={"prompt": "a", **GREEDY}).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    pytest.fail("the router does not start")


def text_of(http: httpx.Client, prompt: str) -> str:
    text: str = (
        http.post("/v1/completions", json={"prompt": prompt, **GREEDY}).raise_for_status().json()["choices"][0]["text"]
    )
    return text


def streamed_text(http: httpx.Client, prompt: str) -> str:
    body = {"prompt": prompt, **GREEDY, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in event["choices"])


def num_requests(server: Server) -> float:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("specmamba_requests_total{"))


def test_two_plain_servers() -> None:
    """Texts are those of one server, whole and streamed; one that is killed gets no more requests."""
    with ExitStack() as stack:
        one, other = (serve(stack) for _ in range(2))
        direct = stack.enter_context(httpx.Client(base_url=one.url, timeout=60))
        expected = [text_of(direct, prompt) for prompt in PROMPTS]
        before = num_requests(one)
        http = stack.enter_context(router("--policy=round_robin", "--worker-urls", one.url, other.url))
        with ThreadPoolExecutor(3) as clients:
            assert list(clients.map(lambda prompt: text_of(http, prompt), PROMPTS)) == expected
        assert streamed_text(http, PROMPTS[0]) == expected[0]
        chat = {"messages": [{"role": "user", "content": "Sort a list."}], **GREEDY}
        answers = [each.post("/v1/chat/completions", json=chat).raise_for_status().json() for each in (direct, http)]
        assert answers[0]["choices"] == answers[1]["choices"]
        assert num_requests(one) > before
        assert num_requests(other) >= 3
        other.process.kill()
        other.process.wait(20)
        deadline = time.monotonic() + 120
        while any(http.post("/v1/completions", json={"prompt": "a", **GREEDY}).status_code != 200 for _ in range(4)):
            assert time.monotonic() < deadline
        assert [text_of(http, prompt) for prompt in PROMPTS] == expected


def test_a_prefill_and_a_decode_server(tmp_path: Path) -> None:
    """The router names the rooms, and prompts are handed over."""
    key, port = tmp_path / "key", unassigned_port()
    key.write_text(KEY)
    key.chmod(0o600)
    shared = [f"--disaggregation-key-file={key}", f"--disaggregation-bootstrap-port={port}"]
    with ExitStack() as stack:
        prefill, decode = (
            serve(stack, *shared, f"--disaggregation-mode={mode}", "--disaggregation-timeout=60")
            for mode in ("prefill", "decode")
        )
        direct = stack.enter_context(httpx.Client(base_url=prefill.url, timeout=60))
        expected = [text_of(direct, prompt) for prompt in PROMPTS]
        direct.post("/flush_cache").raise_for_status()
        flags = ["--pd-disaggregation", "--prefill", prefill.url, str(port), "--decode", decode.url]
        http = stack.enter_context(router(*flags))
        assert [text_of(http, prompt) for prompt in PROMPTS] == expected
        assert streamed_text(http, PROMPTS[0]) == expected[0]

        def handoffs() -> dict[str, Any]:
            found: dict[str, Any] = httpx.get(f"{decode.url}/server_info").json()["stats"]["handoffs"]
            return found

        wait_until(lambda: handoffs()["num_handoffs"] >= len(PROMPTS))
        assert not any(handoffs()["failures"].values())
