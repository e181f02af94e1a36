"""What loading a checkpoint takes, in a process that does nothing else: the child of ``bench.load``."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from specmamba.checkpoints.checkpoint import resolve_checkpoint
from specmamba.config import EngineConfig
from specmamba.engine.loading import load_models, resolve_device
from specmamba.kernels.native import library


def load_here() -> None:
    """The child: load the model of the flags on standard input, and print what it took."""
    config = EngineConfig.model_validate_json(sys.stdin.read())
    device = resolve_device(config.device)
    folder = resolve_checkpoint(config.model_path, config.revision)
    library.preload()
    with torch.inference_mode():
        load_models(folder, config, device, only_shapes=True)  # imports what loading needs
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        before, began = _resident("VmRSS"), time.perf_counter()
        models = load_models(folder, config, device)
        seconds = time.perf_counter() - began
    taken = _resident("VmHWM") - before
    print(json.dumps({"seconds": seconds, "peak_bytes": taken, "weight_bytes": models.weight_bytes}))


def _resident(name: str) -> int:
    """A figure of this process in bytes: VmRSS now, VmHWM at the most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024
