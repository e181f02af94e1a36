"""Records and snapshots behind one interface: the same states, whatever tree is verified and whatever is accepted."""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from specmamba.cache.memory import plan_memory
from specmamba.cache.shapes import CacheShape, KVShape, StateShape, pending_capacity
from specmamba.cache.state_pool import Stamp, StateOwnershipError, StatePool
from specmamba.config import EngineConfig
from specmamba.core import Batch, DraftTree, TreeShape
from specmamba.draft.drafter import Drafter, chain_shape
from specmamba.engine.engine import Engine
from specmamba.errors import ConfigError
from specmamba.kernels import causal_conv1d, delta_net, gated_delta_rule, mamba2, ssd
from specmamba.kernels.causal_conv1d import reference as conv_reference
from specmamba.kernels.causal_conv1d import torch_ops as conv_ops
from specmamba.kernels.gated_delta_rule import reference as delta_reference
from specmamba.kernels.gated_delta_rule import torch_ops as delta_ops
from specmamba.kernels.ssd import reference as ssd_reference
from specmamba.kernels.tree import reference as tree_reference
from specmamba.layers import gated_delta_net as gated_delta_net_layer
from specmamba.layers import mamba2 as mamba2_layer
from specmamba.sampling_params import SamplingParams
from specmamba.verify.record_buffers import RecordBuffers
from specmamba.verify.snapshot_buffers import SnapshotBuffers
from specmamba.verify.state_buffers import StateBuffers
from tests.kernels.trees import SHAPES, batch_of_parents, path_to, random_parents, real_nodes, shape_of
from tests.pairwise import pairwise
from tests.tiny import write_tiny_checkpoint

pytestmark = pytest.mark.usefixtures("no_headroom")

CPU = torch.device("cpu")
IS_FULL = os.environ.get("SPECMAMBA_TEST_FULL") == "1"
NUM_LAYERS = 2
STATE = StateShape(num_key_heads=1, num_value_heads=2, key_dim=4, value_dim=3, conv_width=4)
BACKENDS: dict[str, type[StateBuffers[Any]]] = {"records": RecordBuffers, "snapshots": SnapshotBuffers}
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}
CACHE_OWNER = "tree"

Tokens = dict[str, Tensor]  # x, q, k, v, g, beta: [layers, B, N, ...]


class Recurrence(NamedTuple):
    """One of the two kinds: its operator, which tokens it takes, and the reference."""

    advance: Callable[..., Tensor]
    inputs: tuple[str, ...]
    extend: Callable[..., tuple[Tensor, Tensor]]
    has_conv_bias: bool

    def of(self, t: Tokens, layer: int) -> list[Tensor]:
        return [t[name][layer] for name in self.inputs]


DELTA_RULE = Recurrence(
    gated_delta_rule.advance, ("q", "k", "v", "g", "beta"), delta_reference.extend, has_conv_bias=False
)
SSD = Recurrence(ssd.advance, ("q", "k", "v", "g"), ssd_reference.extend, has_conv_bias=True)  # C, B, dt x

each_backend = pytest.mark.parametrize("backend", BACKENDS)
each_recurrence = pytest.mark.parametrize("recurrence", [DELTA_RULE, SSD], ids=["delta_rule", "ssd"])


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def cache_shape(state: StateShape = STATE, dtype: torch.dtype = torch.float32) -> CacheShape:
    return CacheShape(kv=(KVShape(1, 1, 2),), num_state_layers=NUM_LAYERS, state=state, dtype=dtype)


def make_tokens(batch: int, nodes: int, s: StateShape = STATE, layers: int = NUM_LAYERS) -> Tokens:
    """What a model would feed to the layers for a batch of trees."""
    unit, size = torch.nn.functional.normalize, (layers, batch, nodes)
    return {
        "x": torch.randn(*size, s.conv_channels),
        "q": unit(torch.randn(*size, s.num_key_heads, s.key_dim), dim=-1) * s.key_dim**-0.5,
        "k": unit(torch.randn(*size, s.num_key_heads, s.key_dim), dim=-1),
        "v": torch.randn(*size, s.num_value_heads, s.value_dim),
        "g": -torch.rand(*size, s.num_value_heads) * 0.5,
        "beta": torch.rand(*size, s.num_value_heads),
    }


class Sequential:
    """One request by the kernels' reference, in float64, token after token; remembers the latest states."""

    def __init__(self, state: StateShape = STATE, recurrence: Recurrence = DELTA_RULE) -> None:
        s, self.recurrence = state, recurrence
        shape = (NUM_LAYERS, s.num_value_heads, s.key_dim, s.value_dim)
        window = (NUM_LAYERS, s.conv_width - 1, s.conv_channels)
        zeros = torch.zeros(shape, dtype=torch.float64), torch.zeros(window, dtype=torch.float64)
        self.position = 0
        self.latest = deque([zeros], maxlen=64)  # states and windows, all layers; the last stands at ``position``

    def at(self, position: int) -> tuple[Tensor, Tensor]:
        return self.latest[position - self.position - 1]

    def run(self, tokens: Tokens, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Run tokens [layers, T, ...] -> convolved [layers, T, C] and outputs [layers, T, Hv, V]."""
        mixed, outputs = [], []
        one = torch.ones(NUM_LAYERS, dtype=torch.int64)
        for i in range(tokens["g"].shape[1]):
            t = {name: x[:, i : i + 1].double() for name, x in tokens.items()}
            state, window = self.latest[-1]
            y, window = conv_reference.extend(t["x"], window, weight.double(), one, bias)
            out, state = self.recurrence.extend(*(t[name] for name in self.recurrence.inputs), state, one)
            self.latest.append((state, window))
            self.position += 1
            mixed.append(y)
            outputs.append(out)
        return torch.cat(mixed, 1), torch.cat(outputs, 1)


class Bench:
    """Backends side by side, each with its own pool, all driven by the same inputs. Unread memory holds NaN."""

    def __init__(
        self,
        backends: Sequence[str],
        num_rows: int,
        max_nodes: int,
        seed: int = 0,
        state: StateShape = STATE,
        recurrence: Recurrence = DELTA_RULE,
    ) -> None:
        self.state, self.recurrence, self.rng = state, recurrence, random.Random(seed)
        self.weight = torch.randn(state.conv_channels, state.conv_width)
        self.bias = torch.randn(state.conv_channels) if recurrence.has_conv_bias else None
        self.pools = {name: StatePool(cache_shape(state), 2 * num_rows, CPU) for name in backends}
        self.buffers = {
            name: BACKENDS[name](cache_shape(state), pool, num_rows, max_nodes, CPU)
            for name, pool in self.pools.items()
        }
        for thing in (*self.pools.values(), *self.buffers.values()):
            for value in vars(thing).values():
                if isinstance(value, Tensor) and value.is_floating_point():
                    value.fill_(torch.nan)
        self.references: dict[int, Sequential] = {}
        self.slots: dict[int, int] = {}

    def begin(self, *rows: int) -> None:
        """Rows start in slots of another order."""
        for row in self.rng.sample(rows, len(rows)):
            for name, pool in self.pools.items():
                slot = pool.allocate(f"request-{row}")
                assert slot is not None
                assert self.slots.setdefault(row, slot) == slot  # the same in every pool
                self.buffers[name].begin(row, slot, f"request-{row}", 0)
            self.references[row] = Sequential(self.state, self.recurrence)

    def restart(self, row: int) -> None:
        slot = self.slots.pop(row)
        for name, pool in self.pools.items():
            self.buffers[name].end(row)
            pool.free(slot, f"request-{row}")
        self.begin(row)

    def round(self, rows: Sequence[int], parents: Sequence[list[int]], ends: Sequence[int] | None = None) -> None:
        """Verify a tree per row and accept the path to a node (None: to a random one that is not padding)."""
        shape = shape_of(parents)
        tokens = make_tokens(len(rows), shape.num_nodes, self.state)
        ends = ends or [self.rng.choice(real_nodes(tree)) for tree in parents]
        paths = [path_to(tree, end) for tree, end in zip(parents, ends, strict=True)]
        padded = torch.tensor([path + path[-1:] * (shape.num_nodes - len(path)) for path in paths])
        accepted = [len(path) - 1 for path in paths]
        results = {
            name: self._step(buffers, rows, shape, tokens, padded, accepted) for name, buffers in self.buffers.items()
        }
        first, *others = results.values()
        is_real = torch.tensor([[i in real_nodes(tree) for i in range(shape.num_nodes)] for tree in parents])
        for other in others:
            for mine, theirs in zip(first, other, strict=True):
                torch.testing.assert_close(mine[:, is_real], theirs[:, is_real], **TOLERANCE)
        wanted = [
            self.references[row].run({name: x[:, b, path] for name, x in tokens.items()}, self.weight, self.bias)
            for b, (row, path) in enumerate(zip(rows, paths, strict=True))
        ]
        on_path = [(b, node) for b, path in enumerate(paths) for node in path]
        index: Any = tuple(torch.tensor(x) for x in zip(*on_path, strict=True))
        for result in results.values():
            for got, want in zip(result, zip(*wanted, strict=True), strict=True):
                torch.testing.assert_close(got[(slice(None), *index)].double(), torch.cat(want, 1), **TOLERANCE)
        for row in rows:
            for buffers in self.buffers.values():
                assert buffers.position(row) == self.references[row].position

    def _step(
        self,
        buffers: StateBuffers[Any],
        rows: Sequence[int],
        shape: TreeShape,
        t: Tokens,
        path: Tensor,
        accepted: list[int],
    ) -> tuple[Tensor, Tensor]:
        plan = buffers.plan(rows, shape)
        layers = range(NUM_LAYERS)
        operands = [buffers.operands(layer, plan) for layer in layers]
        mixed = [causal_conv1d.advance(t["x"][layer], self.weight, self.bias, operands[layer]) for layer in layers]
        out = [self.recurrence.advance(*self.recurrence.of(t, layer), operands[layer]) for layer in layers]
        buffers.commit(plan, path, torch.tensor(accepted), accepted)
        return torch.stack(mixed), torch.stack(out)

    def check_positions(self, row: int) -> None:
        """Every position that can be had, in every backend: the right state and window, and nothing else changes."""
        for name, buffers in self.buffers.items():
            pool, positions = self.pools[name], buffers.positions(row)
            slot = pool.allocate(CACHE_OWNER)
            assert slot is not None
            for position in self.rng.sample(positions, len(positions)):
                before = others_of(pool, slot)
                buffers.materialize(row, position, slot)
                assert pool.stamp(slot) == Stamp(CACHE_OWNER, position, is_written=True)
                state, window = self.references[row].at(position)
                torch.testing.assert_close(pool.recurrent[:, slot].double(), state, **TOLERANCE)
                assert torch.equal(pool.conv[:, slot].double(), window)
                assert buffers.positions(row) == positions
                after = others_of(pool, slot)
                assert all(
                    torch.equal(x.nan_to_num(9.0), y.nan_to_num(9.0)) for x, y in zip(before, after, strict=True)
                )
            pool.free(slot, CACHE_OWNER)


def others_of(pool: StatePool, slot: int) -> tuple[Tensor, Tensor]:
    others = [i for i in range(pool.num_slots + 1) if i != slot]
    return pool.recurrent[:, others], pool.conv[:, others]


class TestSideBySide:
    @pytest.mark.fast_cases(2)
    @each_recurrence
    @pytest.mark.parametrize(
        ("num_rounds", "shapes"), [(500 if IS_FULL else 200, SHAPES), (100, ("chain",))], ids=["trees", "chains"]
    )
    def test_rounds_of_random_trees(self, num_rounds: int, shapes: tuple[str, ...], recurrence: Recurrence) -> None:
        """Rows with gaps that come and go, trees of any size, any accepted depth; row 3 and all padding stay NaN."""
        max_nodes, rows = 9, [1, 2, 4]
        bench = Bench(list(BACKENDS), 4, max_nodes, seed=num_rounds, recurrence=recurrence)
        bench.begin(*rows)
        for number in range(num_rounds):
            chosen = sorted(bench.rng.sample(rows, bench.rng.randint(1, len(rows))))
            num_nodes = bench.rng.randint(1, max_nodes)
            bench.round(chosen, [random_parents(bench.rng.choice(shapes), num_nodes, bench.rng) for _ in chosen])
            if number % 10 == 9:
                bench.check_positions(bench.rng.choice(chosen))
            if number % 60 == 59:
                bench.restart(bench.rng.choice(rows[:2]))
        assert bench.references[4].position > num_rounds  # one text runs from the first round to the last
        for name, buffers in bench.buffers.items():
            for value in vars(buffers).values():
                if isinstance(value, Tensor) and value.is_floating_point():
                    assert value[:, [0, 3]].isnan().all(), name

    @pytest.mark.parametrize("width", [1, 2, 6])
    def test_convolution_widths(self, width: int) -> None:
        state = StateShape(num_key_heads=2, num_value_heads=2, key_dim=2, value_dim=2, conv_width=width)
        bench = Bench(list(BACKENDS), 3, 5, seed=width, state=state)
        bench.begin(1, 2, 3)
        for _ in range(20):
            rows = bench.rng.choice([[1], [1, 3], [1, 2, 3]])
            bench.round(rows, [random_parents(bench.rng.choice(SHAPES), 5, bench.rng) for _ in rows])
            bench.check_positions(rows[-1])

    @each_recurrence
    @pytest.mark.parametrize("num_nodes", [1, 3, 8])
    def test_all_and_nothing_accepted(self, num_nodes: int, recurrence: Recurrence) -> None:
        bench = Bench(list(BACKENDS), 2, 8, recurrence=recurrence)
        bench.begin(1, 2)
        for _ in range(12):
            bench.round([1, 2], [list(range(-1, num_nodes - 1))] * 2, ends=[num_nodes - 1, 0])
            bench.check_positions(1)
            bench.check_positions(2)
        assert [bench.references[row].position for row in (1, 2)] == [12 * num_nodes, 12]

    def test_windows_in_bfloat16(self) -> None:
        """The windows have the model's type; both backends hold the very same inputs."""
        shape, weight = cache_shape(dtype=torch.bfloat16), torch.randn(STATE.conv_channels, 4)
        tokens = make_tokens(1, 6)
        found = []
        for backend in BACKENDS.values():
            pool = StatePool(shape, 1, CPU)
            slot = pool.allocate("a")
            assert slot is not None
            buffers = backend(shape, pool, 1, 6, CPU)
            buffers.begin(1, slot, "a", 0)
            tree = shape_of([[-1, 0, 0, 1, 1, 2]])
            for _ in range(2):
                plan = buffers.plan([1], tree)
                mixed = causal_conv1d.advance(tokens["x"][0].bfloat16(), weight, None, buffers.operands(0, plan))
                buffers.commit(plan, torch.tensor([[0, 1, 4, 4, 4, 4]]), torch.tensor([2]), [2])
            found.append(mixed)
        torch.testing.assert_close(found[0], found[1], **TOLERANCE)


class TestLayer:
    """All of a layer between its projections, which records may do in one call."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(
        ("method", "op", "mix"),
        [("delta_net", delta_net, gated_delta_net_layer.mix), ("mamba2", mamba2, mamba2_layer.mix)],
    )
    def test_rounds_of_random_trees(self, method: str, op: Any, mix: Callable[..., Tensor], dtype: torch.dtype) -> None:
        """Whichever way it is done, and wherever rows and slots lie: the same outputs, states and windows."""
        shape, rng, max_nodes = cache_shape(dtype=dtype), random.Random(1), 6
        names = ("fused", "parts", "snapshots")
        pools = {name: StatePool(shape, 6, CPU) for name in names}
        kinds: dict[str, Any] = {"fused": RecordBuffers, "parts": RecordBuffers, "snapshots": SnapshotBuffers}
        buffers: dict[str, StateBuffers[Any]] = {
            name: kind(shape, pools[name], 3, max_nodes, CPU) for name, kind in kinds.items()
        }
        for row in (2, 1, 3):  # slots of another order
            for name, pool in pools.items():
                slot = pool.allocate(f"request-{row}")
                assert slot is not None
                buffers[name].begin(row, slot, f"request-{row}", 0)
        make_weights, make_inputs = LAYERS[method]
        weights = make_weights()
        for _ in range(25):
            rows = sorted(rng.sample((1, 2, 3), rng.randint(1, 3)))
            num_nodes = rng.randint(1, max_nodes)
            parents = [random_parents(rng.choice(SHAPES), num_nodes, rng) for _ in rows]
            paths = [path_to(tree, rng.choice(real_nodes(tree))) for tree in parents]
            accepted = [len(path) - 1 for path in paths]
            padded = torch.tensor([path + path[-1:] * (num_nodes - len(path)) for path in paths])
            is_real = torch.tensor([[i in real_nodes(tree) for i in range(num_nodes)] for tree in parents])
            inputs, outputs = [make_inputs(len(rows), num_nodes, dtype) for _ in range(NUM_LAYERS)], {}
            for name, backend in buffers.items():
                plan = backend.plan(rows, shape_of(parents))
                out = []
                for layer in range(NUM_LAYERS):
                    state, of_layer = backend.operands(layer, plan), inputs[layer]
                    if name == "fused" and op.can_fuse(state, of_layer, weights):
                        out.append(op.tree_verify(of_layer, weights, state.buffers, state.trees))
                    else:
                        out.append(mix(of_layer, weights, state))
                backend.commit(plan, padded, torch.tensor(accepted), accepted)
                outputs[name] = torch.stack(out)[:, is_real]
                assert outputs[name].dtype is dtype
            for name in names[1:]:
                tolerance = TOLERANCE if dtype is torch.float32 else {"rtol": 1e-2, "atol": 1e-5}
                torch.testing.assert_close(outputs[name], outputs["fused"], **tolerance)
        for row in (1, 2, 3):
            found = []
            for name, pool in pools.items():
                slot = pool.allocate(CACHE_OWNER)
                assert slot is not None
                buffers[name].materialize(row, buffers[name].position(row), slot)
                found.append((pool.recurrent[:, slot], pool.conv[:, slot]))
            for recurrent, window in found[1:]:
                torch.testing.assert_close(recurrent, found[0][0], **TOLERANCE)
                assert torch.equal(window, found[0][1])


def delta_net_weights(s: StateShape = STATE) -> delta_net.Weights:
    return delta_net.Weights(
        conv=torch.randn(s.conv_width, s.conv_channels).t(),
        negative_a=-torch.rand(s.num_value_heads),
        dt_bias=torch.randn(s.num_value_heads),
        norm=torch.rand(s.value_dim),
        norm_eps=1e-6,
        num_key_heads=s.num_key_heads,
        key_dim=s.key_dim,
    )


def delta_net_inputs(batch: int, nodes: int, dtype: torch.dtype, s: StateShape = STATE) -> delta_net.Inputs:
    """Parts of one projection."""
    sizes = [s.conv_channels, s.num_value_heads * s.value_dim, s.num_value_heads, s.num_value_heads]
    mixed, gate, b, a = torch.randn(batch, nodes, sum(sizes)).to(dtype).split(sizes, -1)
    return delta_net.Inputs(mixed, gate.view(batch, nodes, s.num_value_heads, s.value_dim), b, a)


def mamba2_weights(s: StateShape = STATE) -> mamba2.Weights:
    return mamba2.Weights(
        conv=torch.randn(s.conv_width, s.conv_channels).t(),
        conv_bias=torch.randn(s.conv_channels),
        negative_a=-torch.rand(s.num_value_heads),
        dt_bias=torch.randn(s.num_value_heads),
        skip=torch.randn(s.num_value_heads),
        norm=torch.rand(s.num_value_heads * s.value_dim),
        norm_eps=1e-5,
        norm_groups=s.num_key_heads,
        norm_before_gate=False,
        num_groups=s.num_key_heads,
        state_dim=s.key_dim,
        head_dim=s.value_dim,
    )


def mamba2_inputs(batch: int, nodes: int, dtype: torch.dtype, s: StateShape = STATE) -> mamba2.Inputs:
    """Parts of one projection."""
    sizes = [s.num_value_heads * s.value_dim, s.conv_channels, s.num_value_heads]
    return mamba2.Inputs(*torch.randn(batch, nodes, sum(sizes)).to(dtype).split(sizes, -1))


# Weights and inputs by operator.
LAYERS: dict[str, tuple[Callable[[], Any], Callable[[int, int, torch.dtype], Any]]] = {
    "delta_net": (delta_net_weights, delta_net_inputs),
    "mamba2": (mamba2_weights, mamba2_inputs),
}


class TestFolds:
    @each_recurrence
    @pytest.mark.parametrize("num_nodes", [1, 4, 8])
    def test_every_fill(self, num_nodes: int, recurrence: Recurrence) -> None:
        """Row r + 1 has r pending records. All their positions can be had before the fold, and one after it."""
        max_nodes = 8
        capacity = pending_capacity(max_nodes)
        bench = Bench(["records"], capacity + 1, max_nodes, recurrence=recurrence)
        rows = list(range(1, capacity + 2))
        bench.begin(*rows)
        buffers = bench.buffers["records"]
        for fill in range(capacity):
            bench.round(rows[fill + 1 :], [[-1]] * (capacity - fill))
        for row in rows:
            assert buffers.positions(row) == range(row)
            bench.check_positions(row)
        buffers.plan(rows, chain_shape(len(rows), num_nodes, CPU))
        for row in rows:
            must_fold = row - 1 + num_nodes > capacity
            assert buffers.positions(row) == (range(row - 1, row) if must_fold else range(row))
            bench.check_positions(row)

    def test_a_plan_is_made_again(self) -> None:
        """A plan that was never run leaves no trace."""
        bench = Bench(list(BACKENDS), 1, 4)
        bench.begin(1)
        bench.round([1], [[-1, 0, 1, 2]], ends=[3])
        for buffers in bench.buffers.values():
            buffers.plan([1], chain_shape(1, 4, CPU))
        bench.round([1], [[-1, 0, 0, 1]])
        bench.check_positions(1)


class TestMaterialize:
    @staticmethod
    def begun(backend: str, recurrence: Recurrence = DELTA_RULE) -> tuple[Bench, StateBuffers[Any], StatePool, int]:
        """Rows 1 and 2, row 1 with its last path at positions 3 to 5, and a free slot of the cache's."""
        bench = Bench([backend], 3, 4, recurrence=recurrence)
        bench.begin(1, 2)
        bench.round([1], [[-1, 0]], ends=[1])
        bench.round([1], [[-1, 0, 0, 2]], ends=[3])
        slot = bench.pools[backend].allocate("tree")
        assert slot is not None
        return bench, bench.buffers[backend], bench.pools[backend], slot

    def test_what_can_be_had(self) -> None:
        assert self.begun("records")[1].positions(1) == range(6)
        assert self.begun("snapshots")[1].positions(1) == range(3, 6)
        for backend in BACKENDS:
            bench, buffers, _, _ = self.begun(backend)
            assert buffers.positions(2) == range(1)
            bench.check_positions(2)
            bench.check_positions(1)

    @each_backend
    def test_a_row_that_begins_again(self, backend: str) -> None:
        """Nothing of its last request is to be had."""
        bench, buffers, _, _ = self.begun(backend)
        bench.restart(1)
        assert buffers.positions(1) == range(1)
        bench.check_positions(1)

    @each_backend
    @pytest.mark.parametrize("position", [-1, 6, 100])
    def test_a_position_that_never_was(self, backend: str, position: int) -> None:
        _, buffers, pool, slot = self.begun(backend)
        with pytest.raises(ValueError, match=f"row 1 has no state at position {position}: only [03] to 5 can be had"):
            buffers.materialize(1, position, slot)
        assert pool.stamp(slot) == Stamp("tree", 0, is_written=True)

    def test_a_position_that_is_gone(self) -> None:
        _, snapshots, _, slot = self.begun("snapshots")
        with pytest.raises(ValueError, match="row 1 has no state at position 2: only 3 to 5 can be had"):
            snapshots.materialize(1, 2, slot)
        snapshots.plan([1], chain_shape(1, 2, CPU))  # its nodes will overwrite those of the last path
        with pytest.raises(ValueError, match="only 5 to 5 can be had"):
            snapshots.materialize(1, 4, slot)
        bench, records, _, slot = self.begun("records")
        for _ in range(11):
            bench.round([1], [[-1]])
        records.plan([1], chain_shape(1, 1, CPU))  # the 16 pending records are folded
        with pytest.raises(ValueError, match="row 1 has no state at position 15: only 16 to 16 can be had"):
            records.materialize(1, 15, slot)

    @each_backend
    @pytest.mark.parametrize("row", [0, 3])
    def test_a_row_that_never_began(self, backend: str, row: int) -> None:
        _, buffers, _, slot = self.begun(backend)
        with pytest.raises(StateOwnershipError, match=f"row {row} has no checkpoint to verify from"):
            buffers.materialize(row, 0, slot)

    @each_backend
    def test_a_row_that_has_ended(self, backend: str) -> None:
        _, buffers, _, slot = self.begun(backend)
        buffers.end(1)
        with pytest.raises(StateOwnershipError, match="row 1 has no checkpoint to verify from"):
            buffers.materialize(1, 5, slot)

    @each_backend
    @pytest.mark.parametrize("user", [1, 2])
    def test_into_a_checkpoint(self, backend: str, user: int) -> None:
        """The row's own, or another's: its records would continue the wrong state."""
        bench, buffers, pool, _ = self.begun(backend)
        stamp = pool.stamp(bench.slots[user])
        with pytest.raises(StateOwnershipError, match=f"is the checkpoint of row {user}"):
            buffers.materialize(1, 5, bench.slots[user])
        assert pool.stamp(bench.slots[user]) == stamp

    @each_backend
    def test_into_a_slot_that_is_free(self, backend: str) -> None:
        _, buffers, pool, slot = self.begun(backend)
        pool.free(slot, "tree")
        for free in (slot, 0):
            with pytest.raises(StateOwnershipError, match=f"state slot {free} is free"):
                buffers.materialize(1, 5, free)

    @each_backend
    def test_into_a_slot_that_is_being_written(self, backend: str) -> None:
        _, buffers, pool, slot = self.begun(backend)
        pool.begin_write(slot, "tree")
        with pytest.raises(StateOwnershipError, match=f"state slot {slot} is being written by 'tree'"):
            buffers.materialize(1, 5, slot)

    @each_backend
    def test_from_a_checkpoint_that_moved(self, backend: str) -> None:
        bench, buffers, pool, slot = self.begun(backend)
        pool.begin_write(bench.slots[1], "request-1")
        pool.end_write(bench.slots[1], 77)
        with pytest.raises(StateOwnershipError, match="should hold 'request-1'"):
            buffers.materialize(1, 5, slot)
        assert pool.stamp(slot) == Stamp("tree", 0, is_written=True)

    @each_backend
    @each_recurrence
    def test_a_request_goes_on_from_there(self, recurrence: Recurrence, backend: str) -> None:
        """As a prefix cache would use it: another row starts from the copy, and both go their own ways."""
        bench, buffers, _, slot = self.begun(backend, recurrence)
        buffers.materialize(1, 4, slot)
        buffers.begin(3, slot, "tree", 4)
        bench.slots[3], branch = slot, Sequential(recurrence=recurrence)
        branch.latest.append(bench.references[1].at(4))
        branch.position, bench.references[3] = 4, branch
        for _ in range(10):
            bench.round([1, 3], [random_parents("bushy", 4, bench.rng) for _ in range(2)])
        bench.check_positions(1)
        bench.check_positions(3)


@each_backend
class TestOwnership:
    def test_a_tree_that_is_too_large(self, backend: str) -> None:
        bench = Bench([backend], 1, 4)
        bench.begin(1)
        with pytest.raises(ValueError, match="a tree of 5 nodes does not fit buffers for 4"):
            bench.buffers[backend].plan([1], chain_shape(1, 5, CPU))

    @pytest.mark.parametrize(("owner", "position"), [("other", 0), ("request-1", 1)])
    def test_begin_checks_the_stamp(self, backend: str, owner: str, position: int) -> None:
        bench = Bench([backend], 2, 4)
        bench.begin(1)
        with pytest.raises(StateOwnershipError):
            bench.buffers[backend].begin(2, bench.slots[1], owner, position)

    def test_a_slot_that_got_another_owner(self, backend: str) -> None:
        bench = Bench([backend], 1, 4)
        bench.begin(1)
        bench.pools[backend].free(bench.slots[1], "request-1")
        assert bench.pools[backend].allocate("thief") == bench.slots[1]
        with pytest.raises(StateOwnershipError, match="thief"):
            bench.buffers[backend].plan([1], chain_shape(1, 1, CPU))

    def test_a_slot_that_is_lost_between_plan_and_commit(self, backend: str) -> None:
        """Snapshots write the slot at commit, records at a later fold; before that the loss is found out."""
        bench = Bench([backend], 1, 4)
        bench.begin(1)
        buffers, pool = bench.buffers[backend], bench.pools[backend]
        plan = buffers.plan([1], chain_shape(1, 1, CPU))
        pool.free(bench.slots[1], "request-1")
        assert pool.allocate("thief") == bench.slots[1]

        def go_on() -> None:
            buffers.commit(plan, torch.zeros(1, 1, dtype=torch.int64), torch.tensor([0]), [0])
            buffers.plan([1], chain_shape(1, 1, CPU))

        with pytest.raises(StateOwnershipError, match="thief"):
            go_on()
        pool.check(bench.slots[1], "thief", 0)


class TestKernels:
    @pytest.mark.parametrize("nodes", [1, 2, 7])
    @pytest.mark.parametrize("heads", [(1, 1, 4, 4), (2, 4, 5, 3)])
    def test_delta_rule(self, nodes: int, heads: tuple[int, int, int, int]) -> None:
        """torch_ops equals the reference; into a slice of a larger buffer, whose rest stays as it is."""
        state_shape = StateShape(*heads, conv_width=4)
        t = make_tokens(len(SHAPES), nodes, state_shape, layers=1)
        inputs = DELTA_RULE.of(t, 0)
        state = torch.randn(len(SHAPES), heads[1], heads[2], heads[3])
        parents, before = batch_of_parents(SHAPES, nodes, seed=nodes), state.clone()
        buffer = torch.full((len(SHAPES) + 2, nodes + 3, *state.shape[1:]), torch.nan)
        got = buffer[1:-1, :nodes]
        want = torch.full(got.shape, torch.nan, dtype=torch.float64)
        out = delta_ops.tree_verify_snapshots(*inputs, state, got, parents)
        wanted = delta_reference.tree_verify_snapshots(*(x.double() for x in inputs), state.double(), want, parents)
        torch.testing.assert_close(out.double(), wanted, **TOLERANCE)
        torch.testing.assert_close(got.double(), want, **TOLERANCE)
        assert buffer[[0, -1]].isnan().all()
        assert buffer[:, nodes:].isnan().all()
        assert torch.equal(state, before)

    def test_delta_rule_of_chains(self) -> None:
        """No parents say: chains. Then it is the recurrence that ``extend`` runs."""
        t = make_tokens(3, 6, layers=1)
        inputs, state = DELTA_RULE.of(t, 0), torch.randn(3, 2, 4, 3)
        wanted, end = delta_reference.extend(*inputs, state, torch.full((3,), 6))
        for ops in (delta_ops, delta_reference):
            for parents in (None, batch_of_parents(("chain",) * 3, 6, seed=0)):
                snapshots = torch.full((3, 6, *state.shape[1:]), torch.nan)
                out = ops.tree_verify_snapshots(*inputs, state, snapshots, parents)
                torch.testing.assert_close(out, wanted, **TOLERANCE)
                torch.testing.assert_close(snapshots[:, -1], end, **TOLERANCE)

    def test_padding_nodes_are_fresh_roots(self) -> None:
        t = make_tokens(1, 4, layers=1)
        for x in t.values():
            x[:, :, 3] = x[:, :, 0]
        parents, state = torch.tensor([[-1, 0, 1, -1]]), torch.randn(1, 2, 4, 3)
        for ops in (delta_ops, delta_reference):
            snapshots = torch.full((1, 4, *state.shape[1:]), torch.nan)
            out = ops.tree_verify_snapshots(*DELTA_RULE.of(t, 0), state, snapshots, parents)
            torch.testing.assert_close(out[:, 3], out[:, 0])
            torch.testing.assert_close(snapshots[:, 3], snapshots[:, 0])

    @pairwise(
        pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16]),
        pytest.mark.parametrize("width", [1, 2, 4]),
        pytest.mark.parametrize("shapes", [("bushy",), SHAPES]),
    )
    def test_convolution(self, width: int, shapes: tuple[str, ...], dtype: torch.dtype) -> None:
        nodes, channels = 7, 5
        parents = batch_of_parents(shapes, nodes, seed=width)
        x = torch.randn(len(shapes), nodes, channels).to(dtype)
        window, weight = torch.randn(len(shapes), width - 1, channels).to(dtype), torch.randn(channels, width)
        index = tree_reference.conv_index(parents, width) + width - 1
        y, windows = conv_ops.tree_verify_snapshots(x, window, index, weight)
        want, want_windows = conv_reference.tree_verify_snapshots(x, window, index, weight)
        torch.testing.assert_close(y, want, **TOLERANCE)
        assert torch.equal(windows, want_windows)
        for b, tree in enumerate(parents.tolist()):
            for node in range(nodes):  # what a plain run along the path leaves behind
                path = path_to(tree, node)
                lengths = torch.tensor([len(path)])
                _, after = conv_reference.extend(x[b : b + 1, path], window[b : b + 1], weight, lengths)
                assert torch.equal(windows[b, node], after[0])


class TestMemory:
    @pairwise(
        each_backend,
        pytest.mark.parametrize("max_nodes", [1, 4, 16]),
        pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16]),
    )
    def test_the_bytes_are_those_of_the_buffers(self, backend: Any, max_nodes: int, dtype: torch.dtype) -> None:
        shape = cache_shape(dtype=dtype)
        config = EngineConfig(speculative_state=backend, max_running_requests=3)
        plan = plan_memory(config, shape, 100, 100, max_nodes, max_nodes, 1 << 30)
        pool = StatePool(shape, plan.num_state_slots, CPU)
        buffers = BACKENDS[backend](shape, pool, plan.num_rows, plan.max_nodes, CPU)
        tensors = [x for x in vars(buffers).values() if isinstance(x, Tensor) and x.is_floating_point()]
        assert plan.spec_bytes == sum(x.nbytes for x in tensors) == (plan.num_rows + 1) * plan.spec_bytes_per_request
        assert plan.record_bytes_per_request == shape.record_bytes(max_nodes)
        assert plan.snapshot_bytes_per_request == shape.snapshot_bytes(max_nodes)

    def test_snapshots_that_do_not_fit(self) -> None:
        """The message says what helps at once."""
        state = StateShape(4, 4, 64, 64, 4)
        shape = CacheShape((KVShape(1, 1, 2),), 6, state, torch.float32)
        records, snapshots = (EngineConfig(speculative_state=name) for name in ("records", "snapshots"))
        enough = 17 * (shape.record_bytes(16) + shape.state_bytes_per_slot) + (1 << 20)
        plan_memory(records, shape, 100, 100, 16, 16, enough)
        with pytest.raises(ConfigError, match="choose --speculative-state records"):
            plan_memory(snapshots, shape, 100, 100, 16, 16, enough)


VOCABULARY = 131


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), 3, vocab_size=VOCABULARY)


# The first tokens differ: they tell the requests apart.
PROMPTS = tuple([(7 * i + j) % VOCABULARY for j in range(length)] for i, length in enumerate((1, 5, 9, 2, 17, 4, 30)))


class Oracle(Drafter):
    """Knows the texts, and errs at random: drafts that are accepted to any depth."""

    def __init__(self, texts: Sequence[Sequence[int]], max_nodes: int, shapes: Sequence[str]) -> None:
        self.max_nodes = self.num_slots = max_nodes
        self._text_of = {text[0]: text for text in texts}
        self._rows: dict[int, Sequence[int]] = {}
        self._shapes, self._rng = shapes, random.Random(max_nodes)

    def begin(self, row: int, tokens: Sequence[int]) -> None:
        self._rows[row] = self._text_of[tokens[0]]

    def propose(self, batch: Batch) -> DraftTree:
        parents = [random_parents(self._rng.choice(self._shapes), self.max_nodes, self._rng) for _ in batch.rows]
        roots = zip(batch.rows, parents, batch.root_positions.tolist(), strict=True)
        tokens = [self._tokens(self._rows[row], tree, root) for row, tree, root in roots]
        return DraftTree(torch.tensor(tokens), shape_of(parents))

    def _tokens(self, text: Sequence[int], parents: list[int], root: int) -> list[int]:
        tokens = [text[root]]
        for node in range(1, len(parents)):
            at = root + len(path_to(parents, node)) - 1
            knows = at < len(text) and self._rng.random() < 0.75
            tokens.append(text[at] if knows else self._rng.randrange(VOCABULARY))
        return tokens


def run(model: Path, **flags: Any) -> tuple[list[list[int]], Engine]:
    """Prompt and text of every request, and the engine that is done with them."""
    engine = Engine(EngineConfig(model=str(model), dtype="float32", device="cpu", max_running_requests=4, **flags))
    texts = {str(i): list(prompt) for i, prompt in enumerate(PROMPTS)}
    for name, prompt in texts.items():
        engine.add_request(name, prompt, SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True))
    while engine.has_unfinished_requests:
        for delta in engine.step():
            texts[delta.request_id] += delta.token_ids
    engine.close()
    return list(texts.values()), engine


@pytest.fixture(scope="module")
def plain(tiny: Path) -> list[list[int]]:
    texts, _ = run(tiny, speculative_algorithm="none", context_length=128)
    assert [len(text) for text in texts] == [len(prompt) + 24 for prompt in PROMPTS]
    return texts


@pairwise(
    each_backend,
    pytest.mark.parametrize("page_size", [1, 16]),
    pytest.mark.parametrize("preempted", [False, True], ids=["roomy", "preempted"]),
    pytest.mark.parametrize("drafts", ["chains", "trees"]),
)
def test_the_same_text(
    tiny: Path,
    plain: list[list[int]],
    drafts: str,
    preempted: bool,
    page_size: int,
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Drafts that are accepted to any depth. What the model's own head drafts is in test_tree_exact.py."""
    memory: dict[str, Any] = {"max_total_tokens": 96} if preempted else {"context_length": 128}
    oracle = Oracle(plain, 8, ("chain",) if drafts == "chains" else SHAPES)
    monkeypatch.setattr("specmamba.engine.engine.build_drafter", lambda *args: oracle)
    settings = {"speculative_algorithm": "mtp", "speculative_num_steps": 7, "speculative_state": backend} | memory
    texts, engine = run(tiny, page_size=page_size, **settings)
    assert texts == plain
    assert isinstance(engine.pools.state_buffers, BACKENDS[backend])
    stats = engine.stats()
    assert (stats.num_preemptions > 0) == preempted
    assert stats.state_used_slots == stats.kv_used_tokens == 0
    assert stats.spec.accept_length > 1.5
    assert all(count > 0 for count in stats.spec.accepted_histogram[:4])
