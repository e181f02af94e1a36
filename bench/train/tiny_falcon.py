"""Train a tiny Falcon-H1 for a few minutes: a target without a draft head, to try ``specmamba train draft`` on.

    python -m specmamba.bench.train.tiny_falcon --out DIR [--minutes 8]
    specmamba train draft --model DIR --out DIR-draft --minutes 5

The text is the demo's corpus, the tokenizer the demo's. DIR is a Hugging Face checkpoint.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from specmamba.config import DEMO_MODEL, CommandLine
from specmamba.errors import ConfigError, SpecmambaError
from specmamba.measure.command import run_command

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from torch import Tensor
    from transformers import FalconH1ForCausalLM

    from specmamba.bench.demo.checkpoint import WindowSampler

PROG = "python -m specmamba.bench.train.tiny_falcon"
SHOWN_EVERY_SECONDS = 30.0
WARMUP_STEPS, FINAL_LR_SHARE = 50, 0.05


class TinyFalconSettings(CommandLine):
    """Train a tiny Falcon-H1 on Python source."""

    out: Annotated[Path, Field(description="folder to write the checkpoint to")]
    minutes: Annotated[float, Field(gt=0, description="length by the clock")] = 8.0
    max_steps: Annotated[int | None, Field(ge=1, description="length in steps, if that is reached earlier")] = None
    num_files: Annotated[int, Field(ge=2, description="files of the corpus to read at the most")] = 1500
    seq: Annotated[int, Field(ge=16, description="tokens of one sequence")] = 128
    batch: Annotated[int, Field(ge=1, description="sequences of one step")] = 16
    lr: Annotated[float, Field(gt=0, description="learning rate at its peak")] = 3e-3
    hidden_size: Annotated[int, Field(ge=64, multiple_of=64, description="width")] = 128
    num_layers: Annotated[int, Field(ge=1, description="layers")] = 4
    seed: Annotated[int, Field(ge=0, lt=2**63, description="seeds everything")] = 0


def train(settings: TinyFalconSettings, console: Console) -> None:
    """Train until the time is over, and write the checkpoint.

    Raises:
        ConfigError: there is no text to train on, or the folder cannot be written.
    """
    import torch

    from specmamba.bench.demo.checkpoint import save_with_demo_tokenizer

    _make_folder(settings.out)
    torch.manual_seed(settings.seed)
    model = new_model(settings)
    sampler = _sampler(settings, model.config.vocab_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.0)
    began = shown = time.perf_counter()
    step, share, smoothed = 0, 0.0, 0.0
    while share < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * min(1.0, (step + 1) / WARMUP_STEPS) * max(FINAL_LR_SHARE, 1.0 - share)
        value = _step(model, optimizer, sampler.next())
        step, smoothed = step + 1, 0.95 * smoothed + 0.05 * value if step else value
        now = time.perf_counter()
        share = max((now - began) / (60 * settings.minutes), step / settings.max_steps if settings.max_steps else 0.0)
        if now - shown > SHOWN_EVERY_SECONDS or share >= 1.0:
            shown = now
            console.print(f"step {step}  loss {smoothed:.3f}  {min(share, 1.0):.0%}", highlight=False)
    save_with_demo_tokenizer(model, settings.out, "float32")


def _sampler(settings: TinyFalconSettings, vocab_size: int) -> WindowSampler:
    """Make a sampler of random windows of a part of the corpus, encoded with the demo's tokenizer."""
    from specmamba.bench.demo.checkpoint import WindowSampler, load_tokenizer, prepare
    from specmamba.train.corpus import Corpus, default_roots, read_corpus

    corpus = read_corpus(default_roots())
    every = -(-len(corpus.train) // settings.num_files)
    tokenizer = load_tokenizer(DEMO_MODEL / "tokenizer.json", vocab_size)
    data = prepare(Corpus(corpus.train[::every], corpus.held_out), tokenizer, settings.seed)
    return WindowSampler(data.train, settings.seq, settings.batch, settings.seed)


def _step(model: FalconH1ForCausalLM, optimizer: torch.optim.Optimizer, tokens: Tensor) -> float:
    """Do one optimizer step on tokens [B, S]; return its loss in nats. Raises SpecmambaError when it is not finite."""
    from torch.nn.utils import clip_grad_norm_

    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    value: float = loss.item()
    if not math.isfinite(value):
        raise SpecmambaError(f"the loss is {value}: lower --lr")
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return value


def new_model(settings: TinyFalconSettings) -> FalconH1ForCausalLM:
    """Make an untrained tiny Falcon-H1, with multipliers that are not 1."""
    from transformers import FalconH1Config, FalconH1ForCausalLM

    hidden = settings.hidden_size
    config = FalconH1Config(
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=max(1, hidden // 64),
        head_dim=32,
        mamba_d_ssm=2 * hidden,
        mamba_n_heads=hidden // 16,
        mamba_d_head=32,
        mamba_d_state=32,
        mamba_n_groups=1,
        mamba_chunk_size=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        embedding_multiplier=4.0,
        lm_head_multiplier=0.25,
        attention_out_multiplier=0.9,
        ssm_out_multiplier=0.8,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    return FalconH1ForCausalLM(config)


def _make_folder(folder: Path) -> None:
    """Make the folder before the training, so that an error shows at once."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: {folder} cannot be made: {error.strerror}") from None


def main(arguments: list[str] | None = None) -> int:
    """Run the program; exit status: 0, 2 for an error, 130 after Ctrl-C."""
    return run_command(PROG, TinyFalconSettings, arguments, _run, "nothing is written before the end")


def _run(settings: TinyFalconSettings) -> int:
    from rich.console import Console

    train(settings, Console())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
