"""The supported architectures by name, and the loading of a checkpoint by its architecture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from specmamba.checkpoints.assumed_reader import AssumedReader
from specmamba.checkpoints.checkpoint import read_config, read_eos_token_ids, text_config
from specmamba.checkpoints.files import GGUF_FILE, is_bare
from specmamba.checkpoints.tensor_reader import ShapeReader, TensorReader
from specmamba.errors import ConfigError, UnsupportedModelError
from specmamba.models import (
    bailing_hybrid,
    bamba,
    falcon_h1,
    granite_hybrid,
    kimi_linear,
    lfm2,
    mamba1_family,
    mamba2_family,
    nemotron_h,
    olmo_hybrid,
    qwen,
)
from specmamba.models.base import LoadedModel, LoadOptions

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Builds a model from a checkpoint's text config and tensors; raises CheckpointError and UnsupportedModelError.
Loader = Callable[["PretrainedConfig", TensorReader, LoadOptions], LoadedModel]


@dataclass(frozen=True, slots=True)
class Family:
    """How to load one architecture: ``renames`` map stored tensor prefixes to the ones the loader asks for."""

    load: Loader
    renames: tuple[tuple[str, str], ...]


ARCHITECTURES = {
    "BailingHybridForCausalLM": Family(bailing_hybrid.load, bailing_hybrid.RENAMES),
    "BailingMoeV3ForCausalLM": Family(bailing_hybrid.load, bailing_hybrid.RENAMES),
    "BambaForCausalLM": Family(bamba.load, bamba.RENAMES),
    "FalconH1ForCausalLM": Family(falcon_h1.load, falcon_h1.RENAMES),
    "FalconMambaForCausalLM": Family(mamba1_family.load_falcon, mamba1_family.RENAMES),
    "GraniteMoeHybridForCausalLM": Family(granite_hybrid.load, granite_hybrid.RENAMES),
    "JambaForCausalLM": Family(mamba1_family.load_jamba, ()),
    "KimiLinearForCausalLM": Family(kimi_linear.load, kimi_linear.RENAMES),
    "Lfm2ForCausalLM": Family(lfm2.load, lfm2.RENAMES),
    "Lfm2MoeForCausalLM": Family(lfm2.load_moe, lfm2.RENAMES),
    "Lfm3ForCausalLM": Family(lfm2.load_lfm3, lfm2.RENAMES),
    "MambaForCausalLM": Family(mamba1_family.load, mamba1_family.RENAMES),
    "Mamba2ForCausalLM": Family(mamba2_family.load, mamba2_family.RENAMES),
    "NemotronHForCausalLM": Family(nemotron_h.load, nemotron_h.RENAMES),
    "OlmoHybridForCausalLM": Family(olmo_hybrid.load, olmo_hybrid.RENAMES),
    "Qwen3_5ForCausalLM": Family(qwen.load, qwen.RENAMES),
    "Qwen3_5ForConditionalGeneration": Family(qwen.load, qwen.RENAMES),
    "Qwen3_5MoeForCausalLM": Family(qwen.load_moe, qwen.RENAMES),
    "Qwen3_5MoeForConditionalGeneration": Family(qwen.load_moe, qwen.RENAMES),
    "Qwen3NextForCausalLM": Family(qwen.load_next, ()),
}


# Families whose layers take the part of a rank where they are made. Any other one would compute with whole layers.
DIVIDED: frozenset[Loader] = frozenset(
    {
        bailing_hybrid.load,
        bamba.load,
        falcon_h1.load,
        granite_hybrid.load,
        kimi_linear.load,
        lfm2.load,
        lfm2.load_moe,
        lfm2.load_lfm3,
        mamba1_family.load,
        mamba1_family.load_falcon,
        mamba1_family.load_jamba,
        mamba2_family.load,
        nemotron_h.load,
        olmo_hybrid.load,
        qwen.load,
        qwen.load_moe,
        qwen.load_next,
    }
)


def load_model(folder: Path, options: LoadOptions) -> LoadedModel:
    """Load the checkpoint in ``folder``.

    Raises:
        CheckpointError: it is incomplete, damaged or inconsistent.
        UnsupportedModelError: there is no model for its architecture, or none that several ranks can share.
        ConfigError: the model cannot be divided among so many ranks.
    """
    config, architecture = read_config(folder, tuple(ARCHITECTURES))
    family = ARCHITECTURES[architecture]
    if options.ranks.size > 1 and family.load not in DIVIDED:
        raise UnsupportedModelError(
            f"--tp-size {options.ranks.size}: {architecture} cannot be divided among ranks: leave it out"
        )
    text = text_config(config)
    # A multimodal config has this field for the whole model, and its text part may lack it.
    text.tie_word_embeddings = text.tie_word_embeddings or config.tie_word_embeddings
    with _open_reader(folder, family, config, options.device.type != "meta") as reader:
        loaded = family.load(text, reader, options)
        stored = reader.report()
    return replace(loaded, architecture=architecture, eos_token_ids=read_eos_token_ids(folder, config), stored=stored)


def _open_reader(folder: Path, family: Family, config: PretrainedConfig, has_values: bool) -> TensorReader:
    """Open the tensors of a checkpoint, by the names that the family's loader asks for."""
    text = text_config(config)
    if (folder / GGUF_FILE).exists():
        from specmamba.checkpoints.gguf.gguf_reader import GgufReader

        return GgufReader(folder / GGUF_FILE, text, has_values)
    if not has_values and is_bare(folder):
        return AssumedReader(folder, text, _resolve_dtype("auto", config))
    return (TensorReader if has_values else ShapeReader)(folder, family.renames)


def choose_dtype(folder: Path, name: str) -> torch.dtype:
    """The dtype of weights and activations for a checkpoint and the ``dtype`` of ``EngineConfig``.

    Raises:
        CheckpointError, UnsupportedModelError: as for ``load_model``.
        ConfigError: ``auto``, and the checkpoint names none that is supported.
    """
    config, _ = read_config(folder, tuple(ARCHITECTURES))
    return _resolve_dtype(name, config)


def _resolve_dtype(name: str, config: PretrainedConfig) -> torch.dtype:
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
    dtype = getattr(text_config(config), "dtype", None) or getattr(config, "dtype", None) or torch.float32
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(f"the checkpoint's dtype {dtype} is not supported: choose --dtype float32 or bfloat16")
    return dtype
