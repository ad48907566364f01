"""Real processes for the tests: started, watched, and killed where a kill point says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from streams.settings import Settings

ROOT = Path(__file__).parent.parent


def environment(settings: Settings, kill_at: str | None = None, **extra: str) -> dict[str, str]:
    """The environment that makes a subprocess read these settings."""
    mine = {
        f"STREAMS_{name.upper()}": str(getattr(settings, name))
        for name in (
            "database_url",
            "kafka",
            "redis_url",
            "topic_prefix",
            "slot",
            "sweep_seconds",
            "batch_size",
            "group_protocol",
        )
    }
    if kill_at is not None:
        mine["STREAMS_KILL_AT"] = kill_at
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("STREAMS_")}
    return {**inherited, **mine, "PYTHONPATH": str(ROOT), **extra}


def start(
    arguments: Sequence[str], settings: Settings, kill_at: str | None = None, **extra: str
) -> subprocess.Popen[str]:
    """Starts ``python <arguments>``; its output is one text stream."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=environment(settings, kill_at, **extra),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def streams(*arguments: str) -> list[str]:
    """The arguments that run the command line in a subprocess."""
    return ["-m", "streams.cli.main", *arguments]


def wait_killed(process: subprocess.Popen[str], seconds: float = 30) -> None:
    """Waits for a process to reach its kill point; fails, with its output, if it ends in another way."""
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        raise AssertionError(f"the kill point was not reached within {seconds} s:\n{output}") from None
    assert process.returncode == -signal.SIGKILL, f"ended with {process.returncode}:\n{output}"


def stop(process: subprocess.Popen[str], seconds: float = 20) -> str:
    """Ends a process as an operator would, and answers its output."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        raise AssertionError(f"did not stop within {seconds} s:\n{output}") from None
    return output


def eventually(condition: Callable[[], bool], what: str, seconds: float = 30) -> None:
    """Waits until a condition holds; the only waiting in the tests, so that nothing rests on a sleep's length."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)
