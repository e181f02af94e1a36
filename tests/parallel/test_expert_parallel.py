"""Whole experts on ranks (``--ep-size``): what each computes adds up to what all compute; what it is refused for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specmamba.config import EngineConfig
from specmamba.engine.capacity_plan import plan_capacity
from specmamba.kernels import rowwise
from specmamba.kernels.linear import Matrix, QuantizedMatrix, WeightForm, round_to_form
from specmamba.kernels.moe import Routing
from specmamba.layers.feed_forward import Experts
from specmamba.models.base import LoadOptions
from specmamba.models.registry import load_model
from specmamba.parallel.ranks import Ranks
from specmamba.parallel.share import Segment, Share
from tests.families import FAMILIES

E, K, WIDTH, INNER = 7, 3, 64, 32
FORMS: dict[str, tuple[WeightForm, torch.dtype]] = {
    "float32": ("plain", torch.float32),
    "bfloat16": ("plain", torch.bfloat16),
    "int8": ("int8", torch.float32),
    "fp8": ("fp8", torch.float32),
    "int4": ("int4-g32", torch.float32),
    "float64": ("plain", torch.float64),  # PyTorch's products, one for each expert
}


class Alone(Ranks):
    """A rank whose sums are its own part."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x


def of(matrix: Matrix, own: range) -> Matrix:
    if isinstance(matrix, Tensor):
        return matrix[own.start : own.stop]
    parts: dict[str, Any] = {name: getattr(matrix, name) for name in ("codes", "scale", "minimum")}
    return replace(matrix, **{name: x[own.start : own.stop] for name, x in parts.items() if x is not None})


def check(up: Matrix, down: Matrix, form: WeightForm, dtype: torch.dtype, experts: Tensor, size: int) -> None:
    """Compare the sum over ranks with all experts on one."""
    num_tokens, generator = len(experts), torch.Generator().manual_seed(1)
    x = torch.randn(num_tokens, WIDTH, generator=generator).to(dtype)
    routing = Routing(experts, torch.rand(num_tokens, K, generator=generator))
    whole = Experts(up, down, rowwise.silu_mul, form, dtype)(x, routing)
    total = torch.zeros_like(whole, dtype=torch.float64)
    for rank in range(size):
        own = Share(rank, size).units(Segment("experts", E, 1, "uneven"))
        part = Experts(
            *(of(up, own), of(down, own), rowwise.silu_mul, form, dtype), ranks=Alone(rank, size), own=(own, E)
        )
        assert part.num_experts == E
        total += part(x, routing).double()
    bound = 2e-2 if dtype is torch.bfloat16 else 1e-5
    assert (total - whole.double()).abs().max() <= bound * whole.abs().max()


@pytest.mark.parametrize(
    ("name", "is_stored"), [*((name, False) for name in sorted(FORMS)), ("fp8", True), ("int4", True)]
)
def test_parts_add_up(name: str, is_stored: bool, needs_native: None) -> None:
    """In every form of weights, also where a checkpoint has the codes; and where a rank has no token, or all."""
    form, dtype = FORMS[name]
    up, down = (torch.randn(E, *shape) / 8 for shape in ((2 * INNER, WIDTH), (WIDTH, INNER)))
    matrices: list[Matrix] = [up.to(dtype), down.to(dtype)]
    if is_stored:
        matrices, form = [round_to_form(x, form) for x in (up, down)], "plain"
        assert all(isinstance(x, QuantizedMatrix) for x in matrices)
    anywhere = torch.stack([torch.randperm(E)[:K] for _ in range(9)])
    for experts in (anywhere, anywhere[:1], torch.tensor([[0, 1, 2]] * 4), torch.tensor([[4, 6, 5]] * 4)):
        for size in (2, 3):
            check(matrices[0], matrices[1], form, dtype, experts, size)


def test_bytes_and_parameters(tmp_path: Path) -> None:
    """Of the experts a rank has its own, counted by plans too; parameters are those of the model."""
    FAMILIES["qwen3.5-moe"].build(tmp_path, "default")
    options = {
        (size, divides): LoadOptions(
            torch.float32,
            torch.device("meta"),
            want_draft_head=True,
            ranks=Ranks(size - 1, size),
            divides_experts=divides,
        )
        for size, divides in ((1, False), (2, False), (2, True))
    }
    loaded = {key: load_model(tmp_path, of_ranks) for key, of_ranks in options.items()}
    assert len({model.num_parameters for model in loaded.values()}) == 1
    of_expert = 3 * 22 * 36 * 4
    experts = 7 * 5 * of_expert  # in four blocks and the head
    other = loaded[2, False].weight_bytes - experts // 2
    assert loaded[2, True].weight_bytes == other + 4 * 5 * of_expert  # of seven experts
    plans = plan_capacity(EngineConfig(model=str(tmp_path), tp_size=2, ep_size=2, dtype="float32"), 1, (64,))["plans"]
    divided = plan_capacity(EngineConfig(model=str(tmp_path), tp_size=2, dtype="float32"), 1, (64,))["plans"]
    assert plans[0] == divided[0]
    assert plans[1]["weights"] - divided[1]["weights"] == 4 * 5 * of_expert - experts // 2


def test_other_sizes_are_refused() -> None:
    with pytest.raises(
        ValueError, match="--ep-size 2: experts are divided among all ranks or each expert is: choose 1"
    ):
        EngineConfig(tp_size=4, ep_size=2)
    assert EngineConfig(tp_size=4, ep_size=4).ep_size == 4


def test_more_ranks_than_experts_are_refused(tmp_path: Path) -> None:
    FAMILIES["lfm2-moe"].build(tmp_path, "default")
    plans = plan_capacity(EngineConfig(model=str(tmp_path), tp_size=8, ep_size=8), 1, (64,))["plans"]
    assert "--tp-size 8: the model has" in plans[-1]["problem"]
