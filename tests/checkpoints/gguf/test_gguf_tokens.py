"""The tokenizer of a GGUF file of Qwen3.5 gives llama.cpp's tokens, and those of transformers' own class.

``data/make_llama_tokens.py`` wrote the texts and llama.cpp's tokens. In one thing the two differ: transformers' class,
with which models are trained, composes characters first (NFC), and llama.cpp does not. There ours is as transformers'.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from unicodedata import normalize

import pytest
from tokenizers import AddedToken
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from specmamba.checkpoints.checkpoint import resolve_checkpoint
from specmamba.checkpoints.gguf import gguf_folder
from specmamba.models.text.tokenizer import Detokenizer, Tokenizer
from tests.checkpoints.data.make_llama_tokens import FILE, gguf_of, tokenizer_of

STORED = json.loads(FILE.read_text())
MERGES = [(first, second) for first, second in (merge.split(" ") for merge in STORED["merges"])]
LLAMA: dict[str, list[int]] = {each["text"]: each["ids"] for each in STORED["texts"]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tokenizer]:
    """As an engine loads it for the file."""
    folder = tmp_path_factory.mktemp("tokens")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_folder, "cache_folder", lambda: folder / "cache")
        yield Tokenizer(resolve_checkpoint(str(gguf_of(MERGES, folder)), None))


def test_tokens_are_those_of_llama_cpp(tokenizer: Tokenizer) -> None:
    composed = [text for text in LLAMA if normalize("NFC", text) == text]
    assert len(composed) > 300
    assert {text: tokenizer.encode(text) for text in composed} == {text: LLAMA[text] for text in composed}


def test_characters_are_composed_first(tokenizer: Tokenizer) -> None:
    """As the model has seen them in training. llama.cpp's tokens of these texts are others."""
    others = [text for text in LLAMA if normalize("NFC", text) != text]
    assert len(others) > 20
    for text in others:
        found = tokenizer.encode(text)
        assert found == LLAMA[normalize("NFC", text)]
        assert found != LLAMA[text]


def test_tokens_are_those_of_transformers(tokenizer: Tokenizer) -> None:
    """The class of Qwen3.5, with this vocabulary."""
    described = tokenizer_of(MERGES)
    theirs = Qwen3_5Tokenizer(described["model"]["vocab"], [tuple(merge) for merge in described["model"]["merges"]])
    for token in described["added_tokens"]:
        added = AddedToken(token["content"], normalized=False, special=token["special"])
        theirs.add_tokens([added], special_tokens=token["special"])
    for text in LLAMA:
        assert tokenizer.encode(text) == theirs.encode(text), text


def test_texts_come_back(tokenizer: Tokenizer) -> None:
    """Whole, and token by token; special tokens are text where they are asked for."""
    for text in LLAMA:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == normalize("NFC", text)
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
        assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == normalize("NFC", text)


def test_kinds_of_added_tokens(tokenizer: Tokenizer) -> None:
    """Control tokens are left out of answers; those that users define are a part of them."""
    ids = tokenizer.encode("<|im_start|>a<think>b</think><|im_end|>")
    assert len(ids) == 6
    assert tokenizer.decode(ids) == "a<think>b</think>"
