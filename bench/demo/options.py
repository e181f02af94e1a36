"""The flags of the demo's training program."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from specmamba.config import CommandLine
from specmamba.measure.report import Count

DEFAULT_MINUTES = 78.0


class Architecture(BaseModel):
    """Sizes of the model: Qwen3.5 text, every fourth layer full attention, tied embeddings, one MTP layer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    vocab_size: Annotated[int, Field(ge=260, le=32768, description="tokens; 259 of them are bytes and markers")] = 4096
    hidden_size: Count = 256
    intermediate_size: Count = 768
    num_hidden_layers: Count = 8
    num_attention_heads: Count = 4
    num_key_value_heads: Count = 2
    head_dim: Annotated[int, Field(ge=16, multiple_of=4, description="half of it is rotated")] = 64
    linear_num_key_heads: Count = 4
    linear_num_value_heads: Count = 4
    linear_key_head_dim: Count = 64
    linear_value_head_dim: Count = 64
    max_position_embeddings: Count = 4096


class TrainSettings(CommandLine):
    """Train the demo checkpoint: a small hybrid language model of Python source with an MTP head."""

    out: Annotated[Path | None, Field(description="folder to write; a run found there is resumed")] = None
    evaluate: Annotated[
        Path | None, Field(description="train nothing: print the held-out figures of this checkpoint")
    ] = None

    minutes: Annotated[
        float | None,
        Field(
            gt=0, description=f"length by the clock, resumed runs added up; none: {DEFAULT_MINUTES:g} or --max-steps"
        ),
    ] = None
    max_steps: Annotated[int | None, Field(ge=1, description="length in steps")] = None
    seq: Annotated[int, Field(ge=8, description="tokens of one sequence")] = 512
    batch: Annotated[int, Field(ge=1, description="sequences of one step")] = 16
    lr: Annotated[float, Field(gt=0, description="learning rate at its peak; a cosine takes it to a twentieth")] = 2e-3
    warmup_steps: Annotated[int, Field(ge=0, description="steps of linear warm-up")] = 100
    seed: Annotated[int, Field(ge=0, lt=2**63, description="seeds initialisation, document order and sampling")] = 0
    dtype: Annotated[
        Literal["bfloat16", "float32"], Field(description="bfloat16: autocast over fp32 weights; float32: no autocast")
    ] = "bfloat16"
    device: Annotated[Literal["auto", "cpu", "cuda"], Field(description="auto: cuda where there is one")] = "auto"
    save_every: Annotated[int, Field(ge=1, description="steps between two saves of the state to resume from")] = 500
    eval_windows: Annotated[int, Field(ge=1, description="held-out sequences of --seq tokens to evaluate on")] = 64

    continue_from: Annotated[
        Path | None,
        Field(description="checkpoint whose weights and tokenizer to go on from; none: start at random"),
    ] = None
    chat_share: Annotated[
        float, Field(ge=0, le=1, description="share of the sequences that are conversations, not source code")
    ] = 0.0
    conversations: Annotated[int, Field(ge=1, description="conversations to draw from for --chat-share")] = 20000
    mtp_targets: Annotated[
        Literal["text", "target"],
        Field(description="what the MTP head learns: the text's next tokens, or the target's probabilities of them"),
    ] = "text"
    mtp_share: Annotated[float, Field(gt=0, le=1, description="share of the sequences that train the MTP head")] = 1.0

    corpus: list[Path] = Field([], description="folder to train on and hold out from, instead of the default corpus")
    extra_corpus: list[Path] = Field([], description="folder to train on as well; nothing is held out of it")
    tokenizer: Annotated[
        Path | None, Field(description="tokenizer.json to use; none: train one. Losses compare only within one")
    ] = None
    architecture: Architecture = Architecture()

    @model_validator(mode="after")
    def _knows_what_to_do(self) -> TrainSettings:
        if (self.out is None) == (self.evaluate is None):
            raise ValueError("give either --out FOLDER to train or --evaluate CHECKPOINT")
        if self.continue_from is not None and self.tokenizer is not None:
            raise ValueError("--continue-from keeps its checkpoint's tokenizer: drop --tokenizer")
        if self.continue_from is not None and self.architecture != Architecture():
            raise ValueError("--continue-from keeps its checkpoint's sizes: drop --architecture")
        return self

    @property
    def limit_seconds(self) -> float | None:
        """The limit by the clock; None: only steps limit the run, so its learning rates do not depend on the clock."""
        if self.minutes is None and self.max_steps is not None:
            return None
        return 60.0 * (DEFAULT_MINUTES if self.minutes is None else self.minutes)

    def recipe(self) -> dict[str, Any]:
        """The flags that must be the same when a run is resumed. The corpus is compared by content, not by path."""
        fields = {"seq", "batch", "lr", "warmup_steps", "seed", "dtype", "architecture"}
        fields |= {"chat_share", "conversations", "mtp_targets", "mtp_share"}
        return self.model_dump(mode="json", include=fields)
