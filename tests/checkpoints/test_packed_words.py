"""GPTQ, AWQ and auto-round: weights are those that the formats' own libraries make of what they packed, bit for bit.

``data/make_packed.py`` says which libraries wrote the file, and how.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from specmamba.checkpoints.tensor_reader import ShapeReader, TensorReader

FILE = Path(__file__).parent / "data" / "packed.safetensors"
with safe_open(FILE, "pt") as _opened:
    CONFIGS = {name: json.loads(config) for name, config in _opened.metadata().items()}


def write(folder: Path, case: str, config: dict[str, object] | None = None) -> Tensor:
    """Write the parts of a case as those of a.weight; returns the weights that are expected."""
    parts = {name.removeprefix(f"{case}."): x for name, x in load_file(FILE).items() if name.startswith(f"{case}.")}
    expected = parts.pop("expected")
    save_file({f"a.{name}": part for name, part in parts.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config or CONFIGS[case]}))
    return expected


@pytest.mark.parametrize("case", sorted(CONFIGS))
def test_weights(case: str, tmp_path: Path) -> None:
    expected = write(tmp_path, case)
    assert expected.float().abs().max() > 0.1
    with TensorReader(tmp_path) as reader:
        assert reader.names() == ("a.weight",)
        assert torch.equal(reader.take("a.weight", tuple(expected.shape), torch.float16), expected)
        reader.finish()
    found = []
    for kind in (TensorReader, ShapeReader):
        with kind(tmp_path) as reader:
            found.append(reader.take_quantized("a.weight", tuple(expected.shape)))
            reader.finish()
    values, shape = found
    assert shape.shape == expected.shape
    assert type(shape) is type(values)  # dequantized where inputs of a group do not lie side by side


def test_zero_points_differ_by_format(tmp_path: Path) -> None:
    """The same words mean other weights where the config names the other packing: the tests above can fail."""
    case = "auto_round:exllamav2 4"
    expected = write(tmp_path, case, CONFIGS[case] | {"packing_format": "auto_round:auto_gptq"})
    with TensorReader(tmp_path) as reader:
        assert not torch.equal(reader.take("a.weight", tuple(expected.shape), torch.float16), expected)
