"""``specmamba train draft``: training and drafting compute the same head; runs resume, report, and refuse bad input."""

from __future__ import annotations

import gc
import io
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor
from torch.autograd.profiler import profile

from specmamba import LLM
from specmamba.bench.train import tiny_falcon
from specmamba.engine.engine import Engine
from specmamba.errors import CheckpointError, ConfigError, SpecmambaError
from specmamba.flags.command_line import parse_command_line
from specmamba.train import corpus, draft, memory, texts, trainer, windows
from specmamba.train.head import Eagle3Head, HeadShape, write_head
from specmamba.train.options import TrainDraftConfig
from tests.engine.test_target_reader import new_llm, read
from tests.families import FAMILIES
from tests.models.test_model_exact import accept_at_random, assert_close, new_engine, random_prompts, record_drafts, run
from tests.tiny import write_tiny_checkpoint

STEPS = 8
WORDS = ["def", "return", "if", "else", "x", "y", "self", "(", ")", ":", "+", "None", "name", "value", "="]


# ---- the head that is trained is the head that drafts ----------------------------------------------------------------


def random_head(llm: LLM, layers: tuple[int, ...], scales: list[float], target_ids: Tensor | None) -> Eagle3Head:
    """A head in which every weight has an effect on the logits."""
    hidden_size, vocab_size = llm.engine.model.target.hidden_size, llm.engine.vocab_size
    drafted = None if target_ids is None else len(target_ids)
    shape = HeadShape.of(hidden_size, vocab_size, len(layers), drafted, num_heads=4, intermediate_size=50)
    head = Eagle3Head(shape, llm.workbench.target_matrices()[1], scales, target_ids)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            random = torch.randn(parameter.shape, generator=generator)
            if name not in ("lm_head.weight", "scales"):
                parameter.copy_(1 + 0.3 * random if parameter.dim() == 1 else random * 1.5 / parameter.shape[1] ** 0.5)
    return head


@torch.no_grad()
def trained_logits(head: Eagle3Head, embedding: Tensor, features: Tensor, tokens: list[int], root: int) -> Tensor:
    """The head's logits along a draft from ``root``, as the training computes them, [steps, V]."""
    padded = torch.zeros(len(tokens) - 1, features.shape[1])  # no hidden state of the target is read behind the root
    padded[:root] = features[:root]
    states = head.states(embedding[tokens[1:]][None], padded[None], len(tokens) - 1 - root)
    logits = torch.stack([head.lm_head(of_step[0, root - 1 + step]) for step, of_step in enumerate(states)])
    if head.target_ids is None:
        return logits
    full = torch.full((len(logits), head.shape.vocab_size), -torch.inf)
    return full.index_copy_(1, head.target_ids, logits)


@pytest.mark.parametrize("family", ["qwen3.5", "falcon-h1", "granite-hybrid", "lfm2"])
@pytest.mark.parametrize("drafts_all", [True, False])
def test_the_training_computes_what_the_engine_drafts(
    family: str, drafts_all: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, ids = tmp_path / "model", None if drafts_all else torch.arange(3, 97, 2)
    FAMILIES[family].build(folder)
    with new_llm(folder, context_length=256) as llm:
        layers = windows.feature_layers(llm.engine.model.num_layers)
        head = random_head(llm, layers, [0.25, 4.0, 2.0][: len(layers)], ids)
        embedding, _ = llm.workbench.target_matrices()
        write_head(tmp_path / "head", head, layers, 256)
        engine = new_engine(
            folder, 4, speculative_algorithm="auto", speculative_draft_model_path=str(tmp_path / "head")
        )
        assert engine.describe()["speculative_algorithm"] == "eagle3"
        accept_at_random(monkeypatch, torch.Generator().manual_seed(1))
        drafts = record_drafts(engine, monkeypatch)
        answers = run(engine, random_prompts((26, 2, 9), seed=3), (14, 16, 10))
        assert {draft.num_tokens for of_request in drafts.values() for draft in of_request} >= {1, 2, 4, 5}
        for request, of_request in drafts.items():
            features = read(llm, [answers[request]], layers)[0].features
            for made in of_request:
                root = len(made.known) - 1
                expected = trained_logits(head, embedding, features, made.known + made.tokens, root)
                is_drafted = expected > -torch.inf
                assert torch.equal(made.logits > -torch.inf, is_drafted)
                assert_close(made.logits[is_drafted], expected[is_drafted])
    engine.close()


def test_the_layout(tmp_path: Path) -> None:
    """EAGLE-3's names; the scales of features are in the weights, exactly; layers are named by both conventions."""
    shape = HeadShape.of(36, 131, 2, 5, None, None)
    ids = torch.tensor([1, 2, 30, 77, 130])
    head = Eagle3Head(shape, torch.randn(131, 36), [0.5, 8.0], ids)
    write_head(tmp_path, head, (1, 3), 64)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {"fc.weight", "norm.weight", "lm_head.weight", "midlayer.hidden_norm.weight", "d2t", "t2d"} < tensors.keys()
    assert "scales" not in tensors
    assert (tensors["d2t"] + torch.arange(5)).tolist() == ids.tolist()
    assert tensors["t2d"].nonzero()[:, 0].tolist() == ids.tolist()
    assert torch.equal(tensors["fc.weight"][:, :36] / 2, head.fc.weight.detach()[:, :36])
    assert torch.equal(tensors["fc.weight"][:, 36:] * 8, head.fc.weight.detach()[:, 36:])
    config = json.loads((tmp_path / "config.json").read_text("utf8"))
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2]
    assert (config["vocab_size"], config["draft_vocab_size"]) == (131, 5)


# ---- what it is trained on -------------------------------------------------------------------------------------------


def settings(out: Path, **changes: Any) -> TrainDraftConfig:
    values: dict[str, Any] = {
        "out": out,
        "dtype": "float32",
        "device": "cpu",
        "max_total_tokens": 2048,
        "num_tokens": 4000,
        "seq": 24,
        "batch": 2,
        "warmup_steps": 2,
        "lr": 5e-3,
        "max_steps": STEPS,
        "steps_deep": 2,
        "report_prompts": 2,
    }
    return TrainDraftConfig(**(values | changes))


def written_text(number: int, words: int = 260) -> str:
    draw = torch.Generator().manual_seed(number)
    picks = torch.randint(len(WORDS), (words,), generator=draw).tolist()
    return f"# {number}\n" + " ".join(WORDS[pick] for pick in picks) + "\n"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of twenty-four different files, and one that is a copy of another."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(24):
        (folder / f"{i}.py").write_text(written_text(i), "utf8")
    (folder / "copy.py").write_text(written_text(3), "utf8")
    return folder


class Letters:
    """A tokenizer: every character is a token."""

    has_chat_template = True

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def apply_chat_template(self, messages: list[dict[str, Any]]) -> list[int]:
        return [0, *self.encode(messages[0]["content"]), 1]


def read_letters(tmp_path: Path, *names: Path, **changes: Any) -> tuple[str, list[str]]:
    """The text to train on, documents behind each other, and the pieces held out."""
    config = settings(tmp_path, text=[str(name) for name in names], **changes)
    found = texts.encode_texts(config, texts.read_documents(config), Letters())
    as_text = ["".join(map(chr, tokens)) for tokens in (*found.train, *found.held_out)]
    return "".join(as_text[: len(found.train)]), as_text[len(found.train) :]


@pytest.mark.parametrize("seed", range(4))
def test_held_out_text_is_never_trained_on(text: Path, tmp_path: Path, seed: int) -> None:
    train, held_out = read_letters(tmp_path, text, seed=seed, num_tokens=10**6, report_prompts=9)
    assert len(held_out) == 9
    assert {len(piece) for piece in held_out} == {texts.REPORT_TOKENS}
    assert not any(piece in train for piece in held_out)
    documents = [written_text(i) for i in range(24)]
    assert sum(document in train for document in documents) == 22  # two of 24 are held out; the copy is dropped
    assert all(any(piece in document for document in documents) for piece in held_out)


def test_the_ends_of_few_documents_are_held_out(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text(written_text(1, 2000), "utf8")
    train, held_out = read_letters(tmp_path, tmp_path / "one.txt", num_tokens=10**6, report_prompts=3)
    whole = written_text(1, 2000)
    assert train == whole[: len(train)]
    assert len(train) == len(whole) - len(whole) // 20
    end = whole[len(train) :]
    assert {end.index(piece) % texts.REPORT_TOKENS for piece in held_out} == {0}
    assert len(set(held_out)) == 3


def test_no_more_tokens_than_were_asked_for(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "SLAB", 100)
    whole, _ = read_letters(tmp_path, text, num_tokens=10**6)
    assert len(whole) > 20_000
    first, _ = read_letters(tmp_path, text, num_tokens=16 * 104 + 50)
    documents = ["# " + document for document in whole.split("# ")[1:]]
    assert first == "".join(document[:104] for document in documents)[: 16 * 104 + 50]  # 104: four windows
    more, _ = read_letters(tmp_path, text, num_tokens=22 * 104 + 50)
    assert more == "".join(document[:104] for document in documents) + documents[0][104:154]


def test_files_of_prompts(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    rows: list[dict[str, Any]] = [
        {"prompt": f"question {i} {written_text(i, 40)}", "continuation": "the rest"} for i in range(30)
    ]
    turns = [{"from": "human", "value": "ask"}, {"from": "gpt", "value": "answer"}]
    file.write_text("\n".join(json.dumps(row) for row in [*rows, {"conversations": turns}]), "utf8")
    train, held_out = read_letters(tmp_path, tmp_path, pattern="*.jsonl", num_tokens=10**6, seed=1)
    assert train.count("the rest") == 28
    assert train.count("\0ask\1answer") == 1
    assert len(held_out) == 2
    file.write_text('{"prompt": "a"}\nnonsense', "utf8")
    with pytest.raises(ConfigError, match=r"--text: .*prompts.jsonl, line 2: not JSON"):
        read_letters(tmp_path, file)


def test_text_that_cannot_be_used(text: Path, tmp_path: Path) -> None:
    for name, sentence in (
        ("latin.py", "not UTF-8"),
        ("short.py", "12 tokens to train on, fewer than a sequence of 26"),
    ):
        (tmp_path / name).write_bytes(
            "x = 1 # \xe4\xe4\xe4\xe4".encode("latin1" if name == "latin.py" else "ascii", "ignore")
        )
        if name == "short.py":
            (tmp_path / name).write_bytes(b"x = 1 + 2 + 3"[:12])
        with pytest.raises(ConfigError, match=f"--text: .*{sentence}"):
            read_letters(tmp_path, tmp_path / name)
    with pytest.raises(ConfigError, match=r"there is no file or folder .*nowhere"):
        read_letters(tmp_path, tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"--text: .*nnn cannot be read: File name too long"):
        read_letters(tmp_path, tmp_path / ("n" * 300), text, pattern="*.py3")
    with pytest.raises(ConfigError, match=r"no file that matches --pattern '\*\.rs'"):
        read_letters(tmp_path, text, pattern="*.rs")
    (tmp_path / "middling.txt").write_text("word " * 60, "utf8")
    with pytest.raises(ConfigError, match="nothing of 96 tokens can be held out for the report"):
        read_letters(tmp_path, tmp_path / "middling.txt")


def test_the_default_text_is_that_of_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        texts, "default_roots", lambda: [replace(root, keep_every=1) for root in corpus.default_roots()[:1]]
    )
    train, held_out = read_letters(tmp_path, num_tokens=20_000, report_prompts=4)
    names = [document.text for document in corpus.read_corpus(corpus.default_roots()[:1]).held_out]
    assert len(train) == 20_000
    assert all(any(piece in document for document in names) for piece in held_out)


def test_windows() -> None:
    pieces = windows.cut([[1, 2, 3], [4, 5], [6, 7, 8, 9]], 4, seed=1)
    assert sorted(pieces) == [(1, 2, 3, 4), (5, 6, 7, 8)]
    for num_layers in range(1, 100):
        layers = windows.feature_layers(num_layers)
        assert list(layers) == sorted(set(layers))
        assert len(layers) == min(3, max(1, num_layers - 1))
        assert 0 <= layers[0] <= layers[-1] < num_layers
    assert windows.feature_layers(32) == (2, 16, 29)
    some = windows.Windows.empty(3, 5, 8, 4)
    some.features[..., :4], some.features[..., 4:] = 6.0, 0.2
    assert windows.feature_scales(some, 2) == [8.0, 0.25]
    assert windows.bytes_of(3, 5, 8, 4) == some.tokens.nbytes + some.features.nbytes + some.hidden.nbytes
    assert windows.frequent_tokens([[5, 5, 2, 9], [9, 9, 1]], 4, 12).tolist() == [1, 2, 5, 9]
    assert windows.frequent_tokens([[5, 5, 9]], 3, 12).tolist() == [0, 5, 9]


# ---- runs ------------------------------------------------------------------------------------------------------------


def silent() -> Console:
    return Console(file=io.StringIO(), width=200)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model", seed=5, vocab_size=4096)


@pytest.fixture(scope="module")
def finished(target: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[float]], str]:
    """An uninterrupted run: its folder, the losses and agreements of every step, and what it printed."""
    out, values, console = tmp_path_factory.mktemp("finished"), list[list[float]](), silent()
    config = settings(out, model=str(target), text=[str(text)])
    assert draft.train(config, console, lambda _, of_step: values.append(of_step)) == 0
    assert isinstance(console.file, io.StringIO)
    return out, values, console.file.getvalue()


def test_the_files_of_a_run(finished: tuple[Path, list[list[float]], str], target: Path) -> None:
    out, values, printed = finished
    assert {path.name for path in out.iterdir()} == {"head", "resume", "report.json", "held_out.jsonl"}
    report = json.loads((out / "report.json").read_text("utf8"))
    assert (report["steps"], report["head"]["draft_vocab_size"]) == (STEPS, 4096)
    assert len(report["agreement"]) == 2
    assert [point["step"] for point in report["curve"]] == [STEPS]
    assert 1.0 <= report["curve"][0]["accept_length"] <= 3.0
    assert f"held out {report['curve'][0]['accept_length']:.2f}" in printed
    assert [report[way]["temperature"] for way in ("sampled", "greedy", "replayed")] == [0.8, 0.0, None]
    for way in ("sampled", "greedy"):
        assert report[way]["lossless"] == {"identical": 2, "near_tie": 0, "diverged": 0}
    assert all(report[way]["num_steps"] == 2 for way in ("sampled", "greedy", "replayed"))
    assert all(report[way]["algorithm"] == "eagle3" for way in ("sampled", "greedy", "replayed"))
    assert str(out) not in json.dumps(report)
    rows = [json.loads(line) for line in (out / "held_out.jsonl").read_text("utf8").splitlines()]
    assert [sorted(row) for row in rows] == [["continuation", "prompt"]] * 2
    lines = printed.splitlines()
    assert lines[0].startswith(f"{4000 // 26 * 24:,} tokens to train on; what the target says of them takes 2 MiB")
    served = f"--speculative-draft-model-path {out / 'head'} --speculative-num-steps 2"
    assert lines[-1] == f"specmamba serve --model {target} {served}"
    assert len(values) == STEPS
    assert values[-1][0] < values[0][0]


@pytest.mark.slow
@pytest.mark.parametrize("stop_after", [1, 5])
def test_a_stopped_run_resumes_to_the_same_values_and_weights(
    finished: tuple[Path, list[list[float]], str], target: Path, text: Path, tmp_path: Path, stop_after: int
) -> None:
    whole, expected, _ = finished
    config = settings(tmp_path, model=str(target), text=[str(text)])
    values: list[list[float]] = []

    def interrupt(step: int, of_step: list[float]) -> None:
        values.append(of_step)
        if step == stop_after:
            os.kill(os.getpid(), signal.SIGINT)

    console = silent()
    assert draft.train(config, console, interrupt) == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert isinstance(console.file, io.StringIO)
    assert "stopped: the same command resumes" in console.file.getvalue()
    assert len(values) == stop_after
    assert not (tmp_path / "head").exists()
    config = config.model_copy(update={"save_every": 4})
    assert draft.train(config, silent(), lambda _, of_step: values.append(of_step)) == 0
    assert values == expected
    ours, theirs = (load_file(out / "head/model.safetensors") for out in (tmp_path, whole))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    resumed, uninterrupted = (json.loads((out / "report.json").read_text("utf8"))["curve"] for out in (tmp_path, whole))
    assert [point["step"] for point in resumed] == sorted({stop_after, 4, STEPS} - ({4} if stop_after > 4 else set()))
    assert resumed[-1]["accept_length"] == uninterrupted[-1]["accept_length"]


@pytest.mark.parametrize("drafts_all", [True, False])
def test_the_held_out_curve(drafts_all: bool, tmp_path: Path) -> None:
    """The same as drafting behind every root by itself, without a state of the target behind it."""
    config, few = settings(tmp_path, steps_deep=3), 3  # a vocabulary in which chance finds tokens
    torch.manual_seed(1)
    some = windows.Windows.empty(2, 20, 2 * 16, 16)
    generator = torch.Generator().manual_seed(0)
    some.tokens.random_(few, generator=generator)
    some.features.normal_(generator=generator)
    matrix = torch.randn(few, 16, generator=generator)
    ids = None if drafts_all else torch.tensor([0, 2])
    shape = HeadShape.of(16, few, 2, None if ids is None else len(ids), num_heads=2, intermediate_size=30)
    head = Eagle3Head(shape, matrix, [1.0, 1.0], ids)
    loop = trainer.DraftTrainer(config, trainer.TrainingData(some, some, matrix, matrix, {}), head, torch.device("cpu"))
    lengths = []
    for tokens, features in zip(some.tokens.tolist(), some.features.float(), strict=True):
        for root in range(1, 20 - 3):
            said = trained_logits(head, matrix, features, tokens[: root + 4], root).argmax(-1).tolist()
            wrong = [i for i, token in enumerate(said) if token != tokens[root + 1 + i]]
            lengths.append(1 + (wrong[0] if wrong else 3))
    assert len(set(lengths)) >= 3
    assert loop.held_out_accept_length() == pytest.approx(sum(lengths) / len(lengths))


@pytest.mark.slow
def test_a_run_is_not_resumed_with_other_settings(
    finished: tuple[Path, list[list[float]], str], target: Path, text: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished[0], tmp_path / "out")
    other = write_tiny_checkpoint(tmp_path / "other", seed=6, vocab_size=4096)
    same: dict[str, Any] = {"model": str(target), "text": [str(text)]}
    for changes, sentence in (
        ({"model": str(other)}, "target was .* and is"),
        ({"dtype": "bfloat16"}, "target was .* and is"),
        ({"lr": 1e-3}, r"lr was 0\.005 and is 0\.001"),
        ({"draft_vocab_size": 100}, "draft_vocab_size was None and is 100"),
        ({"num_tokens": 3000}, "texts was"),
    ):
        with pytest.raises(ConfigError, match=f"cannot be resumed with other settings: .*{sentence}"):
            draft.train(settings(tmp_path / "out", **(same | changes)), silent())
    (tensors,) = (tmp_path / "out/resume").glob("*.safetensors")
    tensors.write_bytes(tensors.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=r"resume is damaged .* delete that folder"):
        draft.train(settings(tmp_path / "out", **same), silent())


@pytest.mark.slow
def test_a_part_of_the_vocabulary(target: Path, text: Path, tmp_path: Path) -> None:
    config = settings(
        tmp_path, model=str(target), text=[str(text)], draft_vocab_size=12, max_steps=30, report_prompts=1
    )
    values: list[list[float]] = []
    assert draft.train(config, silent(), lambda _, of_step: values.append(of_step)) == 0
    assert values[-1][0] < values[0][0]
    assert json.loads((tmp_path / "head/config.json").read_text("utf8"))["draft_vocab_size"] == 12
    config = settings(tmp_path / "b", model=str(target), text=[str(text)], draft_vocab_size=4097)
    with pytest.raises(ConfigError, match="--draft-vocab-size 4097: the target has 4096 tokens"):
        draft.train(config, silent())


def test_the_target_is_closed_while_the_head_is_trained(
    target: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[weakref.ref[Any]] = []
    real: Callable[..., Any] = windows.read_windows

    def read_windows(llm: LLM, *rest: Any) -> Any:
        engines.append(weakref.ref(llm.engine.model.target))
        return real(llm, *rest)

    monkeypatch.setattr(windows, "read_windows", read_windows)
    config = settings(tmp_path, model=str(target), text=[str(text)])
    left = draft.read_the_target(config, texts.read_documents(config), silent())
    gc.collect()
    assert len(left.data.windows) > 0
    assert engines[0]() is None


def test_the_trainer_is_freed_when_the_head_is_measured(
    target: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainers: list[weakref.ref[Any]] = []
    real: Callable[..., Any] = draft.new_trainer

    def new_trainer(*args: Any) -> Any:
        made = real(*args)
        trainers.append(weakref.ref(made))
        return made

    def report(*_: Any) -> int:
        gc.collect()
        assert trainers[0]() is None
        return 1

    monkeypatch.setattr(draft, "new_trainer", new_trainer)
    monkeypatch.setattr(draft, "report", report)
    assert draft.train(settings(tmp_path, model=str(target), text=[str(text)], max_steps=1), silent()) == 1


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafted", [None, 7])
@pytest.mark.parametrize("positions", [1, 5, 1000])
def test_the_loss_and_its_gradient(drafted: int | None, positions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Computed in slices they equal those of autograd on all positions."""
    monkeypatch.setattr(trainer, "SLICE_NUMBERS", 61 * positions)
    torch.manual_seed(0)
    ids = None if drafted is None else torch.tensor([0, 3, 4, 20, 33, 59, 60])
    head = Eagle3Head(HeadShape.of(12, 61, 2, drafted), torch.randn(61, 12), [1.0, 2.0], ids)
    states = head.states(torch.randn(2, 9, 12), torch.randn(2, 9, 24), 3)
    output, hidden = torch.randn(61, 12), torch.randn(2, 9, 12) + states[1].detach()
    output[slice(None) if ids is None else ids] = 2 * head.lm_head.weight.detach()  # so that some agree
    found = trainer.draft_loss(states, hidden, head.lm_head.weight, output, ids)
    torch.autograd.backward(states, found.gradients, retain_graph=True)
    ours = {name: x.grad for name, x in head.named_parameters() if x.requires_grad}
    head.zero_grad(set_to_none=True)
    target = (hidden @ output.T).softmax(-1)
    likeliest, target = target.argmax(-1), target if ids is None else target[..., ids]
    losses, agreements = [], []
    for step, x in enumerate(states):
        logits = head.lm_head(x[:, step:])
        losses.append(-(target[:, step:] * logits.log_softmax(-1)).sum(-1).mean())
        guessed = logits.argmax(-1) if ids is None else ids[logits.argmax(-1)]
        agreements.append((guessed == likeliest[:, step:]).float().mean())
    expected = (losses[0] + 0.8 * losses[1] + 0.64 * losses[2]) / 2.44
    expected.backward()
    assert_close(found.loss, expected.detach())
    assert_close(found.agreements, torch.stack(agreements))
    assert float(found.agreements.max()) > 0
    for name, parameter in head.named_parameters():
        if parameter.grad is not None:
            gradient = ours.pop(name)
            assert gradient is not None
            assert_close(gradient, parameter.grad)
    assert not ours


def peak_bytes(run_it: Callable[[], Any]) -> int:
    """The largest amount of memory that is allocated meanwhile."""
    with profile(use_cpu=True, profile_memory=True) as events:
        run_it()
    results = events.kineto_results
    assert results is not None
    memory_events = [event for event in results.events() if event.name() == "[memory]"]
    ordered = sorted(memory_events, key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in ordered))


@pytest.mark.parametrize(
    ("vocab_size", "changes"),
    [
        (2000, {"seq": 128}),
        (300, {"seq": 128, "num_heads": 8}),
        (30_000, {"seq": 16}),
        (2000, {"seq": 32, "batch": 6, "steps_deep": 5}),
    ],
)
def test_a_step_takes_the_memory_that_is_predicted(
    vocab_size: int, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "SLICE_NUMBERS", 1 << 16)
    config = settings(tmp_path, **changes)
    some = windows.Windows.empty(3, config.seq + 1, 3 * 64, 64)
    some.tokens.random_(vocab_size, generator=torch.Generator().manual_seed(0))
    some.features.fill_(1.0)
    some.hidden.fill_(1.0)
    shape = memory.shape_of(config, 64, vocab_size, 3)
    matrix = torch.randn(vocab_size, 64, generator=torch.Generator().manual_seed(0))
    head = Eagle3Head(shape, matrix, [1.0] * 3)
    run_of_steps = trainer.DraftTrainer(
        config, trainer.TrainingData(some, some, matrix, matrix, {}), head, torch.device("cpu")
    )
    run_of_steps.step()  # allocates Adam's moments
    head.zero_grad(set_to_none=True)
    needs = memory.needs_of(config, shape, 3)
    assert needs.head == 4 * 4 * head.num_parameters
    assert needs.matrices == 2 * matrix.nbytes
    counted = needs.step + needs.head // 4
    assert 0.6 * counted < peak_bytes(run_of_steps.step) <= counted + 1024  # sums, norms


def test_a_run_that_does_not_fit_the_memory(
    target: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    same: dict[str, Any] = {"model": str(target), "text": [str(text)]}
    monkeypatch.setattr("specmamba.engine.engine.free_memory", lambda device: 64 << 20)
    for changes, sentence in (
        ({"batch": 3000}, r"a step takes \d{3} MiB \(lower --batch, now 3000, or --seq, now 24\)"),
        ({"intermediate_size": 40_000}, r"Adam's moments takes \d\d MiB \(lower --draft-vocab-size, all 4,096\)"),
        ({"intermediate_size": 40_000, "draft_vocab_size": 9}, r"\(lower --draft-vocab-size, now 9\)"),
    ):
        with pytest.raises(ConfigError, match=rf"the training takes \d+ MiB, and 64 MiB are free: .*{sentence}"):
            draft.train(settings(tmp_path / "out", **(same | changes)), silent())
    monkeypatch.undo()
    monkeypatch.setattr("specmamba.engine.workbench.free_memory", lambda device: 1000)
    for changes, sentence in (({}, "--num-tokens, now 4,000"), ({"own_outputs": 180}, "--own-outputs, now 180")):
        with pytest.raises(ConfigError, match=rf"MiB are free: .* takes \d MiB \(lower {sentence}\)"):
            draft.train(settings(tmp_path / "out", **(same | changes)), silent())
    assert list(tmp_path.iterdir()) == []


# ---- the target's own outputs ----------------------------------------------------------------------------------------


def test_own_outputs_are_written_once(target: Path, text: Path, tmp_path: Path) -> None:
    config = settings(
        tmp_path, model=str(target), text=[str(text)], own_outputs=180, temperature=0.7, max_running_requests=4
    )
    with new_llm(target, max_running_requests=4) as llm:
        given = texts.encode_texts(config, texts.read_documents(config), llm.engine.tokenizer)
        assert windows.num_windows(config, given) == 9
        found = windows.own_outputs(config, llm, given, "a target")
        assert len(found.train) == 9  # 20 tokens behind 6
        assert {len(tokens) for tokens in found.train} == {26}
        stream = tuple(token for tokens in given.train for token in tokens)
        starts = {stream[i : i + 6] for i in range(0, len(stream), 6)}
        assert all(tokens[:6] in starts for tokens in found.train)
        file = tmp_path / windows.FILE
        lines = file.read_text("utf8").splitlines(keepends=True)
        file.write_text("".join(lines[:5]) + lines[5][:20], "utf8")  # killed while writing
        steps = llm.engine.stats().spec.num_verify_steps
        assert windows.own_outputs(config, llm, given, "a target") == found
        assert file.read_text("utf8").splitlines(keepends=True) == lines
        assert llm.engine.stats().spec.num_verify_steps - steps == 5 * 20
        for other in (config.model_copy(update={"temperature": 0.0}), config.model_copy(update={"seed": 1})):
            with pytest.raises(ConfigError, match="has outputs of another target, text or setting: delete it"):
                windows.own_outputs(other, llm, given, "a target")
        with pytest.raises(ConfigError, match="of another target"):
            windows.own_outputs(config, llm, given, "another")
        file.write_text(lines[0] + '["x"]\n', "utf8")
        with pytest.raises(ConfigError, match="is damaged"):
            windows.own_outputs(config, llm, given, "a target")


def test_greedy_outputs_are_not_repeated(target: Path, tmp_path: Path) -> None:
    given = texts.Texts(((*range(5, 35),),), ())
    with new_llm(target) as llm:
        config = settings(tmp_path, own_outputs=200, temperature=0.0)
        assert len(windows.own_outputs(config, llm, given, "").train) == 5
        (tmp_path / windows.FILE).unlink()
        sampled = windows.own_outputs(settings(tmp_path, own_outputs=200, temperature=1.0), llm, given, "").train
    assert len(sampled) == 10
    assert len(set(sampled)) == 10  # a prompt that is used again has another output


@pytest.mark.slow
def test_a_run_on_own_outputs(target: Path, text: Path, tmp_path: Path) -> None:
    config = settings(tmp_path, model=str(target), text=[str(text)], own_outputs=100, report_prompts=1, max_steps=2)
    assert draft.train(config, silent()) == 0
    assert (tmp_path / windows.FILE).exists()
    assert json.loads((tmp_path / "report.json").read_text("utf8"))["recipe"]["own_outputs"] == 100


# ---- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"speculative_num_steps": 4}, "--speculative-num-steps: what is drafted is decided by the training"),
        ({"speculative_algorithm": "none"}, "--speculative-algorithm: what is drafted"),
        ({"speculative_state": "snapshots"}, "--speculative-state: what is drafted"),
        ({"disable_radix_cache": False}, "--no-disable-radix-cache: what is cached would not be run"),
        (
            {"steps_deep": 8, "seq": 16, "num_tokens": 64, "own_outputs": 0, "temperature": 0.5},
            "--temperature is that of",
        ),
        ({"num_tokens": 64, "seq": 63}, "--num-tokens 64 is less than one sequence"),
        ({"pattern": "*.txt"}, "--pattern is of the files in a folder"),
        ({"lr": 0.0}, "greater than 0"),
        ({"json": "x.json"}, "Extra inputs are not permitted"),
    ],
)
def test_flags_that_do_nothing_or_contradict_are_refused(
    changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ValidationError, match=sentence):
        settings(tmp_path, **changes)


def test_the_limits_of_a_run(tmp_path: Path) -> None:
    config = parse_command_line(TrainDraftConfig, "train", ["--out", str(tmp_path), "--text", "a", "--text", "b"])
    assert config.text == ["a", "b"]
    assert config.limit_seconds == 600
    assert settings(tmp_path).limit_seconds is None
    assert settings(tmp_path, minutes=2).limit_seconds == 120


def test_runs_that_cannot_start(target: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    strange = write_tiny_checkpoint(tmp_path / "strange", seed=0)
    before, out = sorted(tmp_path.rglob("*")), tmp_path / "a" / "b"
    common = ["--model", str(target), "--text", str(text), "--max-total-tokens", "2048", "--out", str(out)]
    for flags, sentence in (
        (["--out", str(tmp_path / "file")], f"--out: {tmp_path / 'file'}: File exists"),
        (["--model", str(tmp_path / "nothing")], "nothing"),
        (["--seq", "62", "--context-length", "64"], "--seq 62: the target takes 64 tokens"),
        (["--model", str(strange)], "--model: its tokenizer has 4,096 tokens and the model 131"),
    ):
        with pytest.raises(SystemExit) as stopped:
            draft.main([*common, *flags])
        assert stopped.value.code == 2
        assert sentence in capsys.readouterr().err
        assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--text", "{}/no.txt"], "--text: there is no file or folder"),
        (["--text", "{}/" + "n" * 300], "--text: .* cannot be read: File name too long"),
        (["--text", "{}", "--pattern", "*.rs"], r"--text: .* has no file that matches --pattern '\*\.rs'"),
        (["--text", "{}", "--pattern", "*.latin"], r"--text: .*a\.latin cannot be read: it is not UTF-8"),
    ],
)
def test_text_is_checked_before_the_target_is_loaded(
    flags: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Engine, "__init__", None)
    (tmp_path / "a.latin").write_bytes(b"\xe4")
    with pytest.raises(SystemExit) as stopped:
        draft.main([*(flag.format(tmp_path) for flag in flags), "--out", str(tmp_path / "out")])
    assert stopped.value.code == 2
    assert re.search(sentence, capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["a.latin"]


def test_a_failed_start_leaves_an_older_run_as_it_was(
    finished: tuple[Path, list[list[float]], str], target: Path, text: Path
) -> None:
    before = {path: path.read_bytes() for path in finished[0].rglob("*") if path.is_file()}
    config = settings(finished[0], model=str(target), text=[str(text)], lr=1e-3, report_prompts=1)
    with pytest.raises(ConfigError, match="cannot be resumed with other settings"):
        draft.train(config, silent())
    assert {path: path.read_bytes() for path in finished[0].rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("place", "flags"),
    [
        ("specmamba.train.loop.save_file", {"max_steps": 1}),
        ("specmamba.train.head.save_file", {"max_steps": 1}),
        ("specmamba.train.windows._Written.add", {"own_outputs": 20}),
    ],
)
def test_a_full_disk(
    place: str, flags: dict[str, Any], target: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    out = tmp_path / "out"
    config = settings(out, model=str(target), text=[str(text)], **flags)
    monkeypatch.setattr(place, fail)
    with pytest.raises(ConfigError, match=f"--out: {out}: No space left on device"):
        draft.train(config, silent())


def test_the_command_that_serves_the_head(tmp_path: Path) -> None:
    head = f"--speculative-draft-model-path '{tmp_path}/my run/head'"
    for changes, rest in (
        ({}, head),
        ({"model": "x"}, f"--model x {head}"),
        ({"model": "a/b", "revision": "c d"}, f"--model a/b --revision 'c d' {head}"),
    ):
        config = settings(tmp_path / "my run", steps_deep=3, **changes)
        assert draft.serve_command(config) == f"specmamba serve {rest}"


def test_ctrl_c_while_the_target_is_read(
    target: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(windows, "read_windows", interrupt)
    flags = ["--model", str(target), "--text", str(text), "--max-total-tokens", "2048", "--out", str(tmp_path)]
    assert draft.main(flags) == 130
    assert "interrupted: the same command goes on" in capsys.readouterr().err


def test_a_loss_that_is_not_finite(target: Path, text: Path, tmp_path: Path) -> None:
    config = settings(tmp_path, model=str(target), text=[str(text)])
    left = draft.read_the_target(config, texts.read_documents(config), silent())
    left.data.windows.hidden.fill_(torch.nan)
    begun = draft.new_trainer(config, left, silent())
    before = begun.head.fc.weight.clone()
    with pytest.raises(SpecmambaError, match="the loss at step 1 is nan: train with a lower --lr"):
        begun.run(silent())
    assert torch.equal(begun.head.fc.weight, before)


def test_help_is_quick() -> None:
    code = "import sys; from specmamba.cli import main; sys.exit(main(['train', 'draft', '--help']))"
    program = f"import sys, atexit; atexit.register(lambda: print('torch' in sys.modules)); {code}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert "--draft-vocab-size" in done.stdout
    assert done.stdout.splitlines()[-1] == "False"


# ---- a target to train one for ---------------------------------------------------------------------------------------


def test_a_tiny_falcon(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = [number for number in range(2000) if corpus.is_held_out(f"m{number}.py")][:1]
    for number in [*range(12), *named]:
        (tmp_path / f"m{number}.py").write_text(written_text(number), "utf8")
    monkeypatch.setattr(corpus, "default_roots", lambda: [corpus.Root("here", tmp_path, holds_out=True)])
    out = tmp_path / "model"
    flags = ["--hidden-size", "64", "--num-layers", "2", "--seq", "32", "--batch", "2", "--max-steps", "2"]
    assert tiny_falcon.main(["--out", str(out), *flags]) == 0
    with new_llm(out) as llm:
        assert llm.engine.model.architecture == "FalconH1ForCausalLM"
        assert len(llm.generate("def main():")[0].token_ids) == 16
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        tiny_falcon.main(["--out", str(tmp_path / "file"), *flags])
