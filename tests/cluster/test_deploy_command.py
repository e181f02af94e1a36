"""``specmamba deploy``: what a file comes to, and what is said of one that is wrong. Nothing is started here."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from specmamba.cli import main as run_program
from specmamba.cluster import deploy_command
from specmamba.cluster.deployment_file import read_deployment
from specmamba.errors import ConfigError

WHOLE = """
name: qwen
http: {host: 0.0.0.0, port: 8080}
model: /models/it
tp_size: 2
autoscaling:
  min_replicas: 2
  max_replicas: 6
  target_queued_tokens: 9000
  upscale_delay_s: 3
  downscale_delay_s: 90
resources: {replica_cpus: 4, ingress_cpus: 0.5}
admin_key_file: KEYS
flags:
  max-running-requests: 8
  speculative_algorithm: none
  api_key: [a-secret-of-a-client]
"""


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SPECMAMBA_DP_SIZE", "SPECMAMBA_DP_MAX_SIZE", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


def written(folder: Path, text: str) -> Path:
    (folder / "keys").write_text("the-operator\n")
    file = folder / "it.yaml"
    file.write_text(text.replace("KEYS", str(folder / "keys")))
    return file


def test_a_file_is_the_configuration_of_an_application(tmp_path: Path) -> None:
    deployment = read_deployment(written(tmp_path, WHOLE))
    config = deployment.config()
    assert (deployment.name, deployment.http.host, deployment.http.port) == ("qwen", "0.0.0.0", 8080)
    assert (config.model, config.tp_size, config.max_running_requests) == ("/models/it", 2, 8)
    assert (config.dp_min_size, config.dp_max_size, config.first_replicas) == (2, 6, 2)
    assert (config.dp_target_tokens, config.dp_grow_delay, config.dp_shrink_delay) == (9000, 3.0, 90.0)
    assert (config.replica_cpus, config.ingress_cpus, config.speculative_algorithm) == (4.0, 0.5, "none")
    assert config.admin_key is not None
    assert config.admin_key.get_secret_value() == "the-operator"


def test_a_file_may_say_nothing_but_the_number(tmp_path: Path) -> None:
    config = read_deployment(written(tmp_path, "replicas: 3\n")).config()
    assert (config.model, config.dp_size, config.dp_max_size, config.most_replicas) == (None, 3, None, 3)


def test_flags_have_the_names_of_other_runtimes_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the command line, in either spelling; words that YAML takes for true and false are words here."""
    flags = "{max-num-seqs: 8, enable_prefix_caching: false, trust_remote_code: false, elastic_pools: off}"
    file = written(tmp_path, f"flags: {flags}\n")
    config = read_deployment(file).config()
    assert (config.max_running_requests, config.disable_radix_cache, config.elastic_pools) == (8, True, "off")
    assert run_program(["deploy", str(file), "--check"]) == 0
    said = capsys.readouterr().out
    for row in (r"flags.max_running_requests +8", r"flags.disable_radix_cache +True", r"flags.elastic_pools +off"):
        assert re.search(row, said)


def test_check_prints_the_plan_and_no_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program(["deploy", str(written(tmp_path, WHOLE)), "--check"]) == 0
    said = capsys.readouterr().out
    rows = dict(line.split("  ", 1) for line in said.splitlines())
    plan = {name: value.strip() for name, value in rows.items()}
    assert plan["address"].startswith("http://0.0.0.0:8080")
    assert plan["replicas"].startswith("2 to 6, 2 at first: above 9000 queued tokens of each for 3 s")
    assert plan["each"] == "4 CPUs, 2 GPUs where the cluster has any"
    assert plan["in all"] == "8.5 to 24.5 CPUs"
    assert (plan["clients' keys"], plan["operator's key"]) == ("1", "one")
    assert (plan["flags.max_running_requests"], plan["flags.api_key"]) == ("8", "(not shown)")
    assert "secret" not in said
    assert "the-operator" not in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("replica: 2", "it.yaml: replica: there is no such key; did you mean replicas?"),
        ("http: {prot: 80}", "it.yaml: http.prot: there is no such key; did you mean port?"),
        (
            "autoscaling: {max_replicas: 3, target_tokens: 9}",
            "autoscaling.target_tokens: there is no such key; did you mean target_queued_tokens?",
        ),
        ("max-running-requests: 8", "max-running-requests: there is no such key; flags of specmamba serve stand below"),
        ("dp_size: 8", "dp_size: there is no such key; .*have another name here: replicas"),
        ("flags: {dp_size: 2}", "flags.dp_size: this file has replicas for it"),
        ("flags: {port: 80}", "flags.port: this file has http.port for it"),
        ("flags: {max_runing_requests: 2}", "it.yaml: --max-runing-requests: .*did you mean --max-running-requests"),
        ("flags: {tensor-parallel-size: 2}", "it.yaml: flags.tensor-parallel-size: this file has tp_size for it"),
        ("flags: {tp: 2}", "flags.tp: this file has tp_size for it"),
        ("flags: {model_path: /m}", "flags.model_path: this file has model for it"),
        ("flags: {data_parallel_size: 2}", "flags.data_parallel_size: this file has replicas for it"),
        ("flags: {pipeline_parallel_size: 2}", "it.yaml: --pipeline-parallel-size: .* divides every layer"),
        ("flags: {max_num_seq: 8}", "--max-num-seq: there is no such flag; did you mean --max-num-seqs"),
        (
            "flags: {max_num_seqs: 8, max_running_requests: 8}",
            "it.yaml: --max-num-seqs and --max-running-requests are one setting: give one of them",
        ),
        ("flags: {max-running-requests: 8, max_running_requests: 8}", "--max-running-requests is given twice"),
        ("flags: {--max-running-requests: 8}", "flags stand here without hyphens in front: max_running_requests"),
        ("flags: {no-disable-radix-cache: true}", "no-disable-radix-cache: .*here: disable_radix_cache: false"),
        ("flags: {no_enforce_eager: true}", "no_enforce_eager: .*here: enforce_eager: false"),
        ("flags: {max_running_requests: many}", "it.yaml: --max-running-requests: .*valid integer.*'many'"),
        ("flags: {max_running_requests: [8]}", "it.yaml: --max-running-requests: .*valid integer"),
        ("flags: {max_running_requests: {of: 8}}", "it.yaml: --max-running-requests: .*valid integer"),
        ("flags: {max_running_requests: yes}", "--max-running-requests: this is no switch .got true, as YAML also"),
        ("flags: {dtype: 16}", "it.yaml: --dtype: .*'float16'"),
        ("flags: {disable_page: perhaps}", "it.yaml: --disable-page: .*valid boolean"),
        ("flags: {8: 2}", r"it.yaml: flags.8"),
        ("flags: [disable_page]", "it.yaml: flags: .*dictionary"),
        ("replicas: yes", "it.yaml: replicas: this is no switch .got true"),
        ("http: {port: on}", "it.yaml: http.port: this is no switch"),
        ("replicas: 2\nautoscaling: {max_replicas: 3}", "it.yaml: replicas, autoscaling: give one of them"),
        ("autoscaling: {min_replicas: 3, max_replicas: 2}", "--dp-min-size 3: this is more than --dp-max-size 2"),
        ("replicas: many", "it.yaml: replicas: "),
        ("replicas: 0", "it.yaml: replicas: "),
        ("autoscaling: {}", "autoscaling.max_replicas: Field required"),
        ("resources: {replica_cpus: 1.5}", "--replica-cpus: Ray counts CPUs above one as a whole"),
        ("http:\n  port: [", "it.yaml, line 2: this is no YAML: "),
        ("- a\n- b", "this is no mapping of keys to values"),
        ("", "this is no mapping of keys to values"),
        ("1: 2", "it.yaml: 1: "),
        ("model: !!python/object/apply:os.getcwd []", "this is no YAML: could not determine a constructor"),
        ("api_key_file: /nowhere/keys", "--api-key-file: /nowhere/keys cannot be read"),
        ("a: &a [" + "&b [" * 5000, "nested too deeply|no YAML"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, text: str, message: str) -> None:
    file = written(tmp_path, text)
    with pytest.raises(ConfigError, match=message):
        deploy_command.main([str(file), "--check"])


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"it.yaml cannot be read: No such file"):
        deploy_command.main([str(tmp_path / "it.yaml")])


def test_without_ray_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    without: Any = lambda name, *args: None if name == "ray" else find(name, *args)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", without)
    with pytest.raises(ConfigError, match=r"pip install 'specmamba\[scale\]'"):
        deploy_command.main([str(written(tmp_path, "replicas: 1"))])


def test_what_stays_needs_a_cluster_that_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy_command, "require_ray", lambda: None)
    with pytest.raises(ConfigError, match="--stay: a cluster of this command ends with it"):
        deploy_command.main([str(written(tmp_path, "replicas: 1")), "--stay"])


@pytest.mark.parametrize("given", ["0", "-1", "inf", "nan", "soon"])
def test_a_time_is_a_number_of_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        deploy_command.main([str(written(tmp_path, "replicas: 1")), f"--timeout={given}"])
    assert "this is a number of seconds above 0" in capsys.readouterr().err
