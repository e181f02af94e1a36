"""LFM3, as transformers has it: LFM2's gated short convolutions, and two kinds of attention, full and over a window.

Each kind of attention has a rope of its own, attention heads have gates, and what a layer adds is normed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specmamba.checkpoints.tensor_reader import TensorReader
from specmamba.errors import UnsupportedModelError
from specmamba.layers.primitives import RMSNorm, Rotary
from specmamba.models.base import LoadedModel, LoadOptions
from specmamba.models.common_layers import ATTENTION, WINDOWED, AttentionNames, attention_layer, require_layer_types
from specmamba.models.hybrid import Block, Layer, PostNorm
from specmamba.models.lfm2 import SHORT_CONV, Lfm2Weights, load_layers

if TYPE_CHECKING:
    from transformers import PretrainedConfig

RENAMES = ()
GATED = AttentionNames(head_gates="g_proj")


def load(config: PretrainedConfig, reader: TensorReader, options: LoadOptions) -> LoadedModel:
    """Build LFM3 from a checkpoint's config and tensors; errors as for ``registry.load_model``."""
    return load_layers(Lfm3Weights(config, reader, options))


class Lfm3Weights(Lfm2Weights):
    """Makes the layers of LFM3."""

    def refuse_variants(self) -> None:
        """Refuse what would be computed wrongly."""
        c = self.config
        require_layer_types(c, SHORT_CONV, WINDOWED)
        if WINDOWED in c.layer_types and (type(c.sliding_window) is not int or c.sliding_window < 1):
            raise UnsupportedModelError(f"sliding_window should be a number of tokens, but is {c.sliding_window!r}")

    def rotaries(self) -> tuple[Rotary | None, Rotary | None]:
        """The rotary embeddings of full attention and of attention over a window, of those that there are."""
        parameters = self.config.rope_parameters
        for kind, of_kind in parameters.items():
            if isinstance(of_kind, dict) and of_kind.get("rope_type", "default") == "default":
                # transformers rotates whole heads then
                parameters[kind] = {name: x for name, x in of_kind.items() if name != "partial_rotary_factor"}
        full, windowed = (self.rotary(x) if x in self.config.layer_types else None for x in (ATTENTION, WINDOWED))
        return full, windowed

    def block(self, layer: int, prefix: str, kind: str, index: int) -> Block:
        """A mixer, then a feed-forward layer. ``index``: the mixer's place in the pool of its kind."""
        if kind == SHORT_CONV:
            mixer = self.short_conv(f"{prefix}conv.", index)
        else:
            mixer = self.gated_attention(
                f"{prefix}self_attn.", index, self.config.sliding_window if kind == WINDOWED else 0
            )
        mlp = self.feed_forward(layer, f"{prefix}feed_forward.")
        layers = (f"{prefix}operator", f"{prefix}post_operator", mixer), (f"{prefix}ffn", f"{prefix}post_ffn", mlp)
        return Block(tuple((self._norm(before), self._normed(of, behind)) for before, behind, of in layers))

    def gated_attention(self, prefix: str, kv_layer: int, window: int) -> Layer:
        """Attention with normed queries and keys; ``window`` 0: full."""
        c = self.config
        names = GATED if c.use_attention_gate else AttentionNames()
        return attention_layer(
            self,
            prefix,
            kv_layer,
            self.heads,
            has_bias=c.attention_bias,
            norm_eps=c.norm_eps,
            names=names,
            window=window,
        )

    def inner_size(self) -> int:
        """The width between the projections of a feed-forward layer."""
        return int(self.config.intermediate_size)

    def _norm(self, name: str) -> RMSNorm:
        return self.norm(f"{name}_norm.weight", self.config.hidden_size, self.config.norm_eps)

    def _normed(self, layer: Layer, name: str) -> Layer:
        """A layer whose output is normed, if the config says so."""
        return PostNorm(layer, self._norm(name)) if self.config.use_sandwich_norm else layer
