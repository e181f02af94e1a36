"""``specmamba deploy`` with a real Ray: replicas that follow the load, one that is drained, and an end that is one."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from specmamba.config import EngineConfig
from specmamba.engine.engine import Engine
from tests.cluster.test_ray_serve import (
    END_TIMEOUT_S,
    OPERATOR,
    START_TIMEOUT_S,
    Cluster,
    body_of,
    descendants,
    environment_of,
    expected_of,
    free_port,
    streamed,
    wait_for_start,
)
from tests.fake_engine import wait_until
from tests.replicas.test_replicated_engine import FLAGS, is_alive

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed (specmamba[scale])"),
]


@pytest.fixture(scope="module")
def deployed() -> Iterator[Cluster]:
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:  # of a short name: Ray's sockets lie below it
        file, log, key = Path(folder, "it.yaml"), Path(folder, "log"), Path(folder, "operator")
        key.write_text("the-operator")
        scaling = {"max_replicas": 2, "target_queued_tokens": 100, "upscale_delay_s": 0.5, "downscale_delay_s": 2.0}
        said = {
            "name": "it",
            "http": {"port": port},
            "autoscaling": scaling,
            "resources": {"replica_cpus": 1, "ingress_cpus": 0},
            "admin_key_file": str(key),
            "flags": FLAGS,
        }
        file.write_text(json.dumps(said))  # which is YAML too
        environment = environment_of(folder)
        environment.pop("RAY_ADDRESS", None)
        command = [sys.executable, "-m", "specmamba", "deploy", str(file)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, env=environment, cwd=folder, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as http:
            every: list[int] = []
            try:
                served = Cluster(process, http, log, environment)
                wait_for_start(served)
                yield served
            finally:
                every = descendants(process.pid)
                for pid in [*every, process.pid]:
                    if is_alive(pid):
                        os.kill(pid, signal.SIGKILL)
                process.wait()


def states_of(served: Cluster) -> list[str]:
    time.sleep(0.2)
    answer = served.http.get("/replicas", headers=OPERATOR).raise_for_status().json()
    return [replica["state"] for replica in answer["replicas"]]


def test_replicas_follow_the_load_and_one_is_drained(deployed: Cluster) -> None:
    expected = expected_of(Engine(EngineConfig(**FLAGS)), 700)
    assert states_of(deployed) == ["ready", "off"]
    wait_until(lambda: "specmamba: ready at http://127.0.0.1" in deployed.log.read_text(), timeout_s=60)
    drained: list[dict[str, Any]] = []

    def ask(number: int) -> tuple[str, int]:
        return streamed(deployed.http, body_of(number, max_tokens=700))

    with ThreadPoolExecutor(5) as clients:
        has_grown = threading.Event()

        def go_on(number: int) -> bool:
            """Ask again and again, so that there is a load for as long as the other replica takes to start."""
            while not has_grown.is_set():
                assert ask(number) == expected[number]
            return True

        asking = [clients.submit(go_on, number) for number in range(4)]
        wait_until(lambda: states_of(deployed) == ["ready", "ready"], timeout_s=START_TIMEOUT_S)
        running = clients.submit(ask, 0)  # beside the others, which still run
        has_grown.set()
        answer = deployed.http.post("/replicas/0/drain?timeout=0", headers=OPERATOR)
        drained.append(answer.raise_for_status().json())
        assert running.result() == expected[0]
        assert all(future.result() for future in asking)  # those that were at the replica have moved
    assert drained[0]["state"] in ("ending", "off")
    wait_until(lambda: states_of(deployed) == ["off", "ready"], timeout_s=END_TIMEOUT_S)
    wait_until(lambda: len(deployed.processes()) == 1, timeout_s=END_TIMEOUT_S)
    assert deployed.http.post("/replicas/0/resume", headers=OPERATOR).json()["held"] is False
    wait_until(lambda: "ready" in states_of(deployed) and len(deployed.processes()) == 1, timeout_s=START_TIMEOUT_S)


def test_a_signal_ends_all(deployed: Cluster) -> None:
    every = descendants(deployed.process.pid)
    deployed.process.send_signal(signal.SIGTERM)
    assert deployed.process.wait(END_TIMEOUT_S) == 0
    wait_until(lambda: not any(map(is_alive, every)), timeout_s=END_TIMEOUT_S)
