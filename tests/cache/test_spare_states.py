"""States where no text has parted yet: where they are left, how many of them stay, and what they spare."""

from __future__ import annotations

import itertools

import pytest

from specmamba.cache.prefix.state_places import is_tracked, spare_ends
from specmamba.engine.cache_manager import SPARE_SHARE
from tests.cache.test_prefix_exact import Tokens, check_pools, greedy, new_llm


@pytest.mark.parametrize(
    ("start", "end", "most", "chunk_size", "ends"),
    [
        (0, 1999, 3, 512, {1743, 1871, 1935}),
        (0, 1999, 2, 512, {1743, 1871}),
        (0, 1999, 3, 8192, {1500, 1750, 1875}),
        (1500, 1999, 3, 512, {1875}),
        (0, 255, 3, 512, set()),  # short
        (0, 1999, 3, 64, set()),  # chunks are
        (0, 1999, 0, 512, set()),
    ],
)
def test_where_spare_states_are_left(start: int, end: int, most: int, chunk_size: int, ends: set[int]) -> None:
    assert spare_ends(start, end, most, chunk_size) == ends
    # who parts at distance d computes less than 2 d again, as far as the distances reach
    distances = sorted(end - position for position in ends)
    assert all(2 * nearer <= further + 1 for nearer, further in itertools.pairwise(distances))


def test_a_long_output_leaves_states_at_growing_distances() -> None:
    counts = [count for count in range(1, 129) if is_tracked(count)]
    assert counts[:15] == list(range(1, 16))
    assert counts[15:] == [*range(16, 32, 2), *range(32, 64, 4), *range(64, 129, 8)]


def test_the_second_text_goes_on_from_a_spare_state(prompts: list[Tokens]) -> None:
    """Spare states take no more than their share of the slots, and one that was of use is like the others."""
    text = sum(prompts, ())
    first, others = text[:301], [(*text[i : i + 60], *text[400:641]) for i in range(1, 8)]
    with new_llm("no_buffer", "chain", 1, 512, max_mamba_cache_size=8, max_total_tokens=4000) as llm:
        cache = llm.engine.cache_manager.cache
        cold = llm.generate(first, greedy())[0]
        assert [node.end for node in cache.state_nodes() if node.is_spare] == [225]
        second = llm.generate(first[:250] + text[700:740], greedy())[0]
        assert (cold.num_cached_tokens, second.num_cached_tokens) == (0, 225)
        assert not any(node.is_spare for node in cache.state_nodes())
        for prompt in others:
            llm.generate(prompt, greedy(2))
            assert len([node for node in cache.state_nodes() if node.is_spare]) == cache.num_spare <= SPARE_SHARE * 8
        check_pools(llm)
        assert cache.num_spare
        cache.evict_states(8)
        assert cache.num_spare == 0  # what is gone takes no place of later ones
    with new_llm("no_buffer", "chain", 1, 512, disable_radix_cache=True, max_mamba_cache_size=None) as llm:
        assert llm.generate(second.prompt_token_ids, greedy())[0].token_ids == second.token_ids
