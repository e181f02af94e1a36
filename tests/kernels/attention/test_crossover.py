"""Long runs of a prefill over gathered keys: their results, and the choice by times, which a fake clock gives here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specmamba import LLM
from specmamba.cache.access import prefill_chunk
from specmamba.engine.loading import _attention_layers
from specmamba.engine.model_report import crossover_lines
from specmamba.kernels import gpu
from specmamba.kernels.gpu import switch
from specmamba.kernels.paged_attention import AttentionConfig, LayerKV, crossover, reference, torch_ops
from specmamba.kernels.paged_attention.crossover import Heads, Seconds
from tests.kernels.rounding import tolerance
from tests.kernels.test_attention_keys import make_keys, plain_mask
from tests.tiny import FULL, LINEAR, write_tiny_checkpoint

CPU = torch.device("cpu")
FP32, BF16 = torch.float32, torch.bfloat16
HEADS = Heads(4, 2, 16, True, BF16, CPU)
MS = 1e-3


class Run:
    """Queries behind contexts of these lengths, of which each row has so many; further ones are padding."""

    def __init__(self, contexts: list[int], counts: list[int], first: int = 0, dtype: torch.dtype = FP32) -> None:
        random, (query_heads, key_heads, dim) = torch.Generator().manual_seed(len(contexts)), HEADS[:3]
        keys = make_keys(contexts, max(counts), first=first, slack=0)
        spans = tuple((begin, begin + count) for begin, count in zip(contexts, counts, strict=True))
        self.metadata = replace(keys, spans=spans)
        pools = torch.randn(2, int(keys.table.max()) + 1, key_heads, dim, generator=random).to(dtype)
        self.kv = LayerKV(*pools, keys.rows[:0])
        self.q = torch.randn(*keys.last.shape, query_heads, dim, generator=random).to(dtype)
        self.gate = torch.randn(*keys.last.shape, query_heads * dim, generator=random).to(dtype)

    def right(self, gate: Tensor | None) -> Tensor:
        """In float64; 0 for padding."""
        keys, pools = self.metadata, (self.kv.k_pool.double(), self.kv.v_pool.double())
        slots = keys.table[keys.rows, : keys.num_keys]
        out = reference.attend(self.q.double(), *pools, slots, plain_mask(keys), 0.3)
        assert keys.spans is not None
        for row, (begin, end) in enumerate(keys.spans):
            out[row, end - begin :] = 0
        return out if gate is None else out * gate.double().sigmoid().view(out.shape)

    def is_gathered(self, has_gate: bool = True) -> bool:
        return crossover.is_gathered(self.q, self.kv, self.metadata, has_gate)


@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize("has_gate", [False, True])
@pytest.mark.parametrize(
    ("contexts", "counts", "first"),
    [([0], [9], 0), ([7], [9], 0), ([1], [9], 1), ([6, 0, 30], [9, 2, 5], 0), ([6, 2], [1, 1], 2)],
)
def test_runs_see_their_rows_up_to_themselves(
    contexts: list[int],
    counts: list[int],
    first: int,
    has_gate: bool,
    at_once: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So many key heads at once as memory is given for."""
    run = Run(contexts, counts, first)
    longest = max(begin + count for begin, count in zip(contexts, counts, strict=True)) - first
    monkeypatch.setattr(torch_ops, "GATHERED_BYTES", at_once * torch_ops.gathered_bytes(run.kv, longest))
    gathered: list[int] = []
    select = Tensor.index_select

    def noted(pool: Tensor, dim: int, slots: Tensor) -> Tensor:
        gathered.append(pool.shape[1])
        return select(pool, dim, slots)

    monkeypatch.setattr(Tensor, "index_select", noted)
    gate = run.gate if has_gate else None
    out = torch_ops.attend_spans(run.q, run.kv, run.metadata, 0.3, gate)
    assert min(gathered) == at_once
    torch.testing.assert_close(out.double(), run.right(gate), **tolerance())


def test_keys_behind_a_row_do_not_show() -> None:
    """Slots that no query of a row sees may hold anything."""
    run = Run([6, 20], [9, 3])
    want, keys = torch_ops.attend_spans(run.q, run.kv, run.metadata, 0.3, None), run.metadata
    is_seen = torch.zeros(len(run.kv.k_pool), dtype=torch.bool)
    for row, end in zip(keys.rows.tolist(), (15, 23), strict=True):
        is_seen[keys.table[row, :end]] = True
    run.kv.k_pool[~is_seen], run.kv.v_pool[~is_seen] = torch.nan, torch.nan
    assert torch.equal(torch_ops.attend_spans(run.q, run.kv, keys, 0.3, None), want)


@pytest.mark.parametrize(
    ("times", "least"),
    [
        ([], None),
        ([(512, 1.0, 2.0), (1024, 2.0, 2.0)], None),
        ([(512, 1.0, 2.0), (1024, 2.0, 1.0), (2048, 4.0, 3.0)], 1024),
        ([(512, 2.0, 1.0), (1024, 2.0, 3.0), (2048, 4.0, 3.0)], 2048),
        ([(512, 2.0, 1.0), (1024, 2.0, 1.0), (2048, 4.0, 4.1)], None),
        ([(512, 1.0, 0.96), (1024, 1.0, 0.94)], 1024),
    ],
)
def test_the_least_size_from_which_on_gathering_is_faster(
    times: list[tuple[int, float, float]], least: int | None
) -> None:
    assert crossover.least_faster([Seconds(*size) for size in times]) == least


def forms_and_clock(
    seconds: Callable[[str, int, int], float],
) -> tuple[crossover.Form, crossover.Form, crossover.Timer, list[tuple[str, int]]]:
    """Forms that note name and queries alone, and a clock that gives them seconds by name, queries and round."""
    calls: list[tuple[str, int]] = []

    def form(name: str) -> crossover.Form:
        def call(q: Tensor, *_: object) -> Tensor:
            calls.append((name, q.shape[1]))
            return q

        return call

    def clock(call: Callable[[], object]) -> float:
        call()
        return seconds(*calls[-1], calls.count(calls[-1]) - 1)

    return form("kernel"), form("gathered"), clock, calls


def test_forms_take_turns_and_medians_count() -> None:
    """What is called for the first time takes long, and one round is disturbed."""

    def seconds(name: str, queries: int, place: int) -> float:
        slow = 5.0 if place in (0, 3) else 0.0
        return slow + (0.001 if name == "kernel" else 0.002) * queries / 1024

    *forms, clock, calls = forms_and_clock(seconds)
    found = crossover.timed(HEADS, 1024, *forms, clock)
    assert found == [(512, MS / 2, MS), (1024, MS, 2 * MS)]
    assert calls[:4] == [("kernel", 512), ("gathered", 512)] * 2


def test_sizes_end_where_a_call_takes_long_or_is_larger_than_any() -> None:
    *forms, clock, _ = forms_and_clock(lambda name, queries, _: (6 * MS if name == "kernel" else MS) * queries / 1024)
    assert [size.num_queries for size in crossover.timed(HEADS, 8192, *forms, clock)] == [512, 1024, 2048]
    assert [size.num_queries for size in crossover.timed(HEADS, 1500, *forms, clock)] == [512, 1024]
    assert crossover.timed(HEADS, 300, *forms, clock) == []


def upper_left(q: Tensor, kv: LayerKV, metadata: Any, scale: float, gate: Tensor | None) -> Tensor:
    """Query i sees keys 0 to i, whatever lies in front of the run."""
    count = q.shape[1]
    own = replace(metadata, last=torch.arange(count)[None], spans=((0, count),))
    return torch_ops.attend_spans(q, kv, own, scale, gate)


def one_key_less(q: Tensor, kv: LayerKV, metadata: Any, scale: float, gate: Tensor | None) -> Tensor:
    """A query does not see itself."""
    ((begin, end),) = metadata.spans
    own = replace(metadata, last=metadata.last - 1, spans=((begin - 1, end - 1),))
    return torch_ops.attend_spans(q, kv, own, scale, gate)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_forms_that_see_other_keys_do_not_agree(dtype: torch.dtype) -> None:
    heads = HEADS._replace(dtype=dtype)
    exact = heads._replace(dtype=FP32)
    assert crossover.agree(heads, torch_ops.attend_spans, torch_ops.attend_spans)
    assert crossover.agree(exact, torch_ops.attend_spans, in_bfloat16)
    assert not crossover.agree(heads, torch_ops.attend_spans, upper_left)
    assert not crossover.agree(heads, torch_ops.attend_spans, one_key_less)


def in_bfloat16(q: Tensor, kv: LayerKV, metadata: Any, scale: float, gate: Tensor | None) -> Tensor:
    pools = LayerKV(kv.k_pool.bfloat16(), kv.v_pool.bfloat16(), kv.write_slots)
    return torch_ops.attend_spans(q.bfloat16(), pools, metadata, scale, None if gate is None else gate.bfloat16())


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> dict[Heads, int | None]:
    """What was measured, as ``is_gathered`` knows it: nothing yet."""
    found: dict[Heads, int | None] = {}
    monkeypatch.setattr(crossover, "_least", found)
    monkeypatch.setattr(crossover, "_most", {})
    return found


def test_which_calls_gather(known: dict[Heads, int | None], monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run([40], [80], dtype=BF16)
    assert not run.is_gathered()
    known[HEADS] = None
    assert not run.is_gathered()
    known[HEADS] = 80
    assert run.is_gathered()
    assert not run.is_gathered(has_gate=False)
    assert not Run([40], [79], dtype=BF16).is_gathered()
    assert not Run([40], [80]).is_gathered()  # in float32
    run.metadata = replace(run.metadata, spans=None)
    assert not run.is_gathered()
    assert Run([40, 3], [110, 50], dtype=BF16).is_gathered()
    assert not Run([40, 3], [110, 49], dtype=BF16).is_gathered()
    assert Run([1], [80], first=1, dtype=BF16).is_gathered()
    assert not Run([0], [80], first=1, dtype=BF16).is_gathered()  # its first query sees what is in front of all keys
    known[HEADS] = 1
    assert not Run([9], [64], dtype=BF16).is_gathered()  # keys of so few queries are split
    codes = Run([40], [80], dtype=BF16)
    codes.kv = codes.kv._replace(k_scales=torch.ones(1), v_scales=torch.ones(1))
    assert not codes.is_gathered()
    run = Run([40], [80], dtype=BF16)
    monkeypatch.setattr(torch_ops, "GATHERED_BYTES", torch_ops.gathered_bytes(run.kv, 120))
    assert run.is_gathered()
    monkeypatch.setattr(torch_ops, "GATHERED_BYTES", torch_ops.gathered_bytes(run.kv, 120) - 1)
    assert not run.is_gathered()


def test_which_layers_are_timed() -> None:
    layer = AttentionConfig(4, 2, 16, 0.3, has_gate=True)
    assert crossover.heads_of(layer, BF16, CPU) == HEADS
    assert crossover.heads_of(layer, FP32, CPU) is None
    assert crossover.heads_of(AttentionConfig(4, 1, 576, 0.3, latent_dim=512), BF16, CPU) is None
    assert crossover.heads_of(replace(layer, window=16), BF16, CPU) is None


def test_without_flash_attention_nothing_is_timed(known: dict[Heads, int | None]) -> None:
    """As on a CPU, where PyTorch says that it has none."""
    assert crossover.measure(HEADS, 8192, torch_ops.attend_spans) is None
    assert known == {HEADS: None}


def test_what_is_asked_about_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes runs behind other keys only where they are not called causal, which is upper left there."""
    asked: list[Any] = []

    def note(params: Any) -> bool:
        asked.append(params)
        return True

    monkeypatch.setattr(crossover, "can_use_flash_attention", note)
    assert crossover._has_flash(HEADS)
    (params,) = asked
    assert (params.is_causal, params.enable_gqa, params.attn_mask, params.dropout) == (False, True, None, 0.0)
    assert params.query.shape == (1, HEADS.query_heads, crossover.TRIED[1], HEADS.head_dim)
    assert params.key.shape == params.value.shape
    assert params.key.shape[2] > params.query.shape[2]


@pytest.mark.parametrize(("queries", "keys"), [(5, 9), (9, 9)])
def test_a_gpu_has_one_form_whatever_lies_in_front_of_a_run(queries: int, keys: int) -> None:
    """PyTorch's FlashAttention, here without numbers: its operator takes what it is given."""
    called: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    q, k, v = (
        torch.empty(n, heads, 16, dtype=BF16, device="meta") for n, heads in ((queries, 4), (keys, 2), (keys, 2))
    )
    with Watch():  # type: ignore[no-untyped-call]
        out = torch_ops._attend_causally(q, k, v, 0.3)
    assert out.shape == q.shape
    assert "_scaled_dot_product_flash_attention" in called


def test_heads_are_timed_once(
    known: dict[Heads, int | None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(crossover, "_has_flash", lambda _: True)
    monkeypatch.setattr(crossover, "agree", lambda *_: True)
    counted: list[int] = []

    def timed(heads: Heads, most_queries: int, *_: object) -> list[Seconds]:
        counted.append(most_queries)
        return [Seconds(512, 1.0, 2.0), Seconds(1024, 2.0, 1.0)]

    monkeypatch.setattr(crossover, "timed", timed)
    assert (
        crossover.measure(HEADS, 8192, torch_ops.attend_spans)
        == crossover.measure(HEADS, 8192, torch_ops.attend_spans)
        == 1024
    )
    assert counted == [8192]
    assert crossover.measure(HEADS, 512, torch_ops.attend_spans) == 1024
    assert counted == [8192]
    crossover.measure(HEADS, 16384, torch_ops.attend_spans)
    assert counted == [8192, 16384]
    counted.clear()
    monkeypatch.setattr(crossover, "agree", lambda *_: False)
    others = HEADS._replace(has_gate=False)
    assert "different" not in caplog.text
    assert crossover.measure(others, 8192, torch_ops.attend_spans) is None
    assert counted == []
    assert "4 heads over 2 of 16: Triton's kernel and PyTorch's FlashAttention give different results" in caplog.text


@pytest.mark.usefixtures("gpu_device")
def test_the_engine_times_the_heads_of_all_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the draft head are the target's here; they are timed once, and told in the report and as JSON."""
    folder = write_tiny_checkpoint(tmp_path / "model", seed=2, layer_types=[LINEAR, FULL, FULL])
    monkeypatch.setattr(crossover, "can_measure", lambda _: True)
    asked: list[tuple[Heads, int]] = []

    def measure(heads: Heads, most_queries: int, _: object) -> int:
        asked.append((heads, most_queries))
        return 2048

    monkeypatch.setattr(crossover, "measure", measure)
    settings: dict[str, Any] = {"model": str(folder), "device": "cpu", "context_length": 48, "max_total_tokens": 192}
    with LLM(**settings, dtype="bfloat16", chunked_prefill_size=32) as llm:
        found = llm.engine.describe()["gathered_attention"]
        attention = next(x.form for x in _attention_layers(llm.engine.models.target, set()))
    sizes = {"query_heads": attention.num_query_heads, "key_heads": attention.num_key_heads}
    assert found == [sizes | {"head_dim": attention.head_dim, "dtype": "bfloat16", "from_queries": 2048}]
    assert asked == [(crossover.heads_of(attention, BF16, CPU), 32)]
    lines = crossover_lines({asked[0][0]: 2048, asked[0][0]._replace(head_dim=64): None})
    assert "PyTorch for 2,048 tokens and more, Triton for fewer" in lines[0]
    assert lines[1].endswith(f": Triton ({attention.num_query_heads} heads over {attention.num_key_heads} of 64)")
    asked.clear()
    for others in ({"dtype": "float32"}, {"dtype": "bfloat16", "kv_cache_dtype": "int8"}):
        with LLM(**settings, **others) as llm:
            assert llm.engine.describe()["gathered_attention"] == []
    assert asked == []


def test_the_host_knows_the_runs_of_a_chunk() -> None:
    chunk = prefill_chunk([2, 5, 6], [3, 0, 7], [[1, 2, 3], [4], [5, 6]], CPU)
    begins, lengths = chunk.positions[:, 0].tolist(), chunk.lengths.tolist()
    assert chunk.spans == tuple((begin, begin + length) for begin, length in zip(begins, lengths, strict=True))
    assert chunk.spans == ((3, 6), (0, 1), (7, 9))
    assert chunk.end == 9


@pytest.mark.parametrize(
    ("setting", "is_measured"),
    [("", True), ("-moe", True), ("always", False), ("-paged_attention", False), ("0", False)],
)
def test_the_switch_decides_whether_anything_is_timed(
    setting: str, is_measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = switch.parse(setting)
    monkeypatch.setattr(gpu, "choice", lambda: given)
    monkeypatch.setattr(gpu, "_is_on", lambda: bool(given.operators))
    assert crossover.can_measure(torch.device("cuda")) == is_measured
    assert not crossover.can_measure(CPU)


def test_torch_compile_is_not_imported() -> None:
    """It takes seconds, and brings Triton to processes that run nothing of it."""
    code = "import sys, specmamba.engine.engine; print([x for x in ('triton', 'torch._dynamo') if x in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
