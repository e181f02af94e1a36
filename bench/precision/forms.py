"""Recurrent states advanced over tokens by every form that is compared, and the float64 recurrence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

from specmamba.bench.precision import chunked
from specmamba.kernels.gated_delta_rule import reference as delta_reference
from specmamba.kernels.ssd import reference as ssd_reference
from specmamba.kernels.state_records import TreePlacement
from specmamba.kernels.state_records import reference as records_reference

Advanced = tuple[Tensor, Tensor]  # outputs [L, H, V], and the state behind the last token [H, K, V]


class Text(NamedTuple):
    """Tokens of one row with as many key heads as value heads, and the state before them, float32.

    q and k of the delta rule have the length 1, but for the scale of q. What a 16-bit kernel of others is given in
    bfloat16 (q, k, v) are bfloat16 numbers, so that rounding of inputs is no part of any error.
    """

    operator: str  # "gdn": decays by head; "kda": by key channel; "ssd": Mamba2, where q, k, v are c, b, u
    tokens: tuple[Tensor, ...]  # q, k [L, H, K], v [L, H, V], g [L, H] or [L, H, K], and beta [L, H] but for ssd
    state: Tensor  # [H, K, V]

    @property
    def length(self) -> int:
        return len(self.tokens[0])

    @property
    def batch(self) -> tuple[Tensor, ...]:
        """The tokens as a batch of one row, as kernels take them."""
        return tuple(x[None] for x in self.tokens)


def make_text(operator: str, length: int, heads: tuple[int, int, int], seed: int) -> Text:
    """Random tokens as models make them; heads are (H, K, V)."""
    (count, key_dim, value_dim), gen = heads, torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen)

    def of_model(*shape: int) -> Tensor:
        return normal(*shape) if operator == "ssd" else normalize(normal(*shape), dim=-1)

    q, k = (of_model(length, count, key_dim) for _ in range(2))
    q, k, v = q * key_dim**-0.5, k * (key_dim**-0.5 if operator == "ssd" else 1), normal(length, count, value_dim)
    g = -softplus(normal(length, count, *((key_dim,) if operator == "kda" else ())) - 1)
    gates = (g,) if operator == "ssd" else (g, normal(length, count).sigmoid())
    rounded = (chunked.to_bf16(x) for x in (q, k, v))
    return Text(operator, (*rounded, *gates), normal(count, key_dim, value_dim))


def in_float64(text: Text) -> Advanced:
    """The recurrence itself, token after token: what the others are compared with."""
    reference = ssd_reference if text.operator == "ssd" else delta_reference
    doubles, lengths = (x.double() for x in text.batch), torch.tensor([text.length])
    out, state = reference.extend(*doubles, text.state[None].double(), lengths)
    return out[0], state[0]


def in_chunks(to_operand: chunked.Rounding) -> Callable[[Text], Advanced]:
    """Chunks of 64 tokens, with operands rounded as in ``chunked``."""
    return lambda text: chunked.extend(text.tokens, text.state, to_operand)


def as_prompt(model_dtype: torch.dtype) -> Callable[[Text], Advanced]:
    """Our Triton kernels for known tokens of a model of this dtype."""

    def run(text: Text) -> Advanced:
        states, one = torch.stack([torch.full_like(text.state, torch.nan), text.state]), torch.tensor([1])
        out = _triton_ops(text).extend_in_place(*text.batch, states, one, one * text.length, model_dtype)
        return out[0], states[1]

    return run


def as_nodes(model_dtype: torch.dtype, is_chain: bool) -> Callable[[Text], Advanced]:
    """Our Triton kernels for nodes of a draft tree that is one chain; ``is_chain``: the host knows that it is.

    The state behind the last node is the checkpoint, folded over the nodes' records in float64.
    """

    def run(text: Text) -> Advanced:
        (heads, key_dim, value_dim), length = text.state.shape, text.length
        of_decay = text.tokens[3].shape[1:]
        records = tuple(torch.zeros(1, length, *x) for x in ((heads, key_dim), (heads, value_dim), of_decay))
        mask = torch.ones(1, length, length, dtype=torch.bool).tril()
        placement, kind = TreePlacement(torch.tensor([0]), 0, mask), (is_chain, model_dtype)
        out = _triton_ops(text).tree_verify(*text.batch, text.state[None], records, placement, *kind)
        k, u, decay = (x.double() for x in records)
        return out[0], records_reference.fold(text.state[None].double(), k, u, decay, torch.tensor([length]))[0]

    return run


def in_transformers(text: Text) -> Advanced:
    """The recurrence of the transformers library in PyTorch, which computes in float32 and scales q itself.

    Raises:
        ImportError: this version has none for the operator.
    """
    q, *others = (x.float() for x in text.batch)
    q = q * text.state.shape[1] ** 0.5
    if text.operator == "gdn":
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

        k, v, g, beta = others
        out, state = torch_chunk_gated_delta_rule(q, k, v, g, beta, 64, text.state[None], True)
    elif text.operator == "kda":
        from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention

        out, state = recurrent_kimi_delta_attention(q, *others, text.state[None], True)
    else:
        raise ImportError("its Mamba2 is a layer, without a function of the recurrence alone")
    return out[0], state[0]


def _triton_ops(text: Text) -> Any:
    """The operator's Triton forms, imported where they are needed: there may be no Triton."""
    if text.operator == "ssd":
        from specmamba.kernels.ssd import triton_ops as ssd_ops

        return ssd_ops
    from specmamba.kernels.gated_delta_rule import triton_ops as delta_ops

    return delta_ops
