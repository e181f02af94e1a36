"""The grammar of one request beside the engine: what follows its newest token is found out on other threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from specmamba.errors import GrammarError
from specmamba.grammar.mask_maker import QUICK_SECONDS, MaskJob, MaskMaker
from specmamba.grammar.matcher import GrammarMatcher, TreeMask, too_complex

MAX_JOB_SECONDS = 5.0  # of wall time of one job; then its request ends, and the thread is left to finish


class GrammarFollower:
    """A matcher that is used by one thread of ``maker`` at a time, and the mask of the root. Used by the engine thread.

    It is settled when ``root`` is there and no job is left, or when it has failed: then ``error`` says why.
    """

    def __init__(self, matcher: GrammarMatcher, maker: MaskMaker, owner: str | None = None) -> None:
        self._matcher, self._maker, self._owner = matcher, maker, owner
        self._job: MaskJob | None = None
        self._unseen: list[int] = []  # tokens of the output that the matcher has not got
        self.root: TreeMask | None = None  # what may follow the last token of prompt or output
        self.error: GrammarError | None = None
        self.is_quick = True  # its last job was: the engine waits for the next one

    @property
    def is_settled(self) -> bool:
        return self.error is not None or (self.root is not None and self._job is None)

    @property
    def job(self) -> MaskJob | None:
        """The job that waits or runs, or whose result has not been taken."""
        return self._job

    @property
    def seconds_per_node(self) -> float:
        """Processor time of the last mask, for each of its nodes."""
        return self._matcher.seconds_per_node

    def start(self) -> None:
        """Begin to make the mask of the root, unless it is there or on its way."""
        if self._job is None and self.root is None and self.error is None:
            self._follow()

    def advance(self, tokens: Sequence[int]) -> None:
        """Append tokens to the output, and begin to make the mask of what follows, as soon as no other job runs."""
        self.root = None
        self._unseen += tokens
        if self._job is None:
            self._follow()

    def begin_tree(
        self, tokens: Sequence[int], parents: Sequence[int], seconds: float | None, is_urgent: bool = False
    ) -> MaskJob:
        """Begin to make the mask of a draft tree on the root; arguments as of ``GrammarMatcher.mask``."""
        assert self._job is None
        return self._submit(partial(self._matcher.mask, tokens, parents, seconds), is_urgent)

    def take_tree(self) -> TreeMask | None:
        """The mask of the tree; None: no tree was begun, it is not done, or the request has failed."""
        job = self._job
        if job is None or not job.is_done:
            self.is_quick &= job is None
            return None
        self._job = None
        return self._result(job)

    def settle(self) -> None:
        """Take the mask of the root if it is done, and go on with tokens that waited for a late tree."""
        job = self._job
        if job is None:
            return
        if not job.is_done:
            if job.began is not None and time.monotonic() - job.began > MAX_JOB_SECONDS:
                self.error = too_complex()
            return
        self._job, self.is_quick = None, job.seconds <= QUICK_SECONDS
        mask = self._result(job)
        if self._unseen and self.error is None:
            self._follow()
        elif mask is not None:
            self.root = mask

    def distrust(self) -> None:
        """End the request at its next slow mask: another request with its grammar was too slow."""
        self._matcher.distrust()

    def close(self) -> None:
        """Give up a job that waits; the result of one that runs is not read."""
        if self._job is not None:
            self._maker.drop(self._job)

    def _follow(self) -> None:
        tokens, self._unseen = self._unseen, []
        self._submit(partial(_advanced, self._matcher, tokens))

    def _submit(self, work: Callable[[], TreeMask], is_urgent: bool = False) -> MaskJob:
        self._job = job = MaskJob(self._owner, work, is_urgent, is_suspect=not self.is_quick)
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
