"""The memory that a run needs, computed before anything that takes long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from rich.console import Console

from specmamba.errors import ConfigError
from specmamba.train.block_head import BlockHead, BlockShape
from specmamba.train.block_trainer import num_anchors
from specmamba.train.head import Eagle3Head, HeadShape
from specmamba.train.options import TrainDraftConfig
from specmamba.train.trainer import TENSORS_AT_ONCE, slice_length
from specmamba.train.windows import bytes_of, feature_layers

if TYPE_CHECKING:
    from specmamba import LLM

FLOAT = torch.float32.itemsize
COPIES = 4  # of the head: weights, gradient, and Adam's two moments


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes that a run needs."""

    windows: int  # hidden states of the target on the text
    matrices: int  # the target's embedding and output
    head: int  # with gradient and optimizer state
    step: int  # temporary memory of a step


def shape_of(config: TrainDraftConfig, hidden_size: int, vocab_size: int, num_layers: int) -> HeadShape:
    """Sizes of the head that the flags ask for; ``num_layers``: layers of the target that it reads."""
    drafted = config.draft_vocab_size
    return HeadShape.of(hidden_size, vocab_size, num_layers, drafted, config.num_heads, config.intermediate_size)


def block_shape_of(config: TrainDraftConfig, shape: HeadShape, mask_token_id: int) -> BlockShape:
    """The same of a block head."""
    return BlockShape(
        **vars(shape),
        num_layers=config.num_layers,
        block_size=config.steps_deep + (config.kind == "dflash"),
        mask_token_id=mask_token_id,
        markov_rank=config.markov_rank if config.kind == "dspark" else 0,
    )


def needs_of(config: TrainDraftConfig, shape: HeadShape, num_windows: int) -> MemoryNeeds:
    """Compute what a run with ``num_windows`` windows needs."""
    with torch.device("meta"):
        scales = [1.0] * shape.num_features
        output = torch.empty(shape.draft_vocab_size, shape.hidden_size)
        is_block = config.drafts_blocks
        head = BlockHead(block_shape_of(config, shape, 0), scales) if is_block else Eagle3Head(shape, output, scales)
    return MemoryNeeds(
        bytes_of(num_windows, config.seq + 1, shape.num_features * shape.hidden_size, shape.hidden_size),
        2 * FLOAT * shape.vocab_size * shape.hidden_size,
        COPIES * FLOAT * head.num_parameters,
        block_step_bytes(config, shape) if is_block else step_bytes(config, shape),
    )


def step_bytes(config: TrainDraftConfig, shape: HeadShape) -> int:
    """Bytes that one step takes at its peak.

    These are the states of all drafts with the attention's weights, kept for the backward pass, and a slice of logits;
    or what Adam needs for the largest matrix.
    """
    s, rows, drafts = shape, config.batch * config.seq, config.steps_deep
    width = s.num_heads * s.head_dim
    inputs = (2 * s.num_features + 3) * s.hidden_size
    per_draft = 8 * s.hidden_size + (6 + 2 * drafts) * width + 4 * s.intermediate_size
    attention = s.num_heads * (config.seq + drafts) * (drafts + 3)
    slices = TENSORS_AT_ONCE * min(rows, slice_length(s.vocab_size)) * s.vocab_size
    on_the_way = rows * (inputs + drafts * per_draft + attention) + slices
    return FLOAT * max(on_the_way, 2 * s.draft_vocab_size * s.hidden_size)


def block_step_bytes(config: TrainDraftConfig, shape: HeadShape) -> int:
    """The same of a block head: the states of all blocks, of the context, and a slice of logits."""
    s, block, length = shape, config.steps_deep + 1, config.seq + 1
    rows = config.batch * num_anchors(length, block) * block
    width = s.num_heads * s.head_dim
    context = config.batch * length * ((s.num_features + 3) * s.hidden_size + config.num_layers * 6 * width)
    per_row = 8 * s.hidden_size + 8 * width + 4 * s.intermediate_size + 4 * s.num_heads * (length + block)
    rank = config.markov_rank if config.kind == "dspark" else 0
    slices = TENSORS_AT_ONCE * min(rows, slice_length(s.vocab_size)) * s.vocab_size
    on_the_way = context + rows * (config.num_layers * per_row + 4 * s.hidden_size + 3 * rank) + slices
    return FLOAT * max(on_the_way, 3 * s.vocab_size * rank)  # behind it, a gradient's copy and Adam's own two


def check_memory(config: TrainDraftConfig, llm: LLM, num_windows: int, console: Console) -> None:
    """Print a line about the memory that a run needs.

    Raises:
        ConfigError: there is not enough memory.
    """
    engine = llm.engine
    hidden_size, num_layers = engine.model.target.hidden_size, len(feature_layers(engine.model.num_layers))
    shape = shape_of(config, hidden_size, engine.vocab_size, num_layers)
    needs = needs_of(config, shape, num_windows)
    # the output matrix is made in one piece and copied
    at_once, beside = needs.windows + needs.matrices * 3 // 2, llm.workbench.free_memory
    if at_once > beside:
        raise ConfigError(
            f"beside the engine {_mib(at_once)} are needed and {_mib(beside)} are free: {_of_text(config, needs)}; "
            f"the target's matrices take {_mib(at_once - needs.windows)}. Or lower --mem-fraction-static "
            f"({config.mem_fraction_static:g}), of which the engine takes its own"
        )
    # the engine is closed when the training begins, and its memory is free again
    free = int(engine.memory_plan.budget_bytes / config.mem_fraction_static)
    needed = needs.matrices + needs.head + needs.step + (needs.windows if engine.device.type == "cpu" else 0)
    if needed > free:
        drafted = "all" if config.draft_vocab_size is None else "now"
        raise ConfigError(
            f"the training takes {_mib(needed)}, and {_mib(free)} are free: {_of_text(config, needs)}; the target's "
            f"matrices take {_mib(needs.matrices)}; the head with its gradient and Adam's moments takes "
            f"{_mib(needs.head)} (lower --draft-vocab-size, {drafted} {shape.draft_vocab_size:,}); a step takes "
            f"{_mib(needs.step)} (lower --batch, now {config.batch}, or --seq, now {config.seq})"
        )
    console.print(
        f"{num_windows * config.seq:,} tokens to train on; what the target says of them takes {_mib(needs.windows)} of "
        f"memory, the training {_mib(needs.matrices + needs.head + needs.step)} beside that",
        highlight=False,
        soft_wrap=True,
    )


def _of_text(config: TrainDraftConfig, needs: MemoryNeeds) -> str:
    flag, value = ("own-outputs", config.own_outputs) if config.own_outputs else ("num-tokens", config.num_tokens)
    return f"what the target says of the text takes {_mib(needs.windows)} (lower --{flag}, now {value:,})"


def _mib(num_bytes: int) -> str:
    return f"{-(-num_bytes // 2**20):,} MiB"
