"""Two replicas with one folder of prefixes: what one has written the other loads, and gets the request for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from specmamba.replicas.replicated_engine import ReplicatedEngine
from specmamba.server_config import ServerConfig
from tests.fake_engine import wait_until
from tests.replicas.test_replicated_engine import FLAGS, add, finish, outputs

LONG = " a sentence that is long enough to be worth going back to." * 12

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_processes")]


@pytest.fixture
def replicated(tmp_path: Path) -> Iterator[ReplicatedEngine]:
    config = ServerConfig(dp_size=2, hicache_storage_dir=tmp_path / "prefixes", hicache_size=0.05, **FLAGS)
    engine = ReplicatedEngine(config)
    yield engine
    engine.close()


def test_a_prompt_goes_on_from_what_another_replica_has_written(replicated: ReplicatedEngine) -> None:
    engine = replicated
    add(engine, 0, prompt=LONG)
    writer = engine._courses["0"].replica
    first = outputs(finish(engine))
    assert writer is not None
    other = 1 - writer
    published = {index: replica.published for index, replica in engine._links.ready.items()}
    assert published[writer].folder is published[other].folder
    assert published[writer].host is not published[other].host
    add(engine, 1, prompt=f"{LONG} And")  # in the pools of the one, in the folder for both
    assert engine._courses["1"].replica == writer
    finish(engine)

    engine.replicas.drain(writer, 0.0)  # its pools and its host memory are gone
    wait_until(lambda: engine.replicas.statuses()[writer].state == "off", timeout_s=60)
    add(engine, 0, prompt=LONG)
    course = engine._courses["0"]
    assert course.replica == other
    assert course.num_uncached < 32  # as the server expects
    again = finish(engine)
    assert again["0"][-1].num_cached_tokens > 100  # and as it is
    assert outputs(again) == first
