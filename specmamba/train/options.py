"""The flags of ``specmamba train draft``, and its folder ``--out``: errors of writing are errors of that flag."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from specmamba.config import EngineConfig
from specmamba.flags.command_line import errors_of_out
from specmamba.sampling_params import Temperature

DEFAULT_MINUTES = 10.0
PATTERN = "*.py"


class TrainDraftConfig(EngineConfig):
    """Train an EAGLE-3, DFlash or DSpark draft head for a target, on text or on what the target itself writes."""

    needs_text = True

    disable_radix_cache: Annotated[bool, Field(description="always on here: what is cached would not be run")] = True
    kind: Annotated[
        Literal["eagle3", "dflash", "dspark"],
        Field(
            description="of the head: drafts one by one; a block in one pass; or a block whose tokens are chosen one "
            "after the other, each by the one before it"
        ),
    ] = "eagle3"
    out: Annotated[Path, Field(description="folder to write; a run found there is resumed")]
    text: Annotated[
        list[str],
        Field(
            default_factory=list,
            description="a text file, .jsonl of prompts, or folder to train on; may be given again; none: the Python "
            "source that is installed here",
        ),
    ]
    pattern: Annotated[str, Field(min_length=1, description="files to read in a folder of --text")] = PATTERN
    own_outputs: Annotated[
        int, Field(ge=0, description="train on so many tokens that the target writes behind pieces of the text instead")
    ] = 0
    temperature: Annotated[Temperature, Field(description="of --own-outputs")] = 0.8
    num_tokens: Annotated[int, Field(ge=64, description="tokens of text to train on at the most")] = 200_000
    seq: Annotated[int, Field(ge=16, description="tokens of one sequence")] = 256
    batch: Annotated[int, Field(ge=1, description="sequences of one step")] = 2
    steps_deep: Annotated[
        int,
        Field(
            ge=1,
            le=8,
            description="drafts in a row that the head is trained to make: from its own states, or in one block",
        ),
    ] = 3
    draft_vocab_size: Annotated[
        int | None, Field(ge=1, description="draft only so many tokens, the most frequent ones of the text; none: all")
    ] = None
    num_heads: Annotated[int | None, Field(ge=1, description="query heads; none: of 64 channels each")] = None
    num_layers: Annotated[int, Field(ge=1, le=16, description="layers of a block head; an eagle3 head has one")] = 2
    markov_rank: Annotated[
        int, Field(ge=1, description="rank of the matrices of a dspark head that link a token to the next one")
    ] = 64
    intermediate_size: Annotated[
        int | None, Field(ge=1, description="width of the feed-forward layer; none: 3 x the target's hidden size")
    ] = None
    lr: Annotated[
        float | None,
        Field(
            gt=0,
            description="learning rate at its peak; a cosine takes it to a twentieth; none: 0.77 / hidden size, but "
            "0.003 at the most",
        ),
    ] = None
    warmup_steps: Annotated[int, Field(ge=0, description="steps of linear warm-up")] = 50
    minutes: Annotated[
        float | None,
        Field(
            gt=0,
            description=f"length by the clock, resumed runs added up; none: {DEFAULT_MINUTES:g}, or --max-steps",
        ),
    ] = None
    max_steps: Annotated[int | None, Field(ge=1, description="length in optimizer steps")] = None
    save_every: Annotated[int, Field(ge=1, description="steps between two saves of the state to resume from")] = 200
    speculative_adaptive: Annotated[
        Literal["auto", "off"], Field(description="sizes of drafts in the report: those that the head is trained for")
    ] = "off"
    report_prompts: Annotated[int, Field(ge=1, description="held-out texts of the report at the end")] = 8

    @model_validator(mode="after")
    def _is_possible(self) -> TrainDraftConfig:
        fields = type(self).model_fields
        drafting = [n for n in fields if n.startswith("speculative_") and getattr(self, n) != fields[n].default]
        if drafting:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in drafting)
            raise ValueError(f"{flags}: what is drafted is decided by the training here: drop it")
        if not self.disable_radix_cache:
            raise ValueError("--no-disable-radix-cache: what is cached would not be run: drop it")
        if self.steps_deep + 2 > self.seq:
            raise ValueError(f"--steps-deep {self.steps_deep} needs sequences longer than --seq {self.seq}")
        if self.drafts_blocks and self.draft_vocab_size is not None:
            raise ValueError(f"--draft-vocab-size: a {self.kind} head drafts by the target's own output head: drop it")
        if self.kind != "dspark" and self.markov_rank != fields["markov_rank"].default:
            raise ValueError(f"--markov-rank {self.markov_rank}: only dspark heads have such matrices: drop it")
        if self.kind == "eagle3" and self.num_layers != fields["num_layers"].default:
            raise ValueError(f"--num-layers {self.num_layers}: an eagle3 head has one layer: drop it")
        if self.num_tokens < self.window_length:
            raise ValueError(f"--num-tokens {self.num_tokens} is less than one sequence of --seq {self.seq} (and two)")
        if "temperature" in self.model_fields_set and not self.own_outputs:
            raise ValueError("--temperature is that of --own-outputs: give both or neither")
        if self.pattern != PATTERN and not any(map(os.path.isdir, self.text)):
            raise ValueError("--pattern is of the files in a folder: give one with --text")
        return self

    @property
    def drafts_blocks(self) -> bool:
        """Whether the head drafts a block in one pass."""
        return self.kind != "eagle3"

    @property
    def window_length(self) -> int:
        """Tokens of a piece of text: S that are trained on, one in front of them, and one behind that is never run."""
        return self.seq + 2

    @property
    def limit_seconds(self) -> float | None:
        """The limit by the clock; None: only steps limit the run, so its learning rates do not depend on the clock."""
        if self.minutes is None and self.max_steps is not None:
            return None
        return 60.0 * (DEFAULT_MINUTES if self.minutes is None else self.minutes)

    @property
    def engine_flags(self) -> dict[str, Any]:
        """The flags of the target's engine, without those of drafting."""
        names = {name for name in EngineConfig.model_fields if not name.startswith("speculative_")}
        return self.model_dump(include=names)

    def recipe(self) -> dict[str, Any]:
        """The flags that must be the same when a run is resumed. Texts and target are compared by content."""
        fields = {"seq", "batch", "steps_deep", "draft_vocab_size", "num_heads", "intermediate_size"}
        return self.model_dump(mode="json", include=fields | {"lr", "warmup_steps", "seed"})


@contextmanager
def prepared_out(out: Path) -> Iterator[None]:
    """Make sure, around the start of a run, that its folder is there and can be written.

    If the start fails, folders that were made for it and are empty are removed.

    Raises:
        ConfigError: it cannot be made or written.
    """
    made = [folder for folder in (out, *out.parents) if not _is_there(folder)]
    try:
        with errors_of_out(out):
            out.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=out).close()
        yield
    except BaseException:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()
        raise


def _is_there(folder: Path) -> bool:
    """Whether a folder exists; one that cannot be examined counts as existing, so it is not removed."""
    try:
        return folder.exists()
    except OSError:
        return True
