"""What the operator benchmark is made of: operators, the shapes they are timed at, their forms, and inputs.

The bytes of a case are those that must cross the memory bus once for any form: operands read, results written. Its
operations are those of the mathematics. Both are the same for all forms of an operator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from specmamba.kernels import state_records
from specmamba.kernels import tree as tree_ops

TORCH, TRITON, NATIVE = "torch", "triton", "native"
Precision = Literal["float32", "bfloat16"]
Run = Callable[[], tuple[Tensor, ...]]  # computes once; returns what must agree with PyTorch's form
QWEN = {"key_heads": 16, "heads": 32, "key": 128, "value": 128}  # Qwen3-Next, Qwen3.5
FALCON = {"key_heads": 1, "heads": 24, "key": 128, "value": 64}  # Falcon-H1-0.5B
NEMOTRON = {"key_heads": 8, "heads": 128, "key": 128, "value": 64}  # Nemotron-H-8B
TINY = {"key_heads": 1, "heads": 2, "key": 16, "value": 16}
WINDOW = 3


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

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type of activations."""
        return torch.float32 if self.dtype == "float32" else torch.bfloat16

    def generator(self) -> torch.Generator:
        """The random numbers of the inputs: the same in every run and on every device."""
        return torch.Generator().manual_seed(sum(map(ord, self.name)))


@dataclass(frozen=True)
class Cost:
    """The least work of a case."""

    bytes: int
    flops: int
    precision: Precision = "float32"  # of the multiplications


@dataclass(frozen=True)
class Candidate:
    """One form of an operator, or another package's function, on the inputs of a case."""

    name: str
    prepare: Callable[[], Run]  # makes copies of what it writes; imports what it needs
    tolerance: float | None = None  # allowed error of results relative to the largest; None: the operator's
    package: str | None = None  # left out where this package cannot be imported
    note: str = ""  # how its work differs from the operator's


@dataclass(frozen=True)
class Place:
    """Where cases are timed."""

    device: torch.device
    has_triton: bool  # Triton's kernels run: on a GPU, or in Triton's interpreter

    def forms(
        self,
        in_torch: Callable[[], Run],
        in_triton: Callable[[], Run],
        native: Callable[[], Run] | None = None,
        tolerance: float | None = None,
    ) -> list[Candidate]:
        """The forms of an operator that run here, PyTorch's first; the native form only where Triton's cannot run.

        Args:
            in_torch: prepares PyTorch's form.
            in_triton: prepares Triton's form.
            native: prepares the native form; None: there is none for these inputs.
            tolerance: of the forms other than PyTorch's; None: the operator's.
        """
        found = [Candidate(TORCH, in_torch)]
        if self.has_triton:
            return [*found, Candidate(TRITON, in_triton, tolerance)]
        return found if native is None else [*found, Candidate(NATIVE, native, tolerance)]


@dataclass(frozen=True)
class Operator:
    """One operator. ``candidates`` makes the inputs and the forms, PyTorch's first."""

    name: str  # as specmamba.kernels has it: folder.function
    tests: tuple[str, ...]  # files under tests/kernels, without "test_" and ".py"
    cases: tuple[Case, ...]
    cost: Callable[[Case], Cost]
    candidates: Callable[[Case, Place], list[Candidate]]
    tolerance: float = 1e-4
    gpu_tests: tuple[str, ...] = field(default=())  # more test files, where Triton runs

    def chosen(self, is_quick: bool, is_tiny: bool = False) -> list[Case]:
        """The cases to time."""
        if is_tiny:
            return [case for case in self.cases if case.is_tiny]
        return [case for case in self.cases if not case.is_tiny and (case.is_quick or not is_quick)]


def counted(count: int, what: str) -> str:
    """Write a number with its noun, which has an s unless the number is 1."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


@dataclass(frozen=True)
class Layer:
    """One recurrent layer: buffers, trees, and the nodes' inputs in argument order. Request r has row r and slot r."""

    inputs: tuple[Tensor, ...]
    buffers: state_records.Buffers
    trees: state_records.Trees
    parents: Tensor

    def copied(self) -> Layer:
        """A copy with buffers of its own."""
        b = self.buffers
        own = replace(b, states=b.states.clone(), k=b.k.clone(), u=b.u.clone(), decay=b.decay.clone())
        return replace(self, buffers=own)


def tree_parents(case: Case) -> Tensor:
    """Parents [B, N] of chains, or of binary trees, which look like drafts of top-k."""
    nodes = range(case["nodes"])
    parents = [i - 1 for i in nodes] if case.kind == "chain" else [-1, *((i - 1) // 2 for i in nodes[1:])]
    return torch.tensor([parents] * case["batch"])


def delta_inputs(case: Case, length: int, gen: torch.Generator) -> tuple[Tensor, ...]:
    """q, k, v, g, beta of the gated delta rule, on the CPU."""
    batch, heads = case["batch"], case["heads"]
    q, k = F.normalize(torch.randn(2, batch, length, case["key_heads"], case["key"], generator=gen), dim=-1).unbind()
    v = torch.randn(batch, length, heads, case["value"], generator=gen)
    g = -F.softplus(torch.randn(batch, length, heads, generator=gen) - 3)
    return q * case["key"] ** -0.5, k, v, g, torch.rand(batch, length, heads, generator=gen)


def ssd_inputs(case: Case, length: int, gen: torch.Generator) -> tuple[Tensor, ...]:
    """c, b, u, g of Mamba2, on the CPU."""
    batch, heads = case["batch"], case["heads"]
    c, b = (torch.randn(2, batch, length, case["key_heads"], case["key"], generator=gen) * case["key"] ** -0.5).unbind()
    u = torch.randn(batch, length, heads, case["value"], generator=gen)
    return c, b, u, -F.softplus(torch.randn(batch, length, heads, generator=gen) - 3)


def make_layer(case: Case, place: Place, inputs_of: Callable[..., tuple[Tensor, ...]]) -> Layer:
    """Make checkpoints, pending records and trees of random numbers. Row 0 and slot 0 are padding, as in the pools."""
    gen, batch, pending, nodes = case.generator(), case["batch"], case["pending"], case["nodes"]
    records = max(16, 2 * nodes, pending + nodes)  # as the cache sizes them
    channels = 2 * case["key_heads"] * case["key"] + case["heads"] * case["value"]
    shape = batch + 1, records
    buffers = state_records.Buffers(
        states=torch.randn(batch + 1, case["heads"], case["key"], case["value"], generator=gen),
        conv_inputs=torch.randn(batch + 1, WINDOW + records, channels, generator=gen),
        k=F.normalize(torch.randn(*shape, case["key_heads"], case["key"], generator=gen), dim=-1),
        u=torch.randn(*shape, case["heads"], case["value"], generator=gen),
        decay=-torch.rand(*shape, case["heads"], generator=gen).mul(0.1),
        windows=torch.randn(batch + 1, WINDOW, channels, generator=gen),
    )
    parents = tree_parents(case)
    index = tree_ops.conv_index(parents, WINDOW + 1) + WINDOW + pending
    places, counts = torch.arange(1, batch + 1), torch.full((batch,), pending)
    where = places, places.clone(), index, counts, pending, tree_ops.ancestors(parents)
    trees = state_records.Trees(*where, is_chain=case.kind == "chain")
    inputs = inputs_of(case, nodes, gen)
    to = partial(moved, device=place.device)
    return Layer(tuple(x.to(place.device) for x in inputs), to(buffers), to(trees), parents.to(place.device))


def moved(operand: Any, device: torch.device) -> Any:
    """Move the tensors of a dataclass to a device; strides are kept."""
    values = {field.name: getattr(operand, field.name) for field in fields(operand)}
    return replace(operand, **{name: x.to(device) for name, x in values.items() if isinstance(x, Tensor)})


def records_of(layer: Layer, nodes: slice) -> tuple[Tensor, ...]:
    """Views of the records of these nodes: k, u, decay."""
    b = layer.buffers
    return b.k[1:, nodes], b.u[1:, nodes], b.decay[1:, nodes]


def triton_ops(name: str) -> Any:
    """The Triton launchers of an operator. Raises ImportError."""
    return import_module(f"specmamba.kernels.{name}.triton_ops")
