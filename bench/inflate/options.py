"""Write a large Qwen3.5 checkpoint that computes the same function as a small one.

    python -m specmamba.bench.inflate --out DIR [--model CHECKPOINT] [--like qwen3.5-0.8b|qwen3.5-4b|qwen3.5-9b] [sizes]

A small trained model has real acceptance lengths, a large one real weight and state traffic; this makes a model that
has both, without any download. It gets more heads and neurons whose contribution is cancelled, wider heads and a wider
residual through zeros, and layers that add nothing, in the target and in its MTP head alike. Everything that does not
show is random, so that no traffic can be skipped. shape.py has the algebra, weights.py the rules.

``--like qwen3.5-0.8b`` takes the published sizes: hidden 1024, 24 layers (three delta nets, one attention), MLP 3584,
8 query and 2 key/value heads of 256, delta nets with 16 key and 16 value heads of 128; head widths included, since
they can be widened exactly. Two things stay the small model's: the vocabulary, because the logit of a new token could
not be kept below all others (so the published 248320 x 1024 output matrix is the traffic that is missing), and the
number of rotated components per head. Explicit sizes go before ``--like``.

``--like qwen3.5-9b`` and ``--like qwen3.5-4b`` likewise, with 32 layers of 16 query and 4 key/value heads, delta nets
with 32 value heads, and hidden 4096 and 2560, MLP 12288 and 9216. Out of the demo, 2560 is no power of 4 times its
size, so that 4b in 16 bits asks for ``--rounded``: the function is then the small one's but for a rounding per weight.
Billions of random numbers take minutes; ``--repeat-noise`` makes those of one period of layers and repeats them.

Rounding: matrices are scaled by powers of two only (float32 output may take any factor), so a bf16 checkpoint stays
what it was, bit for bit. Norms that are rescaled (the last ones, those of keys, the delta nets') are stored as float32,
which specmamba keeps; transformers, when it loads the model in bf16, rounds them: relative errors of up to about 2**-9
per channel for the published shape, and larger ones where the last norms shrink by more than its factor of 2.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from specmamba.bench.inflate.shape import FLAGS, PUBLISHED
from specmamba.config import DEMO_MODEL
from specmamba.measure.report import CommandLine, Count


class InflateConfig(CommandLine):
    """Write a large checkpoint that computes the same function as a small one."""

    out: Annotated[Path, Field(description="folder to write")]
    model: Annotated[Path, Field(description="folder of the small checkpoint; default: the bundled demo")] = DEMO_MODEL
    like: Annotated[
        Literal["qwen3.5-0.8b", "qwen3.5-4b", "qwen3.5-9b"] | None,
        Field(description="take the sizes of a published model"),
    ] = None
    hidden_factor: Annotated[Count | None, Field(description="hidden size, as a multiple of the checkpoint's")] = None
    layers: Annotated[Count | None, Field(description="layers, in the checkpoint's pattern")] = None
    mlp: Annotated[Count | None, Field(description="intermediate size")] = None
    heads: Annotated[Count | None, Field(description="query heads of attention")] = None
    kv_heads: Annotated[Count | None, Field(description="key/value heads of attention")] = None
    head_dim: Annotated[Count | None, Field(description="width of attention heads")] = None
    gdn_key_heads: Annotated[Count | None, Field(description="key heads of delta nets")] = None
    gdn_value_heads: Annotated[Count | None, Field(description="value heads of delta nets")] = None
    gdn_key_dim: Annotated[Count | None, Field(description="width of the delta nets' key heads")] = None
    gdn_value_dim: Annotated[Count | None, Field(description="width of the delta nets' value heads")] = None
    vocab: Annotated[
        Literal["keeps"], Field(description="the vocabulary stays: nothing would keep new tokens from being chosen")
    ] = "keeps"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"], Field(description="type to store; auto: the checkpoint's own")
    ] = "auto"
    rounded: Annotated[bool, Field(description="sizes may scale 16-bit weights by what rounds them")] = False
    seed: Annotated[int, Field(ge=0, lt=2**63, description="seeds the weights that do not show")] = 0
    repeat_noise: Annotated[
        bool, Field(description="layers that add nothing repeat each other's weights: faster to write")
    ] = False
    max_shard_mb: Annotated[Count, Field(description="a file with more megabytes of tensors is split")] = 1000
    force: Annotated[bool, Field(description="write into a folder that is not empty, in place of its weights")] = False

    def sizes(self, hidden_size: int) -> dict[str, int]:
        """The sizes asked for, by their names in config.json; hidden_size: the small model's."""
        given = {name: getattr(self, flag[2:].replace("-", "_")) for name, flag in FLAGS.items()}
        if self.hidden_factor is not None:
            given["hidden_size"] = self.hidden_factor * hidden_size
        published = {} if self.like is None else PUBLISHED[self.like]
        return {**published, **{name: size for name, size in given.items() if size is not None}}
