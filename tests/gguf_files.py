"""GGUF files of Qwen3.5 and LFM2, written with the format's own library as llama.cpp's converter writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.torch import load_file
from torch import Tensor

F32 = GGMLQuantizationType.F32
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # types of tokens
LAYERS = (
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("linear_attn.in_proj_qkv", "attn_qkv"),
    ("linear_attn.in_proj_z", "attn_gate"),
    ("linear_attn.in_proj_a", "ssm_alpha"),
    ("linear_attn.in_proj_b", "ssm_beta"),
    ("linear_attn.conv1d", "ssm_conv1d"),
    ("linear_attn.norm", "ssm_norm"),
    ("linear_attn.out_proj", "ssm_out"),
    ("linear_attn.A_log", "ssm_a"),
    ("linear_attn.dt_bias", "ssm_dt.bias"),
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "post_attention_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("mlp.gate", "ffn_gate_inp"),
    ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
    ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
    ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
    ("mlp.experts.gate_proj", "ffn_gate_exps.weight"),
    ("mlp.experts.up_proj", "ffn_up_exps.weight"),
    ("mlp.experts.down_proj", "ffn_down_exps.weight"),
    ("self_attn.out_proj", "attn_output"),
    ("self_attn.q_layernorm", "attn_q_norm"),
    ("self_attn.k_layernorm", "attn_k_norm"),
    ("conv.in_proj", "shortconv.in_proj"),
    ("conv.conv", "shortconv.conv"),
    ("conv.out_proj", "shortconv.out_proj"),
    ("operator_norm", "attn_norm"),
    ("ffn_norm", "ffn_norm"),
    ("feed_forward.w1", "ffn_gate"),
    ("feed_forward.w3", "ffn_up"),
    ("feed_forward.w2", "ffn_down"),
)
OTHERS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "model.norm.weight": "output_norm.weight",
    "model.embedding_norm.weight": "token_embd_norm.weight",  # of LFM2: behind the layers in spite of both names
    "mtp.fc.weight": "blk.{}.nextn.eh_proj.weight",
    "mtp.pre_fc_norm_embedding.weight": "blk.{}.nextn.enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "blk.{}.nextn.hnorm.weight",
    "mtp.norm.weight": "blk.{}.nextn.shared_head_norm.weight",
}
TypeOf = Callable[[str, tuple[int, ...]], GGMLQuantizationType]
Encode = Callable[[Any, GGMLQuantizationType], Any]  # values as numpy has them, a type; the bytes of its blocks


def write_gguf(
    folder: Path,
    file: Path,
    type_of: TypeOf = lambda name, shape: F32,
    extra: Mapping[str, int] | None = None,
    encode: Encode = quantize,
) -> Path:
    """Convert the checkpoint in ``folder``.

    Args:
        folder: of the checkpoint.
        file: to write.
        type_of: of each matrix whose rows are whole blocks, by its name in the file and its shape.
        extra: further metadata.
        encode: makes blocks of values.
    """
    config = json.loads((folder / "config.json").read_text())
    tensors = separated(load_file(folder / "model.safetensors"))
    writer = GGUFWriter(file, architecture_of(config))
    if writer.arch == "lfm2":
        write_lfm2_metadata(writer, config, len(tensors["model.layers.0.feed_forward.w1.weight"]))
    else:
        write_metadata(writer, config, has_mtp="mtp.fc.weight" in tensors)
    for key, number in (extra or {}).items():
        writer.add_uint32(key, number)
    write_tokens(writer, json.loads((folder / "tokenizer.json").read_text()), config["vocab_size"])
    for name, tensor in tensors.items():
        stored = name_of(name, config["num_hidden_layers"])
        values = converted(name, tensor.float(), config)
        kind = type_of(stored, tuple(values.shape)) if values.dim() > 1 and values.shape[-1] % 32 == 0 else F32
        data: Any = encode(np.ascontiguousarray(values.numpy()), kind)
        writer.add_tensor(stored, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def architecture_of(config: Mapping[str, Any]) -> str:
    """What llama.cpp calls the model of a config."""
    if config["model_type"] == "lfm2":
        return "lfm2"
    return "qwen35moe" if "num_experts" in config else "qwen35"


def separated(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts' gates and ups as tensors of their own, the ups first."""
    found = {}
    for name, tensor in tensors.items():
        prefix, _, kind = name.rpartition(".")
        if kind == "gate_up_proj":
            found[f"{prefix}.up_proj"], found[f"{prefix}.gate_proj"] = tensor.chunk(2, 1)[1], tensor.chunk(2, 1)[0]
        else:
            found[name] = tensor
    return found


def name_of(name: str, num_layers: int) -> str:
    """What llama.cpp calls a tensor."""
    if name in OTHERS:
        return OTHERS[name].format(num_layers)
    found = re.fullmatch(r"(model|mtp)\.layers\.(\d+)\.(.*)", name)
    assert found is not None, name
    layer, rest = int(found[2]) + (num_layers if found[1] == "mtp" else 0), found[3]
    for ours, theirs in LAYERS:
        if rest == ours or rest.startswith(f"{ours}."):
            return f"blk.{layer}.{theirs}{rest.removeprefix(ours)}"
    raise AssertionError(name)


def converted(name: str, x: Tensor, config: dict[str, Any]) -> Tensor:
    """The values that llama.cpp's converter writes."""
    if architecture_of(config) == "lfm2":
        return x.squeeze(1) if "conv.conv" in name else x
    keys, dim = config["linear_num_key_heads"], config["linear_value_head_dim"]
    each, first = config["linear_num_value_heads"] // keys, 2 * keys * config["linear_key_head_dim"]

    def tiled(x: Tensor, size: int) -> Tensor:
        return x.unflatten(0, (keys, each, size)).transpose(0, 1).flatten(0, 2)

    if (name.endswith("norm.weight") and "linear_attn" not in name) or "pre_fc_norm" in name:
        return x + 1
    if name.endswith("A_log"):
        return tiled(-x.exp(), 1)
    if name.endswith(("dt_bias", "in_proj_a.weight", "in_proj_b.weight")):
        return tiled(x, 1)
    if name.endswith("in_proj_z.weight"):
        return tiled(x, dim)
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        x = x.squeeze(1) if "conv1d" in name else x
        return torch.cat([x[:first], tiled(x[first:], dim)])
    if name.endswith("shared_expert_gate.weight"):
        return x.squeeze(0)
    if name.endswith("linear_attn.out_proj.weight"):
        return tiled(x.t(), dim).t()
    return x


def write_metadata(writer: GGUFWriter, config: dict[str, Any], has_mtp: bool) -> None:
    """What llama.cpp's converter says about the model."""
    head_dim, rope = config["head_dim"], config["rope_parameters"]
    value_heads = config["linear_num_value_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    else:
        writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"] + has_mtp)
    if has_mtp:
        writer.add_uint32(f"{writer.arch}.nextn_predict_layers", 1)
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_uint32(f"{writer.arch}.full_attention_interval", config["layer_types"].index("full_attention") + 1)
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(value_heads)
    writer.add_ssm_inner_size(value_heads * config["linear_value_head_dim"])
    writer.add_rope_freq_base(rope["rope_theta"])
    rotary = int(head_dim * rope["partial_rotary_factor"])
    writer.add_rope_dimension_count(rotary)
    writer.add_rope_dimension_sections([*rope.get("mrope_section", [rotary // 2, 0, 0]), 0])


def write_lfm2_metadata(writer: GGUFWriter, config: dict[str, Any], inner: int) -> None:
    """The same for LFM2; ``inner``: the width of its feed-forward layers, which the config may give unadjusted."""
    key_heads = config["num_key_value_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(inner)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv([key_heads if kind == "full_attention" else 0 for kind in config["layer_types"]])
    writer.add_layer_norm_rms_eps(config["norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    writer.add_vocab_size(config["vocab_size"])


def write_tokens(writer: GGUFWriter, tokenizer: dict[str, Any], num_tokens: int = 0) -> None:
    """The vocabulary of a byte-level tokenizer, filled up to ``num_tokens`` as the converter does."""
    kinds = {token["id"]: CONTROL if token["special"] else USER_DEFINED for token in tokenizer["added_tokens"]}
    added = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    pieces = {number: piece for piece, number in tokenizer["model"]["vocab"].items()} | added
    numbers = range(max(num_tokens, len(pieces)))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("lfm2" if writer.arch == "lfm2" else "qwen35")
    writer.add_token_list([pieces.get(number, f"[PAD{number}]") for number in numbers])
    writer.add_token_types([kinds.get(number, NORMAL if number in pieces else UNUSED) for number in numbers])
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    )
    writer.add_eos_token_id(min(added))
    writer.add_chat_template("{{ messages[0]['content'] }}")
