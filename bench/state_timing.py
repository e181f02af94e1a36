"""Times a recurrent layer under the two ways to verify, on states that no cache holds; see state_bytes.py.

A layer is all that lies between its projections: convolution, gates, delta rule, gated norm. Both ways run the same
nodes from the same states, interleaved, and must end in the same state: a figure of a kernel that computes something
else is worth nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specmamba.bench.state_workload import Workload
from specmamba.errors import SpecmambaError
from specmamba.kernels import causal_conv1d, delta_net, state_copy, state_records
from specmamba.kernels.gated_delta_rule import torch_ops
from specmamba.kernels.state_records import torch_ops as record_ops

if TYPE_CHECKING:
    from specmamba.bench.state_bytes import LayerShape, StateBytesConfig

TOLERANCE = 1e-4


class RecordsRun:
    """Verifies that write records, and the fold that their cycle ends with."""

    def __init__(self, work: Workload, is_fused: bool) -> None:
        s, rows = work.shape, (work.num_layers, work.batch_size)
        self._work, self._is_fused, self._window = work, is_fused, s.conv_width - 1
        self.states = work.states.clone()
        self._conv_inputs = torch.zeros(*rows, self._window + work.capacity, s.channels, dtype=work.dtype)
        self._records = (
            torch.zeros(*rows, work.capacity, s.key_heads, s.key_dim),
            torch.zeros(*rows, work.capacity, s.value_heads, s.value_dim),
            torch.zeros(*rows, work.capacity, s.value_heads),
        )
        of_layers = zip(self.states, self._conv_inputs, *self._records, strict=True)
        self._layers = [state_records.Buffers(*of_layer) for of_layer in of_layers]
        self._rows = torch.arange(work.batch_size)

    @staticmethod
    def can_fuse(work: Workload) -> bool:
        """Whether the one call that verifies in the engine can be had here."""
        run = RecordsRun(work, is_fused=True)
        return delta_net.can_fuse(*work.layers[0], run._layers[0])

    def cycle(self) -> None:
        """Up to and including the fold."""
        work = self._work
        for number in range(work.num_verifies):
            offset = number * work.accept_length
            index = work.conv_index + offset  # every record before the nodes is pending
            trees = state_records.Trees(self._rows, self._rows, index, None, offset, work.ancestors)
            for (inputs, weights), buffers in zip(work.layers, self._layers, strict=True):
                if self._is_fused:
                    delta_net.tree_verify(inputs, weights, buffers, trees)
                else:
                    self._verify_part_by_part(inputs, weights, buffers, trees)
            if not work.is_chain:
                self._commit(offset)
        self._fold(work.num_verifies * work.accept_length)

    def _verify_part_by_part(
        self,
        inputs: delta_net.Inputs,
        weights: delta_net.Weights,
        buffers: state_records.Buffers,
        trees: state_records.Trees,
    ) -> None:
        def convolve(x: Tensor, weight: Tensor) -> Tensor:
            first = self._window + trees.node_offset
            stored = buffers.conv_inputs[:, : first + x.shape[1]]
            stored[:, first:] = x
            return causal_conv1d.tree_verify(stored, trees.conv_index, weight)

        def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
            records = buffers.k, buffers.u, buffers.decay
            return torch_ops.tree_verify(
                q, k, v, g, beta, buffers.states, *records, None, trees.node_offset, trees.ancestors
            )

        delta_net.compose(inputs, weights, convolve, delta_rule)

    def _commit(self, offset: int) -> None:
        if list(self._work.path) == list(range(self._work.accept_length)):
            return  # they stand where they stay
        source = offset + torch.tensor([self._work.path] * self._work.batch_size)
        target = offset + torch.arange(self._work.accept_length).expand_as(source)
        for buffer in self._records:
            state_copy.compact(buffer, self._rows, source, target)
        state_copy.compact(self._conv_inputs, self._rows, source + self._window, target + self._window)

    def _fold(self, count: int) -> None:
        fold = state_records.fold if self._is_fused else record_ops.fold
        pending = torch.full((self._work.batch_size,), count)
        for x in self._layers:
            fold(x.states, x.k[:, :count], x.u[:, :count], x.decay[:, :count], pending, x.states)
            x.conv_inputs[:, : self._window] = x.conv_inputs[:, count : count + self._window].clone()


class SnapshotsRun:
    """Verifies that write states and windows, each promoted by a copy."""

    def __init__(self, work: Workload) -> None:
        s, rows = work.shape, (work.num_layers, work.batch_size)
        self._work = work
        self.states = work.states.clone()
        self._windows = torch.zeros(*rows, s.conv_width - 1, s.channels, dtype=work.dtype)
        self._snapshots = torch.zeros(*rows, work.num_nodes, s.value_heads, s.key_dim, s.value_dim)
        self._window_snapshots = torch.zeros(*rows, work.num_nodes, s.conv_width - 1, s.channels, dtype=work.dtype)

    def cycle(self) -> None:
        """As many verifies as there are in a cycle of records."""
        last = self._work.path[-1]
        for _ in range(self._work.num_verifies):
            for layer in range(self._work.num_layers):
                self._verify(layer)
            self.states.copy_(self._snapshots[:, :, last])
            self._windows.copy_(self._window_snapshots[:, :, last])

    def _verify(self, layer: int) -> None:
        work = self._work
        parents = None if work.is_chain else work.parents

        def convolve(x: Tensor, weight: Tensor) -> Tensor:
            y, after = causal_conv1d.tree_verify_snapshots(x, self._windows[layer], work.conv_index, weight)
            self._window_snapshots[layer] = after
            return y

        def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
            return torch_ops.tree_verify_snapshots(
                q, k, v, g, beta, self.states[layer], self._snapshots[layer], parents
            )

        delta_net.compose(*work.layers[layer], convolve, delta_rule)


@torch.inference_mode()
def time_kernels(config: StateBytesConfig, shape: LayerShape) -> dict[str, Any]:
    """Milliseconds per verify of both, all layers, and their ratio, for trees and for chains.

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
    """The same parts one after the other for both; and the one call that the engine makes, where it can be had."""
    snapshots = SnapshotsRun(work)
    records = {"part by part for both": RecordsRun(work, is_fused=False)}
    if RecordsRun.can_fuse(work):
        records["records in the engine's one call, snapshots part by part"] = RecordsRun(work, is_fused=True)
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
