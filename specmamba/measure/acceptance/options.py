"""The flags of an acceptance run, and the draft shapes that they ask for: one, a list, or a product of axes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from specmamba.config import TEXT_ALGORITHMS, EngineConfig
from specmamba.errors import ConfigError
from specmamba.flags.command_line import describe_validation_error
from specmamba.measure.prompts import TextOptions
from specmamba.trees import read_tree_file

AXES = {
    "steps": "speculative_num_steps",
    "topk": "speculative_eagle_topk",
    "nodes": "speculative_num_draft_tokens",
}
# all flags of drafting but the state backend, which an engine cannot change
DRAFT_FIELDS = [n for n in EngineConfig.model_fields if n.startswith("speculative_") and n != "speculative_state"]
ADAPTIVE = "adaptive"
ROOM = 7, 1, 8  # steps, topk, nodes: a chain as large as the trees that are decided on without flags


class AcceptanceBenchConfig(TextOptions):
    """Acceptance of drafts and speed-up over plain decoding, with the texts compared."""

    num_prompts: Annotated[int, Field(ge=1, description="prompts to run, the first ones that fit")] = 8
    max_tokens: Annotated[int, Field(ge=1, description="new tokens of a prompt at the most")] = 128
    ignore_eos: Annotated[bool, Field(description="go on after the end-of-text token")] = False
    batch_size: Annotated[int, Field(ge=1, description="prompts that run together")] = 1
    rounds: Annotated[int, Field(ge=1, description="rounds; speeds are medians over them")] = 3
    configs: Annotated[
        str | None, Field(description="draft shapes to compare: steps,topk[,nodes] ..., such as 1,1 3,1 4,4,8")
    ] = None
    sweep: Annotated[
        str | None,
        Field(description="all shapes of a product: steps=1,2,3 topk=1,4 nodes=8,16 (nodes: of trees, topk above 1)"),
    ] = None
    adaptive: Annotated[
        bool, Field(description="also run drafts whose size is decided in each step, in turns with the shapes")
    ] = False
    synthetic_acceptance: Annotated[
        float | None,
        Field(ge=0, le=1, description="cost study: accept a first child with this probability; the text is worthless"),
    ] = None

    @model_validator(mode="after")
    def _flags_go_together(self) -> AcceptanceBenchConfig:
        if self.speculative_algorithm == "none":
            raise ValueError("--speculative-algorithm none: there is nothing to compare with plain decoding; drop it")
        if self.configs is not None and self.sweep is not None:
            raise ValueError("--configs and --sweep both say what to compare: drop one")
        if self.synthetic_acceptance is not None and self.replay:
            raise ValueError("--synthetic-acceptance makes up what --replay measures: drop one")
        if self.batch_size > self.max_running_requests:
            raise ValueError(
                f"--batch-size {self.batch_size}: only {self.max_running_requests} requests run together; "
                "raise --max-running-requests"
            )
        if problem := _adaptive_problem(self):
            raise ValueError(problem)
        return self

    @property
    def texts_can_be_compared(self) -> bool:
        """Whether plain and speculative runs choose their tokens, with the same random numbers."""
        if self.replay or self.synthetic_acceptance is not None:
            return False
        return self.temperature == 0 or self.speculative_accept != "rejection"


def _adaptive_problem(config: AcceptanceBenchConfig) -> str | None:
    """What is wrong with the flags of adaptive sizes, as a sentence that says what to change; None: nothing."""
    if config.speculative_adaptive == "auto":
        return "--speculative-adaptive auto: the shapes here are fixed; give --adaptive instead, which adds its row"
    if config.adaptive and config.speculative_tree is not None:
        return "--adaptive: no size is decided with --speculative-tree: drop one"
    if config.adaptive and config.synthetic_acceptance is not None:
        return "--adaptive decides by the acceptance that --synthetic-acceptance makes up: drop one"
    return None


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to draft: its shape, and all ``speculative_*`` flags that choose it."""

    num_steps: int
    topk: int
    num_draft_tokens: int
    flags: dict[str, Any] = field(compare=False)
    is_adaptive: bool = False  # the shape is the largest one

    @property
    def name(self) -> str:
        return ADAPTIVE if self.is_adaptive else f"{self.num_steps},{self.topk},{self.num_draft_tokens}"


def variants_of(config: AcceptanceBenchConfig) -> tuple[list[Variant], list[str]]:
    """The variants to compare with plain decoding, without repetitions, and notes about those that were left out.

    Raises:
        ConfigError: a list or an axis cannot be read, or a listed shape or all of a product are impossible.
    """
    variants, notes = _fixed_variants(config)
    return [*variants, *([_adaptive(config)] if config.adaptive else [])], notes


def _adaptive(config: AcceptanceBenchConfig) -> Variant:
    """What an engine with these flags would decide on. Flags of a shape are bounds; without, ``ROOM`` is enough."""
    is_bounded = config.has_shape or config.speculative_algorithm in TEXT_ALGORITHMS
    shape = (config.num_draft_steps, config.draft_topk, config.num_draft_nodes) if is_bounded else ROOM
    return Variant(*shape, _draft_flags(config) | {"speculative_adaptive": "auto"}, is_adaptive=True)


def _fixed_variants(config: AcceptanceBenchConfig) -> tuple[list[Variant], list[str]]:
    if config.sweep is not None:
        return _sweep(config, config.sweep)
    if config.configs is not None:
        _refuse_shape_flags(config, "--configs", set(AXES))
        variants = [_listed(config, item) for item in config.configs.split()]
        if not variants:
            raise ConfigError("--configs: there is none: give steps,topk[,nodes] ..., such as 3,1 4,4,8")
        return list(dict.fromkeys(variants)), []
    return [_single(config, config.batch_size)], []


def largest_flags(variants: Sequence[Variant]) -> dict[str, Any]:
    """Drafting flags of an engine with room for all variants: each size is the largest of them."""
    flags = variants[0].flags
    if flags["speculative_tree"] is not None:
        return flags
    sizes = {
        AXES["steps"]: max(variant.num_steps for variant in variants),
        AXES["topk"]: max(variant.topk for variant in variants),
        AXES["nodes"]: max(variant.num_draft_tokens for variant in variants),
    }
    return flags | sizes


def _single(config: EngineConfig, batch_size: int = 1) -> Variant:
    """The variant of these flags; with a tree file, the tree for full batches."""
    flags = _draft_flags(config)
    if config.speculative_tree is None:
        return Variant(config.num_draft_steps, config.draft_topk, config.num_draft_nodes, flags | _shape_flags(config))
    tree = read_tree_file(config.speculative_tree).for_batch(batch_size)
    return Variant(max(tree.depths), max(tree.ranks) + 1, tree.num_nodes, flags)


def _draft_flags(config: EngineConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in DRAFT_FIELDS}


def _shape_flags(config: EngineConfig) -> dict[str, Any]:
    values = config.num_draft_steps, config.draft_topk, config.num_draft_nodes
    return dict(zip(AXES.values(), values, strict=True))


def _with_shape(config: EngineConfig, shape: dict[str, int | None]) -> Variant:
    """The variant of these flags with another shape. Raises ConfigError when that is not possible."""
    fields = config.model_dump(include=set(EngineConfig.model_fields))
    try:
        return _single(EngineConfig(**fields | {AXES[axis]: size for axis, size in shape.items()}))
    except ValidationError as error:
        raise ConfigError(describe_validation_error(error)) from None


def _listed(config: EngineConfig, item: str) -> Variant:
    if not re.fullmatch(r"\d{1,4},\d{1,4}(,\d{1,4})?", item):
        raise ConfigError(f"--configs: {item!r} is not steps,topk or steps,topk,nodes")
    sizes = [*map(int, item.split(",")), None]
    try:
        return _with_shape(config, dict(zip(AXES, sizes, strict=False)))
    except ConfigError as error:
        raise ConfigError(f"--configs {item}: {error}") from None


def _sweep(config: EngineConfig, text: str) -> tuple[list[Variant], list[str]]:
    axes = _read_axes(text)
    _refuse_shape_flags(config, "--sweep", set(axes))
    values = [axes.get(axis, [getattr(config, flag)]) for axis, flag in AXES.items()]
    variants, notes = [], []
    for steps, topk, nodes in itertools.product(*values):
        # the number of nodes of a chain follows from its steps: the axis of nodes is for trees
        is_chain = topk == 1 or (topk is None and config.draft_topk == 1)
        shape = {"steps": steps, "topk": topk, "nodes": None if is_chain and "nodes" in axes else nodes}
        try:
            variants.append(_with_shape(config, shape))
        except ConfigError as error:
            label = " ".join(f"{axis}={size}" for axis, size in shape.items() if size is not None)
            notes.append(f"skipped {label}: {error}")
    if not variants:
        raise ConfigError(f"--sweep: no combination is possible; the last was {notes[-1]}")
    return list(dict.fromkeys(variants)), notes


def _read_axes(text: str) -> dict[str, list[int]]:
    axes: dict[str, list[int]] = {}
    for item in text.split():
        axis, _, sizes = item.partition("=")
        if axis not in AXES:
            raise ConfigError(f"--sweep: {item!r} is not one of steps=1,2,3 topk=1,4 nodes=8,16")
        if axis in axes:
            raise ConfigError(f"--sweep: {axis} is given twice")
        if not re.fullmatch(r"\d{1,4}(,\d{1,4})*", sizes):
            raise ConfigError(f"--sweep: {item!r} has no list of numbers, such as {axis}=1,2,3")
        axes[axis] = [int(size) for size in sizes.split(",")]
    if not axes:
        raise ConfigError("--sweep: there is no axis: give steps=1,2,3 topk=1,4 nodes=8,16 or some of these")
    return axes


def _refuse_shape_flags(config: EngineConfig, what: str, axes: set[str]) -> None:
    names = [*(AXES[axis] for axis in AXES if axis in axes), "speculative_tree"]
    given = ["--" + name.replace("_", "-") for name in names if getattr(config, name) is not None]
    if given:
        raise ConfigError(f"{what} decides the shape of drafts: drop {', '.join(given)}")
