"""The kinds of drafts that tests of the bundled demo compare: the flags of each."""

from __future__ import annotations

from typing import Any

DRAFTS: dict[str, dict[str, Any]] = {
    "plain": {"speculative_algorithm": "none"},
    "chain": {"speculative_algorithm": "mtp", "speculative_num_steps": 3},
    "tree": {
        "speculative_algorithm": "mtp",
        "speculative_num_steps": 4,
        "speculative_eagle_topk": 4,
        "speculative_num_draft_tokens": 8,
    },
    "ngram": {"speculative_algorithm": "ngram", "speculative_num_steps": 3},
}
