"""--mamba-ssm-dtype: states are rounded where a checkpoint is written, and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specmamba.cache.access import ExtendState
from specmamba.cache.shapes import CacheShape, StateShape
from specmamba.cache.state_pool import StatePool
from specmamba.config import EngineConfig
from specmamba.core import OutputDelta
from specmamba.draft.drafter import chain_shape, tree_shape
from specmamba.engine.engine import Engine
from specmamba.engine.loading import load_models
from specmamba.engine.workbench import Workbench
from specmamba.kernels import causal_conv1d, delta_net, gated_delta_rule, mamba2, ssd, state_records
from specmamba.kernels.gated_delta_rule import torch_ops as delta_ops
from specmamba.kernels.ssd import torch_ops as ssd_ops
from specmamba.kernels.state_records import RowSet, as_stored
from specmamba.sampling_params import SamplingParams
from specmamba.verify.record_buffers import RecordBuffers
from specmamba.verify.snapshot_buffers import SnapshotBuffers
from specmamba.verify.state_buffers import StateBuffers
from tests.families import FAMILIES
from tests.pairwise import pairwise
from tests.tiny import write_tiny_checkpoint

CPU = torch.device("cpu")
STATE = StateShape(num_key_heads=1, num_value_heads=2, key_dim=4, value_dim=3, conv_width=4)
LAYERS, OWNER = 2, "request"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ROUNDED = [name for name in DTYPES if name != "float32"]
STEP = {"bfloat16": 2.0**-8, "float16": 2.0**-11}  # half of a unit in the last place, relative
Tokens = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # q, k, v, g, beta: [layers, B, N, ...]

each_dtype = pytest.mark.parametrize("name", ROUNDED)


def shape_of(name: str, dtype: torch.dtype = torch.float32) -> CacheShape:
    return CacheShape(kv=(), num_state_layers=LAYERS, state=STATE, dtype=dtype, state_dtype=DTYPES[name])


def make_pool(name: str) -> tuple[StatePool, int]:
    """A pool with one owned slot, whose state is random."""
    pool = StatePool(shape_of(name), 3, CPU)
    slot = pool.allocate(OWNER)
    assert slot is not None
    pool.recurrent[:, slot] = torch.randn(pool.recurrent[:, slot].shape)
    pool.conv[:, slot] = torch.randn(pool.conv[:, slot].shape)
    return pool, slot


def make_tokens(nodes: int) -> Tokens:
    unit, size = torch.nn.functional.normalize, (LAYERS, 1, nodes)
    q, k = (unit(torch.randn(*size, STATE.num_key_heads, STATE.key_dim), dim=-1) for _ in range(2))
    v = torch.randn(*size, STATE.num_value_heads, STATE.value_dim)
    g, beta = -torch.rand(*size, STATE.num_value_heads) * 0.5, torch.rand(*size, STATE.num_value_heads)
    return q, k, v, g, beta


def verify(buffers: StateBuffers[Any], tokens: Tokens, parents: list[int], path: list[int]) -> None:
    """Verify one tree of row 1, and accept a path."""
    nodes = len(parents)
    tree = (
        chain_shape(1, nodes, CPU)
        if parents == list(range(-1, nodes - 1))
        else tree_shape(torch.tensor([parents]), max_children=3)
    )
    plan = buffers.plan([1], tree)
    for layer in range(LAYERS):
        inputs = torch.randn(1, nodes, STATE.conv_channels)
        operands = buffers.operands(layer, plan)
        causal_conv1d.advance(inputs, torch.randn(STATE.conv_channels, STATE.conv_width), None, operands)
        q, k, v, g, beta = (x[layer] for x in tokens)
        gated_delta_rule.advance(q, k, v, g, beta, operands)
    padded = torch.tensor([path + path[-1:] * (nodes - len(path))])
    buffers.commit(plan, padded, torch.tensor([len(path) - 1]), [len(path) - 1])


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_of_a_slot_are_those_of_the_pool(name: str, dtype: torch.dtype) -> None:
    shape = shape_of(name, dtype)
    pool = StatePool(shape, 3, CPU)
    assert pool.recurrent.dtype is DTYPES[name]
    assert 4 * shape.state_bytes_per_slot == pool.recurrent.nbytes + pool.conv.nbytes
    buffers = RecordBuffers(shape, pool, 2, 4, CPU)
    assert {x.dtype for x in (buffers.k, buffers.u, buffers.decay)} == {torch.float32}
    held = sum(x.nbytes for x in vars(buffers).values() if isinstance(x, Tensor))
    assert 3 * shape.record_bytes(4) == held
    snapshots = SnapshotBuffers(shape, pool, 2, 4, CPU)
    assert snapshots.intermediate_ssm.dtype is torch.float32
    held = snapshots.intermediate_ssm.nbytes + snapshots.intermediate_conv_window.nbytes
    assert 3 * shape.snapshot_bytes(4) == held


@each_dtype
def test_known_tokens_are_run_in_float32_and_their_state_is_rounded(name: str) -> None:
    pool, slot = make_pool(name)
    q, k, v, g, beta = (x[0] for x in make_tokens(70))
    before = pool.recurrent[:, slot].clone()
    access = ExtendState(pool, RowSet.of([slot], CPU), torch.tensor([70]))
    out = gated_delta_rule.advance(q, k, v, g, beta, access.operands(0))
    want, state = delta_ops.extend(q, k, v, g, beta, before[0, None].float(), torch.tensor([70]))
    assert torch.equal(out, want)
    assert torch.equal(pool.recurrent[0, slot], state[0].to(DTYPES[name]))
    ssd.advance(q, k, v, g, access.operands(1))
    want, state = ssd_ops.extend(q, k, v, g, before[1, None].float(), torch.tensor([70]))
    assert torch.equal(pool.recurrent[1, slot], state[0].to(DTYPES[name]))


@each_dtype
def test_records_round_when_they_are_folded(name: str) -> None:
    """Not before: what is pending is as exact as with float32, and so is what is materialized from it."""
    pool, slot = make_pool(name)
    exact = StatePool(shape_of("float32"), 3, CPU)
    assert exact.allocate(OWNER) == slot
    exact.recurrent[:, slot], exact.conv[:, slot] = pool.recurrent[:, slot].float(), pool.conv[:, slot]
    both = [RecordBuffers(shape_of(n), p, 1, 8, CPU) for n, p in ((name, pool), ("float32", exact))]
    for buffers in both:
        buffers.begin(1, slot, OWNER, 0)
    for parents, path in (([-1, 0, 0, 1], [0, 1, 3]), ([-1, 0, 1, 1, 0], [0, 4]), ([-1, 0, 1, 2, 3], [0, 1, 2])):
        tokens = make_tokens(len(parents))
        for buffers in both:
            verify(buffers, tokens, parents, path)
        for rounded, precise in zip(both[0]._records, both[1]._records, strict=True):
            assert torch.equal(rounded, precise)
        assert torch.equal(pool.recurrent[:, slot].float(), exact.recurrent[:, slot])  # it was not written
    targets = [states.allocate("tree") for states in (pool, exact)]
    for position in both[0].positions(1):
        for buffers, target in zip(both, targets, strict=True):
            assert target is not None
            buffers.materialize(1, position, target)
        assert torch.equal(pool.recurrent[:, targets[0]], exact.recurrent[:, targets[1]].to(DTYPES[name]))
    for positions in (range(10), range(9, 11)):  # there is no room for the second tree: fold first
        tokens = make_tokens(8)
        for buffers in both:
            verify(buffers, tokens, list(range(-1, 7)), [0])
            assert buffers.positions(1) == positions
    assert torch.equal(pool.recurrent[:, slot], exact.recurrent[:, slot].to(DTYPES[name]))


@each_dtype
def test_snapshots_round_at_every_commit(name: str) -> None:
    pool, slot = make_pool(name)
    buffers = SnapshotBuffers(shape_of(name), pool, 1, 4, CPU)
    buffers.begin(1, slot, OWNER, 0)
    verify(buffers, make_tokens(4), [-1, 0, 1, 0], [0, 1, 2])
    assert torch.equal(pool.recurrent[:, slot], buffers.intermediate_ssm[:, 1, 2].to(DTYPES[name]))
    target = pool.allocate("tree")
    assert target is not None
    buffers.materialize(1, 2, target)
    assert torch.equal(pool.recurrent[:, target], buffers.intermediate_ssm[:, 1, 1].to(DTYPES[name]))
    buffers.materialize(1, 3, target)
    assert torch.equal(pool.recurrent[:, target], pool.recurrent[:, slot])


def test_float16_ends_at_its_largest_number() -> None:
    """An infinite number in a shared state would spoil every text that goes on from it."""
    state = torch.tensor([1e6, -7e4, 65504.0, 65520.0, 0.1, torch.nan])
    stored = as_stored(state, torch.float16)
    assert torch.equal(stored[:4].float(), torch.tensor([65504.0, -65504.0, 65504.0, 65504.0]))
    assert stored[4] == torch.tensor(0.1).half()
    assert stored[5].isnan()  # what is no number is not made one
    assert torch.equal(as_stored(state[:4], torch.bfloat16), state[:4].bfloat16())
    assert as_stored(state, torch.float32) is state


@pytest.mark.usefixtures("needs_native")
@pytest.mark.parametrize("name", DTYPES)
def test_native_kernels_take_float32_states_only(name: str) -> None:
    """They would read two states for one."""
    heads, channels = torch.zeros(STATE.num_value_heads), STATE.conv_channels
    pool = StatePool(shape_of(name), 3, CPU)
    records = RecordBuffers(shape_of(name), pool, 2, 4, CPU)
    buffers = state_records.Buffers(
        pool.recurrent[0], records.conv_inputs[0], records.k[0], records.u[0], records.decay[0]
    )
    nowhere = torch.zeros(1, dtype=torch.int64)
    trees = state_records.Trees(nowhere, nowhere, nowhere, None, 0, torch.ones(1, 2, 2, dtype=torch.bool))
    state = state_records.RecordOperands(buffers, trees, RowSet.of([0], CPU), RowSet.of([0], CPU))
    conv = torch.zeros(STATE.conv_width, channels).t()
    inner = STATE.num_value_heads * STATE.value_dim
    can_fuse = [
        mamba2.can_fuse(
            state,
            mamba2.Inputs(torch.zeros(1, 2, inner), torch.zeros(1, 2, channels), torch.zeros(1, 2, len(heads))),
            mamba2.Weights(conv, None, heads, heads, heads, None, 1e-5, 1, False, 1, STATE.key_dim, STATE.value_dim),
        ),
        delta_net.can_fuse(
            state,
            delta_net.Inputs(
                torch.zeros(1, 2, channels),
                torch.zeros(1, 2, STATE.num_value_heads, STATE.value_dim),
                *(torch.zeros(1, 2, len(heads)) for _ in range(2)),
            ),
            delta_net.Weights(conv, heads, heads, torch.ones(STATE.value_dim), 1e-5, 1, STATE.key_dim),
        ),
    ]
    assert can_fuse == [name == "float32"] * 2


def greedy(engine: Engine, prompt: list[int], count: int = 60) -> OutputDelta:
    """The last delta of a request; its tokens are all of the text."""
    engine.add_request("r", prompt, SamplingParams(max_tokens=count, temperature=0, ignore_eos=True))
    tokens: tuple[int, ...] = ()
    last = None
    while engine.has_unfinished_requests:
        for last in engine.step():
            tokens += last.token_ids
    assert last is not None
    assert last.error is None
    return OutputDelta(
        "r", tokens, last.text, last.num_prompt_tokens, last.num_cached_tokens, len(tokens), "length", None, last.spec
    )


def start(folder: Path, **flags: Any) -> Engine:
    sizes: dict[str, Any] = {"max_running_requests": 2, "context_length": 256, "mem_fraction_static": 0.05}
    return Engine(EngineConfig(model=str(folder), dtype="float32", device="cpu", **sizes | flags))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name in ("qwen3.5", "mamba2", "falcon-h1"):
        made[name] = tmp_path_factory.mktemp(name)
        FAMILIES[name].build(made[name])
    return made


@pytest.mark.fast_cases(2)
@pairwise(
    each_dtype,
    pytest.mark.parametrize("family", ["qwen3.5", "mamba2", "falcon-h1"]),
    pytest.mark.parametrize("backend", ["records", "snapshots"]),
)
def test_repeated_requests_are_the_same(folders: dict[str, Path], family: str, backend: str, name: str) -> None:
    """Cold, then from cached states: chunks end where they ended, so states were rounded where they were."""
    drafts: dict[str, Any] = {"speculative_algorithm": "ngram"}
    if family == "qwen3.5":
        drafts = {"speculative_algorithm": "mtp", "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
    engine = start(
        folders[family],
        **drafts,
        mamba_ssm_dtype=name,
        speculative_state=backend,
        chunked_prefill_size=16,
        mamba_radix_cache_strategy="extra_buffer",
        mamba_track_interval=10,
    )
    assert engine.pools.states.recurrent.dtype is DTYPES[name]
    slots = engine.memory_plan.num_state_slots + 1
    held = sum(
        x.nbytes for x in (engine.pools.states.recurrent, engine.pools.states.conv, engine.pools.states.features)
    )
    assert engine.memory_plan.state_bytes == held == slots * engine.model.cache_shape.state_bytes_per_slot
    prompt = torch.randint(5, 120, (39,)).tolist()
    cold, *others = (greedy(engine, prompt) for _ in range(3))
    assert cold.num_cached_tokens == 0
    for other in others:
        assert other.num_cached_tokens == 38
        assert (other.token_ids, other.spec) == (cold.token_ids, cold.spec)
    engine.close()


@pytest.mark.parametrize("family", ["qwen3.5", "mamba2"])
def test_a_batch_is_its_members(folders: dict[str, Path], family: str) -> None:
    """Plain decoding folds a row when its own list is full, so neighbours do not show."""
    engine = start(
        folders[family],
        speculative_algorithm="none",
        mamba_ssm_dtype="bfloat16",
        max_running_requests=4,
        disable_radix_cache=True,
    )
    prompts = [torch.randint(5, 120, (length,)).tolist() for length in (3, 30, 17)]
    alone = [greedy(engine, prompt, count=40).token_ids for prompt in prompts]
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
    together: dict[str, tuple[int, ...]] = {str(i): () for i in range(3)}
    engine.step()
    engine.abort("1")  # the others' slots are no neighbours any more
    del together["1"]
    while engine.has_unfinished_requests:
        for delta in engine.step():
            together[delta.request_id] += delta.token_ids
    assert all(alone[int(i)][-len(tokens) :] == tokens for i, tokens in together.items())
    assert all(len(tokens) > 30 for tokens in together.values())
    engine.close()


@pytest.mark.fast_cases(2)
@each_dtype
@pytest.mark.parametrize("family", ["qwen3.5", "mamba2", "falcon-h1"])
def test_logits_move_by_the_rounding_of_states(folders: dict[str, Path], family: str, name: str) -> None:
    prompt, text = torch.randint(5, 120, (2, 40)).tolist()
    logits = {}
    for dtype in ("float32", name):
        engine = start(folders[family], speculative_algorithm="none", mamba_ssm_dtype=dtype)
        seen: list[Tensor] = []
        Workbench(engine).logits_along(prompt, text, seen.append)
        logits[dtype] = torch.stack(seen)
        engine.close()
    error = (logits[name] - logits["float32"]).square().mean().sqrt() / logits["float32"].std()
    assert 0.01 * STEP[name] < error < 10 * STEP[name]


def test_a_draft_model_keeps_float32(tmp_path: Path) -> None:
    """Its states are small, and their cost in acceptance would not be seen."""
    target, draft = (write_tiny_checkpoint(tmp_path / name, 3, with_mtp=False) for name in ("target", "draft"))
    config = EngineConfig(
        model=str(target), speculative_draft_model_path=str(draft), mamba_ssm_dtype="bfloat16", device="cpu"
    )
    models = load_models(target, config, CPU, only_shapes=True)
    assert models.draft is not None
    assert models.draft.cache_shape.state_dtype is torch.float32
    assert models.target.cache_shape.state_dtype is torch.bfloat16
