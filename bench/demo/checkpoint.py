"""A demo model on disk, in Hugging Face layout, and other models that share the demo's tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel, Qwen3_5ForCausalLM

from specmamba.bench.demo.model import DemoModel, MTPHead
from specmamba.bench.demo.tokens import END_OF_TEXT, SPECIAL_TOKENS
from specmamba.config import DEMO_MODEL
from specmamba.errors import CheckpointError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def write_checkpoint(folder: Path, model: DemoModel, tokenizer: Tokenizer) -> None:
    """Write configs, weights (bf16) and tokenizer files."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model.target.config
    description = {
        **config.to_dict(),
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
    write_json(folder / "generation_config.json", {"eos_token_id": END_OF_TEXT, "pad_token_id": END_OF_TEXT})
    write_json(folder / "tokenizer_config.json", tokenizer_config)


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
