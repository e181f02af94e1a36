"""Pairs sorted by expert in Triton, without any wait for the device; block sizes, variants compiled ahead of time.

See README.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specmamba.kernels.gpu import Variant, dense, launch, next_power_of_2, num_blocks
from specmamba.kernels.moe import triton_counts, triton_kernels
from specmamba.kernels.moe.reference import Groups

MAX_RANKED_PAIRS = 4096  # each is compared with all the others: beyond, counting does less
DISPATCH_BLOCKS = {"BLOCK_P": 512, "BLOCK_K": 1024}
COUNTED_PAIRS = 256  # of a block: one for each thread of AMD's programs, two for each of NVIDIA's
SUM_BLOCKS = {"BLOCKS": 128, "EXPERTS": 16}


@dataclass(frozen=True)
class SortTile:
    """Warps and stages of all these launches. Not measured."""

    num_warps: int = 4
    num_stages: int = 3


TILE = SortTile()


def dispatch(x: Tensor, experts: Tensor, num_experts: int) -> tuple[Tensor, Groups]:
    """One launch for few pairs, three for many; the same bits."""
    num_pairs = experts.numel()
    x, experts = dense(x), experts.contiguous()
    rows = x.new_empty(num_pairs, x.shape[1])
    groups = Groups(experts.new_empty(num_pairs), experts.new_empty(num_experts, dtype=torch.int32))
    take = rank if num_pairs <= MAX_RANKED_PAIRS else count
    take(x, experts, rows, groups)
    return rows, groups


def rank(x: Tensor, experts: Tensor, rows: Tensor, groups: Groups) -> None:
    """Compare each pair with all the others. One launch.

    Args:
        x: [T, K], neighbours of a row in memory.
        experts: [T, k] int64, contiguous.
        rows: [P, K]; written, as ``groups`` is.
        groups: of P pairs and E experts.
    """
    (num_pairs, width), num_experts = rows.shape, len(groups.ends)
    launch(
        triton_kernels.dispatch,
        (num_pairs + num_experts,),
        TILE,
        DISPATCH_BLOCKS,
        *(x, experts, rows, groups.places, groups.ends),
        *(num_pairs, experts.shape[1], width, x.stride(0), width),
    )


def count(x: Tensor, experts: Tensor, rows: Tensor, groups: Groups) -> None:
    """Count pairs by block and expert, sum up, place each pair: as ``rank``, P > 0. Three launches.

    One pass of the radix sort of Satish, Harris and Garland (Designing Efficient Sorting Algorithms for Manycore GPUs,
    IPDPS 2009), whose digits are experts here.
    """
    (num_pairs, width), num_experts = rows.shape, len(groups.ends)
    constants = count_constants(num_experts)
    blocks = num_blocks(num_pairs, COUNTED_PAIRS)
    counts, before = (groups.ends.new_empty(blocks, num_experts) for _ in range(2))
    totals = torch.empty_like(groups.ends)
    launch(triton_counts.count_pairs, (blocks,), TILE, constants, experts, counts, num_pairs, num_experts)
    of_experts = num_blocks(num_experts, SUM_BLOCKS["EXPERTS"])
    launch(triton_counts.sum_counts, (of_experts,), TILE, SUM_BLOCKS, counts, before, totals, blocks, num_experts)
    launch(
        triton_counts.place_pairs,
        (num_pairs + num_experts,),
        TILE,
        constants | {"BLOCK_K": DISPATCH_BLOCKS["BLOCK_K"]},
        *(x, experts, before, totals, rows, groups.places, groups.ends),
        *(num_pairs, experts.shape[1], num_experts, width, x.stride(0), width),
    )


def count_constants(num_experts: int) -> dict[str, Any]:
    """Constants of the launches that have a block of pairs and all experts."""
    return {"BLOCK_P": COUNTED_PAIRS, "BLOCK_E": next_power_of_2(num_experts)}


def variants() -> list[Variant]:
    """Few pairs; many, of 128 and of 512 experts."""
    types = {"x": "*bf16", "experts": "*i64", "rows": "*bf16", "places": "*i64"}
    types |= dict.fromkeys(("ends", "counts", "before", "totals"), "*i32")

    def variant(name: str, kernel: Any, constants: dict[str, Any]) -> Variant:
        return Variant.of(name, kernel, types, constants, TILE)

    made = [
        variant("dispatch bf16", triton_kernels.dispatch, DISPATCH_BLOCKS),
        variant("sum_counts", triton_counts.sum_counts, SUM_BLOCKS),
    ]
    for num_experts in (128, 512):
        constants = count_constants(num_experts)
        with_rows = constants | {"BLOCK_K": DISPATCH_BLOCKS["BLOCK_K"]}
        made += [
            variant(f"count_pairs E={num_experts}", triton_counts.count_pairs, constants),
            variant(f"place_pairs bf16 E={num_experts}", triton_counts.place_pairs, with_rows),
        ]
    return made
