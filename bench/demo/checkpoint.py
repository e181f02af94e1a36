"""A demo model on disk, in Hugging Face layout, and other models that share the demo's tokenizer."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedModel, Qwen3_5ForCausalLM

from specmamba.bench.demo.model import DemoModel, MTPHead
from specmamba.bench.demo.talks.talk import TEMPLATE
from specmamba.config import DEMO_MODEL
from specmamba.errors import CheckpointError, ConfigError
from specmamba.train.corpus import Corpus, Document

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END_OF_TEXT = 0  # id of the first special token; separates documents
END_OF_TURN = 2  # ends each message of a conversation
# a line break with its indentation, a name with a space before it, single digits, spaces, other signs
PRE_TOKEN = r"\n[ ]*|[ ]?[A-Za-z_]+|\d|[ ]+|[ ]?[^\sA-Za-z_\d]+"
TOKENIZER_SHARE = 3  # the tokenizer is trained on every third document
_ENCODE_BATCH = 256  # documents


@dataclass(frozen=True)
class TokenData:
    """The encoded corpus. Documents follow each other in one stream, an end-of-text token after each."""

    tokenizer: Tokenizer
    train: Tensor  # [num_train_tokens] int16
    held_out: Tensor  # [num_held_out_tokens] int16
    held_out_bytes: int  # UTF-8 bytes of the held-out documents
    digest: str  # of corpus, tokenizer and seed


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer, which can encode any text without loss."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PRE_TOKEN), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer(file: Path, vocab_size: int) -> Tokenizer:
    """Read a tokenizer; ConfigError if it cannot be read or has more tokens than the model."""
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
        raise ConfigError(f"--tokenizer: {file} is no tokenizer.json: {error}") from None
    if tokenizer.get_vocab_size() > vocab_size:
        raise ConfigError(f"--tokenizer: {tokenizer.get_vocab_size()} tokens, but the model has only {vocab_size}")
    return tokenizer


def prepare(corpus: Corpus, tokenizer: Tokenizer, seed: int, cache: Path | None = None) -> TokenData:
    """Encode the corpus, documents shuffled by the seed; a cache file with the same digest is read instead."""
    digest = hashlib.sha256(f"{corpus.digest}\0{tokenizer.to_str()}\0{seed}".encode()).hexdigest()
    streams = _read_cache(cache, digest)
    if streams is None:
        shuffled = list(corpus.train)
        random.Random(seed).shuffle(shuffled)
        streams = {"train": encode(tokenizer, shuffled), "held_out": encode(tokenizer, corpus.held_out)}
        if cache is not None:
            partial = cache.with_suffix(".partial")
            save_file(streams, partial, metadata={"digest": digest})
            os.replace(partial, cache)
    return TokenData(tokenizer, streams["train"], streams["held_out"], _num_bytes(corpus.held_out), digest)


def held_out_data(corpus: Corpus, tokenizer: Tokenizer) -> TokenData:
    """Encode the held-out documents only, for an evaluation; the training stream is empty."""
    empty = torch.empty(0, dtype=torch.int16)
    return TokenData(tokenizer, empty, encode(tokenizer, corpus.held_out), _num_bytes(corpus.held_out), digest="")


def encode(tokenizer: Tokenizer, documents: Sequence[Document]) -> Tensor:
    """Encode documents into one stream ``[num_tokens]`` int16, an end-of-text token after each document."""
    parts: list[Tensor] = []
    for start in range(0, len(documents), _ENCODE_BATCH):
        texts = [document.text for document in documents[start : start + _ENCODE_BATCH]]
        encodings = tokenizer.encode_batch(texts)
        parts.extend(torch.tensor([*encoding.ids, END_OF_TEXT], dtype=torch.int16) for encoding in encodings)
    return torch.cat(parts)


def _num_bytes(documents: Sequence[Document]) -> int:
    return sum(len(document.text.encode()) for document in documents)


def _read_cache(cache: Path | None, digest: str) -> dict[str, Tensor] | None:
    if cache is None or not cache.is_file():
        return None
    try:
        with safe_open(cache, "pt") as file:
            if (file.metadata() or {}).get("digest") != digest:
                return None
            return {name: file.get_tensor(name) for name in ("train", "held_out")}
    except SafetensorError:
        return None  # a damaged cache is made again


class WindowSampler:
    """Windows at random offsets of a stream. Its generator is the only randomness of training after the start."""

    def __init__(self, stream: Tensor, seq: int, batch: int, seed: int) -> None:
        if len(stream) < seq:
            raise ConfigError(f"--seq: the training text has {len(stream)} tokens, fewer than one sequence of {seq}")
        self._stream, self.seq, self.batch = stream, seq, batch
        self.generator = torch.Generator().manual_seed(seed)

    def next(self) -> Tensor:
        """Draw windows: ``[batch, seq]`` int64."""
        offsets = torch.randint(len(self._stream) - self.seq + 1, (self.batch, 1), generator=self.generator)
        return self._stream[offsets + torch.arange(self.seq)].long()


def spaced_windows(stream: Tensor, seq: int, count: int) -> Tensor:
    """Choose at most ``count`` evenly spaced windows that do not overlap: ``[num_windows, seq]`` int64."""
    available = len(stream) // seq
    if available == 0:
        raise ConfigError(f"--seq: the held-out text has {len(stream)} tokens, fewer than one sequence of {seq}")
    chosen = torch.linspace(0, available - 1, min(count, available)).round().long()
    return stream[: available * seq].view(available, seq)[chosen].long()


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def write_checkpoint(folder: Path, model: DemoModel, tokenizer: Tokenizer, *, chats: bool = False) -> None:
    """Write configs, weights (bf16) and tokenizer files; of a model that chats also the chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model.target.config
    description = {
        **config.to_dict(),
        "_name_or_path": "",  # a folder of this machine, where the weights are another checkpoint's
        "architectures": ["Qwen3_5ForCausalLM"],
        "dtype": "bfloat16",
        "mtp_num_hidden_layers": 1,
    }
    special = {"eos_token": SPECIAL_TOKENS[END_OF_TEXT], "pad_token": SPECIAL_TOKENS[END_OF_TEXT]}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "model_max_length": config.max_position_embeddings,
    }
    weights = save(checkpoint_tensors(model), metadata={"format": "pt"})
    (folder / "model.safetensors").write_bytes(weights)  # save_file would make it readable by its owner only
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "config.json", description)
    ends = [END_OF_TEXT, END_OF_TURN] if chats else END_OF_TEXT
    write_json(folder / "generation_config.json", {"eos_token_id": ends, "pad_token_id": END_OF_TEXT})
    write_json(folder / "tokenizer_config.json", tokenizer_config)
    if chats:
        shutil.copy(TEMPLATE, folder / TEMPLATE.name)


def checkpoint_tensors(model: DemoModel) -> dict[str, Tensor]:
    """The tensors by their published names; the tied output head is left out, A_log stays fp32."""
    named = {name: tensor for name, tensor in model.target.state_dict().items() if name != "lm_head.weight"}
    named |= {f"mtp.{name}": tensor for name, tensor in model.mtp.state_dict().items()}
    return {
        name: tensor.detach().to("cpu", torch.float32 if name.endswith(".A_log") else torch.bfloat16).contiguous()
        for name, tensor in named.items()
    }


def read_checkpoint(folder: Path) -> DemoModel:
    """Read a model in fp32, ready to evaluate.

    Raises:
        CheckpointError: files are missing or damaged, or there is no MTP head.
    """
    try:
        tensors = load_file(folder / "model.safetensors")
        target = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"{folder} is no readable checkpoint: {error}") from None
    mtp = MTPHead(target.config).float()
    weights = {name.removeprefix("mtp."): tensor for name, tensor in tensors.items() if name.startswith("mtp.")}
    try:
        mtp.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(f"{folder} has no usable MTP head: {error}") from None
    return DemoModel(target, mtp).eval()


def write_json(file: Path, value: object) -> None:
    """Write a value as indented JSON."""
    file.write_text(json.dumps(value, indent=2) + "\n", "utf8")


def save_with_demo_tokenizer(model: PreTrainedModel, folder: Path, dtype: str) -> None:
    """Write a model in Hugging Face layout; its config says ``dtype``."""
    model.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text("utf8")) | {"dtype": dtype}, indent=2) + "\n", "utf8")
    copy_demo_tokenizer(folder)


def copy_demo_tokenizer(folder: Path) -> None:
    """Put the demo's tokenizer into a checkpoint's folder."""
    for name in TOKENIZER_FILES:
        shutil.copy(DEMO_MODEL / name, folder / name)
