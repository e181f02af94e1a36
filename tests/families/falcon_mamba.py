"""Tiny FalconMamba checkpoints: Mamba1 layers alone."""

from pathlib import Path

from transformers import FalconMambaConfig, FalconMambaForCausalLM

from tests.families.checkpoints import write_checkpoint
from tests.families.mamba1 import DEFAULTS, VARIANTS

HAS_MTP = False


def build(folder: Path, variant: str = "default", seed: int = 0) -> FalconMambaForCausalLM:
    """Write the checkpoint; the same model in transformers, float32."""
    return write_checkpoint(folder, FalconMambaForCausalLM(FalconMambaConfig(**DEFAULTS | VARIANTS[variant])), seed)
