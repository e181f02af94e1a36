"""Drawn children, and choices behind them, in Triton: as the reference and PyTorch's form have them."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from specmamba.kernels import sampling
from specmamba.kernels.dispatch import operator_of
from specmamba.kernels.sampling import reference, torch_ops
from tests.kernels.test_rejection import NEARLY_ONE, random_probs, sibling_tokens, uniforms
from tests.kernels.trees import batch_of_parents

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture
def triton_ops(gpu_device: str) -> ModuleType:
    from specmamba.kernels.sampling import triton_ops

    return triton_ops


class Choices:
    """A batch of trees with tokens that were drawn from q, with the random numbers of one verify."""

    def __init__(
        self, kind: str, nodes: int, vocabulary: int, sharpness: float, shapes: tuple[str, ...] = ("bushy", "padded")
    ) -> None:
        self.parents = batch_of_parents(shapes, nodes, seed=nodes)
        sizes = len(shapes), nodes, vocabulary
        q = random_probs(*sizes, seed=2, sharpness=sharpness)
        self.probs = (random_probs(*sizes, seed=1, sharpness=sharpness) + q) / 2
        if kind == "both":
            q[..., 4:] = 0  # q runs out of tokens before the children do
        self.tokens = sibling_tokens(self.parents, q, seed=3)
        is_leaf = ~(self.parents[:, None] == torch.arange(nodes)[:, None]).any(-1)
        self.drafts = None if kind == "chosen" else q.masked_fill(is_leaf[..., None], torch.nan)  # never read
        self.uniforms = uniforms(2, len(shapes), nodes, seed=4)

    def run(self, ops: ModuleType, max_children: int, device: str = "cpu") -> Tensor:
        drafts = None if self.drafts is None else self.drafts.to(device)
        there = (x.to(device) for x in (self.probs, self.tokens, self.parents))
        choice: Tensor = ops.residual_choice(*there, drafts, max_children, *self.uniforms.to(device))
        assert choice.dtype is torch.int64
        return choice.cpu()


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("kind", "nodes", "vocabulary", "sharpness"),
    [
        ("both", 9, 600, 6.0),
        ("drawn", 7, 1300, 1.0),
        ("chosen", 7, 30, 1.0),
        ("drawn", 1, 7, 1.0),
        ("drawn", 2, 33_000, 2.0),
    ],
)
def test_choices(
    triton_ops: ModuleType, gpu_device: str, kind: str, nodes: int, vocabulary: int, sharpness: float
) -> None:
    """Those of PyTorch's form, for all children and for two; small vocabularies have the reference's too."""
    case = Choices(kind, nodes, vocabulary, sharpness)
    for most in (nodes + 2, 2):
        choice = case.run(triton_ops, most, gpu_device)
        assert torch.equal(choice, case.run(torch_ops, most))
        if vocabulary < 1000:
            assert torch.equal(choice, case.run(reference, most))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("vocabulary", "draws"), [(1300, 6), (1, 1), (5, 5), (512, 3), (33_000, 4)])
def test_draws(triton_ops: ModuleType, gpu_device: str, vocabulary: int, draws: int) -> None:
    """Of rows that are no neighbours in memory, and need not be normalised."""
    probs = 3 * random_probs(2, 2, vocabulary + 8, seed=vocabulary)[..., :vocabulary]
    u = uniforms(2, 2, draws, seed=draws)
    tokens, is_drawn = (x.cpu() for x in triton_ops.draw_children(probs.to(gpu_device), u.to(gpu_device)))
    want, wanted = torch_ops.draw_children(probs, u)
    assert (tokens.dtype, is_drawn.dtype) == (torch.int64, torch.bool)
    assert torch.equal(is_drawn, wanted)
    assert torch.equal(tokens[is_drawn], want[is_drawn])


@pytest.mark.parametrize("uniform", [0.0, NEARLY_ONE])
def test_draws_stop_when_no_mass_is_left(triton_ops: ModuleType, gpu_device: str, uniform: float) -> None:
    probs = torch.zeros(1, 4, 700)
    probs[0, 0, -2] = 1.0
    probs[0, 1, [0, 3]] = torch.tensor([1.0, 1e-30])  # little, but mass
    probs[0, 3, [0, 3]] = torch.tensor([1.0, 1e-40])  # too little to divide by
    u = torch.full((1, 4, 3), uniform, device=gpu_device)
    tokens, is_drawn = (x.cpu() for x in triton_ops.draw_children(probs.to(gpu_device), u))
    assert is_drawn.tolist() == [[[True, False, False], [True, True, False], [False] * 3, [True, False, False]]]
    assert tokens[0, 0, 0] == 698
    assert sorted(tokens[0, 1, :2].tolist()) == [0, 3]
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < 700


@pytest.mark.parametrize("has_drafts", [False, True])
def test_a_greedy_row_is_exact(triton_ops: ModuleType, gpu_device: str, has_drafts: bool) -> None:
    """Whatever q is and whatever the random numbers are, all mass is on one token: it comes out."""
    for best in (0, 599):
        case = Choices("drawn" if has_drafts else "chosen", 4, 600, 1.0, ("bushy",))
        case.probs = torch.zeros_like(case.probs)
        case.probs[..., best] = 1.0
        for u in (0.0, 0.5, NEARLY_ONE):
            case.uniforms.fill_(u)
            assert (case.run(triton_ops, 7, gpu_device) == best).all()


@pytest.mark.parametrize("tokens", [[1, 2], [1, 0], [2, 0], [0, 1]], ids=str)
def test_a_residual_that_rounding_emptied(triton_ops: ModuleType, gpu_device: str, tokens: list[int]) -> None:
    """q rounds to one on the target's only token and yet drew another: p without the children, or else p."""
    p, q = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([1.0, 1e-30, 1e-31])
    parents, probs, draft_probs = torch.tensor([[-1, 0, 0]]), p.expand(1, 3, 3), q.expand(1, 3, 3)
    for uniform in (0.0, 0.5, NEARLY_ONE):
        given = (probs, torch.tensor([[0, *tokens]]), parents, draft_probs)
        u = torch.full((2, 1, 3), uniform)
        choice = triton_ops.residual_choice(*(x.to(gpu_device) for x in given), 2, *u.to(gpu_device))
        assert choice[0, 0] == 0


def test_chosen_children_that_have_all_of_the_mass(triton_ops: ModuleType, gpu_device: str) -> None:
    """A random number that rounds up refuses them: without them nothing is left, so the row itself is drawn from."""
    parents, tokens, probs = torch.tensor([[-1, 0]]), torch.tensor([[0, 1]]), torch.tensor([[[0.0, 1.0]] * 2])
    given = (probs, tokens, parents, None, 1, torch.ones(1, 2), torch.full((1, 2), 0.5))
    got = triton_ops.residual_choice(*(x.to(gpu_device) if isinstance(x, torch.Tensor) else x for x in given))
    assert got[0, 0] == 1 == torch_ops.residual_choice(*given)[0, 0]


def test_nothing_to_draw(triton_ops: ModuleType, gpu_device: str) -> None:
    tokens, is_drawn = triton_ops.draw_children(torch.zeros(2, 0, 9, device=gpu_device), torch.zeros(2, 0, 3))
    assert tokens.shape == is_drawn.shape == (2, 0, 3)


@pytest.mark.usefixtures("launchable")
def test_triton_is_chosen_where_it_runs(triton_ops: ModuleType, gpu_device: str) -> None:
    case = Choices("drawn", 3, 9, 1.0)
    probs = case.probs.to(gpu_device)
    draw, choose = operator_of(sampling.draw_children), operator_of(sampling.residual_choice)
    rest = case.tokens, case.parents, probs, 2, *case.uniforms
    assert draw.choose(probs, torch.zeros(2, 3, 4, device=gpu_device)) == "triton"
    assert draw.choose(probs, torch.zeros(2, 3, 17, device=gpu_device)) != "triton"
    assert choose.choose(probs, *rest) == "triton"
