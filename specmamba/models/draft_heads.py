"""Loading of draft heads that are checkpoints of their own and fit a target of any family.

These layouts are read, all safetensors with a config.json that has the fields of a Llama config. ``specmamba train
draft`` writes the second and the third one, so that other runtimes can load its heads too.

**EAGLE** (``eagle.py``; ``"architectures": ["LlamaForCausalLMEagle"]`` and others). Tensors: ``fc.weight`` [H, 2 H]
and perhaps ``fc.bias`` [H], over an embedding and a hidden state in this order; ``layers.i.`` with
``self_attn.{q,k,v,o}_proj``, ``mlp.{gate,up,down}_proj``, ``post_attention_layernorm`` and, from the second layer on,
``input_layernorm``; perhaps ``embed_tokens.weight`` and ``lm_head.weight`` [V, H].

**EAGLE-3** (``eagle.py``; ``LlamaForCausalLMEagle3`` and others). Tensors: ``midlayer.`` or ``layers.0.`` with
``hidden_norm`` and ``input_layernorm``, its q, k and v over 2 H inputs; ``fc.weight`` [H, 3 H of the target]; ``norm``;
``lm_head.weight`` [draft vocabulary, H]; ``d2t`` [draft vocabulary] integers, where draft token i is target token
i + d2t[i]; perhaps ``embed_tokens.weight``, and ``input_norm.weight`` [3 H of the target], a norm in front of fc
(``norm_before_fc``). ``t2d`` says the same as ``d2t`` and is not read.

**DFlash** (``dflash/``; ``DFlashDraftModel``, or a ``dflash_config``). Tensors: ``fc.weight`` [H, K H] over the
features of K layers, ``hidden_norm.weight``; ``layers.i.`` of Qwen3 with ``self_attn.{q,k,v,o}_proj`` and
``self_attn.{q,k}_norm``, ``mlp.{gate,up,down}_proj``, ``input_layernorm``, ``post_attention_layernorm``; and
``norm.weight``. Embedding and output head are the target's; copies of them may be stored, and are not read. A head
that drafts a part of the vocabulary has ``lm_head.weight`` and ``d2t`` as EAGLE-3 heads have.

**DSpark** (``dflash/``; ``Qwen3DSparkModel``, ``DSparkDraftModel``). DFlash's tensors, and with a Markov head of rank R
``markov_head.markov_w1.weight`` and ``markov_head.markov_w2.weight`` [V, R]; of the gated kind
``markov_head.gate_proj.{weight,bias}`` [R, H + R], over the hidden state and a row of w1; of the kind rnn
``markov_head.joint_proj.{weight,bias}`` [3 R, 2 R + H]; and perhaps ``confidence_head.proj.weight`` [1, H + R], without
a Markov head [1, H], and ``confidence_head.proj.bias`` [1].

**DFlash2** (``dflash/``; ``DFlash2DraftModel``). DFlash's tensors; ``layers.i.attention_conv`` and
``layers.i.mlp_conv`` with ``base_kernel`` [2, T, H] of T taps and ``kernel_projection.weight`` [2 T G, H] for G groups
of channels; ``candidate_selector.predecessor_codebook`` and ``candidate_selector.successor_codebook`` [V, R] and
``candidate_selector.hidden_projection.weight`` [R, H].

**vllm-project/speculators** (``checkpoints/speculators_config.py``; a ``speculators_model_type``): tensors of
EAGLE-3, DFlash or DSpark beside a config of another form.

Any name may begin with ``model.``. Queries and keys may be normed (``self_attn.{q,k}_norm``), projections may have
biases, where such tensors are stored. Where no embedding is stored, the target's is used, without its multiplier; where
no output matrix is stored, the target's logits are used, with their multiplier.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specmamba.cache.shapes import KVShape
from specmamba.checkpoints.checkpoint import read_architecture
from specmamba.checkpoints.config_bounds import require_bounded_config
from specmamba.checkpoints.files import GGUF_FILE, is_bare, read_json
from specmamba.checkpoints.matrix_copies import has_equal_rows
from specmamba.checkpoints.speculators_config import head_fields, is_speculator
from specmamba.checkpoints.tensor_reader import ShapeReader, TensorReader
from specmamba.errors import CheckpointError, ConfigError, UnsupportedModelError
from specmamba.models.base import LoadedModel, LoadOptions
from specmamba.models.common_layers import Heads
from specmamba.models.dflash import DFlashHead, is_block_head
from specmamba.models.dflash.block_settings import FIELDS
from specmamba.models.eagle import EMBEDDING, OUTPUT, Eagle3Head, EagleHead, HeadWeights
from specmamba.models.hybrid import HybridTarget
from specmamba.models.rank_shapes import own_kv

if TYPE_CHECKING:
    from transformers import PretrainedConfig

RENAMES = (("model.midlayer.", "layers.0."), ("midlayer.", "layers.0."), ("model.", ""))
NOT_READ = ("d2t", "t2d", "verifier_norm.weight", "verifier_lm_head.weight")  # the last two are for training alone
REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
NOT_LLAMA = {"model", "transformer_layer_config", "model_type", "auto_map", "dtype", "torch_dtype"}
TARGET_MATRIX = {
    EMBEDDING: re.compile(r"(?!mtp\.).*\bembed(_tokens|dings?)\.weight"),
    OUTPUT: re.compile(r"(?!mtp\.).*\blm_head\.weight"),
}


def is_draft_head(folder: Path) -> bool:
    """Whether a checkpoint is a draft head, by its architecture or by tensors that only heads have."""
    if "eagle" in read_architecture(folder).lower():
        return True
    try:
        with ShapeReader(folder, RENAMES) as reader:
            return reader.has("fc.weight") or reader.has("layers.0.hidden_norm.weight")
    except CheckpointError:
        return False


def load_draft_head(folder: Path, target: LoadedModel, options: LoadOptions, target_folder: Path) -> LoadedModel:
    """Load the draft head in ``folder`` and attach it to the target. The head's matrices get the draft's form.

    Args:
        folder: of the head.
        target: has no draft head.
        options: on the meta device only the head's token map and samples of its embedding are read.
        target_folder: the target's checkpoint, for samples of its embedding.

    Raises:
        CheckpointError: the head is incomplete, damaged or inconsistent.
        UnsupportedModelError: it is not a draft head, or a variant that is not supported.
        ConfigError: it was made for another target; the message has both numbers.
    """
    architecture, config = read_architecture(folder), read_head_config(folder)
    body = target.target
    assert isinstance(body, HybridTarget)
    is_shape = options.device.type == "meta"
    with (ShapeReader if is_shape else TensorReader)(folder, RENAMES) as reader:
        is_block = is_block_head(architecture, config)
        if is_block and "eagle" in architecture.lower():
            raise UnsupportedModelError(
                f"{folder} mixes kinds of heads: it is a {architecture} with the settings of a block head "
                f"({' or '.join(FIELDS)})"
            )
        is_eagle3 = "eagle3" in architecture.lower() or reader.has("layers.0.hidden_norm.weight")
        if not (is_eagle3 or reader.has("fc.weight")):
            raise UnsupportedModelError(
                f"{folder} is a {architecture}: neither a model that specmamba has, nor an EAGLE, EAGLE-3 or "
                "DFlash head, which would have an fc.weight"
            )
        _refuse_other_vocabulary(folder, config.vocab_size, body.vocab_size)
        shares = is_shape and _is_of_target(reader, EMBEDDING, target_folder, options)
        weights = HeadWeights(config, reader, options, folder, target.cache_shape.num_kv_layers, shares)
        head: EagleHead | Eagle3Head | DFlashHead
        ignored: tuple[str, ...] = NOT_READ
        if is_block:
            head = DFlashHead(weights, body, target.num_layers, architecture)
            named = (EMBEDDING,) if head.has_own_output else (EMBEDDING, OUTPUT)
            ignored = (*NOT_READ, *_copies(reader, named, target_folder, options))
        else:
            head = Eagle3Head(weights, body, target.num_layers) if is_eagle3 else EagleHead(weights, body)
        rotary = (f"layers.{i}.self_attn.rotary_emb." for i in range(config.num_hidden_layers))
        reader.finish(ignore=(*ignored, *rotary))  # old programs stored frequencies, which follow from the config
    if layers := getattr(head, "target_layers", ()):
        body.read_features(layers)
    kv = own_kv(KVShape(config.num_hidden_layers, config.num_key_value_heads, config.head_dim), weights.share)
    shape = target.cache_shape
    return replace(
        target,
        draft_head=head,
        draft_algorithm="dflash" if is_block else "eagle3" if is_eagle3 else "eagle",
        cache_shape=replace(
            shape,
            kv=(*shape.kv, kv),
            draft_features=0 if is_block else head.width,
            draft_context=head.width if is_block else 0,
        ),
        num_parameters=target.num_parameters + weights.num_parameters,
        weight_bytes=target.weight_bytes + weights.num_bytes,
    )


def read_head_config(folder: Path) -> PretrainedConfig:
    """Read the config of a head, nested or not.

    Raises:
        CheckpointError: a size is missing, or a value is invalid.
        UnsupportedModelError: it asks for a variant that is not supported.
    """
    file = folder / "config.json"
    stored = read_json(file)
    if is_speculator(stored):
        fields = head_fields(file, stored)
    else:
        nested = stored.get("model") or stored.get("transformer_layer_config") or {}
        fields = {**(nested if isinstance(nested, dict) else {}), **stored}
    fields = {name: value for name, value in fields.items() if name not in NOT_LLAMA and value is not None}
    if missing := [name for name in REQUIRED if name not in fields]:
        raise CheckpointError(f"{file} lacks {', '.join(missing)}: it is not the config of a draft head")
    # It has the fields of LlamaConfig, which would require a hidden size that is a multiple of the heads.
    from transformers import Qwen3Config

    try:
        heads = fields["num_attention_heads"]
        derived = {"num_key_value_heads": heads, "head_dim": fields["hidden_size"] // heads}
        config: PretrainedConfig = Qwen3Config.from_dict(derived | fields)
    # Config classes validate the contents of the file and raise exceptions of any type.
    except Exception as error:
        raise CheckpointError(f"{file} is not a config that transformers accepts: {error}") from error
    require_bounded_config(file, config)
    _refuse_variants(folder, config)
    return config


def _refuse_variants(folder: Path, config: Any) -> None:
    """Refuse what would be computed wrongly."""
    Heads.of(config)
    if config.hidden_act != "silu":
        raise UnsupportedModelError(f"{folder}: hidden_act {config.hidden_act!r} is not supported: only silu is")
    if config.num_hidden_layers < 1:
        raise CheckpointError(f"{folder}: a draft head has a layer at least, not {config.num_hidden_layers}")
    is_block = is_block_head(read_architecture(folder), config)
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()) and not is_block:
        raise UnsupportedModelError(f"{folder}: sliding attention is not supported in EAGLE heads")
    variant = getattr(config, "eagle_config", {})
    if not isinstance(variant, dict):
        raise CheckpointError(f"{folder}: eagle_config should be an object, but is a {type(variant).__name__}")
    if variant.get("use_mtp_layernorm"):
        raise UnsupportedModelError(f"{folder}: use_mtp_layernorm is not supported in draft heads")
    for name in ("fc_norm", "norm_output"):
        if getattr(config, name, False):
            raise UnsupportedModelError(f"{folder}: {name} is not supported in draft heads")


def _copies(head: TensorReader, names: tuple[str, ...], target_folder: Path, options: LoadOptions) -> list[str]:
    """Embedding and output matrix of a block head, which are the target's; without its weights they count as such.

    Raises:
        UnsupportedModelError: they are not.
    """
    stored = [name for name in names if head.has(name)]
    for name in stored:
        if not (is_bare(target_folder) or _is_of_target(head, name, target_folder, options)):
            raise UnsupportedModelError(
                f"{target_folder} does not have the {name} of its draft head, or has it in codes or a GGUF file, where "
                "they are not compared: block heads with an embedding or output matrix of their own are not supported"
            )
    return stored


def _is_of_target(head: TensorReader, name: str, target_folder: Path, options: LoadOptions) -> bool:
    """Whether a head's embedding or output matrix equals the target's in sampled rows; all rows take too long.

    It counts as another one without the target's weights, and where these are codes or in a GGUF file.
    """
    if not head.has(name) or is_bare(target_folder) or (target_folder / GGUF_FILE).exists():
        return False
    with TensorReader(target_folder) as target:
        shape, theirs = head.stored(name).shape, [n for n in target.names() if TARGET_MATRIX[name].fullmatch(n)]
        if not theirs and name == OUTPUT:  # the target's output matrix is its embedding
            theirs = [n for n in target.names() if TARGET_MATRIX[EMBEDDING].fullmatch(n)]
        names = [n for n in theirs if target.stored(n).shape == shape]
        if len(names) != 1 or target.is_coded(names[0]):
            return False
        return has_equal_rows(head, name, target, names[0], options.dtype)


def _refuse_other_vocabulary(folder: Path, drafts: int, decides: int) -> None:
    if drafts != decides:
        raise ConfigError(
            f"--speculative-draft-model-path {folder}: the head's vocabulary has {drafts} tokens, the target's "
            f"{decides}: it was trained for another model"
        )
