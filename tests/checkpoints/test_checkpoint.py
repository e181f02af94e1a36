"""Checkpoints are read completely, or refused with one error that names the damage."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from specmamba import LLM
from specmamba.checkpoints.checkpoint import read_config, resolve_checkpoint, text_config
from specmamba.checkpoints.tensor_reader import TensorReader
from specmamba.config import DEMO_MODEL
from specmamba.errors import CheckpointError, ConfigError, UnsupportedModelError
from specmamba.models.registry import ARCHITECTURES

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (7, 3),
        "model.layers.0.A_log": (4,),
        "model.layers.0.scale": (),
        "lm_head.weight": (7, 3),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write_shards(folder: Path, shards: dict[str, dict[str, Tensor]], weight_map: dict[str, Any] | None = None) -> None:
    for file, content in shards.items():
        save_file(content, folder / file)
    placed = {name: file for file, content in shards.items() for name in content}
    (folder / INDEX).write_text(json.dumps({"weight_map": {**placed, **(weight_map or {})}}))


def write_config(folder: Path, **changes: Any) -> None:
    raw = json.loads((DEMO_MODEL / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **changes}))


def read_all(folder: Path) -> dict[str, Tensor]:
    with TensorReader(folder) as reader:
        return {name: reader.take(name, reader.stored(name).shape) for name in reader.names()}


class TestTensorReader:
    def test_single_file(self, tmp_path: Path, tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.A_log"] = tensors["model.layers.0.A_log"].bfloat16()
        save_file(tensors, tmp_path / SINGLE)
        with TensorReader(tmp_path) as reader:
            assert set(reader.names()) == set(tensors)
            assert reader.has("lm_head.weight")
            assert not reader.has("lm_head.bias")
            stored = reader.stored("model.layers.0.A_log")
            assert (stored.shape, stored.dtype, stored.file) == ((4,), "BF16", tmp_path / SINGLE)
            for name, wanted in tensors.items():
                taken = reader.take(name, tuple(wanted.shape))
                assert taken.dtype == wanted.dtype
                assert torch.equal(taken, wanted)
            reader.finish()

    def test_shards(self, tmp_path: Path, tensors: dict[str, Tensor]) -> None:
        names = sorted(tensors)
        write_shards(tmp_path, {f"model-{i}-of-4.safetensors": {name: tensors[name]} for i, name in enumerate(names)})
        assert all(torch.equal(taken, tensors[name]) for name, taken in read_all(tmp_path).items())

    def test_taken_tensors_outlive_the_file(self, tmp_path: Path, tensors: dict[str, Tensor]) -> None:
        save_file(tensors, tmp_path / SINGLE)
        with TensorReader(tmp_path) as reader:
            taken = reader.take("lm_head.weight", (7, 3))
            size = (tmp_path / SINGLE).stat().st_size
            with (tmp_path / SINGLE).open("r+b") as file:
                file.write(b"\0" * size)
            assert torch.equal(taken, tensors["lm_head.weight"])

    def test_no_tensor_is_taken_after_close(self, tmp_path: Path, tensors: dict[str, Tensor]) -> None:
        save_file(tensors, tmp_path / SINGLE)
        with TensorReader(tmp_path) as reader:
            pass
        with pytest.raises(CheckpointError, match=r"lm_head\.weight cannot be read .* closed"):
            reader.take("lm_head.weight", (7, 3))

    def test_renames(self, tmp_path: Path) -> None:
        names = ("model.language_model.norm.weight", "model.visual.norm.weight", "mtp.norm.weight")
        save_file({name: torch.ones(2) for name in names}, tmp_path / SINGLE)
        with TensorReader(tmp_path, [("model.language_model.", "model.")]) as reader:
            assert set(reader.names()) == {"model.norm.weight", "model.visual.norm.weight", "mtp.norm.weight"}
            assert reader.stored("model.norm.weight").stored_name == "model.language_model.norm.weight"
            reader.take("model.norm.weight", (2,))
            reader.finish(ignore=("model.visual.", "mtp."))
            with pytest.raises(CheckpointError, match=r"language_model.norm.weight has the shape \[2\]"):
                reader.take("model.norm.weight", (3,))

    def test_renames_that_collide(self, tmp_path: Path) -> None:
        save_file({"model.a": torch.ones(2), "model.language_model.a": torch.ones(2)}, tmp_path / SINGLE)
        with pytest.raises(CheckpointError, match=r"two tensors are named 'model.a'"):
            TensorReader(tmp_path, [("model.language_model.", "model.")])

    def test_one_tensor_in_two_shards(self, tmp_path: Path) -> None:
        write_shards(tmp_path, {f"{i}.safetensors": {"a": torch.ones(2), f"b{i}": torch.ones(2)} for i in range(2)})
        with pytest.raises(CheckpointError, match="two tensors are named 'a'"):
            TensorReader(tmp_path)

    def test_missing_tensor(self, tmp_path: Path, tensors: dict[str, Tensor]) -> None:
        save_file(tensors, tmp_path / SINGLE)
        with TensorReader(tmp_path) as reader, pytest.raises(CheckpointError, match=r"lacks the tensor model\.norm"):
            reader.take("model.norm", (3,))

    def test_misshapen_tensor(self, tmp_path: Path, tensors: dict[str, Tensor]) -> None:
        save_file(tensors, tmp_path / SINGLE)
        with (
            TensorReader(tmp_path) as reader,
            pytest.raises(CheckpointError, match=r"lm_head.weight has the shape \[7, 3\] .* asks for \[3, 7\]"),
        ):
            reader.take("lm_head.weight", (3, 7))

    @pytest.mark.parametrize(
        ("dtype", "name"),
        [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3"), (torch.float64, "F64"), (torch.bool, "BOOL")],
    )
    def test_quantised_tensor(self, tmp_path: Path, dtype: torch.dtype, name: str) -> None:
        save_file({"a.weight": torch.zeros(4).to(dtype)}, tmp_path / SINGLE)
        with TensorReader(tmp_path) as reader, pytest.raises(CheckpointError, match=f"a.weight is stored as {name} in"):
            reader.take("a.weight", (4,))

    def test_extra_tensors(self, tmp_path: Path) -> None:
        save_file({f"extra.{i}": torch.ones(1) for i in range(8)}, tmp_path / SINGLE)
        with TensorReader(tmp_path) as reader:
            reader.take("extra.0", (1,))
            with pytest.raises(CheckpointError, match=r"'extra.1', .*'extra.5' and 2 more"):
                reader.finish()
            reader.finish(ignore=("extra.",))


class TestDamage:
    def test_truncated_anywhere(self, tmp_path: Path, tensors: dict[str, Tensor]) -> None:
        save_file(tensors, tmp_path / SINGLE)
        whole = (tmp_path / SINGLE).read_bytes()
        cuts = {0, 1, 7, 8, 9, len(whole) - 1} | set(random.Random(0).sample(range(len(whole)), 60))
        for cut in cuts:
            (tmp_path / SINGLE).write_bytes(whole[:cut])
            with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
                TensorReader(tmp_path)

    @pytest.mark.parametrize("length", [b"\xff" * 8, (1 << 40).to_bytes(8, "little"), bytes(8), b"<html><h"])
    def test_garbage_header_length(self, tmp_path: Path, tensors: dict[str, Tensor], length: bytes) -> None:
        save_file(tensors, tmp_path / SINGLE)
        (tmp_path / SINGLE).write_bytes(length + (tmp_path / SINGLE).read_bytes()[8:])
        with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated or not a safetensors file"):
            TensorReader(tmp_path)

    def test_random_header_damage_never_crashes(self, tmp_path: Path, tensors: dict[str, Tensor]) -> None:
        save_file(tensors, tmp_path / SINGLE)
        whole = (tmp_path / SINGLE).read_bytes()
        end = 8 + int.from_bytes(whole[:8], "little")
        rng = random.Random(1)
        num_refused = 0
        for _ in range(300):
            damaged = bytearray(whole)
            for _ in range(rng.randint(1, 4)):
                damaged[rng.randrange(end)] = rng.randrange(256)
            (tmp_path / SINGLE).write_bytes(damaged)
            try:
                read_all(tmp_path)
            except CheckpointError:
                num_refused += 1
        assert num_refused > 150

    def test_truncated_shard_is_named(self, tmp_path: Path) -> None:
        write_shards(tmp_path, {f"{i}.safetensors": {f"t{i}": torch.ones(9)} for i in range(2)})
        (tmp_path / "1.safetensors").write_bytes((tmp_path / "1.safetensors").read_bytes()[:-5])
        with pytest.raises(CheckpointError, match=r"1\.safetensors is truncated"):
            TensorReader(tmp_path)

    def test_missing_shard(self, tmp_path: Path) -> None:
        write_shards(tmp_path, {f"{i}.safetensors": {f"t{i}": torch.ones(9)} for i in range(2)})
        (tmp_path / "1.safetensors").unlink()
        with pytest.raises(CheckpointError, match=r"1\.safetensors is missing"):
            TensorReader(tmp_path)

    def test_shard_lacks_a_tensor_of_the_index(self, tmp_path: Path) -> None:
        write_shards(tmp_path, {"0.safetensors": {"a": torch.ones(2)}}, {"b": "0.safetensors"})
        with pytest.raises(CheckpointError, match=r"places 'b' in 0\.safetensors, which lacks it"):
            TensorReader(tmp_path)

    def test_tensor_missing_in_the_index_is_found(self, tmp_path: Path) -> None:
        write_shards(tmp_path, {"0.safetensors": {"a": torch.ones(2), "b": torch.ones(2)}})
        (tmp_path / INDEX).write_text('{"weight_map": {"a": "0.safetensors"}}')
        assert set(read_all(tmp_path)) == {"a", "b"}

    @pytest.mark.parametrize("shard", ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "", 3, None])
    def test_index_out_of_the_folder(self, tmp_path: Path, shard: object) -> None:
        folder = tmp_path / "inner"
        folder.mkdir()
        save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
        write_shards(folder, {}, {"a": shard})
        with pytest.raises(CheckpointError, match=r"names the shard"):
            TensorReader(folder)

    def test_index_of_pickles(self, tmp_path: Path) -> None:
        write_shards(tmp_path, {}, {"a": "pytorch_model.bin"})
        with pytest.raises(CheckpointError, match=r"only \.safetensors files are read"):
            TensorReader(tmp_path)

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"weight_map": []}', "{}", "[" * 100_000, "\udcff"])
    def test_damaged_index(self, tmp_path: Path, text: str) -> None:
        (tmp_path / INDEX).write_bytes(text.encode("utf8", "surrogateescape"))
        with pytest.raises(CheckpointError, match=r"index\.json"):
            TensorReader(tmp_path)

    def test_a_folder_in_place_of_the_file(self, tmp_path: Path) -> None:
        (tmp_path / SINGLE).mkdir()
        with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
            TensorReader(tmp_path)

    def test_pickle_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "pytorch_model.bin").write_bytes(b"")
        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is refused"):
            TensorReader(tmp_path)


class TestResolve:
    def test_local_folder(self) -> None:
        assert resolve_checkpoint(str(DEMO_MODEL), None) == DEMO_MODEL

    def test_revision_of_a_local_folder(self) -> None:
        with pytest.raises(ConfigError, match="--revision"):
            resolve_checkpoint(str(DEMO_MODEL), "main")

    def test_file(self) -> None:
        with pytest.raises(CheckpointError, match="neither a GGUF file nor"):
            resolve_checkpoint(str(DEMO_MODEL / "config.json"), None)

    def test_gguf_files(self, tmp_path: Path) -> None:
        """One that does not exist, and a folder of them."""
        file = tmp_path / "a-Q4_K_M.gguf"
        with pytest.raises(CheckpointError, match=f"there is no file {file}"):
            resolve_checkpoint(str(file), None)
        file.touch()
        with pytest.raises(CheckpointError, match=rf"but GGUF files: name one of them, such as {file}"):
            resolve_checkpoint(str(tmp_path), None)

    @pytest.mark.parametrize("model", ["/no/such/folder", "./none", "a/b/c", "two words", ""])
    def test_neither_folder_nor_hub_id(self, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(CheckpointError):
            resolve_checkpoint(model, None)

    def test_hub_offline(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        with pytest.raises(CheckpointError, match="no folder missing/none, and the hub cannot be asked"):
            resolve_checkpoint("missing/none", None)

    def test_hub_repository(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: dict[str, Any] = {}

        def download(model: str, **options: Any) -> str:
            asked.update(options, model=model)
            return str(DEMO_MODEL if model == "a/good" else tmp_path)

        monkeypatch.setattr("huggingface_hub.snapshot_download", download)
        assert resolve_checkpoint("a/good", "v1") == DEMO_MODEL
        assert (asked["model"], asked["revision"]) == ("a/good", "v1")
        assert not any(pattern.endswith((".py", ".bin", "*")) for pattern in asked["allow_patterns"])
        with pytest.raises(CheckpointError, match="reads safetensors and GGUF only"):
            resolve_checkpoint("a/pickle", None)


class TestConfig:
    def test_demo(self) -> None:
        config, architecture = read_config(DEMO_MODEL, ["Qwen3_5ForCausalLM"])
        assert architecture == "Qwen3_5ForCausalLM"
        assert text_config(config) is config
        assert config.layer_types.count("linear_attention") == 6

    def test_nested_text_config(self, tmp_path: Path) -> None:
        text = json.loads((DEMO_MODEL / "config.json").read_text())
        name = "Qwen3_5ForConditionalGeneration"
        raw = {"architectures": [name], "model_type": "qwen3_5", "text_config": text}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        config, architecture = read_config(tmp_path, [name])
        assert architecture == name
        assert text_config(config).hidden_size == text["hidden_size"]

    def test_unknown_architecture(self, tmp_path: Path) -> None:
        write_config(tmp_path, architectures=["OtherForCausalLM"], model_type="other")
        with pytest.raises(UnsupportedModelError, match=r"OtherForCausalLM .* has models for: A, B"):
            read_config(tmp_path, ["B", "A"])

    @pytest.mark.parametrize(
        ("name", "kind", "missing"),
        [
            ("Glm5NextForConditionalGeneration", "glm5_next", "indexer .*hyper-connections"),
            ("KimiK3ForConditionalGeneration", "kimi_k3", "attention residuals"),
        ],
    )
    def test_what_relatives_lack_is_named(self, tmp_path: Path, name: str, kind: str, missing: str) -> None:
        write_config(tmp_path, architectures=[name], model_type=kind)
        with pytest.raises(UnsupportedModelError, match=rf"is a {name} model, of which .*{missing}.* are missing"):
            read_config(tmp_path, tuple(ARCHITECTURES))
        for file in ("model.safetensors", "tokenizer.json"):
            (tmp_path / file).write_text("{")  # neither is looked at before
        with pytest.raises(UnsupportedModelError, match=missing):
            LLM(model=str(tmp_path))

    @pytest.mark.parametrize("names", [None, [], [3], "Qwen3_5ForCausalLM"])
    def test_no_architecture(self, tmp_path: Path, names: object) -> None:
        write_config(tmp_path, architectures=names)
        with pytest.raises(CheckpointError, match="names no model"):
            read_config(tmp_path, ["Qwen3_5ForCausalLM"])

    @pytest.mark.parametrize("text", ["", "{", "[1]", "null", '{"a": }'])
    def test_invalid_json(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"config\.json .*JSON"):
            read_config(tmp_path, ["Qwen3_5ForCausalLM"])

    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"has no config\.json"):
            read_config(tmp_path, ["Qwen3_5ForCausalLM"])

    @pytest.mark.parametrize("changes", [{"hidden_act": 3}, {"hidden_size": "wide"}])
    def test_invalid_values(self, tmp_path: Path, changes: dict[str, Any]) -> None:
        write_config(tmp_path, **changes)
        with pytest.raises(CheckpointError, match="not a config that transformers accepts"):
            read_config(tmp_path, ["Qwen3_5ForCausalLM"])

    def test_code_of_the_checkpoint_never_runs(self, tmp_path: Path) -> None:
        shutil.copytree(DEMO_MODEL, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
        write_config(tmp_path, model_type="evil", auto_map={"AutoConfig": "evil.EvilConfig"})
        (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass EvilConfig: ...\n")
        with pytest.raises(CheckpointError):
            read_config(tmp_path, ["Qwen3_5ForCausalLM"])
        assert not (tmp_path / "ran").exists()
