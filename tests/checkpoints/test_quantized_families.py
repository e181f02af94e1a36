"""Quantized checkpoints of every family: the text of a checkpoint that stores the weights which the codes stand for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specmamba import LLM, SamplingParams
from specmamba.checkpoints.quantized.stored_report import form_of
from specmamba.cli import main
from specmamba.config import EngineConfig
from specmamba.engine.model_report import model_info
from specmamba.kernels import linear
from specmamba.kernels.linear import QuantizedMatrix, native_ops
from tests.exactness import rows_are_independent
from tests.families import FAMILIES

BLOCK = ROWS, COLUMNS = 16, 8  # of FP8
KEPT = ("embed", "lm_head", "conv1d", ".gate.", "router", "_gate.")  # as published checkpoints keep them
PROMPTS = [[7, 21, 90, 33, 64, 21, 5] * 2, [11, 42, 3]]
FLAGS: dict[str, Any] = {"context_length": 96, "max_total_tokens": 2048, "max_running_requests": 2, "dtype": "float32"}


def quantize(name: str, weight: Tensor, number: int) -> tuple[dict[str, Tensor], Tensor]:
    """The parts of a matrix [..., N, K], FP8 in blocks or per output in turns, and what they stand for."""
    if number % 2 and weight.dim() == 2:
        scale = weight.abs().amax(1, keepdim=True) / 448
        codes = (weight / scale).to(torch.float8_e4m3fn)
        return {name: codes, f"{name}_scale": scale}, codes.float() * scale
    n, k = weight.shape[-2:]
    padded = torch.nn.functional.pad(weight, (0, -k % COLUMNS, 0, -n % ROWS))
    blocks = padded.unflatten(-1, (-1, COLUMNS)).unflatten(-3, (-1, ROWS))  # [..., n, rows, k, columns]
    scale = blocks.abs().amax((-3, -1)) / 448
    full = scale.repeat_interleave(ROWS, -2).repeat_interleave(COLUMNS, -1)[..., :n, :k]
    codes = (weight / full).to(torch.float8_e4m3fn)
    return {name: codes, f"{name}_scale_inv": scale}, codes.float() * full


def write_both(folder: Path, quantized: Path, dequantized: Path) -> int:
    """Copy a checkpoint with its matrices in FP8, and with the weights that these stand for; returns their number."""
    for copy in (quantized, dequantized):
        shutil.copytree(folder, copy)
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    count = 0
    for name, tensor in load_file(folder / "model.safetensors").items():
        is_matrix = tensor.dim() in (2, 3) and min(tensor.shape) > 1 and not any(part in name for part in KEPT)
        parts, values = quantize(name, tensor.float(), count) if is_matrix else ({name: tensor}, tensor)
        count += is_matrix
        stored |= parts
        meant[name] = values
    save_file({name: x.contiguous() for name, x in stored.items()}, quantized / "model.safetensors")
    save_file({name: x.contiguous() for name, x in meant.items()}, dequantized / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    fp8: dict[str, Any] = {"type": "float", "num_bits": 8}
    spreads: list[dict[str, Any]] = [{"strategy": "block", "block_structure": list(BLOCK)}, {"strategy": "channel"}]
    groups = {f"group_{i}": {"weights": fp8 | spread} for i, spread in enumerate(spreads)}
    config["quantization_config"] = {"quant_method": "compressed-tensors", "config_groups": groups}
    config["quantization_config"]["ignore"] = ["model.layers.0.mlp.up_proj", "nothing.of.this.name"]
    (quantized / "config.json").write_text(json.dumps(config))
    return count


def texts(folder: Path, **flags: Any) -> list[tuple[int, ...]]:
    with LLM(model=str(folder), **(FLAGS | flags)) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
    return [(*output.token_ids, *output.spec.accepted_histogram) for output in outputs]


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_text_and_drafts(family: str, tmp_path: Path) -> None:
    """With the checkpoint's own head, or n-grams: dequantized, and in codes as plain decoding with these."""
    build, has_mtp = FAMILIES[family].build, FAMILIES[family].HAS_MTP
    build(tmp_path / "whole")
    quantized, dequantized = tmp_path / "quantized", tmp_path / "dequantized"
    assert write_both(tmp_path / "whole", quantized, dequantized) > 5
    flags = {"speculative_algorithm": "mtp" if has_mtp else "ngram", "speculative_num_steps": 2}
    assert texts(quantized, quantization="none", **flags) == texts(dequantized, **flags)
    if rows_are_independent(torch.float32):
        plain = texts(quantized, speculative_algorithm="none")
        assert [text[:20] for text in texts(quantized, **flags)] == [text[:20] for text in plain]


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_codes_reach_their_products(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are moved, joined, scaled and stacked in codes: products with their weights give the same texts."""
    FAMILIES[family].build(tmp_path / "whole")
    quantized, dequantized = tmp_path / "quantized", tmp_path / "dequantized"
    write_both(tmp_path / "whole", quantized, dequantized)
    monkeypatch.setattr(linear, "runs_codes", lambda *_: True)
    monkeypatch.setattr(native_ops, "can_pack_codes", lambda *_: False)
    taken: list[QuantizedMatrix] = []
    dequantize = QuantizedMatrix.dequantize

    def watched(matrix: QuantizedMatrix, dtype: torch.dtype) -> Tensor:
        taken.append(matrix)
        return dequantize(matrix, dtype)

    monkeypatch.setattr(QuantizedMatrix, "dequantize", watched)
    assert texts(quantized, speculative_algorithm="none") == texts(dequantized, speculative_algorithm="none")
    assert len(taken) > 5


def test_info_says_what_is_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By kind of layer; and what was not used."""
    FAMILIES["qwen3.5"].build(tmp_path / "whole")
    write_both(tmp_path / "whole", tmp_path / "quantized", tmp_path / "dequantized")
    file = tmp_path / "quantized" / "model.safetensors"
    extra = {"model.visual.patch.weight": torch.ones(2, 2), "model.layers.0.mlp.up_proj.input_scale": torch.ones(1)}
    save_file(load_file(file) | extra, file)
    info = model_info(EngineConfig(model=str(tmp_path / "quantized"), device="cpu"))
    forms = {(each["layers"], each["form"]) for each in info["stored"]}
    assert forms >= {
        ("mlp", "FP8 in blocks"),
        ("mlp", "FP8 per output"),
        ("embed_tokens", "F32"),
        ("mtp fc", "FP8 per output"),
    }
    codes = sum(x.nbytes for name, x in load_file(file).items() if x.dtype is torch.float8_e4m3fn)
    assert sum(each["num_bytes"] for each in info["stored"] if each["form"].startswith("FP8")) > codes
    assert info["ignored"] == {"model.visual": 1, "input_scale": 1}
    assert 0 < info["bytes"]["weights_per_step"] < info["bytes"]["weights"]
    assert main(["info", "--model", str(tmp_path / "quantized")]) == 0
    shown = capsys.readouterr().out
    assert "stored mlp" in shown
    assert "FP8 in blocks" in shown
    assert "model.visual (1)" in shown
    assert "input_scale (1)" in shown


@pytest.mark.parametrize(
    ("parts", "form"),
    [
        ({"weight": ("F8_E4M3", (8, 64)), "scale": ("F32", ())}, "FP8 per tensor"),
        ({"weight": ("F8_E4M3", (8, 64)), "scale": ("U8", (8, 2))}, "MXFP8"),
        ({"weight": ("I8", (8, 64)), "scale": ("BF16", (8, 1))}, "int8 per output"),
        ({"weight": ("U8", (8, 32)), "scale": ("F8_E4M3", (8, 4))}, "NVFP4"),
        ({"packed": ("U8", (8, 32)), "scale": ("U8", (8, 2))}, "MXFP4"),
        ({"blocks": ("U8", (3, 8, 2, 16)), "scale": ("U8", (3, 8, 2))}, "MXFP4"),
        ({"packed": ("I32", (8, 8)), "scale": ("BF16", (8, 2))}, "packed words in groups"),
        ({"qweight": ("I32", (8, 8)), "scales": ("F16", (2, 8))}, "GPTQ"),
        ({"qweight": ("I32", (64, 1)), "scales": ("F16", (2, 8))}, "AWQ"),
    ],
)
def test_names_of_forms(parts: dict[str, tuple[str, tuple[int, ...]]], form: str) -> None:
    assert form_of(parts) == form


def test_experts_count_as_far_as_they_are_read(tmp_path: Path) -> None:
    """A token is multiplied by ``num_experts_per_tok`` of them."""
    FAMILIES["qwen3.5-moe"].build(tmp_path)
    file, sizes = tmp_path / "config.json", []
    config = json.loads(file.read_text())
    for number in (1, config["num_experts"]):
        file.write_text(json.dumps(config | {"num_experts_per_tok": number}))
        info = model_info(EngineConfig(model=str(tmp_path), device="cpu", speculative_algorithm="none"))
        sizes.append(info["bytes"]["weights_per_step"])
    experts = sum(each["num_bytes"] for each in info["stored"] if each["layers"] == "mlp.experts")
    assert sizes[1] - sizes[0] == experts * (config["num_experts"] - 1) // config["num_experts"]
