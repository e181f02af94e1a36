"""The sizes of a Qwen3.5 checkpoint, the larger sizes that can hold it, and the scales that keep its function.

Let r, h, f, g be the factors by which the hidden size, the attention heads' width, the delta net's key width and its
value width grow through zeros. A mean of squares over zero-padded components shrinks by such a factor. In every norm
x'^2 / factor + eps' must be e times its former value, with one e for all, or the weight of eps would change:

- the delta net's output shrinks by sqrt(f) (its queries are unit vectors times K**-0.5) and its mean of squares by g.
  No weight can undo that, because its inputs are normalised or pass a nonlinear function. So it determines
  e = 1 / (f g), and the config has eps' = e eps.
- the residual is scaled by s = sqrt(r e), in the embedding and in all matrices that write to it; queries and keys by
  sqrt(h e), in their projections.
- a norm whose weight is kept gives sqrt(factor) times its old output. The projections that read a residual norm are
  divided by that; the delta net's norm is itself divided by sqrt(g), and the norm of the keys by sqrt(h), which also
  makes up for the attention's own head_dim**-0.5.
- the target's and the MTP head's last norms give c times their old output: c = s with an output matrix of its own,
  which is divided by c; c = 1 / s where it is the embedding, which is multiplied by s already.

All of this is exact, with one exception: if the embedding is tied, the MTP head, which normalises that last output
again, has eps (r e)**2 instead of eps. They are equal if r = f g, as for the published shape from the demo (r = h = 4,
f = g = 2: then s = c = 1, too). Else the head's input changes by about eps (r e)**2 / 2 over its mean square, 1e-5 at
r = 4, which does not change the quality of drafts; the target is not affected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from specmamba.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes under their names in config.json."""

    hidden_size: int  # H
    intermediate_size: int  # I
    layer_types: tuple[str, ...]
    num_attention_heads: int  # Hq
    num_key_value_heads: int  # Hkv
    head_dim: int  # D
    linear_num_key_heads: int  # Hk
    linear_num_value_heads: int  # Hv
    linear_key_head_dim: int  # K
    linear_value_head_dim: int  # V
    linear_conv_kernel_dim: int  # W, not changed

    @classmethod
    def of(cls, config: Any) -> Shape:
        """The sizes in a transformers config."""
        values = {field.name: getattr(config, field.name) for field in fields(cls)}
        return cls(**{**values, "layer_types": tuple(config.layer_types)})

    def sizes(self) -> dict[str, int]:
        """All sizes that can be changed, with the number of layers."""
        values = {**asdict(self), "num_hidden_layers": len(self.layer_types)}
        return {name: value for name, value in values.items() if name in FLAGS}

    def with_layers(self, count: int) -> Shape:
        """Extend to ``count`` layers, by repeating the shortest period of the layer types."""
        types, period = self.layer_types, self.period
        return replace(self, layer_types=types + tuple(types[i % period] for i in range(len(types), count)))

    @property
    def period(self) -> int:
        """The shortest period of the layer types: 4 for three delta nets and an attention."""
        types = self.layer_types
        return next(p for p in range(1, len(types) + 1) if all(t == types[i % p] for i, t in enumerate(types)))


# config.json of Qwen/Qwen3.5-0.8B, -4B and -9B, text part: three delta nets and an attention, six or eight times. Their
# 64 rotated components per head and their 248320 tokens are not used: see __main__.py.
_WIDTHS = {"head_dim": 256, "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
_LARGE = {"num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4, "linear_num_value_heads": 32}
PUBLISHED: Mapping[str, Mapping[str, int]] = {
    "qwen3.5-0.8b": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "intermediate_size": 3584,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 16,
        **_WIDTHS,
    },
    "qwen3.5-4b": {"hidden_size": 2560, "intermediate_size": 9216, **_LARGE, **_WIDTHS},
    "qwen3.5-9b": {"hidden_size": 4096, "intermediate_size": 12288, **_LARGE, **_WIDTHS},
}

FLAGS = {
    "hidden_size": "--hidden-factor",
    "num_hidden_layers": "--layers",
    "intermediate_size": "--mlp",
    "num_attention_heads": "--heads",
    "num_key_value_heads": "--kv-heads",
    "head_dim": "--head-dim",
    "linear_num_key_heads": "--gdn-key-heads",
    "linear_num_value_heads": "--gdn-value-heads",
    "linear_key_head_dim": "--gdn-key-dim",
    "linear_value_head_dim": "--gdn-value-dim",
}


def enlarged(source: Shape, sizes: Mapping[str, int]) -> Shape:
    """Replace sizes of ``source`` by ``sizes`` (names of config.json).

    Raises:
        ConfigError: nothing grows, something shrinks, or the heads cannot keep their groups.
    """
    values: dict[str, Any] = dict(sizes)
    count = values.pop("num_hidden_layers", len(source.layer_types))
    target = replace(source, **values).with_layers(count)
    before = source.sizes()
    for name, size in sizes.items():
        if size < before[name]:
            wanted = f"{FLAGS[name]} asks for {name} {size}"
            raise ConfigError(f"{wanted}, but the checkpoint has {before[name]}: inflating adds, it takes nothing away")
    if target == source:
        raise ConfigError("these are the checkpoint's own sizes: give --like, or a size that is larger")
    for groups, members in HEAD_GROUPS:
        _check_groups(source, target, groups, members)
    return target


HEAD_GROUPS = (
    ("num_key_value_heads", "num_attention_heads"),
    ("linear_num_key_heads", "linear_num_value_heads"),
)


def copies_needed(group_size: int, new_group_size: int) -> int:
    """Number of new groups for the members of one old group; each has a copy of its key head."""
    return -(-group_size // new_group_size)


def _check_groups(source: Shape, target: Shape, groups: str, members: str) -> None:
    """Check that members can stay in their group: head m is in group m // (members / groups) in both models."""
    old, new = getattr(source, groups), getattr(target, groups)
    old_size = getattr(source, members) // old
    smallest = -(-old_size // (new // old))  # members that each of the new groups must take
    works = ", ".join(str(new * size) for size in range(smallest, smallest + 3))
    total = getattr(target, members)
    if total % new:
        raise ConfigError(
            f"{FLAGS[members]} {total} is not a multiple of {FLAGS[groups]} {new}: with {new}, these work: {works}, ..."
        )
    if old * copies_needed(old_size, total // new) > new:
        raise ConfigError(
            f"{FLAGS[groups]} {new} with {FLAGS[members]} {total} has no place for the checkpoint's {old} groups of "
            f"{old_size}: {FLAGS[groups]} {new} works with {FLAGS[members]} {works}, ..."
        )


@dataclass(frozen=True, slots=True)
class Scales:
    """Factors of the copied weights; the docstring of this module derives them."""

    eps: float  # e
    write: float  # s: embedding, and all matrices that write to the residual
    read: float  # projections behind a residual norm
    query_key: float  # queries and keys, besides ``read``
    key_norm: float
    delta_norm: float
    last_norm: float  # of the target and of the MTP head
    head: float  # an output matrix of its own

    @classmethod
    def between(cls, source: Shape, target: Shape, tied: bool) -> Scales:
        r = target.hidden_size / source.hidden_size
        h = target.head_dim / source.head_dim
        f = target.linear_key_head_dim / source.linear_key_head_dim
        g = target.linear_value_head_dim / source.linear_value_head_dim
        e = 1.0 / (f * g)
        s = math.sqrt(r * e)
        c = 1.0 / s if tied else s
        return cls(
            eps=e,
            write=s,
            read=1.0 / math.sqrt(r),
            query_key=math.sqrt(h * e),
            key_norm=1.0 / math.sqrt(h),
            delta_norm=1.0 / math.sqrt(g),
            last_norm=c / math.sqrt(r),
            head=1.0 / c,
        )

    def check_exact(self) -> None:
        """Refuse scales that round 16-bit matrices.

        Norms are no problem: one that is rescaled is stored as float32.

        Raises:
            ConfigError: a scale of a matrix is no power of two.
        """
        if all(math.frexp(x)[0] == 0.5 for x in (self.write, self.read, self.read * self.query_key, self.head)):
            return
        raise ConfigError(
            "these sizes scale 16-bit weights by factors that are no powers of two, which rounds them: let "
            "--hidden-factor, the product of the growth of --gdn-key-dim and --gdn-value-dim, and that product times "
            "the growth of --head-dim be powers of 4 (1, 4, 16), store float32 with --dtype float32, or take it as it "
            "is with --rounded"
        )


def enlarged_config(
    raw: Mapping[str, Any], config: Any, source: Shape, target: Shape, scales: Scales, dtype: str
) -> dict[str, Any]:
    """The config.json of the large model: other sizes, and the same number of rotated components."""
    rope = dict(config.rope_parameters)
    rotated = int(source.head_dim * rope.get("partial_rotary_factor", 1.0))
    if target.head_dim != source.head_dim:
        share = rotated / target.head_dim
        while int(target.head_dim * share) < rotated:  # as models compute it from the share
            share = math.nextafter(share, 1.0)
        rope["partial_rotary_factor"] = share
    return {
        **raw,
        **asdict(target),
        "layer_types": list(target.layer_types),
        "num_hidden_layers": len(target.layer_types),
        "rms_norm_eps": config.rms_norm_eps * scales.eps,
        "rope_parameters": rope,
        "dtype": dtype,
    }
