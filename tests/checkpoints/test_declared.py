"""What a config says of bits, groups and kinds of numbers against what is stored: refused by name where they differ."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specmamba.checkpoints.tensor_reader import ShapeReader, TensorReader
from specmamba.errors import CheckpointError
from tests.checkpoints.test_packed_words import CONFIGS
from tests.checkpoints.test_packed_words import write as write_packed
from tests.checkpoints.test_shape_check import OUTPUTS, SHAPE, Parts, complaint, forms, write

E4M3 = torch.float8_e4m3fn
Config = dict[str, Any]


def schemes(*weights: Config) -> Config:
    """A config of compressed-tensors with these groups of layers."""
    groups = {f"group_{i}": {"weights": each} for i, each in enumerate(weights)}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


def fp8(*scales: int) -> Parts:
    """FP8 with so many scales."""
    torch.manual_seed(0)
    return {"weight": torch.randn(SHAPE).to(E4M3), "weight_scale": torch.rand(scales) + 0.5}


def blocks(*size: int) -> Config:
    return {"quant_method": "fp8", "weight_block_size": list(size) or None}


def floats(**settings: Any) -> Config:
    return {"type": "float", "num_bits": 8} | settings


def check(folder: Path, words: str | None) -> None:
    """A reader says this of a.weight, and one of shapes alone the same."""
    for kind in (TensorReader, ShapeReader):
        said = complaint(kind, folder)
        assert said is None if words is None else re.search(words, str(said)), said


@pytest.mark.parametrize(
    ("form", "change", "config", "words"),
    [
        ("nvfp4", {"weight_scale": torch.ones(OUTPUTS, 2).to(E4M3)}, {}, "for groups of 32 inputs; .* groups of 16"),
        ("nvfp4", {"weight_scale": torch.ones(1).to(E4M3)}, {}, "for the whole matrix; .* groups of 16"),
        ("mxfp4", {"weight_scale": torch.full((OUTPUTS, 4), 127, dtype=torch.uint8)}, {}, "of 16 inputs; .* of 32"),
        ("mxfp8", {"weight_scale": torch.full((OUTPUTS, 1), 127, dtype=torch.uint8)}, {}, "whole outputs; .* of 32"),
        ("packed", {}, schemes({"group_size": 16}), "of 32 inputs; .* of 16"),
        ("packed", {"weight_scale": torch.ones(OUTPUTS, 1)}, schemes({"group_size": 32}), "whole outputs; .* of 32"),
        ("packed", {}, schemes({"strategy": "channel"}), "of 32 inputs; .* whole outputs"),
        ("packed", {}, schemes({"group_size": 16}, {"group_size": 32}), None),
        ("int8", {}, schemes({"group_size": 32}), "whole outputs; .* of 32"),
        ("int8", {}, schemes({"group_size": 32}, {"strategy": "channel", "group_size": None}), None),
        ("int8", {}, schemes({"group_size": 128}), None),  # a matrix has fewer inputs
        ("gptq", {}, {"quant_method": "gptq", "group_size": 16}, "of 32 inputs; .* of 16"),
        ("gptq", {}, {"quant_method": "gptq", "group_size": -1}, "of 32 inputs; .* whole outputs"),
        ("gptq", {}, {"quant_method": "gptq", "group_size": 16, "dynamic": {"a": {"group_size": 32}}}, None),
        ("gptq", {}, {"quant_method": "auto-round", "group_size": 64}, "of 32 inputs; .* of 64"),
        ("awq", {}, {"quant_method": "awq", "group_size": 16}, "of 32 inputs; .* of 16"),
        ("awq", {}, {"quant_method": "awq", "group_size": "16"}, "a group should be a number of inputs, but is '16'"),
        ("awq", {}, {"quant_method": "awq", "group_size": 0}, "a group should be a number of inputs, but is 0"),
    ],
)
def test_groups(form: str, change: Parts, config: Config, words: str | None, tmp_path: Path) -> None:
    """A format has one size, and a config says which ones whole numbers have, in whatever layer."""
    write(tmp_path, forms()[form][0] | change, config)
    check(tmp_path, words)


@pytest.mark.parametrize(
    ("scales", "config", "words"),
    [
        ((2, 2), blocks(16, 32), None),
        ((2, 2), blocks(16, 16), r"a\.weight: \[2, 2\] scales do not fit blocks of 16 x 16"),
        ((1,), blocks(16, 32), "for the whole matrix; .* blocks of 16 x 32"),
        ((OUTPUTS, 1), blocks(16, 32), "for whole outputs; .* blocks of 16 x 32"),
        ((OUTPUTS,), blocks(16, 32), "for whole outputs; .* blocks of 16 x 32"),
        ((OUTPUTS, 2), blocks(16, 32), "for groups of 32 inputs; .* blocks of 16 x 32"),
        ((OUTPUTS, 2), blocks(1, 32), None),
        ((1,), blocks(128, 128), None),  # a matrix that is one block
        ((1,), blocks(), None),
        ((OUTPUTS, 1), blocks(), None),
        ((OUTPUTS, 2), blocks(), "for groups of 32 inputs; .* the whole matrix or whole outputs"),
        ((2, 2), blocks(), "do not fit the whole matrix or whole outputs"),
        ((OUTPUTS, 2), {"quant_method": "fp8"}, None),  # it does not say
        ((1,), schemes(floats(strategy="tensor")), None),
        ((OUTPUTS, 1), schemes(floats(strategy="tensor")), "for whole outputs; .* the whole matrix"),
        ((2, 2), schemes(floats(strategy="tensor")), "do not fit the whole matrix"),
        ((OUTPUTS, 1), schemes(floats(strategy="channel")), None),
        ((1,), schemes(floats(strategy="channel")), "for the whole matrix; .* whole outputs"),
        ((OUTPUTS, 2), schemes(floats(strategy="channel")), "for groups of 32 inputs; .* whole outputs"),
        ((OUTPUTS, 2), schemes(floats(strategy="group", group_size=32)), None),
        ((OUTPUTS, 4), schemes(floats(strategy="group", group_size=32)), "for groups of 16 inputs; .* of 32"),
        ((2, 2), schemes(floats(strategy="block", block_structure=[16, 32])), None),
        ((2, 2), schemes(floats(strategy="block", block_structure="16x32")), None),  # as older files write it
        ((4, 2), schemes(floats(strategy="block", block_structure=[16, 32])), "do not fit blocks of 16 x 32"),
        ((2, 2), schemes(floats(strategy="channel"), floats(strategy="block", block_structure=[16, 32])), None),
        ((1,), {"quant_method": "modelopt", "quant_algo": "FP8"}, None),
        ((OUTPUTS,), {"quant_method": "modelopt", "quant_algo": "FP8"}, "for whole outputs; .* the whole matrix"),
        ((OUTPUTS,), {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, None),
        ((2, 2), {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, "do not fit blocks of 128 x 128"),
        ((OUTPUTS, 2), {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, None),  # without a list
        (
            (OUTPUTS, 2),
            {"quant_method": "modelopt", "quantized_layers": {"a": {"quant_algo": "FP8"}}},
            "for groups of 32 inputs; .* the whole matrix",
        ),
    ],
)
def test_scales_of_fp8(scales: tuple[int, ...], config: Config, words: str | None, tmp_path: Path) -> None:
    """Per tensor, per output, in groups and in blocks: as the config says, in any of its layers."""
    write(tmp_path, fp8(*scales), config)
    check(tmp_path, words)


@pytest.mark.parametrize("case", sorted(CONFIGS))
@pytest.mark.parametrize("nested", [False, True])
def test_bits_of_words(case: str, nested: bool, tmp_path: Path) -> None:
    """Files of gptqmodel, auto-round and autoawq beside the other number of bits, and beside both."""
    bits = CONFIGS[case]["bits"]
    said = {"bits": 12 - bits} | ({"dynamic": {"+:a": {"bits": bits}}} if nested else {})
    expected = write_packed(tmp_path, case, CONFIGS[case] | said)
    for kind in (TensorReader, ShapeReader):
        with kind(tmp_path) as reader:
            if nested:
                assert reader.take_quantized("a.weight", tuple(expected.shape)).shape == expected.shape
                continue
            words = rf"a\.weight is stored in codes of {bits} bits; its config says {12 - bits}"
            with pytest.raises(CheckpointError, match=words):
                reader.take_quantized("a.weight", tuple(expected.shape))


@pytest.mark.parametrize("plain", [{"bits": 16, "data_type": "float"}, {"bits": 16}, {"bits": 8, "data_type": "fp8"}])
def test_layers_that_are_not_in_whole_numbers(plain: Config, tmp_path: Path) -> None:
    """auto-round lists layers that it leaves as they are, or in floats: what it says of their groups is not read."""
    config = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "data_type": "int"}
    write(tmp_path, forms()["gptq"][0], config | {"extra_config": {"b": plain | {"group_size": 0}}})
    check(tmp_path, None)
    write(tmp_path, forms()["gptq"][0], config | {"group_size": 64, "extra_config": {"a": plain | {"group_size": 32}}})
    check(tmp_path, "of 32 inputs; .* of 64")
    write(tmp_path, forms()["gptq"][0], config | {"extra_config": {"b": {"bits": 4, "group_size": 0}}})
    check(tmp_path, "a group should be a number of inputs, but is 0")


BITS_OF_4 = r"a\.weight is stored in codes of 4 bits; its config says 8"
BITS_OF_16 = r"a\.weight is stored in codes of 8 bits; its config says 16"


@pytest.mark.parametrize(
    ("form", "config", "words"),
    [
        ("packed", schemes({"num_bits": 4, "group_size": 32}), None),
        ("packed", schemes({"num_bits": 8, "group_size": 32}), BITS_OF_4),
        ("packed", schemes({"num_bits": 8}, {"num_bits": 4, "group_size": 32}), None),
        ("packed with zeros", schemes({"num_bits": 8}), BITS_OF_4),
        ("int8", schemes({"num_bits": 4, "strategy": "channel"}), None),  # as with inputs of 8 bits: a byte for each
        ("int8", schemes({"num_bits": 16, "strategy": "channel"}), BITS_OF_16),
        ("int8", schemes({"num_bits": 8, "strategy": "channel"}), None),
        ("int8", schemes({"num_bits": "8"}), "num_bits should be a number of bits, but is '8'"),
        ("gptq", {"quant_method": "gptq", "bits": 0}, "bits should be a number of bits, but is 0"),
    ],
)
def test_bits_of_compressed_tensors(form: str, config: Config, words: str | None, tmp_path: Path) -> None:
    write(tmp_path, forms()[form][0], config)
    check(tmp_path, words)


@pytest.mark.parametrize(
    ("form", "config", "words"),
    [
        ("nvfp4", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, None),
        ("nvfp4", {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, None),
        ("nvfp4", {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "of 16 inputs; .* of 32"),
        ("nvfp4", {"quant_method": "mxfp4"}, "of 16 inputs; .* of 32"),
        ("nvfp4", schemes({"type": "float", "num_bits": 4, "group_size": 32}), "of 16 inputs; .* of 32"),
        ("mxfp4", {"quant_method": "mxfp4"}, None),
        ("mxfp4", {"quant_method": "modelopt", "quant_algo": "W4A8_MXFP4_FP8"}, None),
        ("mxfp4", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "of 32 inputs; .* of 16"),
        ("mxfp8", {"quant_method": "mxfp8"}, None),
        ("mxfp8", {"quant_method": "modelopt", "quant_algo": "MXFP8"}, None),
        ("mxfp8", blocks(1, 32), None),
        ("mxfp8", blocks(128, 128), "of 32 inputs; .* blocks of 128 x 128"),
        ("nvfp4", {"quant_method": "modelopt", "quant_algo": "FP8"}, "says FP8, but a.weight and all others are FP4"),
        ("fp8 per tensor", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "says FP4, but a.weight .* are FP8"),
        ("fp8 per tensor", {"quant_method": "mxfp4"}, "says FP4, but a.weight and all others are FP8"),
        ("nvfp4", blocks(128, 128), "says FP8, but a.weight and all others are FP4"),
        ("int8", blocks(128, 128), "says FP8, but a.weight and all others are whole numbers"),
        ("packed", schemes({"type": "float", "num_bits": 8}), "says FP8, but a.weight .* are whole numbers"),
        ("fp8 per tensor", schemes({"num_bits": 8}), "says whole numbers, but a.weight and all others are FP8"),
        ("nvfp4", {"quant_method": "gptq", "bits": 4}, "says whole numbers, but a.weight and all others are FP4"),
        ("fp8 per tensor", {"quant_method": "auto-round", "data_type": "fp8"}, None),  # of which nothing is known
    ],
)
def test_kinds_of_floats(form: str, config: Config, words: str | None, tmp_path: Path) -> None:
    write(tmp_path, forms()[form][0], config)
    check(tmp_path, words)


def test_heads_of_another_kind(tmp_path: Path) -> None:
    """Beside matrices of the kind that the config says, one of another may stand: a head that was added later."""
    write(tmp_path, forms()["packed"][0], schemes({"num_bits": 4, "group_size": 32}))
    others = {f"mtp.{name}": part for name, part in fp8(2, 2).items()}
    file = tmp_path / "model.safetensors"
    tensors: dict[str, Tensor] = load_file(file)
    save_file(tensors | others, file)
    with TensorReader(tmp_path) as reader, pytest.raises(CheckpointError, match="do not fit blocks of 128 x 128"):
        reader.take("mtp.weight", SHAPE)  # of FP8 the config says nothing
    others["mtp.weight_scale"] = torch.ones(OUTPUTS, 1)
    save_file(tensors | others, file)
    with TensorReader(tmp_path) as reader:
        assert reader.take("mtp.weight", SHAPE).shape == reader.take("a.weight", SHAPE).shape
        reader.finish()


def test_the_file_of_modelopt(tmp_path: Path) -> None:
    """It holds what config.json leaves out."""
    write(tmp_path, fp8(OUTPUTS), {"quant_method": "modelopt"})
    check(tmp_path, None)
    own = tmp_path / "hf_quant_config.json"
    own.write_text('{"quantization": {"quant_algo": "FP8"}}')
    check(tmp_path, "for whole outputs; .* the whole matrix")
    own.write_text('{"quantization": []}')
    check(tmp_path, "quantization should be an object")


def test_blocks_of_exponents(tmp_path: Path) -> None:
    """Powers of two, but for the blocks that the config names, as of DeepSeek's later releases."""
    parts = fp8(2, 2)
    exponents = torch.tensor([[127, 128], [126, 129]], dtype=torch.uint8)
    write(tmp_path, parts | {"weight_scale": exponents}, blocks(16, 32))
    with TensorReader(tmp_path) as reader:
        found = reader.take("a.weight", SHAPE)
    full = torch.exp2(exponents.float() - 127).repeat_interleave(16, 0).repeat_interleave(32, 1)
    assert torch.equal(found, parts["weight"].float() * full)


def test_one_output_in_blocks(tmp_path: Path) -> None:
    """The last block of its inputs is shorter; two scales are not for halves."""
    weight, scale = torch.ones(1, 200).to(E4M3), torch.tensor([[1.0, 2.0]])
    write(tmp_path, {"weight": weight, "weight_scale_inv": scale}, blocks(128, 128))
    with TensorReader(tmp_path) as reader:
        assert reader.take("a.weight", (1, 200)).sum() == 128 + 2 * 72
