"""The short version of ``python -m tests.chaos.relay_kills``."""

from __future__ import annotations

import pytest

from streams import Settings
from tests.chaos.relay_kills import relay_kills

pytestmark = [pytest.mark.real, pytest.mark.slow]


def test_a_relay_killed_at_random_moments_loses_nothing_doubles_nothing_and_keeps_each_keys_order(
    settings: Settings,
) -> None:
    figures = relay_kills(settings, kills=8)
    assert figures.is_clean, figures
    assert figures.events > 100
