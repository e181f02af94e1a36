"""Quantized checkpoints as a GPU keeps them: in codes, with the sizes that are known without their values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specmamba.config import EngineConfig
from specmamba.engine.loading import _require_codes
from specmamba.errors import ConfigError
from specmamba.kernels import gpu, linear
from specmamba.kernels.linear import QuantizedMatrix, native_ops
from specmamba.models.base import LoadOptions
from specmamba.models.registry import load_model
from tests.models.published.quantized import CHECKPOINTS, VARIANTS
from tests.models.published.test_published_quantized import write
from tests.tiny import WHOLE_BLOCKS, write_tiny_checkpoint

PUBLISHED = CHECKPOINTS | VARIANTS
CUDA = torch.device("cuda")

pytest.importorskip("triton")


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights on the CPU are laid out as on a GPU, and never dequantized but for embeddings."""
    monkeypatch.setattr(gpu, "is_interpreted", lambda: True)
    monkeypatch.setattr(native_ops, "pack_codes", None)


def write_mxfp8(folder: Path) -> int:
    """Turn the matrices of a checkpoint into e4m3 with a power of two for every 32 inputs; returns their number."""
    stored, count = {}, 0
    for name, x in load_file(folder / "model.safetensors").items():
        kept = x.dim() != 2 or x.shape[1] % 32 or any(part in name for part in ("embed", "lm_head", "conv1d", "_gate."))
        if kept:
            stored[name] = x
            continue
        largest = x.float().unflatten(1, (-1, 32)).abs().amax(2)
        exponent = torch.frexp(largest).exponent - 8
        scale = torch.ldexp(torch.ones_like(largest), exponent)
        stored[name] = (x.float() / scale.repeat_interleave(32, 1)).to(torch.float8_e4m3fn)
        stored[f"{name}_scale"], count = (exponent + 127).to(torch.uint8), count + 1
    save_file(stored, folder / "model.safetensors")
    return count


def options(device: str, layout: str = "cpu") -> LoadOptions:
    return LoadOptions(
        torch.bfloat16,
        torch.device(device),
        want_draft_head=True,
        keeps_codes=True,
        draft_keeps_codes=True,
        layout_device_type=layout,
    )


@pytest.mark.parametrize("name", [name for name in PUBLISHED if "GPTQ" not in name])
def test_published_checkpoints(name: str, tmp_path: Path, pretended: None) -> None:
    write(tmp_path / "small", PUBLISHED[name])
    model, shapes = (load_model(tmp_path / "small", options(device)) for device in ("cpu", "meta"))
    assert model.weight_bytes == shapes.weight_bytes
    assert model.num_parameters == shapes.num_parameters


def test_mxfp8(tmp_path: Path, pretended: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps its groups of 32 on a GPU, where a CPU rounds them anew to groups of 128."""
    write_tiny_checkpoint(tmp_path, seed=1, **WHOLE_BLOCKS)
    assert write_mxfp8(tmp_path) > 5
    monkeypatch.setattr(QuantizedMatrix, "dequantize", None)
    kept = load_model(tmp_path, options("cpu")).weight_bytes
    assert kept == load_model(tmp_path, options("meta", "cuda")).weight_bytes
    monkeypatch.setattr(gpu, "is_interpreted", lambda: False)
    assert kept > load_model(tmp_path, options("meta")).weight_bytes


@pytest.mark.parametrize("form", ["int4", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_forms_are_not_refused_on_a_gpu(form: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"quantization": form, "speculative_draft_model_quantization": form}
    config = EngineConfig.model_validate(flags)
    monkeypatch.setattr(gpu, "_is_on", lambda: True)
    _require_codes(config, dtype, CUDA)
    assert linear.runs_codes(CUDA, dtype)
    monkeypatch.setattr(gpu, "_is_on", lambda: False)
    with pytest.raises(ConfigError, match=f"--quantization {form} needs .* or Triton on a GPU; this is .* on cuda"):
        _require_codes(config, dtype, CUDA)
