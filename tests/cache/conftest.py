"""Shared by the tests of the cache: the prompts of the demo."""

from __future__ import annotations

import json

import pytest

from specmamba.config import DEMO_MODEL
from specmamba.models.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    """All of them, as tokens."""
    tokenizer = Tokenizer(DEMO_MODEL)
    lines = (DEMO_MODEL / "prompts.jsonl").read_text("utf8").splitlines()
    return [tuple(tokenizer.encode(json.loads(line)["prompt"])) for line in lines]
