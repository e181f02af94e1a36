"""A warning where no draft is accepted: the text is right then, and as slow as plain decoding."""

from __future__ import annotations

import logging

from specmamba.config import WEIGHTLESS

logger = logging.getLogger("specmamba")

NUM_DRAFTS = 200


class AcceptanceWatch:
    """Watches the first drafts of an engine. Heads that were loaded wrongly, or are another model's, show in them."""

    def __init__(self, algorithm: str) -> None:
        """algorithm: of the drafts. Texts are not watched: they may never match."""
        self._algorithm = algorithm
        self._num_left = 0 if algorithm in WEIGHTLESS else NUM_DRAFTS

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Count the draft of a request in one step, and warn at the last one that is watched."""
        if not self._num_left or not num_drafted:
            return
        self._num_left -= 1
        if num_accepted:
            self._num_left = 0
        elif not self._num_left:
            logger.warning(
                "none of the first %d drafts was accepted (acceptance length 1.0): the %s weights may belong to "
                "another model, or be quantized in another way than they were read",
                NUM_DRAFTS,
                self._algorithm,
            )
