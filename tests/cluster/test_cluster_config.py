"""Arguments of the application of Ray Serve: texts and values of YAML, and flags that belong to Ray."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from specmamba.cluster.cluster_config import ANYWHERE, config_of_args
from specmamba.cluster.engine_actor import share_of_memory
from specmamba.errors import ConfigError
from specmamba.server.http.callers import is_loopback


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SPECMAMBA_DP_SIZE", "SPECMAMBA_DISAGGREGATION_MODE", "SPECMAMBA_PORT"):
        monkeypatch.delenv(name, raising=False)


def test_texts_and_values_mean_the_same() -> None:
    texts = {"dp-size": "2", "disable_page": "true", "api_key": "one,two", "replica_cpus": "0.5", "tp_size": "2"}
    values = {"dp_size": 2, "disable_page": True, "api_key": ["one", "two"], "replica_cpus": 0.5, "tp-size": 2}
    config = config_of_args(texts)
    assert config == config_of_args(values)
    assert (config.dp_size, config.disable_page, config.replica_cpus) == (2, True, 0.5)
    assert [key.get_secret_value() for key in config.api_key] == ["one", "two"]


def test_names_of_other_runtimes_are_understood() -> None:
    assert config_of_args({"model_path": "./m", "mem_fraction_static": "0.4"}).model == "./m"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"port": 80}, "--port: Ray Serve takes the connections"),
        ({"read-timeout": 3}, "--read-timeout: Ray Serve takes the connections"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode: prompts are handed over by servers outside"),
        ({"dp_sizes": 2}, "--dp-sizes: there is no such flag; did you mean --dp-size"),
        ({"dp_size": "many"}, "--dp-size: "),
        ({"replica_cpus": 0}, "--replica-cpus: "),
        ({"ingress_cpus": 1.5}, "--ingress-cpus: Ray counts CPUs above one as a whole"),
    ],
)
def test_what_cannot_be_is_refused(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of_args(args)


def test_the_environment_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECMAMBA_DP_SIZE", "0")
    with pytest.raises(ConfigError, match=r"--dp-size.*\(from the environment: SPECMAMBA_DP_SIZE\)"):
        config_of_args({})


def test_a_key_that_is_refused_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        config_of_args({"api_key": ["a secret"]})
    assert "a secret" not in str(caught.value)


def test_callers_of_a_proxy_are_no_operators_without_a_key() -> None:
    """A proxy of Ray Serve may be reached by all names; who says "localhost" to it need not be on this machine."""
    assert config_of_args({}).host == ANYWHERE
    assert not is_loopback(ANYWHERE)


def test_the_configuration_travels() -> None:
    config = config_of_args({"dp_size": 3, "admin_key": "key"})
    back = pickle.loads(pickle.dumps(config))
    assert back == config
    assert back.model_fields_set == config.model_fields_set


@pytest.mark.parametrize(("cpus", "share"), [(1.0, 0.125), (4.0, 0.5), (16.0, 1.0)])
def test_replicas_on_a_cpu_share_its_memory(cpus: float, share: float) -> None:
    assert share_of_memory({"mem_fraction_static": 0.4, "device": "cpu"}, cpus, 8.0) == pytest.approx(0.4 * share)
