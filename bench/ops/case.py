"""What the operator benchmark is made of: operators, the shapes they are timed at, and who competes.

The bytes of a case are those that have to cross the memory bus once whoever computes it: operands read, results
written. Its operations are those of the mathematics. Neither depends on how anybody does it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # --help must not wait for torch
    import torch
    from torch import Tensor

TORCH, TRITON, NATIVE = "torch", "triton", "native"
Precision = Literal["float32", "bfloat16"]
Run = Callable[[], "tuple[Tensor, ...]"]  # computes once; gives what has to agree with PyTorch's form


@dataclass(frozen=True)
class Case:
    """One shape of an operator."""

    name: str
    sizes: Mapping[str, int]
    dtype: Precision = "float32"  # of activations
    kind: str = ""  # which function, where an operator has several
    is_quick: bool = False  # also with --quick
    is_tiny: bool = False  # for dry runs and tests only

    def __getitem__(self, name: str) -> int:
        return self.sizes[name]

    @property
    def itemsize(self) -> int:
        """Bytes of an activation."""
        return 4 if self.dtype == "float32" else 2


@dataclass(frozen=True)
class Cost:
    """What a case takes at the least."""

    bytes: int
    flops: int
    precision: Precision = "float32"  # of the multiplications


@dataclass(frozen=True)
class Candidate:
    """A way to compute a case."""

    name: str
    prepare: Callable[[], Run]  # with its own copies of whatever it writes; imports what it needs
    tolerance: float | None = None  # how far results may be off, relative to the largest; None: the operator's
    package: str | None = None  # it is left out where this cannot be imported
    note: str = ""  # what is not the same work


@dataclass(frozen=True)
class Place:
    """Where cases are timed."""

    device: torch.device
    has_triton: bool  # kernels run there: on a GPU, or line by line in the interpreter


@dataclass(frozen=True)
class Operator:
    """One operator. ``candidates`` makes the inputs, PyTorch's form comes first."""

    name: str  # as specmamba.kernels has it: folder.function
    tests: tuple[str, ...]  # files under tests/kernels, without "test_" and ".py"
    cases: tuple[Case, ...]
    cost: Callable[[Case], Cost]
    candidates: Callable[[Case, Place], list[Candidate]]
    tolerance: float = 1e-4
    gpu_tests: tuple[str, ...] = field(default=())  # besides, where Triton runs

    def chosen(self, is_quick: bool, is_tiny: bool = False) -> list[Case]:
        """The cases to time."""
        if is_tiny:
            return [case for case in self.cases if case.is_tiny]
        return [case for case in self.cases if not case.is_tiny and (case.is_quick or not is_quick)]


def generator(case: Case) -> torch.Generator:
    """Random numbers of a case's inputs: the same in every run, and on every device."""
    import torch

    return torch.Generator().manual_seed(sum(map(ord, case.name)))


def counted(count: int, what: str) -> str:
    """Write a number with its noun, which has an s unless the number is 1."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def dtype_of(case: Case) -> torch.dtype:
    """The type of a case's activations."""
    import torch

    return torch.float32 if case.dtype == "float32" else torch.bfloat16
