"""Shrunk checkpoints with the configs, names and types of published quantized ones: loaded whole, heads included."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from specmamba.bench.demo.checkpoint import copy_demo_tokenizer
from specmamba.checkpoints.tensor_reader import ShapeReader, StoredTensor
from specmamba.models import registry
from specmamba.models.base import LoadOptions
from tests.checkpoints.test_quantized_families import texts
from tests.exactness import rows_are_independent
from tests.models.published.quantized import CHECKPOINTS, VARIANTS, Published

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8}
DTYPES |= {"I32": torch.int32, "F16": torch.float16}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
ALL = CHECKPOINTS | VARIANTS
VISION = {"model.visual.blocks.0.attn.qkv.weight": torch.ones(6, 2), "model.visual.pos_embed.weight": torch.ones(4, 2)}


def value(name: str, dtype: str, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Random numbers: weights of about 0.12, so that every layer shows in the text, and states that remember."""
    if name.endswith("g_idx"):
        return (torch.arange(*shape) // 16).int()
    if dtype in ("U8", "I32"):
        return torch.randint(0, 256, shape, generator=rng).to(DTYPES[dtype])
    numbers, places = torch.randn(shape, generator=rng), torch.rand(shape, generator=rng)
    if name.endswith(("weight_scale", "weight_scale_inv")):
        numbers = places + 0.5 if dtype == "F8_E4M3" else (places + 0.5) * 1.2e-3
    elif name.endswith(("weight_scale_2", "input_scale", "k_scale", "v_scale")):
        numbers = places * 0.02 + 0.04
    elif dtype == "F8_E4M3":
        numbers = (numbers * 100).clamp(-448, 448)
    elif name.endswith(("A_log", "dt_bias")):
        numbers = places * 4 - (3 if name.endswith("A_log") else 5)
    elif len(shape) == 1:
        numbers = places + 0.5
    else:
        numbers *= 0.6 if "conv1d" in name else 0.4 if "embed" in name else 0.12
    return numbers.to(DTYPES[dtype])


def dequantized(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What these tensors stand for, in float32, under the names of a checkpoint without quantization."""
    found = {}
    for name, x in tensors.items():
        scale = tensors.get(f"{name}_scale", tensors.get(f"{name}_scale_inv"))
        if scale is None:
            if not name.endswith(("_scale", "_scale_inv", "_scale_2")):
                found[name] = x.float()
            continue
        codes = x.float()
        if x.dtype is torch.uint8:
            codes = E2M1[torch.stack([x & 15, x >> 4], -1).flatten(-2).int()]
            scale = scale.float() * tensors[f"{name}_scale_2"]
        if scale.dim() > 1:
            rows, columns = (128, 128) if f"{name}_scale_inv" in tensors else (1, 16)
            scale = scale.float().repeat_interleave(rows, -2)[..., : codes.shape[-2], :]
            scale = scale.repeat_interleave(columns, -1)[..., : codes.shape[-1]]
        found[name] = codes * scale
    return found


def write(folder: Path, published: Published) -> dict[str, Tensor]:
    """Write the shrunk checkpoint; returns its tensors, without those of a vision tower."""
    rng = torch.Generator().manual_seed(0)
    tensors = {name: value(name, *header, rng) for name, header in published.headers(small=True).items()}
    folder.mkdir()
    has_tower = "text_config" in published.config
    save_file(tensors | (VISION if has_tower else {}), folder / "model.safetensors")
    own = {} if published.in_own_file else {"quantization_config": published.quantization}
    (folder / "config.json").write_text(json.dumps(small_config(published) | own))
    copy_demo_tokenizer(folder)
    if published.in_own_file:
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": published.quantization}))
    return tensors


def small_config(published: Published) -> dict[str, object]:
    text = published.text(small=True)
    return published.config | ({"text_config": text} if "text_config" in published.config else text)


@pytest.mark.parametrize("name", [name for name, each in CHECKPOINTS.items() if each.num_tensors is not None])
def test_numbers_are_those_of_the_release(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tensors, bytes and parameters, where they are known; loaded as shapes, at the sizes of the release."""
    published = CHECKPOINTS[name]
    headers = published.headers(small=False)
    assert len(headers) == published.num_tensors
    assert "Qwen" not in name or sum(x.startswith("mtp.") for x in headers) == 1_560
    assert published.num_bytes in (None, published.size())
    (tmp_path / "config.json").write_text(
        json.dumps(published.config | {"quantization_config": published.quantization})
    )
    (tmp_path / "model.safetensors").touch()

    class Headers(ShapeReader):
        def _open(self, file: Path) -> list[StoredTensor]:
            return [StoredTensor(key, file, shape, dtype) for key, (dtype, shape) in headers.items()]

    monkeypatch.setattr(registry, "ShapeReader", Headers)
    model = registry.load_model(tmp_path, LoadOptions(torch.bfloat16, torch.device("meta"), want_draft_head=True))
    assert published.num_parameters in (None, model.num_parameters)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_nothing_is_missing_or_left_over(name: str, device: str, tmp_path: Path) -> None:
    published = ALL[name]
    tensors = write(tmp_path / "small", published)
    options = LoadOptions(torch.bfloat16, torch.device(device), want_draft_head=True)
    model = registry.load_model(tmp_path / "small", options)
    assert (model.draft_head is not None) == published.has_mtp
    of_activations = sum(x.endswith((".input_scale", ".k_scale", ".v_scale")) for x in tensors)
    tower = len(VISION) if "text_config" in published.config else 0
    assert sum(count for _, count in model.stored.ignored) == of_activations + tower
    forms = {each.form for each in model.stored.matrices}
    assert forms > {"BF16"}
    assert all(form.startswith(("FP8", "NVFP4", "GPTQ")) for form in forms - {"BF16", "F32"})


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("name", [name for name in ALL if "GPTQ" not in name])
def test_text_and_drafts(name: str, tmp_path: Path) -> None:
    """Those of a checkpoint that stores the weights which the codes stand for; in codes, those of plain decoding."""
    published = ALL[name]
    tensors = write(tmp_path / "small", published)
    (tmp_path / "plain").mkdir()
    save_file(dequantized(tensors), tmp_path / "plain" / "model.safetensors")
    (tmp_path / "plain" / "config.json").write_text(json.dumps(small_config(published)))
    copy_demo_tokenizer(tmp_path / "plain")
    flags = {"speculative_algorithm": "mtp" if published.has_mtp else "ngram", "speculative_num_steps": 2}
    found = texts(tmp_path / "small", quantization="none", **flags)
    assert found == texts(tmp_path / "plain", **flags)
    assert len({*found[0][:20], *found[1][:20]}) > 5  # no token again and again
    if rows_are_independent(torch.float32):
        plain = texts(tmp_path / "small", speculative_algorithm="none")
        assert [text[:20] for text in texts(tmp_path / "small", **flags)] == [text[:20] for text in plain]
