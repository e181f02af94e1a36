"""What configs say of the codes and scales of a checkpoint: kinds of numbers, their bits, and which share a scale."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specmamba.errors import CheckpointError

Kind = Literal["whole numbers", "FP8", "FP4"]
Spread = tuple[int, int]  # neighbouring outputs and inputs that share a scale; ALL: of them
ALL = -1  # as configs write it
PER_TENSOR, PER_OUTPUT = (ALL, ALL), (1, ALL)
MX_GROUP, NVFP4_GROUP = 32, 16
DEFAULT_BLOCK = (128, 128)
MAX_BLOCK = 1 << 16
PLAIN_BITS = 16  # of numbers that are not codes
_Scheme = tuple[Kind, Iterable[int], Iterable[Spread]]  # bits and spreads; none: it does not say


@dataclass(frozen=True, slots=True)
class Declared:
    """What a config says of one kind of numbers, in any layer. An empty set: nothing."""

    bits: frozenset[int] = frozenset()
    spreads: frozenset[Spread] = frozenset()


def read_declared(file: Path, method: str, config: Mapping[str, Any]) -> dict[Kind, Declared]:
    """Read what a config says of each kind of numbers that it mentions.

    Args:
        file: of the config, for messages.
        method: one of ``storage.METHODS``.
        config: its part about quantization.

    Raises:
        CheckpointError: a size or a number of bits is none.
    """
    found: dict[Kind, list[_Scheme]] = defaultdict(list)
    try:
        for scheme in _READERS[method](config):
            found[scheme[0]].append(scheme)
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from None
    return {kind: _merged(schemes) for kind, schemes in found.items()}


def _merged(schemes: list[_Scheme]) -> Declared:
    """Layers differ in their scheme; one that says nothing leaves it open."""
    bits, spreads = [frozenset(scheme[1]) for scheme in schemes], [frozenset(scheme[2]) for scheme in schemes]
    return Declared(
        frozenset[int]().union(*bits) if all(bits) else frozenset(),
        frozenset[Spread]().union(*spreads) if all(spreads) else frozenset(),
    )


def kind_of(dtypes: Mapping[str, str]) -> Kind | None:
    """The kind of numbers of a matrix by the types of its parts, as safetensors writes them; None: no known one."""
    if "qweight" in dtypes:
        return "whole numbers"
    code = dtypes.get("packed", dtypes.get("blocks", dtypes.get("weight")))
    kinds: dict[str | None, Kind] = {"I32": "whole numbers", "I8": "whole numbers", "F8_E4M3": "FP8", "U8": "FP4"}
    return kinds.get(code)


def require_kinds(folder: Path, declared: Mapping[Kind, Declared], stored: Mapping[str, Kind]) -> None:
    """Raise CheckpointError where no matrix is of a kind that the config mentions, but some are of others.

    Beside matrices of that kind others may stand: a head that was left as it was, or added.
    """
    if declared and stored and not set(declared) & set(stored.values()):
        name, kind = next(iter(stored.items()))
        raise CheckpointError(
            f"{folder}: its config says {' and '.join(declared)}, but {name} and all others are {kind}"
        )


def _fp8(config: Mapping[str, Any]) -> list[_Scheme]:
    if "weight_block_size" not in config:
        return [("FP8", (), ())]
    size = config["weight_block_size"]
    return [("FP8", (), (PER_TENSOR, PER_OUTPUT) if size is None else (_checked_block(size),))]


def _mxfp8(config: Mapping[str, Any]) -> list[_Scheme]:
    size = config.get("weight_block_size")
    return [("FP8", (), ((1, MX_GROUP) if size is None else _checked_block(size),))]


def _mxfp4(_config: Mapping[str, Any]) -> list[_Scheme]:
    return [("FP4", (), ((1, MX_GROUP),))]


def _words(config: Mapping[str, Any]) -> list[_Scheme]:
    """GPTQ, AWQ and auto-round: for all layers, and for those that are listed with values of their own."""
    if not _has_whole_numbers(config):
        return []
    bits, sizes = ([_checked(key, size) for size in _everywhere(config, key)] for key in ("bits", "group_size"))
    return [("whole numbers", bits, [(1, size) for size in sizes])]


def _has_whole_numbers(config: Mapping[str, Any]) -> bool:
    """Whether a config, or a part of one about a layer, is of whole numbers: auto-round has other types of codes.

    A layer that it leaves as it is has 16 bits or more, and often a group size of 0.
    """
    bits = config.get("bits")
    return str(config.get("data_type", "int")).startswith("int") and not (type(bits) is int and bits >= PLAIN_BITS)


def _compressed_tensors(config: Mapping[str, Any]) -> list[_Scheme]:
    return [_scheme_of(weights) for weights in _weights_of_groups(config)]


def _scheme_of(weights: Mapping[str, Any]) -> _Scheme:
    """What compressed-tensors says of the weights of one group of layers."""
    bits = [] if weights.get("num_bits") is None else [_checked("num_bits", weights["num_bits"])]
    if str(weights.get("type", "int")).lower() == "float":
        return ("FP4" if bits == [4] else "FP8"), (), _spreads_of(weights)
    return "whole numbers", bits, _spreads_of(weights)


def _spreads_of(weights: Mapping[str, Any]) -> tuple[Spread, ...]:
    strategy, size = str(weights.get("strategy") or "").lower(), weights.get("group_size")
    if strategy in ("tensor", "channel"):
        return (PER_TENSOR if strategy == "tensor" else PER_OUTPUT,)
    if strategy == "block" or weights.get("block_structure") is not None:
        return (_checked_block(weights.get("block_structure")),)
    return (PER_TENSOR, PER_OUTPUT) if size is None else ((1, _checked("group_size", size)),)


def _modelopt(config: Mapping[str, Any]) -> list[_Scheme]:
    """Of all layers, or of each that is listed."""
    layers = config.get("quantized_layers")
    listed = [each for each in layers.values() if isinstance(each, dict)] if isinstance(layers, dict) else []
    return [scheme for each in (config, *listed) for scheme in _modelopt_scheme(each)]


def _modelopt_scheme(config: Mapping[str, Any]) -> list[_Scheme]:
    algorithm, size = str(config.get("quant_algo")).upper(), config.get("group_size")
    if "FP4" in algorithm:  # NVFP4, W4A16_NVFP4, W4A8_MXFP4_FP8 ...
        usual = MX_GROUP if "MXFP4" in algorithm else NVFP4_GROUP
        return [("FP4", (), ((1, usual if size is None else _checked("group_size", size)),))]
    spread = _MODELOPT_FP8.get(algorithm)
    return [] if spread is None else [("FP8", (), (spread,))]


def _weights_of_groups(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    groups = config.get("config_groups")
    listed = groups.values() if isinstance(groups, dict) else ()
    weights = [group.get("weights") for group in listed if isinstance(group, dict)]
    return [each for each in weights if isinstance(each, dict)]


def _everywhere(config: Mapping[str, Any], key: str) -> list[Any]:
    """The values of a key in a config and in what is nested in it, of layers in whole numbers."""
    found, left = [], [config]
    while left:
        each = left.pop()
        found += [each[key]] if each.get(key) is not None else []
        left += [value for value in each.values() if isinstance(value, dict) and _has_whole_numbers(value)]
    return found


def _checked(key: str, value: Any) -> int:
    """A number of bits, or of inputs of a group. Raises ValueError."""
    if key != "group_size" and not (type(value) is int and value > 0):
        raise ValueError(f"{key} should be a number of bits, but is {value!r}")
    if type(value) is not int or not (value > 0 or value == ALL):
        raise ValueError(f"a group should be a number of inputs, but is {value!r}")
    return value


def _checked_block(value: Any) -> Spread:
    """Outputs and inputs of a block; also as older files write it, "128x128". Raises ValueError."""
    sizes = [int(size) if size.isdecimal() else 0 for size in value.split("x")] if isinstance(value, str) else value
    if not (isinstance(sizes, list) and len(sizes) == 2 and all(type(n) is int and 0 < n <= MAX_BLOCK for n in sizes)):
        raise ValueError(f"a block of weights should be two sizes, but is {value!r}")
    return sizes[0], sizes[1]


_MODELOPT_FP8: dict[str, Spread] = {
    "FP8": PER_TENSOR,
    "FP8_PER_CHANNEL_PER_TOKEN": PER_OUTPUT,
    "FP8_PB_WO": DEFAULT_BLOCK,
    "FP8_PB_REAL": DEFAULT_BLOCK,
    "MXFP8": (1, MX_GROUP),
}
_READERS: dict[str, Callable[[Mapping[str, Any]], list[_Scheme]]] = {
    "auto-round": _words,
    "awq": _words,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "gptq": _words,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
    "mxfp8": _mxfp8,
}
