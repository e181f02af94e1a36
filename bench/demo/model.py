"""The demo's model as it is trained: transformers' Qwen3.5 text model and the MTP head beside it.

The two operators of a gated-delta-net layer are here in a form that trains fast in plain PyTorch. They replace the
fallbacks of transformers' Qwen3.5 modules while a demo model is trained or evaluated: same arguments, same results,
differentiable, and without a state (training always starts a sequence from zero). They run eagerly: compiled by
inductor for a CPU, the delta rule took 50 s to compile and then ran slower.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5GatedDeltaNet,
    Qwen3_5RMSNorm,
)

from specmamba.bench.demo.options import Architecture
from specmamba.errors import ConfigError

MTP_STEPS = 3  # depth to which the MTP head is trained on its own outputs
MTP_LOSS_WEIGHT = 0.3  # weight of the mean over the depths
TIME_STEP_RANGE = (1e-3, 1e-1)  # of gated-delta-net heads before training
CHUNK_SIZE = 64  # tokens; one state per chunk is kept for the backward pass
_CONV, _DELTA_RULE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"  # names in transformers' module


def text_config(architecture: Architecture) -> Qwen3_5TextConfig:
    """The configuration of the model for transformers."""
    third = architecture.head_dim // 4 // 3  # the rotated half has head_dim / 4 frequencies, in three sections
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [architecture.head_dim // 4 - 2 * third, third, third],
        "mrope_interleaved": True,
    }
    config = Qwen3_5TextConfig(
        **architecture.model_dump(),
        rope_parameters=rope,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        mtp_num_hidden_layers=1,
    )
    config._attn_implementation = "sdpa"  # causal without a mask, which the MTP layer needs
    return config


class MTPHead(nn.Module):
    """Predict the token after next: ``fc([norm(embedding of x[t+1]), norm(h[t])])``, one attention layer, a norm."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        layer_config = Qwen3_5TextConfig(
            **{**config.to_dict(), "layer_types": ["full_attention"], "num_hidden_layers": 1}
        )
        layer_config._attn_implementation = config._attn_implementation
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(hidden, eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(hidden, eps)
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(layer_config, 0)])
        self.norm = Qwen3_5RMSNorm(hidden, eps)

    def forward(self, embeddings: Tensor, hidden: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Hidden states ``[B, T, H]`` from embeddings and hidden states of the same shape.

        ``rotary``: cosines and sines of the positions of the embedded tokens.
        """
        pair = torch.cat([self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)], dim=-1)
        out = self.layers[0](self.fc(pair), position_embeddings=rotary, attention_mask=None, position_ids=None)
        normed: Tensor = self.norm(out)
        return normed


class DemoModel(nn.Module):
    """Target and MTP head. The head shares the target's embedding and output matrix."""

    def __init__(self, target: Qwen3_5ForCausalLM, mtp: MTPHead) -> None:
        super().__init__()
        self.target = target
        self.mtp = mtp

    def hidden_states(self, tokens: Tensor, num_steps: int = MTP_STEPS) -> list[Tensor]:
        """Compute the final hidden states at depths 0 (the target) to ``num_steps`` (the head, on the depth before).

        tokens ``[B, T]``; depth d is ``[B, T - d, H]``, and its row t predicts token t + d + 1.
        """
        hidden: Tensor = self.target.model(input_ids=tokens, use_cache=False).last_hidden_state
        return [hidden, *self._head_states(tokens, hidden, num_steps)]

    def _head_states(self, tokens: Tensor, hidden: Tensor, num_steps: int) -> Iterator[Tensor]:
        text = self.target.model
        for depth in range(1, num_steps + 1):
            given = tokens[:, depth:]  # the tokens that the head knows when it drafts
            positions = torch.arange(depth, tokens.shape[1], device=tokens.device).expand(3, len(tokens), -1)
            hidden = hidden[:, :-1]
            hidden = self.mtp(text.embed_tokens(given), hidden, text.rotary_emb(hidden, positions))
            yield hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute fp32 logits ``[..., V]`` from hidden states ``[..., H]``."""
        return F.linear(hidden, self.target.lm_head.weight).float()

    def losses(
        self,
        tokens: Tensor,
        learned: Tensor | None = None,
        *,
        head_rows: Tensor | None = None,
        follow_target: bool = False,
    ) -> list[Tensor]:
        """Mean cross entropy, in nats per token, of the target and of each depth of the head.

        Args:
            tokens: ``[B, T]``.
            learned: ``[B, T]`` bool, the tokens whose predictions count; None: all.
            head_rows: the sequences that the head runs on, indices ``[R]``; None: all.
            follow_target: the head is judged by the target's probabilities instead of by the text.
        """
        hidden: Tensor = self.target.model(input_ids=tokens, use_cache=False).last_hidden_state
        counted = torch.ones_like(tokens, dtype=torch.bool) if learned is None else learned
        logits = self.logits(hidden[:, :-1][counted[:, 1:]])
        losses = [F.cross_entropy(logits, tokens[:, 1:][counted[:, 1:]])]
        if head_rows is None:
            head_rows = torch.arange(len(tokens), device=tokens.device)
        probabilities = self._probabilities(hidden[head_rows]) if follow_target else None
        tokens, counted = tokens[head_rows], counted[head_rows]
        for depth, state in enumerate(self._head_states(tokens, hidden[head_rows], MTP_STEPS), 1):
            chosen = counted[:, depth + 1 :]
            wanted = tokens[:, depth + 1 :] if probabilities is None else probabilities[:, depth:-1]
            losses.append(F.cross_entropy(self.logits(state[:, :-1][chosen]), wanted[chosen]))
        return losses

    @torch.no_grad()
    def _probabilities(self, hidden: Tensor) -> Tensor:
        return self.logits(hidden).softmax(-1)

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


def new_model(architecture: Architecture) -> DemoModel:
    """Make an untrained model; its weights are drawn from torch's global generator."""
    config = text_config(architecture)
    model = DemoModel(Qwen3_5ForCausalLM(config), MTPHead(config))
    for module in model.modules():
        if isinstance(module, Qwen3_5GatedDeltaNet):
            _spread_time_steps(module.dt_bias)
    return model


@torch.no_grad()
def _spread_time_steps(dt_bias: Tensor) -> None:
    """Draw log-uniform time steps softplus(dt_bias), so that some states remember long before training."""
    low, high = (math.log(limit) for limit in TIME_STEP_RANGE)
    time_step = torch.exp(low + torch.rand_like(dt_bias) * (high - low))
    dt_bias.copy_(time_step + torch.log(-torch.expm1(-time_step)))


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
) -> Tensor:
    """Depthwise causal convolution as W shifted products: on a CPU much cheaper to differentiate than ``F.conv1d``.

    x ``[B, C, T]``, weight ``[C, W]``, bias ``[C]``; returns ``[B, C, T]`` in the type of x.
    """
    num_tokens, width = x.shape[-1], weight.shape[-1]
    padded = F.pad(x, (width - 1, 0))
    out = padded[..., :num_tokens] * weight[:, :1]
    for i in range(1, width):
        out = out + padded[..., i : i + num_tokens] * weight[:, i : i + 1]
    if bias is not None:
        out = out + bias[:, None]
    return (F.silu(out) if activation == "silu" else out).to(x.dtype)


def chunk_gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, chunk_size: int = CHUNK_SIZE, **_: Any
) -> tuple[Tensor, None]:
    """The gated delta rule from a zero state, chunk by chunk (WY form), always in fp32.

    query, key ``[B, T, Hk, K]``, value ``[B, T, H, V]``, g (log decay) and beta ``[B, T, H]``; returns
    ``[B, T, H, V]`` in the type of query, and no state.
    """
    with torch.autocast(query.device.type, enabled=False):  # a bf16 solve would lose the small corrections
        out = _delta_rule_fp32(query, key, value, g, beta, chunk_size)
    return out.to(query.dtype), None


def _delta_rule_fp32(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk_size: int) -> Tensor:
    num_tokens, group = q.shape[1], v.shape[2] // q.shape[2]
    q, k = (_unit_rows(t.float()).repeat_interleave(group, dim=2) for t in (q, k))
    q = q * q.shape[-1] ** -0.5
    q, k, v, g, beta = (_chunks(t, chunk_size) for t in (q, k, v, g[..., None], beta[..., None]))  # [B, H, n, C, .]
    decay = g.cumsum(-2)  # [B, H, n, C, 1], log of the decay since the chunk began
    causal = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=q.device).tril()
    pairwise = (decay - decay.mT).masked_fill(~causal, float("-inf")).exp()  # [B, H, n, C, C]

    # (I + L) [U0 | W] = beta [V | e^G K]: only L's strict lower part is read, the diagonal is taken as one
    system = beta * (k @ k.mT) * pairwise
    right = beta * torch.cat([v, decay.exp() * k], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    update, readout = solved.split([v.shape[-1], k.shape[-1]], dim=-1)  # U = U0 - W S

    last = decay[..., -1:, :]  # [B, H, n, 1, 1]
    keys_to_end = (k * (last - decay).exp()).mT  # [B, H, n, K, C]
    states = _states_at_chunk_starts(last.exp(), keys_to_end @ readout, keys_to_end @ update)
    attention = (q @ k.mT) * pairwise
    out = (q * decay.exp()) @ states + attention @ (update - readout @ states)
    tokens: Tensor = out.flatten(2, 3)[:, :, :num_tokens].transpose(1, 2)
    return tokens


def _states_at_chunk_starts(decay: Tensor, erase: Tensor, write: Tensor) -> Tensor:
    """Run ``S <- (decay - erase) S + write`` over the chunks: one batched product each, the only sequential part.

    decay ``[B, H, n, 1, 1]``, erase ``[B, H, n, K, K]``, write ``[B, H, n, K, V]``; returns ``[B, H, n, K, V]``.
    """
    eye = torch.eye(erase.shape[-1], device=erase.device)
    transition = (decay * eye - erase).flatten(0, 1)  # [B*H, n, K, K]
    flat_write = write.flatten(0, 1)
    states = [torch.zeros_like(flat_write[:, 0])]
    for chunk in range(write.shape[2] - 1):
        states.append(torch.baddbmm(flat_write[:, chunk], transition[:, chunk], states[-1]))
    stacked: Tensor = torch.stack(states, dim=1).unflatten(0, write.shape[:2])
    return stacked


def _unit_rows(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _chunks(x: Tensor, chunk_size: int) -> Tensor:
    """Reshape ``[B, T, H, D]`` to fp32 ``[B, H, n, C, D]``; zero rows fill the last chunk (no decay, no write)."""
    x = F.pad(x.float().transpose(1, 2), (0, 0, 0, -x.shape[1] % chunk_size))
    chunks: Tensor = x.contiguous().unflatten(2, (-1, chunk_size))
    return chunks


@contextmanager
def fast_operators() -> Iterator[None]:
    """Let transformers' Qwen3.5 modules run on the operators above inside the ``with`` block."""
    replacements: dict[str, Callable[..., Any]] = {_CONV: causal_conv1d, _DELTA_RULE: chunk_gated_delta_rule}
    missing = [name for name in replacements if not hasattr(modeling_qwen3_5, name)]
    if missing:
        raise ConfigError(f"this version of transformers has no {missing[0]} in its Qwen3.5 module: use 5.17 to 5.23")
    originals = {name: getattr(modeling_qwen3_5, name) for name in replacements}
    for name, function in replacements.items():
        setattr(modeling_qwen3_5, name, function)
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(modeling_qwen3_5, name, function)
