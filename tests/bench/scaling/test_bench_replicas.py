"""The benchmark of replicas: its figures from made-up rounds, what it declares for Ray, and a tiny run."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from specmamba.bench import replicas as replicas_bench
from specmamba.bench.ingress_cost import loop_seconds, processor_seconds
from specmamba.bench.ray_deployment import declared
from specmamba.bench.replicas import BY_PREFIX, IN_TURN, ON_RAY, ONE, ReplicasBenchConfig
from specmamba.cluster.deployment_file import read_deployment
from specmamba.config import EngineConfig
from tests.cluster.test_ray_serve import environment_of
from tests.fake_engine import wait_until

pytestmark = pytest.mark.usefixtures("forked_processes")

TINY = ["--clients=1", "--turns=2", "--rounds=1", "--max-tokens=8", "--beginning=200", "--context-length=512"]
TINY += ["--max-total-tokens=2048", "--max-running-requests=2", "--dtype=float32", "--num-threads=1"]


def played(seconds: float, token_ms: float) -> dict[str, float]:
    first = {"resumed": 0.5, "first_token_s": seconds, "tokens_per_second": 100 / seconds}
    return {**first, "gap_alone_ms": 2 * token_ms, "token_alone_ms": token_ms}


def test_differences_are_to_one_server_in_the_same_round(capsys: pytest.CaptureFixture[str]) -> None:
    one = [played(1.0, 1.0), played(2.0, 2.0), played(4.0, 1.0)]
    other = [played(2.0, 1.25), played(2.0, 2.5), played(2.0, 1.25)]
    figures = replicas_bench._medians(other, one)
    assert figures["more_per_token_us"] == {"median": 250.0, "range": [250.0, 500.0]}
    assert figures["token_alone_ms_over_one_server"] == {"median": 1.25, "range": [1.25, 1.25]}
    assert figures["tokens_per_second_over_one_server"] == {"median": 1.0, "range": [0.5, 2.0]}
    report: dict[str, Any] = {"model": "m", "dtype": "d", "machine": "it", "clients": 1, "turns": 2, "dp_size": 2}
    ways = {ONE: replicas_bench._medians(one, one), ON_RAY: figures}
    spent = [
        {ONE: {"gap_us": 900.0 + more}, ON_RAY: {"gap_us": 930.0, "token_us": 40.0 + more}} for more in (0, 10, 90)
    ]
    passing_on = {way: replicas_bench._passing_on(way, spent) for way in (ONE, ON_RAY)}
    assert passing_on[ON_RAY]["more_gap_us"] == {"median": 20.0, "range": [-60.0, 30.0]}
    assert passing_on[ON_RAY]["token_us"] == {"median": 50.0, "range": [40.0, 130.0]}
    replicas_bench.print_report(report | {"ways": ways, "passing_on": passing_on})
    out = capsys.readouterr().out
    assert "50 (40-130)" in out
    assert "250 (250-500)" in out
    assert ON_RAY in out


def test_what_is_declared_for_ray_is_a_deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, file = tmp_path / "key", tmp_path / "it.yaml"
    key.write_text("the-operator")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "it").mkdir()
    engine = EngineConfig(model="./it", dtype="bfloat16", speculative_algorithm="none", tp_size=2)
    file.write_text(json.dumps(declared(engine, 2, key)))
    config = read_deployment(file).config()
    assert (config.model, config.dtype, config.speculative_algorithm) == (str(tmp_path / "it"), "bfloat16", "none")
    assert (config.dp_size, config.tp_size, config.stream_chunk_interval) == (2, 2, 0.0)
    assert config.disable_log_requests
    assert config.admin_key is not None
    assert config.replica_cpus > 0


def run(tmp_path: Path, *flags: str) -> dict[str, Any]:
    file = tmp_path / "report.json"
    assert replicas_bench.main([*TINY, *flags, "--json", str(file)]) == 0
    report: dict[str, Any] = json.loads(file.read_text())
    return report


def check_passing_on(report: dict[str, Any], way: str) -> None:
    assert 0 < report["passing_on"][way]["request_us"]["median"] < 1e6
    assert 0 < report["passing_on"][way]["loaded_token_us"]["median"] < 1e6


def test_processor_time_is_that_of_the_processes_which_are_named() -> None:
    with subprocess.Popen([sys.executable, "-c", "for _ in range(3_000_000): pass\ninput()"], stdin=-1) as other:
        before = [processor_seconds(each) for each in ([], [os.getpid()])]
        wait_until(lambda: processor_seconds([other.pid]) > 0.02, 60)
        assert before[0] == 0 < before[1] <= processor_seconds([os.getpid()])
        both = processor_seconds([other.pid, os.getpid()])
        assert both > processor_seconds([other.pid]) >= loop_seconds(other.pid) > 0.02
        other.kill()


@pytest.mark.slow
@pytest.mark.long
def test_a_tiny_run(tmp_path: Path) -> None:
    report = run(tmp_path)
    assert list(report["ways"]) == [ONE, BY_PREFIX, IN_TURN]
    assert not ReplicasBenchConfig().ray
    for figures in report["ways"].values():
        assert figures["token_alone_ms"]["median"] > 0
        assert 0 <= figures["resumed"]["median"] < 1
    assert report["ways"][ONE]["more_per_token_us"]["median"] == 0
    assert report["ways"][BY_PREFIX]["resumed"] == report["ways"][ONE]["resumed"]
    check_passing_on(report, BY_PREFIX)
    spent = report["passing_on"]
    assert 0 < spent[BY_PREFIX]["loop_request_us"]["median"] < spent[BY_PREFIX]["request_us"]["median"]
    assert 0 < spent[ONE]["loop_request_us"]["median"] < 1e6
    assert "token_us" not in report["passing_on"][ONE]  # its process computes the tokens too


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed (specmamba[scale])")
def test_a_tiny_run_with_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:  # of a short name: Ray's sockets lie below it
        for name, value in environment_of(folder).items():
            monkeypatch.setenv(name, value)
        report = run(tmp_path, "--ray")
    ways = report["ways"]
    assert list(ways) == [ONE, BY_PREFIX, IN_TURN, ON_RAY]
    assert ways[ON_RAY]["resumed"] == ways[BY_PREFIX]["resumed"]
    check_passing_on(report, ON_RAY)
