"""Greedy text after a prefix from disk is the text without a cache, in float32, token for token, with equal drafts.

Whatever is wrong with the disk is a miss, with its reason.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specmamba import LLM, SamplingParams
from specmamba.cache.tiers import prefix_tiers, threaded_tier
from specmamba.cache.tiers.disk_tier import DiskTier
from specmamba.cache.tiers.prefix_tiers import PrefixTiers
from specmamba.cache.tiers.tier_stats import TierStats
from specmamba.core import Owner, RequestOutput
from specmamba.engine.scheduler import longest_prefix_first
from tests.cache.test_disk_tier import DAMAGE
from tests.cache.test_prefix_exact import check_pools
from tests.drafts import DRAFTS

Tokens = tuple[int, ...]
NUM_TOKENS = 20
POLICIES = ("write_through", "write_through_selective", "write_back")


@pytest.fixture(scope="module")
def prompt(prompts: list[Tokens]) -> Tokens:
    return next(each for each in prompts if len(each) > 120)[:120]


def new_llm(folder: Path | None, drafts: str = "chain", **flags: Any) -> LLM:
    settings: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "context_length": 512,
        "max_running_requests": 4,
        "max_mamba_cache_size": 64,
        "chunked_prefill_size": 32,
        "speculative_adaptive": "off",
        "hicache_storage_dir": folder,
    }
    return LLM(**{**settings, **DRAFTS[drafts], **flags})


def run(llm: LLM, text: Tokens) -> RequestOutput:
    return llm.generate(text, SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True))[0]


def tiers(llm: LLM) -> PrefixTiers:
    assert llm.engine.cache_manager.tiers is not None
    return llm.engine.cache_manager.tiers


def disk_of(llm: LLM) -> DiskTier:
    disk = tiers(llm).tiers[-1]
    assert isinstance(disk, DiskTier)
    return disk


def stats(llm: LLM) -> TierStats:
    disk = llm.engine.stats().disk
    assert disk is not None
    return disk


def forget(llm: LLM) -> None:
    """Leave the prefixes on disk alone."""
    assert tiers(llm).drain()
    llm.engine.flush_cache()


def without_cache(drafts: str, text: Tokens, **flags: Any) -> RequestOutput:
    with new_llm(None, drafts, disable_radix_cache=True, **flags) as llm:
        return run(llm, text)


# each policy meets each kind of draft, and each page size
CASES = [
    (policy, 16 if (i + j) % 2 else 1, drafts)
    for (i, policy), (j, drafts) in itertools.product(enumerate(POLICIES), enumerate(DRAFTS))
]


@pytest.mark.fast_cases("write_through-16-chain")
@pytest.mark.parametrize(("policy", "page_size", "drafts"), CASES)
def test_texts_and_drafts_are_those_of_a_cold_run(
    policy: str, page_size: int, drafts: str, prompt: Tokens, prompts: list[Tokens], tmp_path: Path
) -> None:
    flags: dict[str, Any] = {"page_size": page_size, "hicache_write_policy": policy}
    folder = tmp_path / "prefixes"
    cold = without_cache(drafts, prompt, page_size=page_size)
    with new_llm(folder, drafts, **flags) as llm:
        first, device = run(llm, prompt), run(llm, prompt)
        assert (first.num_cached_tokens, device.num_cached_tokens) == (0, len(prompt) - 1)
        if policy == "write_back":
            assert stats(llm).writes == 0
            llm.engine.cache_manager.cache.evict_states(64)
        if policy == "write_through_selective":
            assert tiers(llm).drain()
            assert stats(llm).writes == 1
        forget(llm)
        disk = run(llm, prompt)
        assert disk.num_cached_tokens == len(prompt) - 1
        assert stats(llm).hit_tokens == disk.num_cached_tokens
        check_pools(llm)
    with new_llm(folder, drafts, **flags) as llm:
        restarted, again = run(llm, prompt), run(llm, prompt)
        assert (restarted.num_cached_tokens, again.num_cached_tokens) == (disk.num_cached_tokens, len(prompt) - 1)
        # one part of the prefix is in memory, another on disk
        turn = run(llm, prompt + cold.token_ids + prompts[3][:40])
        assert turn.num_cached_tokens >= len(prompt) - 1
        check_pools(llm)
    for output in (first, device, disk, restarted, again):
        assert output.token_ids == cold.token_ids
        assert output.spec == cold.spec
    assert turn.token_ids == without_cache(drafts, turn.prompt_token_ids).token_ids


@pytest.mark.fast_cases("1-chain")
@pytest.mark.parametrize("drafts", ["chain", "tree"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_preempted_again_and_again_with_snapshots(page_size: int, drafts: str, prompt: Tokens, tmp_path: Path) -> None:
    """What one engine with records has written, one with snapshots reads, each time that it begins again."""
    cold = without_cache(drafts, prompt, page_size=page_size)
    with new_llm(tmp_path / "prefixes", drafts, page_size=page_size) as llm:
        assert run(llm, prompt).token_ids == cold.token_ids
    with new_llm(tmp_path / "prefixes", drafts, page_size=page_size, speculative_state="snapshots") as llm:
        engine, tokens = llm.engine, list[int]()
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        engine.add_request("again", prompt, params)
        steps = 0
        while engine.has_unfinished_requests:
            deltas = engine.step()
            tokens += [token for delta in deltas for token in delta.token_ids]
            steps += bool(deltas)
            if deltas and steps % 3 == 2 and engine.scheduler.verifying:
                engine.preempt(engine.scheduler.verifying[0])
                forget(llm)  # it finds nothing in the pools
        assert engine.stats().num_preemptions >= 2
        assert stats(llm).hits >= 3
        assert not any(stats(llm).misses[reason] for reason in ("damaged", "fingerprint", "vanished"))
        check_pools(llm)
    assert tuple(tokens) == cold.token_ids


@pytest.mark.fast_cases("tree")
@pytest.mark.parametrize("drafts", DRAFTS)
def test_texts_are_the_same_from_every_tier(drafts: str, prompt: Tokens, prompts: list[Tokens], tmp_path: Path) -> None:
    """Cold, from the pools, from host memory, from disk after a restart, and the parts of a text from all three."""
    flags: dict[str, Any] = {"hicache_write_policy": "write_back", "hicache_size": 0.02, "page_size": 4}
    cold = without_cache(drafts, prompt, page_size=4)
    longer = prompt + cold.token_ids + next(each for each in prompts if len(each) > 40)[:40]
    with new_llm(tmp_path / "prefixes", drafts, **flags) as llm:
        outputs = [run(llm, prompt), run(llm, prompt)]
        llm.engine.cache_manager.cache.evict_states(64)
        outputs.append(run(llm, prompt))
        host, disk = llm.engine.stats().host, stats(llm)
        assert host is not None
        assert (host.hits, host.hit_tokens, host.evictions) == (1, len(prompt) - 1, 0)
        assert (disk.hits, disk.writes) == (0, 0)
        check_pools(llm)
    with new_llm(tmp_path / "prefixes", drafts, **flags) as llm:
        outputs.append(run(llm, prompt))
        assert stats(llm).hit_tokens == outputs[-1].num_cached_tokens == len(prompt) - 1
        turn = run(llm, longer)
        llm.engine.cache_manager.cache.evict_states(64)
        again = run(llm, longer)
        host = llm.engine.stats().host
        assert host is not None
        assert host.hits == 1
        assert again.num_cached_tokens > len(longer) - 16  # shorter segments are not worth a state
        check_pools(llm)
    assert [(each.token_ids, each.spec) for each in outputs] == [(cold.token_ids, cold.spec)] * 4
    assert turn.token_ids == again.token_ids == without_cache(drafts, longer, page_size=4).token_ids


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_what_host_memory_has_no_room_for_is_on_disk(policy: str, prompts: list[Tokens], tmp_path: Path) -> None:
    """Prefixes in pools for a few of them, host memory for a few more, and the rest on disk; none is lost."""
    chosen = [each[:90] for each in prompts if len(each) >= 90][:8]
    with new_llm(None, "ngram", disable_radix_cache=True) as llm:
        expected = [run(llm, text).token_ids for text in chosen]
    flags: dict[str, Any] = {"context_length": 200, "max_total_tokens": 300, "max_mamba_cache_size": 5}
    sizes = {"hicache_size": 0.004, "hicache_write_policy": policy}
    with new_llm(tmp_path / "prefixes", "ngram", **flags, **sizes) as llm:
        for turn in range(3):
            for text, tokens in zip(chosen, expected, strict=True):
                output = run(llm, text)
                assert output.token_ids == tokens
                assert output.num_cached_tokens == (0 if turn == 0 else len(text) - 1)
            assert tiers(llm).drain()
        host, disk = llm.engine.stats().host, stats(llm)
        assert host is not None
        assert host.num_bytes <= host.max_bytes
        assert (host.hits + disk.hits, host.evictions > 0, disk.hits > 0) == (16, True, True)
        assert not any((*host.lost_writes.values(), *disk.lost_writes.values()))
        check_pools(llm)


def test_where_the_disk_fails_host_memory_is_asked(prompt: Tokens, tmp_path: Path) -> None:
    with new_llm(tmp_path / "prefixes", "plain", hicache_size=0.02) as llm:
        cold = run(llm, prompt)
        forget(llm)
        run(llm, prompt[:61])
        llm.engine.cache_manager.cache.evict_states(64)  # a part is in host memory too
        assert tiers(llm).drain()
        for file in (tmp_path / "prefixes").glob("*.entry"):
            DAMAGE["kv"](file)
        output, disk, host = run(llm, prompt), stats(llm), llm.engine.stats().host
        assert (output.token_ids, output.num_cached_tokens) == (cold.token_ids, 60)
        assert host is not None
        assert (disk.misses["damaged"], disk.hits, host.hits) == (1, 1, 1)
        check_pools(llm)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, Path]]:
    folder = tmp_path_factory.mktemp("damaged") / "prefixes"
    with new_llm(folder) as llm:
        yield llm, folder


@pytest.fixture(scope="module")
def cold(damaged: tuple[LLM, Path], prompt: Tokens) -> RequestOutput:
    return run(damaged[0], prompt)


@pytest.mark.parametrize("kind", [*DAMAGE, "vanished", "no folder"])
def test_faults_of_the_disk_are_misses(
    kind: str, damaged: tuple[LLM, Path], cold: RequestOutput, prompt: Tokens
) -> None:
    llm, folder = damaged
    forget(llm)
    before = stats(llm)
    assert before.num_entries == len(list(folder.glob("*.entry"))) > 0
    if kind == "no folder":
        shutil.move(folder, folder.with_name("elsewhere"))
    else:
        for file in folder.glob("*.entry"):
            if kind == "vanished":
                file.unlink()
            else:
                DAMAGE[kind](file)
    output, after = run(llm, prompt), stats(llm)
    reason = {"vanished": "vanished", "no folder": "vanished", "no file": "unreadable"}.get(kind, "damaged")
    assert {name: after.misses[name] - before.misses[name] for name in after.misses} == {
        name: int(name == reason) for name in after.misses
    }
    assert (output.token_ids, output.spec, output.num_cached_tokens) == (cold.token_ids, cold.spec, 0)
    assert after.hits == before.hits
    assert tiers(llm).drain()
    if kind == "no folder":
        assert stats(llm).lost_writes["failed"] > 0
        shutil.move(folder.with_name("elsewhere"), folder)
    for file in folder.glob("*.entry"):
        if file.is_dir():
            file.rmdir()
    llm.engine.flush_cache()
    disk_of(llm)._scan()
    assert run(llm, prompt).token_ids == cold.token_ids
    check_pools(llm)


def test_salts_and_tenants_share_nothing_on_disk(
    damaged: tuple[LLM, Path], cold: RequestOutput, prompt: Tokens
) -> None:
    llm, _ = damaged
    run(llm, prompt)
    forget(llm)
    before = stats(llm)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    engine, outputs = llm.engine, list[Tokens]()
    for salt, tenant in (("salt", None), (None, "tenant")):
        engine.add_request("other", prompt, params, extra_key=salt, owner=Owner("a client", tenant))
        deltas = []
        while engine.has_unfinished_requests:
            deltas += engine.step()
        outputs.append(tuple(token for delta in deltas for token in delta.token_ids))
        assert deltas[-1].num_cached_tokens == 0
    assert outputs == [cold.token_ids] * 2
    assert stats(llm).misses["absent"] - before.misses["absent"] == 2


def test_a_request_that_is_aborted_while_it_waits_leaves_nothing(damaged: tuple[LLM, Path], prompt: Tokens) -> None:
    llm, _ = damaged
    run(llm, prompt)
    forget(llm)
    engine, before = llm.engine, stats(llm)
    engine.add_request("gone", prompt, SamplingParams(max_tokens=4))
    engine.scheduler.admit()
    assert len(tiers(llm)._loads) == 1
    engine.abort("gone")
    assert (tiers(llm)._loads, stats(llm).hits) == ([], before.hits)
    check_pools(llm)


def test_a_prefix_on_disk_counts_as_cached_in_the_order_of_admission(
    damaged: tuple[LLM, Path], prompt: Tokens, prompts: list[Tokens]
) -> None:
    llm, _ = damaged
    run(llm, prompt)
    forget(llm)
    engine = llm.engine
    for name, text in (("new", prompts[0][::-1]), ("stored", prompt)):
        engine.add_request(name, text, SamplingParams(max_tokens=2))
    waiting, peek = engine.scheduler.waiting, engine.cache_manager.peek
    assert [peek(request) for request in waiting] == [0, len(prompt) - 1]
    assert [each.request_id for each in longest_prefix_first(waiting, peek, 8)] == ["stored", "new"]
    while engine.has_unfinished_requests:
        engine.step()
    check_pools(llm)


def test_requests_that_come_together_load_once(damaged: tuple[LLM, Path], prompt: Tokens) -> None:
    llm, _ = damaged
    run(llm, prompt)
    forget(llm)
    before = stats(llm)
    outputs = llm.generate([prompt] * 4, SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True))
    assert len({output.token_ids for output in outputs}) == 1
    assert all(output.num_cached_tokens >= 96 for output in outputs)
    after = stats(llm)
    assert after.hits - before.hits == 1
    assert after.misses == before.misses
    check_pools(llm)


@pytest.mark.parametrize("most_repeats", [0, 3])
def test_a_load_whose_beginning_is_evicted_meanwhile_is_repeated(
    damaged: tuple[LLM, Path],
    prompt: Tokens,
    cold: RequestOutput,
    most_repeats: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm, _ = damaged
    monkeypatch.setattr(prefix_tiers, "MAX_REPEATS", most_repeats)
    run(llm, prompt)
    forget(llm)
    run(llm, prompt[:65])
    assert tiers(llm).drain()
    engine, before = llm.engine, stats(llm)
    engine.add_request("late", prompt, SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True))
    engine.scheduler.admit()
    (load,) = tiers(llm)._loads
    assert load.chain[0].start == 64
    engine.cache_manager.cache.reset()
    deltas = [delta for _ in iter(lambda: engine.has_unfinished_requests, False) for delta in engine.step()]
    assert tuple(token for delta in deltas for token in delta.token_ids) == cold.token_ids
    assert deltas[-1].num_cached_tokens == (len(prompt) - 1 if most_repeats else 0)
    assert stats(llm).hits - before.hits == min(most_repeats, 1)
    assert stats(llm).misses["no_room"] - before.misses["no_room"] == (not most_repeats)
    check_pools(llm)


def test_loads_wait_for_each_other_where_they_would_hold_too_much(
    damaged: tuple[LLM, Path], prompts: list[Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, _ = damaged
    chosen = [each[:60] for each in prompts if len(each) >= 60][:4]
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    expected = [output.token_ids for output in llm.generate(chosen, params)]
    forget(llm)
    monkeypatch.setattr(threaded_tier, "MAX_BYTES_IN_FLIGHT", 1)
    most, before = 0, stats(llm)
    for number, text in enumerate(chosen):
        llm.engine.add_request(str(number), text, params)
    texts: list[Tokens] = [()] * 4
    while llm.engine.has_unfinished_requests:
        for delta in llm.engine.step():
            texts[int(delta.request_id)] += delta.token_ids
        most = max(most, len(tiers(llm)._loads))
    assert texts == expected
    assert (most, stats(llm).hits - before.hits) == (1, 4)
    check_pools(llm)


def test_other_models_and_settings_are_missed(tmp_path: Path, prompt: Tokens) -> None:
    folder = tmp_path / "prefixes"
    with new_llm(folder, "plain", kv_cache_dtype="int8") as llm:
        first = run(llm, prompt)
        forget(llm)
        assert run(llm, prompt).token_ids == first.token_ids  # codes and scales are stored
        assert stats(llm).hits == 1
    with new_llm(folder, "plain") as llm:
        output = run(llm, prompt)
        assert output.num_cached_tokens == 0
        assert stats(llm).misses["fingerprint"] == 1


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_states_in_16_bits_are_those_of_the_pool_rounded(stored: str, tmp_path: Path, prompt: Tokens) -> None:
    folder, dtype = tmp_path / "prefixes", getattr(torch, stored)
    with new_llm(folder, "plain") as llm:
        run(llm, prompt)
        assert tiers(llm).drain()
        size = stats(llm).num_bytes
    with new_llm(folder, "plain", hicache_state_dtype=stored, hicache_size=0.02) as llm:
        states, cache = llm.engine.pools.states, llm.engine.cache_manager.cache
        first = run(llm, prompt)
        assert (first.num_cached_tokens, stats(llm).misses["fingerprint"]) == (0, 1)  # float32 is not used
        assert tiers(llm).drain()
        assert stats(llm).num_bytes - size < 0.8 * size

        def state() -> torch.Tensor:
            node = cache.match(np.array(prompt[:-1], dtype=np.int64)).node
            assert node.state_slot is not None
            return states.recurrent[:, node.state_slot]

        state()[0, 0, 0, 0] = 1e5  # more than float16 can hold
        exact = state().clone()
        cache.evict_states(64)
        run(llm, prompt)
        host = llm.engine.stats().host
        assert host is not None
        assert host.hits == 1
        largest = torch.finfo(dtype).max
        assert torch.equal(state(), exact.clamp(-largest, largest).to(dtype).float())
        check_pools(llm)


@pytest.mark.slow
def test_two_engines_on_one_folder(tmp_path: Path, prompts: list[Tokens]) -> None:
    """They read each other's entries and keep one budget between them; neither ever gives another text."""
    folder, chosen = tmp_path / "prefixes", [each[:90] for each in prompts if len(each) >= 90][:6]
    with new_llm(None, "ngram", disable_radix_cache=True) as llm:
        expected = [run(llm, text).token_ids for text in chosen]
    size = 5 << 20
    flags: dict[str, Any] = {"hicache_storage_size": size / (1 << 30), "max_mamba_cache_size": 8}
    with new_llm(folder, "ngram", **flags) as one, new_llm(folder, "ngram", **flags) as other:
        for turn, llm in zip(range(8), itertools.cycle((one, other))):
            disk_of(llm)._scan()  # so that this turn knows what the last one has written
            for number in (turn % 6, (turn + 1) % 6):  # the second one is the other engine's next text
                assert run(llm, chosen[number]).token_ids == expected[number]
                assert tiers(llm).drain()
            assert sum(file.stat().st_size for file in folder.glob("*.entry")) <= size, turn
            llm.engine.flush_cache()
        assert stats(one).hits > 0
        assert stats(other).hits > 0
        assert stats(one).evictions + stats(other).evictions > 0
        check_pools(one)


@pytest.mark.slow
def test_prefixes_go_to_disk_and_back_when_memory_is_short(prompts: list[Tokens], tmp_path: Path) -> None:
    """Requests side by side in pools that hold a few of their prefixes, preempted in between, twice."""
    chosen = [each[:90] for each in prompts if len(each) >= 90][:8]
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    with new_llm(None, "tree", disable_radix_cache=True) as llm:
        expected = [output.token_ids for output in llm.generate(chosen, params)]
    flags: dict[str, Any] = {"context_length": 200, "max_total_tokens": 360, "max_mamba_cache_size": 6}
    for policy, size in (("write_through", 0.0), ("write_back", 0.0), ("write_back", 0.004)):
        tier_flags = {"hicache_write_policy": policy, "hicache_size": size}
        with new_llm(tmp_path / f"{policy}-{size}", "tree", **tier_flags, **flags) as llm:
            for _ in range(3):
                assert [output.token_ids for output in llm.generate(chosen, params)] == expected
                assert tiers(llm).drain()
            host = llm.engine.stats().host
            assert (host is not None) == (size > 0)
            assert stats(llm).hits + (0 if host is None else host.hits) >= 6
            assert not any(stats(llm).lost_writes.values())
            check_pools(llm)
