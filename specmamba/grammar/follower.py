"""The grammar of one request beside the engine: what follows its newest token is found out on other threads."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

from specmamba.errors import GrammarError
from specmamba.grammar.mask_maker import QUICK_SECONDS, MaskJob, MaskMaker
from specmamba.grammar.matcher import GrammarMatcher, TreeMask, too_complex

MAX_JOB_SECONDS = 5.0  # of wall time of one job; then its request ends, and the thread is left to finish
MAX_QUEUE_SECONDS = 30.0  # that a job waits behind others; then its request ends
WAIT_SHARE = 0.25  # of the wall time, that steps may wait for the masks of one owner
MEMORY_SECONDS = 2.0  # after which a wait counts 1/e
MAX_OWNERS = 1024  # that are remembered, those of the last waits


class WaitShares:
    """The share of the wall time that steps have waited for the masks of each owner: an exponential moving average."""

    def __init__(self) -> None:
        self._shares: OrderedDict[str | None, tuple[float, float]] = OrderedDict()  # share, time of its last wait

    def add(self, owner: str | None, seconds: float, now: float) -> None:
        """Count a wait that ended ``now``, a time of ``time.monotonic``."""
        self._shares[owner] = (self._share(owner, now) + seconds / MEMORY_SECONDS, now)
        self._shares.move_to_end(owner)
        if len(self._shares) > MAX_OWNERS:
            self._shares.popitem(last=False)

    def is_spent(self, owner: str | None, now: float) -> bool:
        """Whether steps should not wait for this owner's masks now."""
        return self._share(owner, now) > WAIT_SHARE

    def _share(self, owner: str | None, now: float) -> float:
        share, then = self._shares.get(owner, (0.0, now))
        return share * math.exp((then - now) / MEMORY_SECONDS)


class GrammarFollower:
    """A matcher that is used by one thread of ``maker`` at a time, and the mask of the root. Used by the engine thread.

    It is settled when ``root`` is there and no job is left, or when it has failed: then ``error`` says why.
    """

    def __init__(self, matcher: GrammarMatcher, maker: MaskMaker, owner: str | None = None) -> None:
        self._matcher, self._maker = matcher, maker
        self.owner = owner  # the caller that is charged for the time of masks
        self.job: MaskJob | None = None  # waits or runs, or its result has not been taken
        self._unseen: list[int] = []  # tokens of the output that the matcher has not got
        self.root: TreeMask | None = None  # what may follow the last token of prompt or output
        self.error: GrammarError | None = None
        self.is_quick = True  # its last job was: the engine waits for the next one
        self.is_spent = False  # steps have waited too long for its owner's masks: its jobs run beside the quick ones

    @property
    def is_settled(self) -> bool:
        return self.error is not None or (self.root is not None and self.job is None)

    @property
    def is_awaited(self) -> bool:
        """Whether a step may wait for its masks, although it has other work."""
        return self.is_quick and not self.is_spent

    @property
    def seconds_per_node(self) -> float:
        """Processor time of the last mask, for each of its nodes."""
        return self._matcher.seconds_per_node

    def start(self) -> None:
        """Begin to make the mask of the root, unless it is there or on its way."""
        if self.job is None and self.root is None and self.error is None:
            self._follow()

    def advance(self, tokens: Sequence[int]) -> None:
        """Append tokens to the output, and begin to make the mask of what follows, as soon as no other job runs."""
        self.root = None
        self._unseen += tokens
        if self.job is None:
            self._follow()

    def begin_tree(
        self, tokens: Sequence[int], parents: Sequence[int], seconds: float | None, is_urgent: bool = False
    ) -> MaskJob:
        """Begin to make the mask of a draft tree on the root; arguments as of ``GrammarMatcher.mask``."""
        assert self.job is None
        return self._submit(partial(self._matcher.mask, tokens, parents, seconds), is_urgent)

    def take_tree(self) -> TreeMask | None:
        """The mask of the tree; None: no tree was begun, it is not done, or the request has failed."""
        job = self.job
        if job is None or not job.is_done:
            self.note_late()
            return None
        self.job = None
        return self._result(job)

    def settle(self) -> None:
        """Take the mask of the root if it is done, and go on with tokens that waited for a late tree."""
        job = self.job
        if job is None:
            return
        if not job.is_done:
            now = time.monotonic()
            if job.began is not None and now - job.began > MAX_JOB_SECONDS:
                self.error = too_complex()
            elif job.began is None and now - job.created > MAX_QUEUE_SECONDS:
                self.error = _queued_too_long()
            return
        self.job, self.is_quick = None, job.seconds <= QUICK_SECONDS
        mask = self._result(job)
        if self._unseen and self.error is None:
            self._follow()
        elif mask is not None:
            self.root = mask

    def note_late(self) -> None:
        """Take back ``is_quick`` when a job runs too long; one that waits behind others says nothing."""
        self.is_quick &= self.job is None or not self.job.is_late

    def leave_tree(self) -> bool:
        """Give up a tree whose mask has not been begun; False: it has been."""
        if self.job is None or not self._maker.drop(self.job):
            return False
        self.job = None
        return True

    def distrust(self) -> None:
        """End the request at its next slow mask: another request with its grammar was too slow."""
        self._matcher.distrust()

    def close(self) -> None:
        """Give up a job that waits; the result of one that runs is not read."""
        if self.job is not None:
            self._maker.drop(self.job)

    def _follow(self) -> None:
        tokens, self._unseen = self._unseen, []
        self._submit(partial(_advanced, self._matcher, tokens))

    def _submit(self, work: Callable[[], TreeMask], is_urgent: bool = False) -> MaskJob:
        self.job = job = MaskJob(self.owner, work, is_urgent, is_suspect=not self.is_awaited)
        self._maker.submit(job)
        return job

    def _result(self, job: MaskJob) -> TreeMask | None:
        try:
            return job.result()
        except GrammarError as error:
            self.error = error
            return None


def _advanced(matcher: GrammarMatcher, tokens: Sequence[int]) -> TreeMask:
    matcher.advance(tokens)
    return matcher.mask([0], [-1])


def _queued_too_long() -> GrammarError:
    message = f"the mask of this request's grammar waited {MAX_QUEUE_SECONDS:g} s behind slow ones: try again later"
    return GrammarError(message, "grammar_failed")
