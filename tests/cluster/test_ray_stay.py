"""``specmamba deploy`` in a cluster where Ray Serve runs already: its address, what fails there, and what stays."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from specmamba.cluster.deploy_command import NAME
from specmamba.config import EngineConfig
from specmamba.engine.engine import Engine
from tests.cluster.test_ray_serve import (
    END_TIMEOUT_S,
    START_TIMEOUT_S,
    body_of,
    descendants,
    environment_of,
    expected_of,
)
from tests.fake_engine import streamed
from tests.processes import unassigned_port
from tests.replicas.test_replicated_engine import FLAGS, is_alive

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed (specmamba[scale])"),
]

HEAD = """
import sys, ray
from ray import serve
ray.init(namespace="serve", include_dashboard=False)
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
print("it runs", flush=True)
sys.stdin.read()
"""


@dataclass
class Head:
    """A cluster with Ray Serve and no application."""

    port: int
    folder: Path
    environment: dict[str, str]

    def deploy(self, *options: str, **said: Any) -> subprocess.CompletedProcess[str]:
        """Run the command with a file that names another address, to its end."""
        file = self.folder / "it.yaml"
        resources = {"replica_cpus": 1, "ingress_cpus": 0}
        http = {"port": unassigned_port()}
        whole = {"name": "it", "ray_address": "auto", "http": http, "resources": resources, **said}
        file.write_text(json.dumps(whole))  # which is YAML too
        command = [sys.executable, "-m", "specmamba", "deploy", str(file), *options]
        return subprocess.run(
            command,
            check=False,
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
        )


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    port = unassigned_port()
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:  # of a short name: Ray's sockets lie below it
        environment = environment_of(folder)
        command = [sys.executable, "-c", HEAD, str(port)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with (
            Path(folder, "log").open("wb") as log,
            subprocess.Popen(command, env=environment, cwd=folder, stderr=log, text=True, **pipes) as process,
        ):
            try:
                assert process.stdout is not None
                assert "it runs\n" in iter(process.stdout.readline, "")  # behind what Ray prints
                yield Head(port, Path(folder), environment)
            finally:
                for pid in [*descendants(process.pid), process.pid]:
                    if is_alive(pid):
                        os.kill(pid, signal.SIGKILL)
                process.wait(END_TIMEOUT_S)


def test_a_deployment_that_fails_is_told_and_deleted(head: Head) -> None:
    done = head.deploy("--stay", model="/nowhere")
    assert done.returncode == 1
    said = done.stderr[done.stderr.index("it has failed: ") :]
    assert "Failed to update the deployments" in said
    assert "'/nowhere' is neither a folder nor a hub id" in said
    assert "ready at" not in done.stdout
    assert httpx.get(f"http://127.0.0.1:{head.port}/ready").status_code == 404


def test_one_that_takes_too_long_is_given_up(head: Head) -> None:
    """Ray waits for room without end."""
    done = head.deploy("--timeout=3", resources={"ingress_cpus": 64}, flags={"shutdown_timeout": 1})
    assert done.returncode == 1
    assert "it was not ready for 3 s (--timeout)" in done.stderr
    assert httpx.get(f"http://127.0.0.1:{head.port}/ready").status_code == 404


def test_what_stays_is_reached_where_ray_serve_listens(head: Head) -> None:
    done = head.deploy("--stay", name=NAME, flags=FLAGS)
    assert done.returncode == 0
    assert f"specmamba: ready at http://127.0.0.1:{head.port} (application: {NAME})" in done.stdout
    assert f"already, and listens at http://127.0.0.1:{head.port}: http has no effect" in done.stderr
    with httpx.Client(base_url=f"http://127.0.0.1:{head.port}", timeout=120) as http:
        expected = expected_of(Engine(EngineConfig(**FLAGS)), 48)[0]
        assert streamed(http, body_of(0)) == expected
        other = subprocess.run(
            [sys.executable, "-m", "specmamba", "serve", "--replicas=1", f"--port={unassigned_port()}"],
            check=False,
            env={**head.environment, "RAY_ADDRESS": "auto"},
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
        )
        assert other.returncode == 2
        assert f"the cluster auto runs an application {NAME} already: end that one first" in other.stderr
        assert streamed(http, body_of(0)) == expected


def test_an_address_that_is_taken_is_an_error() -> None:
    """Of a cluster of its own, which ends with it."""
    with tempfile.TemporaryDirectory(prefix="ray-") as folder, socket.create_server(("127.0.0.1", 0)) as taken:
        environment, port = environment_of(folder), int(taken.getsockname()[1])
        environment.pop("RAY_ADDRESS", None)
        done = Head(port, Path(folder), environment).deploy(ray_address=None, http={"port": port})
    assert done.returncode == 2
    assert f"http: Ray Serve does not start at http://127.0.0.1:{port}: RuntimeError: Failed to bind" in done.stderr
