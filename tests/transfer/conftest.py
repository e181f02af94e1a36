"""Shared by the tests of handoffs: a prompt of the demo."""

from __future__ import annotations

import json

import pytest

from specmamba.config import DEMO_MODEL
from specmamba.models.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def texts() -> list[tuple[int, ...]]:
    """Prompts of 120 tokens."""
    tokenizer = Tokenizer(DEMO_MODEL)
    lines = (DEMO_MODEL / "prompts.jsonl").read_text("utf8").splitlines()
    found = [tuple(tokenizer.encode(json.loads(line)["prompt"])) for line in lines]
    return [text[:120] for text in found if len(text) > 120]
