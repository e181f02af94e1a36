"""Parts of quantized matrices that do not fit: refused without values read, in the words that loading uses."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specmamba.checkpoints.tensor_reader import ShapeReader, TensorReader
from specmamba.cli import main
from specmamba.errors import CheckpointError
from tests.families import FAMILIES

SHAPE = OUTPUTS, WIDTH = 32, 64
Parts = dict[str, Tensor]


def forms() -> dict[str, tuple[Parts, dict[str, Any]]]:
    """Of each format: parts that fit, whose values are of use, and the config."""
    torch.manual_seed(0)
    fp8, words = torch.float8_e4m3fn, torch.zeros(OUTPUTS, WIDTH // 8, dtype=torch.int32)
    pairs, ones = torch.zeros(OUTPUTS, WIDTH // 2, dtype=torch.uint8), torch.ones(OUTPUTS, 4)
    bytes_ = torch.randn(SHAPE)
    zeros = torch.zeros(OUTPUTS // 8, 2, dtype=torch.int32)
    gptq = {"qweight": words.t(), "qzeros": zeros.t(), "scales": torch.ones(2, OUTPUTS).half()}
    awq = {
        "qweight": torch.zeros(WIDTH, OUTPUTS // 8, dtype=torch.int32),
        "qzeros": zeros.t(),
        "scales": gptq["scales"],
    }
    int8 = {"weight": bytes_.to(torch.int8), "weight_scale": torch.ones(OUTPUTS, 1)}
    packed = {"weight_packed": words, "weight_scale": torch.ones(OUTPUTS, 2).bfloat16()}
    return {
        "blocks": (
            {"weight": bytes_.to(fp8), "weight_scale_inv": torch.ones(2, 2)},
            {"quant_method": "fp8", "weight_block_size": [16, 32]},
        ),
        "fp8 per tensor": ({"weight": bytes_.to(fp8), "weight_scale": torch.tensor(2.0)}, {}),
        "mxfp8": ({"weight": bytes_.to(fp8), "weight_scale": torch.full((OUTPUTS, 2), 127, dtype=torch.uint8)}, {}),
        "int8": (int8 | {"weight_zero_point": torch.zeros(OUTPUTS, 1, dtype=torch.int8)}, {}),
        "packed": (
            packed | {"weight_shape": torch.tensor(SHAPE), "weight_g_idx": torch.full((WIDTH,), -1).int()},
            {"quant_method": "compressed-tensors"},
        ),
        "packed with zeros": (packed | {"weight_zero_point": zeros}, {"quant_method": "compressed-tensors"}),
        "nvfp4": ({"weight": pairs, "weight_scale": ones.to(fp8), "weight_scale_2": torch.tensor(0.5)}, {}),
        "nvfp4 divided": (
            {"weight_packed": pairs, "weight_scale": ones.to(fp8), "weight_global_scale": torch.ones(1)},
            {},
        ),
        "mxfp4": ({"weight_packed": pairs, "weight_scale": torch.full((OUTPUTS, 2), 127, dtype=torch.uint8)}, {}),
        "gptq": (gptq | {"g_idx": torch.arange(WIDTH).int() // 32}, {"quant_method": "gptq"}),
        "awq": (awq, {"quant_method": "awq"}),
    }


def write(folder: Path, parts: Parts, config: dict[str, Any]) -> None:
    save_file({f"a.{name}": part.contiguous() for name, part in parts.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config} if config else {}))


def complaint(kind: type[TensorReader], folder: Path) -> str | None:
    """What a reader says of a.weight; None: it has the right shape. Other errors than ours fail the test."""
    try:
        with kind(folder) as reader:
            assert reader.take("a.weight", SHAPE).shape == SHAPE
    except CheckpointError as error:
        return str(error)
    return None


def changed(part: Tensor, rng: random.Random) -> Tensor:
    """A part of another shape or type, whose values are of use as far as its type allows."""
    dim = rng.randrange(max(part.dim(), 1))
    grown = [size * 2 if i == dim else size for i, size in enumerate(part.shape)]
    choices: list[Callable[[], Tensor]] = [
        lambda: part.repeat(*(2 if i == dim else 1 for i in range(part.dim()))) if part.dim() else part.expand(3),
        lambda: part.narrow(dim, 0, part.shape[dim] // 2) if part.dim() else part.expand(2, 2),
        part.flatten,
        lambda: part[None],
        lambda: part.t() if part.dim() == 2 else part.expand(5, *part.shape),
        lambda: torch.ones(grown).to(rng.choice([torch.float32, torch.bfloat16, torch.int8, torch.uint8, torch.int32])),
        lambda: torch.ones(part.shape).to(rng.choice([torch.float16, torch.int64, torch.float8_e4m3fn, torch.bool])),
        lambda: part.new_zeros(0),
    ]
    return rng.choice(choices)()


@pytest.mark.parametrize("form", forms())
def test_info_and_loading_agree(form: str, tmp_path: Path) -> None:
    parts, config = forms()[form]
    write(tmp_path, parts, config)
    assert complaint(TensorReader, tmp_path) is None
    assert complaint(ShapeReader, tmp_path) is None
    rng, refused = random.Random(form), 0
    for _ in range(60):
        name = rng.choice(list(parts))
        write(tmp_path, parts | {name: changed(parts[name], rng)}, config)
        by_values = complaint(TensorReader, tmp_path)
        assert complaint(ShapeReader, tmp_path) == by_values
        refused += by_values is not None
    assert refused > 20


@pytest.mark.parametrize(
    ("form", "change", "words"),
    [
        ("blocks", {"weight_scale_inv": torch.ones(3, 2)}, r"\[3, 2\] scales do not fit blocks of 16 x 32"),
        ("nvfp4", {"weight_scale": torch.ones(OUTPUTS, 5).to(torch.float8_e4m3fn)}, "5 groups do not divide 64 inputs"),
        ("nvfp4", {"weight_scale": torch.ones(OUTPUTS, 4)}, "codes of uint8 beside scales of torch.float32"),
        ("nvfp4", {"weight_scale_2": torch.ones(3)}, r"\[3\] scales of its scales do not fit"),
        ("int8", {"weight_zero_point": torch.zeros(OUTPUTS, 2)}, "zero points do not fit its scales"),
        ("packed", {"weight_shape": torch.tensor([32, 60])}, r"has the shape \[32, 60\], but its config.json asks"),
        ("packed", {"weight_shape": torch.ones(1000).long()}, "its weight_shape has not 2 sizes"),
        ("packed", {"weight_g_idx": torch.arange(32).int()}, "its g_idx does not name a group for each input"),
        ("packed", {"weight_packed": torch.zeros(32, 7).int()}, "7 words do not hold 64 codes of 4 or 8 bits"),
        ("gptq", {"qzeros": torch.zeros(2, 3).int()}, "zero points do not fit its scales"),
        ("awq", {"scales": torch.ones(3, OUTPUTS)}, "do not fit its scales|groups do not divide"),
        ("awq", {"qzeros": torch.tensor(1).int()}, "its parts do not make a matrix"),
        ("fp8 per tensor", {"weight": torch.zeros(SHAPE).to(torch.float8_e5m2)}, "is stored as F8_E5M2"),
    ],
)
def test_what_is_said(form: str, change: Parts, words: str, tmp_path: Path) -> None:
    parts, config = forms()[form]
    write(tmp_path, parts | change, config)
    for kind in (TensorReader, ShapeReader):
        with kind(tmp_path) as reader, pytest.raises(CheckpointError, match=words):
            reader.take("a.weight", SHAPE)


def test_info_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The command too, and it reads no weights."""
    FAMILIES["qwen3.5"].build(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    rows, width = tensors[name].shape
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors | {f"{name}_scale": torch.ones(rows, 1)}, file)
    monkeypatch.setattr(TensorReader, "_read", None)
    assert main(["info", "--model", str(tmp_path)]) == 0
    save_file(tensors | {f"{name}_scale": torch.ones(rows, 7)}, file)
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        main(["info", "--model", str(tmp_path)])
    assert f"{name}: 7 groups do not divide {width} inputs" in capsys.readouterr().err
