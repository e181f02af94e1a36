"""The MTP head of Ling-3 against its formula, evaluated without any cache, in float32; and which heads are refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import BailingHybridForCausalLM

from specmamba.config import EngineConfig
from specmamba.engine.model_report import model_info
from specmamba.errors import CheckpointError, UnsupportedModelError
from tests.families import bailing_hybrid
from tests.families.bailing_hybrid import MTPModule, rotary
from tests.models.test_model_exact import (
    TOLERANCE,
    Draft,
    accept_at_random,
    check_draft,
    logits_along,
    new_engine,
    random_prompts,
    record_drafts,
    run,
)

LENGTHS = (1, 26, 2, 3, 45, 9)
NEW_TOKENS = (26, 14, 33, 21, 12, 24)
LIMITS = "expert_swiglu_limit_list", "share_expert_swiglu_limit_list"
LAYER = "model.layers.4."  # of the head


@dataclass(frozen=True)
class Reference:
    """Target and head, made of transformers' layers, in float64."""

    model: BailingHybridForCausalLM
    head: MTPModule

    def __post_init__(self) -> None:
        self.model.double()
        self.head.double()

    @torch.no_grad()
    def draft(self, known: list[int], hidden: Tensor, drafted: list[int]) -> Tensor:
        """As ``logits_along``."""

        def enter(tokens: list[int], states: Tensor, first: int) -> Tensor:
            embedded = self.model.model.embed_tokens(torch.tensor([tokens]))
            angles = rotary(self.model.config, embedded, first)
            out: Tensor = self.head(embedded, states[None], angles)[0, -1:]
            return out

        return logits_along(known, hidden, drafted, enter, self.model.lm_head)

    @torch.no_grad()
    def check(self, drafts: dict[str, list[Draft]], texts: dict[str, list[int]]) -> None:
        for name, of_request in drafts.items():
            hidden = self.model.model(torch.tensor([texts[name]]), use_cache=False).last_hidden_state[0]
            for draft in of_request:
                check_draft(draft, texts[name], self.draft(draft.known, hidden, draft.tokens).float())


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.parametrize("variant", bailing_hybrid.VARIANTS)
def test_drafts(variant: str, num_steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = bailing_hybrid.build(tmp_path, variant, seed=2)
    (head,) = bailing_hybrid.mtp_modules(bailing_hybrid.config_of(variant), seed=2)
    accept_at_random(monkeypatch, torch.Generator().manual_seed(num_steps))
    engine = new_engine(tmp_path, num_steps, chunked_prefill_size=9)
    drafts = record_drafts(engine, monkeypatch)
    texts = run(engine, random_prompts(LENGTHS, seed=8), NEW_TOKENS)
    Reference(model, head).check(drafts, texts)
    assert {d.num_tokens for of_request in drafts.values() for d in of_request} == set(range(1, num_steps + 2))


def test_as_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of the repository's own code: of the class, of the fields, and of tensors that repeat the target's."""
    model = bailing_hybrid.build(tmp_path)
    (head,) = bailing_hybrid.mtp_modules(bailing_hybrid.config_of("default"))
    config = json.loads((tmp_path / "config.json").read_text("utf8"))
    assert config["num_nextn_predict_layers"] == 1
    assert {"num_experts", "num_shared_experts"} <= config.keys()
    own = {"architectures": ["BailingMoeV3ForCausalLM"], "auto_map": {"AutoModel": "modeling.Model"}}
    change_config(tmp_path, own | {"partial_rotary_factor": 0.5, "use_mla_nope": False, "score_function": "sigmoid"})
    copies = {
        f"{LAYER}shared_head.head.weight": model.lm_head.weight.detach().clone(),
        f"{LAYER}embed_tokens.weight": model.model.embed_tokens.weight.detach().clone(),
    }
    change_tensors(tmp_path, lambda tensors: tensors.update(copies))
    engine = new_engine(tmp_path, 2)
    assert engine.model.architecture == "BailingMoeV3ForCausalLM"
    drafts = record_drafts(engine, monkeypatch)
    texts = run(engine, random_prompts((20,), seed=1), [8])
    Reference(model, head).check(drafts, texts)
    (text,) = texts.values()
    with torch.no_grad():
        assert model(torch.tensor([text]), use_cache=False).logits[0, 19:-1].argmax(-1).tolist() == text[20:]


@pytest.mark.parametrize(
    ("copy", "of"),
    [("embed_tokens", "model.word_embeddings"), ("shared_head.head", "lm_head")],
)
@pytest.mark.parametrize("change", [lambda x: x * 2, lambda x: x[:-1].clone()], ids=["values", "shape"])
def test_copies_that_are_none(copy: str, of: str, change: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    """A head with an embedding or output matrix of its own would draft by another one here."""
    bailing_hybrid.build(tmp_path)
    change_tensors(tmp_path, lambda x: x.update({f"{LAYER}{copy}.weight": change(x[f"{of}.weight"])}))
    with pytest.raises(UnsupportedModelError, match=rf"{copy}.weight is another matrix than {of}.weight.*--spec"):
        new_engine(tmp_path, 1)
    new_engine(tmp_path, 0, speculative_algorithm="none", speculative_num_steps=None)


CODES = {"type": "float", "num_bits": 8, "strategy": "channel"}
FP8 = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": CODES}}}


@pytest.mark.parametrize("is_copy", [True, False], ids=["copy", "another"])
@pytest.mark.parametrize("coded", ["lm_head", f"{LAYER}shared_head.head"])
def test_copies_beside_codes(coded: str, is_copy: bool, tmp_path: Path) -> None:
    """Of the target's output head and its copy one was quantized: they are one matrix but for its rounding."""
    bailing_hybrid.build(tmp_path)
    names = "lm_head.weight", f"{LAYER}shared_head.head.weight"

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[names[1]] = tensors[names[0]].clone() if is_copy else tensors[names[0]].flip(0).contiguous()
        weight = tensors[f"{coded}.weight"]
        scale = weight.abs().amax(1, keepdim=True) / 448
        tensors[f"{coded}.weight"] = (weight / scale).to(torch.float8_e4m3fn)
        tensors[f"{coded}.weight_scale"] = scale

    change_tensors(tmp_path, change)
    change_config(tmp_path, {"quantization_config": FP8})
    if is_copy:
        assert new_engine(tmp_path, 1).model.draft_head is not None
        assert "draft" in model_info(EngineConfig(model=str(tmp_path), device="cpu"))  # which reads no values
    else:
        with pytest.raises(UnsupportedModelError, match=r"shared_head.head.weight is another matrix"):
            new_engine(tmp_path, 1)


def test_limits_of_activations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers ignores them: its layers are changed here to the formula."""
    model = bailing_hybrid.build(tmp_path)
    (head,) = bailing_hybrid.mtp_modules(bailing_hybrid.config_of("default"))
    unlimited = copy.deepcopy(model)
    limits = [0.05, 0.05, 0.05], [0.02, None, 0.02, 0.02]  # none for the last layer
    change_config(tmp_path, dict(zip(LIMITS, limits, strict=True)))
    for layer, of_routed, of_shared in zip_longest(model.model.layers, *limits):
        if not hasattr(layer.mlp, "experts"):
            continue  # a dense layer, without limits
        if of_routed:
            limit_experts(layer.mlp.experts, of_routed)
        if of_shared:
            shared, limit = layer.mlp.shared_experts, of_shared
            shared.act_fn = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Hardtanh(-1.0, limit))
            shared.up_proj = torch.nn.Sequential(shared.up_proj, torch.nn.Hardtanh(-limit, limit))
    engine = new_engine(tmp_path, 2)
    drafts = record_drafts(engine, monkeypatch)
    texts = run(engine, random_prompts((20, 9), seed=1), [8, 12])
    Reference(model, head).check(drafts, texts)
    some = torch.tensor([texts[min(texts)]])
    with torch.no_grad():
        found, without = (of(some, use_cache=False).logits for of in (model, unlimited.double()))
    assert (found - without).abs().max() > 100 * TOLERANCE * found.abs().max()


@pytest.mark.parametrize("limits", [[1.0, 2.0, 3.0, -1.0], 4.0, ["a"] * 4])
def test_limits_that_mean_nothing(limits: Any, tmp_path: Path) -> None:
    bailing_hybrid.build(tmp_path)
    change_config(tmp_path, {LIMITS[1]: limits})
    with pytest.raises(UnsupportedModelError, match=rf"{LIMITS[1]} should have a limit"):
        new_engine(tmp_path, 1)


def limit_experts(experts: Any, limit: float) -> None:
    """Compute routed experts token by token, with a limit."""

    def forward(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for token, (of_token, factors) in enumerate(zip(index.tolist(), weights, strict=True)):
            for expert, factor in zip(of_token, factors, strict=True):
                gate, up = (experts.gate_up_proj[expert] @ x[token]).chunk(2)
                inner = torch.nn.functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)
                out[token] += factor * (experts.down_proj[expert] @ inner)
        return out

    experts.forward = forward


def test_a_checkpoint_without_the_layer(tmp_path: Path) -> None:
    """The config names it in any case: published checkpoints that others have rounded leave it out."""
    bailing_hybrid.build(tmp_path)
    change_tensors(tmp_path, drop_head)
    engine = new_engine(tmp_path, 0, speculative_algorithm="auto", speculative_num_steps=None)
    assert engine.model.draft_head is None
    assert engine.model.cache_shape.num_kv_layers == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(f"{LAYER}mlp.experts.4.up_proj.weight"), r"lacks .*mlp\.experts\.4\.up_proj"),
        (lambda tensors: tensors.pop(f"{LAYER}final_layernorm.weight"), r"lacks .*final_layernorm"),
        (lambda tensors: tensors.update({f"{LAYER}extra.weight": torch.ones(1)}), r"does not have: '.*extra\.weight'"),
    ],
    ids=["an-expert-less", "no-norm", "a-tensor-more"],
)
def test_heads_that_are_incomplete(change: Callable[[dict[str, Tensor]], Any], message: str, tmp_path: Path) -> None:
    bailing_hybrid.build(tmp_path)
    change_tensors(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        new_engine(tmp_path, 1)
    new_engine(tmp_path, 0, speculative_algorithm="none", speculative_num_steps=None)  # the target is complete


def test_a_head_with_a_recurrent_layer(tmp_path: Path) -> None:
    bailing_hybrid.build(tmp_path)
    change_config(tmp_path, {"mtp_use_kda": True})
    with pytest.raises(UnsupportedModelError, match=r"mtp_use_kda true .*--speculative-algorithm none"):
        new_engine(tmp_path, 1)
    new_engine(tmp_path, 0, speculative_algorithm="none", speculative_num_steps=None)


@pytest.mark.parametrize("change", [{"use_mla_nope": True}, {"score_function": "softmax"}])
def test_switches_that_are_not_known(change: dict[str, Any], tmp_path: Path) -> None:
    bailing_hybrid.build(tmp_path)
    change_config(tmp_path, change)
    with pytest.raises(UnsupportedModelError, match=rf"{next(iter(change))} .*is not supported for Ling"):
        new_engine(tmp_path, 1)


def drop_head(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.startswith(LAYER)]:
        del tensors[name]


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def change_config(folder: Path, changes: dict[str, Any]) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text("utf8")) | changes), "utf8")
