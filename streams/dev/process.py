"""Processes: whose they are, how they start detached, how they stop."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from streams.errors import ConfigurationError

try:
    import psutil
except ImportError as error:
    raise ConfigurationError("the local servers need the dev extra: pip install 'fencepost[dev]'") from error

Steps = Sequence[tuple[signal.Signals, float]]  # signals to send, each with the seconds it is given

# The kernel derives a start time from the boot time, which shifts by fractions when the clock is adjusted.
CREATED_TOLERANCE = 2.0
ORPHAN_SECONDS = 5.0
KILL_SECONDS = 10.0

# Popen objects of servers that outlive us: dropping one while its process runs warns, and polling one reaps it.
_started: list[subprocess.Popen[bytes]] = []


@dataclass(frozen=True, slots=True)
class Account:
    """Whom a process runs as."""

    name: str
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Mark:
    """How the processes of one server are told from all others: by working directory and command line."""

    folder: Path
    leads: Callable[[Sequence[str]], bool]  # the command line of the process that we start
    belongs: Callable[[Sequence[str]], bool]  # of that one and of its children


@dataclass(frozen=True, slots=True)
class Launch:
    """A server's process to be: command, folder, and whom it runs as (None: as ourselves)."""

    command: Sequence[str]
    folder: Path
    account: Account | None = None
    environment: Mapping[str, str] | None = None


def spawn(launch: Launch, log: Path) -> subprocess.Popen[bytes]:
    """Starts the process in a session of its own, so that neither our exit nor Ctrl-C here reaches it."""
    with log.open("ab") as output:
        started = subprocess.Popen(
            launch.command,
            cwd=launch.folder,
            env={**os.environ, **(launch.environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **run_as(launch.account),
        )
    _started[:] = [process for process in _started if process.poll() is None]
    _started.append(started)
    return started


class RunAs(TypedDict):
    """The arguments by which subprocess runs something as somebody else."""

    user: int | None
    group: int | None
    extra_groups: list[int] | None


def run_as(account: Account | None) -> RunAs:
    if account is None:
        return {"user": None, "group": None, "extra_groups": None}
    return {"user": account.uid, "group": account.gid, "extra_groups": []}


def created(pid: int) -> float | None:
    """When the process began, in seconds since the epoch; None if it is gone."""
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.NoSuchProcess:
        return None


def is_ours(pid: int | None, began: float | None, mark: Mark) -> bool:
    """Whether the recorded process still is the server that we started.

    A pid alone proves nothing: after a crash or a reboot it may belong to anybody.
    """
    if pid is None or began is None:
        return False
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - began) < CREATED_TOLERANCE
    except psutil.NoSuchProcess:
        return False
    return same and _runs_in(process, mark.folder, mark.leads)


def owned(mark: Mark) -> list[psutil.Process]:
    """Every process of the server, recorded or not.

    Finds what a record misses: a server whose starter died before it could write down the pid, and the children
    of a killed postmaster.
    """
    return [process for process in psutil.process_iter() if _runs_in(process, mark.folder, mark.belongs)]


def _runs_in(process: psutil.Process, folder: Path, fits: Callable[[Sequence[str]], bool]) -> bool:
    try:
        command = process.cmdline()  # empty for a zombie
        return bool(command) and fits(command) and Path(process.cwd()).is_relative_to(folder)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False  # gone meanwhile, or another account's


def stop(mark: Mark, steps: Steps) -> None:
    """Stops every process of the server: politely by ``steps``, then by SIGKILL. Returns when all are gone."""
    leaders = [process for process in owned(mark) if _runs_in(process, mark.folder, mark.leads)]
    for number, seconds in steps:
        _send(leaders, number)
        _, leaders = psutil.wait_procs(leaders, timeout=seconds)
    _kill(leaders)
    # Children end by themselves once they notice that their parent is gone. Signals mean other things to them.
    _, orphans = psutil.wait_procs(owned(mark), timeout=ORPHAN_SECONDS)
    _kill(orphans)


def _kill(processes: Sequence[psutil.Process]) -> None:
    _send(processes, signal.SIGKILL)
    psutil.wait_procs(processes, timeout=KILL_SECONDS)


def _send(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(number)  # psutil compares the start time first: a reused pid gets no signal
        except psutil.NoSuchProcess:
            continue
