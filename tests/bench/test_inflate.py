"""A checkpoint written by bench/inflate computes the same function as the small one: target and MTP head.

Both runtimes are compared in float32: transformers by logits, this one by greedy text with drafts, whose histograms of
accepted tokens depend on the drafts of the MTP head.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3_5ForCausalLM

from specmamba import LLM, RequestOutput, SamplingParams
from specmamba.bench.demo.checkpoint import read_checkpoint
from specmamba.bench.inflate.__main__ import InflateConfig, inflate, main
from specmamba.bench.inflate.shape import PUBLISHED, Scales, Shape, copies_needed, enlarged, enlarged_config
from specmamba.bench.inflate.weights import NOISE, grouped
from specmamba.config import DEMO_MODEL
from specmamba.errors import CheckpointError, ConfigError
from tests import blocks
from tests.blocks import BlockFiles, BlockReference, save_block_head, write_block_head
from tests.tiny import FULL, LINEAR, tiny_config, write_tiny_checkpoint

# Rounding the tiny models' weights once more (6e-8) moves their logits by 3e-6.
TOLERANCE = 1e-5  # of logits, relative to the largest
NEW_TOKENS = 32
FLOAT32 = ("A_log", "k_norm.weight", "linear_attn.norm.weight")  # rescaled norms, where head widths grow
OUTPUTS = ("o_proj.weight", "out_proj.weight", "down_proj.weight")

# One kind of growth at a time, then all of them. Sizes of the tiny model: see DEFAULTS in tests/tiny.py.
TINY: dict[str, dict[str, Any]] = {
    "hidden": {"hidden_factor": 4},
    "hidden by an odd factor": {"hidden_factor": 3},
    "layers": {"layers": 7},
    "mlp": {"mlp": 75},
    "heads": {"heads": 8},
    "kv-heads": {"kv_heads": 6, "heads": 12},
    "kv-heads that split their groups": {"kv_heads": 5, "heads": 10},
    "gdn-heads": {"gdn_key_heads": 3, "gdn_value_heads": 15},
    "gdn-heads without groups": {"gdn_key_heads": 7, "gdn_value_heads": 7},
    "head-dim": {"head_dim": 22},
    "gdn-dims": {"gdn_key_dim": 13, "gdn_value_dim": 17},
    "all": {
        "hidden_factor": 3, "layers": 8, "mlp": 70, "heads": 16, "kv_heads": 4, "head_dim": 20,
        "gdn_key_heads": 5, "gdn_value_heads": 10, "gdn_key_dim": 16, "gdn_value_dim": 16,
    },
}  # fmt: skip
SOURCES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "tied": {"tie_word_embeddings": True, "hidden_size": 42, "layer_types": [LINEAR, FULL, LINEAR]},
}
DEMO: dict[str, dict[str, Any]] = {
    "heads, neurons, layers": {"heads": 6, "mlp": 1000, "layers": 12, "gdn_key_heads": 6, "gdn_value_heads": 6},
    "hidden": {"hidden_factor": 4},
    # the factors of --like qwen3.5-0.8b: here nothing is rounded, not even in the MTP head
    "all": {
        "hidden_factor": 4, "layers": 9, "mlp": 800, "heads": 6, "head_dim": 256,
        "gdn_key_heads": 5, "gdn_value_heads": 10, "gdn_key_dim": 128, "gdn_value_dim": 128,
    },
}  # fmt: skip
CASES = [(source, case) for source in SOURCES for case in TINY] + [("demo", case) for case in DEMO]


@dataclass
class Behaviour:
    """Outputs of a checkpoint."""

    logits: Tensor  # [T, V], of a fixed text
    draft_logits: list[Tensor]  # [T, V], of the MTP head at each depth
    outputs: list[RequestOutput]  # greedy, with drafts


@torch.no_grad()
def behaviour(folder: Path) -> Behaviour:
    model = read_checkpoint(folder)
    vocab_size = model.target.config.vocab_size
    text = torch.randint(1, vocab_size, (1, 40), generator=torch.Generator().manual_seed(0))
    logits, *draft_logits = (model.target.lm_head(hidden)[0] for hidden in model.hidden_states(text))
    prompts = [text[0, i : i + length].tolist() for i, length in ((0, 9), (9, 1), (10, 23))]
    flags: dict[str, Any] = {"max_total_tokens": 256, "max_running_requests": 3, "context_length": 80}
    with LLM(model=str(folder), dtype="float32", device="cpu", speculative_algorithm="mtp", **flags) as llm:
        params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
        return Behaviour(logits, draft_logits, llm.generate(prompts, params))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("small")
    tiny = {
        name: write_tiny_checkpoint(root / name, seed, **settings)
        for seed, (name, settings) in enumerate(SOURCES.items())
    }
    return {"demo": DEMO_MODEL, **tiny}


@pytest.fixture(scope="module")
def small(sources: dict[str, Path]) -> dict[str, Behaviour]:
    return {name: behaviour(folder) for name, folder in sources.items()}


def relative_difference(got: Tensor, expected: Tensor) -> float:
    assert got.shape == expected.shape
    return float((got - expected).abs().max() / expected.abs().max())


@pytest.mark.fast_cases(5)
@pytest.mark.parametrize(("source", "case"), CASES)
def test_same_function(
    source: str, case: str, sources: dict[str, Path], small: dict[str, Behaviour], tmp_path: Path
) -> None:
    sizes = DEMO[case] if source == "demo" else TINY[case]
    inflate(InflateConfig(out=tmp_path / "large", model=sources[source], **sizes))
    large = behaviour(tmp_path / "large")
    assert relative_difference(large.logits, small[source].logits) < TOLERANCE
    for got, expected in zip(large.draft_logits, small[source].draft_logits, strict=True):
        assert relative_difference(got, expected) < 10 * TOLERANCE
    assert [x.token_ids for x in large.outputs] == [x.token_ids for x in small[source].outputs]
    assert [x.spec for x in large.outputs] == [x.spec for x in small[source].outputs]
    check_zeros(sources[source], tmp_path / "large")


def check_zeros(small: Path, large: Path) -> None:
    """Only the weights that bench/inflate/weights.py names are zero, so no traffic can be skipped."""
    config = json.loads((small / "config.json").read_text())
    width, num_layers = config["hidden_size"], config["num_hidden_layers"]
    for name, tensor in load_file(large / "model.safetensors").items():
        is_new = name.startswith("model.layers.") and int(name.split(".")[2]) >= num_layers
        if is_new and name.endswith(OUTPUTS):
            assert not tensor.any(), name
            continue
        assert tensor.any(), name
        if tensor.ndim != 2:
            continue
        zero_rows, zero_columns = ~tensor.any(1), ~tensor.any(0)
        if name.endswith((*OUTPUTS, "fc.weight")):
            assert not zero_rows[:width].any(), name
        elif name == "model.embed_tokens.weight":
            assert zero_columns[width:].all(), name
            assert not zero_rows.any(), name
        else:
            assert not zero_columns.any(), name
            widened_alone = name.endswith(("q_proj.weight", "k_proj.weight", "in_proj_qkv.weight"))
            assert not zero_rows.any() or (widened_alone and tensor.shape[1] == width), name


# ---- what is stored --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_bf16_checkpoint_is_not_rounded(tmp_path: Path) -> None:
    sizes = DEMO["all"] | {"layers": 8}
    inflate(InflateConfig(out=tmp_path, **sizes))
    small, large = load_file(DEMO_MODEL / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert small.keys() == large.keys()
    for name, tensor in large.items():
        is_float32 = name in ("model.norm.weight", "mtp.norm.weight") or name.endswith(FLOAT32)
        assert tensor.dtype == (torch.float32 if is_float32 else torch.bfloat16), name
    for name, scale in (("mtp.fc", 0.5), ("model.layers.0.mlp.up_proj", 0.5), ("model.layers.3.mlp.down_proj", 1.0)):
        before, after = small[f"{name}.weight"][:256, :256], large[f"{name}.weight"][:256, :256]
        assert torch.equal(after, before * scale), name
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["dtype"], config["rms_norm_eps"], config["num_hidden_layers"]) == ("bfloat16", 2.5e-7, 8)
    assert config["rope_parameters"]["partial_rotary_factor"] * config["head_dim"] == 32
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        assert (tmp_path / name).read_bytes() == (DEMO_MODEL / name).read_bytes()


@pytest.mark.slow
def test_shards_hold_what_one_file_holds(sources: dict[str, Path], tmp_path: Path) -> None:
    flags: dict[str, Any] = {"model": sources["grouped"], "layers": 100, "hidden_factor": 4, "mlp": 200}
    report = inflate(InflateConfig(out=tmp_path / "one", **flags))
    inflate(InflateConfig(out=tmp_path / "many", max_shard_mb=20, **flags))
    one = load_file(tmp_path / "one" / "model.safetensors")
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    shards = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(shards) > 1
    assert all(shard.stat().st_size < 20.1e6 for shard in shards)
    many = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    assert index["weight_map"].keys() == one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one), "the same seed gave other weights"
    assert report["bytes"][1] == index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in one.values())
    model, loading = Qwen3_5ForCausalLM.from_pretrained(tmp_path / "many", output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["mismatched_keys"]
    num_parameters = sum(p.numel() for p in model.parameters())
    assert report["parameters, target"][1] == num_parameters
    inflate(InflateConfig(out=tmp_path / "again", model=tmp_path / "many", mlp=201))  # reads shards, too


def test_random_weights_follow_the_seed(sources: dict[str, Path], tmp_path: Path) -> None:
    tensors = []
    for seed in (0, 1):
        inflate(InflateConfig(out=tmp_path / str(seed), model=sources["grouped"], mlp=60, seed=seed))
        tensors.append(load_file(tmp_path / str(seed) / "model.safetensors")["model.layers.0.mlp.up_proj.weight"])
    assert torch.equal(tensors[0][:52], tensors[1][:52])
    assert not torch.equal(tensors[0][52:], tensors[1][52:])


# ---- sizes -----------------------------------------------------------------------------------------------------------


def demo_shape() -> Shape:
    return Shape.of(Qwen3_5ForCausalLM.config_class.from_pretrained(DEMO_MODEL))


def test_the_published_shape_from_the_demo() -> None:
    source = demo_shape()
    target = enlarged(source, PUBLISHED["qwen3.5-0.8b"])
    assert target.sizes() == dict(PUBLISHED["qwen3.5-0.8b"])
    assert target.layer_types == (LINEAR, LINEAR, LINEAR, FULL) * 6
    scales = Scales.between(source, target, tied=True)
    assert asdict(scales) == pytest.approx(
        {"eps": 0.25, "write": 1, "read": 0.5, "query_key": 1, "key_norm": 0.5, "delta_norm": 0.5**0.5}
        | {"last_norm": 0.5, "head": 1}
    )
    scales.check_exact()


GROUPS = [
    (old, new)
    for old in ((1, 1), (2, 2), (2, 6), (3, 12))
    for new in ((2, 2), (4, 8), (6, 6), (7, 21), (12, 12), (5, 40))
    if old[0] * copies_needed(old[1] // old[0], new[1] // new[0]) <= new[0]  # else refused
]


@pytest.mark.parametrize(("old", "new"), GROUPS)
def test_heads_stay_with_their_groups(old: tuple[int, int], new: tuple[int, int]) -> None:
    (groups, members), (new_groups, new_members) = old, new
    group_source, member_source = grouped(groups, members, new_groups, new_members)
    assert (len(group_source), len(member_source)) == (new_groups, new_members)
    assert sorted(m for m in member_source.tolist() if m != NOISE) == list(range(members))
    for place, member in enumerate(member_source.tolist()):
        if member != NOISE:
            assert group_source[place // (new_members // new_groups)] == member // (members // groups)


@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [
        ({}, "give --like, or a size that is larger"),
        ({"layers": 8}, "give --like, or a size that is larger"),
        ({"mlp": 700}, "--mlp asks for intermediate_size 700, but the checkpoint has 768"),
        ({"layers": 4}, "--layers asks for num_hidden_layers 4"),
        ({"kv_heads": 1}, "--kv-heads asks for num_key_value_heads 1"),
        ({"heads": 5}, "--heads 5 is not a multiple of --kv-heads 2: with 2, these work: 4, 6, 8"),
        ({"kv_heads": 4, "heads": 6}, "with 4, these work: 4, 8, 12"),
        ({"gdn_key_heads": 6}, "--gdn-value-heads 4 is not a multiple of --gdn-key-heads 6: with 6, these work: 6, 12"),
        ({"hidden_factor": 2}, "--dtype float32"),
        ({"gdn_key_dim": 128}, "--dtype float32"),
        ({"hidden_factor": 4, "head_dim": 128}, "powers of 4"),
    ],
)
def test_refused_sizes(sizes: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=complaint):
        inflate(InflateConfig(out=tmp_path / "large", **sizes))
    assert not (tmp_path / "large").exists()


def test_groups_that_cannot_be_kept_are_refused() -> None:
    source = Shape.of(tiny_config())  # two groups of three, which would fill four groups of two
    with pytest.raises(ConfigError, match=r"--kv-heads 3 works with --heads 9, 12, 15"):
        enlarged(source, {"num_key_value_heads": 3, "num_attention_heads": 6})
    assert enlarged(source, {"num_key_value_heads": 4, "num_attention_heads": 8}).num_attention_heads == 8


@pytest.mark.parametrize("width", [13, 49, 61, 98, 103])
def test_rotated_components_survive_any_width(width: int) -> None:
    config = tiny_config()
    source = Shape.of(config)
    target = enlarged(source, {"head_dim": width})
    scales = Scales.between(source, target, tied=False)
    rope = enlarged_config({}, config, source, target, scales, "float32")["rope_parameters"]
    assert int(width * rope["partial_rotary_factor"]) == 6


# ---- files and the command line --------------------------------------------------------------------------------------


def test_a_folder_that_is_not_empty_is_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    model = sources["grouped"]
    (tmp_path / "model-00001-of-00002.safetensors").write_text("old")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="--force"):
        inflate(InflateConfig(out=tmp_path, model=model, mlp=60))
    inflate(InflateConfig(out=tmp_path, model=model, mlp=60, force=True))
    assert [file.name for file in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(ConfigError, match="is the small checkpoint itself"):
        inflate(InflateConfig(out=model, model=model, mlp=60, force=True))
    with pytest.raises(ConfigError, match="is a file"):
        inflate(InflateConfig(out=tmp_path / "notes.txt", model=model, mlp=60))


def test_a_folder_without_a_checkpoint_is_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="takes a local folder"):
        inflate(InflateConfig(out=tmp_path / "large", model=Path("nowhere/nothing"), mlp=60))
    broken = write_tiny_checkpoint(tmp_path / "broken", 0)
    tensors = load_file(broken / "model.safetensors")
    save_file({**tensors, "model.layers.0.mlp.gate_proj.bias": torch.ones(52)}, broken / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model.layers.0.mlp.gate_proj.bias"):
        inflate(InflateConfig(out=tmp_path / "large", model=broken, mlp=60))
    assert not (tmp_path / "large" / "config.json").exists()
    config = json.loads((broken / "config.json").read_text()) | {"architectures": ["Qwen3ForCausalLM"]}
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="Qwen3_5ForCausalLM only"):
        inflate(InflateConfig(out=tmp_path / "other", model=broken, mlp=60))


def test_the_command_line(sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--out", str(tmp_path / "large"), "--model", str(sources["grouped"]), "--mlp", "60"]
    assert main(arguments) == 0
    table = capsys.readouterr().out
    assert "intermediate_size" in table
    assert f"{sum(t.nbytes for t in load_file(tmp_path / 'large' / 'model.safetensors').values()):,}" in table
    with pytest.raises(SystemExit) as exit_status:
        main(arguments)
    assert exit_status.value.code == 2
    assert "is not empty" in capsys.readouterr().err


@pytest.mark.parametrize(("tied", "links"), [(True, "vanilla"), (False, "")])
def test_a_wide_head_drafts_the_same(tied: bool, links: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the formulas of heads, on the features, embedding and output matrix of either target."""
    small, large = tmp_path / "small", tmp_path / "large"
    write_tiny_checkpoint(small, seed=2, tie_word_embeddings=tied)
    head = write_block_head(tmp_path / "head", small, seed=3, variant="dspark" if links else "dflash")
    kept = {name: tensor for name, tensor in head.tensors.items() if "confidence" not in name}
    head = replace(head, tensors=kept)
    save_block_head(head)
    sizes: dict[str, Any] = {"hidden_factor": 4, "layers": 7, "gdn_key_dim": 20, "gdn_value_dim": 28}
    wide = tmp_path / "wide"
    asked = InflateConfig(out=large, model=small, head=head.folder, head_out=wide, **sizes)
    inflate(asked)
    config = json.loads((wide / "config.json").read_text())
    assert (config["hidden_size"], config["num_attention_heads"]) == (4 * 36, 4 * blocks.HEADS[0])
    features = torch.randn(9, 2, 36, generator=torch.Generator().manual_seed(4))
    of_small = BlockReference(head, *matrices_of(small))(features.flatten(1), 7, 4)
    shape = Shape.of(tiny_config(tie_word_embeddings=tied))
    scales = Scales.between(shape, enlarged(shape, asked.sizes(36)), tied)
    assert scales.eps == 0.25
    assert config["rms_norm_eps"] == blocks.EPS * scales.eps
    monkeypatch.setattr(blocks, "EPS", config["rms_norm_eps"])
    monkeypatch.setattr(blocks, "HEADS", (4 * blocks.HEADS[0], 4 * blocks.HEADS[1]))
    written = BlockFiles(wide, config, load_file(wide / "model.safetensors"), head.variant)
    widened = torch.nn.functional.pad(features * scales.write, (0, 108)).flatten(1)
    of_large = BlockReference(written, *matrices_of(large))(widened, 7, 4)
    assert relative_difference(of_large, of_small) < TOLERANCE
    rank = kept.get("markov_head.markov_w1.weight")
    assert rank is None or torch.equal(rank, written.tensors["markov_head.markov_w1.weight"])
    for name, tensor in written.tensors.items():
        assert tensor.any(-1).float().mean() >= (0.25 if name.endswith((*OUTPUTS, "fc.weight")) else 1), name


def matrices_of(folder: Path) -> tuple[Tensor, Tensor]:
    """Embedding and output matrix [V, H] of a checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    return embedding, tensors.get("lm_head.weight", embedding)


def test_heads_that_cannot_grow_are_refused(tmp_path: Path) -> None:
    small = write_tiny_checkpoint(tmp_path / "small", seed=2)
    with pytest.raises(ValueError, match="go together"):
        InflateConfig(out=tmp_path / "large", model=small, head=tmp_path)
    asked: dict[str, Any] = {"model": small, "out": tmp_path / "large", "head_out": tmp_path / "wide", "mlp": 70}
    head = write_block_head(tmp_path / "head", small, seed=3, variant="dflash2")
    with pytest.raises(CheckpointError, match="DFlashDraftModel and Qwen3DSparkModel can grow"):
        inflate(InflateConfig(head=head.folder, **asked))
    head = write_block_head(tmp_path / "other", DEMO_MODEL, seed=3)
    with pytest.raises(CheckpointError, match="drafts for a hidden size of 256, not 36"):
        inflate(InflateConfig(head=head.folder, **asked))
    assert not (tmp_path / "wide").exists()
    assert not (tmp_path / "large").exists()
