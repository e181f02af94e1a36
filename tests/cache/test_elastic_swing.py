"""A load that swings between two kinds of requests: elastic pools spare as much in each half as the best fixed split.

No model runs: a cache manager on small pools gets requests as an engine would give it, one at a time. A state takes as
much memory as the keys and values of 144 tokens. In the first half many chats go on in random order, in the second
questions are asked about a few long documents; how often each has its turn follows Zipf's law, or is the same for all.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.elastic import LARGE_STATES, Memory, Text

TOTAL = 9000  # tokens whose KV would take all memory
STATE = LARGE_STATES.state_bytes_per_slot // LARGE_STATES.kv_bytes_per_token
SHARES = (0.1, 0.4, 0.55, 0.85)  # of states, in fixed pools
CHUNK, OUTPUT, QUESTION, LONGEST = 512, 8, 48, 1200
Pick = Callable[[int], int]


def answer(memory: Memory, number: int, prompt: Text, output: Text) -> int:
    """Run a request from its beginning to its end; returns the tokens that it found cached."""
    manager, states = memory.manager, memory.pools.states
    request = memory.request(f"r{number}", prompt)
    assert manager.acquire(request, len(prompt) + 1, 0)

    def run_to(end: int) -> None:
        states.begin_write(request.held_slot, request.request_id)
        states.end_write(request.held_slot, end)
        request.num_run = end

    while request.num_to_extend:
        run_to(request.num_run + min(request.num_to_extend, CHUNK, request.num_to_chunk_end))
        manager.leave_chunk(request, None)
    for token in output:
        request.output.append(token)
        assert manager.grow(request, request.num_tokens + 1, 16)
        run_to(request.num_tokens - 1)
    memory.end(request)
    return request.num_cached_tokens


def hits(share: float, is_elastic: bool, is_even: bool) -> tuple[list[int], Memory]:
    """Tokens that were cached, of each half."""
    slots = max(5, int(TOTAL * share / STATE))
    memory = Memory.made(1, "lru", TOTAL - slots * STATE, slots, 2048, LARGE_STATES, is_elastic)
    draw = random.Random(1)
    numbers = iter(range(10_000))

    def cut(length: int) -> Text:
        return tuple(draw.randrange(200) for _ in range(length))

    def pick(count: int) -> int:
        return draw.randrange(count) if is_even else min(int(draw.paretovariate(1.0)) - 1, count - 1)

    chats, documents, found = [cut(1) for _ in range(24)], [cut(LONGEST) for _ in range(4)], [0, 0]
    for _ in range(240):
        i = pick(len(chats))
        prompt, output = (chats[i] if len(chats[i]) < LONGEST else cut(1)) + cut(QUESTION), cut(OUTPUT)
        found[0] += answer(memory, next(numbers), prompt, output)
        chats[i] = prompt + output
    for _ in range(48):
        prompt = documents[pick(len(documents))] + cut(QUESTION)
        found[1] += answer(memory, next(numbers), prompt, cut(OUTPUT))
    memory.manager.cache.check(memory.pools.table.held_pages())
    return found, memory


@pytest.mark.parametrize("is_even", [False, True])
def test_no_fixed_split_is_better_in_either_half(is_even: bool) -> None:
    fixed = [hits(share, False, is_even)[0] for share in SHARES]
    (short, long), memory = hits(0.45, True, is_even)
    assert short >= max(each[0] for each in fixed) > 1.3 * min(each[0] for each in fixed)
    assert long >= max(each[1] for each in fixed) > 1.3 * min(each[1] for each in fixed)
    assert memory.pools.split is not None
    assert memory.pools.split.stats.num_moves > 10
