"""When drafts change: their present depth and form, probes while nothing is drafted, and tries of other options.

A draft is made deeper, or shallower, when two looks in a row ask for it, by a predicted gain of 3 % where both draft;
looks are 8 steps or more apart. Drafts of several requests that began a short while ago get shallower at once.
When the number of requests changes, drafts change at once. Below a gain of 2 % over
plain decoding nothing is drafted. Then a quarter of the requests at the most is drafted for at depth 1 now and then, at
intervals that double, so that it is seen when drafts pay again.

What another option takes and brings is seen by trying it for some steps, at intervals that double until each kind of
try loses 0.3 % of the time: the worse an option is thought to be, the seldomer it is tried. With another number of
requests all options that are not hopeless are looked at soon, the best ones first. Where nothing is drafted, a try goes
on while it is seen to pay, until drafts change or do not pay after all; and there is one soon when the text begins to
repeat itself (``Repeats``). All that is bounded by what drafts may lose (``Allowance``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specmamba.draft.sizing.allowance import Allowance
from specmamba.kernels.draft_sizing import Floats, Ints

LEAST_GAIN, GAIN_OF_CHANGE = 1.02, 1.03
STEPS_TO_RAISE, STEPS_TO_LOWER = 8, 3
FIRST_PROBE, LAST_PROBE = 8, 1024  # steps between two probes
LONG_INTERVAL = 32  # between probes, from which on decisions are rarer: drafts have not paid for long, or are dear
SHARE_OF_PROBES = 0.005  # of the time of all steps, at the most, from the first interval on
PROBED_SHARE = 4  # one request of so many is probed
# steps of one decision: usually, while a change is near, where drafts have stayed as they are, and where they have long
# not paid
ROUND, SHORT_ROUND, CALM_ROUND, LONG_ROUND = 16, 8, 48, 192
SHARE_OF_TRIES, LEAST_LOSS = 0.003, 0.01  # of the time of all steps, and of a tried step's
MOST_INTERVAL = 8192  # steps between two tries
FIRST_TRIES, FIRST_INTERVALS = {"plain": 64, "other": 24}, {"plain": 64, "other": 128}  # steps before, and between two
SETTLING_STEPS, LONGEST_DELAY = 16, 64  # steps of a changed batch without a try; steps that this may delay one
NEAR = 0.85  # options whose rate is at least this share of the present one's are tried in turns
FIRST_LOOKS, NEAR_AT_FIRST = 2, 0.6  # tries of an option that may be farther below: its predicted time may be wrong
TIMED_STEPS, MOST_TRIED_STEPS = 6, 24  # of a try: it ends when so many steps were timed, or made
# short rounds that a try goes on where it is seen to gain so much: drafts change within four looks
MOST_FOLLOW_UPS, GAIN_OF_FOLLOW_UP = 4, 1.05
# a share of repeated tokens that leads to a try; how much more the next one needs; steps between two that do not pay
LEAST_REPEATED, MORE_REPEATED, FIRST_ALARM = 0.3, 0.15, 32
LONGEST_WAIT = 384  # steps that a try is put off until a batch begins, of which drafters have missed nothing yet
STEPS_OF_NEWS = 32  # of a batch that began, which are looked at often
NEWS_INTERVAL = 64  # steps between probes at the most when all requests are other ones, if probes are cheap
HOPE, STEPS_OF_HOPE = 0.12, 48.0  # by how much options may be better than they are thought to be; it falls with steps
MOST_SEEN = 4  # requests whose steps say more than those of one: their times are the same
WEIGHT = 0.3  # of a new look in the mean gains, after a short round


@dataclass(frozen=True, slots=True)
class DraftSize:
    """What a step drafts."""

    depth: int  # 0: nothing
    is_chain: bool = False  # a whole chain for every request, without a choice
    drafted: NDArray[np.bool_] | None = None  # [B], rows that are drafted for; None: all, or none at depth 0
    is_probe: bool = False
    learns: bool = (
        True  # the drafter's probabilities are judged by the result; False: the host counts what a chain brings
    )

    def places(self, num_rows: int) -> Ints:
        """Return the place of each row among those that are drafted for, [B]; any place for one that is not."""
        if self.drafted is None:
            return np.arange(num_rows)
        found: Ints = np.maximum(np.cumsum(self.drafted) - 1, 0)
        return found


@dataclass
class _Tries:
    """When other options are tried, with about as many requests."""

    looks: Ints  # tries so far of each option
    num_steps: Floats  # of each option and of requests, so far
    until: dict[str, int] = field(default_factory=lambda: dict(FIRST_TRIES))  # steps before the next one of a kind
    interval: dict[str, int] = field(default_factory=lambda: dict(FIRST_INTERVALS))
    allowance: Allowance = field(default_factory=Allowance)


NOTHING = DraftSize(0)


class DraftSchedule:
    """Owns the present depth and form of drafts. The options are depths with chosen trees, then depths with chains."""

    def __init__(self, num_steps: int) -> None:
        """``num_steps``: D, of the deepest draft."""
        self.num_steps = num_steps
        # [2 (D + 1)], tokens per second of each option over plain decoding, as it is thought now
        self.gains: Floats = np.ones(2 * (num_steps + 1))
        self.depth, self.is_chain = 0, False
        self._wish_age = self._wish = 0
        self._until_probe = self._probe_interval = self._least_interval = FIRST_PROBE
        self._next_probed = self._num_new = 0
        self._stretch, self._of_probe = TIMED_STEPS, 0.0  # steps of a try that are expected, and what a probe takes
        self._lengths: Floats = np.ones(2 * (num_steps + 1))  # of a step of each option, over a plain one
        self._newest_other = self._batch_age = self._bucket = 0
        self._tries_of: dict[int, _Tries] = {}  # by the power of two of the requests
        # a try, its option, its steps that are left at the most, and those that have not been timed yet
        self._trying, self._tried, self._num_tries, self._num_untimed = "plain", 0, 0, 0
        self._paying: int | None = None  # the option that the newest drafts show to pay while nothing is drafted
        self._num_follow_ups = 0  # of the present try
        self._alarm, self._until_alarm, self._alarm_interval = LEAST_REPEATED, 0, FIRST_ALARM
        self._is_calm = False  # the newest look asked for no change
        self._is_alarmed = False  # the next try is of the best option
        self._counted: tuple[str, ...] = ()  # what the steps of the newest ``next`` count for

    def set_requests(self, num_requests: int) -> None:
        """Begin steps of another number of requests, of which nothing is decided here before ``restart``."""
        self._bucket, self._counted = num_requests.bit_length(), ()

    def set_times(self, num_tried: int, lengths: Floats, of_probe: float = 0.0) -> None:
        """Set how long steps take, in plain steps.

        Args:
            num_tried: steps of a try, those included that are not timed.
            lengths: [2 (D + 1)], a step of each option.
            of_probe: what a probe takes longer than plain steps.
        """
        self._stretch, self._lengths, self._of_probe = num_tried, lengths, of_probe
        self._least_interval = min(max(round(of_probe / SHARE_OF_PROBES), FIRST_PROBE), LAST_PROBE)

    def restart(self, rates: Floats, num_requests: int) -> None:
        """Take the best option at once: the batch is another one. ``rates`` are tokens per second of the options."""
        self.gains, self._bucket = rates / rates[0], num_requests.bit_length()
        self.depth, self.is_chain = self.option(self._best())
        if self._num_tries > 0:  # it was cut short
            until = self._tries.until
            until[self._trying] = min(until[self._trying], FIRST_TRIES[self._trying])
        self._wish_age = self._num_tries = self._batch_age = 0
        self._is_calm = False

    def begin(self) -> None:
        """Count a new request: when as many have come as there are, the drafts of a batch are probed soon."""
        self._num_new += 1

    def judge(self, rates: Floats, num_steps: int) -> None:
        """Move to an option that has been better for some steps; ``num_steps`` passed since the last call."""
        seen = rates / rates[0]
        weight = 1.0 if self._is_new else 1.0 - (1.0 - WEIGHT) ** (num_steps / SHORT_ROUND)
        self.gains += weight * (seen - self.gains)
        was_tried = not self.depth and self._counted == ("try",)
        self._paying = int(seen.argmax()) if was_tried and seen.max() >= GAIN_OF_FOLLOW_UP else None
        place, best, hopes = self._place, self._best(), self._hopes
        depth, is_chain = self.option(best)
        is_raise = depth > self.depth
        self._is_calm = best == place or (best > 0 and self.depth > 0 and hopes[best] < GAIN_OF_CHANGE * hopes[place])
        if self._is_calm:
            self._wish_age = 0
            return
        is_same = self._wish_age > 0 and is_raise == (self._wish > self.depth)
        self._wish, self._wish_age = depth, self._wish_age + num_steps if is_same else 1
        if (self._is_new and not is_raise) or self._wish_age >= (STEPS_TO_RAISE if is_raise else STEPS_TO_LOWER):
            self.depth, self.is_chain, self._wish_age = depth, is_chain, 0
            self._alarm_interval = FIRST_ALARM

    def hear(self, repeated: float, num_steps: int) -> bool:
        """Try drafts soon if far more of the text is repeated than at the last such try; whether it is so.

        Args:
            repeated: the share of the newest tokens that repeat their own text.
            num_steps: steps without drafts since the last call.
        """
        self._until_alarm -= num_steps
        self._alarm = max(min(self._alarm, repeated + MORE_REPEATED), LEAST_REPEATED)
        if self.depth or repeated < self._alarm or self._until_alarm > 0:
            return False
        self._alarm, self._is_alarmed = repeated + MORE_REPEATED, True
        self._until_alarm = self._alarm_interval
        self._alarm_interval = min(2 * self._alarm_interval, LAST_PROBE)
        self._tries.until["other"] = min(self._tries.until["other"], 0)
        return True

    def next(self, max_depths: Ints) -> tuple[DraftSize, int]:
        """Return what the next steps draft, and for how many at the most; ``passed`` tells how many there were.

        ``max_depths`` [B] are bounds of the requests.
        """
        self._expect_news(len(max_depths))
        if self._num_tries <= 0 and not self._follow_up():
            self._start_try()
        if self._num_tries > 0:
            self._counted = ("try",)
            number = self._stretch if self._num_tries == MOST_TRIED_STEPS else self._num_untimed
            return _within(max_depths, *self.option(self._tried)), min(number, self._num_tries)
        if self.depth:
            self._until_probe = self._probe_interval = self._least_interval
            self._counted = "plain", "other"
            is_short = self._wish_age or (self._is_new and self._batch_age < SETTLING_STEPS)
            most = SHORT_ROUND if is_short else CALM_ROUND if self._is_calm else ROUND
            return _within(max_depths, self.depth, self.is_chain), most
        may_probe = self._tries.allowance.may_try
        if self._until_probe <= 1 and may_probe:
            self._counted = ()
            return self._probe(max_depths), 1
        self._counted = "probe", "other"
        most = ROUND if self._probe_interval < LONG_INTERVAL else LONG_ROUND
        until_probe = self._until_probe - 1 if may_probe else most
        until_try = max(self._tries.until["other"], SHORT_ROUND) if self._may_try_another else most
        return NOTHING, min(most, until_probe, until_try)

    def passed(self, num_steps: int, num_timed: int) -> None:
        """Count steps that were made as the newest ``next`` said, and those of them that were timed."""
        self._batch_age += num_steps
        self._tries.allowance.pass_steps(num_steps)
        place = self._tried if self._counted == ("try",) else self._place
        self._tries.num_steps[place] += num_steps * min(1 << self._bucket >> 1, MOST_SEEN)
        for name in self._counted:
            if name == "try":
                self._num_tries, self._num_untimed = self._num_tries - num_steps, self._num_untimed - num_timed
                if self._num_untimed <= 0:
                    self._num_tries = 0
                    self._tries.looks[self._tried] += 1
            elif name == "probe":
                self._until_probe -= num_steps
            else:
                self._tries.until[name] -= num_steps

    def charge(self, seconds: float, num_tokens: float, plain_seconds: float) -> None:
        """Count what steps that drafted took and brought; arguments as for ``Allowance.charge``."""
        self._tries.allowance.charge(seconds, num_tokens, plain_seconds)

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
        hopes = self._hopes
        best = int(hopes.argmax())
        return best if hopes[best] >= LEAST_GAIN and self._tries.allowance.may_follow_a_sign else 0

    @property
    def _hopes(self) -> Floats:
        """Gains, larger for options of which little has been seen: an upper bound of what they may be."""
        hopes: Floats = self.gains * (1.0 + HOPE / np.sqrt(1.0 + self._tries.num_steps / STEPS_OF_HOPE))
        hopes[0] = self.gains[0]
        return hopes

    def _expect_news(self, num_requests: int) -> None:
        """Probe soon if all requests are other ones than at the last time, once for a batch that grows."""
        if self._num_new >= (num_requests if self._is_settled else 2 * num_requests):
            self._num_new = 0
            self._until_probe = min(self._until_probe, self._least_interval)
            self._probe_interval = min(self._probe_interval, max(NEWS_INTERVAL, self._least_interval))

    @property
    def _tries(self) -> _Tries:
        tries = self._tries_of.get(self._bucket)
        if tries is None:
            tries = _Tries(np.zeros(len(self.gains), np.int64), np.zeros(len(self.gains)))
            self._tries_of[self._bucket] = tries
        return tries

    @property
    def _may_try_another(self) -> bool:
        """Whether drafts may lose what a try of another option costs."""
        allowance = self._tries.allowance
        return allowance.may_follow_a_sign if self._is_alarmed else allowance.may_try

    @property
    def _is_time_to_try(self) -> bool:
        """Whether another option can be tried now: where nothing is drafted, drafters run what they missed first."""
        is_late = self._tries.until["other"] <= -LONGEST_WAIT
        return self.depth > 0 or self._is_alarmed or self._batch_age <= STEPS_OF_NEWS or is_late

    @property
    def _is_settled(self) -> bool:
        return self._batch_age >= SETTLING_STEPS

    @property
    def _is_new(self) -> bool:
        """Whether the batch began a short while ago; of one request a few steps say too little."""
        return self._bucket > 1 and self._batch_age <= STEPS_OF_NEWS

    def _follow_up(self) -> bool:
        """Go on with a try, with the option that pays, for a short round; whether it does."""
        paying, self._paying = self._paying, None
        if paying is None or self.depth or self._num_follow_ups >= MOST_FOLLOW_UPS:
            return False
        self._num_follow_ups += 1
        self._trying, self._tried, self._num_tries, self._num_untimed = "other", paying, SHORT_ROUND, SHORT_ROUND
        return True

    def _start_try(self) -> None:
        """Begin a try that is due: of plain steps where there are drafts, or of another option."""
        tries = self._tries
        for name, until in tries.until.items():
            if until > (0 if self._is_settled else -LONGEST_DELAY):
                continue
            if name == "other" and not (self._may_try_another and self._is_time_to_try):
                continue
            place = 0 if name == "plain" else self._another()
            if name == "other" and self._is_alarmed and not self.depth:
                place, self._is_alarmed = int(self.gains[1:].argmax()) + 1, False
            if place == self._place:
                continue
            loss = max(1.0 - float(self.gains[place] / self.gains[self._place]), LEAST_LOSS)
            length = float(self._lengths[place] / self._lengths[self._place])
            lost = self._stretch * length * loss + (0.0 if self.depth else self._of_probe)
            most = max(min(lost / SHARE_OF_TRIES, MOST_INTERVAL), FIRST_INTERVALS[name])
            if name == "other" and len(self._first_looks):
                tries.until[name] = FIRST_TRIES[name]
            else:
                tries.interval[name] = tries.until[name] = min(2 * tries.interval[name], round(most))
            self._trying, self._tried = name, place
            self._num_tries, self._num_untimed, self._num_follow_ups = MOST_TRIED_STEPS, TIMED_STEPS, 0
            return

    @property
    def _shares(self) -> Floats:
        """What the other options that draft are thought to bring, over the present one."""
        shares: Floats = self.gains / self.gains[self._place]
        shares[[0, self._place]] = 0.0
        return shares

    @property
    def _first_looks(self) -> Ints:
        """Options that have not been looked at often enough."""
        return np.flatnonzero((self._tries.looks < FIRST_LOOKS) & (self._shares >= NEAR_AT_FIRST))

    def _another(self) -> int:
        """The next option that is nearly as good as the present one; the best one if there is none where off."""
        first, shares = self._first_looks, self._shares
        if len(first):
            return int(first[shares[first].argmax()])
        others = np.flatnonzero(shares >= NEAR).tolist()
        if not others:
            return self._place or int(self.gains[1:].argmax()) + 1
        self._newest_other = next((place for place in others if place > self._newest_other), others[0])
        return self._newest_other

    def _probe(self, max_depths: Ints) -> DraftSize:
        self._probe_interval = min(max(2 * self._probe_interval, self._least_interval), LAST_PROBE)
        self._until_probe = self._probe_interval
        can = np.flatnonzero(max_depths > 0)
        if not len(can):
            return NOTHING
        number = -(-len(can) // PROBED_SHARE)
        drafted = np.zeros(len(max_depths), np.bool_)
        drafted[can[(self._next_probed + np.arange(number)) % len(can)]] = True
        self._next_probed += number
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
