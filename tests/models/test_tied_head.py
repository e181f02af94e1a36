"""Which output head a checkpoint means, when its config and its tensors say different things."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from specmamba import LLM, SamplingParams
from specmamba.errors import CheckpointError
from tests.tiny import write_tiny_checkpoint

PROMPT = [5, 17, 42, 3]


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path / "tied", 3, tie_word_embeddings=True)


def change(folder: Path, **tensors: Tensor) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})


def nest(folder: Path, outer: bool, inner: bool) -> None:
    """Make it a Qwen3_5ForConditionalGeneration with the flag outside and inside of the text config."""
    text = json.loads((folder / "config.json").read_text())
    text |= {"tie_word_embeddings": inner}
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
        "tie_word_embeddings": outer,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    file = folder / "model.safetensors"
    renamed = {name.replace("model.", "model.language_model.", 1): t for name, t in load_file(file).items()}
    save_file(renamed, file, metadata={"format": "pt"})


def answer(folder: Path) -> tuple[int, ...]:
    with LLM(model=str(folder), dtype="float32", device="cpu", speculative_algorithm="none") as llm:
        return llm.generate([PROMPT], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))[0].token_ids


def transformers_answer(folder: Path) -> tuple[int, ...]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    output = model.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False, pad_token_id=0)
    return tuple(output[0, len(PROMPT) :].tolist())


def test_tied_means_the_embedding(tied: Path) -> None:
    assert answer(tied) == transformers_answer(tied)


def test_a_stored_head_that_differs_is_meant(tied: Path) -> None:
    plain = answer(tied)
    embedding = load_file(tied / "model.safetensors")["model.embed_tokens.weight"]
    change(tied, **{"lm_head.weight": embedding.flip(0).contiguous()})
    assert answer(tied) == transformers_answer(tied) != plain


def test_a_stored_copy_is_not_kept_twice(tied: Path) -> None:
    def parameters() -> int:
        with LLM(model=str(tied), dtype="float32", device="cpu", speculative_algorithm="none") as llm:
            return llm.engine.model.num_parameters

    before, expected = parameters(), answer(tied)
    embedding = load_file(tied / "model.safetensors")["model.embed_tokens.weight"]
    change(tied, **{"lm_head.weight": embedding.clone()})
    assert parameters() == before
    assert answer(tied) == expected


@pytest.mark.parametrize(("outer", "inner"), [(True, False), (False, True), (True, True)])
def test_either_place_of_the_flag(tied: Path, outer: bool, inner: bool) -> None:
    expected = answer(tied)
    nest(tied, outer, inner)
    assert answer(tied) == expected


def test_no_flag_and_no_head(tied: Path) -> None:
    nest(tied, outer=False, inner=False)
    with pytest.raises(CheckpointError, match=r"lacks the tensor lm_head\.weight"):
        answer(tied)
