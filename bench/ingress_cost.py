"""What the process in front of replicas costs: processor time by request and by token, and time between two tokens.

Of the processor time, what the event loop takes for HTTP is told apart where it has a thread of its own: one server,
whose engine is in the same process, has that too.

Both hold where other programs use the machine too. Processor time is that of the process, whatever else runs; and every
streamed request is sent to one server and to each kind of replicas in turn, so that they meet the same disturbances.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specmamba.bench.serving.events import events_of
from specmamba.measure.command import in_turns

if TYPE_CHECKING:
    import httpx

_PROCESS_CLOCK = 2  # of a process, all of its threads, in the kernel's numbers of clocks
_SETTLE_S = 0.01  # in which the server ends what follows the last event
# Ray names the processes of its actors: the proxy that takes connections, and the deployment behind it
RAY_PROCESSES = (b"ray::ProxyActor", b"ray::ServeReplica")


@dataclass(frozen=True, slots=True)
class Front:
    """A server, and the processes between its clients and its engines."""

    http: httpx.AsyncClient
    processes: Sequence[int]  # none: clients are connected with the process of the engine
    loop: int | None = None  # the process whose main thread is the event loop; None: another thread is


def processor_seconds(processes: Sequence[int]) -> float:
    """Processor time of processes since they began. Raises OSError: one has ended."""
    return sum(time.clock_gettime(~process << 3 | _PROCESS_CLOCK) for process in processes)


def loop_seconds(process: int) -> float:
    """Processor time of the main thread of a process since that began. Raises OSError: it has ended."""
    return int(Path(f"/proc/{process}/task/{process}/schedstat").read_text().split()[0]) / 1e9


def ray_processes() -> list[int]:
    """The processes of Ray Serve on this machine that every token passes."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                name = (entry / "cmdline").read_bytes()
            except OSError:  # it has just ended
                continue
            if name.startswith(RAY_PROCESSES):
                found.append(int(entry.name))
    return found


async def costs(
    fronts: Mapping[str, Front], prompt: str, num_requests: int, num_tokens: int, num_clients: int
) -> dict[str, dict[str, float]]:
    """One round: short and long requests of one client, and long ones of several, to all servers in turn.

    Args:
        fronts: by their names; each has the prompt in its cache after the first request.
        prompt: of all requests.
        num_requests: of each kind, to each server.
        num_tokens: of a long answer; a short one has one token.
        num_clients: that ask at the same time, in the last kind.

    Returns:
        For each server: ``gap_us``, the median time between two tokens of a long answer; where it has processes in
        front of its engines ``request_us``, their processor time for a short request, ``token_us``, for each further
        token, and ``loaded_token_us``, for a token where several clients ask, their requests included; and where the
        event loop is known ``loop_request_us``, ``loop_token_us`` and ``loop_loaded_token_us``, likewise of that.
    """
    short, long, loaded = ({name: list[_Spent]() for name in fronts} for _ in range(3))
    for number in range(num_requests + 1):  # the first one fills caches
        for name in in_turns(list(fronts), number):
            one = await _spent(fronts[name], prompt, 1, 1)
            many = await _spent(fronts[name], prompt, num_tokens, 1)
            if number:
                short[name].append(one)
                long[name].append(many)
    for number in range(num_requests):
        for name in in_turns(list(fronts), number):
            loaded[name].append(await _spent(fronts[name], prompt, num_tokens, num_clients))
    found = {}
    for name, front in fronts.items():
        gaps = [gap for spent in long[name] for gap in spent.gaps]
        found[name] = {"gap_us": 1e6 * statistics.median(gaps)} if gaps else {}  # answers of one event
        for part in _clocks(front):
            one_s, many_s, loaded_s = (
                statistics.fmean(spent.by_part[part] for spent in kind[name]) for kind in (short, long, loaded)
            )
            found[name] |= {
                f"{part}request_us": 1e6 * one_s,
                f"{part}token_us": 1e6 * (many_s - one_s) / (num_tokens - 1),
                f"{part}loaded_token_us": 1e6 * loaded_s / (num_tokens * num_clients),
            }
    return found


@dataclass(frozen=True, slots=True)
class _Spent:
    """What some requests at the same time took."""

    by_part: Mapping[str, float]  # processor time: of the processes in front, and of the event loop
    gaps: Sequence[float]  # the time by token of each answer


async def _spent(front: Front, prompt: str, num_tokens: int, num_clients: int) -> _Spent:
    before = _clocks(front)
    times = await asyncio.gather(*(_ask(front.http, prompt, num_tokens) for _ in range(num_clients)))
    await asyncio.sleep(_SETTLE_S)
    spent = {part: now - before[part] for part, now in _clocks(front).items()}
    return _Spent(spent, [each for each in times if each is not None])


def _clocks(front: Front) -> dict[str, float]:
    """Processor time by the prefix of its figures, of those parts that there are."""
    found = {"": processor_seconds(front.processes)} if front.processes else {}
    return found if front.loop is None else found | {"loop_": loop_seconds(front.loop)}


async def _ask(http: httpx.AsyncClient, prompt: str, num_tokens: int) -> float | None:
    """Stream an answer. Returns the time by token behind the first event; None: there was one event."""
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, **options}
    times = list[float]()
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for event in events_of(answer):
            if event["choices"]:
                times.append(time.perf_counter())
    return (times[-1] - times[0]) / (num_tokens - 1) if len(times) > 1 else None
