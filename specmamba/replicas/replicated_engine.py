"""An engine whose requests run in other processes, each with a copy of the model."""

from __future__ import annotations

import itertools
import json
import logging
import secrets
import select
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any

from specmamba.cache.prefix.inspection import View
from specmamba.checkpoints.checkpoint import resolve_checkpoint
from specmamba.core import ANYONE, OutputDelta, Owner
from specmamba.engine.engine import Engine
from specmamba.engine.engine_sample import EngineSample
from specmamba.engine.loading import load_tokenizer
from specmamba.engine.scheduler import EngineStats, TenantStats
from specmamba.errors import ConfigError, EngineStoppedError, QueueFullError, ReplicaLostError, RequestError
from specmamba.grammar import CompiledGrammar
from specmamba.parallel.messages import Messages, encoded
from specmamba.replicas.course import Course
from specmamba.replicas.merged_figures import merged, merged_report, merged_sample
from specmamba.replicas.placement import PublishedPrefixes, Texts, choose
from specmamba.replicas.replica_process import ReadyReplica, ReplicaProcess, ReplicaTask, log
from specmamba.replicas.replica_tasks import tasks_of
from specmamba.replicas.wire import SentRequest, dump_view, load_deltas, load_sample, load_stats
from specmamba.sampling_params import SamplingParams
from specmamba.server_config import ServerConfig

logger = logging.getLogger("specmamba")

WAIT_S = 0.001  # for deltas, before new requests are looked for
ANSWER_TIMEOUT_S = 20.0
MAX_SILENCE_S = 20.0  # of a replica with requests, which gives a sign of life twice a second
LOST_TOO_OFTEN = "replica after replica has ended with this request: it is not tried again"


class Replica:
    """One replica as the server sees it."""

    def __init__(self, ready: ReadyReplica) -> None:
        self.link: Messages = ready.link
        self.pid, self.constants = ready.pid, ready.constants
        self.prefixes = PublishedPrefixes()
        self.stats: EngineStats | None = None
        self.sample: EngineSample | None = None
        self.asked_sample: int | None = None  # number of the question that is not answered yet
        self.answers: dict[int, Any] = {}
        self.heard = time.monotonic()


class ReplicatedEngine(Engine):
    """Gives each request to one of several replicas, and passes on what they answer.

    ``step`` computes nothing: it waits a millisecond for deltas. A request whose replica is lost goes on at another
    one, behind what its client has. Not thread-safe, as ``Engine``.
    """

    def __init__(self, config: ServerConfig) -> None:
        """Start ``config.dp_size`` replicas, and wait until all are ready.

        Raises:
            SpecmambaError: one cannot start.
        """
        self._secret, self._numbers = secrets.token_bytes(32), itertools.count(1)
        self._replicas: dict[int, Replica] = {}  # those that are ready
        self._courses: dict[str, Course] = {}
        self._early: deque[OutputDelta] = deque()  # deltas that arrived while something else was waited for
        self._watched: tuple[View, ...] = ()
        self._arrivals: SimpleQueue[ReadyReplica | str] = SimpleQueue()
        self._processes: list[ReplicaProcess] = []
        self._texts = Texts(self._secret)
        self._on_lost: Callable[[Exception], None] | None = None
        self._gone: dict[int, str] = {}  # replicas that cannot be started, and why
        try:
            self._start_all(config, tasks_of(config, self._secret))
        except BaseException:
            for process in self._processes:
                process.abandon()
            raise
        self._latest_stats: EngineStats = merged([r.stats for r in self._replicas.values() if r.stats is not None])
        self.config = config
        self.tokenizer = load_tokenizer(
            resolve_checkpoint(config.model_path, config.revision), config.skip_tokenizer_init
        )
        constants = self._replicas[0].constants
        self.context_length, self.vocab_size = constants["context_length"], constants["vocab_size"]
        self._eos_token_ids = tuple(constants["eos_token_ids"])
        self._description = constants["description"] | {"dp_size": config.dp_size}
        running = int(constants["description"]["max_running_requests"])
        self._most = config.dp_size * (running + config.max_queued_requests)  # requests in all

    @property
    def eos_token_ids(self) -> tuple[int, ...]:  # type: ignore[override]
        """Tokens that end a text."""
        return self._eos_token_ids

    @property
    def draft_algorithm(self) -> str:
        """As ``Engine.draft_algorithm``."""
        return str(self._description["speculative_algorithm"])

    def _start_all(self, config: ServerConfig, tasks: Sequence[ReplicaTask]) -> None:
        """Start the first replica, whose report and measured costs the others share, then the others side by side."""
        for group in (tasks[:1], tasks[1:]):
            self._processes += [ReplicaProcess(task, self._arrivals.put, self._tell_gone) for task in group]
            for _ in group:
                arrival = self._arrivals.get()
                if isinstance(arrival, str):
                    raise ConfigError(f"--dp-size {config.dp_size}: {arrival}")
                self._replicas[arrival.index] = Replica(arrival)
        while any(replica.stats is None for replica in self._replicas.values()):
            self._receive(WAIT_S)
            if len(self._replicas) < config.dp_size:
                raise ConfigError(f"--dp-size {config.dp_size}: a replica has ended after it was ready")
        logger.info("%d replicas are ready: sizes above are of one", config.dp_size)

    def _tell_gone(self, index: int, reason: str) -> None:
        """Note, on the thread of a replica, that it does not come back."""
        text = f"replica {index} did not start: {reason}"
        logger.error("%s", text)
        self._gone[index] = text
        self._arrivals.put(text)
        if self._on_lost is not None and len(self._gone) == len(self._processes):
            self._on_lost(ReplicaLostError(text))

    # ---- requests ----------------------------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        forced_output_ids: Sequence[int] = (),
        extra_key: str | None = None,
        grammar: CompiledGrammar | None = None,
        owner: Owner = ANYONE,
        predicted_ids: Sequence[int] = (),
    ) -> None:
        """As ``Engine.add_request``. What only a replica can refuse ends the request with an error delta."""
        self.check_request(prompt_token_ids, params, forced_output_ids)
        predicted_ids = predicted_ids or self.encode_prediction(params)
        self.check_prediction(predicted_ids, params)
        if request_id in self._courses:
            raise RequestError(f"a request with the id {request_id!r} is running already", "request_id")
        if not self.has_room:
            raise QueueFullError(len(self._courses))
        text = None if grammar is None else grammar.compiled.serialize_json()
        prompt, forced = tuple(prompt_token_ids), tuple(forced_output_ids)
        request = SentRequest(request_id, prompt, params, forced, extra_key, text, owner, tuple(predicted_ids))
        try:
            encoded(request.message())
        except ValueError as error:
            raise RequestError(str(error)) from error
        self._courses[request_id] = Course(request)
        self._place_all()

    def abort(self, request_id: str) -> None:
        """As ``Engine.abort``."""
        course = self._courses.pop(request_id, None)
        if course is not None and course.replica is not None:
            self._tell(course.replica, {"do": "abort", "request_ids": [request_id]})

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._courses or self._early)

    @property
    def has_room(self) -> bool:
        """Whether the queue of a replica takes another request."""
        return len(self._courses) < self._most

    def step(self) -> list[OutputDelta]:
        """Wait for deltas, for a short time. Raises ReplicaLostError: no replica is left, and none comes back."""
        self._receive(0.0 if self._early else WAIT_S)
        self._kill_silent()
        if not self._replicas and len(self._gone) == len(self._processes):
            raise ReplicaLostError(next(iter(self._gone.values())))
        self._place_all()
        deltas = list(self._early)
        self._early.clear()
        return deltas

    def _place_all(self) -> None:
        """Give every request that no replica has to one, if there are any."""
        self._take_arrivals()
        for course in [course for course in self._courses.values() if course.replica is None]:
            while course.replica is None and self._replicas:
                self._place(course)

    def _place(self, course: Course) -> None:
        request = course.request
        published = {index: replica.prefixes for index, replica in self._replicas.items()}
        known = (*request.prompt_token_ids, *course.tokens)
        resumable = self._texts.resumable(known, request.owner.tenant, request.extra_key, published)
        waiting, running = dict.fromkeys(published, 0), dict.fromkeys(published, 0)
        for other in self._courses.values():
            if other.replica is not None:
                waiting[other.replica] += other.num_uncached
                running[other.replica] += 1
        index = choose(len(known), resumable, waiting, running)
        if self._tell(index, course.rest().message()):
            course.placed(index, resumable[index])

    # ---- replicas ----------------------------------------------------------------------------------------------------

    def _tell(self, index: int, message: Mapping[str, Any]) -> bool:
        """Send a message to a replica; False: it is lost."""
        replica = self._replicas.get(index)
        if replica is None:
            return False
        try:
            replica.link.send(dict(message))
        except OSError:
            self._lose(index)
            return False
        return True

    def _take_arrivals(self) -> None:
        with suppress(Empty):
            while True:
                arrival = self._arrivals.get_nowait()
                if isinstance(arrival, str):
                    continue
                self._lose(arrival.index)  # what the new one follows
                self._replicas[arrival.index] = Replica(arrival)
                logger.warning("replica %d is ready again", arrival.index)
                self._tell(arrival.index, {"do": "watch", "views": [dump_view(view) for view in self._watched]})

    def _receive(self, wait_s: float) -> None:
        """Take what has arrived from all replicas, and wait for the first if there is nothing."""
        poll, by_descriptor = select.poll(), dict[int, int]()
        for index, replica in self._replicas.items():
            by_descriptor[replica.link.fileno()] = index
            poll.register(replica.link.fileno(), select.POLLIN)
        for descriptor, _ in poll.poll(wait_s * 1000):
            index = by_descriptor[descriptor]
            replica = self._replicas[index]
            replica.heard = time.monotonic()
            try:
                for message in replica.link.arrived():
                    self._take(index, replica, message)
            except (OSError, EOFError, ValueError):
                self._lose(index)

    def _take(self, index: int, replica: Replica, message: Mapping[str, Any]) -> None:
        if "deltas" in message:
            for delta in load_deltas(message["deltas"]):
                self._take_delta(delta)
        elif "stats" in message:
            replica.stats = load_stats(message["stats"])
            replica.prefixes.update(map(_pair, message["left"]), map(_pair, message["gone"]))
        elif "refused" in message:
            course = self._courses.pop(message["refused"], None)
            if course is not None:
                self._early.append(course.last_delta("error", message["message"], message["code"]))
        elif "log" in message:
            log(index, message)
        elif "answer" in message and message["answer"] == replica.asked_sample:
            replica.sample, replica.asked_sample = load_sample(message["value"]), None
        elif "answer" in message:
            replica.answers[message["answer"]] = message["value"]

    def _take_delta(self, delta: OutputDelta) -> None:
        course = self._courses.get(delta.request_id)
        if course is None:
            return  # it was aborted
        added = course.take(delta)
        if delta.finish_reason is not None:
            del self._courses[delta.request_id]
        if added is not None:
            self._early.append(added)

    def _lose(self, index: int) -> None:
        """Forget a replica; its requests wait for another one."""
        replica = self._replicas.pop(index, None)
        if replica is None:
            return
        replica.link.close()
        self._processes[index].kill(replica.pid)
        moved = [course for course in self._courses.values() if course.replica == index]
        logger.error("replica %d (process %d) is lost: %d requests go on at others", index, replica.pid, len(moved))
        for course in moved:
            if not course.moved():
                del self._courses[course.request.request_id]
                self._early.append(course.last_delta("error", LOST_TOO_OFTEN))

    def _kill_silent(self) -> None:
        """Give up replicas that stand still while requests wait for them."""
        limit = time.monotonic() - MAX_SILENCE_S
        busy = {course.replica for course in self._courses.values()}
        for index in [i for i, replica in self._replicas.items() if i in busy and replica.heard < limit]:
            logger.error("replica %d gave no sign of life for %g s", index, MAX_SILENCE_S)
            self._lose(index)

    def _ask_all(self, question: Mapping[str, Any]) -> list[Any]:
        """The answers of all replicas. Raises EngineStoppedError: one takes too long, or none is ready."""
        number = next(self._numbers)
        asked = {
            i: self._replicas[i]
            for i in list(self._replicas)
            if self._tell(i, {"do": "ask", "number": number, **question})
        }
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while any(self._replicas.get(i) is replica and number not in replica.answers for i, replica in asked.items()):
            if time.monotonic() > deadline:
                raise EngineStoppedError(f"a replica has been in one step for more than {ANSWER_TIMEOUT_S:g} s")
            self._receive(WAIT_S)
        found = [asked[i].answers.pop(number) for i in sorted(asked) if number in asked[i].answers]
        if not found:
            raise EngineStoppedError("no replica is ready: try again later")
        return found

    # ---- figures -----------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Numbers of all replicas, a quarter of a second old at the most; requests that wait here count as waiting."""
        self._receive(0.0)
        found = merged([self._replicas[i].stats for i in sorted(self._replicas)])
        if found is not None:
            self._latest_stats = found
        num_waiting = sum(course.replica is None for course in self._courses.values())
        return replace(self._latest_stats, num_waiting=self._latest_stats.num_waiting + num_waiting)

    def stats_of(self, tenant: str | None) -> TenantStats:
        """Numbers of one tenant's requests."""
        view = View(tenant)
        question = {"question": "sample", "views": [dump_view(view)], "max_nodes": 0}
        return merged_sample([load_sample(value) for value in self._ask_all(question)]).tenants[view]

    def sample(self, views: Collection[View], max_nodes: int) -> EngineSample:
        """As ``Engine.sample``, of what the replicas answered to the last call: nothing waits for their steps."""
        self._receive(0.0)
        question = {"do": "ask", "question": "sample", "views": [dump_view(v) for v in views], "max_nodes": max_nodes}
        for index, replica in list(self._replicas.items()):
            if replica.asked_sample is None:
                replica.asked_sample = next(self._numbers)
                self._tell(index, {**question, "number": replica.asked_sample})
        samples = [r.sample for _, r in sorted(self._replicas.items()) if r.sample is not None]
        for replica in self._replicas.values():
            replica.sample = None
        return merged_sample(samples) if samples else EngineSample(self.stats(), {}, (), 0, 0, {})

    def watch_drafts(self, views: Sequence[View]) -> None:
        """As ``Engine.watch_drafts``."""
        self._watched = tuple(views)
        for index in list(self._replicas):
            self._tell(index, {"do": "watch", "views": [dump_view(view) for view in views]})

    def cache_report(self, view: View) -> dict[str, object]:
        """As ``Engine.cache_report``: sums over all replicas."""
        return merged_report(self._ask_all({"question": "report", "view": dump_view(view)}))

    def cache_text(self, view: View) -> str:
        """As ``Engine.cache_text``, one replica behind the other."""
        texts = self._ask_all({"question": "text", "view": dump_view(view)})
        return "\n".join(f"replica {number}\n{text}" for number, text in enumerate(texts))

    def flush_cache(self) -> int:
        """As ``Engine.flush_cache``, of all replicas."""
        return sum(self._ask_all({"question": "flush"}))

    def describe(self) -> dict[str, object]:
        """As ``Engine.describe``, of the first replica, and ``dp_size``."""
        found: dict[str, object] = json.loads(json.dumps(self._description))
        return found

    def when_lost(self, callback: Callable[[Exception], None]) -> None:
        """Call a function, from another thread, when no replica is left and none can be started."""
        self._on_lost = callback

    def close(self) -> None:
        """End all replicas."""
        for index in list(self._replicas):
            self._tell(index, {"do": "close"})
        for process in self._processes:
            process.close()
        for replica in self._replicas.values():
            replica.link.close()
        self._replicas.clear()


def _pair(value: Sequence[Any]) -> tuple[int, str]:
    length, digest = value
    return length, digest
