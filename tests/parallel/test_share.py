"""How matrices are divided among ranks, by itself: indices, codes, refusals, and published models by their shapes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specmamba.cache.shapes import KVShape, StateShape
from specmamba.errors import ConfigError
from specmamba.kernels.linear import QuantizedMatrix
from specmamba.models.base import LoadedModel, LoadOptions
from specmamba.models.rank_shapes import own_kv, own_state
from specmamba.models.registry import ARCHITECTURES, DIVIDED, load_model
from specmamba.parallel.ranks import Ranks
from specmamba.parallel.share import Segment, Share
from tests.models.published.test_published_configs import MODELS, load_shapes

QUERIES, KEYS = Segment("query heads", 4, 3), Segment("key heads", 2, 3, "repeated")
QKV = QUERIES, KEYS, KEYS
INNER = Segment("channels", 7, 1, "uneven")


def of_all(segments: tuple[Segment, ...], size: int) -> list[list[int]]:
    return [Share(rank, size).index(segments).tolist() for rank in range(size)]


def test_segments_are_cut_by_themselves() -> None:
    """A rank has whole heads of queries, keys and values, not a half of the rows."""
    assert of_all(QKV, 2) == [[*range(6), 12, 13, 14, 18, 19, 20], [*range(6, 12), 15, 16, 17, 21, 22, 23]]


def test_more_ranks_than_key_heads_repeat_them() -> None:
    parts = of_all(QKV, 4)
    assert [part[3:6] for part in parts] == [[12, 13, 14]] * 2 + [[15, 16, 17]] * 2  # of 4 query heads 2 share one
    assert [part[:3] for part in parts] == [list(range(3 * i, 3 * i + 3)) for i in range(4)]
    assert Share(3, 4).copies(KEYS) == 2


def test_channels_may_be_uneven() -> None:
    assert of_all((INNER,), 3) == [[0, 1], [2, 3], [4, 5, 6]]
    assert Share(1, 3).widths(INNER) == (2, 2, 3)


def test_one_rank_has_the_tensor_itself() -> None:
    x = torch.zeros(24, 5)
    assert Share().cut(x, QKV) is x


@pytest.mark.parametrize(
    ("segment", "size", "message"),
    [
        (
            QUERIES,
            3,
            "--tp-size 3: the model has 4 query heads, which .* 3 ranks: choose a number that divides 4$",
        ),
        (Segment("key heads", 3, 1, "repeated"), 2, "3 key heads.*choose a number that divides 3, or a multiple"),
        (Segment("Mamba2 groups", 2, 1, "repeated"), 3, "2 Mamba2 groups"),
        (INNER, 8, "7 channels.*choose 7 at the most"),
    ],
)
def test_what_cannot_be_divided_is_named(segment: Segment, size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Share(0, size).index([segment])


def coded(rows: int, width: int, group: int) -> QuantizedMatrix:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-8, 8, (2, rows, width), generator=generator, dtype=torch.int8)
    scale = torch.rand(2, rows, -(-width // group), generator=generator)
    return QuantizedMatrix(codes, scale, group, minimum=torch.rand_like(scale), bits=4)


def dense(matrix: object) -> Tensor:
    assert isinstance(matrix, QuantizedMatrix)
    return matrix.dequantize(torch.float32)


@pytest.mark.parametrize("group", [4, 16])
def test_codes_are_cut_as_their_weights(group: int) -> None:
    """Rows and columns; a group of 16 is a whole row."""
    matrix, share = coded(6, 16, group), Share(1, 2)
    whole, rows, columns = dense(matrix), Segment("heads", 2, 3), Segment("heads", 4, 4)
    assert torch.equal(dense(share.cut(matrix, [rows], dim=1)), share.cut_tensor(whole, [rows], dim=1))
    assert torch.equal(dense(share.cut(matrix, [columns], dim=-1)), share.cut_tensor(whole, [columns], dim=-1))


def test_groups_that_do_not_end_where_parts_do_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"a scale for every 16 inputs.*choose fewer ranks, or --quantization none"):
        Share(0, 2).cut(coded(6, 48, 16), [Segment("channels", 48, 1, "uneven")], dim=-1)


UNDIVIDED = {
    ("Falcon-H1-34B", 8): "20 query heads",
    ("Granite-4.0-h-tiny", 8): "12 query heads",
    ("Olmo-Hybrid-7B", 4): "30 linear key heads",
    ("Olmo-Hybrid-7B", 8): "30 linear key heads",
}


@pytest.mark.fast_cases("Nemotron-3-Nano", "Olmo", "LFM2-8B", "Kimi", "Jamba")
@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("name", MODELS)
def test_published_models_are_divided(name: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads and groups of KV and states, and bytes: a rank has its part, and what all ranks have (embedding, norms)."""
    published = MODELS[name]
    if (name, size) in UNDIVIDED:
        with pytest.raises(ConfigError, match=f"--tp-size {size}: the model has {UNDIVIDED[name, size]}"):
            load_shapes(published, tmp_path, monkeypatch, Ranks(0, size))
        return
    whole = load_shapes(published, tmp_path, monkeypatch)
    part, share = load_shapes(published, tmp_path, monkeypatch, Ranks(size - 1, size)), Share(size - 1, size)
    assert part.cache_shape.kv == tuple(own_kv(kv, share) for kv in published.kv)
    assert part.cache_shape.state == own_state(published.state, share)
    check_sizes(whole, part, size)


def check_sizes(whole: LoadedModel, part: LoadedModel, size: int) -> None:
    embedding = 2 * whole.target.vocab_size * whole.target.hidden_size
    assert part.num_parameters == whole.num_parameters
    assert whole.weight_bytes / size <= part.weight_bytes <= 1.15 * whole.weight_bytes / size + embedding


def test_all_families_are_divided() -> None:
    assert {family.load for family in ARCHITECTURES.values()} == DIVIDED


@pytest.mark.slow
def test_ling_is_divided(tmp_path: Path) -> None:
    """Ling-3, whose sizes are those that transformers has where a config names none."""
    named = {"architectures": ["BailingHybridForCausalLM"], "model_type": "bailing_hybrid", "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(named), "utf8")
    loaded = {
        size: load_model(
            tmp_path,
            LoadOptions(torch.bfloat16, torch.device("meta"), want_draft_head=True, ranks=Ranks(size - 1, size)),
        )
        for size in (1, 2, 4, 8)
    }
    for size in (2, 4, 8):
        assert loaded[size].cache_shape.kv == (KVShape(8, 1, 576, 512),)  # the last one is the MTP head's
        state = StateShape(32 // size, 32 // size, 128, 128, 4, decays_by_channel=True)
        assert loaded[size].cache_shape.state == state
        check_sizes(loaded[1], loaded[size], size)


def test_heads_of_a_state() -> None:
    """Fewer groups than ranks are repeated, value heads are not; channels of a window or of a scan are divided."""
    shape = StateShape(2, 16, 128, 64, 4)
    assert own_state(shape, Share(3, 8)) == StateShape(1, 2, 128, 64, 4)
    assert own_state(StateShape.window(64, 3), Share(0, 4)).conv_channels == 16
    assert own_state(StateShape.selective(64, 10, 4), Share(1, 4)) == StateShape.selective(16, 10, 4)


def test_heads_without_groups_are_not_repeated() -> None:
    """As many key heads as value heads: no more ranks than these are proposed."""
    with pytest.raises(ConfigError, match=r"choose a number that divides 3$"):
        own_state(StateShape(3, 3, 12, 12, 4, decays_by_channel=True), Share(0, 6))


def test_channels_of_a_scan_that_cannot_be_divided() -> None:
    with pytest.raises(ConfigError, match="--tp-size 4: the model has 90 Mamba1 channels, which cannot be divided"):
        own_state(StateShape.selective(90, 10, 4), Share(0, 4))


def test_latents_are_on_all_ranks() -> None:
    shape = KVShape(7, 1, 576, 512)
    assert own_kv(shape, Share(5, 8)) == shape
