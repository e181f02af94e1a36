"""``specmamba serve --replicas``: what its flags come to, and what is said of wrong ones. Nothing is started here."""

from __future__ import annotations

import importlib.util
import os
import pickle
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specmamba.cli import main as run_program
from specmamba.cluster import deploy_command
from specmamba.cluster.application_run import OWN, Wanted
from specmamba.cluster.cluster_config import ANYWHERE, ClusterConfig, config_of_args, of_server
from specmamba.server.observe import logs
from specmamba.server_config import ServerConfig

Started = list[tuple[Wanted, ClusterConfig]]


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SPECMAMBA_REPLICAS", "SPECMAMBA_DP_SIZE", "SPECMAMBA_DP_MAX_SIZE", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    """What would be started on Ray; the command's signals and log are not those of the tests."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    found: Started = []

    def run(wanted: Wanted, config: ClusterConfig) -> int:
        found.append((wanted, config))
        return 0

    monkeypatch.setattr(deploy_command, "require_ray", lambda *_: None)
    monkeypatch.setattr(deploy_command, "run_application", run)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(9)))
    monkeypatch.setattr(logs, "configure_logging", lambda _: None)
    yield found
    for number, handler in before.items():
        signal.signal(number, handler)


def test_flags_are_those_of_a_server(tmp_path: Path, started: Started) -> None:
    """The server in front reserves no CPU of a cluster of its own: its replicas have them all."""
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    keys.chmod(0o600)
    flags = ["--port=0", f"--api-key-file={keys}", "--api-key=three", "--tp-size=2", "--max-num-seqs=8"]
    assert run_program(["serve", "--replicas", "4", *flags]) == 0
    ((wanted, config),) = started
    assert (wanted.prog, wanted.host, wanted.address, wanted.num_cpus) == ("specmamba serve", "127.0.0.1", OWN, 9)
    assert wanted.port > 0
    assert not wanted.stays
    assert (config.first_replicas, config.most_replicas, config.dp_size) == (4, 4, 4)
    assert (config.tp_size, config.max_running_requests, config.host) == (2, 8, ANYWHERE)
    assert (config.replica_cpus, config.ingress_cpus) == (2.0, 0.0)
    assert [key.get_secret_value() for key in config.api_key] == ["three", "one", "two"]


def test_the_configuration_is_that_of_the_application() -> None:
    """But for what says where it comes from; a field that was not given has no value of its own."""
    flags: dict[str, Any] = {"max_running_requests": 8, "admin_key": "key", "dp_max_size": 5}
    config = of_server(ServerConfig(replicas=3, port=80, **flags))
    expected = config_of_args({"dp_size": 3, "replica_cpus": 1, "ingress_cpus": 1, **flags})
    assert config.model_copy(update={"replicas": None, "port": expected.port}) == expected
    assert config.model_fields_set == expected.model_fields_set | {"replicas", "port"}
    assert (config.first_replicas, config.most_replicas) == (3, 5)
    back = pickle.loads(pickle.dumps(config))
    assert (back, back.model_fields_set) == (config, config.model_fields_set)


@pytest.mark.parametrize(("cpus", "own"), [(2 / 3, 0.666), (2.5, 2.0), (1.0, 1.0), (0.5, 0.5)])
def test_cpus_are_shared_out_as_ray_counts_them(cpus: float, own: float) -> None:
    assert of_server(ServerConfig(replicas=1), cpus).replica_cpus == own


def test_a_cluster_that_runs_is_named_by_the_environment(monkeypatch: pytest.MonkeyPatch, started: Started) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert run_program(["serve", "--replicas=2", "--port=8123", "--host=0.0.0.0"]) == 0
    ((wanted, config),) = started
    assert (wanted.address, wanted.host, wanted.port, wanted.num_cpus) == ("auto", "0.0.0.0", 8123, None)
    assert (config.replica_cpus, config.ingress_cpus) == (1.0, 1.0)


def test_the_number_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, started: Started) -> None:
    monkeypatch.setenv("SPECMAMBA_REPLICAS", "3")
    assert run_program(["serve", "--port=0"]) == 0
    assert started[0][1].first_replicas == 3
    assert run_program(["serve", "--port=0", "--replicas=1"]) == 0
    assert started[1][1].most_replicas == 1


def test_what_the_environment_says_of_this_command_is_not_meant_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECMAMBA_REPLICAS", "3")
    config = config_of_args({"dp_size": 2})
    assert (config.replicas, config.first_replicas, config.most_replicas) == (None, 2, 2)


def test_a_signal_during_the_start_is_no_failure(monkeypatch: pytest.MonkeyPatch, started: Started) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(deploy_command, "run_application", interrupted)
    assert run_program(["serve", "--replicas=2", "--port=0"]) == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--replicas 0", "--replicas: Input should be greater than or equal to 1 (got '0')"),
        ("--replicas -2", "--replicas: Input should be greater than or equal to 1"),
        ("--replicas many", "--replicas: Input should be a valid integer"),
        ("--replicas 65", "--replicas: Input should be less than or equal to 64"),
        ("--replicas 2 --dp-size 2", "--replicas 2, --dp-size 2: give one of them"),
        ("--replicas 3 --dp-max-size 2", "--replicas 3: the start is from --dp-min-size to --dp-max-size"),
        ("--replicas 2 --dp-min-size 2", "--dp-min-size: this needs --dp-max-size"),
        (
            "--replicas 1 --disaggregation-mode prefill",
            "--disaggregation-mode prefill: prompts are handed over by servers outside of Ray: drop it, or --replicas",
        ),
        ("--replicas 2 --read-timeout 3", "--read-timeout: Ray Serve takes the connections: drop it, or --replicas 2"),
    ],
)
def test_what_cannot_be_is_said(flags: str, message: str, started: Started, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_program(["serve", *flags.split()])
    assert message in capsys.readouterr().err
    assert not started


def test_an_address_that_is_taken_is_told_before_ray_starts(
    started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit, match="2"):
        run_program(["serve", "--replicas=2", f"--port={taken.getsockname()[1]}"])
    assert "--host, --port: cannot listen on 127.0.0.1" in capsys.readouterr().err
    assert not started


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("TORCHELASTIC_RUN_ID", "it", "--replicas: replicas start their ranks themselves: leave torchrun out"),
        ("RAY_ADDRESS", "auto", "--port 0: all machines of the cluster that RAY_ADDRESS names listen at one port"),
    ],
)
def test_surroundings_that_do_not_fit(
    variable: str,
    value: str,
    message: str,
    started: Started,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit, match="2"):
        run_program(["serve", "--replicas=2", "--port=0"])
    assert message in capsys.readouterr().err
    assert not started


def test_without_ray_one_line_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    without: Any = lambda name, *args: None if name == "ray" else find(name, *args)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", without)
    with pytest.raises(SystemExit, match="2"):
        run_program(["serve", "--replicas", "2"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("specmamba serve: error: --replicas 2: this needs Ray Serve, which is not installed: pip")
    assert "'specmamba[scale]', or give --dp-size 2, which needs no Ray" in line
