"""Output matrices of draft heads over a part of the target's vocabulary, and the tokens that their rows belong to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from specmamba.checkpoints.tensor_reader import TensorReader
from specmamba.errors import CheckpointError, ConfigError

DRAFT_IDS = "d2t"
INTEGER_TYPES = ("I64", "I32")


class OfHead(Protocol):
    """The weights of a draft head, as reading its vocabulary needs them."""

    config: Any
    reader: TensorReader
    options: Any
    folder: Path

    def keep_instead(self, kept: Tensor, *taken: Tensor) -> Tensor:
        """Count the bytes of a tensor; gives it."""


class DraftVocabulary:
    """Logits over the target's vocabulary, from those of a head that drafts some of its tokens."""

    def __init__(self, logits: Callable[[Tensor], Tensor], target_ids: Tensor | None, vocab_size: int) -> None:
        """Put the two together.

        Args:
            logits: [..., H'] -> [..., draft vocabulary].
            target_ids: [draft vocabulary] int64, the target's token of each; None: row i is token i.
            vocab_size: V, of the target.
        """
        self._logits, self._target_ids, self._vocab_size = logits, target_ids, vocab_size

    def __call__(self, hidden: Tensor) -> Tensor:
        """[..., H'] -> [..., V], -inf for tokens that are never drafted."""
        logits = self._logits(hidden)
        if self._target_ids is None:
            return logits
        impossible = logits.new_full((*logits.shape[:-1], self._vocab_size), -torch.inf)
        return impossible.index_copy_(-1, self._target_ids, logits)


def read_draft_vocabulary(weights: OfHead, vocab_size: int) -> tuple[int, Tensor | None]:
    """How many tokens a head drafts, and the target's token of each: [draft vocabulary] int64.

    None as tokens: token i is the target's token i.

    Raises:
        CheckpointError: it is not said which tokens, or the tensor that says it is damaged.
        ConfigError: a token is not in the target's vocabulary.
    """
    size = getattr(weights.config, "draft_vocab_size", None) or vocab_size
    ids = _read_target_ids(weights, size, vocab_size) if weights.reader.has(DRAFT_IDS) else None
    if ids is None and size != vocab_size:
        raise CheckpointError(
            f"{weights.folder} drafts {size} of {vocab_size} tokens, but has no tensor {DRAFT_IDS} that says which"
        )
    return size, ids


def _read_target_ids(weights: OfHead, size: int, vocab_size: int) -> Tensor | None:
    """The target's token i + d2t[i] for every draft token i: [size] int64; None where all of them are i.

    Raises:
        CheckpointError: the tensor has another shape or type, cannot be read, or maps two draft tokens to one token.
        ConfigError: a token is not in the target's vocabulary.
    """
    stored = weights.reader.stored(DRAFT_IDS)
    if stored.shape != (size,) or stored.dtype not in INTEGER_TYPES:
        raise CheckpointError(
            f"{DRAFT_IDS} is {list(stored.shape)} of type {stored.dtype} in {stored.file}, but should be [{size}] of "
            "integers"
        )
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(stored.file, framework="pt") as file:
            offsets = file.get_tensor(stored.stored_name).long()
    except (SafetensorError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{stored.stored_name} cannot be read from {stored.file}: {error}") from None
    ids = torch.arange(size) + offsets
    if bool(((ids < 0) | (ids >= vocab_size)).any()):
        worst = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise ConfigError(
            f"--speculative-draft-model-path {weights.folder}: {DRAFT_IDS} maps a draft token to token {worst}, but "
            f"the target's vocabulary has {vocab_size}"
        )
    if len(ids.unique()) != size:
        raise CheckpointError(f"{DRAFT_IDS} in {stored.file} maps {size} draft tokens to {len(ids.unique())} tokens")
    if size == vocab_size and not bool(offsets.any()):
        return None
    return weights.keep_instead(ids.to(weights.options.device))
