"""Attention over keys and values that are stored in 8 bits: against the reference over the numbers they stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from specmamba.kernels import paged_attention
from specmamba.kernels.dispatch import operator_of
from specmamba.kernels.paged_attention import LayerKV, native_ops, reference, torch_ops
from specmamba.kernels.paged_attention.codes import LARGEST, SMALLEST, dequantize, quantize
from tests.kernels.test_attention_keys import layer_arguments, make_keys
from tests.kernels.test_attention_runs import GATHERED, make_run
from tests.kernels.test_paged_attention import DTYPES, attention_tolerance, call_layer, make_layer, needs_native
from tests.kernels.trees import SHAPES, batch_of_parents, mask_of
from tests.pairwise import pairwise

OPS = {"torch": torch_ops, "native": native_ops}
INT8, FP8 = torch.int8, torch.float8_e4m3fn
CODES = pytest.mark.parametrize("codes", [INT8, FP8], ids=["int8", "fp8"])
POOLS = ("k_pool", "v_pool", "k_scales", "v_scales")
Layer = dict[str, Any]


def in_codes(layer: Layer, codes: torch.dtype) -> Layer:
    """The same layer with pools of codes. What held NaN, since nothing may read it, has a NaN for its scale."""
    made = dict(layer)
    for side in "kv":
        pool = layer[f"{side}_pool"]
        made[f"{side}_pool"], made[f"{side}_scales"] = quantize(pool, codes)
        made[f"{side}_scales"][pool.isnan().any(-1)] = torch.nan
    return made


def run(form: str | ModuleType, layer: Layer, **changes: Any) -> tuple[Tensor, Layer]:
    """The result, and the layer with pools as they are then; those that were given are not changed."""
    ops = OPS[form] if isinstance(form, str) else form
    after = {**layer, **{name: layer[name].clone() for name in POOLS}, **changes}
    if "metadata" in layer:
        return ops.attend_layer(**layer_arguments(after)), after
    return call_layer(ops, after), after


def right(after: Layer) -> Tensor:
    """Attention of the reference over the numbers that the stored codes stand for."""
    pools = {f"{side}_pool": dequantize(after[f"{side}_pool"], after[f"{side}_scales"]) for side in "kv"}
    spare = torch.zeros(
        1, *pools["k_pool"].shape[1:]
    )  # behind all others: the reference stores new tokens there, which no query sees
    pools = {name: torch.cat([pool.nan_to_num(0.0), spare]) for name, pool in pools.items()}
    slots = torch.full_like(after["write_slots"], len(spare) - 1 + len(after["k_pool"]))
    plain = {**after, **pools, "write_slots": slots, "k_scales": None, "v_scales": None}
    return reference.attend_layer(**layer_arguments(plain)) if "metadata" in after else call_layer(reference, plain)


def check(form: str, layer: Layer, dtype: torch.dtype, seen: Tensor | None = None) -> None:
    """Against the reference over the same codes; and the codes of new tokens against the reference's own.

    Norm and rotation may differ by a last bit, by which a number may be rounded to the neighbouring code.
    """
    out, after = run(form, layer)
    _, expected = run(reference, layer)
    want = right(after)
    some = slice(None) if seen is None else seen
    assert (out.shape, out.dtype) == (want.shape, dtype)
    torch.testing.assert_close(out[some], want[some], **attention_tolerance(dtype))
    for side in "kv":
        slots = layer["write_slots"]
        got, stored = (x[f"{side}_pool"][slots].float() for x in (after, expected))
        assert_neighbours(got, stored, layer["k_pool"].dtype)
        scales = (x[f"{side}_scales"][slots] for x in (after, expected))
        torch.testing.assert_close(*scales, **attention_tolerance(dtype))


def assert_neighbours(got: Tensor, want: Tensor, codes: torch.dtype, slack: float = 0.0, share: float = 0.05) -> None:
    """Codes differ by a step and ``slack`` at the most, and no larger share of them differs."""
    step = torch.ones_like(want) if codes is INT8 else (want.abs() / 8).clamp(min=2.0**-9)
    assert ((got - want).abs() <= step + slack).all()
    assert (got != want).float().mean() < share


@pairwise(
    DTYPES,
    CODES,
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
    codes: torch.dtype,
    dtype: torch.dtype,
) -> None:
    layer = in_codes(make_layer(batch, nodes, length, heads, rotated, dtype), codes)
    check(form, layer if is_masked else layer | {"mask": None}, dtype)


@CODES
def test_a_tree_behind_ragged_contexts_in_pages(form: str, codes: torch.dtype) -> None:
    keys = make_keys([37, 0, 5, 12], 9, num_entries=9)
    assert keys.roots is not None
    slots = keys.table[keys.rows[:, None], keys.roots[:, None] + torch.arange(9)].flatten()
    layer = make_layer(4, 9, 9, (6, 2, 8), 4, torch.float32)
    del layer["kv_indices"], layer["mask"]
    gen = torch.Generator().manual_seed(3)
    layer["k_pool"], layer["v_pool"] = torch.randn(2, int(keys.table.max()) + 1, 2, 8, generator=gen)
    check(form, in_codes(layer | {"metadata": keys, "write_slots": slots}, codes), torch.float32)


@CODES
def test_keys_that_are_hidden_do_not_show(form: str, codes: torch.dtype) -> None:
    """Unseen entries of the table point at one loud row, whose scales are a million times those of others."""
    batch, nodes, longest = len(SHAPES), 15, 23
    layer = make_layer(batch, nodes, longest + nodes, (6, 2, 8), 4, torch.float32)
    loud = int(layer["kv_indices"][0, 0])
    layer["k_pool"][loud], layer["v_pool"][loud] = 1e6, -1e6
    unseen = torch.arange(longest) >= torch.tensor([23, 0, 1, 9, 16])[:, None]
    unseen[0, 0] = True
    layer["kv_indices"][:, :longest][unseen] = loud
    tree = mask_of(batch_of_parents(SHAPES, nodes, seed=nodes))
    layer["mask"] = torch.cat([~unseen[:, None].expand(batch, nodes, longest), tree], 2)
    out, after = run(form, in_codes(layer, codes))
    assert out.abs().max() < 100
    torch.testing.assert_close(out, right(after), **attention_tolerance(torch.float32))


@pairwise(
    DTYPES,
    CODES,
    pytest.mark.parametrize("heads", [(2, 2, 16), (6, 2, 8), (5, 1, 7), (4, 2, 67)]),
    pytest.mark.parametrize("first", [0, 1, 3]),
    pytest.mark.parametrize(("lengths", "num_keys"), [([65], 65), ([100, 37], 163), ([300], GATHERED + 330)]),
)
def test_long_runs(
    form: str,
    lengths: list[int],
    num_keys: int,
    first: int,
    heads: tuple[int, int, int],
    codes: torch.dtype,
    dtype: torch.dtype,
) -> None:
    layer = make_run(lengths, num_keys, heads, dtype, first)
    if form == "torch":  # which multiplies what it masks by 0
        layer |= {name: layer[name].nan_to_num(0.0) for name in ("k_pool", "v_pool")}
    check(form, in_codes(layer, codes), dtype, torch.arange(max(lengths)) < torch.tensor(lengths)[:, None])


@CODES
@DTYPES
def test_what_is_stored_bit_for_bit(form: str, dtype: torch.dtype, codes: torch.dtype) -> None:
    """Of one head every number is tiny, of one huge, of one zero; one holds what is no number, which becomes 0."""
    layer = in_codes(make_layer(2, 5, 9, (4, 2, 67), 34, dtype, parts=""), codes)
    heads = layer["projected"].view(10, -1, 67)
    heads[0, 4] *= 1e-37
    heads[1, 5] *= 1e37
    heads[2, 6], heads[3, 7] = 0.0, -0.0
    heads[4, 4, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    heads[5, 7] = torch.arange(67) - 33  # ties
    _, after = run(form, layer)
    slots = layer["write_slots"]
    for name, new in (("k", heads[:, 4:6]), ("v", heads[:, 6:8])):
        want, scales = quantize(new, codes)
        assert torch.equal(after[f"{name}_pool"][slots].view(torch.uint8), want.view(torch.uint8))
        assert torch.equal(after[f"{name}_scales"][slots], scales)
        assert scales.isfinite().all()
    assert not after["k_scales"][slots[0], 0]
    assert not after["k_pool"][slots[4], 0, :3].float().any()


@CODES
def test_quantization_is_off_by_half_a_step(codes: torch.dtype) -> None:
    x = torch.randn(50, 3, 40, generator=torch.Generator().manual_seed(1)) * torch.logspace(-30, 30, 50)[:, None, None]
    stored, scales = quantize(x, codes)
    assert (stored.dtype, stored.shape, scales.dtype, scales.shape) == (codes, x.shape, torch.float32, (50, 3))
    most = x.abs().amax(-1)
    assert torch.equal(stored.float().abs().amax(-1), torch.full((50, 3), LARGEST[codes]))
    step = 1.0 if codes is INT8 else (stored.float().abs() / 8).clamp(min=2.0**-9)
    error = (dequantize(stored, scales) - x).abs()
    assert (error <= 0.5001 * step * scales[..., None]).all()
    assert (error.amax(-1) > 1e-3 * most).all()
    assert not quantize(torch.full((1, 4), SMALLEST / 2), codes)[1].any()


@CODES
@DTYPES
@pytest.mark.parametrize("ops", [reference, *OPS.values()], ids=["reference", *OPS])
def test_a_query_that_sees_no_key_gets_zero_and_no_number_stays_in_its_row(
    ops: ModuleType, dtype: torch.dtype, codes: torch.dtype, request: pytest.FixtureRequest
) -> None:
    if ops is native_ops:
        request.getfixturevalue("needs_native")
    layer = in_codes(make_layer(2, 5, 21, (4, 2, 8), 4, dtype), codes)
    want, _ = run(ops, layer)
    mask = layer["mask"].clone()
    mask[0, 2], mask[1] = False, False
    layer["projected"][0, 3, 11] = torch.nan  # of query head 1
    got, _ = run(ops, layer | {"mask": mask})
    assert not got[0, 2].any()
    assert not got[1].any()
    others = [0, 1, 4]
    torch.testing.assert_close(got[0, others], want[0, others], **attention_tolerance(dtype))
    is_hit = torch.zeros(4, 8, dtype=torch.bool)
    is_hit[1] = True
    assert torch.equal(got[0, 3].isnan(), is_hit.flatten())


@needs_native
@CODES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_the_others_or_on_threads(
    dtype: torch.dtype, codes: torch.dtype, set_threads: Callable[[int], None]
) -> None:
    layer = in_codes(make_run([90, 71], 150, (8, 2, 16), dtype), codes)
    set_threads(2)
    together, after = run("native", layer)
    set_threads(1)
    for b in range(2):
        row, metadata = slice(b, b + 1), layer["metadata"]
        own = {name: layer[name][row] for name in ("projected", "cos", "sin")}
        own["metadata"] = replace(metadata, rows=metadata.rows[row], last=metadata.last[row], first_row=b + 1)
        own["write_slots"] = layer["write_slots"].view(2, -1)[b]
        alone, pools = run("native", layer, **own)
        assert torch.equal(alone[0], together[b])
        for name in POOLS:
            mine = (x[name][own["write_slots"]].view(torch.uint8) for x in (pools, after))
            assert torch.equal(*mine)


@needs_native
@CODES
def test_which_pools_native_code_takes(codes: torch.dtype) -> None:
    layer = in_codes(make_layer(2, 3, 9, (4, 2, 8), 4, torch.float32), codes)
    metadata = make_keys([4, 2], 3)

    def can_take(**changes: Any) -> bool:
        x = layer | changes
        kv = LayerKV(x["k_pool"], x["v_pool"], x["write_slots"], x["k_scales"], x["v_scales"])
        return native_ops.can_take(x["projected"], kv, metadata)

    assert can_take()
    given = layer_arguments({**layer, "metadata": metadata})
    assert operator_of(paged_attention.attend_layer).choose(**given) == "native"
    wrong: list[Layer] = [
        {"k_scales": None, "v_scales": None},
        {"v_scales": None},
        {"v_pool": layer["v_pool"].float()},
        {"k_scales": layer["k_scales"].double()},
        {"v_scales": layer["v_scales"].to("meta")},
        {"v_scales": layer["v_scales"].t().contiguous().t()},
        {"k_pool": layer["k_pool"].to("meta")},
        {"k_pool": layer["k_pool"].view(torch.uint8)},
    ]
    for changes in wrong:
        assert not can_take(**changes)
        with pytest.raises(ValueError, match="pools need"):
            call_layer(native_ops, layer | changes)
    for changes in ({"v_scales": layer["v_scales"][:, :1]}, {"v_scales": layer["v_scales"][1:]}):
        with pytest.raises(ValueError, match="scale"):
            call_layer(native_ops, layer | changes)
