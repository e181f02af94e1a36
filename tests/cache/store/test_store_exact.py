"""Greedy text after a prefix from a Mooncake Store is the text without a cache, in float32, token for token.

Once with a store in memory that has the calls of Mooncake's library, and once with the library, where it is installed:
a master, and a process that lends memory to the store, so that what engines store outlives them.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from specmamba import LLM
from specmamba.cache.tiers.store import object_store
from specmamba.cache.tiers.store.store_tier import StoreTier
from specmamba.cache.tiers.tier_stats import TierStats
from specmamba.errors import ConfigError
from tests.cache.store.memory_store import StoreMemory, library_on
from tests.cache.test_disk_exact import Tokens, new_llm, run, tiers, without_cache
from tests.cache.test_prefix_exact import check_pools
from tests.drafts import DRAFTS
from tests.processes import free_port

LENDER = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("localhost", "P2PHANDSHAKE", 256 << 20, 16 << 20, "tcp", "", sys.argv[1])
print("ready" if code == 0 else f"failed: {code}", flush=True)
sys.stdin.read()
"""


def library_problem() -> str | None:
    """Why the library cannot be used here; None: it can."""
    if find_spec("mooncake") is None:
        return "mooncake is not installed"
    done = subprocess.run([sys.executable, "-c", "import mooncake.store"], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"mooncake.store cannot be loaded: {done.stderr.strip().splitlines()[-1]}"


needs_library = pytest.mark.skipif((problem := library_problem()) is not None, reason=str(problem))
PLACES = ["memory", pytest.param("mooncake", marks=needs_library)]


@pytest.fixture(scope="module")
def prompt(prompts: list[Tokens]) -> Tokens:
    return next(each for each in prompts if len(each) > 120)[:120]


@dataclass
class Master:
    """A master, and a process that lends memory to its store."""

    address: str
    processes: list[subprocess.Popen[str]]

    def signal(self, number: int) -> None:
        self.processes[0].send_signal(number)

    def close(self) -> None:
        for process in self.processes[::-1]:
            with suppress(ProcessLookupError):
                process.kill()
            process.communicate()


def start_master(folder: Path) -> Master:
    spec = find_spec("mooncake.store")
    assert spec is not None
    program = Path(str(spec.origin)).with_name("mooncake_master")
    program.chmod(0o755)
    port, metrics = free_port(), free_port()
    command = [str(program), f"--rpc_port={port}", f"--metrics_port={metrics}", "--rpc_address=127.0.0.1"]
    with (folder / "master.log").open("w") as log:
        processes = [subprocess.Popen(command, stdout=log, stderr=log, text=True)]
        master = Master(f"127.0.0.1:{port}", processes)
        wait_for_port(port)
        lender = [sys.executable, "-c", LENDER, master.address]
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen(lender, stdin=pipe, stdout=pipe, stderr=log, text=True))
    assert processes[1].stdout is not None
    assert any(line.strip() == "ready" for line in processes[1].stdout)
    return master


def wait_for_port(port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        assert time.monotonic() < deadline
        time.sleep(0.05)


@dataclass
class Place:
    """A store, and the flags of engines that use it."""

    flags: dict[str, Any]
    memory: StoreMemory | None
    master: Master | None


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    key = tmp_path / "key"
    key.write_text("a key that all servers have")
    memory = master = None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        if request.param == "memory":
            memory = StoreMemory()
            library = library_on(memory)
            monkeypatch.setattr(object_store, "import_module", lambda name: library)
            address = f"127.0.0.1:{listener.getsockname()[1]}"
        else:
            master = start_master(tmp_path)
            address = master.address
        extra = {"master_server_address": address, "local_buffer_size": "32mb"}
        flags = {
            "hicache_storage_backend": "mooncake",
            "hicache_storage_key_file": key,
            "hicache_storage_backend_extra_config": json.dumps(extra),
        }
        yield Place(flags, memory, master)
        if master is not None:
            master.close()


def stats(llm: LLM) -> TierStats:
    store = llm.engine.stats().store
    assert store is not None
    return store


def tier_of(llm: LLM) -> StoreTier:
    found = tiers(llm).tiers[-1]
    assert isinstance(found, StoreTier)
    return found


@pytest.mark.fast_cases("memory-chain")
@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_texts_and_drafts_are_those_of_a_cold_run(
    place: Place, drafts: str, prompt: Tokens, prompts: list[Tokens]
) -> None:
    cold = without_cache(drafts, prompt)
    with new_llm(None, drafts, **place.flags) as llm:
        first, device = run(llm, prompt), run(llm, prompt)
        assert (first.num_cached_tokens, device.num_cached_tokens) == (0, len(prompt) - 1)
        assert tiers(llm).drain()
        assert stats(llm).writes > 1
        llm.engine.flush_cache()
        again = run(llm, prompt)
        assert again.num_cached_tokens == stats(llm).hit_tokens == len(prompt) - 1
        check_pools(llm)
    with new_llm(None, drafts, **place.flags) as llm:
        restarted = run(llm, prompt)
        assert restarted.num_cached_tokens == len(prompt) - 1
        assert stats(llm).hits == 1
        # one part of the prefix is in memory, another in the store
        turn = run(llm, prompt + cold.token_ids + prompts[3][:40])
        assert turn.num_cached_tokens >= len(prompt) - 1
        check_pools(llm)
    for output in (first, device, again, restarted):
        assert output.token_ids == cold.token_ids
        assert output.spec == cold.spec
    assert turn.token_ids == without_cache(drafts, turn.prompt_token_ids).token_ids


@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_two_engines_share_a_store(place: Place, prompt: Tokens) -> None:
    cold = without_cache("chain", prompt)
    with new_llm(None, **place.flags) as one, new_llm(None, **place.flags, page_size=4) as other:
        assert run(one, prompt).token_ids == cold.token_ids
        assert tiers(one).drain()
        taken = run(other, prompt)
        assert (taken.token_ids, taken.spec, taken.num_cached_tokens) == (cold.token_ids, cold.spec, len(prompt) - 1)
        assert tiers(other).drain()
        assert stats(other).writes == 0  # all of it is there, its end included
        for llm in (one, other):
            check_pools(llm)
    with new_llm(None, **{**place.flags, "hicache_state_dtype": "bfloat16"}) as llm:
        assert run(llm, prompt).num_cached_tokens == 0
        assert stats(llm).misses["absent"] == 1


@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_what_host_memory_holds_is_stored_at_the_end(place: Place, prompt: Tokens) -> None:
    flags = {**place.flags, "hicache_write_policy": "write_back", "hicache_size": 0.02}
    with new_llm(None, **flags) as llm:
        first = run(llm, prompt)
        llm.engine.cache_manager.cache.evict_states(64)  # into host memory
        assert stats(llm).writes == 0
    with new_llm(None, **place.flags) as llm:
        again = run(llm, prompt)
        assert (again.token_ids, again.spec, again.num_cached_tokens) == (first.token_ids, first.spec, len(prompt) - 1)
        assert stats(llm).hits == 1


@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_a_master_that_goes_while_requests_run(place: Place, prompt: Tokens, prompts: list[Tokens]) -> None:
    cold = without_cache("chain", prompt)
    other = prompts[3][:60]
    with new_llm(None, **place.flags) as llm:
        run(llm, prompt)
        assert tiers(llm).drain()
        llm.engine.flush_cache()
        if place.memory is not None:
            place.memory.is_away = True
        else:
            assert place.master is not None
            place.master.signal(signal.SIGKILL)
            place.master.processes[0].wait()
        output = run(llm, prompt)  # what it knew of the store is not there
        assert (output.token_ids, output.num_cached_tokens) == (cold.token_ids, 0)
        assert run(llm, other).num_cached_tokens == 0
        assert tiers(llm).drain()
        assert stats(llm).misses["unreachable"] >= 1
        assert stats(llm).lost_writes["unreachable"] >= 1
        assert run(llm, prompt).num_cached_tokens == len(prompt) - 1  # the pools have it
        check_pools(llm)


@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_a_value_that_was_replaced_is_a_miss(place: Place, prompt: Tokens) -> None:
    cold = without_cache("chain", prompt)
    with new_llm(None, **place.flags) as llm:
        run(llm, prompt)
        assert tiers(llm).drain()
        tier = tier_of(llm)
        store, names = tier._objects.store, [name for own in tier._names.values() for name in own]
        assert len(names) == len(set(names)) > 2
        for name in names:
            data = store.get(name)
            assert data is not None
            wrong = bytearray(data)
            del data  # else the library cannot reuse its memory
            wrong[len(wrong) // 2] ^= 1
            store.remove(name)
            store.put(name, memoryview(wrong))
        llm.engine.flush_cache()
        output = run(llm, prompt)
        assert (output.token_ids, output.spec, output.num_cached_tokens) == (cold.token_ids, cold.spec, 0)
        assert (stats(llm).misses["damaged"], stats(llm).damaged) == (1, 1)
        check_pools(llm)


@pytest.mark.parametrize("place", ["memory"], indirect=True)
def test_flags_that_cannot_work_are_refused(place: Place, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this is for prefixes on disk"):
        new_llm(tmp_path / "prefixes", **place.flags)
    with pytest.raises(ConfigError, match="the servers that share prefixes need one key"):
        new_llm(None, **{**place.flags, "hicache_storage_key_file": None})
    with pytest.raises(ConfigError, match="cannot be read"):
        new_llm(None, **{**place.flags, "hicache_storage_key_file": tmp_path / "none"})
    with pytest.raises(ConfigError, match="needs hicache_storage_backend mooncake"):
        new_llm(None, **{**place.flags, "hicache_storage_backend": "file"})
    extra = json.dumps({"master_server_address": f"127.0.0.1:{free_port()}"})
    with pytest.raises(ConfigError, match="no master is reached"):
        new_llm(None, **{**place.flags, "hicache_storage_backend_extra_config": extra})


@needs_library
def test_a_master_that_hangs_does_not_stop_the_engine(tmp_path: Path, prompt: Tokens) -> None:
    """A stopped process: its questions are given up after a time, and the engine goes on without it."""
    master = start_master(tmp_path)
    key = tmp_path / "key"
    key.write_text("a key that all servers have")
    extra = json.dumps({"master_server_address": master.address, "local_buffer_size": "32mb"})
    try:
        with new_llm(
            None,
            hicache_storage_backend="mooncake",
            hicache_storage_key_file=key,
            hicache_storage_backend_extra_config=extra,
        ) as llm:
            run(llm, prompt[:40])
            master.signal(signal.SIGSTOP)
            began = time.monotonic()
            assert run(llm, prompt).num_cached_tokens in (0, 32, 39)
            first = time.monotonic() - began
            began = time.monotonic()
            run(llm, prompt[::-1])
            assert time.monotonic() - began < max(5.0, first)
            assert stats(llm).misses["unreachable"] + stats(llm).misses["slow"] >= 1
            master.signal(signal.SIGCONT)
    finally:
        os.kill(master.processes[0].pid, signal.SIGCONT)
        master.close()
