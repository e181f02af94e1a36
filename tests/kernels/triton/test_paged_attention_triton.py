"""Paged attention in Triton: against the reference, over pools that hold NaN wherever nothing may be read."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specmamba.kernels import paged_attention
from specmamba.kernels.paged_attention import (
    AttentionConfig,
    AttentionMetadata,
    crossover,
    reference,
    tiles,
    torch_ops,
)
from tests.kernels.rounding import tolerance
from tests.kernels.test_attention_keys import layer_arguments, make_keys, plain_mask

pytestmark = pytest.mark.usefixtures("poisoned")

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
# queries, keys and weights are rounded; to bfloat16 the interpreter rounds towards zero, so twice as far
TOLERANCE = {FP32: tolerance(), FP16: tolerance(FP16, roundings=3), BF16: tolerance(BF16, roundings=6)}
Heads = tuple[int, int, int]  # query heads, key heads, head size


@pytest.fixture
def triton_ops(gpu_device: str) -> Any:
    from specmamba.kernels.paged_attention import triton_ops

    return triton_ops


def on(device: str, keys: AttentionMetadata) -> AttentionMetadata:
    tensors = {x.name: getattr(keys, x.name) for x in fields(keys)}
    return replace(keys, **{name: x.to(device) for name, x in tensors.items() if isinstance(x, Tensor)})


def make_pools(keys: AttentionMetadata, heads: Heads, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """NaN in every slot that no query sees."""
    gen = torch.Generator().manual_seed(keys.num_keys)
    shape = int(keys.table.max()) + 2, heads[1], heads[2]
    k_pool, v_pool = torch.randn(2, *shape, generator=gen).to(dtype)
    is_seen = torch.zeros(shape[0], dtype=torch.bool)
    for row, seen in zip(keys.rows.tolist(), plain_mask(keys).any(1), strict=True):
        is_seen[keys.table[row, : keys.num_keys][seen]] = True
    k_pool[~is_seen], v_pool[~is_seen] = torch.nan, torch.nan
    return k_pool, v_pool


def make_queries(keys: AttentionMetadata, heads: Heads, dtype: torch.dtype) -> Tensor:
    gen = torch.Generator().manual_seed(heads[2])
    return torch.randn(*keys.last.shape, heads[0], heads[2], generator=gen).to(dtype)


def right_attention(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, keys: AttentionMetadata, scale: float | None = None
) -> Tensor:
    """In float64; rows of padding are zeros."""
    slots = keys.table[keys.rows, : keys.num_keys]
    out = reference.attend(q.double(), k_pool.double(), v_pool.double(), slots, plain_mask(keys), scale)
    return torch.where((keys.rows == 0)[:, None, None, None], 0.0, out)


def check_attention(ops: Any, device: str, keys: AttentionMetadata, heads: Heads, dtype: torch.dtype) -> None:
    q, (k_pool, v_pool) = make_queries(keys, heads, dtype), make_pools(keys, heads, dtype)
    got = ops.attend(q.to(device), k_pool.to(device), v_pool.to(device), on(device, keys), 0.3).cpu()
    assert got.dtype is dtype
    torch.testing.assert_close(got.double(), right_attention(q, k_pool, v_pool, keys, 0.3), **TOLERANCE[dtype])


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("num_queries", "heads", "dtype"),
    [
        (1, (2, 2, 16), FP32),
        (4, (4, 2, 67), FP32),
        (17, (2, 1, 96), FP32),
        (3, (7, 1, 16), FP16),
        (4, (4, 1, 5), BF16),
        (1, (4, 2, 256), BF16),
    ],
)
def test_causal_queries_behind_a_cached_prefix(
    triton_ops: Any, gpu_device: str, num_queries: int, heads: Heads, dtype: torch.dtype
) -> None:
    check_attention(triton_ops, gpu_device, make_keys([37, 0], num_queries), heads, dtype)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize(("num_nodes", "group"), [(1, 1), (1, 15), (3, 4), (5, 3)])
def test_fewer_rows_than_a_product(
    triton_ops: Any, gpu_device: str, num_nodes: int, group: int, dtype: torch.dtype
) -> None:
    """Nodes times query heads of a key head: the rest of a product's rows is padding. ``bench gpu`` runs this first."""
    assert num_nodes * group < tiles.MIN_BLOCK
    keys = make_keys([33, 1], num_nodes, num_entries=num_nodes)
    check_attention(triton_ops, gpu_device, keys, (2 * group, 2, 24), dtype)


@pytest.mark.parametrize(("num_queries", "heads", "dtype"), [(70, (2, 1, 16), FP32), (65, (7, 1, 20), BF16)])
def test_long_runs(triton_ops: Any, gpu_device: str, num_queries: int, heads: Heads, dtype: torch.dtype) -> None:
    """Several blocks of queries; the second row is shorter, and its last tokens are padding."""
    keys = make_keys([41, 0], num_queries)
    keys.last[1, 20:] = keys.last[1, 19]
    check_attention(triton_ops, gpu_device, keys, heads, dtype)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("num_queries", "num_entries", "heads", "dtype"),
    [
        (1, 1, (2, 2, 16), FP32),
        (4, 9, (4, 1, 16), BF16),
        (17, 17, (2, 1, 40), FP32),
        (64, 64, (1, 1, 16), FP32),
        (66, 66, (1, 1, 16), BF16),
    ],
)
def test_trees_behind_ragged_contexts(
    triton_ops: Any, gpu_device: str, num_queries: int, num_entries: int, heads: Heads, dtype: torch.dtype
) -> None:
    contexts = [33, 1, 70, 16, 5] if num_queries < 16 else [19, 64]
    check_attention(triton_ops, gpu_device, make_keys(contexts, num_queries, num_entries=num_entries), heads, dtype)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize(("num_queries", "num_entries"), [(3, 0), (3, 3), (1, 4), (66, 0)])
def test_draft_heads_without_the_first_keys(
    triton_ops: Any, gpu_device: str, num_queries: int, num_entries: int, first: int
) -> None:
    keys = make_keys([0, 1, 2, 35] if num_queries < 64 else [0], num_queries, first=first, num_entries=num_entries)
    check_attention(triton_ops, gpu_device, keys, (2, 1, 16), FP32)


@pytest.mark.parametrize("num_entries", [0, 2])
def test_a_first_key_in_a_later_block(triton_ops: Any, gpu_device: str, num_entries: int) -> None:
    """The first row stands before it, with its entries; the second row sees keys on both sides of a block's end."""
    keys = make_keys([3, 98], 2, first=66, num_entries=num_entries)
    check_attention(triton_ops, gpu_device, keys, (2, 1, 16), FP32)


@pytest.mark.parametrize("slack", [-4, 0])
def test_no_key_is_seen_behind_the_bound(triton_ops: Any, gpu_device: str, slack: int) -> None:
    for num_entries in (0, 6):
        keys = make_keys([30, 28], 3, slack=slack, num_entries=num_entries)
        check_attention(triton_ops, gpu_device, keys, (2, 1, 16), FP32)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("num_entries", "dtype"), [(0, BF16), (5, FP32)])
def test_many_parts_most_of_them_empty(
    triton_ops: Any, gpu_device: str, num_entries: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound of keys is the table's width, as in a captured graph: what is seen ends far before it."""
    keys = make_keys([130, 3], 2, slack=700, num_entries=num_entries)
    assert tiles.num_splits(2, keys.num_keys) == 7
    check_attention(triton_ops, gpu_device, keys, (2, 1, 16), dtype)
    monkeypatch.setattr(tiles, "KEYS_OF_A_SPLIT", 32)  # more than are combined at once
    assert tiles.num_splits(2, keys.num_keys) > tiles.COMBINE_SPLITS
    check_attention(triton_ops, gpu_device, keys, (2, 1, 16), dtype)


def test_parts_are_enough_for_the_chip_and_none_too_small() -> None:
    assert tiles.num_splits(1, 1) == 1
    assert tiles.num_splits(1, 1 << 17) == tiles.MAX_SPLITS
    assert tiles.num_splits(8, 1 << 17) == 33
    assert tiles.num_splits(8, 1000) == 8
    assert tiles.num_splits(4096, 1 << 17) == 1


@pytest.mark.parametrize("num_queries", [3, 66])
def test_a_query_that_sees_nothing_gets_zero(triton_ops: Any, gpu_device: str, num_queries: int) -> None:
    keys = make_keys([9, 4], num_queries)
    keys.last[0, 1], keys.last[1] = -1, -1
    check_attention(triton_ops, gpu_device, keys, (2, 1, 16), FP32)
    trees = make_keys([0, 4], 3, num_entries=3)
    assert trees.seen is not None
    trees.seen[0, 2] = False
    check_attention(triton_ops, gpu_device, trees, (2, 1, 16), FP32)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("num_queries", "wrong", "dtype"),
    [(3, torch.nan, FP32), (3, torch.inf, FP32), (3, -torch.inf, FP32), (3, -torch.inf, BF16), (66, -torch.inf, FP32)],
)
def test_a_query_that_is_no_number_stays_alone(
    triton_ops: Any, gpu_device: str, num_queries: int, wrong: float, dtype: torch.dtype
) -> None:
    """It gets NaN where it sees a key, also when all of its scores are -inf, and 0 where it sees none."""
    keys, heads = make_keys([9, 4], num_queries), (2, 1, 16)
    keys.last[1, 2] = -1
    q, (k_pool, v_pool) = make_queries(keys, heads, dtype), make_pools(keys, heads, dtype)
    pools = k_pool.to(gpu_device).abs(), v_pool.to(gpu_device)
    want = triton_ops.attend(q.to(gpu_device), *pools, on(gpu_device, keys)).cpu()
    q[0, 1, 1, :], q[1, 2, 0, 3] = wrong, wrong
    got = triton_ops.attend(q.to(gpu_device), *pools, on(gpu_device, keys)).cpu()
    assert got[0, 1, 1].isnan().all()
    want[0, 1, 1] = torch.nan
    assert torch.equal(got.nan_to_num(9.0), want.nan_to_num(9.0))


def make_layer(keys: AttentionMetadata, heads: Heads, rotated: int, dtype: torch.dtype, parts: str) -> dict[str, Any]:
    """A layer's arguments; the tokens' own slots are those of the last positions that they see, or of the entries."""
    gen = torch.Generator().manual_seed(rotated)
    query_heads, key_heads, dim = heads
    batch, num_queries = keys.last.shape
    norm = torch.rand(query_heads + key_heads, dim, generator=gen) + 0.5
    config = AttentionConfig(*heads, 0.3, norm if "norm" in parts else None, 1e-5, "gate" in parts)
    angles = torch.rand(batch, num_queries, 1, rotated, generator=gen) * 7
    positions = keys.last
    if keys.roots is not None and keys.seen is not None:
        positions = keys.roots[:, None] + torch.arange(num_queries) + keys.seen.shape[2] - num_queries
    k_pool, v_pool = make_pools(keys, heads, dtype)
    has_rotary = "rotary" in parts
    return {
        "projected": torch.randn(batch, num_queries, config.projected_width, generator=gen).to(dtype),
        "config": config,
        "cos": angles.cos().to(dtype) if has_rotary else None,
        "sin": angles.sin().to(dtype) if has_rotary else None,
        "k_pool": k_pool,
        "v_pool": v_pool,
        "write_slots": keys.table[keys.rows[:, None], positions].flatten(),
        "metadata": keys,
    }


def run_layer(ops: Any, device: str, layer: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and copies of the pools."""
    there = {name: x.to(device, copy=True) if isinstance(x, Tensor) else x for name, x in layer.items()}
    if (config := layer["config"]).norm is not None:
        there["config"] = replace(config, norm=config.norm.to(device))
    out = ops.attend_layer(**layer_arguments(there | {"metadata": on(device, layer["metadata"])}))
    return out.cpu(), there["k_pool"].cpu(), there["v_pool"].cpu()


def right_layer(layer: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Of the reference, whose pools then hold the new keys; it knows nothing of padding."""
    keys, pools = replace(layer["metadata"]), (layer["k_pool"].clone(), layer["v_pool"].clone())
    vars(keys).update(indices=keys.table[keys.rows, : keys.num_keys], mask=plain_mask(keys))
    out = reference.attend_layer(**layer_arguments(layer | {"k_pool": pools[0], "v_pool": pools[1], "metadata": keys}))
    is_padding = keys.rows == 0
    out[is_padding] = 0
    for pool, before in zip(pools, (layer["k_pool"], layer["v_pool"]), strict=True):
        pool[0] = before[0]
    return out, *pools


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("num_entries", "heads", "rotated", "parts", "dtype"),
    [
        (0, (4, 2, 16), 16, "norm rotary gate", FP32),
        (0, (2, 2, 16), 16, "", FP32),
        (6, (3, 1, 10), 6, "rotary", FP32),
        (6, (2, 1, 16), 6, "norm", FP32),
        (6, (2, 1, 16), 6, "gate", BF16),
        (4, (4, 1, 67), 34, "norm rotary gate", BF16),
        (4, (2, 1, 67), 34, "norm rotary gate", FP32),
    ],
)
def test_a_layer(
    triton_ops: Any, gpu_device: str, num_entries: int, heads: Heads, rotated: int, parts: str, dtype: torch.dtype
) -> None:
    layer = make_layer(make_keys([9, 0, 18], 3, num_entries=num_entries), heads, rotated, dtype, parts)
    for got, want in zip(run_layer(triton_ops, gpu_device, layer), right_layer(layer), strict=True):
        assert (got.shape, got.dtype) == (want.shape, dtype)
        torch.testing.assert_close(got, want, equal_nan=True, **TOLERANCE[dtype])


def test_a_layer_of_long_runs(triton_ops: Any, gpu_device: str) -> None:
    layer = make_layer(make_keys([6], 66), (2, 1, 16), 8, FP16, "norm rotary gate")
    for got, want in zip(run_layer(triton_ops, gpu_device, layer), right_layer(layer), strict=True):
        torch.testing.assert_close(got, want, equal_nan=True, **TOLERANCE[FP16])


@pytest.mark.fast_cases("9-9-2-", "4-9-30-")
@pytest.mark.parametrize(
    ("num_queries", "num_entries", "window", "dtype"),
    [(3, 0, 1, FP32), (9, 9, 2, FP32), (4, 9, 30, BF16), (9, 9, 17, FP16), (66, 0, 5, FP32), (66, 66, 3, FP32)],
)
def test_windows(
    triton_ops: Any, gpu_device: str, num_queries: int, num_entries: int, window: int, dtype: torch.dtype
) -> None:
    """Smaller than a block, than a tree, and larger; where it begins differs from query to query."""
    contexts = [41, 0, 130] if num_queries < 64 else [41]
    layer = make_layer(make_keys(contexts, num_queries, num_entries=num_entries), (4, 2, 16), 8, dtype, "norm rotary")
    layer["config"] = replace(layer["config"], window=window)
    for got, want in zip(run_layer(triton_ops, gpu_device, layer), right_layer(layer), strict=True):
        torch.testing.assert_close(got, want, equal_nan=True, **TOLERANCE[dtype])


@pytest.mark.parametrize("num_entries", [0, 5])
def test_keys_before_all_windows_are_not_read(triton_ops: Any, gpu_device: str, num_entries: int) -> None:
    layer = make_layer(make_keys([90], 5, num_entries=num_entries), (2, 1, 16), 8, FP32, "")
    layer["config"] = replace(layer["config"], window=20)
    for pool in (layer["k_pool"], layer["v_pool"]):
        pool[layer["metadata"].table[layer["metadata"].rows[0], :71]] = torch.nan
    out, want = run_layer(triton_ops, gpu_device, layer)[0], right_layer(layer)[0]
    assert want.isfinite().all()
    torch.testing.assert_close(out, want, **TOLERANCE[FP32])


def test_what_is_stored_bit_for_bit(triton_ops: Any, gpu_device: str) -> None:
    """Every product is rounded where PyTorch rounds it."""
    layer = make_layer(make_keys([9, 4], 4), (2, 1, 16), 6, FP16, "rotary")
    in_torch = layer | {"k_pool": layer["k_pool"].clone(), "v_pool": layer["v_pool"].clone()}
    torch_ops.attend_layer(**layer_arguments(in_torch))
    _, k_pool, v_pool = run_layer(triton_ops, gpu_device, layer)
    assert torch.equal(k_pool.nan_to_num(9.0), in_torch["k_pool"].nan_to_num(9.0))
    assert torch.equal(v_pool.nan_to_num(9.0), in_torch["v_pool"].nan_to_num(9.0))


def test_what_is_not_finite_is_stored_as_zero(triton_ops: Any, gpu_device: str) -> None:
    layer = make_layer(make_keys([9], 3), (4, 2, 8), 4, FP32, "norm rotary")
    heads = layer["projected"].view(3, 8, 8)
    heads[0, 4, 3] = torch.nan  # of a key: its norm takes all of the head with it
    heads[1, 6, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])  # of a value
    heads[2, 1, 5] = torch.nan  # of a query
    out, k_pool, v_pool = run_layer(triton_ops, gpu_device, layer)
    slots = layer["write_slots"]
    assert k_pool[slots].isfinite().all()
    assert not k_pool[slots[0], 0].any()
    assert k_pool[slots[0], 1].all()
    assert torch.equal(v_pool[slots[1], 0], torch.cat([torch.zeros(3), heads[1, 6, 3:]]))
    is_hit = torch.zeros(3, 4, 8, dtype=torch.bool)
    is_hit[2, 1] = True
    assert torch.equal(out.isnan(), is_hit.view(1, 3, 32))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("num_entries", [0, 4, 65])
def test_rows_of_padding(triton_ops: Any, gpu_device: str, num_entries: int) -> None:
    """Their projections, and all of slot 0, are no numbers: nothing of either is read or written."""
    keys = make_keys([9, 0], max(3, num_entries), num_entries=num_entries)
    keys = replace(keys, rows=torch.tensor([int(keys.rows[0]), 0]))
    layer = make_layer(keys, (2, 1, 16), 8, FP32, "norm rotary gate")
    layer["projected"][1] = torch.nan
    layer["k_pool"][0], layer["v_pool"][0] = torch.nan, torch.nan
    assert not layer["write_slots"].view(2, -1)[1].any()
    got = run_layer(triton_ops, gpu_device, layer)
    assert not got[0][1].any()
    real = {**layer, "projected": layer["projected"].clone()}
    real["projected"][1] = 1.0
    for x, want in zip(got, right_layer(real), strict=True):
        torch.testing.assert_close(x, want, equal_nan=True, **TOLERANCE[FP32])
    written = layer["write_slots"]
    for pool, before in zip(got[1:], (layer["k_pool"], layer["v_pool"]), strict=True):
        others = torch.ones(len(pool), dtype=torch.bool)
        others[written] = False
        others[0] = True
        assert torch.equal(pool[others].view(torch.int32), before[others].view(torch.int32))


@pytest.mark.slow
def test_views(triton_ops: Any, gpu_device: str) -> None:
    """Projections and angles cut out of wider ones, a layer's part of a pool, a table of which more is known."""
    layer = make_layer(make_keys([9, 21], 5, num_entries=7), (4, 2, 16), 8, FP32, "norm rotary gate")
    want = run_layer(triton_ops, gpu_device, layer)
    there = {name: x.to(gpu_device) for name, x in layer.items() if isinstance(x, Tensor)}
    there["config"] = replace(layer["config"], norm=layer["config"].norm.to(gpu_device))
    wide = torch.full((2, 5, 250), torch.nan, device=gpu_device)
    wide[..., 30:222] = there["projected"]
    angles = torch.cat([there["cos"], there["sin"]], -1)
    pools = torch.full((2, 2, *layer["k_pool"].shape), torch.nan, device=gpu_device)
    pools[0, 1], pools[1, 1] = there["k_pool"], there["v_pool"]
    keys = on(gpu_device, layer["metadata"])
    assert keys.seen is not None
    turned = replace(
        keys, seen=keys.seen.transpose(1, 2).contiguous().transpose(1, 2), table=keys.table.t().contiguous().t()
    )
    views = {"projected": wide[..., 30:222], "cos": angles[..., :8], "sin": angles[..., 8:], "metadata": turned}
    out = triton_ops.attend_layer(**layer_arguments(there | views | {"k_pool": pools[0, 1], "v_pool": pools[1, 1]}))
    for got, expected in zip((out, pools[0, 1], pools[1, 1]), want, strict=True):
        assert torch.equal(got.cpu().nan_to_num(9.0), expected.nan_to_num(9.0))
    assert pools[:, 0].isnan().all()
    with pytest.raises(ValueError, match="side by side"):
        triton_ops.attend_layer(**layer_arguments(there | {"metadata": keys, "v_pool": pools[0, 1].transpose(1, 2)}))


@pytest.mark.parametrize(("batch", "num_queries"), [(0, 5), (0, 70), (2, 0)])
def test_nothing_to_attend(triton_ops: Any, gpu_device: str, batch: int, num_queries: int) -> None:
    """No row, or no query of any: an empty output, and pools as they were."""
    layer = make_layer(make_keys([9, 21], 5, num_entries=7), (4, 2, 16), 8, FP32, "norm rotary gate")
    layer["write_slots"] = layer["write_slots"][:0]
    for name in ("projected", "cos", "sin"):
        layer[name] = layer[name][:batch, :1].expand(-1, num_queries, *layer[name].shape[2:])
    keys = layer["metadata"]
    layer["metadata"] = replace(
        keys,
        rows=keys.rows[:batch],
        last=keys.last[:batch, :1].expand(-1, num_queries),
        roots=keys.roots[:batch],
        seen=keys.seen[:batch, :1].expand(-1, num_queries, -1),
    )
    out, *pools = run_layer(triton_ops, gpu_device, layer)
    assert out.shape == (batch, num_queries, 4 * 16)
    for pool, before in zip(pools, (layer["k_pool"], layer["v_pool"]), strict=True):
        assert torch.equal(pool.view(torch.int32), before.view(torch.int32))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("parts", ["norm rotary gate", ""])
def test_long_runs_whose_keys_are_gathered(
    triton_ops: Any, gpu_device: str, parts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No kernel attends, and slots that no query sees hold NaN. Runs with fewer queries stay in the kernels."""
    layer = make_layer(make_keys([6], 65, first=1, slack=0), (2, 1, 16), 8, FP32, parts)
    in_kernels: list[int] = []

    def noted(q: Tensor, *_: object) -> Tensor:
        in_kernels.append(q.shape[1])
        return q

    monkeypatch.setattr(triton_ops, "attend_in_kernels", noted)
    heads = crossover.Heads(2, 1, 16, "gate" in parts, FP32, torch.empty(0, device=gpu_device).device)
    monkeypatch.setattr(crossover, "_least", {heads: 65})
    layer["metadata"] = replace(layer["metadata"], spans=((6, 71),))
    for got, want in zip(run_layer(triton_ops, gpu_device, layer), right_layer(layer), strict=True):
        torch.testing.assert_close(got, want, **TOLERANCE[FP32], equal_nan=True)
    assert in_kernels == []
    layer["metadata"] = replace(layer["metadata"], spans=((6, 70),))
    run_layer(triton_ops, gpu_device, layer)
    assert in_kernels == [65]


@pytest.mark.slow
def test_both_forms_of_long_runs_agree(triton_ops: Any, gpu_device: str) -> None:
    """As an engine asks them to before it times them."""
    heads = crossover.Heads(2, 1, 16, True, BF16, torch.empty(0, device=gpu_device).device)
    assert crossover.agree(heads, triton_ops.attend_in_kernels, torch_ops.attend_spans)


@pytest.mark.gpu
def test_long_runs_are_timed_on_a_gpu(triton_ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the result is: PyTorch has its form for these heads there, and both agree."""
    for name in ("_least", "_most"):
        monkeypatch.setattr(crossover, name, {})
    heads = crossover.Heads(32, 8, 128, True, BF16, torch.empty(0, device="cuda").device)
    assert crossover._has_flash(heads)
    assert crossover.measure(heads, 8192, triton_ops.attend_in_kernels) in (None, *crossover.SIZES)
    assert crossover.agree(heads, triton_ops.attend_in_kernels, torch_ops.attend_spans)


@pytest.mark.usefixtures("launchable")
def test_triton_is_chosen_where_it_runs(triton_ops: Any, gpu_device: str) -> None:
    """Neither indices nor a mask are made for it."""
    layer = make_layer(make_keys([9, 4], 4), (4, 2, 16), 8, FP32, "norm rotary gate")
    want = run_layer(triton_ops, gpu_device, layer)
    layer["metadata"] = keys = on(gpu_device, layer["metadata"])
    there = {name: x.to(gpu_device) if isinstance(x, Tensor) else x for name, x in layer.items()}
    there["config"] = replace(layer["config"], norm=layer["config"].norm.to(gpu_device))
    assert torch.equal(paged_attention.attend_layer(**layer_arguments(there)).cpu(), want[0])
    assert not {"indices", "mask"} & set(vars(keys))


def test_what_is_compiled_ahead_of_time_is_what_runs(triton_ops: Any) -> None:
    """Every argument of every kernel has a type or a value."""
    variants = tiles.variants()
    assert len({variant.name for variant in variants}) == len(variants)
    for variant in variants:
        assert list(variant.signature) == variant.kernel.arg_names
        assert {name for name, kind in variant.signature.items() if kind == "constexpr"} == set(variant.constexprs)
