"""The plan of drafting, made once at start-up from the flags and the checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from specmamba.config import MAX_DRAFT_TOKENS, TEXT_ALGORITHMS, WEIGHTLESS, EngineConfig, largest_tree
from specmamba.errors import ConfigError
from specmamba.models.base import DraftKind
from specmamba.trees import TreeFile, read_tree_file


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """The drafter and the shape of its trees."""

    algorithm: Literal["none", "mtp", "eagle", "eagle3", "dflash", "draft-model", "ngram", "suffix"]
    num_steps: int  # depth of the deepest node
    topk: int  # largest number of children of a node
    max_nodes: int  # largest number of nodes of a tree, the root included
    num_lookahead_slots: int  # KV positions from the root on that a step may write, drafting and verifying
    draws_drafts: bool = False  # for requests decided under rejection, drafts are drawn from its distribution
    trees: TreeFile | None = None  # static trees; None: chains or dynamic trees
    is_sized: bool = False  # the size of drafts is decided in each step; the others are bounds
    width: int = 1  # of sized drafts: nodes of a step of the head that get children


LARGEST_SIZED = 4, 3, 8  # steps, children of a node, nodes of sized drafts without flags
LARGEST_CHAIN = 5, 1, 6  # of a draft model
LARGEST_BLOCK = 7, 3, 12  # of a block drafter, whose steps are one pass
GROWN = {"draft-model": "draft model", "dflash": "DFlash head"}  # they have no static trees
NOTHING = DraftPlan("none", num_steps=0, topk=0, max_nodes=1, num_lookahead_slots=1)


def plan_drafts(
    config: EngineConfig, draft: DraftKind | None, vocab_size: int, block_size: int | None = None
) -> DraftPlan:
    """Decide what is drafted.

    Args:
        config: the flags.
        draft: the kind of draft head or model that was found in the checkpoint or beside it; None: there is none.
        vocab_size: size of the target's vocabulary.
        block_size: of the largest block that a block drafter drafts, the root included; None for other drafts.

    Raises:
        ConfigError: the flags ask for what is not possible with this checkpoint, or the tree file is not valid.
    """
    algorithm = config.speculative_algorithm
    if algorithm == "auto":
        algorithm = draft or "none"
    if algorithm == "mtp" and draft is None:
        raise ConfigError(
            "--speculative-algorithm mtp: this checkpoint has no MTP head (no mtp.* tensors); "
            "choose auto, ngram, suffix or none, or a checkpoint that kept its MTP head"
        )
    if algorithm not in WEIGHTLESS and algorithm != draft:
        raise ConfigError(
            f"--speculative-algorithm {algorithm}: {config.speculative_draft_model_path} holds a draft of the kind "
            f"{draft}: choose {draft} or auto"
        )
    if algorithm == "none":
        if config.speculative_algorithm == "auto":
            _refuse_unused_flags(config)
        return NOTHING
    if algorithm in GROWN and config.speculative_tree is not None:
        raise ConfigError(
            f"--speculative-draft-model-path names a {GROWN[algorithm]}, which drafts chains and dynamic trees: drop "
            "--speculative-tree"
        )
    plan = _plan_of_trees(config) if config.speculative_tree else _plan_of_flags(config, algorithm, block_size)
    plan = replace(plan, algorithm=algorithm, draws_drafts=plan.draws_drafts and algorithm not in TEXT_ALGORITHMS)
    if plan.topk > vocab_size and algorithm not in TEXT_ALGORITHMS:
        raise ConfigError(f"--speculative-eagle-topk {plan.topk} is more than the {vocab_size} tokens there are")
    return plan


def _plan_of_flags(config: EngineConfig, algorithm: str, block_size: int | None) -> DraftPlan:
    if algorithm == "dflash":
        assert block_size is not None
        return _plan_of_blocks(config, block_size)
    steps, topk, nodes = config.num_draft_steps, config.draft_topk, config.num_draft_nodes
    width, is_text = topk, algorithm in TEXT_ALGORITHMS
    if config.is_adaptive and not config.has_shape and not is_text:
        steps, topk, nodes = LARGEST_CHAIN if algorithm == "draft-model" else LARGEST_SIZED
        width = 1
    return DraftPlan(
        algorithm="none",  # the caller says what it is
        num_steps=steps,
        topk=topk,
        max_nodes=nodes,
        # every step but the last runs topk nodes through the head, which writes their keys and values
        num_lookahead_slots=nodes if is_text else max(nodes, 1 + (steps - 1) * width),
        draws_drafts=config.speculative_accept != "target",
        is_sized=config.is_adaptive,
        width=1 if is_text else width,
    )


def _plan_of_blocks(config: EngineConfig, block_size: int) -> DraftPlan:
    """Without flags for the shape, fixed drafts are a whole block. Raises ConfigError: flags ask for a longer one."""
    steps, topk, nodes = config.num_draft_steps, config.draft_topk, config.num_draft_nodes
    if not config.has_shape:
        steps, topk, nodes = LARGEST_BLOCK if config.is_adaptive else (MAX_DRAFT_TOKENS - 1, 1, MAX_DRAFT_TOKENS)
        steps = min(steps, block_size - 1)
        nodes = min(nodes, largest_tree(steps, topk))
    if config.is_adaptive:
        nodes = min(nodes, 1 + steps * topk)  # sizes are chosen among the children of a chain
    if steps >= block_size:
        raise ConfigError(
            f"drafts of {steps} steps: the DFlash head was made for blocks of {block_size} tokens with their root: set "
            f"--speculative-num-steps {block_size - 1} at the most"
        )
    return DraftPlan(
        algorithm="none",  # the caller says what it is
        num_steps=steps,
        topk=topk,
        max_nodes=nodes,
        num_lookahead_slots=max(nodes, 1 + steps),  # a block has a key at every depth
        draws_drafts=config.speculative_accept != "target",
        is_sized=config.is_adaptive,
    )


def _plan_of_trees(config: EngineConfig) -> DraftPlan:
    assert config.speculative_tree is not None
    trees = read_tree_file(config.speculative_tree)
    draws = config.speculative_accept != "target"
    return DraftPlan(
        algorithm="none",  # the caller says what it is
        num_steps=max(max(tree.depths) for tree in trees.trees),
        topk=max(max(tree.ranks) for tree in trees.trees) + 1,
        max_nodes=trees.max_nodes,
        num_lookahead_slots=trees.max_nodes,
        draws_drafts=draws,
        trees=trees,
    )


def _refuse_unused_flags(config: EngineConfig) -> None:
    if flags := config.drafting_flags:
        raise ConfigError(
            f"{', '.join(flags)}: this needs a drafter, and this checkpoint has no MTP head: drop it, choose "
            "--speculative-algorithm suffix, or give --speculative-draft-model-path"
        )
