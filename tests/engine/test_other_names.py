"""Names and values of vLLM and SGLang: as keywords, as flags, in files; what they become, and what is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from specmamba import LLM, AsyncLLM, SamplingParams
from specmamba.config import EngineConfig
from specmamba.errors import CheckpointError, ConfigError
from specmamba.flags.command_line import parse_command_line
from specmamba.flags.flag_parser import with_own_names
from specmamba.flags.keywords import config_of
from specmamba.flags.near_names import did_you_mean
from specmamba.flags.other_names import (
    OTHER_NAMES,
    OTHER_PARAMS,
    OTHER_VALUES,
    SPECULATIVE_FIELDS,
    Fixed,
    Renamed,
    flag_of,
)
from specmamba.server_config import ServerConfig

pytestmark = pytest.mark.usefixtures("no_settings_from_outside")

# name, value as a keyword, value as an argument (None: a switch), our field, our value
SAME = [
    ("model_path", "folder", "folder", "model", "folder"),
    ("max_model_len", 4096, "4096", "context_length", 4096),
    ("max_num_seqs", 8, "8", "max_running_requests", 8),
    ("max_num_batched_tokens", 256, "256", "chunked_prefill_size", 256),
    ("gpu_memory_utilization", 0.25, "0.25", "mem_fraction_static", 0.25),
    ("block_size", 16, "16", "page_size", 16),
    ("mamba_ssm_cache_dtype", "bfloat16", "bfloat16", "mamba_ssm_dtype", "bfloat16"),
    ("random_seed", 7, "7", "seed", 7),
    ("tensor_parallel_size", 2, "2", "tp_size", 2),
    ("tp", 4, "4", "tp_size", 4),
    ("expert_parallel_size", 1, "1", "ep_size", 1),
    ("ep", 1, "1", "ep_size", 1),
    ("enforce_eager", True, None, "disable_cuda_graph", True),
    ("enable_deterministic_inference", True, None, "deterministic", True),
    ("enable_prefix_caching", False, None, "disable_radix_cache", True),
    ("enable_prefix_caching", True, None, "disable_radix_cache", False),
]
NOTHING = [
    ("pipeline_parallel_size", 1, "1"),
    ("data_parallel_size", 1, "1"),
    ("trust_remote_code", False, None),
    ("swap_space", 0, "0"),
    ("swap_space", 0.0, "0.0"),
    ("load_format", "auto", "auto"),
    ("enable_chunked_prefill", True, None),
    ("enable_auto_tool_choice", True, None),
]
REFUSED = [
    ("pipeline_parallel_size", 2, "2", "divides every layer"),
    ("data_parallel_size", "two", "two", "copies of a model behind one port"),
    ("trust_remote_code", True, None, "no code of a checkpoint is run here"),
    ("tokenizer", "folder", "folder", "put its files there"),
    ("tokenizer_path", "folder", "folder", "put its files there"),
    ("swap_space", 4, "4", "nothing is moved between memories here"),
    ("enable_lora", True, None, "merge it into the weights"),
    ("enable_chunked_prefill", False, None, "in chunks of"),
]


def serve(*arguments: str) -> ServerConfig:
    return parse_command_line(ServerConfig, "specmamba serve", list(arguments))


def arguments_of(name: str, value: Any, written: str | None) -> list[list[str]]:
    flag = flag_of(name)
    if written is None:
        return [[flag if value else f"--no-{flag[2:]}"]]
    return [[flag, written], [f"{flag}={written}"]]


def test_the_table_names_what_there_is() -> None:
    fields = EngineConfig.model_fields
    renamed = {name: known.field for name, known in OTHER_NAMES.items() if isinstance(known, Renamed)}
    assert {*renamed.values(), *SPECULATIVE_FIELDS.values(), *OTHER_VALUES} <= set(fields)
    assert set(OTHER_PARAMS.values()) <= set(SamplingParams.model_fields)
    assert not set(OTHER_NAMES) & set(ServerConfig.model_fields)
    assert not set(OTHER_PARAMS) & set(SamplingParams.model_fields)
    assert {name for name, *_ in SAME} == set(renamed)
    tried = {name for name, *_ in NOTHING + REFUSED}
    assert {name for name, known in OTHER_NAMES.items() if isinstance(known, Fixed)} - tried == {
        "pp_size",
        "tokenizer_mode",
        "cpu_offload_gb",
    }


@pytest.mark.parametrize(("name", "value", "written", "field", "own"), SAME)
def test_the_same_setting(
    name: str,
    value: Any,
    written: str | None,
    field: str,
    own: Any,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    with caplog.at_level(logging.WARNING, "specmamba"):
        assert getattr(config_of({name: value}), field) == own
    (record,) = caplog.records
    assert record.message.startswith(f"{name} is ")
    assert f"{field} here" in record.message
    for arguments in arguments_of(name, value, written):
        assert getattr(serve(*arguments), field) == own
        assert f"specmamba serve: {flag_of(name)} is " in capsys.readouterr().err
    file = tmp_path / "settings.toml"
    file.write_text(f"{name} = {json.dumps(value)}\n")
    assert getattr(serve("--config", str(file)), field) == own
    assert f"{flag_of(field)} here" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "value", "written"), NOTHING)
def test_what_asks_for_nothing(name: str, value: Any, written: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    assert config_of({name: value}) == config_of({name: None}) == EngineConfig()
    for arguments in arguments_of(name, value, written):
        assert serve(*arguments).model_dump() == serve().model_dump()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("name", "value", "written", "words"), REFUSED)
def test_what_is_refused(name: str, value: Any, written: str | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        LLM("/nowhere/at/all", **{name: value})
    assert str(error.value).startswith(f"{name}: ")
    assert "--" not in str(error.value)
    for arguments in arguments_of(name, value, written):
        with pytest.raises(ConfigError, match=words) as error:
            serve(*arguments)
        assert str(error.value).startswith(f"{flag_of(name)}: ")


@pytest.mark.parametrize(
    ("config", "own"),
    [
        ({"method": "mtp", "num_speculative_tokens": 3}, {"speculative_algorithm": "mtp", "speculative_num_steps": 3}),
        ({"method": "qwen3_next_mtp"}, {"speculative_algorithm": "mtp"}),
        ({"method": "MTP"}, {"speculative_algorithm": "mtp"}),
        (
            {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
            {"speculative_algorithm": "ngram", "speculative_num_steps": 5, "ngram_windows": (2, 4)},
        ),
        (
            {"method": "eagle3", "model": "head", "revision": "main", "draft_tensor_parallel_size": 1},
            {"speculative_algorithm": "eagle3", "speculative_draft_model_path": "head"},
        ),
        ({"model": "head"}, {"speculative_algorithm": "auto", "speculative_draft_model_path": "head"}),
        ({"method": "draft_model", "model": "small"}, {"speculative_algorithm": "draft-model"}),
    ],
)
def test_vllms_mapping_of_drafts(config: dict[str, Any], own: dict[str, Any]) -> None:
    # a draft tree of n-grams is the default: a chain is what the other runtime drafts
    chain: dict[str, Any] = {"speculative_eagle_topk": 1} if config.get("method") == "ngram" else {}
    found = [config_of({"speculative_config": config, **chain})]
    topk = ["--speculative-eagle-topk", "1"] if chain else []
    found.append(serve("--speculative-config", json.dumps(config), *topk))
    dotted = [word for key, value in config.items() for word in (f"--speculative-config.{key}", str(value))]
    found.append(serve(*dotted, *topk))
    for each in found:
        assert {name: getattr(each, name) for name in own} == own


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"method": "medusa"}, "there is no method 'medusa' here"),
        ({"method": "mtp", "quantization": "fp8"}, "there is no 'quantization' here"),
        ({"method": "mtp", "draft_tensor_parallel_size": 2}, "divided as the model is"),
        ({"method": "eagle"}, "eagle needs"),
        ({"model": True}, r"config: model: this is a text or a number \(got True\)"),
        ({"num_speculative_tokens": [3]}, r"num_speculative_tokens: this is a text or a number"),
        ("{", "not valid JSON"),
        ("3", "a mapping of settings"),
        ({"method": "mtp", "num_speculative_tokens": 99}, "less than or equal to 63"),
    ],
)
def test_mappings_that_are_refused(config: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config_of({"speculative_config": config})
    with pytest.raises(ConfigError, match=words):
        serve("--speculative-config", config if isinstance(config, str) else json.dumps(config))


def test_parts_of_a_mapping_beside_the_mapping() -> None:
    whole, part = ["--speculative-config", '{"method":"ngram"}'], "--speculative-config.num_speculative_tokens"
    for arguments in ([*whole, part, "3"], [f"{part}=3", *whole]):
        config = serve(*arguments)
        assert (config.speculative_algorithm, config.num_draft_steps) == ("ngram", 3)
    with pytest.raises(ConfigError, match=r"^--speculative-config.method is given in --speculative-config too"):
        serve(*whole, "--speculative-config.method", "mtp")
    with pytest.raises(ConfigError, match="not valid JSON"):
        serve("--speculative-config", "{", part, "3")


@pytest.mark.parametrize(
    "flag", ["--data-parallel-size", "--max-num-seqs", "--speculative-config", "--speculative-config.method"]
)
def test_a_flag_without_value(flag: str) -> None:
    for behind in ([], ["--port", "1"]):
        with pytest.raises(ConfigError, match=f"^{flag}: no value stands behind it"):
            serve(flag, *behind)


def test_a_value_that_leaves_ours_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, own in (([], "float32"), (["--mamba-ssm-dtype", "bfloat16"], "bfloat16")):
        assert serve("--mamba-ssm-cache-dtype", "auto", *arguments).mamba_ssm_dtype == own
        assert "--mamba-ssm-cache-dtype auto sets nothing here: --mamba-ssm-dtype says" in capsys.readouterr().err
    assert config_of({"mamba_ssm_cache_dtype": "auto"}) == EngineConfig()


def test_a_mapping_of_nothing_drafts_as_the_other_flags_say() -> None:
    assert config_of({"speculative_config": {}}) == config_of({"speculative_config": None}) == EngineConfig()


@pytest.mark.parametrize(
    ("field", "value", "own"),
    [(field, value, own) for field, values in OTHER_VALUES.items() for value, own in values.items()],
)
def test_values(field: str, value: str, own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {field: value}
    if own in ("draft-model", "dflash"):
        given["speculative_draft_model_path"] = "small"
    arguments = [word for name, word in given.items() for word in (flag_of(name), word)]
    assert getattr(config_of(given), field) == own
    assert getattr(serve(*arguments), field) == own
    monkeypatch.setenv(f"SPECMAMBA_{field.upper()}", value.upper())
    assert getattr(config_of({**given, field: value}), field) == own


@pytest.mark.parametrize("name", ["awq", "gptq_marlin", "compressed-tensors", "gguf"])
def test_formats_of_checkpoints_are_found_by_themselves(name: str) -> None:
    with pytest.raises(ConfigError, match="is read from its files: leave this out"):
        config_of({"quantization": name})
    assert config_of({"quantization": None}).quantization == "auto"


@pytest.mark.parametrize("make", [LLM, AsyncLLM])
def test_the_model_by_its_other_name(make: Any) -> None:
    with pytest.raises(CheckpointError, match="/nowhere/at/all"):
        make(model_path="/nowhere/at/all")
    with pytest.raises(ConfigError, match=r"^model_path and model are one setting"):
        make("/nowhere", model_path="/nowhere")


def test_none_is_no_second_value() -> None:
    for given in ({"page_size": None, "block_size": 4}, {"block_size": 4, "page_size": None}):
        assert config_of(given).page_size == 4
    assert config_of({"context_length": None, "max_model_len": None}) == EngineConfig()


def test_two_names_for_one_setting() -> None:
    for given in ({"max_model_len": 64, "context_length": 64}, {"model": "a", "model_path": "b"}):
        with pytest.raises(ConfigError, match="are one setting: give one of them"):
            config_of(given)
    with pytest.raises(ConfigError, match="given by another name too"):
        serve("--max-model-len", "64", "--context-length=64")
    with pytest.raises(ConfigError, match="given by another name too"):
        serve("--enforce-eager", "--no-disable-cuda-graph")
    with pytest.raises(ConfigError, match="are one setting"):
        config_of({"speculative_config": {"num_speculative_tokens": 3}, "speculative_num_steps": 3})


def test_the_environment_knows_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECMAMBA_MAX_MODEL_LEN", "64")
    with pytest.raises(ConfigError, match="SPECMAMBA_CONTEXT_LENGTH is what it is called here"):
        serve()
    monkeypatch.delenv("SPECMAMBA_MAX_MODEL_LEN")
    for name, words in (
        ("DATA_PARALLEL_SIZE", "copies of a model behind one port are a setting of specmamba serve, dp_size"),
        ("SPECULATIVE_CONFIG", "are for its parts"),
    ):
        with monkeypatch.context() as other:
            other.setenv(f"SPECMAMBA_{name}", "1")
            with pytest.raises(ConfigError, match=f"^SPECMAMBA_{name}: there is no such variable .*{words}$"):
                serve()


@pytest.mark.parametrize(
    ("given", "names", "meant"),
    [
        ("prot", ["prompt", "port"], "port"),  # one slip, though more letters are those of the other
        ("tempreature", ["temperature"], "temperature"),
        ("stops", ["stop", "step"], "stop"),
        ("pagesize", ["page_size", "page_sizes"], "page_size"),
        ("xyz", ["port"], ""),
        ("", ["port"], ""),
        ("a" * 10_000, ["a" * 64], "a" * 64),
    ],
)
def test_the_name_that_the_fewest_slips_lead_to(given: str, names: list[str], meant: str) -> None:
    for order in (names, names[::-1]):
        assert did_you_mean(given, order) == (f"; did you mean {meant}?" if meant else "")


def test_arguments_keep_their_order() -> None:
    given = ["--model", "x", "--max-num-seqs", "3", "--stop", "--enforce-eagerly", "--port", "1"]
    assert with_own_names(ServerConfig, "test", given) == [
        *("--model", "x", "--stop", "--enforce-eagerly", "--port", "1", "--max-running-requests=3")
    ]


def test_a_model_is_loaded_with_keywords_of_others() -> None:
    names: dict[str, Any] = {
        "max_model_len": 64,
        "max_num_seqs": 2,
        "tensor_parallel_size": 1,
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 2},
    }
    with LLM(dtype="float32", device="cpu", **names) as llm:
        assert llm.engine.context_length == 64
        assert llm.engine.draft_plan.num_steps == 2
        params = SamplingParams(max_new_tokens=3, sampling_seed=5, ignore_eos=True)  # type: ignore[call-arg]
        assert (params.max_tokens, params.seed) == (3, 5)
        assert len(llm.generate("x", params)[0].token_ids) == 3


def test_two_names_of_a_sampling_parameter() -> None:
    with pytest.raises(ValueError, match="two names for one setting are given: max_tokens, max_new_tokens"):
        SamplingParams.model_validate({"max_tokens": 3, "max_new_tokens": 3})


class TestSources:
    """A keyword error says so when the value comes from the environment."""

    def test_a_value(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SPECMAMBA_PAGE_SIZE", "0")
        with pytest.raises(ConfigError) as error:
            LLM()
        assert str(error.value).endswith("(got '0') (from the environment: SPECMAMBA_PAGE_SIZE)")
        assert str(error.value).startswith("page_size: ")
        with pytest.raises(ConfigError) as error:
            LLM(page_size=-1)
        assert "environment" not in str(error.value)

    def test_a_combination(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SPECMAMBA_SPECULATIVE_ALGORITHM", "none")
        with pytest.raises(ConfigError) as error:
            LLM(speculative_num_steps=3)
        assert str(error.value) == (
            "speculative_num_steps need a drafter: drop them, or choose speculative_algorithm mtp (from the "
            "environment: SPECMAMBA_SPECULATIVE_ALGORITHM)"
        )
        with pytest.raises(ConfigError, match=r"\(from the environment: SPECMAMBA_SPECULATIVE_ALGORITHM\)$"):
            serve("--speculative-num-steps", "3")


@pytest.mark.parametrize("value", ["tcp://10.0.0.1:30000", "udp://[fd00::1]:53"])
def test_the_port_of_a_service_that_kubernetes_knows(
    value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPECMAMBA_PORT", value)
    assert serve().port == 30000
    assert f"SPECMAMBA_PORT={value} is ignored: Kubernetes says so" in capsys.readouterr().err
    assert serve("--port", "8000").port == 8000
    with pytest.raises(ConfigError, match="--port: "):
        serve("--port", value)
    monkeypatch.setenv("SPECMAMBA_PORT", "8001")
    assert serve().port == 8001
