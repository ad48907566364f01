"""Kill points cost nothing unarmed, and an unknown one is not armed silently."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from streams import points
from streams.errors import ConfigurationError


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What would have been killed, and how."""
    kills: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, with_signal: kills.append((pid, with_signal)))
    return kills


def test_an_unknown_point_is_refused_with_what_there_is() -> None:
    with pytest.raises(
        ConfigurationError, match=r"no kill point: relay\.producd; known are .*relay\.produced"
    ):
        points._armed("relay.producd")


def test_a_process_with_an_unknown_point_does_not_start() -> None:
    run = subprocess.run(
        [sys.executable, "-c", "import streams.points"],
        env={**os.environ, "STREAMS_KILL_AT": "nowhere"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode != 0
    assert "names no kill point: nowhere" in run.stderr


def test_an_armed_point_ends_its_process_by_sigkill() -> None:
    run = subprocess.run(
        [sys.executable, "-c", "from streams.points import reach; reach('relay.produced'); print('went on')"],
        env={**os.environ, "STREAMS_KILL_AT": "relay.produced"},
        capture_output=True,
        check=False,
    )
    assert (run.returncode, run.stdout) == (-signal.SIGKILL, b"")


def test_a_point_may_be_armed_for_a_later_time(killed: list[tuple[int, int]]) -> None:
    reach = points._armed("relay.produced:3")
    for _ in range(2):
        reach("relay.produced")
        reach("relay.confirmed")
    assert killed == []
    reach("relay.produced")
    assert killed == [(os.getpid(), signal.SIGKILL)]


def test_unarmed_nothing_happens(killed: list[tuple[int, int]]) -> None:
    for point in points.POINTS:
        points._nothing(point)
    assert killed == []


def test_a_count_that_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"relay\.produced:often"):
        points._armed("relay.produced:often")
