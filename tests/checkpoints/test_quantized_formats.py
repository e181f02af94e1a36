"""Quantized matrices of checkpoints against what the formats' own libraries make of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file
from torch import Tensor

from specmamba.checkpoints.quantized.unpack import AWQ_ORDER, e2m1_values
from specmamba.checkpoints.tensor_reader import ShapeReader, TensorReader
from specmamba.errors import CheckpointError, UnsupportedModelError

SHAPE = OUTPUTS, WIDTH = 80, 192
# format of compressed-tensors, what it is given of the weights, dtype of the scales
SCHEMES: dict[str, tuple[str, dict[str, Any], torch.dtype]] = {
    "int4 groups of 32": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}, torch.float32),
    "int4 groups of 64, bf16": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 64},
        torch.bfloat16,
    ),
    "int4 per channel": ("pack-quantized", {"num_bits": 4, "strategy": "channel"}, torch.float16),
    "int4 with zero points": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
        torch.bfloat16,
    ),
    "packed int8": ("pack-quantized", {"num_bits": 8, "strategy": "group", "group_size": 64}, torch.bfloat16),
    "int8 per channel": ("int-quantized", {"num_bits": 8, "strategy": "channel"}, torch.float32),
    "int8 per tensor": ("int-quantized", {"num_bits": 8, "strategy": "tensor"}, torch.float32),
    "fp8 per channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, torch.bfloat16),
    "fp8 per tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}, torch.float32),
    "fp8 blocks": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 64]},
        torch.float32,
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        torch.float32,
    ),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
        torch.float32,
    ),
    "mxfp8": (
        "mxfp8-quantized",
        {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8},
        torch.float32,
    ),
}


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any] | None = None) -> None:
    """Write the parts of the matrix a.weight, and what a config says about them."""
    save_file({f"a.{name}": tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config} if config else {}))


def read(folder: Path, dtype: torch.dtype = torch.float32) -> Tensor:
    """Read a.weight, and nothing may be left over."""
    with TensorReader(folder) as reader:
        assert reader.names() == ("a.weight",)
        found = reader.take("a.weight", SHAPE, dtype)
        reader.finish()
    with ShapeReader(folder) as reader:
        assert reader.take("a.weight", SHAPE).shape == SHAPE
        reader.finish()
    return found


def weights(seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(SHAPE) * torch.rand(OUTPUTS, 1).add(0.1)


def scales_of(weight: Tensor, args: QuantizationArgs, dtype: torch.dtype) -> dict[str, Tensor]:
    """Scales with which the largest weights of a group get the largest codes."""
    if args.strategy == "tensor":
        groups = weight.reshape(1, 1, -1)
    elif args.strategy == "block":
        assert args.block_structure is not None
        rows, columns = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
        blocks = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).transpose(1, 2)
        groups = blocks.flatten(2)
    else:
        groups = weight.unflatten(1, (-1, args.group_size or weight.shape[1]))
    is_float = args.type == "float"
    largest = (448.0 if args.num_bits == 8 else 6.0) if is_float else 2 ** (args.num_bits - 1) - 1
    scale = groups.abs().amax(-1) / largest
    found = {}
    if args.strategy == "tensor_group":
        found["weight_global_scale"] = (448.0 / scale.max()).reshape(1)
        scale = (scale * found["weight_global_scale"]).to(torch.float8_e4m3fn).float()
    if is_float and args.group_size == 32:  # powers of two
        scale = torch.exp2(scale.log2().ceil())
    if args.strategy == "tensor":
        scale = scale.flatten()
    if not args.symmetric:
        found["weight_zero_point"] = torch.randint(-4, 5, scale.shape, dtype=torch.int8)
    return found | {"weight_scale": scale.to(dtype)}


@pytest.mark.parametrize("name", SCHEMES)
def test_compressed_tensors(tmp_path: Path, name: str) -> None:
    form, settings, dtype = SCHEMES[name]
    args = QuantizationArgs(**settings)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    library: Any = BaseCompressor.get_value_from_registry(form)
    weight = weights()
    stored = library.compress({"weight": weight, **scales_of(weight, args, dtype)}, scheme)
    expected = library.decompress(dict(stored), scheme)["weight"]
    stored["input_scale"] = torch.ones(1)  # of activations: not used
    groups = {"group_0": {"weights": args.model_dump(mode="json")}}
    write(tmp_path, stored, {"quant_method": "compressed-tensors", "format": form, "config_groups": groups})
    assert torch.equal(read(tmp_path, expected.dtype), expected)
    assert not args.symmetric or (expected.float() - weight).abs().max() < 0.2 * weight.abs().max()


def fp8(weight: Tensor, rows: int = 128, columns: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales of blocks, and the weights that they stand for."""
    spread = weight.new_empty(-(-OUTPUTS // rows), -(-WIDTH // columns))
    for i in range(len(spread)):
        for j in range(spread.shape[1]):
            spread[i, j] = weight[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns].abs().max() / 448
    full = spread.repeat_interleave(rows, 0)[:OUTPUTS].repeat_interleave(columns, 1)[:, :WIDTH]
    codes = (weight / full).to(torch.float8_e4m3fn)
    return codes, spread, codes.float() * full


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_of_qwen(tmp_path: Path, dtype: torch.dtype) -> None:
    """``weight_scale_inv`` multiplies. The last block of a row or column may be smaller."""
    codes, scale, _ = fp8(weights())
    scale = scale.to(dtype)
    write(
        tmp_path, {"weight": codes, "weight_scale_inv": scale}, {"quant_method": "fp8", "weight_block_size": [128, 128]}
    )
    full = scale.float().repeat_interleave(128, 0)[:OUTPUTS].repeat_interleave(128, 1)[:, :WIDTH]
    assert torch.equal(read(tmp_path), codes.float() * full)


def test_fp8_blocks_of_modelopt(tmp_path: Path) -> None:
    """Scales have a dimension for the places within a block."""
    codes, scale, expected = fp8(weights())
    write(tmp_path, {"weight": codes, "weight_scale": scale[:, None, :, None]}, {"quant_method": "modelopt"})
    assert torch.equal(read(tmp_path), expected)


def test_nvfp4_of_modelopt(tmp_path: Path) -> None:
    """The second scale multiplies; names are those of plain weights."""
    torch.manual_seed(0)
    pairs = torch.randint(0, 256, (OUTPUTS, WIDTH // 2), dtype=torch.uint8)
    scale = torch.rand(OUTPUTS, WIDTH // 16).add(0.1).to(torch.float8_e4m3fn)
    second = torch.tensor(0.013)
    stored = {"weight": pairs, "weight_scale": scale, "weight_scale_2": second, "input_scale": torch.tensor(1.0)}
    write(tmp_path, stored)
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    table = e2m1_values()
    values = torch.stack([table[(pairs & 15).int()], table[(pairs >> 4).int()]], -1).flatten(1)
    assert torch.equal(read(tmp_path), values * (scale.float() * second).repeat_interleave(16, 1))


def test_mxfp4_of_experts(tmp_path: Path) -> None:
    """Blocks of 32 weights of stacked experts, and exponents."""
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (3, 8, 2, 16), dtype=torch.uint8)
    exponents = torch.randint(118, 130, (3, 8, 2), dtype=torch.uint8)
    save_file({"up_blocks": blocks, "up_scales": exponents}, tmp_path / "model.safetensors")
    with TensorReader(tmp_path) as reader:
        found = reader.take("up", (3, 8, 64))
    table = e2m1_values()
    values = torch.stack([table[(blocks & 15).int()], table[(blocks >> 4).int()]], -1).flatten(2)
    assert torch.equal(found, values * torch.exp2(exponents.float() - 127).repeat_interleave(32, 2))


def pack_words(numbers: Tensor, bits: int) -> Tensor:
    """Pack numbers [n, k] along k, the first in the lowest bits: [n, k bits / 32] int32."""
    per_word = 32 // bits
    shifted = numbers.long().unflatten(1, (-1, per_word)) << torch.arange(per_word) * bits
    return shifted.sum(-1).to(torch.uint32).view(torch.int32)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("order", ["none", "in order", "shuffled"])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_gptq(tmp_path: Path, bits: int, order: str, version: str) -> None:
    """Words hold neighbouring inputs of an output. Version 1 stores zero points less one."""
    torch.manual_seed(bits)
    codes = torch.randint(0, 1 << bits, SHAPE)
    zeros, scale = torch.randint(1, 1 << bits, (OUTPUTS, 6)), torch.rand(OUTPUTS, 6).add(0.1).half()
    groups = torch.arange(WIDTH) // 32
    if order == "shuffled":
        groups = groups[torch.randperm(WIDTH)]
    stored = {
        "qweight": pack_words(codes, bits).t(),
        "qzeros": pack_words((zeros - int(version == "gptq")).t(), bits),
        "scales": scale.t(),
    }
    if order != "none":
        stored["g_idx"] = groups.int()
    write(tmp_path, stored, {"quant_method": "gptq", "bits": bits, "checkpoint_format": version})
    expected = (codes - zeros[:, groups]).float() * scale.float()[:, groups]
    assert torch.equal(read(tmp_path), expected)


def test_awq(tmp_path: Path) -> None:
    """Words hold outputs of an input, in an order of their own."""
    torch.manual_seed(0)
    codes = torch.randint(0, 16, SHAPE)
    zeros, scale = torch.randint(0, 16, (OUTPUTS, 3)), torch.rand(OUTPUTS, 3).add(0.1).half()

    def packed(numbers: Tensor) -> Tensor:
        order = torch.tensor(AWQ_ORDER).argsort()
        return pack_words(numbers.t().unflatten(1, (-1, 8))[..., order].flatten(1), 4)

    write(tmp_path, {"qweight": packed(codes), "qzeros": packed(zeros), "scales": scale.t()}, {"quant_method": "awq"})
    groups = torch.arange(WIDTH) // 64
    assert torch.equal(read(tmp_path), (codes - zeros[:, groups]).float() * scale.float()[:, groups])


class TestBadInput:
    @pytest.fixture
    def parts(self) -> dict[str, Tensor]:
        codes, scale, _ = fp8(weights())
        return {"weight": codes, "weight_scale_inv": scale}

    def test_codes_without_scales(self, tmp_path: Path, parts: dict[str, Tensor]) -> None:
        del parts["weight_scale_inv"]
        write(tmp_path, parts)
        with pytest.raises(CheckpointError, match=r"a\.weight is stored as F8_E4M3 .* no scales"):
            read(tmp_path)

    def test_pairs_without_scales(self, tmp_path: Path) -> None:
        """Of NVFP4: their shape is not that of the matrix, and the scales are what is missing."""
        write(tmp_path, {"weight": torch.zeros(OUTPUTS, WIDTH // 2, dtype=torch.uint8)}, {"quant_method": "modelopt"})
        with pytest.raises(CheckpointError, match=r"a\.weight is stored as U8 .* no scales"):
            read(tmp_path)

    def test_scales_without_codes(self, tmp_path: Path, parts: dict[str, Tensor]) -> None:
        del parts["weight"]
        write(tmp_path, parts)
        with pytest.raises(CheckpointError, match=r"a\.weight_scale_inv: what is scaled, a\.weight, is missing"):
            read(tmp_path)

    def test_packed_without_scales(self, tmp_path: Path) -> None:
        write(tmp_path, {"qweight": torch.zeros(WIDTH // 8, OUTPUTS, dtype=torch.int32)})
        with pytest.raises(CheckpointError, match=r"a\.weight: its scales are missing"):
            read(tmp_path)

    def test_stored_twice(self, tmp_path: Path, parts: dict[str, Tensor]) -> None:
        write(tmp_path, parts | {"weight_packed": torch.zeros(2, 2, dtype=torch.int32)})
        with pytest.raises(CheckpointError, match=r"a\.weight is stored twice"):
            read(tmp_path)

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
    def test_scales_that_are_no_use(self, tmp_path: Path, parts: dict[str, Tensor], value: float) -> None:
        parts["weight_scale_inv"][0, 1] = value
        write(tmp_path, parts)
        with pytest.raises(CheckpointError, match=r"a\.weight has scales (that are NaN or infinite|of zero)"):
            read(tmp_path)

    @pytest.mark.parametrize("byte", [0x7F, 0xFF])
    def test_weights_that_are_no_numbers(self, tmp_path: Path, parts: dict[str, Tensor], byte: int) -> None:
        parts["weight"].view(torch.uint8)[OUTPUTS - 1, 3] = byte
        write(tmp_path, parts)
        with pytest.raises(CheckpointError, match=r"a\.weight has weights that are NaN"):
            read(tmp_path)

    def test_zeros_with_scales_of_zero(self, tmp_path: Path) -> None:
        """A block of zeros may have any scale."""
        codes, scale = torch.zeros(SHAPE).to(torch.float8_e4m3fn), torch.zeros(1, 2)
        write(tmp_path, {"weight": codes, "weight_scale_inv": scale})
        assert not read(tmp_path).any()

    @pytest.mark.parametrize("groups", [5, 7])
    def test_groups_that_do_not_divide(self, tmp_path: Path, parts: dict[str, Tensor], groups: int) -> None:
        write(tmp_path, {"weight": parts["weight"], "weight_scale": torch.ones(OUTPUTS, groups)})
        with pytest.raises(CheckpointError, match=f"{groups} groups do not divide 192 inputs"):
            read(tmp_path)

    def test_blocks_that_do_not_fit(self, tmp_path: Path, parts: dict[str, Tensor]) -> None:
        write(tmp_path, {"weight": parts["weight"], "weight_scale_inv": torch.ones(3, 3)})
        with pytest.raises(CheckpointError, match=r"\[3, 3\] scales do not fit blocks of 128 x 128"):
            read(tmp_path)

    def test_another_shape(self, tmp_path: Path, parts: dict[str, Tensor]) -> None:
        write(tmp_path, parts)
        with TensorReader(tmp_path) as reader, pytest.raises(CheckpointError, match=r"shape \[80, 192\].*\[80, 190\]"):
            reader.take("a.weight", (OUTPUTS, 190))

    def test_words_that_do_not_hold_the_weights(self, tmp_path: Path) -> None:
        write(
            tmp_path,
            {"weight_packed": torch.zeros(OUTPUTS, 7, dtype=torch.int32), "weight_scale": torch.ones(OUTPUTS, 1)},
        )
        with pytest.raises(CheckpointError, match="7 words do not hold 192 codes of 4 or 8 bits"):
            read(tmp_path)

    def test_groups_that_are_not_there(self, tmp_path: Path) -> None:
        stored = {
            "qweight": torch.zeros(WIDTH // 8, OUTPUTS, dtype=torch.int32),
            "scales": torch.ones(3, OUTPUTS),
            "g_idx": torch.full((WIDTH,), 3, dtype=torch.int32),
        }
        write(tmp_path, stored, {"quant_method": "gptq"})
        with pytest.raises(CheckpointError, match="g_idx does not name a group"):
            read(tmp_path)

    def test_unknown_method(self, tmp_path: Path, parts: dict[str, Tensor]) -> None:
        write(tmp_path, parts, {"quant_method": "bitsandbytes"})
        with pytest.raises(
            UnsupportedModelError, match="quantized by the method 'bitsandbytes'; specmamba reads auto-round"
        ):
            read(tmp_path)

    @pytest.mark.parametrize("block", [[0, 128], [128], "128", [1 << 40, 1]])
    def test_block_that_is_none(self, tmp_path: Path, parts: dict[str, Tensor], block: Any) -> None:
        write(tmp_path, parts, {"quant_method": "fp8", "weight_block_size": block})
        with pytest.raises(CheckpointError, match="a block of weights should be two sizes"):
            read(tmp_path)

    @pytest.mark.parametrize("groups", [[3], "all", 7, {"group_0": None}, {"group_0": {"weights": [1]}}])
    def test_groups_of_a_config_that_say_nothing(self, tmp_path: Path, parts: dict[str, Tensor], groups: Any) -> None:
        """They are not asked for what the tensors say."""
        write(tmp_path, parts, {"quant_method": "compressed-tensors", "config_groups": groups})
        assert read(tmp_path).shape == SHAPE
