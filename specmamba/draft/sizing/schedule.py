"""What the next steps draft: the present depth and form of drafts, probes while nothing is drafted, and tries.

A draft is made deeper, or shallower, when two looks in a row ask for it, by a predicted gain of 3 % where both draft;
looks are 8 steps or more apart. Drafts of several requests that began a short while ago can end at once.
When the number of requests changes, drafts change at once. Below a gain of 2 % over plain decoding nothing is drafted.
Then a quarter of the requests at the most is drafted for at depth 1 now and then, at intervals that double, so that it
is seen when drafts pay again. ``Tries`` says when other options are tried.
"""

from __future__ import annotations

import numpy as np

from specmamba.draft.sizing.rounds import NOTHING, DraftSize
from specmamba.draft.sizing.tries import SHORT_ROUND, Present, Tries
from specmamba.kernels.draft_sizing import Floats, Ints

LEAST_GAIN, GAIN_OF_CHANGE = 1.02, 1.03
STEPS_TO_RAISE, STEPS_TO_LOWER = 8, 3
STEPS_OF_NEWS = 32  # of a batch of several requests that began, which are looked at often
FIRST_PROBE, LAST_PROBE = 8, 1024  # steps between two probes
LONG_INTERVAL = 32  # between probes, from which on decisions are rarer: drafts have not paid for long, or are dear
SHARE_OF_PROBES = 0.005  # of the time of all steps, at the most, from the first interval on
PROBED_SHARE = 4  # one request of so many is probed
NEWS_INTERVAL = 64  # steps between probes at the most when all requests are other ones, if probes are cheap
# steps of one decision: usually, where drafts have stayed as they are, and where they have long not paid; while a
# change is near, SHORT_ROUND
ROUND, CALM_ROUND, LONG_ROUND = 16, 48, 192
WEIGHT = 0.3  # of a new look in the mean gains, after a short round


class DraftSchedule:
    """Owns the present depth and form of drafts. The options are depths with chosen trees, then depths with chains."""

    def __init__(self, num_steps: int) -> None:
        """``num_steps``: D, of the deepest draft."""
        self.num_steps = num_steps
        # [2 (D + 1)], tokens per second of each option over plain decoding, as it is thought now
        self.gains: Floats = np.ones(2 * (num_steps + 1))
        self.depth, self.is_chain = 0, False
        self.tries, self.probes = Tries(len(self.gains)), Probes()
        self._wish_age = self._wish = 0
        self._num_requests = self._batch_age = 0
        self._is_calm = False  # the newest look asked for no change
        self._counted: tuple[str, ...] = ()  # what the steps of the newest ``next`` count for

    def set_requests(self, num_requests: int) -> None:
        """Begin steps of another number of requests, of which nothing is decided here before ``restart``."""
        self._num_requests, self._counted = num_requests, ()
        self.tries.set_requests(num_requests)

    def set_times(self, num_tried: int, lengths: Floats, of_probe: float = 0.0) -> None:
        """Set how long steps take, in plain steps.

        Args:
            num_tried: steps of a try, those included that are not timed.
            lengths: [2 (D + 1)], a step of each option.
            of_probe: what a probe takes longer than plain steps.
        """
        self.tries.set_times(num_tried, lengths, of_probe)
        self.probes.set_times(of_probe)

    def restart(self, rates: Floats, num_requests: int) -> None:
        """Take the best option at once: the batch is another one. ``rates`` are tokens per second of the options."""
        self.gains, self._num_requests = rates / rates[0], num_requests
        self.tries.set_requests(num_requests)
        self.depth, self.is_chain = self.option(self._best())
        self.tries.cut_short()
        self._wish_age = self._batch_age = 0
        self._is_calm = False

    def begin(self) -> None:
        """Count a new request: when as many have come as there are, the drafts of a batch are probed soon."""
        self.probes.num_new += 1

    def judge(self, rates: Floats, num_steps: int) -> None:
        """Move to an option that has been better for some steps; ``num_steps`` passed since the last call."""
        seen = rates / rates[0]
        weight = 1.0 if self._is_new else 1.0 - (1.0 - WEIGHT) ** (num_steps / SHORT_ROUND)
        self.gains += weight * (seen - self.gains)
        self.tries.see(seen, was_tried=not self.depth and self._counted == ("try",))
        place, best, hopes = self._place, self._best(), self.tries.hopes(self.gains)
        depth, is_chain = self.option(best)
        is_raise = depth > self.depth
        self._is_calm = best == place or (best > 0 and self.depth > 0 and hopes[best] < GAIN_OF_CHANGE * hopes[place])
        if self._is_calm:
            self._wish_age = 0
            return
        is_same = self._wish_age > 0 and is_raise == (self._wish > self.depth)
        self._wish, self._wish_age = depth, self._wish_age + num_steps if is_same else 1
        if (self._is_new and not depth) or self._wish_age >= (STEPS_TO_RAISE if is_raise else STEPS_TO_LOWER):
            self.depth, self.is_chain, self._wish_age = depth, is_chain, 0
            self.tries.heed()

    def hear(self, repeated: float, num_steps: int) -> bool:
        """Try drafts soon if far more of the text is repeated than at the last such try; whether it is so.

        Args:
            repeated: the share of the newest tokens that repeat their own text.
            num_steps: steps without drafts since the last call.
        """
        return self.tries.hear(repeated, num_steps, is_off=not self.depth)

    def next(self, max_depths: Ints) -> tuple[DraftSize, int]:
        """Return what the next steps draft, and for how many at the most; ``passed`` tells how many there were.

        ``max_depths`` [B] are bounds of the requests.
        """
        now = Present(self.gains, self._place, self._batch_age)
        self.probes.expect_news(len(max_depths), now.is_settled)
        if (tried := self.tries.next(now)) is not None:
            self._counted = ("try",)
            return _within(max_depths, *self.option(tried[0])), tried[1]
        if self.depth:
            self.probes.put_off()
            self._counted = "plain", "other"
            is_short = self._wish_age or (self._is_new and not now.is_settled)
            most = SHORT_ROUND if is_short else CALM_ROUND if self._is_calm else ROUND
            return _within(max_depths, self.depth, self.is_chain), most
        may_probe = self.tries.account.allowance.may_try
        if self.probes.is_due and may_probe:
            self._counted = ()
            return self.probes.next(max_depths), 1
        self._counted = "probe", "other"
        most = ROUND if self.probes.interval < LONG_INTERVAL else LONG_ROUND
        until_probe = self.probes.until - 1 if may_probe else most
        until_try = max(self.tries.until_other, SHORT_ROUND) if self.tries.may_begin else most
        return NOTHING, min(most, until_probe, until_try)

    def passed(self, num_steps: int, num_timed: int) -> None:
        """Count steps that were made as the newest ``next`` said, and those of them that were timed."""
        self._batch_age += num_steps
        is_try = self._counted == ("try",)
        self.tries.made(self.tries.tried if is_try else self._place, num_steps)
        if is_try:
            self.tries.passed(num_steps, num_timed)
            return
        for name in self._counted:
            if name == "probe":
                self.probes.until -= num_steps
            else:
                self.tries.account.until[name] -= num_steps

    def charge(self, seconds: float, num_tokens: float, plain_seconds: float) -> None:
        """Count what steps that drafted took and brought; arguments as for ``Allowance.charge``."""
        self.tries.account.allowance.charge(seconds, num_tokens, plain_seconds)

    def option(self, place: int) -> tuple[int, bool]:
        """The depth of an option among ``gains``, and whether it is that of chains."""
        return place % (self.num_steps + 1), place > self.num_steps

    def place(self, depth: int, is_chain: bool) -> int:
        """The place of an option among ``gains``."""
        return depth + (self.num_steps + 1) * is_chain

    def reason(self, num_requests: int) -> str:
        """A sentence about the present decision."""
        place = int(self.gains[1:].argmax()) + 1
        best, _ = self.option(place)
        gain = f"{(float(self.gains[place]) - 1) * 100:+.0f} %"
        requests = f"{num_requests} request{'s' if num_requests != 1 else ''}"
        if self.depth:
            shape = "chains" if self.is_chain else "drafts"
            if self.gains[self._place] < LEAST_GAIN:  # hopes are higher
                return f"{shape} of depth {self.depth} are being judged with {requests}"
            return f"{shape} of depth {self.depth}: depth {best} is predicted to gain {gain} with {requests}"
        return f"off: drafts are predicted to gain {gain} at the best, depth {best}, with {requests}"

    @property
    def _place(self) -> int:
        return self.place(self.depth, self.is_chain)

    def _best(self) -> int:
        hopes = self.tries.hopes(self.gains)
        best = int(hopes.argmax())
        return best if hopes[best] >= LEAST_GAIN and self.tries.account.allowance.may_follow_a_sign else 0

    @property
    def _is_new(self) -> bool:
        """Whether the batch began a short while ago; of one request a few steps say too little."""
        return self._num_requests > 1 and self._batch_age <= STEPS_OF_NEWS


class Probes:
    """Drafts of depth 1 for some of the requests, one step now and then, while nothing is drafted."""

    def __init__(self) -> None:
        self.until = self.interval = self._least_interval = FIRST_PROBE  # steps before the next one, and between two
        self.num_new = 0  # requests that began since a batch of new ones was expected to be probed soon
        self._next_row = 0

    @property
    def is_due(self) -> bool:
        return self.until <= 1

    def set_times(self, of_probe: float) -> None:
        """Argument as for ``DraftSchedule.set_times``."""
        self._least_interval = min(max(round(of_probe / SHARE_OF_PROBES), FIRST_PROBE), LAST_PROBE)

    def put_off(self) -> None:
        """Drafts are made: when they end, the first probe follows as soon as is allowed."""
        self.until = self.interval = self._least_interval

    def expect_news(self, num_requests: int, is_settled: bool) -> None:
        """Probe soon if all requests are other ones than at the last time, once for a batch that grows."""
        if self.num_new >= (num_requests if is_settled else 2 * num_requests):
            self.num_new = 0
            self.until = min(self.until, self._least_interval)
            self.interval = min(self.interval, max(NEWS_INTERVAL, self._least_interval))

    def next(self, max_depths: Ints) -> DraftSize:
        """The next probe; nothing, if no request may be drafted for."""
        self.interval = min(max(2 * self.interval, self._least_interval), LAST_PROBE)
        self.until = self.interval
        can = np.flatnonzero(max_depths > 0)
        if not len(can):
            return NOTHING
        number = -(-len(can) // PROBED_SHARE)
        drafted = np.zeros(len(max_depths), np.bool_)
        drafted[can[(self._next_row + np.arange(number)) % len(can)]] = True
        self._next_row += number
        return DraftSize(1, drafted=None if drafted.all() else drafted, is_probe=True)


def _within(max_depths: Ints, depth: int, is_chain: bool) -> DraftSize:
    """A draft of an option, within the bounds of the requests."""
    least = int(max_depths.min())
    if not depth:
        return NOTHING
    if least > 0:
        return DraftSize(depth, is_chain and least >= depth)
    drafted = max_depths > 0
    return DraftSize(depth, drafted=drafted) if drafted.any() else NOTHING
