"""All rounds of the handoff benchmark: first the prompts that are handed over, then the streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

from specmamba.bench.handoffs.figures import ARRIVALS, HELD, QUIET, Figures, handoff_figures, traffic_figures
from specmamba.bench.handoffs.options import HandoffsBenchConfig
from specmamba.bench.handoffs.servers import APART, ONE, Counted, Way
from specmamba.bench.handoffs.traffic import Clients, Stream, send_traffic
from specmamba.errors import SpecmambaError
from specmamba.measure.command import in_turns
from specmamba.measure.prompts import bundled_texts
from specmamba.measure.report import progress_bar

STEP = 1009  # tokens from where one prompt begins in the text to where the next does


@dataclass(frozen=True, slots=True)
class Played:
    """Figures of all rounds that count."""

    handoffs: dict[int, list[Figures]]  # by tokens of the prompt
    streams: dict[tuple[str, str], list[Figures]]  # by way, and whether prompts arrive


class Prompts:
    """Stretches of one text, each of which begins elsewhere, so that hardly any tokens are shared."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens, self._number = list(tokens), 0

    def next(self, length: int) -> list[int]:
        """A new prompt of so many tokens."""
        self._number += 1
        begin = self._number * STEP % len(self._tokens)
        text = self._tokens[begin:] + self._tokens[:begin]
        return (text * (length // len(text) + 1))[:length]


async def play(config: HandoffsBenchConfig, one: Way, apart: Way) -> Played:
    """Run all rounds. In the first one steps are recorded: it does not count.

    Raises:
        SpecmambaError: as ``Clients.ask`` and ``Way.handed_over``; or the streams are too short to be measured.
    """
    text = "\n\n".join(each.text for each in bundled_texts())
    prompts = Prompts(one.answering.post("/tokenize", {"prompt": text})["tokens"])
    cells = list(product((one, apart), (QUIET, ARRIVALS)))
    played = Played({length: [] for length in config.prompt_tokens}, {(way.name, load): [] for way, load in cells})
    total = (config.rounds + 1) * (len(config.prompt_tokens) + len(cells))
    with progress_bar("rounds of all servers", total) as advance:
        for number in range(config.rounds + 1):
            for length in config.prompt_tokens:
                handoff = await _hand_over(one, apart, partial(prompts.next, length), number)
                if number:
                    played.handoffs[length].append(handoff)
                advance()
            for way, load in in_turns(cells, number):
                figures = await _run_streams(config, way, prompts, has_arrivals=load == ARRIVALS)
                if number:
                    played.streams[way.name, load].append(figures)
                advance()
    return played


async def _hand_over(one: Way, apart: Way, new_prompt: Callable[[], list[int]], number: int) -> Figures:
    """Send a prompt in each of the ways."""
    first_s, counted = dict[str, float](), list[Counted]()
    for name, way in in_turns([(ONE, one), (APART, apart), (HELD, apart)], number):
        way.flush()
        before = [] if way.prefill is None else way.counted()
        async with Clients(way) as clients:
            first_s[name] = (await clients.ask(new_prompt(), 1, is_held=name == HELD)).first_s
        added = way.handed_over(before, 1) if before else []
        counted = added if name == HELD else counted
    prefill, decode = counted
    return handoff_figures(first_s, prefill, decode)


async def _run_streams(config: HandoffsBenchConfig, way: Way, prompts: Prompts, *, has_arrivals: bool) -> Figures:
    """Run the streams in one way."""
    way.flush()
    before = [] if way.prefill is None else way.counted()
    texts = [prompts.next(config.stream_prompt_tokens) for _ in range(config.streams)]
    async with Clients(way) as clients:

        async def arrive(_: int) -> Stream:
            return await clients.ask(prompts.next(config.arrival_tokens), 1)

        arrival = arrive if has_arrivals else None
        traffic = await send_traffic(clients, texts, config.stream_tokens, arrival, config.arrival_interval)
    if before:
        way.handed_over(before, len(traffic.streams) + len(traffic.arrivals))
    if has_arrivals and not traffic.arrivals:
        raise SpecmambaError("streams end before a long prompt arrives: raise --stream-tokens")
    return traffic_figures(traffic)
