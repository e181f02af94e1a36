"""Requests to an OpenAI-compatible server: one streamed completion, and many of them at once.

**Closed loop**: a fixed number of clients, each of which sends its next request when the last one has been answered; a
slow server gets fewer requests per second. The duration includes the last answer, and so the drain, in which fewer and
fewer clients have a request. **Open loop**: requests are sent at the times of a Poisson process, whether or not the
server keeps up, as by independent users; the time of a request counts from when it should have been sent.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import httpx

PATH = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer. Times are seconds since the request was due."""

    chunk_times: tuple[float, ...]  # of the events with text
    end_s: float
    text: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_tokens: int
    num_accepted_tokens: int | None  # drafts among the tokens; None: the server does not say


@dataclass(frozen=True, slots=True)
class Failure:
    """A request without a complete answer. ``kind`` is a short class of failures, by which they are counted."""

    kind: str
    message: str
    status: int | None = None  # HTTP status, if that was the reason


Outcome = Answer | Failure
Send = Callable[[int, float], Awaitable[Outcome]]  # request number, time.perf_counter() when it is due


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests to send. Request i has the same prompt and seed at every level of load."""

    model: str
    prompts: Sequence[str]
    max_tokens: int
    temperature: float
    seed: int
    ignore_eos: bool

    def body(self, number: int) -> dict[str, Any]:
        """The JSON of a request. The extension ``ignore_eos`` is only sent when it is asked for."""
        extension = {"ignore_eos": True} if self.ignore_eos else {}
        return {
            "model": self.model,
            "prompt": self.prompts[number % len(self.prompts)],
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed + number,
            "stream": True,
            "stream_options": {"include_usage": True},
            **extension,
        }


@dataclass(frozen=True, slots=True)
class Run:
    """All requests of one level of load."""

    outcomes: tuple[Outcome, ...]  # in order of arrival
    sent_times: tuple[float, ...]  # seconds since the first one was due, in order
    duration_s: float


def poisson_arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Draw ``count`` arrival times of a Poisson process with ``rate`` arrivals per second; the first one is at 0."""
    generator = random.Random(seed)
    return list(accumulate((generator.expovariate(rate) for _ in range(count - 1)), initial=0.0))


async def closed_loop(send: Send, num_clients: int, count: int) -> Run:
    """Send ``count`` requests from ``num_clients`` clients, each of which waits for its answer."""
    began = time.perf_counter()
    outcomes: list[Outcome] = []
    sent: list[float] = []
    numbers = iter(range(count))

    async def client() -> None:
        for number in numbers:
            now = time.perf_counter()
            sent.append(now - began)
            outcomes.append(await send(number, now))

    async with asyncio.TaskGroup() as clients:
        for _ in range(num_clients):
            clients.create_task(client())
    return Run(tuple(outcomes), tuple(sent), time.perf_counter() - began)


async def open_loop(send: Send, arrivals: Sequence[float]) -> Run:
    """Send one request at each of the ascending times ``arrivals``, in seconds from now."""
    began = time.perf_counter()
    outcomes: list[Outcome] = []
    sent: list[float] = []

    async def user(number: int, due: float) -> None:
        sent.append(time.perf_counter() - began)
        outcomes.append(await send(number, due))

    async with asyncio.TaskGroup() as users:
        for number, arrival in enumerate(arrivals):
            await asyncio.sleep(began + arrival - time.perf_counter())
            users.create_task(user(number, began + arrival))
    return Run(tuple(outcomes), tuple(sent), time.perf_counter() - began)


async def complete(client: httpx.AsyncClient, body: dict[str, Any], due: float) -> Outcome:
    """Send one request and read its answer to the end. Errors are returned as a ``Failure``, never raised."""
    try:
        async with client.stream("POST", PATH, json=body) as response:
            if response.status_code != httpx.codes.OK:
                await response.aread()
                return failure_of(response)
            return await _read_stream(response, due)
    except httpx.TimeoutException as error:
        return Failure("timeout", f"{type(error).__name__}: the server kept silent")
    except httpx.RequestError as error:
        return Failure("connection", f"{type(error).__name__}: {error}")
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        return Failure("protocol", f"the answer is not an OpenAI completion: {type(error).__name__}: {error}")


def failure_of(response: httpx.Response) -> Failure:
    """The failure that an answer other than 200 describes, in OpenAI's form or any other."""
    try:
        message = _error_message(response.json())
    except (ValueError, RecursionError):
        message = " ".join(response.text.split())
    status = response.status_code
    return Failure(f"HTTP {status}", message[:300] or response.reason_phrase, status)


def _error_message(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)


async def _read_stream(response: httpx.Response, due: float) -> Outcome:
    """Read server-sent events: chunks with text, one with the usage (and no choice), ``[DONE]``."""
    times: list[float] = []
    text: list[str] = []
    usage: dict[str, Any] | None = None
    async for line in response.aiter_lines():
        now = time.perf_counter() - due
        data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
        if data == "[DONE]":
            break
        if not data:
            continue
        event = json.loads(data)
        if "error" in event:
            return Failure("error in the stream", _error_message(event))
        piece = "".join(choice["text"] for choice in event["choices"])
        if piece:
            times.append(now)
            text.append(piece)
        usage = event.get("usage") or usage
    else:
        return Failure("stream cut off", "the stream ended without [DONE]")
    if usage is None:
        return Failure("no usage", "the stream has no usage, so its tokens cannot be counted")
    return _answer(times, time.perf_counter() - due, "".join(text), usage)


def _answer(times: list[float], end_s: float, text: str, usage: dict[str, Any]) -> Answer:
    if times and int(usage["completion_tokens"]) < 1:
        raise ValueError("text came, but the usage counts no tokens")
    prompt_details = usage.get("prompt_tokens_details") or {}
    accepted = (usage.get("completion_tokens_details") or {}).get("accepted_prediction_tokens")
    return Answer(
        chunk_times=tuple(times),
        end_s=end_s,
        text=text,
        num_prompt_tokens=int(usage["prompt_tokens"]),
        num_cached_tokens=int(prompt_details.get("cached_tokens") or 0),
        num_tokens=int(usage["completion_tokens"]),
        num_accepted_tokens=None if accepted is None else int(accepted),
    )
