"""The tensors of a safetensors checkpoint by name, quantized matrices decoded: with their values, or shapes alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from specmamba.checkpoints.files import (
    INDEX_FILE,
    SINGLE_FILE,
    read_json,
    require_file,
    require_safetensors,
)
from specmamba.checkpoints.mapped import copy_mapped
from specmamba.checkpoints.quantized.declared import kind_of, require_kinds
from specmamba.checkpoints.quantized.decode import decode
from specmamba.checkpoints.quantized.part_of_codes import take_part
from specmamba.checkpoints.quantized.parts import CODES, group_parts, is_of_activations
from specmamba.checkpoints.quantized.storage import read_storage
from specmamba.checkpoints.quantized.stored_report import StoredReport, form_of, summarize
from specmamba.errors import CheckpointError, ConfigError
from specmamba.kernels.linear import QuantizedMatrix
from specmamba.parallel.share import Part

FLOAT_TYPES = ("F32", "BF16", "F16")
MAX_HEADER_BYTES = 64 << 20  # of a safetensors file; safetensors has a limit of its own, 100 MB
MAX_TENSORS = 500_000  # of a file
MAX_INPUTS = 1 << 20  # of a matrix whose groups are read although other values are not
BITS = {"F64": 64, "I64": 64, "F32": 32, "I32": 32, "BF16": 16, "F16": 16, "I16": 16, "F4": 4}  # else 8
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
PART_DTYPES = DTYPES | {"I64": torch.int64, "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8}
PART_DTYPES |= {"F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu}  # of quantized matrices
MAX_DIMENSIONS = 8  # of a matrix, with those in front of it


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """File, shape and type of a stored tensor, read without loading it."""

    stored_name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str  # as safetensors writes it: F32, BF16, F8_E4M3, ...

    @property
    def num_bytes(self) -> int:
        """In the file."""
        return prod(self.shape) * BITS.get(self.dtype, 8) // 8


class TensorReader:
    """The tensors of a checkpoint folder by name. The reader records which ones the model took.

    ``renames`` are (stored prefix, name prefix) pairs; the first that matches is applied, so that one model class
    reads checkpoints with differently nested names. A quantized matrix has one name, that of its weight, whatever
    tensors it is stored in.

    Raises:
        CheckpointError: a file is missing, truncated or damaged, the index does not match the shards or names
            files outside of the folder, two tensors get the same name, or parts of a quantized matrix are missing.
        UnsupportedModelError: the config names a way to quantize that is not known.
    """

    def __init__(self, folder: Path, renames: Sequence[tuple[str, str]] = ()) -> None:
        self._tensors: dict[str, StoredTensor] = {}
        self._taken: set[str] = set()
        self._ignored: list[str] = []
        self._run_forms: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}  # of quantized matrices that were taken
        self._handles: dict[Path, Any] = {}
        self._folder = folder
        with ExitStack() as self._stack:
            single = folder / SINGLE_FILE
            for tensor in self._open(single) if single.exists() else self._open_shards():
                self._add(_renamed(tensor.stored_name, renames), tensor)
            self._storage = read_storage(folder)
            self._parts = group_parts(tuple(self._tensors))
            self._require_declared_kinds()
            self._stack = self._stack.pop_all()  # no error: the files stay open
        hidden = {part for parts in self._parts.values() for part in parts.values()}
        hidden.update(filter(is_of_activations, self._tensors))
        self._names = (*(name for name in self._tensors if name not in hidden), *self._parts)

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. Tensors that were taken stay valid."""
        self._stack.close()

    def read_rows(self, name: str, rows: Sequence[int]) -> Tensor:
        """Load some rows of a matrix: [rows, width], also in a ``ShapeReader``. Raises CheckpointError."""
        from safetensors import SafetensorError

        tensor = self.stored(name)
        try:
            stored = self._handles[tensor.file].get_slice(tensor.stored_name)
            return torch.cat([stored[row : row + 1] for row in rows])
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{tensor.stored_name} cannot be read from {tensor.file}: {error}") from None

    @property
    def is_quantized(self) -> bool:
        """Whether matrices are stored as codes with scales."""
        return bool(self._parts)

    def names(self) -> tuple[str, ...]:
        """Of all tensors and quantized matrices, without the parts of these and scales of activations."""
        return self._names

    def has(self, name: str) -> bool:
        """Whether there is a tensor or a quantized matrix of this name."""
        return name in self._parts or name in self._tensors

    def is_coded(self, name: str) -> bool:
        """Whether a matrix is stored as codes with scales."""
        return name in self._parts

    def stored(self, name: str) -> StoredTensor:
        """File, shape and type of a tensor, without loading it; of a quantized matrix, those of its codes.

        Raises:
            CheckpointError: there is no such tensor.
        """
        parts = self._parts.get(name, {})
        try:
            return self._tensors[next((parts[role] for role in CODES if role in parts), name)]
        except KeyError:
            raise CheckpointError(f"{self._folder} lacks the tensor {name}") from None

    def take(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, part: Part | None = None
    ) -> Tensor:
        """Load one tensor, in the type it is stored in and in memory of its own, and mark it as used.

        Args:
            name: of the tensor.
            shape: that it should have.
            dtype: of a matrix that is stored quantized.
            part: of the tensor that is read and given; None: all.

        Raises:
            CheckpointError: the tensor is missing, has another shape, is not of a float type, or cannot be read.
        """
        if name in self._parts:
            return self._take_dense(name, shape, dtype, part)
        tensor = self.stored(name)
        if tensor.dtype not in FLOAT_TYPES:
            raise CheckpointError(
                f"{tensor.stored_name} is stored as {tensor.dtype} in {tensor.file}, and there are no scales beside it "
                f"(without scales, specmamba reads {', '.join(FLOAT_TYPES)})"
            )
        self._require_shape(tensor, shape)
        self._taken.add(name)
        return self._read(name, part)

    def take_quantized(self, name: str, shape: tuple[int, ...], part: Part | None = None) -> QuantizedMatrix | Tensor:
        """Load a matrix that is stored in parts, and mark them as used; see ``decode``.

        Args:
            name, shape: as for ``take``.
            part: of the matrix that is given. Of its codes no more is read, where a part of them can be decoded.

        Raises:
            CheckpointError: as ``decode``.
            ConfigError: groups do not end where the part does.
        """
        self._taken.update(self._parts[name].values())
        self._shapes[name] = tuple(shape)
        for stored in map(self._tensors.__getitem__, self._parts[name].values()):
            if stored.dtype not in PART_DTYPES:
                raise CheckpointError(
                    f"{stored.stored_name} is stored as {stored.dtype} in {stored.file}, as in no known quantized "
                    "format"
                )
        if part is not None and (found := self._take_part(name, shape, part)) is not None:
            return found
        parts = {role: self._read(stored) for role, stored in self._parts[name].items()}
        whole = decode(name, parts, shape, self._storage)
        return whole if part is None else part.of(whole)

    def numbers(self, name: str, shape: tuple[int, ...], rows: Sequence[int]) -> Tensor:
        """Some rows of a quantized matrix of this shape, as float32. Raises as ``take``."""
        return self._take_dense(name, shape, torch.float32, Part(0, torch.tensor(rows)))

    def leave(self, name: str, shape: tuple[int, ...]) -> None:
        """Mark a tensor as used that another rank takes. Raises CheckpointError: there is none of this shape."""
        if name not in self._parts:
            self._require_shape(self.stored(name), shape)
        self._shapes[name] = shape
        self._taken.update(self._parts.get(name, {name: name}).values())

    @staticmethod
    def _require_shape(tensor: StoredTensor, shape: tuple[int, ...]) -> None:
        if tensor.shape != tuple(shape):
            raise CheckpointError(
                f"{tensor.stored_name} has the shape {list(tensor.shape)} in {tensor.file}, "
                f"but its config.json asks for {list(shape)}"
            )

    def _take_dense(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, part: Part | None) -> Tensor:
        """A quantized matrix, or its part, as numbers; groups need not end where the part does."""
        try:
            found, rest = self.take_quantized(name, shape, part), None
        except ConfigError:
            found, rest = self.take_quantized(name, shape), part
        dense = found.dequantize(dtype) if isinstance(found, QuantizedMatrix) else found.to(dtype)
        return dense if rest is None else rest.of_tensor(dense)

    def _take_part(self, name: str, shape: tuple[int, ...], part: Part) -> QuantizedMatrix | None:
        """The part of a quantized matrix from the part of its codes; None: all of it must be decoded."""
        stored = {role: self._tensors[each] for role, each in self._parts[name].items()}
        role = next(role for role in CODES if role in stored)
        codes = torch.empty(stored[role].shape, dtype=PART_DTYPES[stored[role].dtype], device="meta")
        others = {other: self._read(each) for other, each in self._parts[name].items() if other != role}

        def read(role: str, own: Part) -> Tensor:
            return self._read(self._parts[name][role], own)

        return take_part(name, others | {role: codes}, shape, self._storage, part, read)

    def _read(self, name: str, part: Part | None = None) -> Tensor:
        from safetensors import SafetensorError

        tensor = self._tensors[name]
        try:
            mapped: Tensor = self._handles[tensor.file].get_tensor(tensor.stored_name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{tensor.stored_name} cannot be read from {tensor.file}: {error}") from None
        return copy_mapped(mapped, part)

    def finish(self, ignore: tuple[str, ...] = ()) -> None:
        """Check that the model took every tensor, except those whose names start with one of ``ignore``.

        Raises:
            CheckpointError: tensors are left over; the message names the first of them.
        """
        others = {name: tensor.stored_name for name, tensor in self._tensors.items() if name not in self._taken}
        self._ignored = [name for name in others if name.startswith(ignore) or is_of_activations(name)]
        ignored = set(self._ignored)
        left = [stored for name, stored in others.items() if name not in ignored]
        if left:
            more = f" and {len(left) - 5} more" if len(left) > 5 else ""
            raise CheckpointError(
                f"{self._folder} has tensors that the model in its config.json does not have: "
                + ", ".join(map(repr, left[:5]))
                + more
            )

    def report(self) -> StoredReport:
        """What was taken, and what was ignored."""
        parts = {part for parts in self._parts.values() for part in parts.values()}
        plain = [
            (name, tensor.dtype, self._run_forms.get(name, ""), tensor.num_bytes)
            for name, tensor in self._tensors.items()
            if name in self._taken and name not in parts and sum(size > 1 for size in tensor.shape) > 1
        ]
        taken = (name for name in self._parts if self._is_taken(name))
        forms = ((name, *self._form_and_bytes(name)) for name in taken)
        quantized = [(name, form, self._run_forms.get(name, ""), num_bytes) for name, form, num_bytes in forms]
        return summarize([*plain, *quantized], self._ignored)

    def note_run_form(self, name: str, form: str) -> None:
        """Remember for the report in what form a matrix runs."""
        self._run_forms[name] = form

    def _require_declared_kinds(self) -> None:
        """Raise CheckpointError where no matrix is stored as the config says."""
        found = {}
        for name, parts in self._parts.items():
            kind = kind_of({role: self._tensors[part].dtype for role, part in parts.items()})
            if kind is not None:
                found[name] = kind
        require_kinds(self._folder, self._storage.declared, found)

    def _is_taken(self, name: str) -> bool:
        return any(part in self._taken for part in self._parts[name].values())

    def _form_and_bytes(self, name: str) -> tuple[str, int]:
        """Of a quantized matrix."""
        parts = {role: self._tensors[part] for role, part in self._parts[name].items()}
        shapes = {role: (part.dtype, part.shape) for role, part in parts.items()}
        return form_of(shapes, self._shapes.get(name, ())), sum(part.num_bytes for part in parts.values())

    def _add(self, name: str, tensor: StoredTensor) -> None:
        other = self._tensors.setdefault(name, tensor)
        if other is not tensor:
            raise CheckpointError(
                f"two tensors are named {name!r}: {other.stored_name!r} in {other.file} "
                f"and {tensor.stored_name!r} in {tensor.file}"
            )

    def _open_shards(self) -> list[StoredTensor]:
        require_safetensors(self._folder)
        index = self._folder / INDEX_FILE
        weight_map = _read_index(index)
        shards = {name: self._open(self._folder / name) for name in sorted(set(weight_map.values()))}
        present = {(name, tensor.stored_name) for name, tensors in shards.items() for tensor in tensors}
        for tensor_name, shard in weight_map.items():
            if (shard, tensor_name) not in present:
                raise CheckpointError(f"{index} places {tensor_name!r} in {shard}, which lacks it")
        return [tensor for tensors in shards.values() for tensor in tensors]

    def _open(self, file: Path) -> list[StoredTensor]:
        from safetensors import SafetensorError, safe_open

        try:
            _require_bounded_header(file)
            handle = self._stack.enter_context(safe_open(file, framework="pt"))
            self._handles[file] = handle
            names = handle.keys()
            if len(names) > MAX_TENSORS:
                raise CheckpointError(f"{file} has {len(names)} tensors; {MAX_TENSORS} is the most that is read")
            slices = {name: handle.get_slice(name) for name in names}
            return [StoredTensor(name, file, tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()]
        except (SafetensorError, ValueError) as error:
            raise CheckpointError(f"{file} is truncated or not a safetensors file: {error}") from None
        except FileNotFoundError:
            raise CheckpointError(f"{file} is missing, though {INDEX_FILE} names it") from None
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from None


class ShapeReader(TensorReader):
    """A ``TensorReader`` whose tensors have shape and type, and no values: they are on PyTorch's meta device."""

    def _read(self, name: str, part: Part | None = None) -> Tensor:
        tensor = self._tensors[name]
        if name.endswith(".weight_shape") and prod(tensor.shape) <= MAX_DIMENSIONS:
            return super()._read(name)  # of compressed-tensors: the sizes of a matrix
        if name.endswith("g_idx") and prod(tensor.shape) <= MAX_INPUTS:
            return super()._read(name)  # matrices whose groups are no runs of inputs are dequantized
        shape = tensor.shape if part is None else part.shape(tensor.shape)
        return torch.empty(shape, dtype=PART_DTYPES[tensor.dtype], device="meta")


def have_same_values(x: Tensor, y: Tensor, guess: bool) -> bool:
    """Whether two tensors are equal; ``guess`` where their shapes are equal and one of them has no values."""
    return x.shape == y.shape and (guess if x.is_meta or y.is_meta else torch.equal(x, y))


def _require_bounded_header(file: Path) -> None:
    """Refuse a safetensors file with a header that is too long, before memory is allocated for it.

    Raises:
        CheckpointError: it is not a regular file, or its header is too long.
        OSError: it cannot be read.
    """
    require_file(file)
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{file} is truncated or not a safetensors file: its header would have {length} bytes; "
            f"{MAX_HEADER_BYTES} is the most that is read"
        )


def _renamed(name: str, renames: Iterable[tuple[str, str]]) -> str:
    for stored, wanted in renames:
        if name.startswith(stored):
            return wanted + name[len(stored) :]
    return name


def _read_index(file: Path) -> dict[str, str]:
    weight_map = read_json(file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f'{file} has no "weight_map" that says which shard holds which tensor')
    for shard in weight_map.values():
        if not isinstance(shard, str) or Path(shard).name != shard or "\\" in shard or "\0" in shard:
            raise CheckpointError(f"{file} names the shard {shard!r}, which is not the name of a file in its folder")
        if not shard.endswith(".safetensors"):
            raise CheckpointError(f"{file} names the shard {shard!r}: only .safetensors files are read")
    return weight_map
