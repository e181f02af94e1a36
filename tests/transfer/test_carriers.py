"""KV and states that come beside the connection: by memory of this process, by NIXL, and by Mooncake's engine.

The text is that of one server whatever brings them, and whatever goes wrong is a miss with its reason.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, ClassVar

import numpy as np
import pytest

from specmamba.cache.tiers.entry import Bytes
from specmamba.errors import ConfigError
from specmamba.server import handoff_setup
from specmamba.transfer import carrier as carrier_module
from specmamba.transfer import mooncake_carrier, nixl_carrier
from specmamba.transfer.carrier import Carrier, CarrierName, Windows, _pieces
from specmamba.transfer.mooncake_carrier import MooncakeCarrier
from specmamba.transfer.nixl_carrier import NixlCarrier
from specmamba.transfer.peer_link import LinkError
from tests.drafts import DRAFTS
from tests.fake_engine import wait_until
from tests.repository import ROOT
from tests.transfer.sides import Side, Text, room_at, side

Tokens = tuple[int, ...]
ROOMS = itertools.count(2**61)
MAKERS: dict[str, Callable[[], Carrier]] = {"mooncake": lambda: MooncakeCarrier("127.0.0.1"), "nixl": NixlCarrier}
SERVER = """
import json, sys
import numpy as np
from tests.transfer.test_carriers import MAKERS
carrier, memory = MAKERS[sys.argv[1]](), (np.arange(1 << 20) % 251).astype(np.uint8)
carrier.register(memory)
print(json.dumps([carrier.address, memory.ctypes.data]), flush=True)
sys.stdin.read()
"""


def library_problem(kind: str) -> str | None:
    """Why a library cannot be used here; None: it can. In a process of its own: it starts threads."""
    if find_spec(kind) is None:
        return f"{kind} is not installed (specmamba[{kind}])"
    code = f"from tests.transfer.test_carriers import MAKERS; MAKERS[{kind!r}]()"
    if kind not in _PROBLEMS:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
        _PROBLEMS[kind] = done.stderr.strip().splitlines()[-1] if done.returncode else None
    return _PROBLEMS[kind]


_PROBLEMS: dict[str, str | None] = {}


@pytest.fixture(params=["memory", "mooncake", "nixl"])
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    if found != "memory" and (problem := library_problem(found)) is not None:
        pytest.skip(problem)
    return found


class MemoryCarrier:
    """``Carrier`` between servers of one process. Its failures are for the tests."""

    name: CarrierName = "nixl"
    address = "here"
    fault = ""  # of all of them
    noisy: ClassVar[set[int]] = set()  # places into which transfers go on

    def register(self, memory: Bytes) -> None:
        pass

    def read(self, address: str, remote: int, local: int, nbytes: int, deadline: float) -> None:
        assert address == "here"
        if self.fault == "slow":
            time.sleep(max(0.0, deadline - time.monotonic()))
        if self.fault in ("cut", "slow"):
            raise LinkError("cut" if self.fault == "cut" else "slow")
        ctypes.memmove(local, remote, nbytes)
        if self.fault == "damaged":
            ctypes.memset(local + nbytes // 2, 7, 4)

    def is_quiet(self, local: int) -> bool:
        return local not in self.noisy

    def close(self) -> None:
        pass


@pytest.fixture
def backend(kind: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The flag's value, with windows so small that a prompt takes several."""
    monkeypatch.setattr(carrier_module, "WINDOW_BYTES", 50_001)
    if kind != "memory":
        return kind
    monkeypatch.setattr(handoff_setup, "NixlCarrier", MemoryCarrier)
    monkeypatch.setattr(MemoryCarrier, "fault", "")
    return "nixl"


@pytest.fixture(scope="module")
def expected(texts: list[Tokens]) -> Text:
    with side("null", "chain") as one:
        return one.run(texts[0])


def test_texts_and_drafts_are_those_of_one_server(backend: str, texts: list[Tokens], expected: Text) -> None:
    flags: dict[str, Any] = {"disaggregation_transfer_backend": backend}
    with side("prefill", "chain", **flags) as prefill, side("decode", "chain", page_size=4, **flags) as decode:
        for number in (1, 2):
            room = next(ROOMS)
            prefill.prefill(texts[0], room)
            found = decode.run(texts[0], room_at(prefill, room))
            assert (found.tokens, found.spec) == (expected.tokens, expected.spec)
            assert found.num_cached == len(texts[0]) - 1
            assert decode.stats().num_handoffs == number
            decode.flush()
        assert not decode.failures()
        wait_until(lambda: prefill.stats().num_handoffs == 2)
        assert prefill.stats().num_bytes == decode.stats().num_bytes > 100_000  # more than two windows each
        prefill.check()
        decode.check()


@pytest.mark.slow
@pytest.mark.parametrize("drafts", sorted(DRAFTS))
def test_texts_with_every_drafter(backend: str, drafts: str, texts: list[Tokens]) -> None:
    with side("null", drafts) as one:
        expected = one.run(texts[1])
    flags: dict[str, Any] = {"disaggregation_transfer_backend": backend}
    with side("prefill", drafts, **flags) as prefill, side("decode", drafts, **flags) as decode:
        room = next(ROOMS)
        waits = decode.start(texts[1], room_at(prefill, room))
        prefill.prefill(texts[1], room)
        found = waits.wait()
        assert (found.tokens, found.spec, found.num_cached) == (expected.tokens, expected.spec, len(texts[1]) - 1)


@pytest.mark.parametrize("kind", ["memory"], indirect=True)
def test_what_does_not_come_is_a_miss(
    backend: str, texts: list[Tokens], expected: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = {"disaggregation_transfer_backend": backend, "disaggregation_timeout": 1.5}
    failures: dict[str, int] = {}
    with side("prefill", "chain", **flags) as prefill, side("decode", "chain", **flags) as decode:
        for fault in ("cut", "damaged", "slow"):
            monkeypatch.setattr(MemoryCarrier, "fault", fault)
            failures[fault] = 1
            assert miss(prefill, decode, texts[0], expected) == failures
        monkeypatch.setattr(MemoryCarrier, "fault", "")
        assert miss(prefill, decode, texts[0], expected) == failures  # no further one
        assert decode.stats().num_handoffs == 1
        prefill.check()
        decode.check()


@pytest.mark.parametrize("kind", ["memory"], indirect=True)
def test_sides_with_other_carriers_miss(backend: str, texts: list[Tokens], expected: Text) -> None:
    with (
        side("prefill", "chain", disaggregation_transfer_backend=backend) as prefill,
        side("decode", "chain") as decode,
    ):
        assert miss(prefill, decode, texts[0], expected) == {"format": 1}


def miss(prefill: Side, decode: Side, text: Tokens, expected: Text) -> dict[str, int]:
    """The failures of a decode server after a request, which has the text of one server."""
    room = next(ROOMS)
    decode.flush()
    prefill.prefill(text, room)
    found = decode.run(text, room_at(prefill, room))
    assert (found.tokens, found.spec) == (expected.tokens, expected.spec)
    return decode.failures()


def test_a_server_that_is_gone_is_a_cut(kind: str) -> None:
    """Real libraries, two processes."""
    if kind == "memory":
        pytest.skip("one process has it all")
    carrier, memory = MAKERS[kind](), np.zeros(1 << 20, dtype=np.uint8)
    carrier.register(memory)
    pipe = subprocess.PIPE
    server = subprocess.Popen([sys.executable, "-c", SERVER, kind], stdin=pipe, stdout=pipe, text=True, cwd=ROOT)
    try:
        assert server.stdout is not None
        address, place = next(json.loads(line) for line in server.stdout if line.startswith("["))
        carrier.read(address, place + 3, memory.ctypes.data, 70_001, time.monotonic() + 30)
        assert np.array_equal(memory[:70_002], np.append(np.arange(3, 70_004) % 251, 0))
        server.kill()
        server.communicate()
        with pytest.raises(LinkError, match="cut"):
            carrier.read(address, place, memory.ctypes.data, 1 << 19, time.monotonic() + 30)
    finally:
        server.kill()
        server.communicate()


@pytest.mark.parametrize("address", ["", "not base64 %", "bm90aGluZw=="])
def test_addresses_that_are_none(kind: str, address: str) -> None:
    if kind == "memory":
        pytest.skip("it has no addresses")
    carrier, memory = MAKERS[kind](), np.zeros(1 << 12, dtype=np.uint8)
    carrier.register(memory)
    with pytest.raises(LinkError):
        carrier.read(address, memory.ctypes.data, memory.ctypes.data, 100, time.monotonic() + 30)


@pytest.fixture
def noisy(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    monkeypatch.setattr(carrier_module, "WINDOW_BYTES", 1 << 12)
    monkeypatch.setattr(carrier_module, "NUM_WINDOWS", 2)
    monkeypatch.setattr(carrier_module, "LOOK_S", 0.01)
    monkeypatch.setattr(MemoryCarrier, "noisy", places := set[int]())
    return places


def test_memory_of_a_transfer_that_was_given_up_is_used_again_when_it_is_quiet(noisy: set[int]) -> None:
    windows = Windows(MemoryCarrier())
    first, second = (windows.take(0.0) for _ in range(2))
    assert first.place != second.place
    with pytest.raises(LinkError, match="slow"):
        windows.take(time.monotonic() + 0.01)
    noisy.add(first.place)
    windows.give_up(first)
    with pytest.raises(LinkError, match="slow"):
        windows.take(time.monotonic() + 0.1)
    windows.give_back(second)
    assert windows.take(0.0) is second
    threading.Timer(0.1, noisy.clear).start()
    assert windows.take(time.monotonic() + 60) is first
    windows.give_up(second)  # which was quiet from the start
    assert windows.take(0.0) is second


def test_transfers_that_never_end_leave_memory_for_others(noisy: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carrier_module, "MAX_WINDOWS", 3)
    windows = Windows(MemoryCarrier())
    for each in (first := windows.take(0.0), windows.take(0.0)):
        noisy.add(each.place)
        windows.give_up(each)
    began = time.monotonic()
    with pytest.raises(LinkError, match="no_room"):  # nothing comes back soon, so that no request waits for it
        windows.take(began + 30)
    assert time.monotonic() - began < 10
    monkeypatch.setattr(time, "monotonic", lambda: began + carrier_module.LOST_S + 10)
    third = windows.take(0.0)
    assert third.place not in noisy
    noisy.add(third.place)
    windows.give_up(third)
    with pytest.raises(LinkError, match="no_room"):  # there are as many as there may be
        windows.take(began + 10 * carrier_module.LOST_S)
    noisy.remove(first.place)
    assert windows.take(0.0) is first


def test_memory_that_cannot_be_had_once_is_asked_for_again(noisy: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    windows = Windows(MemoryCarrier())
    for each in (windows.take(0.0), windows.take(0.0)):
        noisy.add(each.place)
        windows.give_up(each)
    began = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began + carrier_module.LOST_S + 10)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryCarrier, "register", refuse)
        with pytest.raises(LinkError, match="no_room"):
            windows.take(0.0)
    assert windows.take(0.0).place not in noisy


def refuse(carrier: MemoryCarrier, memory: object) -> None:
    raise ConfigError("this memory cannot be registered")


@pytest.mark.parametrize("sizes", [[], [0], [1], [10], [4, 0, 5], [25], [3, 30, 7]])
def test_parts_are_cut_into_windows(sizes: list[int]) -> None:
    data = bytes(range(sum(sizes)))
    parts: Iterator[memoryview] = iter(
        [memoryview(data)[end - size : end] for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]
    )
    pieces = [b"".join(piece) for piece in _pieces(parts, 10)]
    assert b"".join(pieces) == data
    assert all(len(piece) == 10 for piece in pieces[:-1])
    assert not pieces or 0 < len(pieces[-1]) <= 10


def test_libraries_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ImportError(f"no {name}")

    for module, make in ((mooncake_carrier, MAKERS["mooncake"]), (nixl_carrier, NixlCarrier)):
        monkeypatch.setattr(module, "import_module", fail)
        with pytest.raises(ConfigError, match=r"--disaggregation-transfer-backend .*no (nixl|mooncake).*pip install"):
            make()
