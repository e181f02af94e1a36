"""The demo's model as it is trained: transformers' Qwen3.5 text model and the MTP head beside it."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5GatedDeltaNet,
    Qwen3_5RMSNorm,
)

from specmamba.bench.demo.settings import Architecture

MTP_STEPS = 3  # how deep the MTP head is trained on its own outputs
MTP_LOSS_WEIGHT = 0.3  # of the mean over the depths
TIME_STEP_RANGE = (1e-3, 1e-1)  # of a gated-delta-net head at its start


def text_config(architecture: Architecture) -> Qwen3_5TextConfig:
    """The configuration that transformers builds the model from."""
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
    config._attn_implementation = "sdpa"  # causal without a mask, which is what the MTP layer relies on
    return config


class MTPHead(nn.Module):
    """Guesses the token after next: ``fc([norm(embedding of x[t+1]), norm(h[t])])``, one attention layer, a norm."""

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
        """embeddings, hidden ``[B, T, H]``; rotary: cosines and sines of the embedded tokens' positions."""
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
        """Final hidden states at depths 0 (the target) to ``num_steps`` (the head, each depth fed with the one before).

        tokens ``[B, T]``; depth d is ``[B, T - d, H]``, and its row t predicts token t + d + 1.
        """
        text = self.target.model
        hidden: Tensor = text(input_ids=tokens, use_cache=False).last_hidden_state
        states = [hidden]
        for depth in range(1, num_steps + 1):
            given = tokens[:, depth:]  # the tokens that the head is told, as at draft time
            positions = torch.arange(depth, tokens.shape[1], device=tokens.device).expand(3, len(tokens), -1)
            hidden = hidden[:, :-1]
            hidden = self.mtp(text.embed_tokens(given), hidden, text.rotary_emb(hidden, positions))
            states.append(hidden)
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        """``[..., H]`` to fp32 ``[..., V]``."""
        return F.linear(hidden, self.target.lm_head.weight).float()

    def losses(self, tokens: Tensor) -> list[Tensor]:
        """Mean cross entropy, in nats per token, of the target and of each depth of the head."""
        return [
            F.cross_entropy(self.logits(hidden[:, :-1]).flatten(0, 1), tokens[:, depth + 1 :].flatten())
            for depth, hidden in enumerate(self.hidden_states(tokens))
        ]

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


def new_model(architecture: Architecture) -> DemoModel:
    """A model at its random start, drawn from torch's global generator."""
    config = text_config(architecture)
    model = DemoModel(Qwen3_5ForCausalLM(config), MTPHead(config))
    for module in model.modules():
        if isinstance(module, Qwen3_5GatedDeltaNet):
            _spread_time_steps(module.dt_bias)
    return model


@torch.no_grad()
def _spread_time_steps(dt_bias: Tensor) -> None:
    """Log-uniform time steps, so that some states remember from the start; softplus(dt_bias) is the time step."""
    low, high = (math.log(limit) for limit in TIME_STEP_RANGE)
    time_step = torch.exp(low + torch.rand_like(dt_bias) * (high - low))
    dt_bias.copy_(time_step + torch.log(-torch.expm1(-time_step)))
