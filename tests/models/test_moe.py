"""Routers and mixtures of experts against transformers', in float32; and the count of tokens per expert."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DeepseekV3Config, GraniteMoeHybridConfig, NemotronHConfig, PreTrainedConfig, Qwen3NextConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMoE
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMoE
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

from specmamba import LLM, SamplingParams
from specmamba.errors import ConfigError
from specmamba.kernels import rowwise
from specmamba.kernels.moe import Routing
from specmamba.layers.context import LayerContext
from specmamba.layers.feed_forward import (
    MLP,
    Experts,
    GatedMLP,
    MoE,
    Router,
    SigmoidRouter,
    SoftmaxRouter,
    TopKSoftmaxRouter,
    squared_relu,
)
from specmamba.layers.primitives import Linear
from specmamba.models.hybrid import record_expert_load
from tests.families import qwen3_5, qwen3_next

NO_CONTEXT: Any = LayerContext(kv=None, state=None, rotary=None)  # type: ignore[arg-type]


@torch.no_grad()
def randomized(module: Any, config: PreTrainedConfig, seed: int) -> Any:
    config._experts_implementation = "eager"
    generator = torch.Generator().manual_seed(seed)
    for tensor in [*module.parameters(), *module.buffers()]:
        tensor.copy_(torch.randn(tensor.shape, generator=generator) / tensor.shape[-1] ** 0.5)
    return module.float().eval()


def inputs(width: int, seed: int = 5) -> Tensor:
    return torch.randn(3, 11, width, generator=torch.Generator().manual_seed(seed))


def qwen(renormalise: bool) -> tuple[Any, MoE]:
    config = Qwen3NextConfig(
        hidden_size=36,
        num_experts=7,
        num_experts_per_tok=3,
        moe_intermediate_size=22,
        shared_expert_intermediate_size=26,
        norm_topk_prob=renormalise,
    )
    block = randomized(Qwen3NextSparseMoeBlock(config), config, seed=1)
    shared = block.shared_expert
    return block, MoE(
        SoftmaxRouter(block.gate.weight, 3, renormalise),
        Experts(block.experts.gate_up_proj, block.experts.down_proj, rowwise.silu_mul),
        GatedMLP(Linear(torch.cat([shared.gate_proj.weight, shared.up_proj.weight])), Linear(shared.down_proj.weight)),
        Linear(block.shared_expert_gate.weight),
    )


def granite() -> tuple[Any, MoE]:
    config = GraniteMoeHybridConfig(
        hidden_size=36, intermediate_size=22, num_local_experts=7, num_experts_per_tok=3, mamba_n_heads=6
    )
    block = randomized(GraniteMoeHybridMoE(config), config, seed=2)
    router = block.router.weight if hasattr(block.router, "weight") else block.router.layer.weight
    experts = Experts(block.experts.gate_up_proj, block.experts.down_proj, rowwise.silu_mul)
    return block, MoE(TopKSoftmaxRouter(router, 3), experts)


def nemotron(latent: int | None, groups: tuple[int, int], renormalise: bool) -> tuple[Any, MoE]:
    config = NemotronHConfig(
        hidden_size=36,
        n_routed_experts=12,
        num_experts_per_tok=4,
        moe_intermediate_size=22,
        moe_shared_expert_intermediate_size=26,
        moe_latent_size=latent,
        n_group=groups[0],
        topk_group=groups[1],
        norm_topk_prob=renormalise,
        routed_scaling_factor=2.5,
    )
    block = randomized(NemotronHMoE(config), config, seed=3)
    gate, shared = block.gate, block.shared_experts
    return block, MoE(
        SigmoidRouter(gate.weight, gate.e_score_correction_bias, 4, *groups, renormalise, 2.5),
        Experts(block.experts.up_proj, block.experts.down_proj, squared_relu),
        MLP(Linear(shared.up_proj.weight), Linear(shared.down_proj.weight), squared_relu),
        latent=(Linear(block.fc1_latent_proj.weight), Linear(block.fc2_latent_proj.weight)) if latent else None,
    )


CASES: dict[str, Callable[[], tuple[Any, MoE]]] = {
    "qwen": lambda: qwen(renormalise=True),
    "qwen-unnormalised": lambda: qwen(renormalise=False),
    "granite": granite,
    "nemotron": lambda: nemotron(None, (1, 1), renormalise=True),
    "nemotron-latent": lambda: nemotron(15, (4, 2), renormalise=False),
}


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_mixtures(name: str) -> None:
    block, layer = CASES[name]()
    x = inputs(36)
    expected = block(x)
    expected = expected[0] if isinstance(expected, tuple) else expected
    torch.testing.assert_close(layer(x, NO_CONTEXT), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(("num_groups", "topk_groups", "k"), [(1, 1, 5), (4, 2, 3), (3, 3, 12)])
@torch.no_grad()
def test_sigmoid_router(num_groups: int, topk_groups: int, k: int, renormalise: bool) -> None:
    config = DeepseekV3Config(
        hidden_size=36,
        n_routed_experts=12,
        num_experts_per_tok=k,
        moe_intermediate_size=8,
        n_shared_experts=1,
        n_group=num_groups,
        topk_group=topk_groups,
        norm_topk_prob=renormalise,
        routed_scaling_factor=1.7,
    )
    block = randomized(DeepseekV3MoE(config), config, seed=4)
    x = inputs(36).flatten(0, 1)
    _, weights, experts = block.gate(x)
    bias = block.gate.e_score_correction_bias
    got = SigmoidRouter(block.gate.weight, bias, k, num_groups, topk_groups, renormalise, 1.7)(x)
    assert_same_routing(got, experts, weights)


def assert_same_routing(got: Routing, experts: Tensor, weights: Tensor) -> None:
    dense = [
        torch.zeros(len(experts), 12).scatter_(1, *pair) for pair in ((got.experts, got.weights), (experts, weights))
    ]
    torch.testing.assert_close(*dense)


def plain_mixture(router: Router, up: Tensor, down: Tensor, x: Tensor) -> Tensor:
    """Token by token."""
    routing = router(x)
    out = torch.zeros(x.shape)
    for t, (experts, weights) in enumerate(zip(*routing, strict=True)):
        for e, weight in zip(experts, weights, strict=True):
            out[t] += weight * F.linear(squared_relu(F.linear(x[t].float(), up[e].float())), down[e].float())
    return out


@pytest.mark.parametrize(("form", "tolerance"), [("plain", 0.01), ("int8", 0.03)])
def test_bf16(form: Any, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(6)
    up, down, gate = (
        (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).bfloat16()
        for shape in ((9, 70, 48), (9, 48, 70), (9, 48))
    )
    router = SoftmaxRouter(gate, 4, renormalise=True)
    layer = MoE(router, Experts(up, down, squared_relu, form))
    x = inputs(48).bfloat16()
    expected = plain_mixture(router, up, down, x.flatten(0, 1)).view(x.shape)
    got = layer(x, NO_CONTEXT)
    assert got.dtype == torch.bfloat16
    assert float((got - expected).norm() / expected.norm()) < tolerance
    alone = torch.stack(
        [torch.cat([layer(x[i : i + 1, t : t + 1], NO_CONTEXT)[0] for t in range(11)]) for i in range(3)]
    )
    torch.testing.assert_close(alone, got, rtol=2**-6, atol=2**-8)


def test_padding_of_nan() -> None:
    _, layer = CASES["nemotron-latent"]()
    x = inputs(36)
    with torch.no_grad():
        clean = layer(x, NO_CONTEXT)
        x[1, 4:] = float("nan")
        got = layer(x, NO_CONTEXT)
    assert got[1, 4:].isnan().all()
    torch.testing.assert_close(got[0], clean[0])
    torch.testing.assert_close(got[1, :4], clean[1, :4])


# ---- tokens per expert -----------------------------------------------------------------------------------------------


def test_expert_load(tmp_path: Path) -> None:
    """Of a prompt and its answer, in the layers that have experts: as many as the layer's tokens go to."""
    model = qwen3_next.build(tmp_path, "some-dense")
    prompt, params = list(range(1, 21)), SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    llm = LLM(
        model=str(tmp_path), dtype="float32", device="cpu", speculative_algorithm="none", disable_radix_cache=True
    )
    target = llm.engine.model.target
    with record_expert_load(target) as load:
        (answer,) = llm.generate([prompt], params)
        with pytest.raises(ConfigError, match="already"), record_expert_load(target):
            pass
    assert list(load) == [1, 2, 3]  # the first is dense
    expected = routed(model, [*prompt, *answer.token_ids[:-1]])
    assert {layer: counts.tolist() for layer, counts in load.items()} == expected
    before = {layer: counts.clone() for layer, counts in load.items()}
    llm.generate([prompt], params)
    assert all(torch.equal(load[layer], before[layer]) for layer in load), "it goes on counting"
    with record_expert_load(target) as again:
        pass
    assert all(not counts.any() for counts in again.values())


@torch.no_grad()
def routed(model: Any, tokens: list[int]) -> dict[int, list[int]]:
    """The experts that transformers' routers choose."""
    counts = {}
    hooks = []
    for i, block in enumerate(model.model.layers):
        if hasattr(block.mlp, "gate"):
            record = lambda _, __, out, i=i: counts.update({i: out[2].flatten().bincount(minlength=7).tolist()})  # noqa: E731
            hooks.append(block.mlp.gate.register_forward_hook(record))
    model(torch.tensor([tokens]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return counts


def test_expert_load_of_a_dense_model(tmp_path: Path) -> None:
    qwen3_5.build(tmp_path)
    llm = LLM(model=str(tmp_path), dtype="float32", device="cpu", speculative_algorithm="none")
    with pytest.raises(ConfigError, match="has none"), record_expert_load(llm.engine.model.target):
        pass
