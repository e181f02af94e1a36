"""Nemotron-H's MTP head against its formula, evaluated without any cache, in float32; and which heads are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import NemotronHForCausalLM

from specmamba.errors import UnsupportedModelError
from tests.families import nemotron_h
from tests.families.nemotron_h import MTPHead
from tests.models.test_model_exact import (
    accept_at_random,
    assert_close,
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

LENGTHS = (1, 26, 2, 3, 45, 9)
NEW_TOKENS = (26, 14, 33, 21, 12, 24)


@torch.no_grad()
def reference_draft(
    model: NemotronHForCausalLM, head: MTPHead, known: list[int], target_hidden: Tensor, drafted: list[int]
) -> Tensor:
    """As ``logits_along``. Only the first token's own entry attends to that entry, where the token is the root."""

    def enter(tokens: list[int], states: Tensor, first: int) -> Tensor:
        out: Tensor = head(model.model.embeddings(torch.tensor([tokens])), states[None])[0, -1:]
        return out

    return logits_along(known, target_hidden, drafted, enter, model.lm_head)


@pytest.mark.fast_cases(5)
@pytest.mark.parametrize("num_steps", [1, 4])
@pytest.mark.parametrize("variant", nemotron_h.VARIANTS)
def test_drafts(variant: str, num_steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, head = nemotron_h.build(tmp_path, variant), nemotron_h.make(variant, seed=0)[1]
    accept_at_random(monkeypatch, torch.Generator().manual_seed(num_steps))
    # chunks of 9: whole prompts, padded chunks of several prompts, and chunks that start inside a prompt
    engine = new_engine(tmp_path, num_steps, chunked_prefill_size=9)
    drafts = record_drafts(engine, monkeypatch)
    texts = run(engine, random_prompts(LENGTHS, seed=8), NEW_TOKENS)
    for name, of_request in drafts.items():
        with torch.no_grad():
            hidden = model.model(torch.tensor([texts[name]]), use_cache=False).last_hidden_state[0]
        for draft in of_request:
            check_draft(draft, texts[name], reference_draft(model, head, draft.known, hidden, draft.tokens))
    assert {d.num_tokens for of_request in drafts.values() for d in of_request} == set(range(1, num_steps + 2))


def test_fused_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout of transformers: one tensor for all experts, and names that begin with ``model.``."""
    model, head = nemotron_h.build(tmp_path / "published", "default"), nemotron_h.make("default", seed=0)[1]
    tensors = {name: x.clone() for name, x in model.state_dict().items()}
    tensors |= {f"mtp.{name}": x.clone() for name, x in head.state_dict().items()}
    published = load_file(tmp_path / "published" / "model.safetensors")
    assert any(name.startswith("backbone.") and ".experts.0." in name for name in published)
    assert tensors["model.layers.1.mixer.experts.up_proj"].ndim == 3
    (tmp_path / "published").rename(tmp_path / "fused")
    save_file(tensors, tmp_path / "fused" / "model.safetensors", {"format": "pt"})

    engine = new_engine(tmp_path / "fused", 2)
    drafts = record_drafts(engine, monkeypatch)
    texts = run(engine, random_prompts((20,), seed=1), [8])
    with torch.no_grad():
        hidden = model.model(torch.tensor([texts["r0"]]), use_cache=False).last_hidden_state[0]
    for draft in drafts["r0"]:
        assert_close(draft.logits, reference_draft(model, head, draft.known, hidden, draft.tokens))
    probe = with_probe(engine, 3, random_chain(torch.Generator().manual_seed(0)))
    texts = run(engine, random_prompts((20, 4), seed=2), [8, 5])
    check_extends(probe.record, texts, model)
    check_rounds(probe.record, model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mtp_layers_block_type": ["linear_attention", "moe"]}, "an MTP head keeps no recurrent state"),
        ({"mtp_layers_block_type": []}, r"mtp_layers_block_type \[\]"),
    ],
)
def test_heads_that_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    """The message has the numbers and what to do; the target alone is served."""
    nemotron_h.build(tmp_path)
    change_config(tmp_path, changes)
    with pytest.raises(UnsupportedModelError, match=f"{message}.*--speculative-algorithm none"):
        new_engine(tmp_path, 3)
    engine = new_engine(tmp_path, 0, speculative_algorithm="none", speculative_num_steps=None)
    assert engine.model.draft_head is None
    assert engine.model.cache_shape.num_kv_layers == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_hidden_act": "tanh"}, "mlp_hidden_act 'tanh'"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act 'gelu'"),
        ({"n_shared_experts": 0}, "n_shared_experts 0"),
        ({"sliding_window": 511}, "sliding_window 511 is not supported"),
        ({"time_step_limit": [0.2, 0.1]}, r"time_step_limit \[0.2, 0.1\] should be two numbers"),
        ({"num_key_value_heads": 4}, "6 query heads are not a multiple of 4 key heads"),
        ({"n_groups": 4}, "6 Mamba2 heads are not a multiple of 4 groups"),
        ({"n_group": 2}, "7 experts in 2 groups"),
        ({"n_group": 7}, "7 experts in 7 groups"),
        ({"topk_group": 2}, "choose 2 groups"),
        ({"num_experts_per_tok": 8}, "8 of their experts"),
    ],
)
def test_targets_that_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    nemotron_h.build(tmp_path)
    change_config(tmp_path, changes)
    with pytest.raises(UnsupportedModelError, match=message):
        new_engine(tmp_path, 3)


def change_config(folder: Path, changes: dict[str, Any]) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text("utf8")) | changes), "utf8")
