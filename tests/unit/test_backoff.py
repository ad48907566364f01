"""When a failed record is tried again."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams import ConfigurationError, Retry

policies = st.builds(
    Retry,
    base_seconds=st.floats(0.01, 60),
    factor=st.floats(1, 10),
    cap_seconds=st.floats(1, 3600),
    jitter=st.floats(0, 0.9),
)


@given(policies, st.integers(1, 300), st.randoms())
def test_a_delay_lies_between_its_full_length_and_that_less_the_jitter(
    policy: Retry, attempt: int, rng: random.Random
) -> None:
    full = min(policy.cap_seconds, policy.base_seconds * policy.factor ** (attempt - 1))
    assert full * (1 - policy.jitter) <= policy.delay(attempt, rng) <= full


@given(policies, st.integers(301, 100_000))
def test_a_delay_stays_finite_however_many_attempts_there_were(policy: Retry, attempt: int) -> None:
    assert 0 < policy.delay(attempt) <= policy.cap_seconds


def test_without_jitter_delays_grow_by_the_factor_up_to_the_cap() -> None:
    policy = Retry(base_seconds=1, factor=3, cap_seconds=20, jitter=0)
    assert [policy.delay(attempt) for attempt in range(1, 6)] == [1, 3, 9, 20, 20]


def test_jitter_spreads_what_failed_together() -> None:
    assert len({Retry().delay(1) for _ in range(100)}) > 50


@pytest.mark.parametrize(
    ("delay", "tier"),
    [(0, "1s"), (0.7, "1s"), (1, "1s"), (1.1, "10s"), (59, "1m"), (60, "1m"), (61, "10m"), (86_400, "10m")],
)
def test_a_delay_travels_through_the_smallest_tier_that_holds_it(delay: float, tier: str) -> None:
    assert Retry().tier(delay) == tier


def test_tiers_are_called_by_their_largest_unit() -> None:
    assert Retry(tier_seconds=(1, 90, 120, 3600, 7200)).tiers == ("1s", "90s", "2m", "1h", "2h")


@pytest.mark.parametrize(
    "options",
    [
        {"attempts": 0},
        {"base_seconds": 0},
        {"factor": 0.5},
        {"jitter": 1},
        {"jitter": -0.1},
        {"cap_seconds": 0},
        {"cap_seconds": -1},
        {"tier_seconds": ()},
        {"tier_seconds": (10, 1)},
        {"tier_seconds": (1, 1)},
        {"tier_seconds": (0, 1)},
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        Retry(**options)
