"""Shared by the tiny checkpoints of all families: large random weights, and the files of a folder."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.tiny import write_config


def write_checkpoint(folder: Path, model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Give a model random weights and write it, in the layout of published checkpoints, with the demo's tokenizer.

    Returns:
        The model, which computes with these weights.
    """
    randomize(model, torch.Generator().manual_seed(seed))
    model = model.float().eval()
    model.save_pretrained(folder)
    write_config(folder, model.config, type(model).__name__)
    return model


@torch.no_grad()
def randomize(model: nn.Module, generator: torch.Generator) -> None:
    """Weights large enough that every part shows in the logits, and states that remember; chosen by parameter name.

    The start that transformers gives is of no use here: logits are nearly uniform, biases 0, norms 1.
    """
    for name, parameter in model.named_parameters():
        parameter.copy_(_random(name, parameter.shape, generator))


def _random(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    def uniform(low: float, high: float) -> Tensor:
        return torch.rand(shape, generator=generator) * (high - low) + low

    def normal(std: float) -> Tensor:
        return torch.randn(shape, generator=generator) * std

    if name.endswith("A_log"):
        return uniform(math.log(0.05), math.log(8.0))
    if name.endswith(("dt_bias", "dt_proj.bias")):
        return uniform(-5.0, -0.5)  # softplus: time steps of 0.007 to 0.5, at an input of 0
    if name.endswith(".D"):
        return uniform(0.5, 1.5)
    if name.endswith("conv1d.weight"):
        return normal(0.6)
    if name.endswith("bias"):
        return normal(0.3)
    if len(shape) == 1:  # of a norm; with signs, else a tied head would see little but the last token
        return uniform(0.5, 1.5) * (torch.rand(shape, generator=generator) - 0.5).sign()
    if "embed" in name:
        return normal(0.4)
    return normal(1.5 / math.sqrt(shape[-1]))
