"""Random block heads in their published layouts, and what they compute, from the formulas alone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from tests.heads import RandomTensors

EPS, THETA = 1e-5, 500.0
NUM_LAYERS, HEADS, DIM = 2, (4, 2), 10
BLOCK, READS = 6, (2, 0)  # the target has 4 layers; features are in the order of the config


RANK, TAPS, GROUP, CANDIDATES = 5, 2, 4, 7
SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class Variant:
    """What distinguishes a head from a DFlash head: fields of its config, and the kind of its links."""

    config: dict[str, Any]
    nested: dict[str, Any]
    links: str = ""  # vanilla, gated, rnn or selector
    is_convolved: bool = False
    drafts_at_root: bool = False
    window: tuple[int | None, ...] = (None, None)  # of each layer
    is_causal: tuple[bool, ...] = (False, False)
    speculators: dict[str, Any] | None = None  # what the config says in the layout of that name; None: its own layout
    draft_vocab: int | None = None  # tokens that are drafted; None: all of the target's


def _markov(kind: str) -> dict[str, Any]:
    return {"markov_rank": RANK, "markov_head_type": kind}


_SPARK = {"architectures": ["Qwen3DSparkModel"], "enable_confidence_head": True, "num_anchors": 8}
_SPECULATED = {"speculators_model_type": "dspark", "enable_confidence_head": True, "confidence_head_with_markov": True}
_WINDOW = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}
_SELECTOR = {"selector_rank": RANK, "selector_top_k": CANDIDATES, "conv_kernel_size": TAPS, "conv_group_size": GROUP}
VARIANTS = {
    "dflash": Variant({}, {}),
    "dflash-windows": Variant(
        _WINDOW | {"layer_types": [SLIDING, FULL]}, {}, window=(9, None), is_causal=(True, False)
    ),
    "dflash-causal": Variant({"is_causal": True}, {}, is_causal=(True, True)),
    "dflash2": Variant(
        _WINDOW | {"architectures": ["DFlash2DraftModel"], "layer_types": [SLIDING] * 2, "is_causal": False},
        _SELECTOR,
        links="selector",
        is_convolved=True,
        window=(9, 9),
    ),
    "speculators": Variant(
        _WINDOW | {"layer_types": [SLIDING, FULL]},
        {},
        window=(9, None),
        is_causal=(True, False),
        speculators={"sliding_window_non_causal": False},
        draft_vocab=50,
    ),
    "speculators-anchor": Variant(
        _WINDOW | {"layer_types": [FULL, SLIDING]},
        {},
        drafts_at_root=True,
        window=(None, 9),
        speculators={"sliding_window_non_causal": True, "sample_from_anchor": True},
    ),
    "speculators-dspark": Variant(
        {"architectures": ["DSparkSpeculator"]},
        {},
        links="gated",
        drafts_at_root=True,
        speculators=_SPECULATED | _markov("gated") | {"projector_type": "dflash", "sample_from_anchor": True},
    ),
    "speculators-dspark-apart": Variant(
        {"architectures": ["DraftModel"]},
        {},
        links="vanilla",
        speculators=_SPECULATED | _markov("vanilla") | {"markov_head_type": None, "sample_from_anchor": False},
    ),
    "dspark": Variant(_SPARK | _markov("vanilla"), {}, links="vanilla", drafts_at_root=True),
    "dspark-gated": Variant(_SPARK, _markov("gated"), links="gated", drafts_at_root=True),
    "dspark-rnn": Variant(
        {"architectures": ["DSparkDraftModel"]},
        _markov("rnn") | {"projector_type": "dspark"},
        links="rnn",
        drafts_at_root=True,
    ),
    "dspark-apart": Variant(_SPARK | _markov("vanilla"), {"sample_from_anchor": False}, links="vanilla"),
    "dspark-without": Variant(_SPARK | {"markov_rank": 0}, {}, drafts_at_root=True),
}


@dataclass(frozen=True)
class BlockFiles:
    """A written head."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    variant: Variant = VARIANTS["dflash"]


def write_block_head(
    folder: Path, target: Path, seed: int, reads: tuple[int, ...] = READS, variant: str = "dflash"
) -> BlockFiles:
    """A random head for the checkpoint in ``target``."""
    of = VARIANTS[variant]
    text = json.loads((target / "config.json").read_text("utf8"))
    width, vocab = text["hidden_size"], text["vocab_size"]
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": 2 * width + 6,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": HEADS[0],
        "num_key_value_heads": HEADS[1],
        "head_dim": DIM,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * NUM_LAYERS,
        "num_target_layers": 4,
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": vocab - 1, "target_layer_ids": list(reads)} | of.nested,
        **of.config,
    }
    tensors = block_tensors(width, len(reads), seed) | tensors_of_variant(of, vocab, width, seed)
    head = BlockFiles(folder, config, tensors, of)
    save_block_head(head)
    return head


def block_tensors(width: int, num_reads: int, seed: int) -> dict[str, Tensor]:
    random, inner = RandomTensors(seed), 2 * width + 6
    num_q, num_kv = HEADS[0] * DIM, HEADS[1] * DIM
    tensors = {"fc.weight": random.matrix(width, num_reads * width)}
    tensors |= {f"{name}.weight": random.scales(width) for name in ("hidden_norm", "norm")}
    for layer in range(NUM_LAYERS):
        name = f"layers.{layer}."
        sizes = {"q": (num_q, width), "k": (num_kv, width), "v": (num_kv, width), "o": (width, num_q)}
        tensors |= {f"{name}self_attn.{part}_proj.weight": random.matrix(*size) for part, size in sizes.items()}
        tensors |= {f"{name}self_attn.{part}_norm.weight": random.scales(DIM) for part in "qk"}
        sizes = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
        tensors |= {f"{name}mlp.{part}_proj.weight": random.matrix(*size) for part, size in sizes.items()}
        norms = "input_layernorm", "post_attention_layernorm"
        tensors |= {f"{name}{norm}.weight": random.scales(width) for norm in norms}
    return tensors


def tensors_of_variant(of: Variant, vocab: int, width: int, seed: int) -> dict[str, Tensor]:
    random, tensors = RandomTensors(seed + 1), dict[str, Tensor]()
    if of.draft_vocab is not None:
        ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))[: of.draft_vocab].sort().values
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": torch.isin(torch.arange(vocab), ids)}
        tensors["lm_head.weight"] = random.matrix(of.draft_vocab, width)
    if of.links == "selector":
        name = "candidate_selector."
        tensors |= {f"{name}{part}_codebook": 2 * random.matrix(vocab, RANK) for part in ("predecessor", "successor")}
        tensors[f"{name}hidden_projection.weight"] = random.matrix(RANK, width)
    elif of.links:
        tensors |= {f"markov_head.markov_w{i}.weight": 2 * random.matrix(vocab, RANK) for i in (1, 2)}
        tensors |= {"confidence_head.proj.weight": random.matrix(1, width + RANK)}
        tensors |= {"confidence_head.proj.bias": torch.ones(1)}
    elif of.drafts_at_root and of.speculators is None:  # it knows no tokens, and has no bias
        tensors |= {"confidence_head.proj.weight": random.matrix(1, width)}
    shape = {"gated": (RANK, width + RANK), "rnn": (3 * RANK, 2 * RANK + width)}.get(of.links)
    if shape is not None:
        name = f"markov_head.{'gate' if of.links == 'gated' else 'joint'}_proj"
        tensors |= {f"{name}.weight": random.matrix(*shape), f"{name}.bias": random.matrix(1, shape[0])[0]}
    if of.is_convolved:
        for name in (f"layers.{layer}.{part}_conv" for layer in range(NUM_LAYERS) for part in ("attention", "mlp")):
            tensors[f"{name}.base_kernel"] = torch.stack([random.matrix(TAPS, width) for _ in range(2)])
            tensors[f"{name}.kernel_projection.weight"] = random.matrix(2 * TAPS * (width // GROUP), width)
    return tensors


def save_block_head(head: BlockFiles, **changes: Any) -> None:
    """Write a head, perhaps with another config; fields that are None are left out."""
    head.folder.mkdir(parents=True, exist_ok=True)
    save_file(head.tensors, head.folder / "model.safetensors", {"format": "pt"})
    config = {name: value for name, value in {**head.config, **changes}.items() if value is not None}
    if head.variant.speculators is not None:
        config = speculators_config(config, head.variant)
    (head.folder / "config.json").write_text(json.dumps(config), "utf8")


def speculators_config(config: dict[str, Any], of: Variant) -> dict[str, Any]:
    """The same config in the layout of vllm-project/speculators, without fields of the layers that are the class's."""
    inside = {"architectures", "block_size", "dflash_config", "hidden_act", "num_target_layers", "tie_word_embeddings"}
    settings = config["dflash_config"]
    return {
        "architectures": config["architectures"],
        "aux_hidden_state_layer_ids": [i + 1 for i in settings["target_layer_ids"]],  # what goes into a layer
        "block_size": config["block_size"],
        "draft_vocab_size": of.draft_vocab or config["vocab_size"],
        "mask_token_id": settings["mask_token_id"],
        "speculators_config": {"algorithm": "dflash", "proposal_methods": [{"speculative_tokens": BLOCK - 1}]},
        "speculators_model_type": "dflash",
        "speculators_version": "0.5.0",
        "target_hidden_size": None,
        "transformer_layer_config": {name: value for name, value in config.items() if name not in inside},
        **(of.speculators or {}),
    }


class BlockReference:
    """A head's formula, over context and block at once and without any cache, in float64."""

    def __init__(self, head: BlockFiles, embedding: Tensor, output: Tensor) -> None:
        """embedding, output: [V, H], the target's."""
        self.tensors = {name: tensor.double() for name, tensor in head.tensors.items()}
        self._embedding, self._output = embedding.double(), output.double()
        self._drafted = torch.arange(len(output))
        if "d2t" in head.tensors:
            self._output = self.tensors["lm_head.weight"]
            self._drafted = head.tensors["d2t"] + torch.arange(len(self._output))
        self._mask, self._of = head.config["dflash_config"]["mask_token_id"], head.variant

    def __call__(self, features: Tensor, root: int, num_steps: int) -> Tensor:
        """Logits [num_steps, V] behind a root, with the target's features [T, F] at all positions before it."""
        logits = torch.full((num_steps, len(self._embedding)), -torch.inf, dtype=torch.float64)
        logits[:, self._drafted] = self.hidden(features, root, num_steps) @ self._output.T
        return logits

    def hidden(self, features: Tensor, root: int, num_steps: int) -> Tensor:
        """Hidden states [num_steps, H] that the logits are made of."""
        context = self._norm("hidden_norm", self._linear("fc", features.double()))
        length = num_steps if self._of.drafts_at_root else num_steps + 1
        x = self._embedding[[root] + [self._mask] * (length - 1)]
        for layer in range(NUM_LAYERS):
            name = f"layers.{layer}."
            x = x + self._convolved(
                f"{name}attention_conv",
                self._norm(f"{name}input_layernorm", x),
                lambda y, name=name, layer=layer: self._attend(name, layer, y, context),  # type: ignore[misc]
            )
            x = x + self._convolved(
                f"{name}mlp_conv",
                self._norm(f"{name}post_attention_layernorm", x),
                lambda y, name=name: self._mlp(name, y),  # type: ignore[misc]
            )
        return self._norm("norm", x)[length - num_steps :]

    def behind(self, marginal: Tensor, hidden: Tensor, token: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """What follows a drafted token.

        Args:
            marginal, hidden: [V] and [H], of the block where the next token is predicted.
            token: the drafted one, or the root.
            state: [R], carried by its path.

        Returns:
            Logits [V] and the state behind it.
        """
        marginal, hidden, kind = marginal.double(), hidden.double(), self._of.links
        if kind == "selector":
            name, scores = "candidate_selector.", torch.full_like(marginal, -torch.inf)
            above = self.tensors[f"{name}predecessor_codebook"][token]
            above = above * self._linear(f"{name}hidden_projection", hidden)
            for candidate in marginal.topk(CANDIDATES).indices.tolist():
                scores[candidate] = marginal[candidate] + above @ self.tensors[f"{name}successor_codebook"][candidate]
            return scores, state
        if not kind:
            return marginal, state
        row, output = (self.tensors[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
        latent = row[token]
        if kind == "gated":
            latent = latent * self._biased("markov_head.gate_proj", torch.cat([hidden, latent])).sigmoid()
        elif kind == "rnn":
            mixed = self._biased("markov_head.joint_proj", torch.cat([state, latent, hidden]))
            keep = mixed[:RANK].sigmoid()
            state = keep * state + (1 - keep) * mixed[RANK : 2 * RANK].tanh()
            latent = mixed[2 * RANK :].tanh()
        return marginal + output @ latent, state

    def accepts(self, hidden: Tensor, above: int) -> float | None:
        """The probability that the token drafted below ``above`` is accepted, as a confidence head says it.

        hidden: [H], of the block where that token is predicted.
        """
        weight = self.tensors.get("confidence_head.proj.weight")
        if weight is None:
            return None
        known = [hidden.double(), *([self.tensors["markov_head.markov_w1.weight"][above]] if self._of.links else [])]
        bias = float(self.tensors.get("confidence_head.proj.bias", torch.zeros(1)))
        return 1 / (1 + math.exp(-float(weight[0] @ torch.cat(known)) - bias))

    def _convolved(self, name: str, x: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
        if not self._of.is_convolved:
            return layer(x)
        kernels = self._linear(f"{name}.kernel_projection", x).view(len(x), 2, TAPS, -1)

        def convolve(y: Tensor, side: int) -> Tensor:
            out = torch.zeros_like(y)
            for token in range(len(y)):
                for tap in range(min(TAPS, token + 1)):
                    own = kernels[token, side, tap].repeat_interleave(GROUP)
                    out[token] += (self.tensors[f"{name}.base_kernel"][side, tap] + own) * y[token - tap]
            return out

        return convolve(layer(convolve(x, 0)), 1)

    def _mlp(self, name: str, y: Tensor) -> Tensor:
        gate = F.silu(self._linear(f"{name}mlp.gate_proj", y))
        return self._linear(f"{name}mlp.down_proj", gate * self._linear(f"{name}mlp.up_proj", y))

    def _attend(self, name: str, layer: int, inputs: Tensor, context: Tensor) -> Tensor:
        def heads(part: str, x: Tensor) -> Tensor:
            return self._linear(f"{name}self_attn.{part}_proj", x).unflatten(-1, (-1, DIM)).transpose(0, 1)

        everything = torch.cat([context, inputs])
        positions = torch.arange(len(everything))
        own = positions[len(context) :]
        sees = torch.ones(len(own), len(positions), dtype=torch.bool)  # all of the context and of the block
        if self._of.is_causal[layer]:
            sees &= positions <= own[:, None]
        if (window := self._of.window[layer]) is not None:
            sees &= own[:, None] - positions < window
        q = rotated(self._norm(f"{name}self_attn.q_norm", heads("q", inputs)), own)
        k = rotated(self._norm(f"{name}self_attn.k_norm", heads("k", everything)), positions)
        group = HEADS[0] // HEADS[1]
        k, v = k.repeat_interleave(group, 0), heads("v", everything).repeat_interleave(group, 0)
        scores = (q @ k.mT / DIM**0.5).masked_fill(~sees, -torch.inf)
        out = scores.softmax(-1) @ v
        return self._linear(f"{name}self_attn.o_proj", out.transpose(0, 1).flatten(1))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.tensors[f"{name}.weight"], EPS)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"])

    def _biased(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"])


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate [heads, L, D]: component i and i + D/2 by position times THETA^(-2i/D)."""
    angles = positions.double()[:, None] * THETA ** (-torch.arange(0, DIM, 2).double() / DIM)
    cos, sin = angles.cos(), angles.sin()
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
