"""The warning where no draft is accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specmamba import LLM, SamplingParams
from specmamba.engine.stepping.acceptance_watch import NUM_DRAFTS, AcceptanceWatch
from tests.tiny import write_tiny_checkpoint

WARNING = f"none of the first {NUM_DRAFTS} drafts was accepted (acceptance length 1.0)"


def warned(caplog: pytest.LogCaptureFixture) -> int:
    return sum(WARNING in record.getMessage() for record in caplog.records)


def test_head_that_is_never_right(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A head with scrambled weights is warned about, once."""
    folder = write_tiny_checkpoint(tmp_path, 0, vocab_size=4096)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    torch.manual_seed(0)
    tensors["mtp.norm.weight"] = torch.randn_like(tensors["mtp.norm.weight"]) * 30
    save_file(tensors, file)
    flags: dict[str, Any] = {"speculative_num_steps": 1, "speculative_adaptive": "off"}
    with LLM(model=str(folder), dtype="float32", max_running_requests=4, **flags) as llm:
        params = SamplingParams(max_tokens=130, temperature=0, ignore_eos=True)
        outputs = llm.generate([[i, 3 * i, 7] for i in range(1, 5)], params)
    assert sum(output.spec.num_accepted_tokens for output in outputs) == 0
    assert sum(output.spec.num_drafts for output in outputs) > NUM_DRAFTS
    assert warned(caplog) == 1


@pytest.mark.parametrize("algorithm", ["mtp", "eagle3", "draft-model"])
def test_one_accepted_draft_is_enough(caplog: pytest.LogCaptureFixture, algorithm: str) -> None:
    watch = AcceptanceWatch(algorithm)
    for _ in range(NUM_DRAFTS - 2):
        watch.observe(3, 0)
    watch.observe(0, 0)  # a step without drafts
    watch.observe(3, 1)
    for _ in range(NUM_DRAFTS + 10):
        watch.observe(3, 0)
    assert not warned(caplog)


@pytest.mark.parametrize("algorithm", ["ngram", "none"])
def test_ngrams_may_never_match(caplog: pytest.LogCaptureFixture, algorithm: str) -> None:
    watch = AcceptanceWatch(algorithm)
    for _ in range(NUM_DRAFTS + 10):
        watch.observe(2, 0)
    assert not warned(caplog)
