"""An engine whose requests run in other processes, each with a copy of the model."""

from __future__ import annotations

import itertools
import logging
import secrets
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from specmamba.cache.prefix.inspection import View
from specmamba.checkpoints.checkpoint import resolve_checkpoint
from specmamba.core import ANYONE, Handoff, OutputDelta, Owner
from specmamba.engine.base_engine import BaseEngine
from specmamba.engine.channels import SentRequest
from specmamba.engine.engine_sample import EngineSample
from specmamba.engine.loading import load_tokenizer
from specmamba.engine.scheduler import EngineStats, TenantStats
from specmamba.errors import QueueFullError, RequestError
from specmamba.grammar import CompiledGrammar
from specmamba.replicas.course import Course, work_of
from specmamba.replicas.fleet_control import FleetControl
from specmamba.replicas.merged_figures import merged, merged_report, merged_sample
from specmamba.replicas.placement import Texts, Work, choose, own_cost
from specmamba.replicas.replica_fleet import ReplicaFleet
from specmamba.replicas.replica_launch import ChildReplica, Launch, ReplicaTask
from specmamba.replicas.replica_links import WAIT_S, ReplicaLinks
from specmamba.replicas.replica_tasks import policy_of, tasks_of
from specmamba.replicas.wire import dump_view, load_deltas, load_tenant_stats
from specmamba.sampling_params import SamplingParams
from specmamba.server_config import ServerConfig

logger = logging.getLogger("specmamba")

LOST_TOO_OFTEN = "replica after replica has ended with this request: it is not tried again"


class ReplicatedEngine(BaseEngine):
    """Gives each request to one of several replicas, and passes on what they answer.

    ``step`` computes nothing: it waits for deltas, until something else is to be done. A request whose replica is lost
    goes on at another one, behind what its client has; where none has room, it waits.
    Not thread-safe, as ``BaseEngine``.
    """

    def __init__(
        self,
        config: ServerConfig,
        plan: Callable[[ServerConfig, bytes], list[ReplicaTask]] = tasks_of,
        launch: Launch = ChildReplica,
    ) -> None:
        """Start the first replicas (``config.first_replicas``), and wait until all are ready.

        Args:
            config: the server's flags.
            plan: what each replica that there can be is started with; the second argument is the key of the hashes of
                prefixes.
            launch: starts a replica; by default as a process of this machine.

        Raises:
            SpecmambaError: one cannot start.
        """
        secret = secrets.token_bytes(32)
        self._texts = Texts(secret)
        self._courses: dict[str, Course] = {}  # of requests that have not ended, by id
        self._deltas: deque[OutputDelta] = deque()  # that the next step returns
        self._watched: tuple[View, ...] = ()
        self._turns = itertools.count()
        self.tokenizer = load_tokenizer(
            resolve_checkpoint(config.model_path, config.revision), config.skip_tokenizer_init
        )
        self._fleet = fleet = ReplicaFleet(plan(config, secret), launch)
        self._links = links = ReplicaLinks(fleet, config.first_replicas, self._take, self._move_all, self._tell_views)
        self.replicas = self._control = FleetControl(fleet, links, self._work, policy_of(config))
        logger.info("%d replicas are ready; sizes are of one", len(links.ready))
        self._latest_stats: EngineStats = merged([r.stats for r in links.ready.values() if r.stats is not None])
        self.config: ServerConfig = config
        constants = links.ready[0].constants
        self.context_length, self.vocab_size = constants["context_length"], constants["vocab_size"]
        self.eos_token_ids = tuple(constants["eos_token_ids"])
        self._description = constants["description"] | {"dp_size": config.first_replicas}
        self._most_running = int(constants["description"]["max_running_requests"])  # of one replica
        self._most = self._most_running + config.max_queued_requests

    @property
    def draft_algorithm(self) -> str:
        """As ``BaseEngine.draft_algorithm``."""
        return str(self._description["speculative_algorithm"])

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
        """As ``BaseEngine.add_request``. What only a replica can refuse ends the request with an error delta."""
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
        self._courses[request_id] = Course(request, request.line())
        self._links.receive(0.0)  # prefixes that were left just now
        self._place_all()

    def hand_over(self, request_id: str, handoff: Handoff) -> None:
        """Nothing: ``--dp-size`` above 1 is refused where prompts are handed over."""

    def abort(self, request_id: str) -> None:
        """As ``BaseEngine.abort``."""
        course = self._courses.pop(request_id, None)
        if course is not None and course.replica is not None:
            self._links.tell(course.replica, {"do": "abort", "request_ids": [request_id]})
            self._control.let_go()

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._courses or self._deltas)

    @property
    def has_room(self) -> bool:
        """Whether another request is taken."""
        return len(self._courses) < self._most * max(1, len(self._fleet.on))

    def _work(self) -> Mapping[int | None, Work]:
        return work_of(self._courses.values(), self._links.ready)

    def step(self) -> list[OutputDelta]:
        """Wait for deltas, for a short time. Raises ReplicaLostError: as ``idle``."""
        self._links.receive(0.0 if self._deltas else WAIT_S)
        self._links.lose_silent(self._is_busy)
        self._control.look()
        self._place_all()
        deltas = list(self._deltas)
        self._deltas.clear()
        return deltas

    def _is_busy(self, index: int) -> bool:
        return any(course.replica == index for course in self._courses.values())

    def idle(self) -> float | None:
        """As ``BaseEngine.idle``: the number of replicas follows the load, also where there is none.

        Raises:
            ReplicaLostError: no replica is left, and none can be started.
        """
        self._links.receive(0.0)
        self._links.take_arrivals()
        self._control.look()
        return self._control.next_look_s()

    def _place_all(self) -> None:
        """Give every request that no replica has to one, if there are any with room for it."""
        self._links.take_arrivals()
        waiting = [course for course in self._courses.values() if course.replica is None]
        if not waiting:
            return
        work = dict(self._work())
        for course in waiting:
            while course.replica is None:
                free = [i for i in self._links.serving if work[i].num_requests < self._most]
                if not free:
                    return
                self._place(course, {index: work[index] for index in free})
            work[course.replica] = work[course.replica].and_one(course.num_uncached)

    def _place(self, course: Course, work: Mapping[int, Work]) -> None:
        """Give a request to one of these replicas, unless that is lost just now."""
        request = course.request
        published = {index: self._links.ready[index].published for index in work}
        prompt = request.prompt_token_ids
        found = self._texts.found(prompt, request.owner.tenant, request.extra_key, published)
        if self.config.dp_placement == "round_robin":
            index = sorted(published)[next(self._turns) % len(published)]
        else:
            costs = {i: own_cost(len(prompt), each) for i, each in found.items()}
            index = choose(costs, work, self._most_running)
        if found[index].keys:  # another replica may have written them, and this one not have looked since
            self._links.tell(index, {"do": "learn", "keys": [key.hex() for key in found[index].keys]})
        if self._links.tell_line(index, course.next_line()):
            course.placed(index, found[index].in_tiers)

    def _move_all(self, index: int, is_lost: bool) -> None:
        """Let requests of a replica that is gone wait for another one."""
        for course in [course for course in self._courses.values() if course.replica == index]:
            if not course.moved(is_lost):
                del self._courses[course.request.request_id]
                self._deltas.append(course.last_delta("error", LOST_TOO_OFTEN))

    def _take(self, message: Mapping[str, Any]) -> None:
        """Take deltas or a refusal."""
        if "refused" in message:
            course = self._courses.pop(message["refused"], None)
            if course is not None:
                self._deltas.append(course.last_delta("error", message["message"], message["code"]))
            return
        for delta in load_deltas(message["deltas"]):
            course = self._courses.get(delta.request_id)
            if course is None:
                continue  # it was aborted
            added = course.take(delta)
            if delta.finish_reason is not None:
                del self._courses[delta.request_id]
            if added is not None:
                self._deltas.append(added)

    def stats(self) -> EngineStats:
        """Numbers of all replicas, a quarter of a second old at the most; requests without a replica are waiting."""
        self._links.take_arrivals()
        self._links.receive(0.0)
        found = merged([replica.stats for _, replica in sorted(self._links.ready.items())])
        if found is not None:
            self._latest_stats = found
        num_waiting = self._latest_stats.num_waiting + self._work()[None].num_requests
        return replace(self._latest_stats, num_waiting=num_waiting, replicas=self._control.stats())

    def stats_of(self, tenant: str | None) -> TenantStats:
        """Numbers of one tenant's requests."""
        answers = self._links.ask_all({"question": "tenant", "tenant": tenant})
        return merged([load_tenant_stats(value) for value in answers])

    def sample(self, views: Collection[View], max_nodes: int) -> EngineSample:
        """As ``BaseEngine.sample``, of what the replicas have answered to earlier calls."""
        question = {"question": "sample", "views": [dump_view(view) for view in views], "max_nodes": max_nodes}
        samples = self._links.next_samples(question)
        return merged_sample(samples) if samples else EngineSample(self.stats(), {}, (), 0, 0, {})

    def watch_drafts(self, views: Sequence[View]) -> None:
        """As ``BaseEngine.watch_drafts``."""
        self._watched = tuple(views)
        for index in list(self._links.ready):
            self._tell_views(index)

    def _tell_views(self, index: int) -> None:
        self._links.tell(index, {"do": "watch", "views": [dump_view(view) for view in self._watched]})

    def cache_report(self, view: View) -> dict[str, object]:
        """As ``BaseEngine.cache_report``: sums over all replicas."""
        return merged_report(self._links.ask_all({"question": "report", "view": dump_view(view)}))

    def cache_text(self, view: View) -> str:
        """As ``BaseEngine.cache_text``, one replica behind the other."""
        texts = self._links.ask_all({"question": "text", "view": dump_view(view)})
        return "\n".join(f"replica {number}\n{text}" for number, text in enumerate(texts))

    def flush_cache(self) -> int:
        """As ``BaseEngine.flush_cache``, of all replicas."""
        return sum(self._links.ask_all({"question": "flush"}))

    def describe(self) -> dict[str, object]:
        """As ``BaseEngine.describe``, of the first replica, and ``dp_size``."""
        return dict(self._description)

    def when_due(self, callback: Callable[[], None]) -> None:
        """As ``BaseEngine.when_due``: when a replica cannot be started any more."""
        self._fleet.when_one_is_gone(callback)

    def wake(self) -> None:
        """As ``BaseEngine.wake``."""
        self._links.wake()

    def close(self) -> None:
        """End all replicas."""
        self._courses.clear()
        self._links.close()
