"""What all families share: the body (embedding, blocks, final norm, output head) and the MTP head."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specmamba.errors import ConfigError, UnsupportedModelError
from specmamba.layers.attention import Attention
from specmamba.layers.context import ForwardContext, LayerContext
from specmamba.layers.feed_forward import MLP, MoE, is_exact_activation
from specmamba.layers.primitives import Embedding, Linear, RMSNorm, Rotary
from specmamba.models.base import Target, TargetOutput

Layer = Callable[[Tensor, LayerContext], Tensor]


class Norm(Protocol):
    """In front of a layer."""

    def __call__(self, x: Tensor) -> Tensor:
        """Norm the residual stream."""

    def behind(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Add the output y of the layer before to the residual stream x; gives the sum and its norm."""


@dataclass(frozen=True, slots=True)
class Block:
    """x + scale * layer(norm(x)), once for each of its layers."""

    layers: tuple[tuple[Norm, Layer], ...]
    residual_scale: float = 1.0

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Add a layer's output y to the residual stream x, both [B, L, H]; where the scale is 1, norms do it."""
        if x.is_cpu:  # each rounds once everywhere; PyTorch's one operation rounds otherwise at the ends of its vectors
            return x + y * self.residual_scale
        return torch.add(x, y, alpha=self.residual_scale)


def run_blocks(
    blocks: Sequence[Block],
    x: Tensor,
    context: LayerContext,
    norm: Norm | None = None,
    streams: dict[int, Tensor | None] | None = None,
) -> Tensor:
    """Run blocks on the residual stream x [B, L, H]. The addition of each layer's output is part of the next norm.

    Args:
        blocks: in the order in which they run.
        x: in front of the first block.
        context: of the layers.
        norm: behind the last block; None: the stream itself is the result.
        streams: gets the residual stream in front of each block that it has as a key.

    Returns:
        [B, L, H].
    """
    y: Tensor | None = None  # output of the last layer that is not added yet
    for i, block in enumerate(blocks):
        if streams is not None and i in streams:
            x, y = x if y is None else x + y, None
            streams[i] = x
        for before, layer in block.layers:
            if y is None:
                normed = before(x)
            else:
                x, normed = before.behind(x, y)
            y = layer(normed, context)
            if block.residual_scale != 1.0:
                x, y = block.add(x, y), None
    if norm is None:
        return x if y is None else x + y
    return norm(x) if y is None else norm.behind(x, y)[1]


class PostNorm:
    """A layer whose output is normed."""

    def __init__(self, layer: Layer, norm: RMSNorm) -> None:
        self.parts = (layer,)
        self._norm = norm

    def __call__(self, x: Tensor, context: LayerContext) -> Tensor:
        """[B, L, H] -> [B, L, H]."""
        return self._norm(self.parts[0](x, context))


class HybridTarget:
    """The body of every family: embedding, blocks with a residual stream, final norm, output head."""

    def __init__(
        self,
        embedding: Embedding,
        blocks: Sequence[Block],
        norm: RMSNorm,
        head: Linear,
        rotary: Rotary | None,
        embedding_scale: float = 1.0,
        logits_scale: float = 1.0,
        window_rotary: Rotary | None = None,
    ) -> None:
        """Put a model together.

        Args:
            embedding: V -> H.
            blocks: in the order in which they run.
            norm: behind the last block.
            head: H -> V.
            rotary: of the attention layers; None in models without rotary embedding.
            embedding_scale, logits_scale: factors of the outputs of the embedding and of the head.
            window_rotary: of the attention layers with a window; None: as of the others.
        """
        self.vocab_size, self.hidden_size = embedding.shape
        self.embedding, self.rotary, self.head = embedding, rotary, head
        self.blocks, self._norm = tuple(blocks), norm
        self._embedding_scale, self._logits_scale = embedding_scale, logits_scale
        self._window_rotary = window_rotary
        self._feature_layers: tuple[int, ...] = ()
        self.is_watched = False

    def read_features(self, layers: tuple[int, ...]) -> None:
        """Make the residual streams in front of these layers the ``features`` of every forward.

        Raises:
            UnsupportedModelError: the model has no such layer.
        """
        last = len(self.blocks) - 1
        if missing := [layer for layer in layers if not 0 <= layer <= last]:
            read = f"layer{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
            raise UnsupportedModelError(f"the head reads in front of {read}, the target has layers 0 to {last}")
        self._feature_layers = layers

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens [B, L] int64: [B, L, H]."""
        x = self.embedding(tokens)
        return x if self._embedding_scale == 1.0 else x * self._embedding_scale

    def forward(self, tokens: Tensor, context: ForwardContext) -> TargetOutput:
        """Run tokens [B, L] int64 through all blocks; the hidden states are packed where the context packs tokens."""
        packing = context.packing
        x = self.embed(tokens if packing is None else packing.pack(tokens))
        rotary, of_windows = (
            None if of is None else of.angles(context.positions, x.dtype) for of in (self.rotary, self._window_rotary)
        )
        layer_context = LayerContext(context.kv, context.state, rotary, packing, of_windows)
        streams: dict[int, Tensor | None] = dict.fromkeys(self._feature_layers)
        hidden = run_blocks(self.blocks, x, layer_context, self._norm, streams)
        read = [stream for i in self._feature_layers if (stream := streams[i]) is not None]
        features = torch.cat(read, -1) if read else hidden
        features = features if packing is None else packing.unpack(features, len(tokens))
        return TargetOutput(hidden, features)

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the output head to hidden states [..., H]: [..., V]."""
        logits = self.head(hidden)
        return logits if self._logits_scale == 1.0 else logits * self._logits_scale


@dataclass(frozen=True, slots=True)
class MTPModule:
    """norm(blocks(fc([norm(embedding), norm(hidden)]))). Modules of one head may share parts."""

    input_norm: RMSNorm  # weight [2, H]: norms the embedding and the hidden state in one pass
    fc: Linear  # 2 H -> H, the embedding first
    blocks: tuple[Block, ...]  # in the order in which they run; none has a recurrent state
    norm: RMSNorm  # behind the blocks; its output is the input of the next step of a draft


class MTPHead:
    """An MTP head (DeepSeek-V3, arXiv 2412.19437, section 2.2); its embedding and rotary embedding are the target's.

    It has one module for each depth of a draft, or one module for all depths.
    """

    def __init__(self, target: HybridTarget, modules: Sequence[MTPModule], output: Linear) -> None:
        """Make a head of one or several modules.

        Args:
            target: the model that the head drafts for.
            modules: the first one drafts the token after the root. The attention layers of each have KV layers of their
                own.
            output: H -> V, the output head of every module.
        """
        self.width, self.num_modules = target.hidden_size, len(modules)
        self._target, self._modules, self._output = target, tuple(modules), output

    def combine(self, features: Tensor) -> Tensor:
        """Give the target's features [..., H] back unchanged."""
        return features

    def forward(self, tokens: Tensor, hidden: Tensor, context: ForwardContext, module: int = 0) -> Tensor:
        """Run one module over tokens [B, L] and hidden states [B, L, H] of the positions before: [B, L, H]."""
        parts = self._modules[module]
        rotary = None if self._target.rotary is None else self._target.rotary.angles(context.positions, hidden.dtype)
        layer_context = LayerContext(context.kv, None, rotary, context.packing)
        inputs = torch.stack([self._target.embed(layer_context.pack(tokens)), layer_context.pack(hidden)], 2)
        x = parts.fc(parts.input_norm(inputs).flatten(2))
        return layer_context.unpack(run_blocks(parts.blocks, x, layer_context, parts.norm))

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the output head to [..., H]: [..., V]."""
        return self._output(hidden)


def num_attention_layers(target: Target) -> int:
    """How many layers of a target have keys and values; those of a head lie behind them in the KV pool."""
    assert isinstance(target, HybridTarget)
    layers = [layer for block in target.blocks for _, layer in block.layers]
    return sum(isinstance(part, Attention) for layer in layers for part in getattr(layer, "parts", (layer,)))


def inexact_layers(target: Target) -> list[str]:
    """What a target's layers have that gives a token other bits in other company, in words."""
    assert isinstance(target, HybridTarget)
    layers = [
        part for block in target.blocks for _, layer in block.layers for part in getattr(layer, "parts", (layer,))
    ]
    activations = {of for layer in layers if isinstance(layer, MLP | MoE) for of in layer.activations}
    return sorted({getattr(of, "__name__", str(of)) for of in activations if not is_exact_activation(of)})


@contextmanager
def record_expert_load(target: Target) -> Iterator[dict[int, Tensor]]:
    """Count the tokens that each expert gets while the ``with`` block runs, to find routers that have collapsed.

    Every token that is run counts once for each expert it goes to: tokens of prompts, rejected tokens of draft trees,
    and padding. Outside of the block nothing is counted and no time is spent on it.

        with record_expert_load(llm.engine.model.target) as load:
            llm.generate(prompts)
        load[3]  # of the experts in block 3: [E] int64

    Raises:
        ConfigError: the model has no experts, or they are being counted already.
    """
    layers = expert_layers(target)
    if not layers:
        raise ConfigError("the load of experts cannot be recorded: this model has none")
    if any(layer.load is not None for layer in layers.values()):
        raise ConfigError("the load of this model's experts is being recorded already")
    target.is_watched = True
    try:
        yield {block: layer.start_counting() for block, layer in layers.items()}
    finally:
        target.is_watched = False
        for layer in layers.values():
            layer.stop_counting()


def expert_layers(target: Target) -> dict[int, MoE]:
    """The mixture-of-experts layers of a target, by the index of their block."""
    assert isinstance(target, HybridTarget)
    layers = [(i, layer) for i, block in enumerate(target.blocks) for _, layer in block.layers]
    return {i: layer for i, layer in layers if isinstance(layer, MoE)}
