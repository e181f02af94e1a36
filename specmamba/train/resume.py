"""The state of an unfinished run on disk: tensors in safetensors, the rest in JSON, nothing that could run code.

``state.json`` names the tensor file and its checksum and is replaced last, so a run killed while saving leaves the
state before it.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from specmamba.errors import CheckpointError, ConfigError


@dataclass
class Progress:
    """How far a run is. Owned by the trainer."""

    step: int = 0  # optimizer steps done
    elapsed: float = 0.0  # seconds spent in them, over all runs
    smoothed: list[float] | None = None  # moving averages of the losses, nats per token


def save_state(
    folder: Path,
    progress: Progress,
    identity: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
) -> None:
    """``identity``: what a resumed run must have in common with this one (recipe, corpus digest), as JSON values."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    for index, slots in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{slot}": value for slot, value in slots.items()}
    tensors["rng.sampler"] = generator.get_state()
    file = folder / f"step-{progress.step:08d}.safetensors"
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, file)
    state = {"tensors": file.name, "sha256": _sha256(file), "progress": asdict(progress), "identity": identity}
    partial = folder / "state.json.partial"
    partial.write_text(json.dumps(state, indent=2) + "\n", "utf8")
    os.replace(partial, folder / "state.json")
    for old in folder.glob("step-*.safetensors"):
        if old != file:
            old.unlink()


def load_state(
    folder: Path,
    identity: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
) -> Progress | None:
    """Restore everything in place; None where no state was saved.

    Raises:
        CheckpointError: the state is damaged.
        ConfigError: it belongs to a run with other settings or another corpus.
    """
    if not (folder / "state.json").exists():
        return None
    try:
        state = json.loads((folder / "state.json").read_text("utf8"))
        file, progress = folder / state["tensors"], Progress(**state["progress"])
        _check_identity(folder, state["identity"], identity)
        if _sha256(file) != state["sha256"]:
            raise ValueError(f"the checksum of {file.name} is wrong")
        _restore(load_file(file), model, optimizer, generator)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            f"the state in {folder} is damaged ({error}): delete that folder to train from the start"
        ) from None
    return progress


def _check_identity(folder: Path, saved: dict[str, Any], current: dict[str, Any]) -> None:
    changed = [
        f"{name} was {saved.get(name)!r} and is {value!r}"
        for name, value in current.items()
        if saved.get(name) != value
    ]
    if changed:
        raise ConfigError(
            f"the run in {folder} cannot be resumed with other settings: {'; '.join(changed)}. "
            "Set them back, or train into another --out"
        )


def _restore(
    tensors: dict[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer, generator: torch.Generator
) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            saved = tensors[f"model.{name}"]
            if saved.shape != parameter.shape:
                raise ValueError(f"{name} has the shape {tuple(saved.shape)}, not {tuple(parameter.shape)}")
            parameter.copy_(saved)
    slots: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, index, slot = name.split(".")
            slots.setdefault(int(index), {})[slot] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": slots})
    generator.set_state(tensors["rng.sampler"])


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
