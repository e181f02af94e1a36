"""Attention over scattered rows: torch_ops against the reference and against torch's own attention."""

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from specmamba.kernels import paged_attention, rowwise
from specmamba.kernels.dispatch import operator_of
from specmamba.kernels.paged_attention import LayerKV, native_ops, reference, torch_ops
from tests.kernels.rounding import tolerance
from tests.kernels.test_attention_keys import layer_arguments
from tests.kernels.trees import SHAPES, batch_of_parents, mask_of
from tests.pairwise import pairwise

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def attention_tolerance(dtype: torch.dtype, sharpness: float = 1.0) -> dict[str, float]:
    """Queries and keys are rounded, and the weights.

    A score is a sum of D products, ``sharpness`` = scale * sqrt(D) of which is its size for normal queries and keys: a
    rounding of these moves the score, and so the logarithm of a weight, by eps * sharpness.
    """
    return tolerance(dtype, roundings=1 + sharpness)


needs_native = pytest.mark.usefixtures("needs_native")
OPS = {"torch": torch_ops, "native": native_ops}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
# (Hq, Hkv, D): one kv head per query head, grouped, all on one, odd widths
HEADS = pytest.mark.parametrize("heads", [(2, 2, 16), (6, 2, 8), (5, 1, 7), (4, 2, 67), (8, 2, 256)])


def make(batch: int, nodes: int, length: int, heads: tuple[int, int, int], dtype: torch.dtype) -> Inputs:
    """q, the two pools (NaN in every row that kv_indices does not name) and kv_indices [B, L] without repeats."""
    query_heads, kv_heads, width = heads
    gen = torch.Generator().manual_seed(nodes * 1000 + length)
    pool = 3 * batch * length + 1
    indices = torch.randperm(pool, generator=gen)[: batch * length].view(batch, length)
    k_pool, v_pool = torch.randn(2, pool, kv_heads, width, generator=gen).to(dtype)
    unnamed = torch.ones(pool, dtype=torch.bool)
    unnamed[indices.flatten()] = False
    k_pool[unnamed], v_pool[unnamed] = float("nan"), float("nan")
    return torch.randn(batch, nodes, query_heads, width, generator=gen).to(dtype), k_pool, v_pool, indices


@pairwise(
    DTYPES,
    HEADS,
    pytest.mark.parametrize(("batch", "nodes", "length"), [(1, 1, 1), (1, 1, 37), (2, 5, 1), (1, 7, 63), (2, 16, 100)]),
)
def test_attend_to_everything(
    batch: int, nodes: int, length: int, heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    inputs = make(batch, nodes, length, heads, dtype)
    out = torch_ops.attend(*inputs, None)
    torch.testing.assert_close(out, reference.attend(*inputs, None), **attention_tolerance(dtype))
    assert out.shape == inputs[0].shape
    assert out.dtype == dtype


@pairwise(
    DTYPES,
    HEADS,
    pytest.mark.parametrize(("batch", "nodes", "length"), [(1, 1, 2), (1, 6, 41), (3, 19, 64)]),
)
def test_attend_under_a_random_mask(
    batch: int, nodes: int, length: int, heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    inputs = make(batch, nodes, length, heads, dtype)
    gen = torch.Generator().manual_seed(length)
    mask = torch.rand(batch, nodes, length, generator=gen) < 0.3
    mask.scatter_(2, torch.randint(length, (batch, nodes, 1), generator=gen), True)  # every query sees something
    out = torch_ops.attend(*inputs, mask)
    torch.testing.assert_close(out, reference.attend(*inputs, mask), **attention_tolerance(dtype))


@pytest.mark.parametrize("heads", [(2, 2, 16), (6, 2, 8), (5, 1, 7)])
@pytest.mark.parametrize("nodes", [1, 4, 15])
def test_attend_over_a_tree_after_ragged_contexts(nodes: int, heads: tuple[int, int, int]) -> None:
    """Contexts of different lengths, then the nodes' own keys; unseen entries all point at one loud row."""
    batch, longest = len(SHAPES), 23
    q, k_pool, v_pool, indices = make(batch, nodes, longest + nodes, heads, torch.float32)
    context = torch.tensor([23, 0, 1, 9, 16])
    unseen = torch.arange(longest) >= context[:, None]
    loud = int(indices[0, 0])
    k_pool[loud], v_pool[loud] = 50.0, -1e4
    indices[:, :longest][unseen] = loud
    tree_mask = mask_of(batch_of_parents(SHAPES, nodes, seed=nodes))
    mask = torch.cat([~unseen[:, None].expand(batch, nodes, longest), tree_mask], 2)
    out = torch_ops.attend(q, k_pool, v_pool, indices, mask)
    want = reference.attend(q, k_pool, v_pool, indices, mask)
    torch.testing.assert_close(out, want, **attention_tolerance(torch.float32))
    assert out[1:].abs().max() < 100  # the loud row leaked into no row that does not see it


def test_attend_does_not_write_its_inputs() -> None:
    inputs = make(2, 3, 8, (4, 2, 8), torch.float32)
    before = [x.clone() for x in inputs]
    torch_ops.attend(*inputs, torch.ones(2, 3, 8, dtype=torch.bool))
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, inputs, strict=True))


def make_layer(
    batch: int,
    nodes: int,
    length: int,
    heads: tuple[int, int, int],
    rotated: int,
    dtype: torch.dtype,
    parts: str = "norm rotary gate",
    scale: float | None = None,
) -> dict[str, Any]:
    """A layer's arguments: ``length`` keys a row, of which the last ``nodes`` are those of the tokens themselves."""
    query_heads, kv_heads, width = heads
    _, k_pool, v_pool, indices = make(batch, nodes, length, heads, dtype)
    gen = torch.Generator().manual_seed(length)
    angles = torch.rand(batch, nodes, 1, rotated, generator=gen) * 7
    mask = torch.rand(batch, nodes, length, generator=gen) < 0.5
    mask[..., -nodes:] = torch.ones(nodes, nodes, dtype=torch.bool).tril()
    norm = torch.rand(query_heads + kv_heads, width, generator=gen) + 0.5
    projected = torch.randn(batch, nodes, 2 * (query_heads + kv_heads) * width, generator=gen).to(dtype)
    has_gate, has_rotary = "gate" in parts, "rotary" in parts
    return {
        "projected": projected if has_gate else projected[..., : (query_heads + 2 * kv_heads) * width],
        "config": paged_attention.AttentionConfig(
            *heads,
            scale=width**-0.5 if scale is None else scale,
            norm=norm if "norm" in parts else None,
            norm_eps=1e-5,
            has_gate=has_gate,
        ),
        "cos": angles.cos().to(dtype) if has_rotary else None,
        "sin": angles.sin().to(dtype) if has_rotary else None,
        "k_pool": k_pool,
        "v_pool": v_pool,
        "write_slots": indices[:, -nodes:].flatten(),
        "kv_indices": indices,
        "mask": mask,
    }


def run_layer(form: str | ModuleType, arguments: dict[str, Any], **changes: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and the pools, which are not the ones that were given."""
    ops = OPS[form] if isinstance(form, str) else form
    pools = {name: arguments[name].clone() for name in ("k_pool", "v_pool")}
    return call_layer(ops, arguments | pools | changes), pools["k_pool"], pools["v_pool"]


def call_layer(ops: ModuleType, arguments: dict[str, Any]) -> Tensor:
    """``attend_layer`` with metadata of any indices and mask: a tree of all keys, or a row that sees them all."""
    given = dict(arguments)
    indices, mask = given.pop("kv_indices"), given.pop("mask")
    rows = torch.arange(len(indices), device=indices.device)
    nothing = torch.full(arguments["projected"].shape[:2], -1)
    tree = {"sees_all": True} if mask is None else {"roots": torch.zeros_like(rows), "seen": mask}
    metadata = paged_attention.AttentionMetadata(indices, rows, nothing, indices.shape[1], **tree)
    out: Tensor = ops.attend_layer(**layer_arguments(given | {"metadata": metadata}))
    return out


def assert_alike(got: tuple[Tensor, ...], want: tuple[Tensor, ...], dtype: torch.dtype, sharpness: float = 1.0) -> None:
    for x, y in zip(got, want, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        torch.testing.assert_close(x, y, equal_nan=True, **attention_tolerance(dtype, sharpness))
    assert got[0].isfinite().all()


@pairwise(
    DTYPES,
    pytest.mark.parametrize(
        ("heads", "rotated"), [((2, 2, 16), 16), ((6, 2, 8), 2), ((5, 1, 7), 6), ((4, 2, 67), 34), ((8, 2, 256), 64)]
    ),
    pytest.mark.parametrize(
        ("batch", "nodes", "length"), [(1, 1, 1), (1, 1, 37), (1, 4, 20), (3, 5, 33), (1, 7, 63), (2, 19, 100)]
    ),
    pytest.mark.parametrize("is_masked", [True, False]),
)
def test_a_layer(
    form: str,
    batch: int,
    nodes: int,
    length: int,
    heads: tuple[int, int, int],
    rotated: int,
    is_masked: bool,
    dtype: torch.dtype,
) -> None:
    arguments = make_layer(batch, nodes, length, heads, rotated, dtype)
    changes = {} if is_masked else {"mask": None}
    assert_alike(run_layer(form, arguments, **changes), run_layer(reference, arguments, **changes), dtype)


@pairwise(
    DTYPES,
    pytest.mark.parametrize("scale", [None, 0.015625, 1.3]),
    pytest.mark.parametrize(
        "parts", ["", "norm", "rotary", "gate", "norm rotary", "norm gate", "rotary gate", "norm rotary gate"]
    ),
    pytest.mark.parametrize("heads", [(6, 2, 8), (4, 2, 67)]),
)
def test_a_layer_of_any_parts(
    form: str, heads: tuple[int, int, int], parts: str, scale: float | None, dtype: torch.dtype
) -> None:
    arguments = make_layer(2, 5, 21, heads, 6, dtype, parts, scale)
    got = run_layer(form, arguments)
    sharpness = 1.0 if scale is None else scale * heads[2] ** 0.5
    assert_alike(got, run_layer(reference, arguments), dtype, sharpness)
    if scale is not None:  # which must show
        usual = make_layer(2, 5, 21, heads, 6, dtype, parts)
        assert (run_layer(form, usual)[0] - got[0]).abs().max() > 0.05


@DTYPES
def test_a_layer_over_a_tree_after_ragged_contexts(form: str, dtype: torch.dtype) -> None:
    """Contexts of different lengths, then the nodes' own keys; unseen entries all point at one loud row."""
    batch, nodes, longest = len(SHAPES), 15, 23
    arguments = make_layer(batch, nodes, longest + nodes, (6, 2, 8), 4, dtype)
    unseen = torch.arange(longest) >= torch.tensor([23, 0, 1, 9, 16])[:, None]
    indices = arguments["kv_indices"]
    loud = int(indices[0, 0])
    arguments["k_pool"][loud], arguments["v_pool"][loud] = 50.0, -1e4
    indices[:, :longest][unseen] = loud
    tree_mask = mask_of(batch_of_parents(SHAPES, nodes, seed=nodes))
    arguments["mask"] = torch.cat([~unseen[:, None].expand(batch, nodes, longest), tree_mask], 2)
    got, want = run_layer(form, arguments), run_layer(reference, arguments)
    torch.testing.assert_close(got[0][1:], want[0][1:], **attention_tolerance(dtype))
    assert got[0][1:].abs().max() < 100  # the loud row leaked into no row that does not see it


@DTYPES
def test_a_layer_reads_views_and_many_rows(form: str, dtype: torch.dtype) -> None:
    """Projections cut out of wider ones, indices out of a table, a layer's part of a pool, more rows than a task."""
    gen = torch.Generator().manual_seed(1)
    arguments = make_layer(3, 33, 50, (8, 2, 16), 8, dtype)
    want = run_layer(form, arguments)
    wide = torch.randn(3, 33, 400, generator=gen).to(dtype)
    wide[..., 30:350] = arguments["projected"]
    table, mask = torch.randint(9, (3, 80), generator=gen), torch.zeros(3, 33, 64, dtype=torch.bool)
    table[:, 7:57], mask[..., :50] = arguments["kv_indices"], arguments["mask"]
    pools = torch.zeros(2, 5, *arguments["k_pool"].shape, dtype=dtype)
    pools[0, 3], pools[1, 3] = arguments["k_pool"], arguments["v_pool"]
    views = {"projected": wide[..., 30:350], "kv_indices": table[:, 7:57], "mask": mask[..., :50]}
    out = call_layer(OPS[form], arguments | views | {"k_pool": pools[0, 3], "v_pool": pools[1, 3]})
    for got, expected in zip((out, pools[0, 3], pools[1, 3]), want, strict=True):
        assert torch.equal(got.nan_to_num(9.0), expected.nan_to_num(9.0))


@needs_native
def test_a_native_layer_does_not_read_keys_that_no_query_sees() -> None:
    arguments = make_layer(2, 3, 9, (4, 2, 8), 4, torch.float32)
    arguments["mask"][..., :2] = False
    want, *_ = run_layer(native_ops, arguments)
    nowhere = arguments["kv_indices"][:, :2]
    arguments["k_pool"][nowhere], arguments["v_pool"][nowhere] = torch.nan, torch.nan
    assert torch.equal(run_layer(native_ops, arguments)[0], want)
    assert want.isfinite().all()


@DTYPES
@needs_native
def test_threads_change_nothing(dtype: torch.dtype, set_threads: Callable[[int], None]) -> None:
    """More projections than one thread takes alone: norms, rotations and writes are dealt with by several too."""
    arguments = make_layer(2, 30, 64, (12, 4, 128), 64, dtype)
    assert arguments["projected"].numel() >= 1 << 17
    results = []
    for count in (1, 2):
        set_threads(count)
        results.append(run_layer(native_ops, arguments))
    for one, two in zip(*results, strict=True):
        assert torch.equal(one.nan_to_num(9.0), two.nan_to_num(9.0))


@DTYPES
def test_a_query_that_is_no_number_stays_in_its_row(form: str, dtype: torch.dtype) -> None:
    arguments = make_layer(2, 5, 9, (4, 2, 8), 4, dtype)
    want, *_ = run_layer(form, arguments)
    arguments["projected"][0, 2, 11] = torch.nan  # of query head 1
    got, k_pool, v_pool = run_layer(form, arguments)
    is_hit = torch.zeros(2, 5, 4, 8, dtype=torch.bool)
    is_hit[0, 2, 1] = True
    is_hit = is_hit.flatten(2)
    assert torch.equal(got.isnan(), is_hit)
    assert torch.equal(got[~is_hit], want[~is_hit])
    slots = arguments["write_slots"]
    assert k_pool[slots].isfinite().all()
    assert v_pool[slots].isfinite().all()


@DTYPES
@pytest.mark.parametrize("ops", [reference, *OPS.values()], ids=["reference", *OPS])
def test_a_query_that_sees_no_key_gets_zero(
    ops: ModuleType, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    """In a row beside others that see some, and in a row where no query sees any."""
    if ops is native_ops:
        request.getfixturevalue("needs_native")
    for parts in ("norm rotary gate", ""):
        arguments = make_layer(2, 5, 21, (4, 2, 8), 4, dtype, parts)
        want, *_ = run_layer(ops, arguments)
        mask = arguments["mask"].clone()
        mask[0, 2], mask[1] = False, False
        got, *_ = run_layer(ops, arguments, mask=mask)
        assert not got[0, 2].any()
        assert not got[1].any()
        others = [0, 1, 3, 4]
        torch.testing.assert_close(got[0, others], want[0, others], **attention_tolerance(dtype))


@needs_native
def test_a_query_that_is_no_number_and_sees_a_key_gets_none() -> None:
    """All of its scores may be -inf, as if it saw nothing."""
    arguments = make_layer(1, 2, 9, (4, 2, 8), 4, torch.float32, parts="")
    arguments["projected"][0, 0, :8] = -torch.inf * arguments["k_pool"][arguments["kv_indices"][0, 0], 0].sign()
    mask = torch.zeros_like(arguments["mask"])
    mask[..., 0] = True
    got, *_ = run_layer(native_ops, arguments, mask=mask)
    assert got[0, 0, :8].isnan().all()
    assert got[0, 0, 8:].isfinite().all()


@DTYPES
@needs_native
def test_a_native_layer_stores_the_same_keys_as_its_parts(dtype: torch.dtype) -> None:
    """Bit for bit: whether a token's keys were made in a long run or in a short one must not show."""
    arguments = make_layer(2, 5, 9, (4, 2, 67), 34, dtype)
    _, k_pool, v_pool = run_layer(native_ops, arguments)
    heads = arguments["projected"].view(10, -1, 67)
    qk = rowwise.rms_norm(arguments["projected"].view(2, 5, -1, 67)[:, :, :6], arguments["config"].norm, 1e-5)
    keys = rowwise.rotate(qk, arguments["cos"], arguments["sin"])[:, :, 4:].flatten(0, 1)
    assert torch.equal(k_pool[arguments["write_slots"]], keys)
    assert torch.equal(v_pool[arguments["write_slots"]], heads[:, 6:8])


@DTYPES
def test_keys_that_nothing_is_done_to_are_stored_as_they_are(form: str, dtype: torch.dtype) -> None:
    arguments = make_layer(2, 5, 9, (4, 2, 67), 34, dtype, parts="")
    heads = arguments["projected"].view(10, -1, 67)
    heads[3, 4, 7] = torch.inf
    _, k_pool, v_pool = run_layer(form, arguments)
    want = heads[:, 4:6].clone()
    want[3, 0, 7] = 0
    assert torch.equal(k_pool[arguments["write_slots"]], want)
    assert torch.equal(v_pool[arguments["write_slots"]], heads[:, 6:8])


def test_a_layer_stores_what_is_not_finite_as_zero(form: str) -> None:
    arguments = make_layer(1, 3, 9, (4, 2, 8), 4, torch.float32)
    heads = arguments["projected"].view(3, 12, 8)
    heads[0, 4, 3] = float("nan")  # of a key: its norm takes all of the head with it
    heads[1, 6, :3] = torch.tensor([float("nan"), float("inf"), float("-inf")])  # of a value
    _, k_pool, v_pool = run_layer(form, arguments)
    slots = arguments["write_slots"]
    assert k_pool[slots].isfinite().all()
    assert not k_pool[slots[0], 0].any()
    assert k_pool[slots[0], 1].all()
    assert torch.equal(v_pool[slots[1], 0], torch.cat([torch.zeros(3), heads[1, 6, 3:]]))


def test_a_layer_whose_padding_shares_a_slot(form: str) -> None:
    """Tokens 2 and 3 are padding: both write slot 0, which is never read."""
    arguments = make_layer(1, 4, 9, (4, 2, 8), 4, torch.float32)
    arguments["mask"][..., -2:] = False
    arguments["mask"][:, 2:, 0] = True
    want, *_ = run_layer(form, arguments)
    unused = next(slot for slot in range(9) if slot not in arguments["kv_indices"])
    arguments["write_slots"][2:] = unused
    got, *_ = run_layer(form, arguments)
    assert torch.equal(got, want)


def with_metadata(arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same with metadata by which query i sees the first i + 1 keys; and with its indices and mask."""
    batch, nodes = arguments["projected"].shape[:2]
    indices = arguments["kv_indices"]
    table = torch.cat([torch.zeros_like(indices[:1]), indices])
    last = torch.arange(nodes).expand(batch, nodes)
    rows = torch.arange(1, batch + 1)
    metadata = paged_attention.AttentionMetadata(table, rows, last, indices.shape[1], first_row=1)
    layer = {name: x for name, x in arguments.items() if name not in ("kv_indices", "mask")}
    return layer | {"metadata": metadata}, layer | {"kv_indices": metadata.indices, "mask": metadata.mask}


@pytest.mark.parametrize("nodes", [5, native_ops.MAX_QUERIES + 1])
def test_every_form_gets_the_indices_and_the_mask_of_the_metadata(nodes: int) -> None:
    layer, wanted = with_metadata(make_layer(2, nodes, nodes, (4, 2, 8), 4, torch.float32))
    pools = {name: layer[name].clone() for name in ("k_pool", "v_pool")}
    got = paged_attention.attend_layer(**layer_arguments(layer | pools)), pools["k_pool"], pools["v_pool"]
    assert_alike(got, run_layer(reference, wanted), torch.float32)


@needs_native
@pytest.mark.parametrize(
    ("nodes", "expected"), [(1, "native"), (native_ops.MAX_QUERIES, "native"), (native_ops.MAX_QUERIES + 1, "torch")]
)
def test_native_code_is_chosen_for_few_queries(nodes: int, expected: str) -> None:
    layer, _ = with_metadata(make_layer(1, nodes, nodes, (2, 1, 4), 2, torch.float32))
    assert operator_of(paged_attention.attend_layer).choose(**layer_arguments(layer)) == expected


@needs_native
def test_a_native_layer_refuses_what_does_not_fit() -> None:
    arguments = make_layer(2, 3, 9, (4, 2, 8), 4, torch.float32)
    wide, fitting = torch.zeros(2, 3, 1, 10), arguments["config"]
    for wrong in [
        {"projected": arguments["projected"][..., :-8].contiguous()},
        {"config": replace(fitting, norm=fitting.norm[:5])},
        {"config": replace(fitting, norm=fitting.norm.bfloat16())},
        {"config": replace(fitting, norm=fitting.norm.t().contiguous().t())},
        {"config": replace(fitting, has_gate=False)},
        {"config": replace(fitting, num_query_heads=3)},
        {"config": replace(fitting, num_query_heads=2, num_key_heads=4)},
        {"config": replace(fitting, head_dim=4)},
        {"cos": arguments["cos"].bfloat16(), "sin": arguments["sin"].bfloat16()},
        {"cos": arguments["cos"][:, :2]},
        {"cos": wide, "sin": wide},
        {"cos": wide[..., :3], "sin": wide[..., :3]},
        {"v_pool": arguments["v_pool"][:, :1]},
        {"write_slots": arguments["write_slots"][:5]},
        {"write_slots": arguments["write_slots"].int()},
        {"kv_indices": arguments["kv_indices"][:1]},
        {"mask": arguments["mask"][:, :2]},
        {"config": replace(fitting, num_query_heads=0, num_key_heads=0)},
        {"k_pool": arguments["k_pool"].bfloat16()},
        {"v_pool": arguments["v_pool"].transpose(1, 2).contiguous().transpose(1, 2)},
        {"cos": arguments["cos"].to("meta"), "sin": arguments["sin"].to("meta")},
        *(
            {name: x.to("meta")}
            for name, x in arguments.items()
            if isinstance(x, Tensor) and name not in ("cos", "sin")
        ),
    ]:
        with pytest.raises(ValueError, match=r"fit|need|width|shape|dtype|rotate"):
            call_layer(native_ops, arguments | wrong)

    def can_take(layer: dict[str, Any]) -> bool:
        kv = LayerKV(layer["k_pool"], layer["v_pool"], layer["write_slots"])
        return native_ops.can_take(layer["projected"], kv, 1)

    assert can_take(arguments)
    for name in ("projected", "k_pool", "v_pool"):
        assert not can_take(arguments | {name: arguments[name].to("meta")})


def test_reference_matches_torch_attention() -> None:
    """An outside oracle for the reference, in float64 and with grouped heads."""
    q, k_pool, v_pool, indices = make(2, 5, 13, (6, 2, 8), torch.float32)
    q, k_pool, v_pool = q.double(), k_pool.double(), v_pool.double()
    keys, values = k_pool[indices].transpose(1, 2), v_pool[indices].transpose(1, 2)
    want = torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), keys, values, enable_gqa=True)
    torch.testing.assert_close(reference.attend(q, k_pool, v_pool, indices, None), want.transpose(1, 2))
