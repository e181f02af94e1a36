"""``specmamba quantize``: round the matrices of a checkpoint to 4 or 8 bits and write them as compressed-tensors."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator

from specmamba.config import DEMO_MODEL, CommandLine
from specmamba.errors import CheckpointError, ConfigError
from specmamba.flags.command_line import errors_of_out, read_flags, readable

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from specmamba.checkpoints.tensor_reader import TensorReader
    from specmamba.kernels.linear.rounding import CodeForm

PROG = "specmamba quantize"
GROUPS = (32, 64, 128)
SHARD_BYTES = 4 << 30
# Parts of names of matrices that are small or that decide much: embeddings, the output head, routers, gates.
KEPT = ("embed", "lm_head", "router", ".gate.", "_gate.", "in_proj_a.", "in_proj_b.", "visual.", "vision")
LAYOUTS = {"int4": "pack-quantized", "int8": "int-quantized", "fp8": "float-quantized"}


class QuantizeConfig(CommandLine):
    """Round the matrices of a checkpoint to 4 or 8 bits, and write them in compressed-tensors' format."""

    model: Annotated[
        str | None, Field(description="folder, GGUF file or hub id of a checkpoint; none: the bundled demo")
    ] = None
    revision: Annotated[str | None, Field(description="branch, tag or commit, when --model is a hub id")] = None
    out: Annotated[Path, Field(description="folder to write; it must be new or empty")]
    format: Annotated[
        Literal["int4", "int8", "fp8"],
        Field(description="int4: a scale per group of inputs; int8, fp8: a scale per output"),
    ] = "int4"
    group_size: Annotated[int, Field(description=f"inputs of an int4 group: {', '.join(map(str, GROUPS))}")] = 128

    @field_validator("group_size")
    @classmethod
    def _is_known(cls, size: int) -> int:
        if size not in GROUPS:
            raise ValueError(f"there are groups of {', '.join(map(str, GROUPS))}")
        return size


def main(arguments: list[str]) -> int:
    """Quantize and print what was done. Returns 0. Raises SpecmambaError."""
    config = read_flags(QuantizeConfig, PROG, arguments)
    quantize_checkpoint(config)
    return 0


def quantize_checkpoint(config: QuantizeConfig) -> None:
    """Write the quantized checkpoint; it appears as a whole, or not at all.

    Raises:
        ConfigError: the folder is not empty or cannot be written, or no matrix can be quantized so.
        CheckpointError, UnsupportedModelError: the checkpoint cannot be read, or is quantized already.
    """
    from specmamba.checkpoints.checkpoint import read_config, resolve_checkpoint
    from specmamba.checkpoints.files import read_json
    from specmamba.models.registry import ARCHITECTURES

    folder = resolve_checkpoint(_given(config), config.revision)
    read_config(folder, tuple(ARCHITECTURES))
    described = read_json(folder / "config.json")
    if "quantization_config" in described:
        raise _quantized_already(config)
    with errors_of_out(config.out):
        _write(folder, described, config)


def _given(config: QuantizeConfig) -> str:
    """The checkpoint as it is called; a GGUF file has a folder of another name."""
    return config.model or str(DEMO_MODEL)


def _quantized_already(config: QuantizeConfig) -> CheckpointError:
    return CheckpointError(f"{_given(config)} is quantized already: quantize the checkpoint that it was made of")


def _open_reader(folder: Path) -> TensorReader:
    """Open the tensors, by the names that the model's own checkpoints have."""
    from specmamba.checkpoints.checkpoint import read_config, text_config
    from specmamba.checkpoints.files import GGUF_FILE
    from specmamba.checkpoints.gguf.gguf_reader import GgufReader
    from specmamba.checkpoints.tensor_reader import TensorReader
    from specmamba.models.registry import ARCHITECTURES

    if not (folder / GGUF_FILE).exists():
        return TensorReader(folder)
    found, _ = read_config(folder, tuple(ARCHITECTURES))
    return GgufReader(folder / GGUF_FILE, text_config(found))


def _write(folder: Path, described: dict[str, Any], config: QuantizeConfig) -> None:
    """Write a folder beside ``--out``, and move it there when it is complete."""
    if config.out.exists() and (not config.out.is_dir() or any(config.out.iterdir())):
        raise ConfigError(f"--out {config.out}: it is there already, and not empty")
    config.out.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{config.out.name}-", dir=config.out.parent))
    try:
        kept = _write_tensors(folder, made, config)
        described["quantization_config"] = _describe(config, kept)
        (made / "config.json").write_text(json.dumps(described, indent=2))
        _copy_others(folder, made)
        made.chmod(0o755)  # a temporary folder is its owner's alone
        made.replace(config.out)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _write_tensors(folder: Path, made: Path, config: QuantizeConfig) -> list[str]:
    """Write all tensors in shards; returns the names of matrices that are kept."""
    from safetensors.torch import save_file

    from specmamba.checkpoints.files import INDEX_FILE

    shard: dict[str, Tensor] = {}
    shards: list[list[str]] = []
    counted, kept, shard_bytes = Counter[str](), list[str](), 0

    def flush() -> None:
        shards.append(list(shard))
        file = made / f"model-{len(shards):05d}.safetensors"
        save_file(shard, file, {"format": "pt"})
        file.chmod(0o644)
        shard.clear()

    with _open_reader(folder) as reader:
        if reader.is_quantized:  # a config need not say so
            raise _quantized_already(config)
        for name in reader.names():
            parts = dict(_quantized(reader, name, config, counted, kept))
            shard |= parts
            shard_bytes += sum(tensor.nbytes for tensor in parts.values())
            if shard_bytes >= SHARD_BYTES:
                flush()
                shard_bytes = 0
    if not counted["matrices"]:
        raise ConfigError(f"--format {config.format}: none of the matrices of {_given(config)} can be stored so")
    if shard:
        flush()
    weight_map = {name: f"model-{i:05d}.safetensors" for i, names in enumerate(shards, 1) for name in names}
    (made / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    before, after = readable(counted["before"]), readable(counted["after"])
    print(f"{counted['matrices']} matrices in {config.format}: {before} became {after}; {len(kept)} matrices are kept")
    return kept


def _quantized(
    reader: TensorReader, name: str, config: QuantizeConfig, counted: Counter[str], kept: list[str]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors that stand for a tensor of the checkpoint, by name; counts what was done."""
    from specmamba.checkpoints.tensor_reader import DTYPES

    stored = reader.stored(name)
    tensor = reader.take(name, stored.shape).contiguous()  # one of GGUF may be a view
    if tensor.dim() < 2 or min(tensor.shape) < 2:
        yield name, tensor
        return
    matrices = dict(_matrices(name, tensor))
    if not matrices or not all(_can_be_rounded(matrix, config) for matrix in matrices.values()):
        kept.append(name)
        yield name, tensor
        return
    print(f"  {name} {list(tensor.shape)}", file=sys.stderr)
    for own, matrix in matrices.items():
        if not bool(matrix.isfinite().all()):
            raise CheckpointError(f"{name} has weights that are NaN or infinite")
        parts = stored_parts(matrix, config.format, config.group_size, DTYPES[stored.dtype])
        counted.update(matrices=1, before=matrix.nbytes, after=sum(part.nbytes for part in parts.values()))
        for part, codes in parts.items():
            yield f"{own.removesuffix('weight')}{part}", codes


def _matrices(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The matrices of a tensor by name, if they are to be quantized. Stacked experts get a name each."""
    if any(part in name for part in KEPT):
        return
    if tensor.dim() == 2 and name.endswith(".weight"):
        yield name, tensor
    elif tensor.dim() == 3 and name.endswith(".experts.down_proj"):
        for i, matrix in enumerate(tensor):
            yield f"{name.removesuffix('down_proj')}{i}.down_proj.weight", matrix
    elif tensor.dim() == 3 and name.endswith(".experts.gate_up_proj"):
        for i, both in enumerate(tensor):
            prefix = f"{name.removesuffix('gate_up_proj')}{i}."
            yield from zip((f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight"), both.chunk(2), strict=True)


def stored_parts(weight: Tensor, form: CodeForm, group: int, scale_dtype: torch.dtype) -> dict[str, Tensor]:
    """Round a matrix, and lay its parts out for a file.

    Args:
        weight: [N, K]; for int4 K is a multiple of ``group``.
        form, group, scale_dtype: as for ``round_matrix``; scales are stored in ``scale_dtype``.

    Returns:
        The tensors by the last part of their names.
    """
    import torch

    from specmamba.kernels.linear.rounding import round_matrix

    matrix = round_matrix(weight, form, group, scale_dtype)
    scale = matrix.scale.to(scale_dtype)
    if form == "fp8":
        return {"weight": matrix.codes.view(torch.float8_e4m3fn), "weight_scale": scale}
    if form == "int8":
        return {"weight": matrix.codes, "weight_scale": scale}
    numbers = (matrix.codes + 8).view(torch.uint8)
    packed = (numbers[:, ::2] | numbers[:, 1::2] << 4).contiguous().view(torch.int32)
    return {"weight_packed": packed, "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}


def _can_be_rounded(matrix: Tensor, config: QuantizeConfig) -> bool:
    """Whether the inputs of a matrix are whole groups."""
    return config.format != "int4" or matrix.shape[1] % config.group_size == 0


def _describe(config: QuantizeConfig, kept: list[str]) -> dict[str, Any]:
    """What compressed-tensors' readers look for in config.json."""
    weights: dict[str, Any] = {"num_bits": 4 if config.format == "int4" else 8, "symmetric": True, "dynamic": False}
    weights["type"] = "float" if config.format == "fp8" else "int"
    weights |= (
        {"strategy": "group", "group_size": config.group_size} if config.format == "int4" else {"strategy": "channel"}
    )
    layout = LAYOUTS[config.format]
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "format": layout}},
        "ignore": [name.removesuffix(".weight") for name in kept],
    }


def _copy_others(folder: Path, made: Path) -> None:
    """Copy what stands beside the weights: tokenizer, templates, settings of generation."""
    for file in folder.iterdir():
        is_weights = ".safetensors" in file.name or file.suffix in (".bin", ".pt", ".pth", ".ckpt", ".gguf")
        if file.is_file() and not is_weights and not (made / file.name).exists():
            shutil.copyfile(file, made / file.name)
