"""Checkpoints that are nearly another one: drafts that are mostly right."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def add_noise(source: Path, folder: Path, amount: float) -> None:
    """A copy of a checkpoint whose weights are off by ``amount`` of their spread."""
    shutil.copytree(source, folder)
    generator = torch.Generator().manual_seed(7)
    tensors = load_file(source / "model.safetensors")
    noisy = {
        name: x + amount * x.std(correction=0) * torch.randn(x.shape, generator=generator)
        for name, x in tensors.items()
    }
    save_file(noisy, folder / "model.safetensors", {"format": "pt"})
