"""When a failed record is tried again."""

from __future__ import annotations

import random
from dataclasses import dataclass

from streams.errors import ConfigurationError, Failure

_UNITS = ((3600, "h"), (60, "m"), (1, "s"))


@dataclass(frozen=True)
class Retry:
    """Exponential backoff with jitter.

    The n-th delay is ``base_seconds * factor ** (n - 1)``, at most ``cap_seconds``, less a random share of up to
    ``jitter``, so that records which failed together do not come back together.

    Attributes:
        attempts: how often a record is tried in all, the first time included.
        tier_seconds: the delays that have a retry topic; a record travels through the smallest that holds its delay.
    """

    attempts: int = 8
    base_seconds: float = 1.0
    factor: float = 3.0
    cap_seconds: float = 600.0
    jitter: float = 0.3
    tier_seconds: tuple[int, ...] = (1, 10, 60, 600)

    def __post_init__(self) -> None:
        seconds = min(self.base_seconds, self.cap_seconds)
        if self.attempts < 1 or seconds <= 0 or self.factor < 1 or not 0 <= self.jitter < 1:
            raise ConfigurationError(
                f"{self}: attempts must be at least 1, base_seconds and cap_seconds above 0, factor at least 1, "
                "jitter in [0, 1)"
            )
        if (
            not self.tier_seconds
            or list(self.tier_seconds) != sorted(set(self.tier_seconds))
            or self.tier_seconds[0] < 1
        ):
            raise ConfigurationError(f"tier_seconds must rise from at least 1: {self.tier_seconds}")

    def delay(self, attempt: int, rng: random.Random | None = None) -> float:
        """Seconds to wait after a failed attempt, counted from 1."""
        try:
            full = min(self.cap_seconds, self.base_seconds * self.factor ** (attempt - 1))
        except OverflowError:  # far beyond the cap
            full = self.cap_seconds
        share = (rng or random).random() * self.jitter
        return full * (1 - share)

    def delay_of(self, failure: Failure, attempt: int) -> float:
        """Seconds to wait after a failed attempt: what the failure asks for, or else what the policy says."""
        return self.delay(attempt) if failure.delay_seconds is None else failure.delay_seconds

    @property
    def tiers(self) -> tuple[str, ...]:
        """What retry topics are called after."""
        return tuple(_label(seconds) for seconds in self.tier_seconds)

    def tier(self, delay_seconds: float) -> str:
        """The tier a delay travels through; delays above the largest use that one."""
        fitting = [seconds for seconds in self.tier_seconds if seconds >= delay_seconds]
        return _label(fitting[0] if fitting else self.tier_seconds[-1])


def _label(seconds: int) -> str:
    return next(f"{seconds // size}{unit}" for size, unit in _UNITS if seconds % size == 0)
