"""Checkpoints of other models that speak the demo's tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from specmamba.config import DEMO_MODEL

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


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
