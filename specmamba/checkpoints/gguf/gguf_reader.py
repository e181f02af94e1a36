"""The tensors of a GGUF file by the names of the model's own checkpoints, with llama.cpp's transforms undone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specmamba.checkpoints.gguf.blocks import BLOCK_TYPES, BlockType, shape_of_matrix, to_matrix, type_name
from specmamba.checkpoints.gguf.header import FLOAT_TYPES, GgufTensor, TensorEntry, model_tensors, read_header
from specmamba.checkpoints.mapped import copy_mapped
from specmamba.checkpoints.quantized.scales import check_values, require, vanishes
from specmamba.checkpoints.tensor_reader import DTYPES, StoredTensor, TensorReader
from specmamba.errors import CheckpointError
from specmamba.kernels.linear import QuantizedMatrix
from specmamba.parallel.share import Part

STORED_NAMES = {dtype: name for name, dtype in DTYPES.items()}
Q2_K, Q2_K_BYTES = 10, 84  # ggml's number of the type, and the bytes of a block
Stored = Tensor | QuantizedMatrix


class GgufReader(TensorReader):
    """As its base class, for a GGUF file."""

    def __init__(self, file: Path, config: Any, has_values: bool = True) -> None:
        """Read the table of tensors.

        Args:
            file: GGUF.
            config: of the model, as transformers has it.
            has_values: False: tensors have shapes without values.

        Raises:
            CheckpointError, UnsupportedModelError: as for ``read_header``; or shapes do not fit the config.
        """
        header = read_header(file)
        self._infos = header.tensors
        self._file, self._folder, self._stack = file, file.parent, ExitStack()
        self._data = torch.from_file(str(file), size=file.stat().st_size, dtype=torch.uint8)  # pages are read at use
        self._has_values = has_values
        self._made = {x.name: x for x in model_tensors(tuple(self._infos), header.architecture, config)}
        self._taken: set[str] = set()
        self._ignored: list[str] = []
        self._run_forms: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._tensors, self._parts = {}, {}
        for name, made in self._made.items():
            kinds = [self._infos[source].kind for source in made.sources]
            dtype = torch.promote_types(*(FLOAT_TYPES.get(kind, torch.float32) for kind in (kinds * 2)[:2]))
            shapes = [torch.empty(self._infos[source].shape, device="meta") for source in made.sources]
            shape = tuple(_transform(name, made.operations, shapes).shape)
            self._tensors[name] = StoredTensor(", ".join(made.sources), file, shape, STORED_NAMES[dtype])
            if not FLOAT_TYPES.keys() >= set(kinds):
                self._parts[name] = {"weight": name}
        self._names = tuple(self._tensors)

    def take_quantized(self, name: str, shape: tuple[int, ...], part: Part | None = None) -> Stored:
        """Load a matrix that is stored in blocks, or a part of it. Raises CheckpointError."""
        stored = self._tensors[name].shape
        if stored != tuple(shape):
            raise CheckpointError(f"{name} has the shape {list(stored)} in {self._file}, but should have {list(shape)}")
        self._taken.add(name)
        return self._load(self._made[name], part)

    def _form_and_bytes(self, name: str) -> tuple[str, int]:
        """Of a matrix in blocks."""
        sources = [self._infos[source] for source in self._made[name].sources]
        forms = dict.fromkeys(type_name(source.kind) for source in sources)
        return " and ".join(forms), sum(source.num_bytes for source in sources)

    def read_rows(self, name: str, rows: Sequence[int]) -> Tensor:
        """Load some rows of a matrix: [rows, width], also without values. Raises CheckpointError."""
        found = self._load(self._made[name], Part(0, torch.tensor(list(rows))), has_values=True)
        return found if isinstance(found, Tensor) else found.dequantize(torch.float32)

    def _read(self, name: str, part: Part | None = None) -> Tensor:
        found = self._load(self._made[name], part)
        assert isinstance(found, Tensor)
        return found

    def _load(self, made: GgufTensor, part: Part | None = None, has_values: bool | None = None) -> Stored:
        """Read a tensor, or its part, in memory of its own, and undo what llama.cpp's converter did to it."""
        has_values = self._has_values if has_values is None else has_values
        if part is not None and has_values and (found := self._load_part(made, part)) is not None:
            return found
        read = self._load_source if has_values else self._shape_of_source
        whole: Stored = _transform(made.name, made.operations, [read(source) for source in made.sources])
        return whole if part is None else part.of(whole)

    def _load_part(self, made: GgufTensor, part: Part) -> Stored | None:
        """The part of a tensor from the part of its bytes; None: all of it must be read.

        So it is where the converter did more than move rows, where a block has weights inside and outside of the part,
        and where all scales of the part are zero, which is right or wrong by what else the tensor has.
        """
        info = self._infos[made.sources[0]]
        own = _before(made.operations, part, info.shape)
        kind, number = BLOCK_TYPES.get(info.kind), FLOAT_TYPES.get(info.kind)
        of_bytes = None if own is None or len(made.sources) > 1 else _in_elements(own, info.shape, kind)
        if own is None or of_bytes is None or (kind is None and number is None):
            return None
        size = number.itemsize if number is not None else 0 if kind is None else kind.num_bytes
        stored = self._data[info.begin : info.begin + info.num_bytes].view(*info.shape[:-1], -1, size)
        data = copy_mapped(stored, of_bytes)
        if number is not None:
            return data.view(number).view(own.shape(info.shape))
        assert kind is not None
        found = to_matrix(data, kind, own.shape(info.shape))
        if vanishes(found.scale):
            return None
        check_values(f"{self._file}: {made.sources[0]}", found)
        return found

    def _shape_of_source(self, source: str) -> Stored:
        """A tensor without values."""
        info = self._infos[source]
        kind = BLOCK_TYPES.get(info.kind)
        if kind is None:
            return torch.empty(info.shape, dtype=FLOAT_TYPES.get(info.kind, torch.float32), device="meta")
        return shape_of_matrix(kind, info.shape)

    def _load_source(self, source: str) -> Stored:
        info = self._infos[source]
        data = copy_mapped(self._data[info.begin : info.begin + info.num_bytes])
        if info.kind in FLOAT_TYPES:
            return data.view(FLOAT_TYPES[info.kind]).view(info.shape)
        kind = BLOCK_TYPES.get(info.kind)
        found = _other_blocks(data, info) if kind is None else to_matrix(data, kind, info.shape)
        where = f"{self._file}: {source}"
        if isinstance(found, QuantizedMatrix):
            check_values(where, found)  # one block of zeros, or of tiny weights, has a scale of zero
            return found
        require(bool(found.isfinite().all()), f"{where} has scales that are NaN or infinite")
        require(not _is_lost(found, data, info), f"{where} has scales of zero for weights that are not zero")
        return found


def _before(operations: Sequence[Any], part: Part, shape: tuple[int, ...]) -> Part | None:
    """The part of what is stored that becomes a part of the tensor; None: operations do not only move rows."""
    from transformers.integrations.gguf import gguf_conversion_mapping as known

    is_of_rows = part.dim % len(shape) == 0
    for operation in reversed(operations):
        if not isinstance(operation, known.PermuteRows) or not is_of_rows:
            return None
        part = replace(part, index=_rows_of(operation, shape[0])[part.index])
    return part


def _in_elements(part: Part, shape: tuple[int, ...], kind: BlockType | None) -> Part | None:
    """The part of a tensor whose last two dimensions are blocks and bytes; None: it would divide blocks."""
    dim = part.dim % len(shape)
    count = kind.num_weights if kind is not None and dim == len(shape) - 1 else 1
    runs = part.runs()
    if any(begin % count or size % count for begin, size in runs):
        return None
    places = part.index if count == 1 else torch.cat([torch.arange(b // count, (b + n) // count) for b, n in runs])
    return replace(part, dim=dim, index=places)


def _is_lost(found: Tensor, data: Tensor, info: TensorEntry) -> bool:
    """Whether all scales of a tensor, or all its weights, are zero, and what is stored is not the same everywhere."""
    if info.kind == Q2_K:  # its minima have a scale of their own
        codes, scales = data.view(-1, Q2_K_BYTES)[:, 16:80], data.view(-1, Q2_K_BYTES)[:, 80:82].contiguous()
        return not bool(scales.view(torch.float16).any()) and not bool((codes == codes[0, 0]).all())
    if bool(found.any()):
        return False
    from transformers.integrations.gguf.dequant import GGML_BLOCK

    blocks = data.view(-1, GGML_BLOCK[info.kind][1])
    return not torch.equal(blocks, blocks[:1].expand_as(blocks))


def _other_blocks(data: Tensor, info: TensorEntry) -> Tensor:
    """Types without a decoder here, as float32."""
    from transformers.integrations.gguf.kernels import dequantize_blocks

    width = info.shape[-1]
    rows = prod(info.shape) // width
    found: Tensor = dequantize_blocks(data.view(rows, -1), info.kind, rows, width, torch.float32)
    return found.view(info.shape)


def _transform(name: str, operations: Sequence[Any], tensors: Sequence[Stored]) -> Any:
    """Apply transformers' operations; what they move within groups of codes is dequantized."""
    from transformers.integrations.gguf import gguf_conversion_mapping as known

    (found, *others) = tensors
    if others and not any(isinstance(operation, known.ConcatenateRows) for operation in operations):
        raise CheckpointError(f"{name} is stored {len(tensors)} times")
    for operation in operations:
        if isinstance(operation, known.ConcatenateRows):
            found = _joined((found, *others), operation.dim)
        elif isinstance(found, QuantizedMatrix) and isinstance(operation, known.PermuteRows):
            found = found.with_rows(_rows_of(operation, found.shape[0]))
        elif isinstance(found, QuantizedMatrix) and isinstance(operation, known.PermuteInputFeatures):
            found = found.with_columns(operation.permutation)
        else:
            dense = found if isinstance(found, Tensor) else found.dequantize(torch.float32)
            found = operation.convert({"x": dense}, ["x"], ["x"])["x"]
    return found


def _joined(tensors: Sequence[Stored], dim: int) -> Stored:
    """One after the other along a dimension that is not the last; dequantized where codes are of several types."""
    matrices = [x for x in tensors if isinstance(x, QuantizedMatrix)]
    if len(matrices) == len(tensors) and all(x.is_like(matrices[0]) for x in matrices):
        return QuantizedMatrix.cat(matrices, dim)
    return torch.cat([x if isinstance(x, Tensor) else x.dequantize(torch.float32) for x in tensors], dim)


def _rows_of(operation: Any, num_rows: int) -> Tensor:
    """The rows that a ``PermuteRows`` puts at each place."""
    kept = torch.arange(num_rows - len(operation.permutation))
    return torch.cat([kept, operation.permutation + len(kept)])
