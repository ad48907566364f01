"""Named places where a test can kill the process, to prove what a crash there does.

``reach("relay.produced")`` stands where a crash is interesting. Unarmed it does nothing. A test arms one
with ``STREAMS_KILL_AT=relay.produced`` in a subprocess's environment, or ``relay.produced:3`` for the
third time it is reached, and the process ends there by SIGKILL, as if the power had gone.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Final

from streams.errors import ConfigurationError

POINTS: Final = frozenset(
    {
        "append.before_commit",
        "append.after_commit",
        "relay.produced",
        "relay.acknowledged",
        "relay.confirmed",
        "switch.cursor_written",
        "switch.slot_made",
        "switch.closing",
        "consume.fetched",
        "consume.decided",
        "consume.in_transaction",
        "consume.database_committed",
        "consume.offsets_committed",
        "retry.row_written",
        "retry.woken",
        "redrive.requested",
    }
)


def _nothing(point: str) -> None:  # noqa: ARG001 - stands in for an armed point
    return


def _armed(setting: str) -> Callable[[str], None]:
    name, _, times = setting.partition(":")
    if name not in POINTS:
        raise ConfigurationError(
            f"STREAMS_KILL_AT names no kill point: {name}; known are {', '.join(sorted(POINTS))}"
        )
    if times and not times.isdecimal():
        raise ConfigurationError(
            f"STREAMS_KILL_AT={setting}: what stands behind the colon is how many times, from 1"
        )
    left = int(times or 1)

    def reach(point: str) -> None:
        nonlocal left
        if point == name:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return reach


reach: Callable[[str], None] = (
    _armed(os.environ["STREAMS_KILL_AT"]) if "STREAMS_KILL_AT" in os.environ else _nothing
)
