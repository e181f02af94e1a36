"""Write a large Qwen3.5 checkpoint that computes the same function as a small one.

    python -m specmamba.bench.inflate --out DIR [--model CHECKPOINT] [--like qwen3.5-0.8b|qwen3.5-4b|qwen3.5-9b] [sizes]
        [--head HEAD --head-out DIR]

A small trained model has real acceptance lengths, a large one real weight and state traffic; the large checkpoint has
both, without any download. It has more heads and neurons whose contribution is cancelled, heads and a residual that are
widened with zeros, and layers that add nothing, in the target and in its MTP head alike. All weights without an effect
are random, so that no traffic can be skipped. shape.py has the algebra, weights.py the rules. With ``--head``, a DFlash
or DSpark head of the small model is widened likewise, and drafts the same (heads.py).

``--like qwen3.5-0.8b`` takes the published sizes: hidden 1024, 24 layers (three delta nets, one attention), MLP 3584,
8 query and 2 key/value heads of 256, delta nets with 16 key and 16 value heads of 128; head widths included, since
they can be widened exactly. Two things stay the small model's: the vocabulary, because the logit of a new token could
not be kept below all others (so the traffic of the published 248320 x 1024 output matrix is missing), and the number
of rotated components per head. Explicit sizes override ``--like``.

``--like qwen3.5-9b`` and ``--like qwen3.5-4b`` likewise, with 32 layers of 16 query and 4 key/value heads, delta nets
with 32 value heads, and hidden 4096 and 2560, MLP 12288 and 9216. From the demo, 2560 is no power of 4 times its
size, so 4b in 16 bits needs ``--rounded``: the function is then the small one's except for one rounding per weight.
Billions of random numbers take minutes; ``--repeat-noise`` makes one period of layers and repeats it.

Rounding: matrices are scaled by powers of two only (float32 output may take any factor), so the weights of a bf16
checkpoint stay exact. Norms that are rescaled (the last ones, those of keys, the delta nets') are stored as float32,
which specmamba keeps; transformers, when it loads the model in bf16, rounds them: relative errors of up to about 2**-9
per channel for the published shape, and larger ones where the last norms shrink by more than its factor of 2.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from specmamba.bench.inflate.shape import FLAGS, PUBLISHED, Scales, Shape, enlarged, enlarged_config
from specmamba.config import DEMO_MODEL, CommandLine
from specmamba.errors import ConfigError
from specmamba.measure.command import run_command
from specmamba.measure.report import Count

if TYPE_CHECKING:
    from specmamba.bench.inflate.checkpoint import Totals

PROG = "python -m specmamba.bench.inflate"


class InflateConfig(CommandLine):
    """Write a large checkpoint that computes the same function as a small one."""

    out: Annotated[Path, Field(description="folder to write")]
    model: Annotated[Path, Field(description="folder of the small checkpoint; default: the bundled demo")] = DEMO_MODEL
    like: Annotated[
        Literal["qwen3.5-0.8b", "qwen3.5-4b", "qwen3.5-9b"] | None,
        Field(description="take the sizes of a published model"),
    ] = None
    head: Annotated[Path | None, Field(description="folder of a DFlash or DSpark head of it, to widen too")] = None
    head_out: Annotated[Path | None, Field(description="folder to write the wide head to")] = None
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

    @model_validator(mode="after")
    def _heads_go_together(self) -> InflateConfig:
        if (self.head is None) != (self.head_out is None):
            raise ValueError("--head and --head-out: the head to widen and where to write it go together")
        return self

    def sizes(self, hidden_size: int) -> dict[str, int]:
        """The requested sizes by their names in config.json; ``hidden_size``: the small model's."""
        given = {name: getattr(self, flag[2:].replace("-", "_")) for name, flag in FLAGS.items()}
        if self.hidden_factor is not None:
            given["hidden_size"] = self.hidden_factor * hidden_size
        published = {} if self.like is None else PUBLISHED[self.like]
        return {**published, **{name: size for name, size in given.items() if size is not None}}


def main(arguments: list[str] | None = None) -> int:
    """Write the checkpoint and print what it is; returns the exit status."""
    return run_command(PROG, InflateConfig, arguments, _run)


def _run(config: InflateConfig) -> int:
    print_report(inflate(config), config)
    return 0


def inflate(config: InflateConfig) -> dict[str, tuple[int, int]]:
    """Write the large checkpoint.

    Returns:
        Rows of the table: sizes, parameters and bytes, each before and after.

    Raises:
        ConfigError: impossible sizes, or a folder that must not be written to.
        CheckpointError: the small checkpoint is not a complete one of Qwen3.5's text model.
    """
    import torch  # --help must not wait for it

    from specmamba.bench.inflate import checkpoint as files
    from specmamba.bench.inflate.heads import inflate_head
    from specmamba.bench.inflate.weights import WeightMaker

    files.check_folder(config.out, config.model, config.force)
    raw, model_config = files.read_config(config.model)
    source = Shape.of(model_config)
    target = enlarged(source, config.sizes(source.hidden_size))
    tied = bool(model_config.tie_word_embeddings)
    small = files.read_tensors(config.model)
    if tied:
        small.pop("lm_head.weight", None)  # a copy of the embedding that some programs store
    dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
    stored = dtype or files.matrix_dtype(small)
    scales = Scales.between(source, target, tied)
    if stored != torch.float32 and not config.rounded:
        scales.check_exact()

    if config.head is not None and config.head_out is not None:
        if config.head_out.resolve() == config.out.resolve():
            raise ConfigError(f"--head-out {config.head_out}: the target is written there: choose another folder")
        inflate_head(config.head, config.head_out, source, target, scales, config.seed, config.force)
    files.prepare_folder(config.out)
    before, writer = files.Totals(), files.ShardWriter(config.out, config.max_shard_mb * 10**6)
    for name, tensor in small.items():
        before.add(name, tensor)
    maker = WeightMaker(source, target, model_config.vocab_size, scales, config.seed)
    for name, tensor in maker.tensors(small, dtype, config.repeat_noise):
        writer.add(name, tensor)
    writer.finish()
    files.copy_companions(config.model, config.out)
    large = enlarged_config(raw, model_config, source, target, scales, str(stored).removeprefix("torch."))
    files.write_json(config.out / "config.json", large)  # last: without it the folder is not read as a checkpoint
    return comparison(source, target, before, writer.totals)


def comparison(source: Shape, target: Shape, before: Totals, after: Totals) -> dict[str, tuple[int, int]]:
    """Make the rows of the table."""
    old, new = source.sizes(), target.sizes()
    return {
        **{name: (old[name], new[name]) for name in old},
        "parameters, target": (before.target_parameters, after.target_parameters),
        "parameters, MTP head": (before.mtp_parameters, after.mtp_parameters),
        "bytes": (before.num_bytes, after.num_bytes),
    }


def print_report(rows: dict[str, tuple[int, int]], config: InflateConfig) -> None:
    """Print sizes before and after."""
    from rich.console import Console
    from rich.table import Table

    table = Table("", str(config.model.name), config.out.name, title=f"{config.out}, seed {config.seed}")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, (before, after) in rows.items():
        style = None if before == after else "bold"
        table.add_row(name, f"{before:,}", f"{after:,}", style=style)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
