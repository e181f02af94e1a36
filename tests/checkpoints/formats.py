"""Small checkpoints of Qwen3.5 with a draft head in every quantized format that loads, by the formats' own libraries.

The matrices of layers are quantized; in GGUF, embedding and output head too. Types of GGUF that the gguf library reads
and does not write have random codes, with scales that give weights the usual size.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file
from torch import Tensor

from specmamba.checkpoints.quantized.unpack import AWQ_ORDER
from tests.checkpoints.data.make_quantized_gguf import NUM_TOKENS, shorten_tokenizer
from tests.checkpoints.test_quantized_formats import SCHEMES, pack_words, scales_of
from tests.gguf_files import F32, write_gguf
from tests.tiny import FULL, LINEAR, write_tiny_checkpoint

# Rows of all matrices are multiples of 256 weights, as types of K need.
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
    "vocab_size": NUM_TOKENS,
    "layer_types": [LINEAR, FULL],
}
GROUP = 32
Parts = dict[str, Tensor]
Encoded = Callable[[Tensor], Parts]  # a weight [N, K] to its tensors, by name behind the module's
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # float16 in a block
HALVES |= dict.fromkeys(("IQ4_NL", "IQ4_XS", "IQ3_S"), (0,))


def write_base(folder: Path, **sizes: Any) -> Path:
    """The checkpoint that the others are made of, in float32; ``sizes``: in place of those of ``SIZES``."""
    write_tiny_checkpoint(folder, 3, **(SIZES | sizes))
    shorten_tokenizer(folder / "tokenizer.json")
    return folder


def gguf(kind: str, base: Path, out: Path) -> Path:
    """A GGUF file with all matrices in one type."""
    number = GGMLQuantizationType[kind]
    encode = random_blocks if kind in HALVES else quantize
    return write_gguf(
        base, out.with_suffix(".gguf"), lambda name, shape: number if shape[0] > 4 else F32, encode=encode
    )


def random_blocks(values: Any, kind: GGMLQuantizationType) -> Any:
    """Blocks of random codes, whose weights have about the spread of these values, and a mean of zero."""
    if kind.name not in HALVES:
        return quantize(values, kind)
    weights, num_bytes = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(values.size)
    blocks = rng.integers(0, 256, (len(values), values.shape[1] // weights, num_bytes), dtype=np.uint8)

    def filled(*numbers: float) -> Any:
        for at, number in zip(HALVES[kind.name], numbers, strict=True):
            blocks[..., at : at + 2] = np.frombuffer(np.float16(number).tobytes(), np.uint8)
        return blocks.reshape(len(values), -1)

    scales = [1.0]
    if len(HALVES[kind.name]) == 2:  # and of minima
        of_codes, of_minima = (dequantize(filled(*each), kind).mean() for each in ((1.0, 0.0), (0.0, 1.0)))
        scales.append(-of_codes / of_minima)
    size = values.std() / dequantize(filled(*scales), kind).std()
    return filled(*(size * scale for scale in scales))


def folder_with(config: dict[str, Any], encode: Encoded, base: Path, out: Path, own_file: bool = False) -> Path:
    """A folder whose layers' matrices are stored in these parts; ``own_file``: ModelOpt's holds the config."""
    shutil.copytree(base, out)
    tensors: Parts = {}
    for name, tensor in load_file(base / "model.safetensors").items():
        is_matrix = tensor.dim() == 2 and not any(
            part in name for part in ("embed", "lm_head", "in_proj_a", "in_proj_b")
        )
        module = name.removesuffix(".weight")
        parts = encode(tensor) if is_matrix else {}
        tensors |= {f"{module}.{part}": x.contiguous() for part, x in parts.items()} or {name: tensor}
    save_file(tensors, out / "model.safetensors")
    described = json.loads((out / "config.json").read_text())
    if own_file:
        (out / "hf_quant_config.json").write_text(json.dumps({"quantization": config}))
    else:
        (out / "config.json").write_text(json.dumps(described | {"quantization_config": config}))
    return out


def compressed(name: str, base: Path, out: Path) -> Path:
    """Of compressed-tensors, by its own library."""
    form, settings, dtype = SCHEMES[name]
    args = QuantizationArgs(**settings)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    library: Any = BaseCompressor.get_value_from_registry(form)

    def encode(weight: Tensor) -> Parts:
        parts: Parts = library.compress({"weight": weight, **scales_of(weight, args, dtype)}, scheme)
        return parts

    groups = {"group_0": {"weights": args.model_dump(mode="json")}}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}
    return folder_with(config, encode, base, out)


def nvfp4_of_modelopt(weight: Tensor) -> Parts:
    """As compressed-tensors packs it; the scale of scales multiplies."""
    form, settings, dtype = SCHEMES["nvfp4"]
    args = QuantizationArgs(**settings)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    library: Any = BaseCompressor.get_value_from_registry(form)
    parts = library.compress({"weight": weight, **scales_of(weight, args, dtype)}, scheme)
    second = 1 / parts["weight_global_scale"].float().reshape(())
    return {"weight": parts["weight_packed"], "weight_scale": parts["weight_scale"], "weight_scale_2": second}


def fp8_of_modelopt(weight: Tensor) -> Parts:
    """With a scale per tensor."""
    scale = weight.abs().max() / 448
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def fp8_in_blocks(weight: Tensor) -> Parts:
    """Of Qwen: 128 x 128."""
    blocks = torch.nn.functional.pad(weight, (0, -weight.shape[1] % 128, 0, -weight.shape[0] % 128))
    blocks = blocks.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    scale = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scale[:, None, :, None]).flatten(0, 1).flatten(1)[: weight.shape[0], : weight.shape[1]]
    return {"weight": codes.to(torch.float8_e4m3fn), "weight_scale_inv": scale}


def rounded(weight: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [N, K], zero points [N, G] and scales [N, G] float16: from the least weight of a group to the largest."""
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scale = ((high - low) / ((1 << bits) - 1)).half()
    zeros = (-low / scale.float()).round().clamp(1, (1 << bits) - 1).int()
    codes = (groups / scale.float()[..., None]).round() + zeros[..., None]
    return codes.clamp(0, (1 << bits) - 1).flatten(1).int(), zeros, scale


def gptq(weight: Tensor, bits: int, shuffled: bool = False) -> Parts:
    """Version 2; ``shuffled``: inputs of a group do not lie side by side."""
    width = weight.shape[1]
    order = torch.randperm(width, generator=torch.Generator().manual_seed(0)) if shuffled else torch.arange(width)
    codes, zeros, scale = rounded(weight[:, order], bits)
    parts = {"qweight": pack_words(codes[:, order.argsort()], bits).t(), "qzeros": pack_words(zeros.t(), bits)}
    return parts | {"scales": scale.t(), "g_idx": (order.argsort() // GROUP).int()}


def awq(weight: Tensor) -> Parts:
    codes, zeros, scale = rounded(weight, 4)
    order = torch.tensor(AWQ_ORDER).argsort()
    words = (pack_words(x.t().unflatten(1, (-1, 8))[..., order].flatten(1), 4) for x in (codes, zeros))
    return {"qweight": next(words), "qzeros": next(words), "scales": scale.t()}


GPTQ = {"quant_method": "gptq", "group_size": GROUP, "checkpoint_format": "gptq_v2"}
FORMATS: dict[str, Callable[[Path, Path], Path]] = {
    **{f"GGUF {kind}": partial(gguf, kind) for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", *HALVES)},
    **{f"compressed-tensors {name}": partial(compressed, name) for name in SCHEMES},
    "FP8 blocks of Qwen": partial(folder_with, {"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8_in_blocks),
    "ModelOpt NVFP4": partial(folder_with, {"quant_algo": "NVFP4", "group_size": 16}, nvfp4_of_modelopt, own_file=True),
    "ModelOpt FP8": partial(folder_with, {"quant_algo": "FP8"}, fp8_of_modelopt, own_file=True),
    "GPTQ 4": partial(folder_with, GPTQ | {"bits": 4}, partial(gptq, bits=4)),
    "GPTQ 8": partial(folder_with, GPTQ | {"bits": 8}, partial(gptq, bits=8)),
    "GPTQ 4 act order": partial(
        folder_with, GPTQ | {"bits": 4, "desc_act": True}, partial(gptq, bits=4, shuffled=True)
    ),
    "AWQ": partial(folder_with, {"quant_method": "awq", "bits": 4, "group_size": GROUP}, awq),
    "auto-round": partial(
        folder_with,
        {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "packing_format": "auto_round:auto_awq"},
        awq,
    ),
}
DEQUANTIZED = {"GGUF Q2_K", "GGUF Q3_K", "GGUF IQ4_XS", "GGUF IQ3_S", "GPTQ 4 act order"}  # when they are loaded
