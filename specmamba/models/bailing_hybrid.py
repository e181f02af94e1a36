"""Ling-3 and its MTP head: as Kimi-Linear, with rotated keys, gates of heads in latent attention, and bounded decays.

The layers of the MTP head lie behind the others and are numbered on. Each is a block of latent attention and experts,
with two input norms and a projection in front of it and a norm behind it (DeepSeek-V3, arXiv 2412.19437, section 2.2).
Sources of names and order: SGLang (``bailing_moe_nextn.py``, ``bailing_moe_v3.py``), vLLM (``bailing_moe_mtp.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import torch

from specmamba.checkpoints.matrix_copies import has_equal_rows, is_copy_beside_codes
from specmamba.checkpoints.tensor_reader import TensorReader
from specmamba.errors import UnsupportedModelError
from specmamba.kernels import rowwise
from specmamba.kernels.linear import Matrix
from specmamba.layers.feed_forward import Activation, ClampedSiluMul
from specmamba.layers.gated_delta_net import KimiDeltaAttention
from specmamba.layers.primitives import RMSNorm
from specmamba.models.base import LoadedModel, LoadOptions
from specmamba.models.common_layers import ATTENTION, require_experts
from specmamba.models.hybrid import HybridTarget, Layer, MTPHead, MTPModule
from specmamba.models.kimi_linear import DENSE, KimiWeights, Names, finished, target_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

RENAMES = ()
# In each layer, of silu(gate) from above and of up from both sides; transformers ignores them, SGLang, vLLM and
# llama.cpp do not.
LIMITS_OF_EXPERTS, LIMITS_OF_SHARED = "expert_swiglu_limit_list", "share_expert_swiglu_limit_list"
# Fields of published configs that transformers does not read, and what they may say.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_mla_nope": (None, False),
    "score_function": (None, "sigmoid"),
    "use_nGPT": (None, False),
    "scale_router_input": (None, False),
    "value_norm": (None, False),
    "gated_attention_proj_granularity_type": (None, "head_wise"),
}
# Copies of the target's embedding and output head, which an MTP head may have, and the names of what they copy.
COPIES = {"embed_tokens.weight": "model.word_embeddings.weight", "shared_head.head.weight": "lm_head.weight"}


def load(config: PretrainedConfig, reader: TensorReader, options: LoadOptions) -> LoadedModel:
    """Build Ling-3 from a checkpoint's config and tensors; errors as for ``registry.load_model``."""
    weights = LingWeights(config, reader, options)
    draft_weights = LingWeights(config, reader, options, options.draft_form)
    target, output = target_of(weights)
    prefixes = [f"model.layers.{config.num_hidden_layers + i}." for i in range(config.num_mtp_layers)]
    has_head = options.want_draft_head and any(reader.has(f"{prefix}eh_proj.weight") for prefix in prefixes)
    head = _mtp_head(draft_weights, prefixes, target, output) if has_head else None
    copies = _copies(reader, prefixes, config.tie_word_embeddings, options.dtype) if head else ()
    reader.finish(ignore=tuple(copies if head else prefixes))
    return finished(weights, target, head, draft_weights)


def _copies(reader: TensorReader, prefixes: Sequence[str], is_tied: bool, dtype: torch.dtype) -> list[str]:
    """The tensors of MTP layers that repeat the target's: some rows are compared, and they are not loaded.

    Where one of the two is in codes, their rows may differ by its rounding.

    Raises:
        UnsupportedModelError: one is another matrix than the target's.
    """
    names = set(reader.names())  # none where there are no tensors, but a config alone
    stored = [(prefix + copy, of) for prefix in prefixes for copy, of in COPIES.items() if prefix + copy in names]
    for name, of in stored:
        of = of if of in names or not is_tied else COPIES["embed_tokens.weight"]
        if not (has_equal_rows(reader, name, reader, of, dtype) or is_copy_beside_codes(reader, name, of)):
            raise UnsupportedModelError(
                f"{name} is another matrix than {of}: MTP heads with an embedding or output matrix of their own are "
                "not supported: serve with --speculative-algorithm none"
            )
    return [name for name, _ in stored]


def _mtp_head(weights: LingWeights, prefixes: list[str], target: HybridTarget, output: Matrix) -> MTPHead:
    """A module for each layer behind the target's. ``output`` [V, H]: the matrix of the target's output head."""
    c = weights.config
    if getattr(c, "mtp_use_kda", False):
        raise UnsupportedModelError(
            "mtp_use_kda true is not supported: an MTP head keeps no recurrent state: serve with "
            "--speculative-algorithm none"
        )
    require_experts(c.num_experts_per_tok, c.num_local_experts)
    first = c.layer_types.count(ATTENTION)
    modules = [_mtp_module(weights, prefix, first + i) for i, prefix in enumerate(prefixes)]
    return MTPHead(target, modules, weights.share_linear(output, target))


def _mtp_module(weights: LingWeights, prefix: str, kv_layer: int) -> MTPModule:
    """One module, whose rows of latents live at ``kv_layer`` of the pool."""
    c = weights.config
    names = "enorm", "hnorm", "final_layernorm"
    of_embedding, of_hidden, last = (weights.norm(f"{prefix}{x}.weight", c.hidden_size, c.rms_norm_eps) for x in names)
    return MTPModule(
        RMSNorm(torch.stack([of_embedding.weight, of_hidden.weight]), c.rms_norm_eps),
        weights.take_linear(f"{prefix}eh_proj", c.hidden_size, 2 * c.hidden_size),
        (weights.block(c.num_hidden_layers, prefix, ATTENTION, kv_layer),),
        last,
    )


class LingWeights(KimiWeights):
    """Makes the layers of Ling-3."""

    names = Names(
        embedding="model.word_embeddings.weight",
        mixer="attention.",
        out="dense",
        experts="mlp.",
        router_bias="gate.expert_bias",
        of_expert=("gate_proj", "up_proj", "down_proj"),
    )
    has_rotary, has_head_gates = True, True

    def __init__(self, config: Any, reader: TensorReader, options: LoadOptions, form: Any = None) -> None:
        _refuse_variants(config)
        config = copy(config)
        # published configs have it, of a width that has been cut to what is rotated already
        config.rope_parameters = {k: v for k, v in config.rope_parameters.items() if k != "partial_rotary_factor"}
        super().__init__(config, reader, options, form)
        self.lower_bound = config.kda_lower_bound if config.kda_safe_gate else None

    def feed_forward(self, layer: int, prefix: str) -> Layer:
        """The second half of a block; those of the MTP head have experts whatever the others have, without limits."""
        c = self.config
        if layer >= c.num_hidden_layers:
            return self.mixture(prefix)
        if c.mlp_layer_types[layer] == DENSE:
            return super().feed_forward(layer, prefix)
        limits = getattr(c, LIMITS_OF_EXPERTS, None), getattr(c, LIMITS_OF_SHARED, None)
        routed, shared = (_activation((of_layers or ())[layer : layer + 1]) for of_layers in limits)
        return self.mixture(prefix, routed, shared)

    def delta_attention(self, prefix: str, state_layer: int) -> KimiDeltaAttention:
        """The recurrent layer, with decays and gates from one projection each."""
        gates = {"f_proj": self.segments.decays, "g_proj": self.segments.values}
        return self.delta_layer(prefix, state_layer, gates, None)


def _activation(limit: Sequence[float | None]) -> Activation:
    """Of an expert; without a limit, or with 0 or null, the gated activation itself."""
    return ClampedSiluMul(float(limit[0])) if limit and limit[0] else rowwise.silu_mul


def _refuse_variants(config: Any) -> None:
    """Refuse what would be computed wrongly, besides what Kimi-Linear refuses."""
    for name in (LIMITS_OF_EXPERTS, LIMITS_OF_SHARED):
        limits = getattr(config, name, None) or []
        if not isinstance(limits, list) or not all(
            x is None or (isinstance(x, int | float) and x >= 0) for x in limits
        ):
            raise UnsupportedModelError(
                f"{name} should have a limit >= 0 for each of the layers; 0 or null: there is none"
            )
    for name, neutral in NEUTRAL.items():
        if (found := getattr(config, name, None)) not in neutral:
            raise UnsupportedModelError(f"{name} {found!r} is not supported for Ling")
    kind = config.rope_parameters.get("rope_type", "default")
    if kind != "default":  # transformers scales scores too for some of them
        raise UnsupportedModelError(f"rope type {kind!r} is not supported for Ling: only default is")
