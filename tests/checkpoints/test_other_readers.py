"""Quantized matrices against the loaders of transformers and of compressed-tensors, bit for bit, on random codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from specmamba.checkpoints.tensor_reader import TensorReader

E4M3 = torch.float8_e4m3fn


def take(folder: Path, parts: dict[str, Tensor], config: dict[str, Any], name: str, shape: tuple[int, ...]) -> Tensor:
    """Write the parts of a matrix and the config, and read the matrix."""
    save_file({part: x.contiguous() for part, x in parts.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    with TensorReader(folder) as reader:
        assert reader.names() == (name,)
        found = reader.take(name, shape)
        reader.finish()
    return found


def random_e4m3(*shape: int) -> Tensor:
    """All codes but those of NaN."""
    codes = torch.randint(0, 256, shape, dtype=torch.uint8)
    return codes.masked_fill(codes & 0x7F == 0x7F, 0x7E).view(E4M3)


@pytest.mark.parametrize("exponents", [(1, 200), (118, 130)], ids=["far", "near"])
def test_mxfp4_of_experts(exponents: tuple[int, int], tmp_path: Path) -> None:
    """As transformers loads gpt-oss where it does not keep codes; it also swaps inputs and outputs."""
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (3, 24, 4, 16), dtype=torch.uint8)
    scales = torch.randint(*exponents, (3, 24, 4), dtype=torch.uint8)
    name, shape = "mlp.experts.gate_up_proj", (3, 24, 128)
    found = take(tmp_path, {f"{name}_blocks": blocks, f"{name}_scales": scales}, {"quant_method": "mxfp4"}, name, shape)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    assert found.unique().numel() > 16
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [(128, 128), (64, 32)])
def test_fp8_blocks(block: tuple[int, int], dtype: torch.dtype, tmp_path: Path) -> None:
    """As transformers dequantizes checkpoints of fine-grained FP8."""
    torch.manual_seed(0)
    shape = 256, 384
    codes = random_e4m3(*shape)
    scale = (torch.rand(shape[0] // block[0], shape[1] // block[1]) * 0.01 + 1e-4).to(dtype)
    config = {"quant_method": "fp8", "weight_block_size": list(block)}
    found = take(tmp_path, {"a.weight": codes, "a.weight_scale_inv": scale}, config, "a.weight", shape)
    library = Fp8Dequantize(None)
    expected = library.convert({"weight": codes, "weight_scale_inv": scale.float()})["weight"]
    assert expected.dtype is torch.float32
    assert torch.equal(found, expected)
    as_stored = library.convert({"weight": codes, "weight_scale_inv": scale})["weight"]
    assert torch.equal(found.to(dtype), as_stored)


def test_nvfp4_of_modelopt(tmp_path: Path) -> None:
    """Its second scale multiplies; that of compressed-tensors is the reciprocal, here a power of two and so exact."""
    torch.manual_seed(0)
    shape = outputs, width = 32, 128
    pairs = torch.randint(0, 256, (outputs, width // 2), dtype=torch.uint8)
    scale = (torch.rand(outputs, width // 16) * 400 + 1).to(E4M3)
    second = torch.tensor(2.0**-11)
    parts = {"a.weight": pairs, "a.weight_scale": scale, "a.weight_scale_2": second}
    found = take(tmp_path, parts, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "a.weight", shape)
    args = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16)
    codes = unpack_fp4_from_uint8(pairs, outputs, width, dtype=torch.float32)
    expected = dequantize(
        codes, scale.float(), args=args, global_scale=second.reciprocal().reshape(1), dtype=torch.float32
    )
    assert found.unique().numel() > 50
    assert torch.equal(found, expected)
