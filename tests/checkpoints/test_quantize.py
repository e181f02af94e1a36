"""``specmamba quantize``: what it writes is what the format's own library reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file

from specmamba import LLM, SamplingParams
from specmamba.checkpoints.gguf import gguf_folder
from specmamba.checkpoints.tensor_reader import TensorReader
from specmamba.cli import main
from specmamba.quantize import GROUPS, stored_parts
from tests.families import FAMILIES
from tests.gguf_files import write_gguf
from tests.tiny import FULL, LINEAR, WHOLE_BLOCKS, write_tiny_checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path / "tiny", 5, **WHOLE_BLOCKS, layer_types=[LINEAR, FULL])


def quantize(folder: Path, out: Path, form: str, *options: str) -> int:
    return main(["quantize", "--model", str(folder), "--out", str(out), "--format", form, *options])


def refused(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    """What the command says when it refuses."""
    with pytest.raises(SystemExit, match="2"):
        quantize(*arguments)
    return capsys.readouterr().err


@pytest.mark.parametrize("form", ["int4", "int8", "fp8"])
def test_the_library_reads_the_same_weights(checkpoint: Path, tmp_path: Path, form: str) -> None:
    """Bit for bit; the other tensors are as they were, and files beside the weights are there."""
    out = tmp_path / "out"
    assert quantize(checkpoint, out, form, "--group-size", "32") == 0
    described = json.loads((out / "config.json").read_text())["quantization_config"]
    group = described["config_groups"]["group_0"]
    scheme = QuantizationScheme(targets=group["targets"], weights=QuantizationArgs(**group["weights"]))
    library: Any = BaseCompressor.get_value_from_registry(described["format"])
    stored, original, count = load_file(out / "model-00001.safetensors"), load_file(checkpoint / "model.safetensors"), 0
    with TensorReader(out) as reader:
        assert set(reader.names()) == set(original)
        for name, weight in original.items():
            module = name.removesuffix("weight")
            parts = {part.removeprefix(module): x for part, x in stored.items() if part.startswith(f"{module}weight")}
            found = reader.take(name, tuple(weight.shape))
            if "weight_scale" not in parts:
                assert torch.equal(found, weight)
                continue
            count += 1
            assert torch.equal(found, library.decompress(parts, scheme)["weight"].float())
            assert (found - weight).norm() < {"int4": 0.11, "int8": 0.01, "fp8": 0.03}[form] * weight.norm()
        reader.finish()
    assert count > 20
    assert {"tokenizer.json", "tokenizer_config.json"} <= {file.name for file in out.iterdir()}
    assert not any(name in part for name in described["ignore"] for part in stored if part.endswith("scale"))


@pytest.mark.parametrize("group", GROUPS)
def test_scales_are_searched(group: int) -> None:
    """The squared error is well below that of scales that cut nothing off."""
    torch.manual_seed(0)
    weight = torch.randn(64, 256)
    parts = stored_parts(weight, "int4", group, torch.float32)
    codes = parts["weight_packed"].view(torch.uint8)
    numbers = torch.stack([codes & 15, codes >> 4], -1).flatten(1).float() - 8
    scale = parts["weight_scale"].repeat_interleave(group, 1)
    largest = weight.unflatten(1, (-1, group)).abs().amax(2).repeat_interleave(group, 1) / 7
    usual = (weight / largest).round() * largest
    assert (numbers * scale - weight).square().sum() < 0.93 * (usual - weight).square().sum()


def test_zeros_and_tiny_weights() -> None:
    """Scales are numbers, whatever the weights are."""
    weight = torch.zeros(4, 64)
    weight[1] = 1e-42
    weight[2, 5] = -3.0
    for form in ("int4", "int8", "fp8"):
        parts = stored_parts(weight, form, 32, torch.bfloat16)
        assert bool((parts["weight_scale"].float() > 0).all())


def test_text_with_drafts_is_that_without(checkpoint: Path, tmp_path: Path) -> None:
    assert quantize(checkpoint, tmp_path / "out", "int4", "--group-size", "32") == 0
    texts = []
    for algorithm in ("none", "mtp"):
        with LLM(model=str(tmp_path / "out"), speculative_algorithm=algorithm, max_running_requests=2) as llm:
            outputs = llm.generate([[5, 9, 20], [7, 7]], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
        texts.append([output.token_ids for output in outputs])
    assert texts[0] == texts[1]


def test_experts_get_names_of_their_own(tmp_path: Path) -> None:
    """Those of a tensor for all experts."""
    FAMILIES["qwen3.5-moe"].build(tmp_path / "moe", "tied")
    assert quantize(tmp_path / "moe", tmp_path / "out", "int8") == 0
    names = {name for name in load_file(tmp_path / "out" / "model-00001.safetensors") if "experts" in name}
    assert "model.layers.0.mlp.experts.0.gate_proj.weight" in names
    assert "model.layers.0.mlp.experts.3.down_proj.weight_scale" in names
    with LLM(model=str(tmp_path / "out"), max_running_requests=1) as llm:
        assert llm.generate([[5, 9, 20]], SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids


def test_scales_that_are_cut_off(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rest would still divide the inputs; ``info`` says so, and reads no weights."""
    out = tmp_path / "out"
    assert quantize(checkpoint, out, "int4", "--group-size", "32") == 0
    file = out / "model-00001.safetensors"
    tensors = load_file(file)
    name = next(name for name, x in tensors.items() if name.endswith(".weight_scale") and x.shape[1] == 2)
    save_file(tensors | {name: tensors[name][:, :1].contiguous()}, file)
    with pytest.raises(SystemExit, match="2"):
        main(["info", "--model", str(out)])
    assert "scales are for whole outputs; its format or config says groups of 32 inputs" in capsys.readouterr().err


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_folder, "cache_folder", lambda: tmp_path / "cache")


@pytest.mark.usefixtures("own_cache")
def test_gguf(tmp_path: Path) -> None:
    """A file that is not quantized gives what the folder gives that it was made of, and it runs."""
    checkpoint = write_tiny_checkpoint(
        tmp_path / "whole", 5, **WHOLE_BLOCKS, vocab_size=4096, layer_types=[LINEAR, FULL]
    )
    file = write_gguf(checkpoint, tmp_path / "tiny.gguf")
    folders = [tmp_path / "of-folder", tmp_path / "of-file"]
    for source, out in zip((checkpoint, file), folders, strict=True):
        assert quantize(source, out, "int4", "--group-size", "32") == 0
    of_folder, of_file = (load_file(out / "model-00001.safetensors") for out in folders)
    assert of_folder.keys() == of_file.keys()
    for name, x in of_folder.items():
        assert torch.equal(x, of_file[name]) or torch.allclose(x, of_file[name], atol=1e-6, rtol=1e-6), name
    assert not list(folders[1].glob("*.gguf"))
    assert (folders[1] / "tokenizer.json").exists()
    with LLM(model=str(folders[1]), max_running_requests=1) as llm:
        assert llm.generate([[5, 9, 20]], SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids


class TestBadInput:
    def test_folder_that_is_not_empty(self, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert "not empty" in refused(capsys, checkpoint, checkpoint, "int8")

    def test_quantized_already(self, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert quantize(checkpoint, tmp_path / "once", "int8") == 0
        assert "quantized already" in refused(capsys, tmp_path / "once", tmp_path / "twice", "int8")
        assert not (tmp_path / "twice").exists()

    def test_codes_that_the_config_does_not_mention(
        self, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        tensors = load_file(checkpoint / "model.safetensors")
        codes = tensors["mtp.fc.weight"].to(torch.float8_e4m3fn)
        save_file(
            tensors | {"mtp.fc.weight": codes, "mtp.fc.weight_scale": torch.ones(1)}, checkpoint / "model.safetensors"
        )
        assert "quantized already" in refused(capsys, checkpoint, tmp_path / "out", "int8")
        assert {file.name for file in tmp_path.iterdir()} == {"tiny"}

    def test_folder_that_cannot_be_made(
        self, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "file").touch()
        assert f"--out: {tmp_path / 'file'}" in refused(capsys, checkpoint, tmp_path / "file" / "out", "int8")

    def test_groups_that_divide_nothing(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        odd = write_tiny_checkpoint(tmp_path / "tiny", 0)
        assert "none of the matrices" in refused(capsys, odd, tmp_path / "out", "int4", "--group-size", "128")
        assert {file.name for file in tmp_path.iterdir()} == {"tiny"}

    def test_group_sizes(self, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert "groups of 32, 64, 128" in refused(capsys, checkpoint, tmp_path / "out", "int4", "--group-size", "48")

    def test_weights_that_are_no_numbers(
        self, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        tensors = load_file(checkpoint / "model.safetensors")
        tensors["mtp.fc.weight"][0, 0] = torch.nan
        save_file(tensors, checkpoint / "model.safetensors")
        assert "mtp.fc.weight has weights that are NaN" in refused(capsys, checkpoint, tmp_path / "out", "int8")
        assert {file.name for file in tmp_path.iterdir()} == {"tiny"}

    @pytest.mark.usefixtures("own_cache")
    def test_gguf_that_is_quantized(self, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file = write_gguf(checkpoint, tmp_path / "tiny.gguf", lambda name, shape: GGMLQuantizationType.Q8_0)
        assert f"error: {file} is quantized already" in refused(capsys, file, tmp_path / "out", "int8")
        assert not (tmp_path / "out").exists()
