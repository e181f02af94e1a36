"""Whether two stored matrices are one: some of their rows are compared, since all take too long."""

from __future__ import annotations

import torch

from specmamba.checkpoints.tensor_reader import TensorReader
from specmamba.errors import CheckpointError

NUM_SAMPLES = 64  # rows that are compared
MAX_ROUNDING = 0.3  # of the norm of rows: codes of 3 bits lose less, and other matrices differ by more than 1


def has_equal_rows(ours: TensorReader, name: str, theirs: TensorReader, their_name: str, dtype: torch.dtype) -> bool:
    """Whether two stored matrices have one shape and equal sampled rows.

    Codes equal codes of the same kind; a matrix in codes counts as another one than one without.

    Args:
        ours, theirs: where they are stored; may be the same.
        name, their_name: of the matrices.
        dtype: that rows are rounded to before, where they are no codes.

    Raises:
        CheckpointError: there is no such matrix, or its rows cannot be read.
    """
    stored, others = ours.stored(name), theirs.stored(their_name)
    is_alike = stored.shape == others.shape and ours.is_coded(name) == theirs.is_coded(their_name)
    if not is_alike or len(stored.shape) != 2 or (ours.is_coded(name) and stored.dtype != others.dtype):
        return False
    rows = range(0, stored.shape[0], max(1, stored.shape[0] // NUM_SAMPLES))
    read, of_target = ours.read_rows(name, rows), theirs.read_rows(their_name, rows)
    if ours.is_coded(name):
        return bool(read.equal(of_target))
    return bool(read.to(dtype).equal(of_target.to(dtype)))


def is_copy_beside_codes(reader: TensorReader, name: str, of: str) -> bool:
    """Whether one of two matrices is stored in codes, and its sampled rows are the other's but for rounding.

    A ``ShapeReader`` has no values of codes: there their shape decides.

    Args:
        reader: where they are stored.
        name, of: of the matrices.

    Raises:
        CheckpointError: there is no such matrix, or its rows cannot be read.
    """
    coded, plain = (name, of) if reader.is_coded(name) else (of, name)
    shape = reader.stored(plain).shape
    if reader.is_coded(plain) or not reader.is_coded(coded) or len(shape) != 2:
        return False
    rows = range(0, shape[0], max(1, shape[0] // NUM_SAMPLES))
    wanted = reader.read_rows(plain, rows).float()
    try:
        found = reader.numbers(coded, shape, rows)
    except CheckpointError:  # codes of another shape
        return False
    return found.is_meta or bool((found - wanted).norm() <= MAX_ROUNDING * wanted.norm())
