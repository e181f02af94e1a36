"""GGUF files of LFM2: the tensors and the text of the checkpoint, its tokenizer, and files that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

from specmamba import LLM, SamplingParams
from specmamba.checkpoints.checkpoint import resolve_checkpoint
from specmamba.checkpoints.gguf import gguf_folder
from specmamba.checkpoints.gguf.gguf_reader import GgufReader
from specmamba.errors import CheckpointError
from tests.families import lfm2
from tests.gguf_files import TypeOf, name_of, write_gguf

F32, Q8_0 = GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0
SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 144,
    "block_multiple_of": 32,
    "num_attention_heads": 4,
}
PROMPTS = ([5, 9, 200, 31, 77], [1000, 3, 2, 8, 8, 8, 90])
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder whose matrices have rows of whole blocks, and the model in transformers."""
    folder = tmp_path_factory.mktemp("lfm2") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(lfm2.VARIANTS, "blocks", SIZES)
        return folder, lfm2.build(folder, "blocks", seed=3)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_folder, "cache_folder", lambda: tmp_path / "cache")


def stored_as(kind: GGMLQuantizationType) -> TypeOf:
    """As llama.cpp quantizes: all matrices but the kernels of convolutions."""
    return lambda name, _: F32 if "shortconv.conv" in name else kind


def texts(model: Path, **flags: Any) -> list[list[int]]:
    with LLM(model=str(model), dtype="float32", max_running_requests=2, **flags) as llm:
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
        return [list(output.token_ids) for output in llm.generate([list(p) for p in PROMPTS], params)]


@torch.no_grad()
def greedy(reference: Any, prompt: list[int]) -> list[int]:
    """By transformers, without a cache."""
    tokens = list(prompt)
    for _ in range(NUM_TOKENS):
        tokens.append(int(reference(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_text_is_that_of_transformers(checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    """Plain and with n-grams, of the file and of the folder that it was made from."""
    folder, reference = checkpoint
    want = [greedy(reference, list(prompt)) for prompt in PROMPTS]
    file = write_gguf(folder, tmp_path / "lfm2.gguf")
    assert texts(folder, speculative_algorithm="none") == want
    for algorithm in ("none", "ngram"):
        assert texts(file, speculative_algorithm=algorithm) == want


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q8_0"])
def test_tensors(checkpoint: tuple[Path, Any], tmp_path: Path, kind: str) -> None:
    """Every tensor is what the file holds, by the format's own library; matrices of blocks stay in their codes."""
    folder, number = checkpoint[0], GGMLQuantizationType[kind]
    file = write_gguf(folder, tmp_path / "lfm2.gguf", stored_as(number))
    stored = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
    config = AutoConfig.from_pretrained(resolve_checkpoint(str(file), None))
    with GgufReader(file, config) as reader, GgufReader(file, config, has_values=False) as shapes:
        for name, original in load_file(folder / "model.safetensors").items():
            tensor = stored[name_of(name, config.num_hidden_layers)]
            want = torch.tensor(dequantize(tensor.data, tensor.tensor_type)).view(original.shape)
            found = reader.take(name, tuple(original.shape)).float()
            assert torch.equal(found, want)
            if kind == "F32":
                assert torch.equal(found, original)
            assert reader.is_coded(name) == (kind.startswith("Q") and original.dim() == 2)
            assert shapes.take(name, tuple(original.shape)).shape == original.shape
        reader.finish()


def test_config_is_that_of_the_checkpoint(checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    """But for the width of the feed-forward layers, which the file gives adjusted."""
    folder = checkpoint[0]
    made = AutoConfig.from_pretrained(resolve_checkpoint(str(write_gguf(folder, tmp_path / "lfm2.gguf")), None))
    original = AutoConfig.from_pretrained(folder)
    sizes = "vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "conv_L_cache"
    for name in (*sizes, "layer_types", "tie_word_embeddings", "max_position_embeddings"):
        assert getattr(made, name) == getattr(original, name), name
    assert made.norm_eps == pytest.approx(original.norm_eps)
    assert (made.intermediate_size, made.block_auto_adjust_ff_dim, made.conv_bias) == (96, False, False)


def test_tokenizer_is_that_of_the_checkpoint(checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    """The vocabulary and the merges; how text is split first is LFM2's way, whatever the folder does."""
    folder = checkpoint[0]
    made = resolve_checkpoint(str(write_gguf(folder, tmp_path / "lfm2.gguf")), None)
    tokenizer, original = (AutoTokenizer.from_pretrained(x) for x in (made, folder))
    assert tokenizer.get_vocab() == original.get_vocab()
    text = "def main():\n    return [1, 2]"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("import os") == original.encode("import os")


def test_text_of_codes_is_the_same_with_drafts(checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    file = write_gguf(checkpoint[0], tmp_path / "lfm2.gguf", stored_as(Q8_0))
    plain, drafted = (texts(file, speculative_algorithm=algorithm) for algorithm in ("none", "ngram"))
    assert drafted == plain


@pytest.mark.parametrize("name", ["blk.1.shortconv.conv.weight", "blk.2.attn_q_norm.weight", "token_embd_norm.weight"])
def test_missing_tensors_are_named(checkpoint: tuple[Path, Any], tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in checkpoint[0].iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    missing = next(ours for ours in tensors if name_of(ours, layers) == name)
    from safetensors.torch import save_file

    save_file({ours: x for ours, x in tensors.items() if ours != missing}, folder / "model.safetensors")
    file = write_gguf(folder, tmp_path / "lfm2.gguf")
    with pytest.raises(CheckpointError, match=missing.replace(".", r"\.")):
        texts(file, speculative_algorithm="none")
