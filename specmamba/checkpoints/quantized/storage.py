"""How the matrices of a checkpoint are quantized, by its config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specmamba.checkpoints.files import read_json
from specmamba.checkpoints.quantized.declared import Declared, Kind, read_declared
from specmamba.errors import CheckpointError, UnsupportedModelError

METHODS = ("auto-round", "awq", "compressed-tensors", "fp8", "gptq", "modelopt", "mxfp4", "mxfp8")
MODELOPT_FILE = "hf_quant_config.json"
NOTHING_DECLARED = Declared()


@dataclass(frozen=True, slots=True)
class Storage:
    """What a checkpoint's config says about its quantized matrices, beyond what their tensors say."""

    has_less_zeros: bool = True  # zero points of GPTQ are stored less one
    declared: Mapping[Kind, Declared] = field(default_factory=dict)

    def of(self, kind: Kind) -> Declared:
        """What is said of one kind of numbers."""
        return self.declared.get(kind, NOTHING_DECLARED)


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
    if known == "modelopt":
        config = _modelopt_file(folder) | config
    return Storage(_has_less_zeros(known, config), read_declared(folder / "config.json", known, config))


def read_method(folder: Path) -> str | None:
    """Read how the matrices of a checkpoint are quantized, in the config's word; None: they are not, as far as it says.

    Raises:
        CheckpointError: a file is damaged.
    """
    method = _quantization_config(folder).get("quant_method")
    return None if method is None else str(method)


def _has_less_zeros(method: str, config: Mapping[str, Any]) -> bool:
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


def _modelopt_file(folder: Path) -> dict[str, Any]:
    """What ModelOpt writes beside config.json; {} if there is no such file."""
    file = folder / MODELOPT_FILE
    found = read_json(file).get("quantization", {}) if file.exists() else {}
    if not isinstance(found, dict):
        raise CheckpointError(f"{file}: quantization should be an object, but is {found!r}")
    return found
