"""A DFlash or DSpark head of the small model, widened for the large one: the drafts are the same.

Target and head are connected by what the target writes to its residual, which is s times the small one's with zeros
behind it, by its embedding and by its output matrix. So a head grows by the rules of an attention layer, with the
heads' width kept: hidden size, neurons and heads grow by the factor of the target's hidden size, and what is new is
random where it does not show. Links between tokens (``markov_head``) do not grow. ``target_layer_ids`` stay, since new
layers of the target stand behind those that have a source.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specmamba.bench.inflate.checkpoint import check_folder, prepare_folder, read_tensors, write_json
from specmamba.bench.inflate.shape import Scales, Shape
from specmamba.bench.inflate.weights import (
    NOISE,
    ZERO,
    Axis,
    Matrix,
    Rule,
    Vector,
    WeightMaker,
    grouped,
    joined,
    padded,
    within,
)
from specmamba.errors import CheckpointError, ConfigError

KINDS = ("DFlashDraftModel", "Qwen3DSparkModel")


def inflate_head(
    folder: Path, out: Path, source: Shape, target: Shape, scales: Scales, seed: int, force: bool = False
) -> None:
    """Write the wide head; ``force``: in place of a checkpoint.

    Raises:
        ConfigError: the folder must not be written to, or the hidden size does not grow by a whole factor.
        CheckpointError: it is no head of these kinds for this target, or has tensors of other kinds.
    """
    check_folder(out, folder, force)
    raw, small = _read_config(folder), read_tensors(folder)
    if "fc.weight" not in small:
        raise CheckpointError(f"{folder} has no fc.weight, which reads the target's layers")
    if raw["hidden_size"] != source.hidden_size:
        raise CheckpointError(f"{folder} drafts for a hidden size of {raw['hidden_size']}, not {source.hidden_size}")
    factor, rest = divmod(target.hidden_size, source.hidden_size)
    if rest:
        raise ConfigError(
            f"the hidden size grows from {source.hidden_size} to {target.hidden_size}: a head needs a factor"
        )
    large = raw | {
        "hidden_size": target.hidden_size,
        "intermediate_size": raw["intermediate_size"] * factor,
        "num_attention_heads": raw["num_attention_heads"] * factor,
        "num_key_value_heads": raw["num_key_value_heads"] * factor,
        "rms_norm_eps": raw["rms_norm_eps"] * scales.eps,
    }
    maker = WeightMaker(source, target, raw["vocab_size"], scales, seed, rules=head_rules(scales))
    axes = head_axes(raw, large, small["fc.weight"].shape[1] // source.hidden_size)
    tensors = {name: maker.make(name, tensor.float(), axes).to(tensor.dtype) for name, tensor in small.items()}
    prepare_folder(out)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / "model.safetensors")
    write_json(out / "config.json", large)


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        raw: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} has no readable config.json: {error}") from None
    if raw.get("architectures") not in [[kind] for kind in KINDS]:
        raise CheckpointError(f"{folder} holds {raw.get('architectures')}: heads of {' and '.join(KINDS)} can grow")
    if missing := {"hidden_size", "head_dim", "intermediate_size", "vocab_size"} - raw.keys():
        raise CheckpointError(f"{folder}: config.json has no {min(missing)}")
    return raw


def head_axes(small: Mapping[str, Any], large: Mapping[str, Any], num_features: int) -> dict[str, Axis]:
    """All axes of a head by name, by both configs; ``num_features``: layers of the target that it reads."""
    width, head_dim, inner = small["hidden_size"], small["head_dim"], small["intermediate_size"]
    names = "num_key_value_heads", "num_attention_heads"
    kv_heads, q_heads = grouped(small[names[0]], small[names[1]], large[names[0]], large[names[1]])
    hidden, every = padded(width, large["hidden_size"], ZERO), torch.arange(head_dim)
    query, key = within(q_heads, every, head_dim), within(kv_heads, every, head_dim)
    sizes = [small[name] * head_dim for name in names]
    axes: dict[str, tuple[Tensor, int]] = {
        "hidden": (hidden, width),
        "features": (joined(*[(hidden, width)] * num_features), num_features * width),
        "inner": (padded(inner, large["intermediate_size"], NOISE), inner),
        "query": (query, sizes[1]),
        "key": (key, sizes[0]),
        "head": (every, head_dim),
        "vocabulary": (torch.arange(small["vocab_size"]), small["vocab_size"]),
    }
    if rank := small.get("markov_rank"):
        axes["rank"] = torch.arange(rank), rank
    return {name: Axis(source, size) for name, (source, size) in axes.items()}


def head_rules(scales: Scales) -> dict[str, Rule]:
    """The rules of a head's tensors, by their names without the layer. Head widths do not grow: queries keep theirs."""
    read, write, query_key = scales.read, scales.write, scales.read * scales.eps**0.5
    return {
        "fc.weight": Matrix("hidden", "features", 1.0),
        "hidden_norm.weight": Vector("hidden", offset=0.0),
        "norm.weight": Vector("hidden", scales.last_norm, offset=0.0),
        "input_layernorm.weight": Vector("hidden", offset=0.0),
        "post_attention_layernorm.weight": Vector("hidden", offset=0.0),
        "mlp.gate_proj.weight": Matrix("inner", "hidden", read),
        "mlp.up_proj.weight": Matrix("inner", "hidden", read),
        "mlp.down_proj.weight": Matrix("hidden", "inner", write),
        "self_attn.q_proj.weight": Matrix("query", "hidden", query_key),
        "self_attn.k_proj.weight": Matrix("key", "hidden", query_key),
        "self_attn.v_proj.weight": Matrix("key", "hidden", read),
        "self_attn.o_proj.weight": Matrix("hidden", "query", write),
        "self_attn.q_norm.weight": Vector("head", offset=0.0),
        "self_attn.k_norm.weight": Vector("head", offset=0.0),
        "markov_head.markov_w1.weight": Matrix("vocabulary", "rank", 1.0),
        "markov_head.markov_w2.weight": Matrix("vocabulary", "rank", 1.0),
    }
