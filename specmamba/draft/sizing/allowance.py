"""What drafts may lose: an account of the time that they took and of the plain steps that their tokens would take.

Drafts that are made to see whether they pay are paid from a share of the time of all steps, and from what drafts have
gained before. So a text in which drafts never pay takes hardly longer than without them, whatever the predictions
say. (A bound on exploration in terms of a default that is known: Wu et al., "Conservative Bandits", ICML 2016.)
"""

from __future__ import annotations

from dataclasses import dataclass

SHARE = 0.0075  # of the time of all steps
AT_FIRST = 64.0  # plain steps, with each number of requests: predicted times have not been seen yet
MOST = 96.0  # that are kept of gains
OVERDRAFT = (
    16.0  # that a sign of gains, such as text that repeats itself, may take, and drafts that were thought to pay
)
LEAST = -4.0 * OVERDRAFT  # that is owed: a machine that was slow for a while ends no drafts for ever


@dataclass
class Allowance:
    """What drafts may lose, in plain steps, for some number of requests."""

    left: float = AT_FIRST

    def pass_steps(self, number: int) -> None:
        """Earn the share of some steps of any kind."""
        self.left = min(self.left + SHARE * number, MOST)

    def charge(self, seconds: float, num_tokens: float, plain_seconds: float) -> None:
        """Count steps that drafted.

        Args:
            seconds: that they took, without what held up single ones.
            num_tokens: that a request got from them, a mean over the requests.
            plain_seconds: of a plain step.
        """
        self.left = min(max(self.left - (seconds / plain_seconds - num_tokens), LEAST), MOST)

    @property
    def may_try(self) -> bool:
        """Whether drafts may be made to see what they bring."""
        return self.left > 0.0

    @property
    def may_follow_a_sign(self) -> bool:
        """Whether drafts may be made where something says that they pay."""
        return self.left > -OVERDRAFT
