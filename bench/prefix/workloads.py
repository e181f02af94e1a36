"""Requests that share prefixes as users' requests do.

A **session** asks for one or more texts at a time, gets the outputs, and goes on from there; a **workload** is a set of
sessions, each with a weight that says how often it is its turn. All draws come from the seed, none depends on what the
model answers or on which session was first.

- ``shared``: users who all talk to one long system prompt, one question each.
- ``chat``: conversations, interleaved. A turn's prompt is all that was said, the model's real output included.
- ``branch``: long documents with many questions each, and trees of thought: of every level's continuations some are
  kept, and each of these gets several different continuations again.
- ``agent``: agents with the same instructions, whose history grows by their output and by tool outputs, most of them
  short, some long.
- ``pressure``: all of these at once and again and again, some much more often than others (the r-th most popular one
  1 / r times as often as the first, as in Zipf's law), on memory that does not hold all.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from specmamba.bench.prefix.texts import TextSource

Kind = Literal["user", "turn", "question", "thought", "tool"]
Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: its prompt, and what kind of use it comes from."""

    kind: Kind
    prompt: Tokens


Session = Generator[list[Ask], list[Tokens], None]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of all workloads; lengths are in tokens."""

    turn_tokens: int
    shared_tokens: int
    num_users: int
    num_chats: int
    num_turns: int
    num_documents: int
    document_tokens: int
    num_questions: int
    thought_depth: int
    thought_width: int
    thoughts_kept: int
    num_agents: int
    agent_steps: int
    tool_tokens: int
    pressure_requests: int


@dataclass(slots=True)
class Workload:
    """Sessions and their weights, to be run once; it ends after ``max_requests``, even if sessions have more to ask."""

    name: str
    sessions: list[Session]
    weights: list[float]
    max_requests: int | None = None

    def waves(self, size: int, draw: random.Random) -> Generator[list[Ask], list[Tokens], None]:
        """Requests in waves of ``size`` or a few more; send the outputs of one to get the next."""
        pending = {i: next(session) for i, session in enumerate(self.sessions)}
        num_asked = 0
        while pending and (self.max_requests is None or num_asked < self.max_requests):
            chosen: list[int] = []
            for i in self._by_turn(list(pending), draw):
                if sum(len(pending[j]) for j in chosen) >= size:
                    break
                chosen.append(i)
            wave = [ask for i in chosen for ask in pending[i]]
            num_asked += len(wave)
            outputs = iter((yield wave))
            for i in chosen:
                _go_on(pending, i, self.sessions[i], [next(outputs) for _ in pending[i]])

    def _by_turn(self, waiting: Sequence[int], draw: random.Random) -> list[int]:
        """Sessions in random order, heavy ones more often first (Efraimidis and Spirakis 2006, algorithm A-Res)."""
        return sorted(waiting, key=lambda i: draw.random() ** (1 / self.weights[i]), reverse=True)


def _go_on(pending: dict[int, list[Ask]], number: int, session: Session, outputs: list[Tokens]) -> None:
    try:
        pending[number] = session.send(outputs)
    except StopIteration:
        del pending[number]


def make_workload(name: str, source: TextSource, sizes: Sizes, seed: int) -> Workload:
    """Make one of ``WORKLOADS``: the same arguments give the same requests for the same outputs."""
    build, draw = WORKLOADS[name], random.Random(f"{seed}/{name}")
    sessions, weights = build(Writer(source, draw), sizes)
    return Workload(name, sessions, weights, sizes.pressure_requests if name == "pressure" else None)


@dataclass(frozen=True, slots=True)
class Writer:
    """Cuts texts from a source, with random numbers of its own."""

    source: TextSource
    draw: random.Random

    def begin(self, length: int) -> Tokens:
        """The beginning of a prompt."""
        return self.source.start + self.cut(length)

    def cut(self, length: int) -> Tokens:
        return self.source.cut(length, self.draw)

    def vary(self, length: int) -> Tokens:
        return self.source.vary(length, self.draw)

    def fork(self) -> Writer:
        """A writer with its own random numbers, which do not depend on the order in which writers are used."""
        return Writer(self.source, random.Random(self.draw.getrandbits(64)))


def user(writer: Writer, system: Tokens, length: int) -> Session:
    """One question to a system prompt."""
    yield [Ask("user", system + writer.vary(length))]


def chat(writer: Writer, system: Tokens, num_turns: int, length: int) -> Session:
    """A conversation."""
    history = system + writer.vary(length)
    for _ in range(num_turns):
        (answer,) = yield [Ask("turn", history)]
        history += answer + writer.vary(length)


def questions(writer: Writer, document: Tokens, count: int, length: int) -> Session:
    """Questions about a document, one after the other."""
    for _ in range(count):
        yield [Ask("question", document + writer.vary(length))]


def thoughts(writer: Writer, problem: Tokens, sizes: Sizes) -> Session:
    """A tree of thoughts: ``thought_width`` continuations of each text that was kept, each with a cue of its own."""
    kept, cue = [problem], max(1, sizes.turn_tokens // 4)
    for _ in range(sizes.thought_depth):
        prompts = [text + writer.cut(cue) for text in kept for _ in range(sizes.thought_width)]
        answers = yield [Ask("thought", prompt) for prompt in prompts]
        grown = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        kept = writer.draw.sample(grown, min(sizes.thoughts_kept, len(grown)))


def agent(writer: Writer, instructions: Tokens, task_tokens: int, num_steps: int, tool_tokens: int) -> Session:
    """An agent: instructions, a task, and a history of its own output and of what its tools say."""
    history = instructions + writer.vary(task_tokens)
    for _ in range(num_steps):
        (answer,) = yield [Ask("tool", history)]
        history += answer + writer.vary(tool_tokens)


Plan = tuple[list[Session], list[float]]


def _alike(sessions: Sequence[Session]) -> Plan:
    return list(sessions), [1.0] * len(sessions)


def _shared(writer: Writer, sizes: Sizes) -> Plan:
    system = writer.begin(sizes.shared_tokens)
    return _alike([user(writer.fork(), system, sizes.turn_tokens) for _ in range(sizes.num_users)])


def _chat(writer: Writer, sizes: Sizes) -> Plan:
    return _alike([_new_chat(writer.fork(), sizes) for _ in range(sizes.num_chats)])


def _new_chat(writer: Writer, sizes: Sizes) -> Session:
    return chat(writer, writer.begin(sizes.turn_tokens), sizes.num_turns, sizes.turn_tokens)


def _branch(writer: Writer, sizes: Sizes) -> Plan:
    documents = [writer.begin(sizes.document_tokens) for _ in range(sizes.num_documents)]
    asked = [questions(writer.fork(), each, sizes.num_questions, sizes.turn_tokens) for each in documents]
    trees = [_new_thoughts(writer.fork(), sizes) for _ in range(sizes.num_documents)]
    return _alike([*asked, *trees])


def _new_thoughts(writer: Writer, sizes: Sizes) -> Session:
    return thoughts(writer, writer.begin(sizes.shared_tokens), sizes)


def _agent(writer: Writer, sizes: Sizes) -> Plan:
    instructions = writer.begin(sizes.shared_tokens)
    return _alike([_new_agent(writer.fork(), instructions, sizes) for _ in range(sizes.num_agents)])


def _new_agent(writer: Writer, instructions: Tokens, sizes: Sizes) -> Session:
    return agent(writer, instructions, sizes.turn_tokens, sizes.agent_steps, sizes.tool_tokens)


def _pressure(writer: Writer, sizes: Sizes) -> Plan:
    """All kinds of sessions: twice as many as in the other workloads, four times as many documents, of many lengths."""
    systems = [writer.begin(sizes.shared_tokens) for _ in range(2)]
    documents = [writer.source.start + writer.vary(sizes.document_tokens // 2) for _ in range(4 * sizes.num_documents)]
    count = sizes.pressure_requests
    sessions = [questions(writer.fork(), each, count, sizes.turn_tokens) for each in documents]
    sessions += [_again(writer.fork(), partial(_new_chat, sizes=sizes)) for _ in range(2 * sizes.num_chats)]
    for system in systems:
        sessions.append(_again(writer.fork(), partial(user, system=system, length=sizes.turn_tokens)))
        new_agent = partial(_new_agent, instructions=system, sizes=sizes)
        sessions += [_again(writer.fork(), new_agent) for _ in range(sizes.num_agents)]
    sessions += [_again(writer.fork(), partial(_new_thoughts, sizes=sizes)) for _ in range(sizes.num_documents)]
    ranks = list(range(1, len(sessions) + 1))
    writer.draw.shuffle(ranks)
    return sessions, [1 / rank for rank in ranks]


def _again(writer: Writer, new: Callable[[Writer], Session]) -> Session:
    """One session after the other, without end."""
    while True:
        yield from new(writer.fork())


WORKLOADS: dict[str, Callable[[Writer, Sizes], Plan]] = {
    "shared": _shared,
    "chat": _chat,
    "branch": _branch,
    "agent": _agent,
    "pressure": _pressure,
}
