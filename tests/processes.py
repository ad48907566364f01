"""Real processes for the tests: started, watched, and killed where a kill point says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
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


class Process:
    """A subprocess whose output goes into a file: a pipe that nobody reads would stop it when it is full."""

    def __init__(self, arguments: Sequence[str], environment: dict[str, str]) -> None:
        self._output = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 - lives as long as the process's object
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            env=environment,
            cwd=ROOT,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.pid = self._process.pid

    @property
    def output(self) -> str:
        self._output.seek(0)
        return self._output.read()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self, seconds: float = 30) -> int:
        """The exit status; a process that does not end in time is killed, and its output shown."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise AssertionError(f"did not end within {seconds} s:\n{self.output}") from None

    def kill(self) -> None:
        """Ends it at once, if it still runs."""
        self._process.kill()
        self._process.wait()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None


def start(arguments: Sequence[str], settings: Settings, kill_at: str | None = None, **extra: str) -> Process:
    """Starts ``python <arguments>`` under these settings."""
    return Process(arguments, environment(settings, kill_at, **extra))


def streams(*arguments: str) -> list[str]:
    """The arguments that run the command line in a subprocess."""
    return ["-m", "streams.cli.main", *arguments]


def wait_killed(process: Process) -> None:
    """Waits for a process to reach its kill point; fails, with its output, if it ends in another way."""
    status = process.wait()
    assert status == -signal.SIGKILL, f"ended with {status}:\n{process.output}"


def stop(process: Process) -> str:
    """Ends a process as an operator would, and answers its output."""
    if process.is_running:
        process.signal(signal.SIGTERM)
    process.wait(25)
    return process.output


def eventually(condition: Callable[[], bool], what: str | Callable[[], str], seconds: float = 30) -> None:
    """Waits until a condition holds; the only waiting in the tests, so that nothing rests on a sleep's length."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what if isinstance(what, str) else what()}")
        time.sleep(0.02)
