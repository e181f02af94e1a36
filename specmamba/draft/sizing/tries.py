"""When other options than the present one are tried, which, and for how long.

What an option takes and brings is seen by trying it for some steps, at intervals that double until each kind of try
loses 0.3 % of the time: the worse an option is thought to be, the seldomer it is tried. With another number of requests
all options that are not hopeless are looked at soon, the best ones first. Where nothing is drafted, a try goes on while
it is seen to pay, until drafts change or do not pay after all; and there is one soon when the text begins to repeat
itself (``Repeats``). All that is bounded by what drafts may lose (``Allowance``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from specmamba.draft.sizing.allowance import Allowance
from specmamba.kernels.draft_sizing import Floats, Ints

SHARE_OF_TRIES, LEAST_LOSS = 0.003, 0.01  # of the time of all steps, and of a tried step's
MOST_INTERVAL = 8192  # steps between two tries
FIRST_TRIES, FIRST_INTERVALS = {"plain": 64, "other": 24}, {"plain": 64, "other": 128}  # steps before, and between two
SETTLING_STEPS, LONGEST_DELAY = 16, 64  # steps of a changed batch without a try; steps that this may delay one
NEAR = 0.85  # options whose rate is at least this share of the present one's are tried in turns
FIRST_LOOKS, NEAR_AT_FIRST = 2, 0.6  # tries of an option that may be farther below: its predicted time may be wrong
TIMED_STEPS, MOST_TRIED_STEPS = 6, 24  # of a try: it ends when so many steps were timed, or made
# short rounds that a try goes on where it is seen to gain so much: drafts change within four looks
SHORT_ROUND, MOST_FOLLOW_UPS, GAIN_OF_FOLLOW_UP = 8, 4, 1.05
# a share of repeated tokens that leads to a try; how much more the next one needs; steps between two that do not pay
LEAST_REPEATED, MORE_REPEATED, FIRST_ALARM, LAST_ALARM = 0.3, 0.15, 32, 1024
HOPE, STEPS_OF_HOPE = 0.12, 48.0  # by how much options may be better than they are thought to be; it falls with steps
MOST_SEEN = 4  # requests whose steps say more than those of one: their times are the same


class Present(NamedTuple):
    """What is thought and done now."""

    gains: Floats  # as ``DraftSchedule`` has them
    place: int  # of the present option; 0: nothing is drafted
    age: int  # steps of this batch

    @property
    def is_settled(self) -> bool:
        return self.age >= SETTLING_STEPS

    @property
    def shares(self) -> Floats:
        """What the other options that draft are thought to bring, over the present one."""
        shares: Floats = self.gains / self.gains[self.place]
        shares[[0, self.place]] = 0.0
        return shares


@dataclass
class Account:
    """What was tried with about as many requests, and when the next try of a kind is due."""

    looks: Ints  # tries so far of each option
    num_steps: Floats  # of each option and of requests, so far
    until: dict[str, int] = field(default_factory=lambda: dict(FIRST_TRIES))  # steps before the next one of a kind
    interval: dict[str, int] = field(default_factory=lambda: dict(FIRST_INTERVALS))
    allowance: Allowance = field(default_factory=Allowance)


class Tries:
    """Owns the accounts, by the power of two of the requests, and the try that goes on."""

    def __init__(self, num_options: int) -> None:
        """Try nothing yet."""
        self._num_options = num_options
        self._bucket = 0
        self._accounts: dict[int, Account] = {}
        self.tried = 0  # the option of the newest try
        # its kind, its steps that are left at the most, and those that have not been timed yet
        self._kind, self._num_left, self._num_untimed = "plain", 0, 0
        self._num_follow_ups = 0  # of the present try
        self._paying: int | None = None  # the option that the newest drafts show to pay while nothing is drafted
        self._num_expected, self._of_probe = TIMED_STEPS, 0.0  # steps of a try, and what a probe takes, in plain steps
        self._lengths: Floats = np.ones(num_options)  # of a step of each option, over a plain one
        self._newest_other = 0
        self._alarm, self._until_alarm, self._alarm_interval = LEAST_REPEATED, 0, FIRST_ALARM
        self._is_alarmed = False  # the next try is of the best option

    @property
    def account(self) -> Account:
        """That of the present number of requests."""
        account = self._accounts.get(self._bucket)
        if account is None:
            account = Account(np.zeros(self._num_options, np.int64), np.zeros(self._num_options))
            self._accounts[self._bucket] = account
        return account

    @property
    def may_begin(self) -> bool:
        """Whether drafts may lose what a try of another option costs."""
        allowance = self.account.allowance
        return allowance.may_follow_a_sign if self._is_alarmed else allowance.may_try

    @property
    def until_other(self) -> int:
        """Steps before a try of another option is due."""
        return self.account.until["other"]

    def set_requests(self, num_requests: int) -> None:
        """Keep the account of so many requests from now on."""
        self._bucket = num_requests.bit_length()

    def set_times(self, num_expected: int, lengths: Floats, of_probe: float) -> None:
        """Arguments as for ``DraftSchedule.set_times``."""
        self._num_expected, self._lengths, self._of_probe = num_expected, lengths, of_probe

    def hopes(self, gains: Floats) -> Floats:
        """Gains, larger for options of which little has been seen: an upper bound of what they may be."""
        hopes: Floats = gains * (1.0 + HOPE / np.sqrt(1.0 + self.account.num_steps / STEPS_OF_HOPE))
        hopes[0] = gains[0]
        return hopes

    def cut_short(self) -> None:
        """End the try that goes on, and have it again soon."""
        if self._num_left > 0:
            until = self.account.until
            until[self._kind] = min(until[self._kind], FIRST_TRIES[self._kind])
        self._num_left = 0

    def see(self, gains: Floats, was_tried: bool) -> None:
        """Look at newest gains; where they follow a try while nothing is drafted, and it pays, it goes on."""
        self._paying = int(gains.argmax()) if was_tried and gains.max() >= GAIN_OF_FOLLOW_UP else None

    def hear(self, repeated: float, num_steps: int, is_off: bool) -> bool:
        """Try drafts soon if far more of the text is repeated than at the last such try; see ``DraftSchedule.hear``."""
        self._until_alarm -= num_steps
        self._alarm = max(min(self._alarm, repeated + MORE_REPEATED), LEAST_REPEATED)
        if not is_off or repeated < self._alarm or self._until_alarm > 0:
            return False
        self._alarm, self._is_alarmed = repeated + MORE_REPEATED, True
        self._until_alarm = self._alarm_interval
        self._alarm_interval = min(2 * self._alarm_interval, LAST_ALARM)
        self.account.until["other"] = min(self.account.until["other"], 0)
        return True

    def heed(self) -> None:
        """Drafts have changed: repeats may lead to a try as soon as at first."""
        self._alarm_interval = FIRST_ALARM

    def next(self, now: Present) -> tuple[int, int] | None:
        """Return the option that the next steps try, and how many of them at the most; None: they try nothing."""
        if self._num_left <= 0 and not self._follow_up(now):
            self._begin(now)
        if self._num_left <= 0:
            return None
        number = self._num_expected if self._num_left == MOST_TRIED_STEPS else self._num_untimed
        return self.tried, min(number, self._num_left)

    def made(self, place: int, num_steps: int) -> None:
        """Count steps of an option."""
        self.account.num_steps[place] += num_steps * min(1 << self._bucket >> 1, MOST_SEEN)
        self.account.allowance.pass_steps(num_steps)

    def passed(self, num_steps: int, num_timed: int) -> None:
        """Count steps of the try, and those of them that were timed."""
        self._num_left, self._num_untimed = self._num_left - num_steps, self._num_untimed - num_timed
        if self._num_untimed <= 0:
            self._num_left = 0
            self.account.looks[self.tried] += 1

    def _follow_up(self, now: Present) -> bool:
        """Go on with a try, with the option that pays, for a short round; whether it does."""
        paying, self._paying = self._paying, None
        if paying is None or now.place or self._num_follow_ups >= MOST_FOLLOW_UPS:
            return False
        self._num_follow_ups += 1
        self._kind, self.tried, self._num_left, self._num_untimed = "other", paying, SHORT_ROUND, SHORT_ROUND
        return True

    def _begin(self, now: Present) -> None:
        """Begin a try that is due: of plain steps where there are drafts, or of another option."""
        for kind, until in self.account.until.items():
            if until > (0 if now.is_settled else -LONGEST_DELAY):
                continue
            if kind == "other" and not self.may_begin:
                continue
            place = 0 if kind == "plain" else self._another(now)
            if place == now.place:
                continue
            self._set_interval(kind, place, now)
            self._kind, self.tried = kind, place
            self._num_left, self._num_untimed, self._num_follow_ups = MOST_TRIED_STEPS, TIMED_STEPS, 0
            return

    def _set_interval(self, kind: str, place: int, now: Present) -> None:
        """Let the next try of a kind be so far away that tries of this option lose little of the time."""
        account = self.account
        loss = max(1.0 - float(now.gains[place] / now.gains[now.place]), LEAST_LOSS)
        length = float(self._lengths[place] / self._lengths[now.place])
        lost = self._num_expected * length * loss + (0.0 if now.place else self._of_probe)
        most = max(min(lost / SHARE_OF_TRIES, MOST_INTERVAL), FIRST_INTERVALS[kind])
        if kind == "other" and len(self._first_looks(now)):
            account.until[kind] = FIRST_TRIES[kind]
        else:
            account.interval[kind] = account.until[kind] = min(2 * account.interval[kind], round(most))

    def _first_looks(self, now: Present) -> Ints:
        """Options that have not been looked at often enough."""
        return np.flatnonzero((self.account.looks < FIRST_LOOKS) & (now.shares >= NEAR_AT_FIRST))

    def _another(self, now: Present) -> int:
        """The next option that is nearly as good as the present one; the best one if there is none where off."""
        if self._is_alarmed and not now.place:
            self._is_alarmed = False
            return int(now.gains[1:].argmax()) + 1
        first, shares = self._first_looks(now), now.shares
        if len(first):
            return int(first[shares[first].argmax()])
        others = np.flatnonzero(shares >= NEAR).tolist()
        if not others:
            return now.place or int(now.gains[1:].argmax()) + 1
        self._newest_other = next((place for place in others if place > self._newest_other), others[0])
        return self._newest_other
