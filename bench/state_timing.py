"""Times the kernels of the two ways to verify, on states that no cache holds; see state_bytes.py.

Both run the same nodes from the same states, interleaved, and must end in the same state: a figure of a kernel that
computes something else is worth nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specmamba.errors import ConfigError, SpecmambaError
from specmamba.kernels import gated_delta_rule, state_copy
from specmamba.kernels import tree as tree_ops
from specmamba.kernels.gated_delta_rule import torch_ops

if TYPE_CHECKING:
    from specmamba.bench.state_bytes import LayerShape, StateBytesConfig

TOLERANCE = 1e-4

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # q, k, v, g, beta


class Workload:
    """One cycle of verifies up to a fold: the trees, the nodes' inputs per layer, and the states at the start."""

    def __init__(self, config: StateBytesConfig, shape: LayerShape, is_chain: bool) -> None:
        from specmamba.bench.state_bytes import capacity, verifies_per_fold

        s, self.num_nodes = shape, config.timed_nodes
        self.batch_size, self.num_layers = config.batch_size, config.layers
        self.accept_length = min(config.accept_length, self.num_nodes)
        self.num_verifies = verifies_per_fold(self.num_nodes, self.accept_length)
        self.capacity, self.is_chain, self.shape = capacity(self.num_nodes), is_chain, shape
        # a comb: the accepted path is every other node, so that its records have to move
        parents = [i - 1 if is_chain or i % 2 else i - 2 for i in range(self.num_nodes)]
        self.path = [i if is_chain else 2 * i for i in range(self.accept_length)]
        if self.path[-1] >= self.num_nodes:
            raise ConfigError(f"--accept-length {self.accept_length}: a tree needs two nodes for each: --timed-nodes")
        self.parents = torch.tensor([[max(-1, parent) for parent in parents]] * self.batch_size)
        self.ancestors = tree_ops.ancestors(self.parents)
        torch.manual_seed(0)
        self.inputs = [self._inputs() for _ in range(self.num_layers)]
        states = (self.num_layers, self.batch_size, s.value_heads, s.key_dim, s.value_dim)
        self.states = torch.randn(states)

    def _inputs(self) -> Inputs:
        s, size, unit = self.shape, (self.batch_size, self.num_nodes), torch.nn.functional.normalize
        return (
            unit(torch.randn(*size, s.key_heads, s.key_dim), dim=-1) * s.key_dim**-0.5,
            unit(torch.randn(*size, s.key_heads, s.key_dim), dim=-1),
            torch.randn(*size, s.value_heads, s.value_dim),
            -torch.rand(*size, s.value_heads),
            torch.rand(*size, s.value_heads),
        )


class RecordsRun:
    """Verifies that write records, and the fold that their cycle ends with."""

    def __init__(self, work: Workload, ops: Any) -> None:
        s, rows = work.shape, (work.num_layers, work.batch_size, work.capacity)
        self._work, self._ops = work, ops
        self.states = work.states.clone()
        self._records = (
            torch.zeros(*rows, s.key_heads, s.key_dim),
            torch.zeros(*rows, s.value_heads, s.value_dim),
            torch.zeros(*rows, s.value_heads),
        )
        self._rows = torch.arange(work.batch_size)

    def cycle(self) -> None:
        """Up to and including the fold."""
        work = self._work
        for number in range(work.num_verifies):
            offset = number * work.accept_length
            for layer in range(work.num_layers):
                records = (x[layer] for x in self._records)
                state = self.states[layer]
                self._ops.tree_verify(*work.inputs[layer], state, *records, None, offset, work.ancestors)
            if not work.is_chain:
                self._commit(offset)
        pending = torch.full((work.batch_size,), work.num_verifies * work.accept_length)
        for layer in range(work.num_layers):
            k, u, decay = (x[layer, :, : int(pending[0])] for x in self._records)
            self.states[layer].copy_(self._ops.fold(self.states[layer], k, u, decay, pending))

    def _commit(self, offset: int) -> None:
        source = offset + torch.tensor([self._work.path] * self._work.batch_size)
        target = offset + torch.arange(self._work.accept_length).expand_as(source)
        for buffer in self._records:
            state_copy.compact(buffer, self._rows, source, target, source != target)


class SnapshotsRun:
    """Verifies that write states, each promoted by a copy."""

    def __init__(self, work: Workload) -> None:
        s = work.shape
        self._work = work
        self.states = work.states.clone()
        size = (work.num_layers, work.batch_size, work.num_nodes)
        self._snapshots = torch.zeros(*size, s.value_heads, s.key_dim, s.value_dim)

    def cycle(self) -> None:
        """As many verifies as there are in a cycle of records."""
        work = self._work
        parents = None if work.is_chain else work.parents
        for _ in range(work.num_verifies):
            for layer in range(work.num_layers):
                snapshots = self._snapshots[layer]
                torch_ops.tree_verify_snapshots(*work.inputs[layer], self.states[layer], snapshots, parents)
            for layer in range(work.num_layers):
                self.states[layer].copy_(self._snapshots[layer][:, work.path[-1]])


@torch.inference_mode()
def time_kernels(config: StateBytesConfig, shape: LayerShape) -> dict[str, Any]:
    """Milliseconds per verify of both, and their ratio, for trees and for chains.

    Raises:
        ConfigError: the accepted path does not fit the tree.
        SpecmambaError: the two ended in different states.
    """
    with _threads(config.num_threads):
        results = []
        for is_chain in (False, True):
            work = Workload(config, shape, is_chain)
            results += _time(work, config.rounds)
        return {
            "shape": config.timed_shape,
            "num_threads": torch.get_num_threads(),
            "num_nodes": work.num_nodes,
            "accept_length": work.accept_length,
            "verifies_per_fold": work.num_verifies,
            "batch_size": work.batch_size,
            "layers": work.num_layers,
            "rounds": config.rounds,
            "states_mib": work.states.nbytes / (1 << 20),
            "results": results,
        }


def _time(work: Workload, rounds: int) -> list[dict[str, Any]]:
    """The same PyTorch for both; and what runs, where that is another kernel."""
    snapshots = SnapshotsRun(work)
    records = {"PyTorch for both": RecordsRun(work, torch_ops)}
    if gated_delta_rule.tree_verify is not torch_ops.tree_verify:
        records["the kernels that run, snapshots in PyTorch"] = RecordsRun(work, gated_delta_rule)
    snapshots.cycle()  # the first cycle warms up and is compared
    for run in records.values():
        run.cycle()
    _check(snapshots, records)
    times: dict[str, list[float]] = {name: [] for name in ("snapshots", *records)}
    for _ in range(rounds):
        times["snapshots"].append(_milliseconds(snapshots.cycle) / work.num_verifies)
        for name, run in records.items():
            times[name].append(_milliseconds(run.cycle) / work.num_verifies)
    return [_result(work, name, times[name], times["snapshots"]) for name in records]


def _check(snapshots: SnapshotsRun, records: dict[str, RecordsRun]) -> None:
    for name, run in records.items():
        difference = float((run.states - snapshots.states).abs().max())
        if not difference <= TOLERANCE:
            raise SpecmambaError(f"records ({name}) and snapshots end in states that differ by {difference:.1e}")


def _result(work: Workload, name: str, records: list[float], snapshots: list[float]) -> dict[str, Any]:
    ratios = [mine / theirs for mine, theirs in zip(records, snapshots, strict=True)]
    return {
        "trees": "chains" if work.is_chain else "trees",
        "kernels": name,
        "records_ms": statistics.median(records),
        "snapshots_ms": statistics.median(snapshots),
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
    }


def _milliseconds(function: Callable[[], None]) -> float:
    began = time.perf_counter()
    function()
    return (time.perf_counter() - began) * 1e3


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
