"""``specmamba info``: the same figures as an engine's, without reading weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specmamba.checkpoints.tensor_reader import TensorReader
from specmamba.cli import main
from specmamba.config import EngineConfig
from specmamba.engine import model_report as info_module
from specmamba.engine.engine import Engine
from specmamba.engine.model_report import model_info
from specmamba.errors import CheckpointError, ConfigError, UnsupportedModelError
from specmamba.models.base import LoadOptions
from specmamba.models.registry import load_model
from tests.families import FAMILIES
from tests.heads import save, write_head
from tests.tiny import write_tiny_checkpoint

# The layers of the tiny model of each family, as in its config.
LAYERS: dict[str, dict[str, int]] = {
    "bamba": {"blocks": 4, "attention": 1, "mamba2": 3, "mlp": 4},
    "falcon-h1": {"blocks": 3, "attention": 3, "mamba2": 3, "mlp": 3},
    "kimi-linear": {
        "blocks": 4,
        "latent_attention": 1,
        "kimi_delta_attention": 3,
        "mixture_of_experts": 2,
        "mlp": 2,
    },
    "lfm2": {"blocks": 4, "attention": 1, "short_convolution": 3, "mlp": 4},
    "lfm3": {"blocks": 4, "attention": 2, "short_convolution": 2, "mlp": 4},
    "olmo-hybrid": {"blocks": 4, "attention": 1, "gated_delta_net": 3, "mlp": 4},
    "mamba2": {"blocks": 3, "mamba2": 3},
    "qwen3.5": {"blocks": 4, "attention": 1, "gated_delta_net": 3, "mlp": 4},
}


def info_of(folder: Path, **flags: Any) -> dict[str, Any]:
    return model_info(EngineConfig(model=str(folder), device="cpu", **flags))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), 1)


@pytest.mark.fast_cases(7)
@pytest.mark.parametrize("form", ["plain", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_without_its_weights_has_the_same_sizes(family: str, form: Any, tmp_path: Path) -> None:
    module = FAMILIES[family]
    module.build(tmp_path)
    sizes = []
    for device in ("cpu", "meta"):
        options = LoadOptions(torch.bfloat16, torch.device(device), module.HAS_MTP, form)
        model = load_model(tmp_path, options)
        has_head = model.draft_head is not None
        sizes.append((model.num_parameters, model.weight_bytes, model.num_layers, model.cache_shape, has_head))
    assert sizes[0] == sizes[1]


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_figures_are_the_engines(family: str, tmp_path: Path) -> None:
    FAMILIES[family].build(tmp_path)
    flags: dict[str, Any] = {"dtype": "float32", "mamba_ssm_dtype": "bfloat16"}
    info = info_of(tmp_path, **flags)
    engine = Engine(
        EngineConfig(model=str(tmp_path), device="cpu", max_running_requests=2, max_total_tokens=64, **flags)
    )
    said, plan = engine.describe(), engine.memory_plan
    for name in ("model", "architecture", "vocab_size", "dtype"):
        assert info[name] == said[name]
    sizes, draft = info["bytes"], info["draft"]
    weights, parameters = sizes["weights"], info["parameters"]
    if draft is not None:
        weights, parameters = weights + draft["weight_bytes"], parameters + draft["parameters"]
    assert (weights, parameters) == (said["weight_bytes"], said["parameters"])
    assert sizes["state_per_slot"] + sizes["draft_per_slot"] == said["state_bytes_per_request"]
    assert sizes["record_per_token"] == said["record_bytes_per_token"]
    assert (sizes["kv_per_token"] + sizes["draft_kv_per_token"]) * (plan.num_pages + 1) == plan.kv_bytes
    assert sizes["records_per_request"] == said["speculation_bytes_per_request"]
    assert info["drafts_with"]["algorithm"] == said["speculative_algorithm"]
    assert info["drafts_with"]["num_draft_tokens"] == said["speculative_num_draft_tokens"]
    assert (draft is not None) == FAMILIES[family].HAS_MTP
    if family in LAYERS:
        assert info["layers"] == LAYERS[family]
    engine.close()


HEADS = ["eagle", "eagle-all", "eagle3", "eagle3-narrow", "eagle3-tied"]


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("style", HEADS)
def test_figures_are_the_engines_beside_a_head(style: str, dtype: str, tiny: Path, tmp_path: Path) -> None:
    write_head(tmp_path, tiny, style, seed=2)
    flags: dict[str, Any] = {"dtype": dtype, "speculative_draft_model_path": str(tmp_path), "max_total_tokens": 64}
    check_memory(tiny, **flags, max_mamba_cache_size=5, max_running_requests=2)


def test_figures_are_the_engines_beside_a_head_that_has_the_targets_embedding(tiny: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path, tiny, "eagle", seed=2)
    embedding = load_file(tiny / "model.safetensors")["model.embed_tokens.weight"]
    flags: dict[str, Any] = {"speculative_draft_model_path": str(tmp_path), "max_total_tokens": 64}
    sizes = []
    for change in (0, 1):
        save(replace(head, tensors=head.tensors | {"embed_tokens.weight": embedding + change}))
        check_memory(tiny, **flags, max_mamba_cache_size=5, max_running_requests=2)
        sizes.append(info_of(tiny, **flags)["draft"]["parameters"])
    assert sizes[1] - sizes[0] == embedding.numel()


def test_figures_are_the_engines_beside_a_draft_model(tiny: Path, tmp_path: Path) -> None:
    draft = write_tiny_checkpoint(tmp_path, 2, with_mtp=False, layer_types=["linear_attention"] * 2)
    flags: dict[str, Any] = {"speculative_draft_model_path": str(draft), "speculative_state": "snapshots"}
    check_memory(tiny, **flags, max_total_tokens=64, max_mamba_cache_size=5, max_running_requests=2)


def check_memory(folder: Path, **flags: Any) -> None:
    """The plan equals that of an engine with these flags, which fix every size."""
    memory = info_of(folder, **flags)["memory"]
    engine = Engine(EngineConfig(model=str(folder), device="cpu", **flags))
    said, plan = engine.describe(), engine.memory_plan
    engine.close()
    assert memory.pop("free_bytes") > 0
    tables = memory.pop("table"), plan.describe_lines()
    ours, engines = ([line for line in table if "--mem-fraction-static" not in line] for table in tables)
    assert ours == engines
    assert memory == {name: said[name] for name in memory}
    assert {"weight_bytes", "total_bytes", "kv_pool_tokens", "state_slots"} <= memory.keys()


def test_flags_of_the_memory(tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(info_module, "free_memory", lambda device: 8 << 20)
    half = info_of(tiny, mem_fraction_static=0.5)["memory"]
    most = info_of(tiny, mem_fraction_static=0.9, page_size=16)["memory"]
    assert half["total_bytes"] <= 4 << 20 < most["total_bytes"] <= 0.9 * (8 << 20)
    assert most["kv_pool_tokens"] % 16 == 0
    assert main(["info", "--model", str(tiny), "--device", "cpu", "--mem-fraction-static", "0.5"]) == 0
    out = capsys.readouterr().out
    assert "8.0 MiB of memory are free on cpu" in out
    assert f"{half['kv_pool_tokens']:,} tokens of" in out
    monkeypatch.setattr(info_module, "free_memory", lambda device: 1 << 10)
    assert "problem" in info_of(tiny)["memory"]
    assert main(["info", "--model", str(tiny), "--device", "cpu"]) == 0
    assert "With these flags the engine does not start: " in capsys.readouterr().out


def test_the_device_is_the_engines(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert model_info(EngineConfig(model=str(tiny)))["device"] == "cpu"
    with pytest.raises(ConfigError, match="--device cuda: this PyTorch sees no CUDA device"):
        model_info(EngineConfig(model=str(tiny), device="cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(info_module, "free_memory", lambda device: {"cuda": 1 << 30}[device.type])
    for device in ("auto", "cuda"):
        assert model_info(EngineConfig(model=str(tiny), device=device))["memory"]["free_bytes"] == 1 << 30


def test_a_head_as_the_model_is_refused(tiny: Path, tmp_path: Path) -> None:
    write_head(tmp_path, tiny, "eagle", seed=2)
    with pytest.raises(UnsupportedModelError, match="is a draft head and no model: give it as --speculative-draft-mod"):
        info_of(tmp_path)


def test_no_weights_are_read(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: TensorReader, name: str) -> None:
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(TensorReader, "_read", refuse)
    assert info_of(tiny)["parameters"] > 0
    write_head(tmp_path, tiny, "eagle3-nested", seed=2)  # it has a map of tokens, and an embedding
    assert info_of(tiny, speculative_draft_model_path=str(tmp_path))["draft"]["parameters"] > 0


def test_the_checkpoints_own_draft_head(tiny: Path) -> None:
    info = info_of(tiny)
    assert info["draft"]["kind"] == "mtp"
    assert info["draft"]["layers"] == {"attention": 1, "mlp": 1}
    assert info["supported"]["algorithms"]["mtp"] == ["chain", "dynamic tree", "static tree"]
    assert info["drafts_with"] == {
        "algorithm": "mtp",
        "num_steps": 3,
        "topk": 1,
        "num_draft_tokens": 4,
        "pending_records": 16,
    }


@pytest.mark.parametrize("algorithm", ["none", "ngram"])
def test_a_draft_head_is_found_though_it_is_not_used(tiny: Path, algorithm: str) -> None:
    info = info_of(tiny, speculative_algorithm=algorithm)
    assert info["draft"] == info_of(tiny)["draft"]
    assert info["drafts_with"]["algorithm"] == algorithm
    assert info["bytes"]["draft_kv_per_token"] == 0


def test_a_model_without_a_draft_head(tmp_path: Path) -> None:
    info = info_of(write_tiny_checkpoint(tmp_path, 1, with_mtp=False))
    assert info["draft"] is None
    assert set(info["supported"]["algorithms"]) == {"none", "ngram", "suffix"}
    assert info["drafts_with"]["num_draft_tokens"] == 1


@pytest.mark.parametrize(("style", "kind"), [("eagle-all", "eagle"), ("eagle3-narrow", "eagle3")])
def test_a_draft_head_of_its_own_folder(tiny: Path, tmp_path: Path, style: str, kind: str) -> None:
    write_head(tmp_path, tiny, style, seed=2)
    info, alone = info_of(tiny, speculative_draft_model_path=str(tmp_path)), info_of(tiny, speculative_algorithm="none")
    assert info["draft"]["kind"] == kind
    assert info["draft"]["layers"] == {"attention": 2, "mlp": 2}
    assert info["draft"]["weight_bytes"] > info["draft"]["parameters"] > 0
    assert set(info["supported"]["algorithms"]) == {"none", "ngram", "suffix", kind}
    assert info["parameters"] == alone["parameters"]
    assert info["bytes"]["kv_per_token"] == alone["bytes"]["kv_per_token"]
    assert info["bytes"]["draft_kv_per_token"] > 0


def test_a_draft_model(tiny: Path, tmp_path: Path) -> None:
    draft = write_tiny_checkpoint(tmp_path / "draft", 2, with_mtp=False, layer_types=["linear_attention"] * 2)
    info = info_of(tiny, speculative_draft_model_path=str(draft))
    assert info["draft"]["kind"] == "draft-model"
    assert info["draft"]["layers"] == {"blocks": 2, "gated_delta_net": 2, "mlp": 2}
    assert info["draft"]["parameters"] == info_of(draft)["parameters"]
    assert info["supported"]["algorithms"]["draft-model"] == ["chain", "dynamic tree"]
    other = write_tiny_checkpoint(tmp_path / "other", 2, with_mtp=False, vocab_size=77)
    with pytest.raises(ConfigError, match=r"77.*131"):
        info_of(tiny, speculative_draft_model_path=str(other))


def test_bytes_follow_the_flags(tiny: Path) -> None:
    plain, small = info_of(tiny, dtype="float32"), info_of(tiny, dtype="bfloat16", mamba_ssm_dtype="float16")
    assert small["bytes"]["kv_per_token"] == plain["bytes"]["kv_per_token"] // 2
    assert small["bytes"]["state_per_slot"] == plain["bytes"]["state_per_slot"] // 2
    assert small["bytes"]["weights"] < 0.6 * plain["bytes"]["weights"]
    assert info_of(tiny, quantization="int8")["bytes"]["weights"] < info_of(tiny)["bytes"]["weights"]


def test_a_model_without_a_tokenizer_is_described(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path, 1)
    assert set(info_of(folder)["tokenizer"]) == {"tokens", "has_chat_template", "eos_token_ids"}
    for name, said in (
        ("tokenizer.json", "has no tokenizer, only its settings"),
        ("tokenizer_config.json", "has no tokenizer:"),
    ):
        (folder / name).unlink()
        assert said in info_of(folder)["tokenizer"]["problem"]
    assert main(["info", "--model", str(folder)]) == 0


def test_mistakes(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Other"]}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match="Other"):
        info_of(tmp_path)
    with pytest.raises(CheckpointError, match="neither a folder"):
        info_of(tmp_path / "nothing/here/it/is")
    with pytest.raises(SystemExit) as ended:
        main(["info", "--model", str(tmp_path)])
    assert ended.value.code == 2
    assert "specmamba info: error: " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["info", "--model", str(tiny), "--json", str(tmp_path / "no" / "folder.json")])
    assert "--json: there is no folder" in capsys.readouterr().err


def test_the_table(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--model", str(tiny)]) == 0
    words = " ".join(capsys.readouterr().out.split())
    info = info_of(tiny)
    for part in (
        "Qwen3_5ForCausalLM",
        f"{info['parameters']:,}",
        "4 blocks: 1 attention, 3 gated delta net, 4 MLP",
        "512 tokens",
        "per slot (recurrent states float32)",
        "mtp in the checkpoint: 1 attention, 1 MLP",
        "mtp, 3 steps of top 1, 4 nodes",
        "chain, dynamic tree, static tree",
    ):
        assert part in words


def test_json(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info_module, "free_memory", lambda device: 1 << 30)  # else it is another one each time
    file = tmp_path / "info.json"
    assert main(["info", "--model", str(tiny), "--json", str(file)]) == 0
    assert capsys.readouterr().out
    assert json.loads(file.read_text()) == info_of(tiny)
    assert main(["info", "--model", str(tiny), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == info_of(tiny)
