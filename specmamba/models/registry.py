"""Architectures by name, and the way from a model's name to a model in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from specmamba.errors import ConfigError
from specmamba.models import qwen3_5
from specmamba.models.base import LoadedModel
from specmamba.models.checkpoint import TensorReader, read_config, text_config
from specmamba.models.tokenizer import read_eos_token_ids

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Loader = Callable[["PretrainedConfig", TensorReader, torch.dtype, torch.device, bool], LoadedModel]


@dataclass(frozen=True, slots=True)
class Family:
    """How to load one architecture: ``renames`` map stored tensor prefixes to the ones the loader asks for."""

    load: Loader
    renames: tuple[tuple[str, str], ...]


ARCHITECTURES = {
    "Qwen3_5ForCausalLM": Family(qwen3_5.load, qwen3_5.RENAMES),
    "Qwen3_5ForConditionalGeneration": Family(qwen3_5.load, qwen3_5.RENAMES),
}


def load_model(folder: Path, dtype_name: str, device: torch.device, want_draft_head: bool) -> LoadedModel:
    """Load the checkpoint in ``folder``.

    Raises:
        CheckpointError: it is incomplete, damaged or inconsistent.
        UnsupportedModelError: there is no model for its architecture.
        ConfigError: ``auto`` dtype, and the checkpoint names none that is supported.
    """
    config, architecture = read_config(folder, tuple(ARCHITECTURES))
    family = ARCHITECTURES[architecture]
    dtype = _resolve_dtype(dtype_name, config)
    text = text_config(config)
    # a multimodal config says it for the whole model, and its text part may not repeat it
    text.tie_word_embeddings = text.tie_word_embeddings or config.tie_word_embeddings
    with TensorReader(folder, family.renames) as reader:
        loaded = family.load(text, reader, dtype, device, want_draft_head)
    return replace(loaded, architecture=architecture, eos_token_ids=read_eos_token_ids(folder, config))


def _resolve_dtype(name: str, config: PretrainedConfig) -> torch.dtype:
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
    dtype = getattr(text_config(config), "dtype", None) or getattr(config, "dtype", None) or torch.float32
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(f"the checkpoint's dtype {dtype} is not supported: choose --dtype float32 or bfloat16")
    return dtype
