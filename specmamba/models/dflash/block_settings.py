"""The settings of block heads in their config: which variant it is, what it computes, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specmamba.errors import CheckpointError, ConfigError, UnsupportedModelError
from specmamba.models.base import KeyView
from specmamba.models.dflash.token_links import MARKOV_KINDS
from specmamba.models.eagle import HeadWeights

FIELDS = ("dflash_config", "dspark_config")  # objects that settings may stand in
# settings that change what is computed, and the values with which they change nothing
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "projector_type": (None, "dflash", "dspark"),
    "attention_mode": (None, "gqa"),
    "input_embedding_scale": (None, 1, 1.0),
    "output_multiplier": (None, 1, 1.0),
    "final_logit_softcapping": (None, 0, 0.0),
    "use_swa": (None, False),
    "swa_window_size": (None,),
    "attention_sink_bias": (None, False),
}
READ = (
    *("block_size", "mask_token_id", "target_layer_ids", "is_causal", "causal"),
    *("markov_rank", "markov_head_type", "dspark_bonus_anchor", "sample_from_anchor", "shift_label"),
    *("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k", "confidence_head_with_markov"),
)
SLIDING = "sliding_attention"
DEFAULT_BLOCK = 16  # of the published DFlash heads


@dataclass(frozen=True, slots=True)
class BlockSettings:
    """What a head's config says besides its sizes."""

    variant: str
    target_layers: tuple[int, ...]  # in front of which features are read, in the order of the head's inputs
    block_size: int  # of the largest draft, the root included
    mask_token_id: int
    drafts_at_root: bool
    views: tuple[KeyView, ...]  # of every layer
    markov: tuple[str, int] | None  # kind and rank of a Markov head
    selector: tuple[int, int] | None  # rank and candidates of a selector
    convolution: tuple[int, int] | None  # taps, and channels of a group
    confidence_knows_tokens: bool  # whether a confidence head looks at the token above a draft
    has_own_vocabulary: bool  # it drafts some of the target's tokens, by an output matrix of its own

    @classmethod
    def of(cls, weights: HeadWeights, architecture: str, num_layers: int, vocab_size: int) -> BlockSettings:
        """Read the settings, which stand in ``dflash_config`` or ``dspark_config`` or beside them.

        Args:
            weights: of the head.
            architecture: that its config names.
            num_layers, vocab_size: of the target.

        Raises:
            CheckpointError: one is missing or impossible.
            UnsupportedModelError: they ask for a variant, or for features of a layer that cannot be read.
            ConfigError: the mask is no token of the target.
        """
        given = _Given.of(weights)
        is_dspark = "dspark" in architecture.lower() or given.get("projector_type") == "dspark"
        _refuse_variants(given, is_dspark, vocab_size)
        layers = _target_layers(given, num_layers)
        drafts_at_root = not _has_anchor_apart(given) if is_dspark else bool(given.get("sample_from_anchor"))
        block_size = given.number("block_size", None if is_dspark else DEFAULT_BLOCK) + drafts_at_root
        mask = given.number("mask_token_id")
        if block_size < 2:
            words = "drafts a token" if drafts_at_root else "has a root and a mask"
            raise CheckpointError(f"{given.folder}: block_size {block_size - drafts_at_root}: a block {words} at least")
        if not 0 <= mask < vocab_size:
            raise ConfigError(
                f"--speculative-draft-model-path {given.folder}: mask_token_id {mask} is not in the target's "
                f"vocabulary of {vocab_size} tokens"
            )
        markov, selector = _markov(given), _selector(given, vocab_size)
        views = _views(given, block_size)
        variant = _variant(given, is_dspark, markov, selector)
        links = markov, selector, _convolution(given), _confidence_knows_tokens(given, markov)
        own = _has_own_vocabulary(given, vocab_size)
        return cls(variant, layers, block_size, mask, drafts_at_root, views, *links, own)


@dataclass(frozen=True, slots=True)
class _Given:
    """The settings as they are given, and the names of the head's tensors."""

    folder: Any
    settings: dict[str, Any]
    parts: frozenset[str]  # of the names of all tensors
    config: Any

    @classmethod
    def of(cls, weights: HeadWeights) -> _Given:
        config, found = weights.config, dict[str, Any]()
        names, seen = (*READ, *NEUTRAL), dict[str, Any]()
        found |= {name: getattr(config, name) for name in names if getattr(config, name, None) is not None}
        for field in FIELDS:
            nested = getattr(config, field, None) or {}
            if not isinstance(nested, dict):
                raise CheckpointError(
                    f"{weights.folder}: {field} should be an object, but is a {type(nested).__name__}"
                )
            said = {name: value for name, value in nested.items() if value is not None}
            if differing := sorted(name for name in said.keys() & seen.keys() if said[name] != seen[name]):
                raise CheckpointError(f"{weights.folder}: {' and '.join(FIELDS)} differ in {', '.join(differing)}")
            found, seen = found | said, seen | said
        parts = frozenset(part for name in weights.reader.names() for part in name.split("."))
        return cls(weights.folder, found, parts, config)

    def get(self, name: str) -> Any:
        return self.settings.get(name)

    def number(self, name: str, default: int | None = None, least: int | None = None) -> int:
        """Raises CheckpointError: it is none, or less than ``least``."""
        value = self.settings.get(name, default)
        if type(value) is not int:
            raise CheckpointError(f"{self.folder}: {name} should be a whole number, but is {value!r}")
        if least is not None and value < least:
            raise CheckpointError(f"{self.folder}: {name} should be {least} at least, but is {value}")
        return value


def _refuse_variants(given: _Given, is_dspark: bool, vocab_size: int) -> None:
    """Refuse heads that compute something else."""
    for name, neutral in NEUTRAL.items():
        if given.get(name) not in neutral:
            raise UnsupportedModelError(f"{given.folder}: {name} {given.get(name)!r} is not supported in DFlash heads")
    if _has_own_vocabulary(given, vocab_size) and not given.parts.isdisjoint(("markov_head", "candidate_selector")):
        drafted = getattr(given.config, "draft_vocab_size", None) or vocab_size
        raise UnsupportedModelError(
            f"{given.folder} drafts {drafted} tokens by a map of its own (d2t): that is not supported in heads whose "
            "drafts know the token above them"
        )
    if "markov_head" in given.parts and not is_dspark:
        raise UnsupportedModelError(
            f"{given.folder} has a markov_head, but neither its architecture nor projector_type says DSpark: it is not "
            "known where its blocks predict their first token"
        )
    if given.get("shift_label") not in ((None, True) if is_dspark else (None, False)):
        raise UnsupportedModelError(
            f"{given.folder}: shift_label {given.get('shift_label')!r} is not supported in "
            f"{'DSpark' if is_dspark else 'DFlash'} heads"
        )


def _has_own_vocabulary(given: _Given, vocab_size: int) -> bool:
    return "d2t" in given.parts or getattr(given.config, "draft_vocab_size", None) not in (None, vocab_size)


def _has_anchor_apart(given: _Given) -> bool:
    """Whether a DSpark head has a mask for its first draft too, as DFlash heads have.

    Raises:
        CheckpointError: two settings contradict each other.
    """
    apart, at_root = given.get("dspark_bonus_anchor"), given.get("sample_from_anchor")
    if apart is not None and at_root is not None and bool(apart) == bool(at_root):
        raise CheckpointError(f"{given.folder}: dspark_bonus_anchor {apart} contradicts sample_from_anchor {at_root}")
    return bool(apart) if apart is not None else at_root is not None and not at_root


def _markov(given: _Given) -> tuple[str, int] | None:
    """Kind and rank. Raises CheckpointError and UnsupportedModelError."""
    if "markov_head" not in given.parts and not given.get("markov_rank"):
        return None
    kind = str(given.get("markov_head_type") or "vanilla").lower()
    if kind not in MARKOV_KINDS:
        raise UnsupportedModelError(
            f"{given.folder}: markov_head_type {kind!r} is not supported: only {', '.join(MARKOV_KINDS)} are"
        )
    return kind, given.number("markov_rank", least=1)


def _selector(given: _Given, vocab_size: int) -> tuple[int, int] | None:
    """Rank and candidates. Raises CheckpointError."""
    if "candidate_selector" not in given.parts and not given.get("selector_rank"):
        return None
    rank, candidates = (given.number(name, least=1) for name in ("selector_rank", "selector_top_k"))
    if candidates > vocab_size:
        raise CheckpointError(f"{given.folder}: selector_top_k {candidates} is more than the {vocab_size} tokens")
    return rank, candidates


def _convolution(given: _Given) -> tuple[int, int] | None:
    """Taps, and channels of a group. Raises CheckpointError."""
    has_tensors = not given.parts.isdisjoint(("attention_conv", "mlp_conv"))
    if not has_tensors and not given.get("conv_kernel_size"):
        return None
    return given.number("conv_kernel_size", least=1), given.number("conv_group_size", least=1)


def _confidence_knows_tokens(given: _Given, markov: tuple[str, int] | None) -> bool:
    """Whether a confidence head looks at tokens: beside a Markov head it does unless the config says otherwise.

    Raises:
        CheckpointError: it should, and there is no Markov head whose rows it would look at.
    """
    said = given.get("confidence_head_with_markov")
    if said and markov is None and "confidence_head" in given.parts:
        raise CheckpointError(f"{given.folder}: confidence_head_with_markov {said}, but there is no Markov head")
    return markov is not None and (said is None or bool(said))


def _views(given: _Given, block_size: int) -> tuple[KeyView, ...]:
    """What each layer sees.

    Without a word about it, layers with a window are causal and others are not, as in z-lab/dflash and vLLM.

    Raises:
        CheckpointError: the number of layers or the window is impossible.
        UnsupportedModelError: a block is longer than a window.
    """
    count = given.config.num_hidden_layers
    kinds = list(getattr(given.config, "layer_types", None) or ["full_attention"] * count)
    if len(kinds) != count or not set(kinds) <= {"full_attention", SLIDING}:
        raise CheckpointError(f"{given.folder}: layer_types {kinds} do not name the attention of {count} layers")
    said = given.get("is_causal") if given.get("is_causal") is not None else given.get("causal")
    window = None
    if SLIDING in kinds:
        window = getattr(given.config, "sliding_window", None)
        if type(window) is not int or window < 1:
            raise CheckpointError(f"{given.folder}: sliding_window should be a number of tokens, but is {window!r}")
        if window < block_size:
            raise UnsupportedModelError(
                f"{given.folder}: sliding_window {window} is less than a block of {block_size} tokens"
            )
    return tuple(
        KeyView(window if kind == SLIDING else None, kind == SLIDING if said is None else bool(said)) for kind in kinds
    )


def _variant(given: _Given, is_dspark: bool, markov: tuple[str, int] | None, selector: tuple[int, int] | None) -> str:
    """What the head is, in words."""
    if selector is not None:
        words = f"DFlash2, {selector[1]} candidates by a selector of rank {selector[0]}"
    elif markov is not None:
        words = f"DSpark, a {markov[0]} Markov head of rank {markov[1]}"
    else:
        words = "DSpark without a Markov head" if is_dspark else "DFlash"
    return f"{words}, with a confidence head" if "confidence_head" in given.parts else words


def _target_layers(given: _Given, num_layers: int) -> tuple[int, ...]:
    """The config has the layers *behind* which features are read, counted from 0."""
    ids = given.get("target_layer_ids")
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise CheckpointError(f"{given.folder}: target_layer_ids should be a list of numbers of layers, but is {ids!r}")
    if missing := [i for i in ids if not 0 <= i < num_layers - 1]:
        raise UnsupportedModelError(
            f"{given.folder}: target_layer_ids {missing}: the head can read behind layers 0 to {num_layers - 2} of "
            f"the target, which has {num_layers}"
        )
    return tuple(i + 1 for i in ids)
