"""Scales that are no numbers or zero, in every format: refused by the name of the matrix."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from specmamba.checkpoints.quantized.declared import MAX_BLOCK
from specmamba.checkpoints.quantized.scales import scale_of
from specmamba.checkpoints.tensor_reader import TensorReader
from specmamba.errors import CheckpointError
from tests.checkpoints.test_shape_check import OUTPUTS, SHAPE, WIDTH, forms, write

NAN, INF = float("nan"), float("inf")
E4M3 = torch.float8_e4m3fn


def take(folder: Path) -> Tensor:
    with TensorReader(folder) as reader:
        return reader.take("a.weight", SHAPE)


def changed(form: str, part: str, value: float, everywhere: bool = False) -> dict[str, Tensor]:
    """The parts of a form, with codes that are not zero, and one scale or all of them changed."""
    parts = {name: x.clone() for name, x in forms()[form][0].items()}
    for name in {"weight", "weight_packed", "qweight"} & set(parts):
        codes = parts[name]
        parts[name] = torch.ones(codes.shape).to(codes.dtype) if codes.dtype is not torch.int32 else codes + 0x11111111
    found = parts[part].float()
    found.view(-1)[slice(None) if everywhere else slice(1)] = value
    parts[part] = found.to(parts[part].dtype)
    return parts


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize(
    ("form", "part"),
    [
        ("blocks", "weight_scale_inv"),
        ("fp8 per tensor", "weight_scale"),
        ("int8", "weight_scale"),
        ("packed", "weight_scale"),
        ("packed with zeros", "weight_scale"),
        ("nvfp4", "weight_scale_2"),
        ("nvfp4 divided", "weight_global_scale"),
        ("gptq", "scales"),
        ("awq", "scales"),
    ],
)
def test_no_numbers(form: str, part: str, value: float, tmp_path: Path) -> None:
    write(tmp_path, changed(form, part, value), forms()[form][1])
    if part == "weight_global_scale" and abs(value) == INF:
        words = "a.weight has scales of zero for weights that are not zero"  # it divides
    else:
        words = "a.weight has scales that are NaN or infinite"
    with pytest.raises(CheckpointError, match=words):
        take(tmp_path)


@pytest.mark.parametrize(
    ("form", "part"),
    [
        ("blocks", "weight_scale_inv"),
        ("fp8 per tensor", "weight_scale"),
        ("int8", "weight_scale"),
        ("packed", "weight_scale"),
        ("nvfp4", "weight_scale_2"),
    ],
)
def test_zeros(form: str, part: str, tmp_path: Path) -> None:
    parts = changed(form, part, 0.0)
    parts.pop("weight_zero_point", None)
    write(tmp_path, parts, forms()[form][1])
    with pytest.raises(CheckpointError, match=r"a\.weight has scales of zero for weights that are not zero"):
        take(tmp_path)


@pytest.mark.parametrize(
    ("form", "part"),
    [("packed with zeros", "weight_scale"), ("gptq", "scales"), ("gptq shuffled", "scales"), ("awq", "scales")],
)
def test_zeros_beside_zero_points(form: str, part: str, tmp_path: Path) -> None:
    """Everywhere they are an error; one is a group of tiny weights, and zeros all over are a matrix of zeros."""
    base = form.removesuffix(" shuffled")
    words = r"a\.weight has scales of zero for weights that are not zero"
    for everywhere in (True, False):
        parts = changed(base, part, 0.0, everywhere)
        codes = next(name for name in ("qweight", "weight_packed") if name in parts)
        parts[codes] = torch.arange(parts[codes].numel(), dtype=torch.int32).view(parts[codes].shape)
        if form != base:
            parts["g_idx"] = parts["g_idx"].flip(0)
        write(tmp_path, parts, forms()[base][1])
        if everywhere:
            with pytest.raises(CheckpointError, match=words):
                take(tmp_path)
        else:
            assert take(tmp_path).any()
    write(tmp_path, parts | {codes: torch.zeros_like(parts[codes]), part: torch.zeros_like(parts[part])}, {})
    assert not take(tmp_path).any()


def test_one_matrix_of_a_stack(tmp_path: Path) -> None:
    """Of the scales of experts, those of one are zero."""
    codes = torch.randint(0, 256, (2, OUTPUTS, WIDTH // 2), dtype=torch.uint8)
    scale = torch.stack([torch.ones(OUTPUTS, WIDTH // 16), torch.zeros(OUTPUTS, WIDTH // 16)]).to(E4M3)
    save_file(
        {"up": codes, "up_weight_scale": scale, "up_weight_scale_2": torch.ones(2)}, tmp_path / "model.safetensors"
    )
    with TensorReader(tmp_path) as reader, pytest.raises(CheckpointError, match=r"up has scales of zero"):
        reader.take("up", (2, *SHAPE))


def test_division_by_zero(tmp_path: Path) -> None:
    write(tmp_path, changed("nvfp4 divided", "weight_global_scale", 0.0), {})
    with pytest.raises(CheckpointError, match=r"a\.weight has scales that are NaN or infinite"):
        take(tmp_path)


def test_groups_of_tiny_weights(tmp_path: Path) -> None:
    """The e4m3 scale of such a group is rounded to zero, and so are its weights; zero everywhere is an error."""
    write(tmp_path, changed("nvfp4", "weight_scale", 0.0), {})
    found = take(tmp_path)
    assert not found[0, :16].any()
    assert found[0, 16::2].all()
    write(tmp_path, changed("nvfp4", "weight_scale", 0.0, everywhere=True), {})
    with pytest.raises(CheckpointError, match=r"a\.weight has scales of zero"):
        take(tmp_path)


def test_a_byte_that_is_no_number(tmp_path: Path) -> None:
    """As exporters have written for groups of zeros: 0x7f in e4m3, 255 among exponents."""
    write(tmp_path, changed("nvfp4", "weight_scale", NAN), {})
    with pytest.raises(CheckpointError, match=r"a\.weight has scales that are NaN or infinite"):
        take(tmp_path)
    for form in ("mxfp4", "mxfp8"):
        write(tmp_path, changed(form, "weight_scale", 255), {})
        with pytest.raises(CheckpointError, match=r"a\.weight has scales that are NaN or infinite"):
            take(tmp_path)


def test_blocks_of_any_size() -> None:
    """Scales of a block that is larger than the matrix take no more memory than the matrix."""
    shape = (512, 2, 3)
    scale, group = scale_of("a", torch.ones(512, 1, 3), shape, [(MAX_BLOCK, 1)])
    assert scale.shape == shape
    assert group == 1
    num_bytes = scale.untyped_storage().nbytes()
    assert num_bytes == scale.nbytes


def test_stacked_matrices_of_modelopt(tmp_path: Path) -> None:
    """A second scale for each of the experts, and a scale of activations, which is read past."""
    torch.manual_seed(0)
    codes = torch.randint(0, 256, (3, OUTPUTS, WIDTH // 2), dtype=torch.uint8)
    scale, second = torch.rand(3, OUTPUTS, WIDTH // 16).add(0.5).to(E4M3), torch.rand(3) + 0.5
    single = []
    for e in range(3):
        folder = tmp_path / str(e)
        folder.mkdir()
        write(folder, {"weight": codes[e], "weight_scale": scale[e], "weight_scale_2": second[e]}, {})
        single.append(take(folder))
    tensors = {"up": codes, "up_weight_scale": scale, "up_weight_scale_2": second, "up_input_scale": torch.ones(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    with TensorReader(tmp_path) as reader:
        assert reader.names() == ("up",)
        assert torch.equal(reader.take("up", (3, *SHAPE)), torch.stack(single))
        reader.finish()


def test_a_shape_without_end(tmp_path: Path) -> None:
    """What the config asks for is not allocated before it is known to be there."""
    write(tmp_path, forms()["nvfp4"][0], {})
    with TensorReader(tmp_path) as reader, pytest.raises(CheckpointError, match=r"but its config\.json asks for"):
        reader.take("a.weight", (1 << 30, 1 << 30))
