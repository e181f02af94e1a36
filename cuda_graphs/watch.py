"""Records the operators of a step, to find those that cannot be captured or would differ in a replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# operators that give the host a number, or a tensor whose size depends on numbers
HOST_READS = frozenset(
    {
        "aten::_local_scalar_dense",
        "aten::bincount",
        "aten::equal",
        "aten::is_nonzero",
        "aten::masked_select",
        "aten::nonzero",
        "aten::repeat_interleave.Tensor",
        "aten::_unique2",
        "aten::unique_consecutive",
        "aten::unique_dim",
    }
)
HOST_WRITES = frozenset({"aten::lift_fresh", "aten::lift_fresh_copy"})  # tensors made of numbers of the host
# methods that read memory behind the dispatcher's back
HOST_CALLS = frozenset({"tolist", "numpy", "cpu", "__array__"})
INDEXING = ("aten::index.", "aten::index_put", "aten::_index_put_impl", "aten::_unsafe_index")


@dataclass(frozen=True, slots=True)
class Operator:
    """One call: its name and arguments; of tensors dtype, shape, strides and place, not the values."""

    name: str
    arguments: tuple[Any, ...]


@dataclass
class Trace:
    """The operators, host reads and host writes of a function, in order."""

    operators: list[Operator] = field(default_factory=list)
    host_reads: list[str] = field(default_factory=list)
    host_writes: list[str] = field(default_factory=list)


class StepWatch(TorchDispatchMode):
    """Records every operator that PyTorch runs inside this context.

    Two runs that can be one captured graph have equal traces: the same operators, shapes and strides, the same places
    in fixed buffers, and the same host values.
    """

    def __init__(self, stays: Mapping[str, Tensor] | None = None) -> None:
        """``stays``: fixed buffers by name, the same memory in every run; views differ by their offset."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self._calls = _HostCalls(self.trace)
        self._owners = {x.untyped_storage().data_ptr(): name for name, x in (stays or {}).items()}

    def __enter__(self) -> StepWatch:
        self._calls.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._calls.__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        name, kwargs = func.name(), kwargs or {}
        if reads_host(name, args):
            self.trace.host_reads.append(name)
        if name in HOST_WRITES:
            self.trace.host_writes.append(name)
        leaves = tree_leaves((args, kwargs))
        self.trace.operators.append(Operator(name, tuple(self._describe(leaf) for leaf in leaves)))
        return func(*args, **kwargs)

    def _describe(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        owner = self._owners.get(leaf.untyped_storage().data_ptr())
        place = None if owner is None else (owner, leaf.storage_offset())
        return str(leaf.dtype), tuple(leaf.shape), leaf.stride(), place


class _HostCalls(TorchFunctionMode):
    """Records calls of tensor methods that bypass the dispatcher."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in HOST_CALLS:
            self._trace.host_reads.append(f"Tensor.{name}")
        return func(*args, **(kwargs or {}))


def reads_host(name: str, args: Sequence[Any]) -> bool:
    """Whether an operator needs numbers of the device on the host, to return them or for the size of its result."""
    return name in HOST_READS or (name.startswith(INDEXING) and _has_mask(args[1]))


def _has_mask(indices: Sequence[Tensor | None]) -> bool:
    """Whether an index has a mask, so that the size of the result depends on its values."""
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
