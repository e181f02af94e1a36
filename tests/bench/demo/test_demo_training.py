"""The demo's training program on a tiny model and a tiny corpus, and the files of the bundled demo."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import shutil
import signal
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import Qwen3_5ForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5

from specmamba.bench.demo import model as operators
from specmamba.bench.demo import prompts
from specmamba.bench.demo.options import Architecture, TrainSettings
from specmamba.bench.demo.talks.talk import TEMPLATE
from specmamba.bench.demo.train import evaluate_checkpoint, main, train
from specmamba.config import DEMO_MODEL
from specmamba.errors import CheckpointError, ConfigError
from specmamba.flags.command_line import read_flags
from specmamba.train import corpus

TINY = Architecture(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    max_position_embeddings=128,
)
STEPS = 24


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """A model this small gains nothing from a second thread, which on a busy machine mostly makes it wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder_of_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty generated modules, of which two have held-out names."""
    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(0)
    names = [f"module_{i}.py" for i in range(2000)]
    held_out = [name for name in names if zlib.crc32(name.encode()) % 40 == 0][:2]
    others = [name for name in names if zlib.crc32(name.encode()) % 40][:58]
    for name in held_out + others:
        lines = [f"def {draw.choice('fgh')}_{i}(x):\n    return x + {draw.randrange(9)}\n" for i in range(30)]
        (folder / name).write_text("".join(lines))
    return folder


def tiny_settings(out: Path, folder: Path, **changes: Any) -> TrainSettings:
    values: dict[str, Any] = {
        "out": out,
        "corpus": [folder],
        "max_steps": STEPS,
        "seq": 40,
        "batch": 4,
        "lr": 1e-2,
        "warmup_steps": 2,
        "dtype": "float32",
        "device": "cpu",
        "eval_windows": 4,
        "architecture": TINY,
    }
    return TrainSettings(**(values | changes))


def silent() -> Console:
    return Console(file=io.StringIO())


@pytest.fixture(scope="module")
def finished(folder_of_python: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[float]]]:
    """An uninterrupted run: its folder, and the losses of every step."""
    out = tmp_path_factory.mktemp("finished")
    losses: list[list[float]] = []
    train(tiny_settings(out, folder_of_python), silent(), lambda _, values: losses.append(values))
    return out, losses


def test_the_losses_of_target_and_head_go_down(finished: tuple[Path, list[list[float]]]) -> None:
    _, losses = finished
    assert len(losses) == STEPS
    first, last = torch.tensor(losses[0]), torch.tensor(losses[-1])
    assert first.shape == (4,)  # the target and three depths
    assert (last < first - 0.5).all(), (first, last)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("stop_after", [1, 11])
def test_an_interrupted_run_resumes_to_the_same_losses_and_weights(
    finished: tuple[Path, list[list[float]]], folder_of_python: Path, tmp_path: Path, stop_after: int
) -> None:
    whole, expected = finished
    settings = tiny_settings(tmp_path, folder_of_python)
    losses: list[list[float]] = []

    class PowerCutError(Exception):
        pass

    def stop_early(step: int, values: list[float]) -> None:
        losses.append(values)
        if step == stop_after + 2:
            raise PowerCutError  # the steps since the last save are lost

    with pytest.raises(PowerCutError):
        train(settings.model_copy(update={"save_every": stop_after}), silent(), stop_early)
    assert not (tmp_path / "checkpoint").exists()
    saved = json.loads((tmp_path / "resume/state.json").read_text())["progress"]["step"]
    del losses[saved:]
    train(settings, silent(), lambda _, values: losses.append(values))

    assert losses == expected
    ours, theirs = (load_file(out / "checkpoint/model.safetensors") for out in (tmp_path, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_signal_ends_the_run_after_its_step(folder_of_python: Path, tmp_path: Path) -> None:
    def interrupt(step: int, _: list[float]) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    trainer = train(tiny_settings(tmp_path, folder_of_python), silent(), interrupt)
    assert trainer.progress.step == 2
    assert trainer.share_done < 1.0
    assert signal.getsignal(signal.SIGINT) is before
    assert json.loads((tmp_path / "resume/state.json").read_text())["progress"]["step"] == 2


def test_the_checkpoint_loads_in_transformers(finished: tuple[Path, list[list[float]]]) -> None:
    folder = finished[0] / "checkpoint"
    _, info = Qwen3_5ForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert all(name.startswith("mtp.") for name in info["unexpected_keys"])


def test_the_checkpoint_has_the_bundled_ones_files_names_and_types(
    finished: tuple[Path, list[list[float]]],
) -> None:
    folder = finished[0] / "checkpoint"
    ours, bundled = (
        {name: tensor.dtype for name, tensor in load_file(path / "model.safetensors").items()}
        for path in (folder, DEMO_MODEL)
    )
    first_block = {
        name: dtype
        for name, dtype in bundled.items()
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < TINY.num_hidden_layers
    }
    assert ours == first_block
    assert {path.name for path in folder.iterdir()} <= {path.name for path in DEMO_MODEL.iterdir()}
    for file in ("generation_config.json", "tokenizer_config.json"):
        ours_json, bundled_json = (json.loads((path / file).read_text()) for path in (folder, DEMO_MODEL))
        assert ours_json.keys() == bundled_json.keys()
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5ForCausalLM"]
    assert config["mtp_num_hidden_layers"] == 1
    assert config["rope_parameters"]["partial_rotary_factor"] == 0.5


def test_the_report_and_an_evaluation_of_the_checkpoint_agree(
    finished: tuple[Path, list[list[float]]], folder_of_python: Path
) -> None:
    out, _ = finished
    report = json.loads((out / "training_report.json").read_text())
    assert report["tokens_seen"] == STEPS * 4 * 40
    assert len(report["held_out_files"]) == 2
    assert report["versions"]["torch"]
    assert report["start"] == "random"
    assert str(out) not in json.dumps(report)  # no path of this machine
    settings = TrainSettings(
        evaluate=out / "checkpoint", corpus=[folder_of_python], seq=40, eval_windows=4, device="cpu", extra_corpus=[]
    )
    figures = evaluate_checkpoint(settings)
    assert figures.target_loss == pytest.approx(report["held_out"]["target_loss"], rel=0.02)  # fp32 against bf16
    assert figures.mtp_loss == pytest.approx(report["held_out"]["mtp_loss"], rel=0.02)
    assert all(
        0 <= first <= four <= 1 for first, four in zip(figures.mtp_agreement, figures.mtp_agreement_top4, strict=True)
    )


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "json", "fields"])
def test_a_damaged_state_is_refused_by_name(
    finished: tuple[Path, list[list[float]]], folder_of_python: Path, tmp_path: Path, damage: str
) -> None:
    shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True)
    state = tmp_path / "resume/state.json"
    (tensors,) = (tmp_path / "resume").glob("*.safetensors")
    content = bytearray(tensors.read_bytes())
    if damage == "truncated":
        tensors.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        content[-100] ^= 1
        tensors.write_bytes(content)
    elif damage == "missing":
        tensors.unlink()
    else:
        state.write_text('{"tensors"' if damage == "json" else "{}")
    with pytest.raises(CheckpointError, match=r"resume is damaged .* delete that folder"):
        train(tiny_settings(tmp_path, folder_of_python), silent())


def test_a_run_is_not_resumed_with_other_settings_or_text(
    finished: tuple[Path, list[list[float]]], folder_of_python: Path
) -> None:
    out, _ = finished
    with pytest.raises(ConfigError, match=r"lr was 0\.01 and is 0\.02"):
        train(tiny_settings(out, folder_of_python, lr=2e-2), silent())
    with pytest.raises(ConfigError, match="corpus was"):
        train(tiny_settings(out, folder_of_python, extra_corpus=[Path(corpus.__file__).parent]), silent())


def test_held_out_files_never_train(folder_of_python: Path, tmp_path: Path) -> None:
    copied = next(path for path in folder_of_python.iterdir() if corpus.is_held_out(path.name))
    (tmp_path / "copy_under_another_name.py").write_text(copied.read_text())
    (tmp_path / "extra.py").write_text("x = 1\n" * 100)
    split = corpus.read_corpus(corpus.roots_for([folder_of_python], [tmp_path]))
    assert len(split.held_out) == 2
    assert all(corpus.is_held_out(document.name) for document in split.held_out)
    assert {document.name for document in split.train if document.root == tmp_path.name} == {"extra.py"}
    assert not {document.text for document in split.held_out} & {document.text for document in split.train}


def test_the_default_corpus_holds_out_the_published_files() -> None:
    stdlib, *packages = corpus.default_roots()
    split = corpus.read_corpus([stdlib])
    names = {document.name for document in split.held_out}
    assert {"doctest.py", "shutil.py", "sched.py", "site.py", "tomllib/_parser.py"} <= names
    assert not any(corpus.is_held_out(document.name) for document in split.train)
    assert not any(package.holds_out for package in packages)
    assert {package.name: package.keep_every for package in packages}["torch"] == 3


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 199])
def test_fast_operators_equal_transformers_values_and_gradients(num_tokens: int) -> None:
    shapes = [(2, num_tokens, 2, 16), (2, num_tokens, 2, 16), (2, num_tokens, 4, 24), (2, num_tokens, 4)]
    q, k, v, g = (torch.randn(shape, dtype=torch.float32) for shape in shapes)
    inputs = [q, k, v, -g.exp(), torch.rand(g.shape)]

    def run(function: Any, arguments: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
        leaves = [argument.clone().requires_grad_() for argument in arguments]
        out = function(*leaves, **options)
        out = out[0] if isinstance(out, tuple) else out
        out.square().sum().backward()
        return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    ours = run(operators.chunk_gated_delta_rule, inputs)
    theirs = run(modeling_qwen3_5.torch_chunk_gated_delta_rule, inputs, use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    inputs = [torch.randn(2, 12, num_tokens), torch.randn(12, 4)]
    ours = run(operators.causal_conv1d, inputs, activation="silu")
    theirs = run(modeling_qwen3_5.causal_conv1d_fn, inputs, activation="silu")
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_fast_operators_are_put_back() -> None:
    before = modeling_qwen3_5.torch_chunk_gated_delta_rule
    with operators.fast_operators():
        assert modeling_qwen3_5.torch_chunk_gated_delta_rule is operators.chunk_gated_delta_rule
    assert modeling_qwen3_5.torch_chunk_gated_delta_rule is before


def second_stage(out: Path, folder: Path, start: Path, **changes: Any) -> TrainSettings:
    own = {"continue_from": start, "chat_share": 0.5, "conversations": 30, "mtp_targets": "target", "mtp_share": 0.5}
    return tiny_settings(
        out, folder, **(own | {"max_steps": 6, "lr": 1e-3, "warmup_steps": 1, "architecture": Architecture()} | changes)
    )


def test_a_second_stage_goes_on_from_a_checkpoint_and_resumes(
    finished: tuple[Path, list[list[float]]], folder_of_python: Path, tmp_path: Path
) -> None:
    start = finished[0] / "checkpoint"
    whole: list[list[float]] = []
    train(second_stage(tmp_path / "a", folder_of_python, start), silent(), lambda _, values: whole.append(values))
    assert len(whole) == 6

    parts: list[list[float]] = []

    def interrupt(step: int, values: list[float]) -> None:
        parts.append(values)
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    settings = second_stage(tmp_path / "b", folder_of_python, start)
    train(settings, silent(), interrupt)
    assert len(parts) == 3
    train(settings, silent(), lambda _, values: parts.append(values))
    assert parts == whole
    report = json.loads((tmp_path / "b/training_report.json").read_text())
    assert report["start"] == hashlib.sha256((start / "model.safetensors").read_bytes()).hexdigest()
    ours, theirs = (load_file(tmp_path / out / "checkpoint/model.safetensors") for out in "ab")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert not json.loads((tmp_path / "a/checkpoint/config.json").read_text())["_name_or_path"]
    with pytest.raises(ConfigError, match="start was"):
        train(second_stage(tmp_path / "b", folder_of_python, tmp_path / "a/checkpoint"), silent())


def test_a_second_stage_begins_with_the_weights_of_the_first(
    finished: tuple[Path, list[list[float]]], folder_of_python: Path, tmp_path: Path
) -> None:
    """Without conversations its first loss is where the first stage ended; with them its checkpoint can chat."""
    first, losses = finished
    seen: list[list[float]] = []
    settings = second_stage(tmp_path, folder_of_python, first / "checkpoint", chat_share=0.0, mtp_targets="text")
    train(settings, silent(), lambda _, values: seen.append(values))
    assert seen[0][0] == pytest.approx(losses[-1][0], abs=0.3)
    assert losses[0][0] > seen[0][0] + 1
    assert not (tmp_path / "checkpoint/chat_template.jinja").exists()
    chats = second_stage(tmp_path / "chats", folder_of_python, first / "checkpoint", max_steps=1)
    train(chats, silent())
    folder = tmp_path / "chats/checkpoint"
    assert (folder / "chat_template.jinja").read_text() == TEMPLATE.read_text()
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [0, 2]
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == TINY.hidden_size
    kept = (first / "checkpoint/tokenizer.json").read_text()
    assert (folder / "tokenizer.json").read_text() == kept


def test_losses_count_chosen_tokens_and_rows_and_may_follow_the_target() -> None:
    torch.manual_seed(0)
    model = operators.new_model(TINY)
    tokens, learned = torch.randint(0, 300, (3, 20)), torch.rand(3, 20) < 0.5
    with operators.fast_operators():
        every = model.losses(tokens)
        assert torch.equal(torch.stack(model.losses(tokens, torch.ones_like(learned))), torch.stack(every))
        rows = torch.tensor([2, 0])
        some = model.losses(tokens, learned, head_rows=rows, follow_target=True)
        logits = [model.logits(hidden) for hidden in model.hidden_states(tokens)]
    chosen = F.cross_entropy(logits[0][:, :-1].mT, tokens[:, 1:], reduction="none")[learned[:, 1:]]
    torch.testing.assert_close(some[0], chosen.mean())
    for depth in (1, 2, 3):
        wanted = logits[0][rows, depth:-1].softmax(-1)
        losses = -(wanted * logits[depth][rows, :-1].log_softmax(-1)).sum(-1)
        torch.testing.assert_close(some[depth], losses[learned[rows, depth + 1 :]].mean())
    some[1].backward()
    gradient = model.target.lm_head.weight.grad
    assert gradient is not None
    assert gradient.abs().sum() > 0


def test_flags_of_a_second_stage_are_checked(folder_of_python: Path, tmp_path: Path) -> None:
    for flags, problem in (
        (["--tokenizer", "t.json"], "drop --tokenizer"),
        (["--architecture.hidden-size", "32"], "drop --architecture"),
        (["--chat-share", "1.5"], "--chat-share"),
        (["--mtp-share", "0"], "--mtp-share"),
        (["--mtp-targets", "guess"], "--mtp-targets"),
    ):
        with pytest.raises(ConfigError, match=problem):
            read_flags(TrainSettings, "train", ["--out", "x", "--continue-from", "y", *flags])
    with pytest.raises(CheckpointError, match="no readable checkpoint"):
        train(second_stage(tmp_path / "out", folder_of_python, tmp_path / "missing"), silent())


def test_flags_are_checked_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="--lr"):
        read_flags(TrainSettings, "train", ["--out", "x", "--lr", "-1"])
    with pytest.raises(ConfigError, match="either --out FOLDER to train or --evaluate"):
        read_flags(TrainSettings, "train", [])
    settings = read_flags(TrainSettings, "train", ["--out", "x", "--architecture.hidden-size", "32"])
    assert settings.architecture.hidden_size == 32
    assert settings.limit_seconds == 78 * 60
    with pytest.raises(SystemExit) as stopped:
        main(["--out", "x", "--corpus", "no/such/folder"])
    assert stopped.value.code == 2
    assert "no/such/folder" in capsys.readouterr().err


def test_prompts_are_cut_from_held_out_files(folder_of_python: Path, tmp_path: Path) -> None:
    out = tmp_path / "prompts.jsonl"
    flags = ["--count", "5", "--max-characters", "200", "--continuation-characters", "100", "--with-continuation"]
    assert prompts.main([*flags, "--corpus", str(folder_of_python), "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["source"] for row in rows[:4]] == ["handwritten"] * 4
    assert len({row["prompt"] for row in rows}) == 9
    for row in rows[4:]:
        assert corpus.is_held_out(row["source"])
        assert row["prompt"] + row["continuation"] in (folder_of_python / row["source"]).read_text()
        assert len(row["continuation"]) == 100


def test_the_bundled_demo_is_intact() -> None:
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    text = "def añadir(x):\n    return x + 10  # ✓\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    assert tokenizer.get_vocab_size() == config["vocab_size"] == 4096
    with safe_open(DEMO_MODEL / "model.safetensors", "pt") as file:
        names = set(file.keys())
        num_parameters = sum(file.get_tensor(name).numel() for name in names)
    assert len(names) == 123
    assert num_parameters == pytest.approx(9.3e6, rel=0.01)
    assert "Apache-2.0" in (DEMO_MODEL / "MODEL_CARD.md").read_text()


def test_the_bundled_prompts_come_from_held_out_files() -> None:
    rows = [json.loads(line) for line in (DEMO_MODEL / "prompts.jsonl").read_text().splitlines()]
    assert len(rows) == 28
    assert tuple(row["prompt"] for row in rows[:4]) == prompts.HANDWRITTEN
    trained_on = {document.name for document in corpus.read_corpus(corpus.default_roots()[:1]).train}
    for row in rows[4:]:
        assert corpus.is_held_out(row["source"])
        assert row["source"] not in trained_on
