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
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from specmamba.config import EngineConfig
from specmamba.engine.engine import Engine
from tests.cluster.test_ray_serve import (
    END_TIMEOUT_S,
    OPERATOR,
    SERVER,
    START_TIMEOUT_S,
    Cluster,
    body_of,
    descendants,
    environment_of,
    expected_of,
    wait_for_start,
)
from tests.fake_engine import streamed, wait_until
from tests.processes import unassigned_port
from tests.replicas.test_replicated_engine import is_alive
from tests.replicas.test_scaling import EXACT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed (specmamba[scale])"),
]


@pytest.fixture(scope="module")
def deployed() -> Iterator[Cluster]:
    port = unassigned_port()
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:  # of a short name: Ray's sockets lie below it
        file, log, key = Path(folder, "it.yaml"), Path(folder, "log"), Path(folder, "operator")
        key.write_text("the-operator")
        scaling = {"max_replicas": 3, "target_queued_tokens": 60, "upscale_delay_s": 0.5, "downscale_delay_s": 2.0}
        said = {
            "name": "it",
            "http": {"port": port},
            "autoscaling": scaling,
            "resources": {"replica_cpus": 1, "ingress_cpus": 0},
            "admin_key_file": str(key),
            "flags": EXACT,
        }
        file.write_text(json.dumps(said))  # which is YAML too
        environment = environment_of(folder, num_cpus=3)
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


@pytest.fixture(scope="module")
def expected() -> list[tuple[str, list[int]]]:
    return expected_of(Engine(EngineConfig(**EXACT)), 300)


@contextmanager
def under_load(served: Cluster, expected: list[tuple[str, list[int]]], num_clients: int) -> Iterator[None]:
    """Clients that ask again and again, and whose answers are right; all have one more when the block ends."""
    is_over = threading.Event()

    def go_on(number: int) -> int:
        for count in range(1, 1000):
            is_last = is_over.is_set()
            assert streamed(served.http, body_of(number, max_tokens=300)) == expected[number]
            if is_last:
                return count
        raise AssertionError("there is no end")

    with ThreadPoolExecutor(num_clients) as clients:
        asking = [clients.submit(go_on, number % 4) for number in range(num_clients)]
        try:
            yield
        finally:
            is_over.set()
        assert all(future.result() for future in asking)


def test_from_one_to_three_and_back_without_a_failed_request(
    deployed: Cluster, expected: list[tuple[str, list[int]]]
) -> None:
    assert states_of(deployed) == ["ready", "off", "off"]
    wait_until(lambda: "specmamba: ready at http://127.0.0.1" in deployed.log.read_text(), timeout_s=60)
    with under_load(deployed, expected, 8):
        wait_until(lambda: states_of(deployed) == ["ready"] * 3, timeout_s=START_TIMEOUT_S)
    wait_until(lambda: sorted(states_of(deployed)) == ["off", "off", "ready"], timeout_s=END_TIMEOUT_S)
    wait_until(lambda: len(deployed.processes()) == 1, timeout_s=END_TIMEOUT_S)
    metrics = deployed.http.get("/metrics").text
    for direction in ("up", "down"):
        assert f'specmamba_replica_scalings_total{{direction="{direction}"}} 2.0' in metrics
    assert 'specmamba_requests_total{finish_reason="error"} 0.0' in metrics


def test_one_is_drained_in_mid_stream(deployed: Cluster, expected: list[tuple[str, list[int]]]) -> None:
    """Its requests go on at another one; what an operator has taken out of service stays out."""
    with under_load(deployed, expected, 4):
        wait_until(lambda: states_of(deployed).count("ready") >= 2, timeout_s=START_TIMEOUT_S)
        drained = states_of(deployed).index("ready")
        answer = deployed.http.post(f"/replicas/{drained}/drain?timeout=0", headers=OPERATOR)
        assert answer.raise_for_status().json()["state"] in ("ending", "off")
    wait_until(lambda: states_of(deployed)[drained] == "off", timeout_s=END_TIMEOUT_S)
    wait_until(lambda: states_of(deployed).count("ready") == 1, timeout_s=END_TIMEOUT_S)
    assert deployed.http.post(f"/replicas/{drained}/resume", headers=OPERATOR).json()["held"] is False
    wait_until(lambda: sorted(states_of(deployed)) == ["off", "off", "ready"], timeout_s=START_TIMEOUT_S)


def test_what_is_unhealthy_is_told(deployed: Cluster) -> None:
    """Ray starts another server, with its replicas, and the command goes on."""
    (server,) = deployed.processes(SERVER)
    os.kill(server, signal.SIGKILL)
    wait_until(lambda: "it is unhealthy: The deployments ['specmamba']" in deployed.log.read_text(), timeout_s=60)
    wait_until(lambda: "it is ready again" in deployed.log.read_text(), timeout_s=START_TIMEOUT_S)
    wait_for_start(deployed)
    assert deployed.process.poll() is None


def test_a_signal_ends_all(deployed: Cluster) -> None:
    every = descendants(deployed.process.pid)
    deployed.process.send_signal(signal.SIGTERM)
    assert deployed.process.wait(END_TIMEOUT_S) == 0
    wait_until(lambda: not any(map(is_alive, every)), timeout_s=END_TIMEOUT_S)
