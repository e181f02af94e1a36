"""``specmamba serve --replicas`` with a real Ray: as any server, until a signal ends it with its cluster."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from specmamba.config import EngineConfig
from specmamba.engine.engine import Engine
from tests.cluster.test_ray_serve import (
    END_TIMEOUT_S,
    OPERATOR,
    Cluster,
    body_of,
    descendants,
    environment_of,
    expected_of,
    wait_for_start,
)
from tests.fake_engine import streamed, wait_until
from tests.processes import unassigned_port
from tests.replicas.test_replicated_engine import FLAGS, is_alive

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed (specmamba[scale])"),
]


@pytest.fixture(scope="module")
def served() -> Iterator[Cluster]:
    port = unassigned_port()
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:  # of a short name: Ray's sockets lie below it
        log, keys, operator = (Path(folder, name) for name in ("log", "keys", "operator"))
        keys.write_text("a-client\n")
        operator.write_text("the-operator\n")
        environment = environment_of(folder)
        for name in ("RAY_ADDRESS", "RAY_OVERRIDE_RESOURCES"):  # the CPUs of this machine, however few
            environment.pop(name, None)
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in FLAGS.items()]
        flags += [f"--port={port}", f"--api-key-file={keys}", f"--admin-key-file={operator}"]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "specmamba", "serve", "--replicas", "2", *flags],
                env=environment,
                cwd=folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        client = {"Authorization": "Bearer a-client"}
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, headers=client) as http:
            try:
                cluster = Cluster(process, http, log, environment)
                wait_for_start(cluster)
                yield cluster
            finally:
                for pid in [*descendants(process.pid), process.pid]:
                    if is_alive(pid):
                        os.kill(pid, signal.SIGKILL)
                process.wait()


@pytest.fixture(scope="module")
def plain() -> Engine:
    return Engine(EngineConfig(**FLAGS))


def test_it_is_a_server_with_two_replicas(served: Cluster, plain: Engine) -> None:
    wait_until(lambda: f"specmamba: ready at {served.http.base_url}" in served.log.read_text(), timeout_s=60)
    with ThreadPoolExecutor(4) as clients:
        found = list(clients.map(lambda number: streamed(served.http, body_of(number)), range(4)))
    assert found == expected_of(plain, 48)
    assert len(served.processes()) == 2
    states = served.http.get("/replicas", headers=OPERATOR).raise_for_status().json()["replicas"]
    assert [replica["state"] for replica in states] == ["ready", "ready"]
    assert served.info()["engine"]["dp_size"] == 2


def test_keys_are_asked_for(served: Cluster) -> None:
    for headers, status in (({"Authorization": "Bearer none"}, 401), ({}, 200)):
        assert served.http.post("/v1/completions", json=body_of(0), headers=headers).status_code == status
    assert served.http.get("/replicas").status_code == 403


def test_a_signal_ends_all_behind_the_last_token(served: Cluster, plain: Engine) -> None:
    """The last test: streams that run finish, with status 0 for the command, and nothing stays."""
    every = descendants(served.process.pid)

    def end() -> None:
        served.process.send_signal(signal.SIGTERM)

    with ThreadPoolExecutor(4) as clients:
        running = [
            clients.submit(streamed, served.http, body_of(number, max_tokens=400), None if number else end)
            for number in range(4)
        ]
        found = [future.result() for future in running]
    assert found == expected_of(plain, 400)
    assert served.process.wait(END_TIMEOUT_S) == 0
    wait_until(lambda: not any(map(is_alive, every)), timeout_s=END_TIMEOUT_S)
