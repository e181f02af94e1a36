"""The flags of ``specmamba tune tree``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, field_validator, model_validator

from specmamba.config import MAX_DRAFT_TOKENS
from specmamba.measure.prompts import TextOptions
from specmamba.measure.report import checked_file, split_numbers

SHAPE_FLAGS = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens", "speculative_tree")


class TreeTunerConfig(TextOptions):
    """The fastest static draft tree for each batch size, by measurement."""

    out: Annotated[Path, Field(description="write the trees to this file, for --speculative-tree")] = Path("tree.json")
    batch_sizes: Annotated[
        Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)],
        BeforeValidator(split_numbers),
        Field(description="batch sizes to tune for; batches in between use the tree of the next larger one"),
    ] = (1, 2, 4, 8)
    max_depth: Annotated[int, Field(ge=1, le=16, description="depth of a tree below the root at the most")] = 5
    max_rank: Annotated[int, Field(ge=1, le=64, description="likeliest tokens that may be children of a node")] = 8
    max_nodes: Annotated[
        int, Field(ge=2, le=MAX_DRAFT_TOKENS, description="nodes of a tree at the most, the root counted")
    ] = 16
    num_prompts: Annotated[int, Field(ge=2, description="prompts to record, the first ones that fit")] = 16
    max_tokens: Annotated[int, Field(ge=16, description="new tokens of every prompt")] = 128
    rounds: Annotated[int, Field(ge=1, description="rounds of cost measurements; waves of the final run, or more")] = 5
    compare: Annotated[bool, Field(description="run the usual dynamic drafts beside the chosen trees")] = False

    @field_validator("batch_sizes")
    @classmethod
    def _rise(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(set(sizes)))

    @field_validator("out")
    @classmethod
    def _trees_can_be_written(cls, path: Path) -> Path:
        return checked_file(path)

    @model_validator(mode="after")
    def _can_be_tuned(self) -> TreeTunerConfig:
        problem = _tuning_problem(self)
        if problem is not None:
            raise ValueError(problem)
        return self


def _tuning_problem(config: TreeTunerConfig) -> str | None:
    given = ["--" + name.replace("_", "-") for name in SHAPE_FLAGS if getattr(config, name) is not None]
    if given:
        return f"the shape of the drafts is what is tuned: drop {', '.join(given)}"
    if config.speculative_adaptive == "auto":
        return (
            "--speculative-adaptive auto: the trees of a file have fixed sizes: drop it; --speculative-costs FILE "
            "measures what it starts from"
        )
    if config.speculative_algorithm not in ("auto", "mtp", "eagle", "eagle3"):
        return (
            f"--speculative-algorithm {config.speculative_algorithm}: only the trees of a draft head can be tuned: "
            "choose auto, mtp, eagle or eagle3"
        )
    if config.speculative_accept == "rejection":
        return (
            "--speculative-accept rejection: acceptance is predicted for the target rule only, where it does not "
            "depend on how drafts are drawn; drop the flag"
        )
    if max(config.batch_sizes) > config.max_running_requests:
        return (
            f"--batch-sizes {max(config.batch_sizes)}: only {config.max_running_requests} requests run together; "
            "raise --max-running-requests"
        )
    return None
