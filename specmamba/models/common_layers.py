"""What several families have in common: names of config fields, attention, the gated MLP, and what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specmamba.cache.shapes import KVShape, StateShape
from specmamba.errors import CheckpointError, UnsupportedModelError
from specmamba.kernels import paged_attention, rowwise
from specmamba.layers.attention import Attention, HeadGatedAttention
from specmamba.layers.feed_forward import Activation, Experts, GatedMLP
from specmamba.layers.primitives import Linear
from specmamba.models.matrices.expert_matrices import ExpertMatrices
from specmamba.models.weights import Weights, scaled
from specmamba.parallel.share import Segment, Share

# What transformers calls the kinds of layers. Older configs say "mamba" and "attention"; it translates them.
RECURRENT, ATTENTION, WINDOWED = "linear_attention", "full_attention", "sliding_attention"


def number_layers(kinds: Sequence[str], first: Mapping[str, int] | None = None) -> Iterator[tuple[str, int]]:
    """The kind of every layer and its number among the layers of that kind, which is its index in their pool.

    Args:
        kinds: of all layers, in order.
        first: the number of the first layer of a kind; 0 for kinds that are missing.
    """
    counts = Counter(first)
    for kind in kinds:
        yield kind, counts[kind]
        counts[kind] += 1


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of an attention layer."""

    num_query_heads: int
    num_key_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: Any) -> Heads:
        """Read the heads from a config. Without ``head_dim``, the query heads divide the hidden size among them.

        Raises:
            UnsupportedModelError: the number of query heads is not a multiple of the number of key heads.
        """
        num_query_heads, num_key_heads = config.num_attention_heads, config.num_key_value_heads
        if num_query_heads % num_key_heads:
            raise UnsupportedModelError(
                f"{num_query_heads} query heads are not a multiple of {num_key_heads} key heads"
            )
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_query_heads
        return cls(num_query_heads, num_key_heads, head_dim)

    @property
    def width(self) -> int:
        """Numbers in all query heads of one token."""
        return self.num_query_heads * self.head_dim

    @property
    def query_segment(self) -> Segment:
        """The rows of the queries in a projection; the columns of the output projection too."""
        return Segment("query heads", self.num_query_heads, self.head_dim)

    @property
    def key_segment(self) -> Segment:
        """The rows of the keys in a projection, and of the values. More ranks than heads have the same heads."""
        return Segment("key heads", self.num_key_heads, self.head_dim, "repeated")

    def of_rank(self, share: Share) -> Heads:
        """The heads that a rank has. Raises ConfigError: they cannot be divided among the ranks."""
        return Heads(share.count(self.query_segment), share.count(self.key_segment), self.head_dim)

    def kv_shapes(self, num_layers: int) -> tuple[KVShape, ...]:
        """The KV of so many layers with these heads, for ``CacheShape.kv``."""
        return (KVShape(num_layers, self.num_key_heads, self.head_dim),) if num_layers else ()


class AttentionScales(NamedTuple):
    """Factors that a family multiplies into an attention layer's input, keys and output."""

    layer_in: float = 1.0
    keys: float = 1.0
    layer_out: float = 1.0


class AttentionNames(NamedTuple):
    """What a family calls tensors of an attention layer, behind the layer's prefix."""

    out: str = "o_proj"
    norms: tuple[str, str] = ("q_norm", "k_norm")
    head_gates: str | None = None  # a projection to one gate for each query head; None: there is none


USUAL_NAMES = AttentionNames()


def attention_layer(
    weights: Weights,
    prefix: str,
    kv_layer: int,
    heads: Heads,
    *,
    has_bias: bool,
    has_out_bias: bool | None = None,
    has_rotary: bool = True,
    width: int | None = None,
    norm_eps: float | None = None,
    score_scale: float | None = None,
    scales: AttentionScales | None = None,
    names: AttentionNames = USUAL_NAMES,
    window: int = 0,
) -> Attention:
    """Make the attention layer whose tensors are named ``prefix``q_proj, k_proj, v_proj and those of ``names``.

    Args:
        weights: of the model.
        prefix: ends in a dot.
        kv_layer: index of the layer's keys and values in the KV pool.
        heads: of the layer.
        has_bias: whether the projections of queries, keys and values have a bias.
        has_out_bias: whether the output projection has one; None: as ``has_bias``.
        has_rotary: whether queries and keys are rotated by their positions.
        width: of the layer's input; None: the hidden size.
        norm_eps: epsilon of the norms of queries and keys; None: there are no such norms.
        score_scale: factor of the scores; None: 1 / sqrt(head size).
        scales: factors of the layer's input, keys and output; None: 1.
        names: of the output projection, the norms and the gates of heads.
        window: how many of the last positions a query sees; 0: all.

    Raises:
        CheckpointError: a tensor is missing or misshapen.
    """
    hidden, dim = weights.config.hidden_size, heads.head_dim
    in_scale, key_scale, out_scale = scales or AttentionScales()
    queries, keys, own = heads.query_segment, heads.key_segment, heads.of_rank(weights.share)
    parts = {"q_proj": (queries, 1.0), "k_proj": (keys, key_scale), "v_proj": (keys, 1.0)}
    norm = None if norm_eps is None else head_norms(weights, prefix, own, names=names.norms)
    gates = {} if names.head_gates is None else {names.head_gates: Segment("query heads", heads.num_query_heads, 1)}
    project = one_product(weights, prefix, parts, width or hidden, has_bias, in_scale, gates)
    out_bias = has_bias if has_out_bias is None else has_out_bias
    out = weights.take_linear(f"{prefix}{names.out}", hidden, heads.width, out_bias, out_scale, inputs=[queries])
    scale = dim**-0.5 if score_scale is None else score_scale
    form = paged_attention.AttentionConfig(
        own.num_query_heads, own.num_key_heads, dim, scale, norm, norm_eps or 0.0, window=window
    )
    return (HeadGatedAttention if gates else Attention)(kv_layer, project, out, form, has_rotary)


def head_norms(
    weights: Weights,
    prefix: str,
    heads: Heads,
    offset: float = 0.0,
    names: tuple[str, str] = USUAL_NAMES.norms,
) -> Tensor:
    """Weights of the norms of queries and keys, repeated for every head, so that one pass norms all heads.

    Args:
        weights: of the model.
        prefix: ends in a dot.
        heads: of this rank.
        offset: added to the stored weights; 1 for families that store w - 1.
        names: of the two norms, behind the prefix.

    Returns:
        [query heads + key heads, head size] float32.
    """
    norms = [weights.norm(f"{prefix}{name}.weight", heads.head_dim, 0.0, offset).weight for name in names]
    counts = heads.num_query_heads, heads.num_key_heads
    rows = [norm.expand(count, -1) for norm, count in zip(norms, counts, strict=True)]
    return weights.keep_instead(torch.cat(rows), *norms)


def gated_mlp(
    weights: Weights,
    prefix: str,
    inner: int,
    *,
    has_bias: bool = False,
    gate_scale: float = 1.0,
    down_scale: float = 1.0,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    activation: Activation = rowwise.silu_mul,
) -> GatedMLP:
    """Make the MLP of three projections: gate, up and down.

    Args:
        weights: of the model.
        prefix: ends in a dot.
        inner: width I between the projections.
        has_bias: all three projections have a bias, or none has.
        gate_scale, down_scale: factors of the outputs of these two projections.
        names: of the projections, behind the prefix.
        activation: [..., 2 I] -> [..., I].

    Raises:
        CheckpointError: a tensor is missing or misshapen.
    """
    hidden, (gate, up, down), channels = weights.config.hidden_size, names, mlp_segment(inner)
    gate_up = one_product(weights, prefix, {gate: (channels, gate_scale), up: (channels, 1.0)}, hidden, has_bias)
    out = weights.take_linear(f"{prefix}{down}", hidden, inner, has_bias, down_scale, inputs=[channels])
    return GatedMLP(gate_up, out, activation)


def gated_experts(
    weights: Weights,
    prefix: str,
    num_experts: int,
    inner: int,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Experts:
    """Make the SwiGLU experts of a layer, stored as one tensor for all of them or as one for each.

    A checkpoint may have one in the target and the other in the MTP head (Qwen3.5-35B-A3B does).

    Args:
        weights: of the model.
        prefix: ends in a dot.
        num_experts: E.
        inner: width I between the projections of an expert.
        names: of an expert's projections; of all experts, they are gate_up_proj and down_proj.

    Raises:
        CheckpointError: a tensor is missing or misshapen.
    """
    hidden, (gate, up_name, down_name) = weights.config.hidden_size, names
    experts = ExpertMatrices(weights, num_experts, hidden, inner, each=prefix)
    up = experts.up(f"{prefix}gate_up_proj", (gate, up_name))
    return experts.layer(up, experts.down(f"{prefix}down_proj", down_name), rowwise.silu_mul)


def mlp_segment(inner: int) -> Segment:
    """The channels between the projections of a feed-forward layer; any division is right."""
    return Segment("channels between the projections of an MLP", inner, 1, "uneven")


def one_product(
    weights: Weights,
    prefix: str,
    parts: Mapping[str, tuple[Segment, float]],
    width: int,
    has_bias: bool,
    in_scale: float = 1.0,
    gates: Mapping[str, Segment] = MappingProxyType({}),
) -> Linear:
    """Join projections of the same input [width] to one layer; ``parts``: outputs and output factor by name.

    ``gates``: outputs of further ones, which lie behind the others, have no bias and are not rounded to few bits.

    Raises:
        CheckpointError: a tensor is missing or misshapen.
        ConfigError: the outputs cannot be divided among the ranks.
    """
    matrices, biases = [], []
    for name, (segment, scale) in parts.items():
        matrix = weights.take_matrix(f"{prefix}{name}.weight", segment.size, width, outputs=[segment])
        matrices.append(scaled(matrix, in_scale * scale))
        if has_bias:
            biases.append(scaled(weights.part(weights.take(f"{prefix}{name}.bias", segment.size), segment), scale))
    of_gates = [
        scaled(weights.take_matrix(f"{prefix}{name}.weight", segment.size, width, outputs=[segment]), in_scale)
        for name, segment in gates.items()
    ]
    bias = None
    if has_bias:
        zeros = [biases[0].new_zeros(matrix.shape[0]) for matrix in of_gates]
        bias = weights.keep_instead(torch.cat([*biases, *zeros]), *biases)
    return weights.linear(matrices, bias, of_gates)


def convolution_by_tap(weights: Weights, prefix: str, state: StateShape) -> Tensor:
    """Kernels of all channels of a delta net, [C, W] float32 stored by tap, as kernels read them.

    They are stored in one tensor, or in three that follow each other. Published checkpoints have those of queries, keys
    and values in the three; transformers, when it saves, may have three parts of one size.

    Raises:
        CheckpointError: a tensor is missing or misshapen.
    """
    float32, channels, width = torch.float32, state.conv_channels, state.conv_width
    if weights.reader.has(f"{prefix}conv1d.weight"):
        kernels = weights.take(f"{prefix}conv1d.weight", channels, 1, width, dtype=float32)
    else:
        names = [f"{prefix}{x}_conv1d.weight" for x in "qkv"]
        sizes = [weights.reader.stored(name).shape[0] for name in names]
        if sum(sizes) != channels:
            given = ", ".join(names)
            raise CheckpointError(f"{given} have {sizes} channels, together not the config's {channels}")
        parts = zip(names, sizes, strict=True)
        taken = [weights.take(name, size, 1, width, dtype=float32) for name, size in parts]
        kernels = weights.keep_instead(torch.cat(taken), *taken)
    return kernels.squeeze(1).t().contiguous().t()


def require_silu(config: Any) -> None:
    """Raise UnsupportedModelError where the activation is not SiLU."""
    if config.hidden_act not in ("silu", "swish"):
        raise UnsupportedModelError(f"hidden_act {config.hidden_act!r} is not supported: only silu is")


def require_layer_types(config: Any, recurrent: str = RECURRENT, *others: str) -> None:
    """Raise UnsupportedModelError where ``layer_types`` does not give a kind that is known to every layer."""
    kinds = recurrent, *others, ATTENTION
    if set(config.layer_types) - set(kinds) or len(config.layer_types) != config.num_hidden_layers:
        raise UnsupportedModelError(
            f"layer_types must give {' or '.join(kinds)} to each of {config.num_hidden_layers} layers"
        )


def require_experts(num_experts_per_tok: int, num_experts: int) -> None:
    """Raise UnsupportedModelError where a token cannot go to so many of the experts."""
    if not 1 <= num_experts_per_tok <= num_experts:
        raise UnsupportedModelError(f"a token cannot go to {num_experts_per_tok} of {num_experts} experts")
