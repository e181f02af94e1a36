"""What a rank holds of a model is what plans say of it, with weights, without values, and with a config alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from specmamba.models.base import LoadedModel, LoadOptions
from specmamba.models.registry import load_model
from specmamba.parallel.ranks import Ranks
from tests.models.test_weight_bytes import held_bytes
from tests.parallel.even_variants import build_variant

# Variants of every kind of mixer that two ranks can divide.
VARIANTS = {
    "bailing-hybrid": "even-unbounded",
    "bamba": "even-default",
    "falcon-mamba": "biased-tied",
    "jamba": "even-default",
    "kimi-linear": "even-default",
    "lfm2": "default",
    "lfm3": "biased-tied",
    "mamba1": "default",
    "mamba2": "default",
    "qwen3.5-moe": "default",
}


def load(folder: Path, device: str, ranks: Ranks) -> LoadedModel:
    return load_model(folder, LoadOptions(torch.bfloat16, torch.device(device), want_draft_head=True, ranks=ranks))


@pytest.mark.fast_cases("jamba", "kimi")
@pytest.mark.parametrize("family", sorted(VARIANTS))
def test_bytes_of_a_rank(family: str, tmp_path: Path) -> None:
    build_variant(tmp_path / "whole", family, VARIANTS[family])
    (tmp_path / "bare").mkdir()
    shutil.copy(tmp_path / "whole" / "config.json", tmp_path / "bare")
    alone = load(tmp_path / "whole", "meta", Ranks())
    for rank in range(2):
        ranks = Ranks(rank, 2)
        loaded = load(tmp_path / "whole", "cpu", ranks)
        assert loaded.weight_bytes == held_bytes(loaded) < alone.weight_bytes
        for name in ("whole", "bare"):
            planned = load(tmp_path / name, "meta", ranks)
            assert planned.weight_bytes == loaded.weight_bytes
            assert planned.num_parameters == alone.num_parameters
            assert planned.cache_shape == loaded.cache_shape
        slot = alone.cache_shape.state_bytes_per_slot - alone.cache_shape.draft_features * 2
        own = loaded.cache_shape.state_bytes_per_slot - loaded.cache_shape.draft_features * 2
        assert slot / 2 <= own < slot  # groups of Mamba2 may be on both ranks
