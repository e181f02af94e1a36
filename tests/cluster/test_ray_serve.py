"""``serve run`` with a file, as docs/scaling.md says: a real Ray, two replicas, one of which is killed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from specmamba.config import EngineConfig
from specmamba.engine.engine import Engine
from tests.fake_engine import streamed, wait_until
from tests.processes import unassigned_port
from tests.replicas.test_replicated_engine import FLAGS, add, finish, is_alive, outputs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed (specmamba[scale])"),
]

START_TIMEOUT_S, END_TIMEOUT_S = 400.0, 120.0
OPERATOR = {"Authorization": "Bearer the-operator"}
ACTOR, SERVER = "ray::EngineActor", "ray::ServeReplica"  # as Ray names the processes
DELETE = """
import ray
from ray import serve
ray.init("auto", namespace="serve")  # RAY_TMPDIR says which
input("connected\\n")
serve.delete("it")
"""


@dataclass
class Cluster:
    process: subprocess.Popen[bytes]
    http: httpx.Client
    log: Path
    environment: dict[str, str]

    def processes(self, name: str = ACTOR) -> list[int]:
        """The processes of a name that descend from this Ray: the replicas'."""
        return [pid for pid in descendants(self.process.pid) if command_of(pid).startswith(name)]

    def info(self) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get("/server_info", headers=OPERATOR).raise_for_status().json()
        return found


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text("utf8", "replace").replace("\0", " ")
    except OSError:
        return ""


def descendants(root: int) -> list[int]:
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int(
                (folder / "stat").read_text("utf8", "replace").rpartition(")")[2].split()[1]
            )
        except OSError:
            continue
    found = [root]
    for parent in found:
        found += [pid for pid, above in parents.items() if above == parent]
    return found[1:]


def environment_of(folder: str, num_cpus: int = 2) -> dict[str, str]:
    """The environment of a Ray with so many CPUs that keeps its files in a folder."""
    return {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "RAY_TMPDIR": folder,
        "RAY_AUTH_MODE": "disabled",  # else Ray writes a token into the home folder
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_OVERRIDE_RESOURCES": json.dumps({"CPU": num_cpus}),
    }


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    port = unassigned_port()
    arguments = {**FLAGS, "dp_size": 2, "admin_key": "the-operator", "replica_cpus": 1, "ingress_cpus": 0}
    application = {"name": "it", "route_prefix": "/", "import_path": "specmamba.cluster:app", "args": arguments}
    options = {"http_options": {"host": "127.0.0.1", "port": port}, "applications": [application]}
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:  # of a short name: Ray's sockets lie below it
        file, log = Path(folder, "serve.yaml"), Path(folder, "log")
        file.write_text(json.dumps(options))  # which is YAML too
        environment = environment_of(folder)
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "ray.serve.scripts", "run", str(file)],
                env=environment,
                cwd=folder,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as http:
            served = Cluster(process, http, log, environment)
            every = []
            try:
                wait_for_start(served)
                yield served
                every = descendants(process.pid)
                process.send_signal(signal.SIGINT)
                process.wait(END_TIMEOUT_S)
                wait_until(lambda: not any(map(is_alive, every)), timeout_s=END_TIMEOUT_S)
            finally:
                for pid in [*descendants(process.pid), process.pid, *every]:
                    if is_alive(pid):
                        os.kill(pid, signal.SIGKILL)
                process.wait()


def wait_for_start(served: Cluster) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and served.process.poll() is None:
        try:
            if served.http.get("/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    pytest.fail(f"it does not start:\n{served.log.read_text('utf8', 'replace')[-4000:]}")


@pytest.fixture(scope="module")
def plain() -> Engine:
    return Engine(EngineConfig(**FLAGS))


@pytest.fixture
def both(cluster: Cluster) -> Cluster:
    wait_until(lambda: len(cluster.processes()) == 2, timeout_s=START_TIMEOUT_S)

    def are_ready() -> bool:
        time.sleep(0.2)
        cluster.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})  # takes in one that has come back
        return bool(cluster.info()["stats"]["kv_total_tokens"] == 2 * 8192)

    wait_until(are_ready, timeout_s=START_TIMEOUT_S)
    cluster.http.post("/flush_cache", headers=OPERATOR).raise_for_status()
    return cluster


def body_of(number: int, **changes: Any) -> dict[str, Any]:
    prompt = f"def task_{number}(values):\n    # sorts the values and returns them\n    "
    sampled = {"temperature": 0.8, "seed": 7} if number % 2 else {"temperature": 0.0}
    return {"prompt": prompt, "max_tokens": 48, "ignore_eos": True, **sampled, **changes}


def expected_of(plain: Engine, max_tokens: int) -> list[tuple[str, list[int]]]:
    """The texts and tokens of one engine, for ``body_of`` 0 to 3."""
    for number in range(4):
        sampled: dict[str, Any] = {"temperature": 0.8, "seed": 7} if number % 2 else {}
        add(plain, number, max_tokens=max_tokens, **sampled)
    return [(text, list(tokens)) for tokens, text, _ in outputs(finish(plain)).values()]


def test_texts_are_those_of_one_engine(plain: Engine, both: Cluster) -> None:
    with ThreadPoolExecutor(4) as clients:
        found = list(clients.map(lambda number: streamed(both.http, body_of(number)), range(4)))
    assert found == expected_of(plain, 48)


def test_a_replica_that_is_killed_in_mid_stream_changes_no_text(plain: Engine, both: Cluster) -> None:
    """Requests run on both replicas, so that some of them move."""
    actors = both.processes()

    def kill() -> None:
        os.kill(actors[0], signal.SIGKILL)

    with ThreadPoolExecutor(4) as clients:
        running = [
            clients.submit(streamed, both.http, body_of(number, max_tokens=400), None if number else kill)
            for number in range(4)
        ]
        found = [future.result() for future in running]
    assert found == expected_of(plain, 400)
    lost = re.compile(rf"\(process {actors[0]}, start \d+\) is lost")
    wait_until(lambda: lost.search(both.log.read_text("utf8", "replace")), timeout_s=60)
    wait_until(lambda: len(both.processes()) == 2, timeout_s=START_TIMEOUT_S)
    assert actors[0] not in both.processes()


def test_a_text_goes_where_its_beginning_is(both: Cluster) -> None:
    long = " a sentence that is long enough to be worth going back to." * 12

    def cached(prompt: str) -> int:
        answer = both.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 24, "temperature": 0})
        usage: dict[str, Any] = answer.raise_for_status().json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    with ThreadPoolExecutor(2) as clients:
        assert list(clients.map(cached, [f"{number}{long}" for number in range(2)])) == [0, 0]
    trees = both.http.get("/cache?format=text", headers=OPERATOR).text
    assert min(len(part.splitlines()) for part in trees.split("replica ")[1:]) > 2  # one text on each
    for number in (1, 0, 1):
        assert cached(f"{number}{long} And more {number}") > 100


def test_a_hot_prefix_does_not_starve_the_other_replica(both: Cluster) -> None:
    """No request waits at the replica with the prefix while the other one could run it."""
    hot = "a prompt of a system that all requests have in front, and that one replica has computed. " * 6

    def ask(tail: str) -> int:
        answer = both.http.post("/v1/completions", json={"prompt": hot + tail, "max_tokens": 800, "ignore_eos": True})
        usage: dict[str, Any] = answer.raise_for_status().json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    def running() -> list[int]:
        time.sleep(0.1)
        found = both.http.get("/replicas", headers=OPERATOR).raise_for_status().json()["replicas"]
        return [each["num_requests"] for each in found]

    assert ask("first") == 0
    with ThreadPoolExecutor(12) as clients:
        asking = [clients.submit(ask, str(number)) for number in range(12)]
        wait_until(lambda: min(running()) >= FLAGS["max_running_requests"], timeout_s=60)
        cached = [future.result() for future in asking]
    assert len([number for number in cached if number > 60]) >= 6  # most went where it was


def test_the_rest_of_the_server_is_there(both: Cluster) -> None:
    assert both.info()["engine"]["dp_size"] == 2
    chat = {"messages": [{"role": "user", "content": "Sort a list."}], "max_tokens": 8}
    assert (
        both.http.post("/v1/chat/completions", json=chat).raise_for_status().json()["usage"]["completion_tokens"] == 8
    )
    assert "<html" in both.http.get("/").text
    assert "specmamba_kv_total_tokens" in both.http.get("/metrics").text
    assert both.http.post("/tokenize", json={"prompt": "a b"}).raise_for_status().json()["tokens"]
    assert both.http.post("/flush_cache").status_code == 403  # no operator, though it comes from this machine
    refused = both.http.post("/cache/save", headers=OPERATOR)
    assert refused.json()["error"]["code"] == "several_replicas"
    assert both.http.get("/health", headers={"Host": "evil.example"}).status_code == 421


def test_a_client_that_leaves_ends_its_request(both: Cluster) -> None:
    with both.http.stream("POST", "/v1/completions", json=body_of(0, max_tokens=900, stream=True)) as answer:
        lines = answer.iter_lines()  # whose end would close the connection
        next(lines)
        wait_until(lambda: both.info()["stats"]["num_running"] == 1, timeout_s=60)
    wait_until(lambda: both.info()["stats"]["num_running"] == 0, timeout_s=60)
    assert 'specmamba_requests_total{finish_reason="abort"} 1.0' in both.http.get("/metrics").text


def test_a_server_that_is_lost_comes_back_with_its_replicas(plain: Engine, both: Cluster) -> None:
    (server,), replicas = both.processes(SERVER), both.processes()
    os.kill(server, signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, [server, *replicas])), timeout_s=START_TIMEOUT_S)
    wait_for_start(both)
    with ThreadPoolExecutor(4) as clients:
        found = list(clients.map(lambda number: streamed(both.http, body_of(number)), range(4)))
    assert found == expected_of(plain, 48)


def test_an_application_that_is_deleted_finishes_its_streams(plain: Engine, both: Cluster) -> None:
    """The last test: nothing is served after it."""
    command = [sys.executable, "-c", DELETE]
    replicas = both.processes()
    with subprocess.Popen(
        command, env=both.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as deleting:
        commands, said = deleting.stdin, deleting.stdout
        assert commands is not None
        assert said is not None
        assert "connected\n" in iter(said.readline, "")  # behind what Ray prints

        def delete() -> None:
            commands.write("\n")
            commands.flush()

        with ThreadPoolExecutor(4) as clients:
            running = [
                clients.submit(streamed, both.http, body_of(number, max_tokens=900), None if number else delete)
                for number in range(4)
            ]
            found = [future.result() for future in running]
        assert deleting.wait(END_TIMEOUT_S) == 0
    assert found == expected_of(plain, 900)
    wait_until(lambda: not any(map(is_alive, replicas)), timeout_s=END_TIMEOUT_S)
    assert both.http.post("/v1/completions", json={"prompt": "a"}).status_code == 404
