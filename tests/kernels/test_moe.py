from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specmamba.kernels import moe
from specmamba.kernels.linear import reference as linear_reference
from specmamba.kernels.linear import torch_ops as linear_torch
from specmamba.kernels.moe import native_ops, reference, torch_ops
from specmamba.kernels.moe.reference import Groups, Routing

SHAPES = [(1, 1, 1), (3, 5, 3), (4, 32, 2), (5, 33, 7), (2, 64, 32), (7, 100, 65)]  # E, N, K
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def native(needs_native: None) -> None:
    assert native_ops.code() is not None


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest, set_threads: Callable[[int], None]) -> int:
    set_threads(request.param)
    return int(request.param)


class OnGPU:
    """``torch_ops`` there, for operands from here."""

    @staticmethod
    def dispatch(x: Tensor, experts: Tensor, num_experts: int) -> tuple[Tensor, Groups]:
        rows, groups = torch_ops.dispatch(x.cuda(), experts.cuda(), num_experts)
        assert rows.is_cuda
        return rows.cpu(), Groups(*(y.cpu() for y in groups))

    @staticmethod
    def combine(y: Tensor, groups: Groups, weights: Tensor) -> Tensor:
        return torch_ops.combine(y.cuda(), Groups(*(x.cuda() for x in groups)), weights.cuda()).cpu()


@pytest.fixture(params=["torch", "native", pytest.param("torch on a GPU", marks=pytest.mark.gpu)])
def dispatch_ops(request: pytest.FixtureRequest) -> object:
    if request.param == "native":
        request.getfixturevalue("needs_native")
        return native_ops
    return torch_ops if request.param == "torch" else OnGPU


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def random_experts(tokens: int, k: int, num_experts: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(num_experts, generator=generator)[:k] for _ in range(tokens)])


def code() -> Any:
    loaded = native_ops.code()
    assert loaded is not None
    return loaded


def expert_rows(groups: Groups) -> Tensor:
    """The expert of each sorted pair, [P]."""
    ends = groups.ends.long()
    return torch.repeat_interleave(torch.arange(len(ends)), ends.diff(prepend=ends.new_zeros(1)))


def assert_rounded(y: Tensor, x: Tensor, weight: Tensor, groups: Groups) -> None:
    """Within one rounding to the dtype, and the error of a float32 sum, of the exact products."""
    of_row = weight.double()[expert_rows(groups)]
    want = torch.einsum("pk,pnk->pn", x.double(), of_row)
    size = torch.einsum("pk,pnk->pn", x.double().abs(), of_row.abs())
    assert y.dtype == x.dtype
    assert y.shape == want.shape
    rounding = 2**-8 if y.dtype == torch.bfloat16 else 2**-20
    assert ((y.double() - want).abs() <= want.abs() * rounding + size * 2**-20).all()


class TestDispatch:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("tokens", "k", "num_experts"), [(1, 1, 1), (1, 4, 9), (6, 3, 5), (17, 5, 5), (3, 2, 40)])
    def test_matches_reference(
        self, tokens: int, k: int, num_experts: int, dtype: torch.dtype, dispatch_ops: Any, threads: int
    ) -> None:
        x, experts = normal(tokens, 13, seed=1, dtype=dtype), random_experts(tokens, k, num_experts, seed=2)
        expected, groups = reference.dispatch(x, experts, num_experts)
        got, got_groups = dispatch_ops.dispatch(x, experts, num_experts)
        assert torch.equal(got, expected)
        assert torch.equal(got_groups.places, groups.places)
        assert torch.equal(got_groups.ends, groups.ends)
        assert got_groups.ends.dtype == torch.int32

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("tokens", "k", "width"), [(1, 1, 1), (5, 3, 17), (9, 10, 40)])
    def test_combine(
        self, tokens: int, k: int, width: int, dtype: torch.dtype, dispatch_ops: Any, threads: int
    ) -> None:
        y, weights = normal(tokens * k, width, seed=3, dtype=dtype), normal(tokens, k, seed=4)
        _, groups = reference.dispatch(normal(tokens, 1, seed=1), random_experts(tokens, k, 12, seed=5), 12)
        got = dispatch_ops.combine(y, groups, weights)
        assert got.dtype == dtype
        tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]
        torch.testing.assert_close(got, reference.combine(y, groups, weights), rtol=tolerance, atol=1e-5)

    def test_views_are_read_where_they_are(self, dispatch_ops: Any) -> None:
        x, experts = normal(6, 20, seed=6), random_experts(6, 4, 5, seed=7)
        want, groups = reference.dispatch(x[:, 3:14], experts[:, :2], 5)
        got, _ = dispatch_ops.dispatch(x[:, 3:14], experts[:, :2], 5)
        assert torch.equal(got, want)
        y, weights = normal(12, 20, seed=8), normal(6, 4, seed=9)
        got = dispatch_ops.combine(y[:, 3:14], groups, weights[:, :2])
        torch.testing.assert_close(got, reference.combine(y[:, 3:14], groups, weights[:, :2]))

    def test_no_tokens(self, dispatch_ops: Any) -> None:
        empty = torch.zeros(0, 3, dtype=torch.int64)
        rows, groups = dispatch_ops.dispatch(normal(0, 8, seed=1), empty, 4)
        assert rows.shape == (0, 8)
        assert groups.ends.tolist() == [0, 0, 0, 0]
        assert dispatch_ops.combine(rows, groups, torch.zeros(0, 3)).shape == (0, 8)

    @pytest.mark.parametrize("expert", [-1, 4])
    def test_an_expert_that_there_is_not(self, expert: int, native: None) -> None:
        with pytest.raises(ValueError, match="none of 0 to 3"):
            native_ops.dispatch(normal(1, 8, seed=1), torch.tensor([[0, expert]]), 4)

    def test_what_does_not_fit_is_refused(self, native: None) -> None:
        x, experts = normal(2, 8, seed=1), random_experts(2, 3, 4, seed=2)
        for bad in (experts[:1], experts.int(), experts[0]):
            with pytest.raises(ValueError, match="do not fit experts"):
                native_ops.dispatch(x, bad, 4)
        rows, groups = native_ops.dispatch(x, experts, 4)
        for y, weights in ((rows[:5], normal(2, 3, seed=1)), (rows, normal(2, 3, seed=1).double())):
            with pytest.raises(ValueError, match="are not those of weights"):
                native_ops.combine(y, groups, weights)
        for y, weights in ((rows.double(), normal(2, 3, seed=1)), (rows, normal(6, seed=1))):
            with pytest.raises(ValueError, match="are not those of weights"):
                native_ops.combine(y, groups, weights)
        for elsewhere in (x.to("meta"), experts.to("meta")):
            with pytest.raises(ValueError, match="do not fit experts"):
                native_ops.dispatch(*((elsewhere, experts) if elsewhere.is_floating_point() else (x, elsewhere)), 4)

    def test_places_that_there_are_not(self, native: None) -> None:
        """Native code would read the memory of others."""
        rows, groups = native_ops.dispatch(normal(2, 8, seed=1), random_experts(2, 3, 4, seed=2), 4)
        weights = normal(2, 3, seed=1)
        for places in (groups.places.int(), groups.places.view(2, 3).repeat(3, 1), groups.places.to("meta")):
            with pytest.raises(ValueError, match="places need a list of int64 on the CPU"):
                native_ops.combine(rows, groups._replace(places=places), weights)
        for place in (-1, 6, 1 << 40):
            places = groups.places.clone()
            places[4] = place
            with pytest.raises(ValueError, match="at places that there are not"):
                native_ops.combine(rows, groups._replace(places=places), weights)


class TestProducts:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", SHAPES[:4])
    def test_reference_is_the_product(self, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        weight, (x, groups) = normal(*shape, seed=1, dtype=dtype), self.pairs(shape, 4, dtype)
        assert_rounded(reference.multiply(x, weight, groups), x, weight, groups)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_torch(self, shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
        weight, (x, groups) = normal(*shape, seed=1, dtype=dtype), self.pairs(shape, 6, dtype)
        there = Groups(*(y.to(device) for y in groups))
        assert_rounded(torch_ops.PlainExperts(weight.to(device))(x.to(device), there).cpu(), x, weight, groups)

    @pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
    @pytest.mark.parametrize("shape", [(1, 8, 8), (5, 40, 24), (7, 64, 136)])
    def test_pytorchs_grouped_product(self, shape: tuple[int, int, int], device: str) -> None:
        """A CPU computes it too; ``pack`` only takes it on a GPU."""
        weight, (x, groups) = normal(*shape, seed=1).bfloat16(), self.pairs(shape, 6, torch.bfloat16)
        on_device = Groups(groups.places.to(device), groups.ends.to(device))
        y = torch_ops.GroupedExperts(weight.to(device))(x.to(device), on_device)
        assert_rounded(y.cpu(), x, weight, groups)
        if device == "cuda":
            assert torch_ops.can_group(weight.to(device))

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_native(self, shape: tuple[int, int, int], dtype: torch.dtype, native: None, threads: int) -> None:
        weight, (x, groups) = normal(*shape, seed=1, dtype=dtype), self.pairs(shape, 6, dtype)
        assert_rounded(native_ops.NativeExperts(weight, code())(x, groups), x, weight, groups)

    @pytest.mark.parametrize("k", range(1, 8))
    def test_every_number_of_experts(self, k: int, native: None, threads: int) -> None:
        weight = normal(7, 70, 48, seed=2).bfloat16()
        x, experts = normal(19, 48, seed=3).bfloat16(), random_experts(19, k, 7, seed=4)
        rows, groups = moe.dispatch(x, experts, 7)
        assert_rounded(moe.pack(weight)(rows, groups), rows, weight, groups)

    @pytest.mark.parametrize("experts", [[[3]] * 30, [[0]], [[6], [0], [6]]], ids=["one has all", "one token", "ends"])
    def test_experts_without_tokens(self, experts: list[list[int]], native: None, threads: int) -> None:
        """Nothing is read of them: their weights are no numbers."""
        chosen = torch.tensor(experts)
        weight, x = normal(7, 90, 34, seed=5).bfloat16(), normal(len(experts), 34, seed=6).bfloat16()
        unused = [expert for expert in range(7) if expert not in chosen]
        rows, groups = moe.dispatch(x, chosen, 7)
        clean = moe.pack(weight)(rows, groups)
        weight[unused] = float("nan")
        for product in (moe.pack(weight), torch_ops.PlainExperts(weight)):
            y = product(rows, groups)
            assert y.isfinite().all()
            torch.testing.assert_close(y, clean, rtol=2**-7, atol=1e-3)

    @pytest.mark.parametrize("form", ["plain", "int8"])
    def test_no_row_knows_of_the_others(self, form: str, native: None, threads: int) -> None:
        """1 to 40 tokens: groups of every height and split; and in whatever order they come."""
        weight = normal(5, 330, 130, seed=7).bfloat16()
        x, experts = normal(40, 130, seed=8).bfloat16(), random_experts(40, 3, 5, seed=9)
        weights = normal(40, 3, seed=10)
        product = moe.pack(weight, form)

        def run(chosen: Tensor) -> Tensor:
            rows, groups = moe.dispatch(x[chosen], experts[chosen], 5)
            return moe.combine(product(rows, groups), groups, weights[chosen])

        alone = torch.cat([run(torch.tensor([t])) for t in range(40)])
        for tokens in range(1, 41):
            assert torch.equal(run(torch.arange(tokens)), alone[:tokens])
        assert torch.equal(run(torch.arange(39, -1, -1)), alone.flip(0))

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_native_int8_is_linears(
        self, shape: tuple[int, int, int], dtype: torch.dtype, native: None, threads: int
    ) -> None:
        """Bit for bit what a linear layer with the same matrix gives."""
        weight, (x, groups) = normal(*shape, seed=11, dtype=dtype), self.pairs(shape, 6, dtype)
        y = moe.pack(weight, "int8")(x, groups)
        for expert, rows in torch_ops.active(groups):
            q, scale = linear_torch.quantize(weight[expert])
            assert torch.equal(y[rows], linear_reference.linear_int8(x[rows], q, scale))

    @pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
    def test_torch_int8(self, dtype: torch.dtype) -> None:
        weight, (x, groups) = normal(4, 33, 20, seed=12, dtype=dtype), self.pairs((4, 33, 20), 6, dtype)
        y = torch_ops.Int8Experts(weight)(x, groups)
        q, scale = linear_torch.quantize(weight.flatten(0, 1))
        rounded = (q * scale[:, None]).view(4, 33, 20)
        want = torch.einsum("pk,pnk->pn", x.double(), rounded.double()[expert_rows(groups)])
        torch.testing.assert_close(y.double(), want, rtol=2**-6, atol=0.1 if dtype == torch.bfloat16 else 1e-2)

    def test_the_plain_weight_is_not_kept(self, native: None) -> None:
        weight, (x, groups) = normal(3, 40, 24, seed=13).bfloat16(), self.pairs((3, 40, 24), 5, torch.bfloat16)
        kept, product = weight.clone(), moe.pack(weight)
        weight.fill_(float("nan"))
        assert_rounded(product(x, groups), x, kept, groups)

    def test_what_is_no_number_stays_in_its_row(self, native: None) -> None:
        weight, (x, groups) = normal(3, 40, 24, seed=14).bfloat16(), self.pairs((3, 40, 24), 5, torch.bfloat16)
        product = moe.pack(weight)
        clean = product(x, groups)
        x[4, 7] = float("nan")
        y = product(x, groups)
        assert y[4].isnan().all()
        others = [i for i in range(len(x)) if i != 4]
        assert torch.equal(y[others], clean[others])

    def test_inputs_that_do_not_fit_are_refused(self, native: None) -> None:
        x, groups = self.pairs((3, 40, 24), 5, torch.bfloat16)
        for form in ("plain", "int8"):
            product = moe.pack(normal(3, 40, 24, seed=15).bfloat16(), form)
            for bad in (x.float(), x[:, :-1], x[:-1]):
                with pytest.raises(ValueError, match=r"experts \[3, 40, 24\] torch.bfloat16 cannot multiply"):
                    product(bad, groups)
            for ends in (groups.ends[:2], groups.ends.long(), groups.ends[None], groups.ends.to("meta")):
                with pytest.raises(ValueError, match="cannot multiply"):
                    product(x, groups._replace(ends=ends))

    @pytest.mark.parametrize("form", ["plain", "int8"])
    @pytest.mark.parametrize(
        "ends", [[3, 7, 11], [3, 7, 9], [100000, 100000, 10], [-5, 5, 10], [7, 3, 10], [0, 0, 0], [10, 10, 1 << 30]]
    )
    def test_ends_that_do_not_part_the_rows(self, ends: list[int], form: str, native: None) -> None:
        """Native code would read, and write, the memory of others."""
        x, groups = self.pairs((3, 40, 24), 5, torch.bfloat16)
        assert len(x) == 10
        product = moe.pack(normal(3, 40, 24, seed=15).bfloat16(), form)
        with pytest.raises(ValueError, match="do not part the rows"):
            product(x, groups._replace(ends=torch.tensor(ends, dtype=torch.int32)))

    def test_pack_chooses(self, native: None, monkeypatch: pytest.MonkeyPatch) -> None:
        weight = normal(2, 4, 4, seed=16)
        assert isinstance(moe.pack(weight.half()), torch_ops.PlainExperts)
        assert isinstance(moe.pack(weight), native_ops.NativeExperts)
        assert isinstance(moe.pack(weight.bfloat16()), native_ops.NativeExperts)
        assert isinstance(moe.pack(weight, "int8"), native_ops.NativeInt8Experts)
        assert isinstance(moe.pack(weight.half(), "int8"), torch_ops.Int8Experts)
        assert isinstance(moe.pack_router(weight[0]), native_ops.NativeRouter)
        monkeypatch.setattr(native_ops, "code", lambda: None)
        assert isinstance(moe.pack(weight.bfloat16()), torch_ops.PlainExperts)
        assert isinstance(moe.pack(weight.bfloat16(), "int8"), torch_ops.Int8Experts)
        assert isinstance(moe.pack_router(weight[0]), torch_ops.PlainRouter)

    @staticmethod
    def pairs(shape: tuple[int, int, int], tokens: int, dtype: torch.dtype) -> tuple[Tensor, Groups]:
        num_experts, _, width = shape
        experts = random_experts(tokens, (num_experts + 1) // 2, num_experts, seed=20)
        return reference.dispatch(normal(tokens, width, seed=21, dtype=dtype), experts, num_experts)


class TestScores:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("num_experts", "width"), [(1, 1), (7, 36), (33, 65), (128, 40)])
    def test_match_reference(
        self, num_experts: int, width: int, dtype: torch.dtype, native: None, threads: int
    ) -> None:
        weight = normal(num_experts, width, seed=1, dtype=dtype)
        for tokens in (1, 3, 4, 5, 13, 30):
            x = normal(tokens, width, seed=2, dtype=dtype)
            expected = reference.scores(x, weight)
            for router in (torch_ops.PlainRouter(weight), native_ops.NativeRouter(weight, code())):
                got = router(x)
                assert got.dtype == torch.float32
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_pytorchs_match_reference(self, dtype: torch.dtype, device: str) -> None:
        weight, x = normal(33, 65, seed=1, dtype=dtype), normal(13, 65, seed=2, dtype=dtype)
        got = torch_ops.PlainRouter(weight.to(device))(x.to(device)).cpu()
        torch.testing.assert_close(got, reference.scores(x, weight), rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_no_token_knows_of_the_others(self, dtype: torch.dtype, native: None, threads: int) -> None:
        router = moe.pack_router(normal(70, 90, seed=3, dtype=dtype))
        x = normal(40, 90, seed=4, dtype=dtype)
        alone = torch.cat([router(row) for row in x.split(1)])
        for tokens in range(1, 41):
            assert torch.equal(router(x[:tokens]), alone[:tokens])

    def test_a_float32_weight_is_not_rounded(self, native: None) -> None:
        """In a bf16 model, too: some checkpoints keep their routers in float32."""
        weight, x = normal(9, 50, seed=5), normal(4, 50, seed=6).bfloat16()
        torch.testing.assert_close(moe.pack_router(weight)(x), reference.scores(x, weight), rtol=1e-5, atol=1e-5)

    def test_no_tokens(self, native: None) -> None:
        assert moe.pack_router(normal(9, 50, seed=5))(torch.zeros(0, 50)).shape == (0, 9)

    def test_inputs_that_do_not_fit_are_refused(self, native: None) -> None:
        with pytest.raises(ValueError, match=r"a router \[9, 50\] cannot take \[2, 49\]"):
            moe.pack_router(normal(9, 50, seed=5))(torch.zeros(2, 49))


class TestRouting:
    """Near-equal scores aside, there is one right answer: which experts, how much of each."""

    @staticmethod
    def here(routing: Routing) -> Routing:
        return Routing(routing.experts.cpu(), routing.weights.cpu())

    @staticmethod
    def assert_same(got: Routing, expected: Routing) -> None:
        assert got.experts.dtype == torch.int64
        assert got.weights.dtype == torch.float32
        order, expected_order = got.experts.argsort(-1), expected.experts.argsort(-1)
        assert torch.equal(got.experts.gather(-1, order), expected.experts.gather(-1, expected_order))
        torch.testing.assert_close(got.weights.gather(-1, order), expected.weights.gather(-1, expected_order))

    @pytest.mark.parametrize("renormalise", [True, False])
    @pytest.mark.parametrize("k", [1, 3, 8])
    def test_softmax(self, k: int, renormalise: bool, device: str) -> None:
        logits = 3 * normal(20, 8, seed=1)
        got = self.here(torch_ops.softmax_routing(logits.to(device), k, renormalise))
        self.assert_same(got, reference.softmax_routing(logits, k, renormalise))
        assert bool((got.weights.sum(-1) < 0.999).any()) == (not renormalise and k < 8)

    @pytest.mark.usefixtures("needs_native")
    @pytest.mark.parametrize(("experts", "k"), [(1, 1), (8, 3), (64, 8), (513, 10)])
    def test_softmax_in_native_code(self, experts: int, k: int) -> None:
        """Of scores far apart too; a token's bits do not depend on the others."""
        logits = 9 * normal(70, experts, seed=7)
        logits[0, 0], logits[1] = 1e4, -1e30
        for renormalise in (True, False):
            got = native_ops.softmax_routing(logits, k, renormalise)
            assert got.weights.isfinite().all()
            torch.testing.assert_close(got.weights, torch_ops.softmax_routing(logits, k, renormalise).weights)
            self.assert_same(
                *(
                    Routing(*(x[2:] for x in found))
                    for found in (got, reference.softmax_routing(logits, k, renormalise))
                )
            )
            alone = native_ops.softmax_routing(logits[5:6], k, renormalise)
            assert torch.equal(alone.weights[0], got.weights[5])
        chosen = native_ops.topk_softmax_routing(logits, k)
        torch.testing.assert_close(chosen.weights, torch_ops.topk_softmax_routing(logits, k).weights)
        assert torch.equal(chosen.experts[2:], got.experts[2:])

    @pytest.mark.parametrize("k", [1, 3, 8])
    def test_topk_softmax(self, k: int, device: str) -> None:
        logits = 3 * normal(20, 8, seed=2)
        got = self.here(torch_ops.topk_softmax_routing(logits.to(device), k))
        self.assert_same(got, reference.topk_softmax_routing(logits, k))

    @pytest.mark.parametrize("renormalise", [True, False])
    @pytest.mark.parametrize(
        ("num_groups", "topk_groups", "k"), [(1, 1, 5), (4, 2, 3), (4, 4, 12), (6, 3, 1), (12, 2, 2)]
    )
    def test_sigmoid(self, num_groups: int, topk_groups: int, k: int, renormalise: bool, device: str) -> None:
        logits, bias = 2 * normal(20, 12, seed=3), 0.5 * normal(12, seed=4)
        rule = (k, num_groups, topk_groups, renormalise, 2.5)
        got = self.here(torch_ops.sigmoid_routing(logits.to(device), bias.to(device), *rule))
        self.assert_same(got, reference.sigmoid_routing(logits, bias, *rule))
        unbiased = torch_ops.sigmoid_routing(logits, torch.zeros(12), *rule)
        assert k == 12 or not torch.equal(got.experts.sort(-1).values, unbiased.experts.sort(-1).values)

    @pytest.mark.usefixtures("needs_native")
    @pytest.mark.parametrize(("num_groups", "topk_groups", "k"), [(1, 1, 5), (4, 2, 3), (12, 2, 2), (4, 4, 12)])
    def test_sigmoid_in_native_code(self, num_groups: int, topk_groups: int, k: int) -> None:
        """Also of a token whose experts all say 0; a token's bits do not depend on the others."""
        logits, bias = 2 * normal(20, 12, seed=3), 0.5 * normal(12, seed=4)
        logits[3] = -200.0
        for renormalise in (True, False):
            rule = (k, num_groups, topk_groups, renormalise, 2.5)
            got = native_ops.sigmoid_routing(logits, bias, *rule)
            others = [row for row in range(20) if row != 3]  # where float32 has only zeros
            expected = reference.sigmoid_routing(logits[others], bias, *rule)
            self.assert_same(Routing(got.experts[others], got.weights[others]), expected)
            assert not got.weights[3].any()
            alone = native_ops.sigmoid_routing(logits[5:6], bias, *rule)
            assert torch.equal(alone.weights[0], got.weights[5])

    def test_what_is_no_number(self) -> None:
        """Padding may hold anything: it goes to some experts, and no other token feels it."""
        logits, bias = normal(6, 12, seed=5), normal(12, seed=6)
        routes: list[Any] = [
            lambda x: torch_ops.softmax_routing(x, 3, True),
            lambda x: torch_ops.topk_softmax_routing(x, 3),
            lambda x: torch_ops.sigmoid_routing(x, bias, 3, 4, 2, True, 1.0),
        ]
        for route in routes:
            clean = route(logits)
            for value in (float("nan"), float("inf"), float("-inf")):
                spoilt = logits.clone()
                spoilt[2] = value
                got = route(spoilt)
                assert bool(((got.experts >= 0) & (got.experts < 12)).all())
                others = [0, 1, 3, 4, 5]
                assert torch.equal(got.experts[others], clean.experts[others])
                assert torch.equal(got.weights[others], clean.weights[others])
