"""Train the demo checkpoint, or evaluate one.

    python -m specmamba.bench.demo.train --out DIR --minutes 78
    python -m specmamba.bench.demo.train --evaluate specmamba/demo
    python -m specmamba.bench.demo.train --out DIR2 --continue-from DIR/checkpoint --chat-share 0.67 --seq 256 --batch 6

The third goes on from a checkpoint, with its tokenizer, in part on conversations (``talks/``), and writes a chat
template.

DIR gets ``checkpoint/`` (Hugging Face layout), ``training_report.json``, and what a later call needs to resume a run
that was interrupted (Ctrl-C, SIGTERM, power): ``resume/``, ``tokenizer.json``, ``tokens.safetensors``.
"""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specmamba.bench.demo.options import TrainSettings
from specmamba.measure.command import run_command

if TYPE_CHECKING:  # torch and transformers take seconds to import: --help must not wait for them
    from rich.console import Console

    from specmamba.bench.demo.checkpoint import TokenData
    from specmamba.bench.demo.trainer import HeldOutFigures, Trainer
    from specmamba.train.corpus import Corpus
    from specmamba.train.loop import StepCallback

PROG = "python -m specmamba.bench.demo.train"


def train(settings: TrainSettings, console: Console, on_step: StepCallback | None = None) -> Trainer:
    """Train into ``settings.out``, resuming what is there. The checkpoint is written at the end of the run."""
    from specmamba.bench.demo.checkpoint import write_checkpoint, write_json
    from specmamba.bench.demo.trainer import Trainer, evaluate
    from specmamba.train.corpus import read_corpus, roots_for
    from specmamba.train.loop import stopping_on_signals

    assert settings.out is not None
    settings.out.mkdir(parents=True, exist_ok=True)
    corpus = read_corpus(roots_for(settings.corpus, settings.extra_corpus))
    data = _token_data(settings, corpus, settings.out)
    trainer = Trainer(settings, data, settings.out)
    console.print(
        f"{len(data.train):,} training tokens from {len(corpus.train)} files, {len(data.held_out):,} held-out tokens "
        f"from {len(corpus.held_out)}; {trainer.model.num_parameters():,} parameters on {trainer.device}; "
        f"{'resuming after' if trainer.progress.step else 'starting at'} step {trainer.progress.step}",
        highlight=False,
        soft_wrap=True,
    )
    with stopping_on_signals(trainer):
        finished = trainer.run(console, on_step)
    if not finished:
        console.print(
            f"stopped after step {trainer.progress.step}: the same command resumes", highlight=False, soft_wrap=True
        )
        return trainer
    write_checkpoint(settings.out / "checkpoint", trainer.model, data.tokenizer, chats=settings.chat_share > 0)
    figures = evaluate(trainer.model, data, settings.seq, settings.eval_windows)
    write_json(settings.out / "training_report.json", _report(settings, corpus, data, trainer, figures))
    console.print(figures.describe(), highlight=False, soft_wrap=True)
    return trainer


def evaluate_checkpoint(settings: TrainSettings) -> HeldOutFigures:
    """Compute held-out figures of the checkpoint in ``settings.evaluate``, with its own tokenizer, in fp32."""
    from specmamba.bench.demo.checkpoint import held_out_data, load_tokenizer, read_checkpoint
    from specmamba.bench.demo.trainer import choose_device, evaluate
    from specmamba.train.corpus import read_corpus, roots_for

    assert settings.evaluate is not None
    model = read_checkpoint(settings.evaluate).to(choose_device(settings.device))
    tokenizer = load_tokenizer(settings.evaluate / "tokenizer.json", model.target.config.vocab_size)
    corpus = read_corpus(roots_for(settings.corpus, settings.extra_corpus))
    return evaluate(model, held_out_data(corpus, tokenizer), settings.seq, settings.eval_windows)


def _token_data(settings: TrainSettings, corpus: Corpus, folder: Path) -> TokenData:
    from specmamba.bench.demo.checkpoint import (
        TOKENIZER_SHARE,
        load_tokenizer,
        prepare,
        read_checkpoint,
        train_tokenizer,
    )

    vocab_size, file = settings.architecture.vocab_size, folder / "tokenizer.json"
    if settings.continue_from is not None:
        vocab_size = read_checkpoint(settings.continue_from).target.config.vocab_size
        tokenizer = load_tokenizer(settings.continue_from / "tokenizer.json", vocab_size)
    elif settings.tokenizer is not None:
        tokenizer = load_tokenizer(settings.tokenizer, vocab_size)
    elif file.exists():
        tokenizer = load_tokenizer(file, vocab_size)
    else:
        tokenizer = train_tokenizer((document.text for document in corpus.train[::TOKENIZER_SHARE]), vocab_size)
    tokenizer.save(str(file))
    return prepare(corpus, tokenizer, settings.seed, folder / "tokens.safetensors")


def _report(
    settings: TrainSettings, corpus: Corpus, data: TokenData, trainer: Trainer, figures: HeldOutFigures
) -> dict[str, Any]:
    import torch

    from specmamba.bench.demo.trainer import start_of

    on_gpu = trainer.device.type == "cuda"
    device = torch.cuda.get_device_name() if on_gpu else f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    packages = ("torch", "transformers", "tokenizers", "safetensors")
    return {
        "recipe": settings.recipe(),
        "start": start_of(settings),
        "limits": {"minutes": settings.minutes, "max_steps": settings.max_steps},
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "device": device,
        "num_parameters": trainer.model.num_parameters(),
        "steps": trainer.progress.step,
        "seconds": round(trainer.progress.elapsed, 1),
        "tokens_seen": trainer.tokens_seen,
        "train_tokens": len(data.train),
        "train_losses": trainer.progress.smoothed,
        "held_out": figures.model_dump(),
        "corpus": corpus.summary(),
        "held_out_files": [document.name for document in corpus.held_out],
        "corpus_and_tokenizer_sha256": data.digest,
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the program; exit status: 0 finished, 1 stopped before the end (resumable), 2 an error."""
    return run_command(PROG, TrainSettings, arguments, _run)


def _run(settings: TrainSettings) -> int:
    from rich.console import Console

    if settings.evaluate is not None:
        print(evaluate_checkpoint(settings).describe())
        return 0
    return 0 if train(settings, Console()).share_done >= 1.0 else 1


if __name__ == "__main__":
    raise SystemExit(main())
