"""MTP heads with mixtures of experts against their formula, evaluated without any cache, in float32; the checkpoints
that they come in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

from specmamba.errors import CheckpointError, UnsupportedModelError
from tests.families import qwen3_5_moe, qwen3_next
from tests.families.qwen import MTPHead, lively, write
from tests.models.test_model_exact import (
    Draft,
    accept_at_random,
    check_draft,
    check_extends,
    check_rounds,
    logits_along,
    new_engine,
    random_chain,
    random_prompts,
    record_drafts,
    run,
    with_probe,
)
from tests.tiny import VISION, write_config

FAMILIES = {"qwen3.5-moe": qwen3_5_moe, "qwen3-next": qwen3_next}
CASES = [(family, variant) for family, module in FAMILIES.items() for variant in module.VARIANTS]
LENGTHS = (1, 26, 2, 3, 45, 9)
NEW_TOKENS = (26, 14, 33, 21, 12, 24)


@dataclass(frozen=True)
class Reference:
    """Target and head, made of transformers' layers, in float64: in float32 they are 1.4e-4 from that themselves."""

    text: Any
    lm_head: nn.Module
    head: MTPHead

    def __post_init__(self) -> None:
        for part in (self.text, self.lm_head, self.head):
            part.double()

    @torch.no_grad()
    def hidden(self, tokens: list[int]) -> Tensor:
        """The target's states behind each token, [T, H]."""
        states: Tensor = self.text(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
        return states

    @torch.no_grad()
    def draft(self, known: list[int], hidden: Tensor, drafted: list[int]) -> Tensor:
        """As ``logits_along``."""

        def enter(tokens: list[int], states: Tensor, first: int) -> Tensor:
            embedded = self.text.embed_tokens(torch.tensor([tokens]))
            rotary = self.text.rotary_emb(embedded, torch.arange(first, first + len(tokens))[None])
            out: Tensor = self.head(embedded, states[None], rotary)[0, -1:]
            return out

        return logits_along(known, hidden, drafted, enter, self.lm_head)

    def check(self, drafts: dict[str, list[Draft]], texts: dict[str, list[int]]) -> None:
        for name, of_request in drafts.items():
            hidden = self.hidden(texts[name])
            for draft in of_request:
                check_draft(draft, texts[name], self.draft(draft.known, hidden, draft.tokens).float())


@pytest.mark.fast_cases(7)
@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.parametrize(("family", "variant"), CASES)
def test_drafts(family: str, variant: str, num_steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = FAMILIES[family]
    model = module.build(tmp_path, variant)
    accept_at_random(monkeypatch, torch.Generator().manual_seed(num_steps))
    engine = new_engine(tmp_path, num_steps, chunked_prefill_size=9)
    drafts = record_drafts(engine, monkeypatch)
    texts = run(engine, random_prompts(LENGTHS, seed=8), NEW_TOKENS)
    Reference(model.model, model.lm_head, module.mtp_head(variant)).check(drafts, texts)
    assert {d.num_tokens for of_request in drafts.values() for d in of_request} == set(range(1, num_steps + 2))


def test_conditional_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As published: the language model beside a vision tower, its experts in one tensor, those of the head in many."""
    text = qwen3_5_moe.config()
    vision = VISION | {"out_hidden_size": text.hidden_size}
    config = Qwen3_5MoeConfig(text_config=text.to_dict(), vision_config=vision, tie_word_embeddings=False)
    config._experts_implementation = "eager"
    model, head = lively(Qwen3_5MoeForConditionalGeneration(config), 11), qwen3_5_moe.mtp_head()
    write(tmp_path, model, head, fused=True, fused_mtp=False)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "model.language_model.layers.0.mlp.experts.gate_up_proj" in names
    assert "mtp.layers.0.mlp.experts.6.gate_proj.weight" in names
    assert any(name.startswith("model.visual.") for name in names)

    generator = torch.Generator().manual_seed(12)
    prompts, counts = random_prompts((30, 1, 12), seed=12), [12, 9, 15]
    engine = new_engine(tmp_path, 3)
    assert engine.model.architecture == "Qwen3_5MoeForConditionalGeneration"
    probe = with_probe(engine, 4, random_chain(generator))
    texts = run(engine, prompts, counts)
    check_extends(probe.record, texts, model)
    check_rounds(probe.record, model)

    engine = new_engine(tmp_path, 3)
    drafts = record_drafts(engine, monkeypatch)
    texts = run(engine, prompts, counts)
    Reference(model.model.language_model, model.lm_head, head).check(drafts, texts)


# ---- what is refused -------------------------------------------------------------------------------------------------


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("module", FAMILIES.values(), ids=FAMILIES)
def test_an_expert_is_missing(module: ModuleType, tmp_path: Path) -> None:
    module.build(tmp_path)
    change_tensors(tmp_path, lambda tensors: tensors.pop("mtp.layers.0.mlp.experts.4.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"lacks the tensor mtp\.layers\.0\.mlp\.experts\.4\.up_proj\.weight"):
        new_engine(tmp_path, 1)
    new_engine(tmp_path, 0, speculative_algorithm="none", speculative_num_steps=None)  # the target is complete


@pytest.mark.parametrize("module", FAMILIES.values(), ids=FAMILIES)
def test_an_expert_too_many(module: ModuleType, tmp_path: Path) -> None:
    module.build(tmp_path)
    change_tensors(tmp_path, lambda t: t.update({"mtp.layers.0.mlp.experts.7.up_proj.weight": torch.zeros(22, 36)}))
    with pytest.raises(CheckpointError, match=r"does not have: 'mtp\.layers\.0\.mlp\.experts\.7\.up_proj\.weight'"):
        new_engine(tmp_path, 1)


@pytest.mark.parametrize("module", FAMILIES.values(), ids=FAMILIES)
def test_half_a_module(module: ModuleType, tmp_path: Path) -> None:
    """The number of modules comes from the tensors, as Qwen3-Next's config has no field for it."""
    module.build(tmp_path)
    change_tensors(tmp_path, lambda t: t.update({"mtp.layers.1.input_layernorm.weight": torch.zeros(36)}))
    with pytest.raises(CheckpointError, match=r"lacks the tensor mtp\.layers\.1\."):
        new_engine(tmp_path, 1)
    new_engine(tmp_path, 0, speculative_algorithm="none", speculative_num_steps=None)


@pytest.mark.parametrize("module", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("count", [0, 8])
def test_more_experts_per_token_than_experts(
    module: ModuleType, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module.build(tmp_path)
    config = module.config()
    config.num_experts_per_tok = count
    write_config(tmp_path, config, "Qwen3NextForCausalLM" if module is qwen3_next else "Qwen3_5MoeForCausalLM")
    with pytest.raises(UnsupportedModelError, match=f"{count} of 7 experts"):
        new_engine(tmp_path, 1)
