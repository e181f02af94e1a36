"""What will be drafted, decided once at start-up from the flags and the checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specmamba.config import EngineConfig
from specmamba.errors import ConfigError
from specmamba.trees import TreeFile, read_tree_file


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """The drafter and the shape of its trees."""

    algorithm: Literal["none", "mtp", "ngram"]
    num_steps: int  # depth of the deepest node
    topk: int  # children of a node at the most
    max_nodes: int  # nodes of a tree at the most, the root counted
    num_slots: int  # KV positions from the root's on that a step may write, drafting and verifying
    draws_drafts: bool = False  # drafts are drawn from the draft's distribution, for acceptance by rejection
    trees: TreeFile | None = None  # static trees; None: dynamic ones


NOTHING = DraftPlan("none", num_steps=0, topk=0, max_nodes=1, num_slots=1)


def plan_drafts(config: EngineConfig, has_mtp_head: bool, vocab_size: int) -> DraftPlan:
    """Settle what is drafted.

    Raises:
        ConfigError: the flags ask for what this checkpoint cannot do, or the tree file is not valid.
    """
    algorithm = config.speculative_algorithm
    if algorithm == "auto":
        algorithm = "mtp" if has_mtp_head else "none"
    if algorithm == "mtp" and not has_mtp_head:
        raise ConfigError(
            "--speculative-algorithm mtp: this checkpoint has no MTP head (no mtp.* tensors); "
            "choose auto, ngram or none, or a checkpoint that kept its MTP head"
        )
    if algorithm == "none":
        _refuse_orphans(config)
        return NOTHING
    plan = _plan_of_trees(config) if config.speculative_tree else _plan_of_flags(config, algorithm == "ngram")
    if plan.topk > vocab_size and plan.algorithm == "mtp":
        raise ConfigError(f"--speculative-eagle-topk {plan.topk} is more than the {vocab_size} tokens there are")
    return plan


def _plan_of_flags(config: EngineConfig, is_ngram: bool) -> DraftPlan:
    steps, topk, nodes = config.num_draft_steps, config.draft_topk, config.num_draft_nodes
    return DraftPlan(
        algorithm="ngram" if is_ngram else "mtp",
        num_steps=steps,
        topk=topk,
        max_nodes=nodes,
        # every step but the last runs topk nodes through the head, and each leaves its keys and values
        num_slots=nodes if is_ngram else max(nodes, 1 + (steps - 1) * topk),
        draws_drafts=not is_ngram and config.speculative_accept == "rejection",
    )


def _plan_of_trees(config: EngineConfig) -> DraftPlan:
    assert config.speculative_tree is not None
    trees = read_tree_file(config.speculative_tree)
    draws = config.speculative_accept == "rejection"
    return DraftPlan(
        algorithm="mtp",
        num_steps=max(max(tree.depths) for tree in trees.trees),
        topk=max(max(tree.ranks) for tree in trees.trees) + 1,
        max_nodes=trees.max_nodes,
        num_slots=trees.max_nodes,
        draws_drafts=draws,
        trees=trees,
    )


def _refuse_orphans(config: EngineConfig) -> None:
    if flags := config.drafting_flags:
        raise ConfigError(
            f"{', '.join(flags)}: this needs a drafter, and this checkpoint has no MTP head: drop it, or choose "
            "--speculative-algorithm ngram"
        )
