"""Mixtures of experts in Triton: the reference, whatever the groups; and nothing asks the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from specmamba.kernels import linear, moe, rowwise
from specmamba.kernels.linear.torch_ops import quantize
from specmamba.kernels.moe import reference, torch_ops
from specmamba.kernels.moe.reference import Groups
from tests.pairwise import pairwise

pytestmark = pytest.mark.usefixtures("poisoned")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUNDING = {torch.float32: 2**-20, torch.bfloat16: 2**-7, torch.float16: 2**-11}  # the interpreter truncates to bf16
GROUPS = {  # pairs of each expert
    "one pair": [0, 1, 0],
    "one expert": [5],
    "uneven": [1, 0, 37, 0, 3],
    "one has all": [0, 0, 40, 0],
    "the first has all": [17, 0, 0],
    "the last has all": [0, 0, 0, 16],
    "whole blocks": [16, 32],
    "one each": [1] * 6,
}


@pytest.fixture
def ops(gpu_device: str) -> Any:
    from specmamba.kernels.moe import triton_ops

    return triton_ops


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def random_experts(tokens: int, k: int, num_experts: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(num_experts, generator=generator)[:k] for _ in range(tokens)])


def grouped(counts: list[int], device: str) -> Groups:
    """Ends lie among other numbers, which are none of the product's business."""
    ends = torch.tensor([3, *torch.tensor(counts).cumsum(0).tolist(), 3], dtype=torch.int32)[1:-1]
    return Groups(torch.arange(sum(counts)).to(device), ends.to(device))


def exact(x: Tensor, weight: Tensor, groups: Groups) -> tuple[Tensor, ...]:
    """The products in float64, and with all signs taken away: what rounding errors are measured by."""
    ends = groups.ends.long().cpu()
    of_row = weight.double()[torch.repeat_interleave(torch.arange(len(ends)), ends.diff(prepend=ends.new_zeros(1)))]
    return tuple(torch.einsum("pk,pnk->pn", a, w) for a, w in ((x.double(), of_row), (x.double().abs(), of_row.abs())))


def assert_rounded(y: Tensor, want: Tensor, size: Tensor) -> None:
    """Within one rounding to y's dtype, and the error of a float32 sum."""
    assert y.shape == want.shape
    beyond = (y.double() - want).abs() - want.abs() * ROUNDING[y.dtype] - 2**-24
    assert (beyond / size.clamp(min=2**-20)).max() <= 2**-20


def widened(weight: Tensor, device: str) -> Tensor:
    """The weight that its int8 form stands for; a device rounds where it keeps it, and may break ties its own way."""
    q, scale = quantize(weight.to(device).flatten(0, 1))
    return (q.double() * scale.double()[:, None]).view(weight.shape).cpu()


class TestDispatch:
    @pytest.mark.fast_cases(1)
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("tokens", "k", "num_experts"), [(1, 1, 1), (1, 4, 9), (6, 3, 5), (17, 5, 5), (3, 2, 40)])
    def test_matches_reference(
        self, tokens: int, k: int, num_experts: int, dtype: torch.dtype, ops: Any, gpu_device: str
    ) -> None:
        x, experts = normal(tokens, 13, seed=1, dtype=dtype), random_experts(tokens, k, num_experts, seed=2)
        want, groups = reference.dispatch(x, experts, num_experts)
        rows, got = ops.dispatch(x.to(gpu_device), experts.to(gpu_device), num_experts)
        assert torch.equal(rows.cpu(), want)
        assert torch.equal(got.places.cpu(), groups.places)
        assert torch.equal(got.ends.cpu(), groups.ends)
        assert got.ends.dtype == torch.int32

    def test_more_pairs_and_columns_than_a_block(
        self, ops: Any, gpu_device: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Sorted as a stable sort does: all but a few go to two of the experts, so that ties span blocks."""
        from specmamba.kernels.moe.triton_dispatch import DISPATCH_BLOCKS

        monkeypatch.setitem(DISPATCH_BLOCKS, "BLOCK_P", 16)
        tokens = 20
        experts = torch.tensor([[3, 1], [1, 3], [0, 4]])[torch.arange(tokens) % 7 % 3]
        x = normal(tokens, 3, seed=1)
        want, groups = torch_ops.dispatch(x, experts, 6)
        rows, got = ops.dispatch(x.to(gpu_device), experts.to(gpu_device), 6)
        assert torch.equal(rows.cpu(), want)
        assert torch.equal(got.places.cpu(), groups.places)
        assert torch.equal(got.ends.cpu(), groups.ends)
        x = normal(2, 2 * DISPATCH_BLOCKS["BLOCK_K"] + 5, seed=2)
        rows, _ = ops.dispatch(x.to(gpu_device), torch.tensor([[1], [0]]).to(gpu_device), 2)
        assert torch.equal(rows.cpu(), x.flip(0))

    def test_views_are_read_where_they_are(self, ops: Any, gpu_device: str) -> None:
        x, experts = normal(6, 20, seed=6).to(gpu_device), random_experts(6, 4, 5, seed=7).to(gpu_device)
        want, groups = reference.dispatch(x[:, 3:14].cpu(), experts[:, :2].cpu(), 5)
        for part in (x[:, 3:14], x[:, 3:14].T.contiguous().T):
            assert torch.equal(ops.dispatch(part, experts[:, :2], 5)[0].cpu(), want)
        y, weights = normal(12, 20, seed=8), normal(6, 4, seed=9)
        there = Groups(*(z.to(gpu_device) for z in groups))
        got = ops.combine(y.to(gpu_device)[:, 3:14], there, weights.to(gpu_device)[:, :2]).cpu()
        torch.testing.assert_close(got, reference.combine(y[:, 3:14], groups, weights[:, :2]))

    def test_no_tokens(self, ops: Any, gpu_device: str) -> None:
        empty = torch.zeros(0, 3, dtype=torch.int64, device=gpu_device)
        rows, groups = ops.dispatch(torch.zeros(0, 8, device=gpu_device), empty, 4)
        assert rows.shape == (0, 8)
        assert groups.ends.tolist() == [0, 0, 0, 0]
        assert ops.TritonExperts(torch.ones(4, 5, 8, device=gpu_device))(rows, groups).shape == (0, 5)
        assert ops.combine(rows, groups, torch.zeros(0, 3, device=gpu_device)).shape == (0, 8)


class TestCombine:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("tokens", "k", "width"), [(1, 1, 1), (5, 3, 17), (3, 10, 300), (66, 2, 5)])
    def test_matches_reference(
        self, tokens: int, k: int, width: int, dtype: torch.dtype, ops: Any, gpu_device: str
    ) -> None:
        y, weights = normal(tokens * k, width, seed=3, dtype=dtype), normal(tokens, k, seed=4)
        places = torch.randperm(tokens * k, generator=torch.Generator().manual_seed(5))
        groups = Groups(places.to(gpu_device), torch.tensor([tokens * k], dtype=torch.int32).to(gpu_device))
        got = ops.combine(y.to(gpu_device), groups, weights.to(gpu_device)).cpu()
        assert got.dtype == dtype
        by_token = y.double()[places].view(tokens, k, width) * weights.double()[..., None]
        assert_rounded(got, by_token.sum(1), by_token.abs().sum(1))

    def test_what_is_no_number_stays_in_its_token(self, ops: Any, gpu_device: str) -> None:
        y, weights, experts = normal(12, 9, seed=1), normal(4, 3, seed=2), random_experts(4, 3, 5, seed=3)
        _, groups = reference.dispatch(normal(4, 1, seed=1), experts, 5)
        there = Groups(*(z.to(gpu_device) for z in groups))
        clean = ops.combine(y.to(gpu_device), there, weights.to(gpu_device))
        y[groups.places[3 * 2]] = float("nan")  # of token 2's first expert
        got = ops.combine(y.to(gpu_device), there, weights.to(gpu_device))
        assert got[2].isnan().all()
        assert torch.equal(got[[0, 1, 3]], clean[[0, 1, 3]])


class TestProducts:
    @pytest.mark.fast_cases(1)
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("counts", GROUPS.values(), ids=GROUPS.keys())
    def test_any_groups(self, counts: list[int], dtype: torch.dtype, ops: Any, gpu_device: str) -> None:
        weight, groups = normal(len(counts), 35, 21, seed=1, dtype=dtype), grouped(counts, gpu_device)
        x = normal(sum(counts), 21, seed=2, dtype=dtype)
        for form, stands_for in ((ops.TritonExperts, weight), (ops.TritonInt8Experts, widened(weight, gpu_device))):
            y = form(weight.to(gpu_device))(x.to(gpu_device), groups).cpu()
            assert y.dtype == dtype
            assert_rounded(y, *exact(x, stands_for, groups))

    @pytest.mark.fast_cases(1)
    @pairwise(
        pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16]),
        pytest.mark.parametrize(("n", "k"), [(1, 1), (130, 7), (3, 300), (64, 128)]),
        pytest.mark.parametrize("is_tall", [False, True]),
    )
    def test_any_size(self, is_tall: bool, n: int, k: int, dtype: torch.dtype, ops: Any, gpu_device: str) -> None:
        """Beyond a block of outputs and of inputs, odd and whole, in both heights of a tile."""
        counts = [50, 0, 30] if is_tall else [3, 0, 5]
        heights = {ops.product_tile(dtype, sum(c), 3).rows for c in ([50, 0, 30], [3, 0, 5])}
        assert len(heights) == 2
        weight, groups = normal(3, n, k, seed=3, dtype=dtype), grouped(counts, gpu_device)
        x = normal(sum(counts), k, seed=4, dtype=dtype)
        for form, stands_for in ((ops.TritonExperts, weight), (ops.TritonInt8Experts, widened(weight, gpu_device))):
            y = form(weight.to(gpu_device))(x.to(gpu_device), groups).cpu()
            assert_rounded(y, *exact(x, stands_for, groups))

    def test_the_reference(self, ops: Any, gpu_device: str) -> None:
        weight, groups = normal(3, 5, 7, seed=5), grouped([2, 0, 3], gpu_device)
        x = normal(5, 7, seed=6)
        y = ops.TritonExperts(weight.to(gpu_device))(x.to(gpu_device), groups).cpu()
        torch.testing.assert_close(y, reference.multiply(x, weight, Groups(*(z.cpu() for z in groups))))

    @pytest.mark.parametrize("rows", [16, 32, 64])
    def test_there_are_enough_blocks(self, rows: int, ops: Any) -> None:
        generator = torch.Generator().manual_seed(1)
        for _ in range(300):
            num_experts, num_pairs = (int(torch.randint(1, 200, (), generator=generator)) for _ in range(2))
            some = int(torch.randint(1, num_experts + 1, (), generator=generator))
            chosen = torch.randint(0, some, (num_pairs,), generator=generator)
            needed = int((torch.bincount(chosen) + rows - 1).div(rows, rounding_mode="floor").sum())
            assert needed <= ops.num_row_blocks(num_pairs, num_experts, rows) <= num_experts + num_pairs // rows

    @pytest.mark.parametrize("form", ["TritonExperts", "TritonInt8Experts"])
    def test_experts_without_tokens_are_not_read(self, form: str, ops: Any, gpu_device: str) -> None:
        weight, groups = normal(4, 20, 18, seed=7), grouped([0, 3, 0, 2], gpu_device)
        weight[[0, 2]] = float("nan")
        assert getattr(ops, form)(weight.to(gpu_device))(normal(5, 18, seed=8).to(gpu_device), groups).isfinite().all()

    @pytest.mark.parametrize("form", ["TritonExperts", "TritonInt8Experts"])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_what_is_no_number_stays_in_its_row(self, dtype: torch.dtype, form: str, ops: Any, gpu_device: str) -> None:
        weight, groups = normal(3, 40, 24, seed=9, dtype=dtype), grouped([4, 0, 6], gpu_device)
        x, product = normal(10, 24, seed=10, dtype=dtype).to(gpu_device), getattr(ops, form)(weight.to(gpu_device))
        clean = product(x, groups)
        x[4, 7] = float("nan")
        y = product(x, groups)
        assert y[4].isnan().all()
        others = [i for i in range(10) if i != 4]
        assert torch.equal(y[others], clean[others])

    @pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter's, for 0 times infinity
    def test_a_weight_that_is_no_number_stays_in_its_output(self, ops: Any, gpu_device: str) -> None:
        weight, groups = normal(3, 20, 18, seed=11), grouped([2, 1, 3], gpu_device)
        weight[1, 7, 3] = float("inf")
        y = ops.TritonInt8Experts(weight.to(gpu_device))(normal(6, 18, seed=12).to(gpu_device), groups).cpu()
        is_spoilt = torch.zeros(6, 20, dtype=torch.bool)
        is_spoilt[2, 7] = True
        assert torch.equal(y.isnan(), is_spoilt)

    def test_sums_of_float16_do_not_overflow(self, ops: Any, gpu_device: str) -> None:
        weight, groups = torch.full((1, 3, 64), 0.01).half(), grouped([1], gpu_device)  # sum of x q: 812,800
        y = ops.TritonInt8Experts(weight.to(gpu_device))(torch.full((1, 64), 100.0).half().to(gpu_device), groups)
        torch.testing.assert_close(y.cpu(), torch.full((1, 3), 64.0).half(), rtol=2**-8, atol=0)

    @pytest.mark.parametrize("form", ["TritonExperts", "TritonInt8Experts"])
    def test_strided_inputs(self, form: str, ops: Any, gpu_device: str) -> None:
        weight, groups, x = normal(2, 20, 18, seed=13), grouped([2, 3], gpu_device), normal(5, 18, seed=14)
        product = getattr(ops, form)(weight.to(gpu_device))
        want = product(x.to(gpu_device), groups)
        for layout in (torch.cat([x, x], 1).to(gpu_device)[:, :18], x.to(gpu_device).T.contiguous().T):
            assert torch.equal(product(layout, groups), want)
        turned = getattr(ops, form)(weight.transpose(1, 2).contiguous().to(gpu_device).transpose(1, 2))
        assert torch.equal(turned(x.to(gpu_device), groups), want)

    def test_inputs_that_do_not_fit_are_refused(self, ops: Any, gpu_device: str) -> None:
        weight, groups = normal(2, 20, 18, seed=13).to(gpu_device), grouped([2, 3], gpu_device)
        x = normal(5, 18, seed=14).to(gpu_device)
        for product in (ops.TritonExperts(weight), ops.TritonInt8Experts(weight)):
            for bad in (x.half(), x[:, :-1], x[:-1]):
                with pytest.raises(ValueError, match=r"experts \[2, 20, 18\] torch.float32 cannot multiply"):
                    product(bad, groups)
            for ends in (groups.ends[:1], groups.ends.long(), groups.ends.to("meta")):
                with pytest.raises(ValueError, match="cannot multiply"):
                    product(x, groups._replace(ends=ends))


class TestWhoTakesWhat:
    @pytest.fixture(autouse=True)
    def _launchable(self, launchable: None) -> None:
        pass

    @pytest.mark.parametrize("form", ["plain", "int8"])
    def test_a_whole_layer(self, form: linear.WeightForm, ops: Any, gpu_device: str) -> None:
        x, experts, weights = normal(7, 18, seed=1), random_experts(7, 2, 4, seed=2), normal(7, 2, seed=3)
        weight = normal(4, 20, 18, seed=4)
        product = moe.pack(weight.to(gpu_device), form)
        assert isinstance(product, ops.TritonInt8Experts if form == "int8" else ops.TritonExperts)
        assert product.nbytes == (4 * 20 * (18 + 4) if form == "int8" else weight.nbytes)
        rows, groups = moe.dispatch(x.to(gpu_device), experts.to(gpu_device), 4)
        got = moe.combine(product(rows, groups), groups, weights.to(gpu_device)).cpu()
        of_pair = (widened(weight, gpu_device) if form == "int8" else weight.double())[experts]  # [T, k, N, K]
        want = torch.einsum("tk,tkno,to->tn", weights.double(), of_pair, x.double())
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)

    def test_what_triton_leaves_to_pytorch(self, gpu_device: str) -> None:
        assert isinstance(moe.pack(torch.ones(2, 3, 4, dtype=torch.float64, device=gpu_device)), torch_ops.PlainExperts)
        assert isinstance(moe.pack(torch.ones(2, 0, 4, device=gpu_device)), torch_ops.PlainExperts)
        x, y = torch.ones(1, 1, dtype=torch.float64), torch.ones(1, 1)
        groups = Groups(torch.zeros(1).long(), torch.ones(1).int())
        assert not moe.can_dispatch(x, groups.places)
        assert moe.can_dispatch(y, groups.places)
        assert moe.can_dispatch(y, groups.places.expand(moe.MAX_PAIRS))
        assert not moe.can_dispatch(y, groups.places.expand(moe.MAX_PAIRS + 1))
        assert not moe.can_combine(x, groups, y)

    def test_the_grouped_product_is_for_many_rows(self, ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        weight = torch.ones(2, 8, 8).bfloat16()
        assert not ops.takes_grouped_mm(weight, 1000)  # on a CPU
        monkeypatch.setattr(torch_ops, "can_group", lambda weight: True)
        for capability, is_there in (((9, 0), True), ((10, 0), True), ((8, 6), False), ((12, 0), False)):
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, known=capability: known)
            assert ops.takes_grouped_mm(weight, 2 * ops.MANY_ROWS) == is_there
            assert not ops.takes_grouped_mm(weight, 2 * ops.MANY_ROWS - 1)

    def test_the_grouped_product_agrees(self, ops: Any, gpu_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
        weight, groups = normal(3, 16, 24, seed=1, dtype=torch.bfloat16), grouped([3, 0, 4], gpu_device)
        x, product = normal(7, 24, seed=2, dtype=torch.bfloat16), ops.TritonExperts(weight.to(gpu_device))
        monkeypatch.setattr(ops, "takes_grouped_mm", lambda weight, num_pairs: True)
        monkeypatch.setattr(ops, "multiply", None)
        assert_rounded(product(x.to(gpu_device), groups).cpu(), *exact(x, weight, groups))


class TestRouting:
    @pytest.mark.parametrize(("num_experts", "k"), [(1, 1), (5, 5), (37, 3), (128, 8), (600, 10)])
    def test_softmax(self, ops: Any, gpu_device: str, num_experts: int, k: int) -> None:
        """Rows of a wider tensor; few different scores, so that equal ones are met, the lower expert first."""
        scores = (normal(9, num_experts + 3, seed=num_experts) * 2).round().div(2)[:, :num_experts]
        for renormalise in (True, False):
            got = ops.softmax_routing(scores.to(gpu_device), k, renormalise)
            want = reference.softmax_routing(scores, k, renormalise)
            assert torch.equal(got.experts.cpu(), want.experts)
            torch.testing.assert_close(got.weights.cpu(), want.weights, rtol=1e-6, atol=1e-7)
        assert torch.equal(ops.topk_softmax_routing(scores.to(gpu_device), k).experts.cpu(), want.experts)
        assert ops.softmax_routing(scores[:0].to(gpu_device), k, True).weights.shape == (0, k)

    @pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter's, for inf - inf
    @pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
    def test_what_is_no_number(self, ops: Any, gpu_device: str, value: float) -> None:
        """Experts are k different ones all the same; weights that are no numbers say so."""
        scores = normal(3, 12, seed=5)
        scores[0], scores[1, 4] = value, value
        for renormalise in (True, False):
            got = ops.softmax_routing(scores.to(gpu_device), 3, renormalise)
            experts, weights = got.experts.cpu(), got.weights.cpu()
            assert bool(((experts >= 0) & (experts < 12)).all())
            assert all(len(set(row)) == 3 for row in experts.tolist())
            assert bool(weights[0].isnan().all())
            assert bool(weights[1].isnan().all()) == (value != -torch.inf)
            assert torch.equal(experts[2], reference.softmax_routing(scores[2:], 3, renormalise).experts[0])

    def test_a_router_in_16_bits(self) -> None:
        """On a GPU alone, and only for inputs that are in 16 bits too."""
        half, cuda = torch.bfloat16, torch.device("cuda")
        assert moe.router_dtype(cuda, half, half) is half
        assert moe.router_dtype(cuda, half, torch.float32) is torch.float32
        assert moe.router_dtype(cuda, torch.float32, half) is torch.float32
        with FakeTensorMode():
            weight, x = torch.empty(6, 16, dtype=half, device="cuda"), torch.empty(5, 16, dtype=half, device="cuda")
            router = moe.pack_router(weight)
            assert isinstance(router, torch_ops.HalfRouter)
            assert (router(x).shape, router(x).dtype) == ((5, 6), torch.float32)

    @pytest.mark.gpu
    def test_a_router_in_16_bits_agrees(self) -> None:
        weight, x = normal(6, 64, seed=1, dtype=torch.bfloat16), normal(5, 64, seed=2, dtype=torch.bfloat16)
        got = moe.pack_router(weight.cuda())(x.cuda()).cpu()
        torch.testing.assert_close(got, reference.scores(x, weight), rtol=1e-5, atol=1e-5)


class TestNothingAsksTheDevice:
    """What a CUDA graph could not capture, a fake tensor cannot answer either."""

    @pytest.mark.parametrize(
        "run",
        [
            lambda x: torch_ops.softmax_routing(x, 3, True),
            lambda x: torch_ops.topk_softmax_routing(x, 3),
            lambda x: torch_ops.sigmoid_routing(x, x[0], 3, 1, 1, True, 1.0),
            lambda x: torch_ops.sigmoid_routing(x, x[0], 3, 4, 2, False, 1.0),
            lambda x: torch_ops.PlainRouter(x)(x),
            lambda x: torch_ops.dispatch(x, torch_ops.topk_softmax_routing(x, 3).experts, 12)[1].ends,
            lambda x: torch_ops.combine(x, Groups(x[:, 0].long(), x[0].int()), x[:, :1]),
        ],
        ids=["softmax", "topk", "sigmoid", "sigmoid of groups", "router", "dispatch", "combine"],
    )
    def test_pytorchs_part(self, run: Callable[[Tensor], object], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rowwise, "sigmoid", torch.sigmoid)  # native code would read what a fake tensor has not
        with FakeTensorMode():
            run(torch.ones(20, 12))

    def test_others_do(self) -> None:
        """That the test above can fail."""
        with FakeTensorMode(), pytest.raises(DataDependentOutputException):
            torch_ops.PlainExperts(torch.ones(2, 3, 4))(
                torch.ones(2, 4), Groups(torch.ones(2).long(), torch.ones(2).int())
            )

    @pytest.mark.gpu
    @pytest.mark.parametrize("form", ["plain", "int8"])
    def test_a_layer_is_captured(self, form: linear.WeightForm, ops: Any) -> None:
        product = moe.pack(normal(8, 32, 32, seed=1, dtype=torch.bfloat16).cuda(), form)
        router, x = moe.pack_router(normal(8, 32, seed=3).cuda()), normal(5, 32, seed=2, dtype=torch.bfloat16).cuda()

        def run() -> Tensor:
            routing = moe.softmax_routing(router(x), 2, True)
            rows, groups = moe.dispatch(x, routing.experts, 8)
            return moe.combine(product(rows, groups), groups, routing.weights)

        torch.use_deterministic_algorithms(False)  # with it cuBLAS asks for a setting
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = run()
        x.copy_(normal(5, 32, seed=4))
        graph.replay()
        assert torch.equal(got, run())
