"""The KV layers of a target, behind which those of a head lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specmamba import LLM
from specmamba.models.hybrid import num_attention_layers
from tests.families import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_all_layers_with_keys_are_counted(family: str, tmp_path: Path) -> None:
    """Also those that run beside a recurrent layer: a head clears its own entries where it has skipped steps."""
    FAMILIES[family].build(tmp_path, seed=0)
    flags: dict[str, Any] = {"context_length": 64, "max_total_tokens": 128, "max_running_requests": 1}
    with LLM(model=str(tmp_path), speculative_algorithm="none", **flags) as llm:
        target = llm.engine.model
        assert num_attention_layers(target.target) == target.cache_shape.num_kv_layers
