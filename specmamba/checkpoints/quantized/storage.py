"""What a checkpoint's config says about how its matrices are quantized."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specmamba.checkpoints.files import read_json
from specmamba.errors import CheckpointError, UnsupportedModelError

METHODS = ("auto-round", "awq", "compressed-tensors", "fp8", "gptq", "modelopt", "mxfp4", "mxfp8")
MODELOPT_FILE = "hf_quant_config.json"
MAX_BLOCK = 1 << 16
ALL_INPUTS = -1  # as configs write it: one group per output


@dataclass(frozen=True, slots=True)
class Storage:
    """What a checkpoint's config says about its quantized matrices, beyond what their tensors say."""

    block: tuple[int, int] = (128, 128)  # outputs and inputs of a block of FP8
    has_less_zeros: bool = True  # zero points of GPTQ are stored less one
    groups: frozenset[int] = frozenset()  # inputs of a group of whole numbers in any layer; empty: it says nothing


def read_storage(folder: Path) -> Storage:
    """Read how the matrices of a checkpoint are stored.

    Raises:
        UnsupportedModelError: the config names a method that is not known.
        CheckpointError: a file is damaged, or a value is none.
    """
    config = _quantization_config(folder)
    method = config.get("quant_method")
    if method is None:
        return Storage()
    known = str(method).lower().replace("_", "-").replace("intel/", "")
    if known not in METHODS:
        raise UnsupportedModelError(
            f"{folder} is quantized by the method {method!r}; specmamba reads {', '.join(METHODS)}"
        )
    return Storage(_block(folder, config), _has_less_zeros(known, config), _groups(folder, known, config))


def _groups(folder: Path, method: str, config: dict[str, Any]) -> frozenset[int]:
    """Inputs of the groups of whole numbers. Raises CheckpointError for sizes that are none."""
    if method == "compressed-tensors":
        sizes = _groups_of_schemes(config)
    else:
        sizes = _group_sizes(config) if method in ("auto-round", "awq", "gptq") else []
    for size in sizes:
        if type(size) is not int or not (size > 0 or size == ALL_INPUTS):
            raise CheckpointError(f"{folder / 'config.json'}: a group should be a number of inputs, but is {size!r}")
    return frozenset(sizes)


def _group_sizes(config: dict[str, Any]) -> list[Any]:
    """The sizes of GPTQ, AWQ and auto-round: for all layers, and for those that are listed with one of their own."""
    found, left = [], [config]
    while left:
        each = left.pop()
        found += [each["group_size"]] if each.get("group_size") is not None else []
        left += [value for value in each.values() if isinstance(value, dict)]
    return found


def _groups_of_schemes(config: dict[str, Any]) -> list[Any]:
    """The sizes of compressed-tensors."""
    found: list[Any] = []
    for weights in _schemes(config):
        block, size = weights.get("block_structure"), weights.get("group_size")
        if weights.get("strategy") == "block" and isinstance(block, list) and block:
            found.append(block[-1])
        else:
            found.append(ALL_INPUTS if size is None else size)
    return found


def _schemes(config: dict[str, Any]) -> list[dict[str, Any]]:
    """How compressed-tensors stores weights; layers differ in it."""
    groups = config.get("config_groups")
    listed = groups.values() if isinstance(groups, dict) else ()
    weights = [group.get("weights") for group in listed if isinstance(group, dict)]
    return [each for each in weights if isinstance(each, dict)]


def _has_less_zeros(method: str, config: dict[str, Any]) -> bool:
    """Whether zero points are stored less one: in version 1 of GPTQ, and in auto-round's packing of that name."""
    if method != "auto-round":
        return config.get("checkpoint_format") != "gptq_v2"
    packing = str(config.get("packing_format", "auto_round:auto_gptq"))
    return "gptq" in packing and "gptqmodel" not in packing and "gptq_v2" not in packing


def _quantization_config(folder: Path) -> dict[str, Any]:
    """The part of config.json, of its text part, or the file that ModelOpt writes; {} if there is none."""
    file = folder / "config.json"
    config = read_json(file) if file.exists() else {}
    text = config.get("text_config")
    found = config.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None)
    if found is None and (folder / MODELOPT_FILE).exists():
        found = {"quant_method": "modelopt"}
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise CheckpointError(f"{file}: quantization_config should be an object, but is {found!r}")
    return found


def _block(folder: Path, config: dict[str, Any]) -> tuple[int, int]:
    """Outputs and inputs of a block of FP8."""
    found = config.get("weight_block_size")
    if found is None:
        structures = [weights.get("block_structure") for weights in _schemes(config)]
        found = next((each for each in structures if each), [128, 128])
    if not (isinstance(found, list) and len(found) == 2 and all(type(n) is int and 0 < n <= MAX_BLOCK for n in found)):
        raise CheckpointError(f"{folder / 'config.json'}: a block of weights should be two sizes, but is {found!r}")
    return found[0], found[1]
