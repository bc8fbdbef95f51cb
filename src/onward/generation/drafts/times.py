"""Measurement of whether speculative decoding pays."""

from __future__ import annotations

from dataclasses import dataclass

LEAST = 8  # least number of steps without proposals whose mean time is used


@dataclass
class SpeculationTimes:
    """The seconds of decoding steps with and without draft tokens, from which the speed-up of speculative decoding is
    computed."""

    seconds: float = 0.0  # seconds of steps with proposals, drafting included
    drafting: float = 0.0  # seconds of the draft, included in `seconds`
    tokens_per_row: float = 0.0  # new tokens per row, summed over the steps with proposals
    steps: int = 0
    plain_seconds: float = 0.0  # seconds of steps without proposals
    plain_steps: int = 0

    def add(self, seconds: float, drafting: float, tokens_per_row: float, speculated: bool) -> None:
        """Count a decoding step of `seconds`, of which the draft took `drafting`, that gave `tokens_per_row` new tokens
        per request; `speculated` is True if draft tokens were proposed in this step."""
        if speculated:
            self.seconds, self.drafting = self.seconds + seconds, self.drafting + drafting
            self.tokens_per_row, self.steps = self.tokens_per_row + tokens_per_row, self.steps + 1
        else:
            self.plain_seconds, self.plain_steps = self.plain_seconds + seconds, self.plain_steps + 1

    def speed_up(self) -> float | None:
        """Return the speed of decoding with draft tokens divided by the speed without them; None if no step had draft
        tokens.

        The time of a step without draft tokens is the mean over such steps, if there were at least LEAST. Otherwise the
        mean time of verification is used, which is at least as long; the result is then an upper bound.
        """
        if not self.steps:
            return None
        verifying = (self.seconds - self.drafting) / self.steps
        plain = self.plain_seconds / self.plain_steps if self.plain_steps >= LEAST else verifying
        return self.tokens_per_row * plain / self.seconds


def expected_tokens(rate: float, num_draft_tokens: int) -> float:
    """Compute the expected number of tokens per step of speculative decoding if each of K = `num_draft_tokens` proposed
    tokens is accepted with probability a = `rate`: (1 - a ** (K + 1)) / (1 - a) (Leviathan et al. 2023, equation 1)."""
    return num_draft_tokens + 1 if rate == 1 else (1 - rate ** (num_draft_tokens + 1)) / (1 - rate)
