"""The header of a GGUF file, checked, and the names and transforms that transformers knows for its architecture."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specmamba.checkpoints.config_bounds import MAX_LAYERS
from specmamba.checkpoints.files import require_file
from specmamba.checkpoints.gguf.blocks import BLOCK_TYPES
from specmamba.errors import CheckpointError, UnsupportedModelError

MAGIC = b"GGUF"
FLOAT_TYPES = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}  # by ggml's number
MAX_HEADER_BYTES = 64 << 20  # several times a vocabulary; a number in an array of bytes takes 16 times as much memory
MAX_TENSORS, MAX_ENTRIES = 500_000, 10_000
MAX_DIMENSIONS, MAX_ALIGNMENT = 4, 1 << 20  # as in ggml; llama.cpp writes 32
# The parts of a multi-token-prediction block, which transformers does not load. Norms are stored as all others are.
NEXT_TOKEN_PARTS = {
    "nextn.eh_proj.weight": "mtp.fc.weight",
    "nextn.enorm.weight": "mtp.pre_fc_norm_embedding.weight",
    "nextn.hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
    "nextn.shared_head_norm.weight": "mtp.norm.weight",
}


class TensorEntry(NamedTuple):
    """Where a tensor lies in the file."""

    shape: tuple[int, ...]
    kind: int  # ggml's number of its type
    begin: int  # in bytes
    num_bytes: int


class Header(NamedTuple):
    """What stands in front of the weights."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]

    @property
    def architecture(self) -> str:
        """As ggml calls it."""
        return str(self.metadata["general.architecture"])

    @property
    def dtype(self) -> torch.dtype:
        """In which the model should run: that of half the size, where there is one, as norms are always float32."""
        kinds = {tensor.kind for tensor in self.tensors.values()}
        if kinds == {0}:
            return torch.float32
        return torch.float16 if kinds <= {0, 1} else torch.bfloat16


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of the model, and what it is made of."""

    name: str  # as the model's own checkpoints call it
    sources: tuple[str, ...]  # of the file; several are joined
    operations: tuple[Any, ...]  # of transformers, one after the other


def is_gguf(file: Path) -> bool:
    """Whether this is a file that begins like GGUF, or is called so."""
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        return opened.read(4) == MAGIC or file.suffix == ".gguf"


def read_header(file: Path) -> Header:
    """Read the metadata and the table of tensors.

    Raises:
        CheckpointError: the file is truncated or damaged, or has tensors of unknown types.
        UnsupportedModelError: this version of transformers has no reader.
    """
    try:
        from transformers.integrations.gguf import reader
    except ImportError:
        raise UnsupportedModelError(
            "this version of transformers does not read GGUF: install transformers 5.23"
        ) from None
    try:
        require_file(file)
        return _read_header(file, reader)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
    # What damage makes the reader raise.
    except (ValueError, OverflowError, MemoryError, IndexError, KeyError, TypeError, struct.error) as error:
        raise CheckpointError(f"{file} is truncated, damaged or not a GGUF file: {error}") from None


def _read_header(file: Path, reader: Any) -> Header:
    size, data = file.stat().st_size, reader._mapped(str(file))[:MAX_HEADER_BYTES]
    _require_few(data)
    metadata, number, at = reader._read_metadata(data, str(file))
    entries, end = reader._read_tensor_table(data, number, at)
    if end > len(data):
        raise ValueError(f"its header ends behind byte {len(data)}")
    alignment = _checked_alignment(metadata)
    begin = -(-end // alignment) * alignment
    found: dict[str, TensorEntry] = {}
    for name, shape, number, offset in entries:
        kind = _block_of(file, name, number)
        is_shape = 0 < len(shape) <= MAX_DIMENSIONS and min(shape) > 0
        if not is_shape or prod(shape) > 64 * size or shape[-1] % kind[0]:
            raise CheckpointError(f"{file}: {name} has the shape {list(shape[:8])}, of blocks of {kind[0]} weights")
        num_bytes = prod(shape) // kind[0] * kind[1]
        if begin + offset + num_bytes > size:
            raise CheckpointError(f"{file} is truncated: it ends before {name} does")
        if name in found:
            raise CheckpointError(f"{file} has two tensors named {name}")
        found[name] = TensorEntry(shape, number, begin + offset, num_bytes)
    _require_in_order(found, begin, alignment)
    return Header(metadata, found)


def _require_in_order(tensors: Mapping[str, TensorEntry], begin: int, alignment: int) -> None:
    """Raise ValueError where tensors do not follow each other, as in ggml: one has another type or shape than it says.

    Args:
        tensors: in the order of the table.
        begin: of the first, in bytes.
        alignment: of all, in bytes.
    """
    for name, tensor in tensors.items():
        if tensor.begin != begin:
            raise ValueError(f"{name} begins at byte {tensor.begin}, but what is before it ends at {begin}")
        begin += -(-tensor.num_bytes // alignment) * alignment


def _require_few(data: Any) -> None:
    """Raise ValueError for more tensors and entries of metadata than a file has; each would be looked for."""
    if bytes(data[: len(MAGIC)]) != MAGIC:
        return  # the reader says so
    num_tensors, num_entries = struct.unpack_from("<QQ", data, 8)
    if num_tensors > MAX_TENSORS or num_entries > MAX_ENTRIES:
        raise ValueError(
            f"it would have {num_tensors} tensors and {num_entries} entries of metadata; "
            f"{MAX_TENSORS} and {MAX_ENTRIES} are the most that is read"
        )


def _checked_alignment(metadata: dict[str, Any]) -> int:
    """The alignment of tensors. Raises ValueError, also for so many layers that a list of them would fill memory."""
    for key, value in metadata.items():
        if key.endswith((".block_count", ".nextn_predict_layers")) and not 0 <= value <= MAX_LAYERS:
            raise ValueError(f"{key} is {value}; {MAX_LAYERS} layers are the most that is read")
    found = metadata.get("general.alignment", 32)
    if type(found) is not int or not 0 < found <= MAX_ALIGNMENT:
        raise ValueError(f"general.alignment is {found!r}")
    return found


def _block_of(file: Path, name: str, number: int) -> tuple[int, int]:
    """Weights and bytes of a block of ggml's type of this number."""
    from transformers.integrations.gguf.dequant import GGML_BLOCK

    if number in FLOAT_TYPES:
        return 1, FLOAT_TYPES[number].itemsize
    if number in BLOCK_TYPES:
        return BLOCK_TYPES[number].num_weights, BLOCK_TYPES[number].num_bytes
    if number not in GGML_BLOCK:
        raise CheckpointError(f"{file}: {name} is stored in ggml's type {number}, which is not supported")
    weights, num_bytes = GGML_BLOCK[number]
    return weights, num_bytes


def model_tensors(names: Sequence[str], architecture: str, config: Any) -> list[GgufTensor]:
    """The tensors of the model that a file with these tensors holds.

    Args:
        names: of the file's tensors.
        architecture: of the file.
        config: of the model, as transformers has it.
    """
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    from transformers.integrations.gguf.utils import get_gguf_conversion_mapping

    mapping = deepcopy(get_gguf_conversion_mapping(architecture, config))
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    found: dict[str, list[tuple[int, str]]] = {}
    operations: dict[str, tuple[Any, ...]] = {}
    for stored in names:
        name, place, converter = _next_token_part(stored, config.num_hidden_layers), 0, None
        if name is None:
            as_layer, prefix = _as_first_layer(stored, config.num_hidden_layers)
            name, pattern = rename_source_key(as_layer, renamings, converters)
            name = name if prefix is None else name.replace("model.layers.0.", prefix, 1)
            converter = by_pattern.get(pattern)
            place = 0 if converter is None else converter.source_patterns.index(pattern)
        elif name.removesuffix(".weight").endswith(("norm", "_hidden", "_embedding")):
            converter = next(each for each in converters if each.target_patterns[0].endswith("norm.weight"))
        found.setdefault(name, []).append((place, stored))
        operations[name] = () if converter is None else tuple(converter.operations)
    return [
        GgufTensor(name, tuple(stored for _, stored in sorted(sources)), operations[name])
        for name, sources in found.items()
    ]


def _next_token_part(stored: str, num_layers: int) -> str | None:
    """The name of a part of the block that predicts one more token; None: it is another tensor."""
    prefix, _, rest = stored.partition(".nextn.")
    if not rest:
        return None
    if prefix != f"blk.{num_layers}" or f"nextn.{rest}" not in NEXT_TOKEN_PARTS:
        raise UnsupportedModelError(f"{stored}: this part of a multi-token-prediction block is not supported")
    return NEXT_TOKEN_PARTS[f"nextn.{rest}"]


def _as_first_layer(stored: str, num_layers: int) -> tuple[str, str | None]:
    """A layer of the multi-token-prediction block, called like the first layer; and the prefix it should have."""
    if not stored.startswith("blk."):
        return stored, None
    layer, _, rest = stored.removeprefix("blk.").partition(".")
    if not layer.isdecimal() or int(layer) < num_layers:
        return stored, None
    return f"blk.0.{rest}", f"mtp.layers.{int(layer) - num_layers}."


def require_architecture(file: Path, header: Header, known: Sequence[str]) -> None:
    """Raise UnsupportedModelError for a file of another architecture, and for a part of a split file."""
    if header.architecture not in known:
        raise UnsupportedModelError(
            f"{file} is a {header.architecture!r} model; of GGUF files, {', '.join(known)} are read"
        )
    num_parts = header.metadata.get("split.count", 1)
    if num_parts != 1:
        raise UnsupportedModelError(f"{file} is one of {num_parts} parts: llama-gguf-split --merge joins them")
