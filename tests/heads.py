"""Random EAGLE and EAGLE-3 heads in their published layouts, and what they compute, from the formulas alone."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
EPS = 1e-5


@dataclass(frozen=True)
class Style:
    """The variants of a head."""

    architecture: str
    first_layer: str = "layers.0."  # what the names of its tensors begin with
    prefix: str = ""  # of all names but those of output head and maps
    nested: str | None = None  # the config's field that most of it is in
    width: int | None = None  # None: the target's
    num_layers: int = 1
    num_heads: tuple[int, int] = (4, 2)
    head_dim: int = 10
    draft_vocab: int | None = None  # None: all of the target's
    has_embedding: bool = False
    has_output: bool = False
    is_tied: bool = False
    has_biases: bool = False
    has_qk_norm: bool = False
    adds_normed: bool = False
    norms_features: bool = False  # in front of fc
    left_out: tuple[str, ...] = ()  # of the config
    reads: tuple[int, ...] | None = (2, 2, 1)  # layers of the target; None: its last hidden state
    config: tuple[tuple[str, Any], ...] = ()

    @property
    def is_eagle3(self) -> bool:
        return "agle3" in self.architecture


NESTED_IDS = ("eagle_config", {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True})

OUTSIDE = {
    *("draft_vocab_size", "eagle_config", "norm_before_fc", "norm_before_residual", "fc_norm", "norm_output"),
    *("eagle_aux_hidden_state_layer_ids", "speculators_config", "speculators_model_type"),
}
SPECULATORS = (
    ("norm_before_residual", True),
    ("norm_before_fc", True),
    ("eagle_aux_hidden_state_layer_ids", [1, 2, 3]),
    ("speculators_model_type", "eagle3"),
    ("speculators_config", {"algorithm": "eagle3", "proposal_methods": [{"speculative_tokens": 3}]}),
)

STYLES: dict[str, Style] = {
    "eagle": Style("LlamaForCausalLMEagle"),
    "eagle-all": Style(
        "LlamaForCausalLM",
        nested="model",
        num_layers=2,
        num_heads=(3, 3),
        head_dim=16,
        has_embedding=True,
        has_output=True,
        has_biases=True,
        config=(("rope_scaling", LLAMA3_ROPE), ("rope_theta", 500.0)),
    ),
    "eagle3": Style("LlamaForCausalLMEagle3", "midlayer.", draft_vocab=70, has_output=True),
    "eagle3-narrow": Style(
        "Eagle3LlamaForCausalLM",
        prefix="model.",
        width=22,
        num_layers=2,
        num_heads=(6, 2),
        has_embedding=True,
        has_output=True,
        has_biases=True,
        has_qk_norm=True,
        adds_normed=True,
        reads=(1, 3),
        config=(("norm_before_residual", True), ("eagle_aux_hidden_state_layer_ids", [3, 1])),
    ),
    "eagle3-nested": Style(
        "Eagle3Speculator",
        nested="transformer_layer_config",
        draft_vocab=5,
        has_embedding=True,
        has_output=True,
        reads=(1, 2, 3),
        config=(NESTED_IDS,),
    ),
    "eagle3-speculators": Style(
        "Eagle3DraftModel",
        nested="transformer_layer_config",
        draft_vocab=60,
        has_output=True,
        adds_normed=True,
        norms_features=True,
        reads=(1, 2, 3),
        left_out=("hidden_act", "max_position_embeddings", "tie_word_embeddings"),
        config=SPECULATORS,
    ),
    "eagle3-last": Style(
        "LlamaForCausalLMEagle3", "midlayer.", reads=None, config=(("eagle_config", {"use_aux_hidden_state": False}),)
    ),
    "eagle3-tied": Style("LlamaForCausalLMEagle3", "midlayer.", has_embedding=True, is_tied=True),
}


@dataclass(frozen=True)
class Head:
    """A written head. Tensors have the names of the layouts, with ``layers.0.`` and without prefixes."""

    folder: Path
    style: Style
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    target_ids: Tensor | None  # [draft vocabulary] int64


def write_head(folder: Path, target: Path, style: Style | str, seed: int) -> Head:
    """A random head for the checkpoint in ``target``."""
    style = STYLES[style] if isinstance(style, str) else style
    text = json.loads((target / "config.json").read_text("utf8"))
    vocab, target_width = text["vocab_size"], text["hidden_size"]
    config = head_config(style, vocab, target_width)
    tensors = head_tensors(style, config, target_width, seed)
    ids = None
    if style.draft_vocab is not None:
        ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))[: style.draft_vocab].sort().values
    head = Head(folder, style, config, tensors, ids)
    save(head)
    return head


def head_config(style: Style, vocab: int, target_width: int) -> dict[str, Any]:
    width = style.width or target_width
    config = {
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": 2 * width + 6,
        "num_hidden_layers": style.num_layers,
        "num_attention_heads": style.num_heads[0],
        "num_key_value_heads": style.num_heads[1],
        "head_dim": style.head_dim,
        "rms_norm_eps": EPS,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "tie_word_embeddings": style.is_tied,
        "draft_vocab_size": style.draft_vocab,
        **dict(style.config),
    }
    if width != target_width:
        config["target_hidden_size"] = target_width
    return config


class RandomTensors:
    """Weights large enough that every part shows in the logits."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, out: int, into: int) -> Tensor:
        return torch.randn(out, into, generator=self._generator) * 1.5 / math.sqrt(into)

    def scales(self, size: int) -> Tensor:
        return torch.rand(size, generator=self._generator) + 0.5

    def bias(self, size: int) -> Tensor:
        return torch.randn(size, generator=self._generator) * 0.3


def head_tensors(style: Style, config: dict[str, Any], target_width: int, seed: int) -> dict[str, Tensor]:
    random, width, vocab = RandomTensors(seed), config["hidden_size"], config["vocab_size"]
    num_inputs = 2 * width
    if style.is_eagle3:
        num_inputs = 0 if style.reads is None else len(style.reads) * target_width
    tensors = {"fc.weight": random.matrix(width, num_inputs)} if num_inputs else {}
    if style.has_biases:
        tensors["fc.bias"] = random.bias(width)
    if style.norms_features:
        tensors["input_norm.weight"] = random.scales(num_inputs)
    for layer in range(style.num_layers):
        tensors |= layer_tensors(style, config, random, layer)
    if style.is_eagle3:
        tensors["norm.weight"] = random.scales(width)
    if style.has_embedding:
        tensors["embed_tokens.weight"] = random.matrix(vocab, width) * math.sqrt(width)
    if style.has_output:
        tensors["lm_head.weight"] = random.matrix(style.draft_vocab or vocab, width)
    return tensors


def layer_tensors(style: Style, config: dict[str, Any], random: RandomTensors, layer: int) -> dict[str, Tensor]:
    width, inner, dim, name = config["hidden_size"], config["intermediate_size"], style.head_dim, f"layers.{layer}."
    num_q, num_kv = style.num_heads
    into = 2 * width if style.is_eagle3 and layer == 0 else width
    parts = {"q": (num_q * dim, into), "k": (num_kv * dim, into), "v": (num_kv * dim, into), "o": (width, num_q * dim)}
    tensors = {}
    for part, size in parts.items():
        tensors[f"{name}self_attn.{part}_proj.weight"] = random.matrix(*size)
        if style.has_biases:
            tensors[f"{name}self_attn.{part}_proj.bias"] = random.bias(size[0])
    if style.has_qk_norm:
        tensors |= {f"{name}self_attn.{part}_norm.weight": random.scales(dim) for part in "qk"}
    for part, size in {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}.items():
        tensors[f"{name}mlp.{part}_proj.weight"] = random.matrix(*size)
    norms = ["post_attention_layernorm"]
    norms += ["input_layernorm"] if style.is_eagle3 or layer else []
    norms += ["hidden_norm"] if style.is_eagle3 and layer == 0 else []
    return tensors | {f"{name}{norm}.weight": random.scales(width) for norm in norms}


def save(head: Head, **changes: Any) -> None:
    """Write a head, perhaps with another config; fields that are None are left out."""
    head.folder.mkdir(parents=True, exist_ok=True)
    style = head.style

    def stored(name: str) -> str:
        if name == "lm_head.weight":
            return name
        return style.prefix + (style.first_layer + name[9:] if name.startswith("layers.0.") else name)

    tensors = {stored(name): tensor.contiguous() for name, tensor in head.tensors.items()}
    if head.target_ids is not None:
        tensors["d2t"] = head.target_ids - torch.arange(len(head.target_ids))
        tensors["t2d"] = torch.isin(torch.arange(head.config["vocab_size"]), head.target_ids)
    save_file(tensors, head.folder / "model.safetensors", {"format": "pt"})
    config = {name: value for name, value in {**head.config, **changes}.items() if value is not None}
    config = {name: value for name, value in config.items() if name not in style.left_out}
    if style.nested is not None:
        outside = OUTSIDE & config.keys()
        config = {name: config[name] for name in outside} | {
            style.nested: {name: value for name, value in config.items() if name not in outside}
        }
    config |= {"architectures": [style.architecture], "model_type": "eagle" if style.nested else "llama"}
    (head.folder / "config.json").write_text(json.dumps(config), "utf8")


class Reference:
    """A head's formula, over all entries at once and without any cache, in float64."""

    def __init__(self, head: Head, embedding: Tensor, output: Tensor) -> None:
        """embedding, output: [V, H], the target's."""
        self.style = head.style
        self.tensors = {name: tensor.double() for name, tensor in head.tensors.items()}
        self._ids, self._vocab = head.target_ids, len(embedding)
        self._embedding = self.tensors.get("embed_tokens.weight", embedding.double())
        own = self.tensors.get("lm_head.weight", self._embedding if head.style.is_tied else None)
        self._output = output.double() if own is None else own
        rope = {name: head.config[name] for name in head.config if name.startswith("rope_")}
        config = LlamaConfig.from_dict({"head_dim": head.style.head_dim, "max_position_embeddings": 128, **rope})
        self._rotary = LlamaRotaryEmbedding(config)

    def combine(self, features: Tensor) -> Tensor:
        """[L, F] -> [L, W]."""
        if not self.style.is_eagle3 or self.style.reads is None:
            return features.double()
        features = features.double()
        return self._linear("fc", self._norm("input_norm", features) if self.style.norms_features else features)

    def __call__(self, tokens: list[int], hidden: Tensor, first: int) -> Tensor:
        """Entries of tokens [L] at positions ``first`` and up, with hidden states [L, W]: the head's own [L, W]."""
        embedded, hidden = self._embedding[tokens], hidden.double()
        positions = torch.arange(first, first + len(tokens))[None]
        for layer in range(self.style.num_layers):
            name = f"layers.{layer}."
            if layer:
                x, inputs = hidden, self._norm(f"{name}input_layernorm", hidden)
            elif self.style.is_eagle3:
                normed = self._norm(f"{name}hidden_norm", hidden)
                x = normed if self.style.adds_normed else hidden
                inputs = torch.cat([self._norm(f"{name}input_layernorm", embedded), normed], -1)
            else:
                x = inputs = self._linear("fc", torch.cat([embedded, hidden], -1))
            x = x + self._attend(name, inputs, positions)
            y = self._norm(f"{name}post_attention_layernorm", x)
            gate = F.silu(self._linear(f"{name}mlp.gate_proj", y))
            hidden = x + self._linear(f"{name}mlp.down_proj", gate * self._linear(f"{name}mlp.up_proj", y))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[W] -> [V]."""
        logits = (self._norm("norm", hidden) if self.style.is_eagle3 else hidden) @ self._output.T
        if self._ids is None:
            return logits
        full = torch.full((self._vocab,), -torch.inf, dtype=torch.float64)
        full[self._ids] = logits
        return full

    def _attend(self, name: str, inputs: Tensor, positions: Tensor) -> Tensor:
        def heads(part: str) -> Tensor:
            x = self._linear(f"{name}self_attn.{part}_proj", inputs).unflatten(-1, (-1, self.style.head_dim))
            norm = f"{name}self_attn.{part}_norm"
            return (self._norm(norm, x) if f"{norm}.weight" in self.tensors else x).transpose(0, 1)[None]

        q, k, v = (heads(part) for part in "qkv")
        q, k = apply_rotary_pos_emb(q, k, *self._rotary(q, positions))
        group = self.style.num_heads[0] // self.style.num_heads[1]
        out = F.scaled_dot_product_attention(
            q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), is_causal=True
        )
        return self._linear(f"{name}self_attn.o_proj", out[0].transpose(0, 1).flatten(1))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.tensors[f"{name}.weight"], EPS)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))
