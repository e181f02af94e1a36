"""Windows of tokens with what the target says of them: what a draft head is trained on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specmamba import LLM
from specmamba.measure.report import progress_bar
from specmamba.train.settings import TrainDraftConfig
from specmamba.train.texts import Tokens

STATE_TYPE = torch.bfloat16


@dataclass(frozen=True)
class Windows:
    """W windows of S + 1 tokens, in host memory."""

    tokens: Tensor  # [W, S + 1] int64
    features: Tensor  # [W, S + 1, F] bfloat16, the target's residual streams in front of the layers that are read
    hidden: Tensor  # [W, S + 1, H] bfloat16, the target's after its final norm

    @classmethod
    def empty(cls, count: int, length: int, feature_size: int, hidden_size: int) -> Windows:
        features = torch.empty(count, length, feature_size, dtype=STATE_TYPE)
        hidden = torch.empty(count, length, hidden_size, dtype=STATE_TYPE)
        return cls(torch.empty(count, length, dtype=torch.int64), features, hidden)

    def __len__(self) -> int:
        return len(self.tokens)


def bytes_of(count: int, length: int, feature_size: int, hidden_size: int) -> int:
    """What windows take in memory."""
    return count * length * (torch.int64.itemsize + STATE_TYPE.itemsize * (feature_size + hidden_size))


def cut(texts: Sequence[Sequence[int]], length: int, seed: int) -> list[Tokens]:
    """Texts behind each other, cut into pieces of one length, in a random order; the rest is left out."""
    stream = [token for text in texts for token in text]
    pieces = [tuple(stream[i : i + length]) for i in range(0, len(stream) - length + 1, length)]
    random.Random(seed).shuffle(pieces)
    return pieces


def read_windows(config: TrainDraftConfig, llm: LLM, pieces: Sequence[Tokens], layers: tuple[int, ...]) -> Windows:
    """Run pieces of ``config.window_length`` tokens through the target.

    Raises:
        RequestError: a token is not in its vocabulary, or its numbers are not finite.
    """
    hidden_size = llm.engine.model.target.hidden_size
    windows = Windows.empty(len(pieces), config.seq + 1, len(layers) * hidden_size, hidden_size)
    with progress_bar("reading the target", len(pieces)) as advance:

        def see(index: int, states: Any) -> None:
            windows.tokens[index] = torch.tensor(pieces[index][:-1])
            windows.features[index] = states.features
            windows.hidden[index] = states.hidden
            advance()

        llm.workbench.read_target(pieces, layers, see)
    return windows


def feature_layers(num_layers: int) -> tuple[int, ...]:
    """An early, a middle and a late layer, in front of which the head reads the target (arXiv 2503.01840, 3.1)."""
    if num_layers < 4:
        return tuple(range(min(1, num_layers - 1), num_layers))
    return min(2, num_layers // 4), num_layers // 2, num_layers - min(3, num_layers // 4)


def feature_scales(windows: Windows, num_layers: int) -> list[float]:
    """How large each layer's features are (root mean square), to the nearest power of two."""
    sample = windows.features[:64].float().unflatten(-1, (num_layers, -1))
    exponents = sample.square().mean((0, 1, 3)).sqrt().clamp_min(1e-6).log2().round()
    return [2.0**exponent for exponent in exponents.tolist()]


def frequent_tokens(texts: Sequence[Sequence[int]], count: int, vocab_size: int) -> Tensor:
    """The ``count`` most frequent tokens [count] int64, ascending; among equals the lower ones."""
    stream = torch.tensor([token for text in texts for token in text])
    counts = torch.bincount(stream, minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:count].sort().values
