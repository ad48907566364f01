"""How one server starts, is found again, and stops. Callers hold the directory's lock."""

from __future__ import annotations

import subprocess
import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from streams.dev import ports, process
from streams.dev.server import Attempt, LocalServer
from streams.dev.state import read_state, write_state
from streams.errors import ServerUnavailable

POLL_SECONDS = 0.05
SILENT_SECONDS = 15.0
DYING_SECONDS = 3.0
LOG_LINES = 15
LOG_BYTES = 10_000_000


def is_running(server: LocalServer) -> bool:
    state = read_state(server.home)
    return process.is_ours(state.pid, state.created, server.mark)


def is_serving(server: LocalServer, attempt: Attempt) -> bool:
    """Whether the server runs and answers.

    A process that was killed is seen alive for another moment, so one that does not answer gets time to do either.

    Raises:
        ServerUnavailable: it goes on running and does not answer.

    """
    deadline = time.monotonic() + SILENT_SECONDS
    while is_running(server):
        reason = server.problem(read_state(server.home).ports["port"])
        if reason is None:
            return True
        if time.monotonic() > deadline:
            hint = f"look at 'streams dev logs {server.name}', or stop it with 'streams dev down'"
            raise ServerUnavailable(f"{server.name} runs but does not answer ({reason}): {hint}")
        attempt.pause(POLL_SECONDS)
    return False


def endpoint(server: LocalServer) -> str:
    return server.endpoint(read_state(server.home).ports["port"])


def clear(server: LocalServer) -> None:
    """Stops what a killed run left: one data folder must not have two servers, and the ports are wanted."""
    process.stop(server.mark, server.stopping)


def assign_ports(server: LocalServer, taken: Collection[int], *, new_ports: bool = False) -> None:
    """Gives a stopped server its ports: those it had before, or free ones.

    Raises:
        ServerUnavailable: another process has a port at which clients may expect this server.

    """
    state = read_state(server.home)
    # A killed server can hold its ports for another moment after it is no longer seen.
    patience = DYING_SECONDS if state.answered else 0.0
    busy = [port for port in state.ports.values() if not ports.becomes_free(port, patience)]
    if busy and state.answered and not new_ports:
        raise ServerUnavailable(
            f"port {busy[0]} of {server.name} is in use by {ports.holder(busy[0])}: "
            "stop that process, or let the server move: streams dev up --new-ports"
        )
    chosen: dict[str, int] = {}
    for name in server.port_names:
        known = state.ports.get(name)
        chosen[name] = ports.choose({*taken, *chosen.values()}) if known is None or known in busy else known
    write_state(server.home, replace(state, ports=chosen))


def start(server: LocalServer, attempt: Attempt) -> None:
    """Starts a cleared server on its assigned ports, returns when it answers; stops it again if that fails."""
    began = time.monotonic()
    state = read_state(server.home)
    attempt.report(f"{server.name}: starting")
    launch = server.prepare(state.ports, attempt)
    attempt.pause(0)
    _rotate(server.log)
    child = process.spawn(launch, server.log)
    state = replace(state, pid=child.pid, created=process.created(child.pid))
    write_state(server.home, state)
    try:
        _await_answer(server, state.ports, child, attempt)
    except BaseException:
        stop(server)
        raise
    write_state(server.home, replace(state, answered=True))
    attempt.report(f"{server.name}: ready after {time.monotonic() - began:.1f} s")


def stop(server: LocalServer, *, kill: bool = False) -> bool:
    """Stops the server and whatever is left of it; whether there was anything. The data stays."""
    found = bool(process.owned(server.mark))
    if found:
        process.stop(server.mark, () if kill else server.stopping)
    if server.home.exists():
        write_state(server.home, read_state(server.home).stopped())
    return found


def _await_answer(
    server: LocalServer, given: Mapping[str, int], child: subprocess.Popen[bytes], attempt: Attempt
) -> None:
    deadline = time.monotonic() + server.ready_seconds
    while True:
        reason = server.problem(given["port"])
        # First, for somebody else may have taken the port meanwhile, and answer there.
        if child.poll() is not None:
            said = f"{server.name} ended while starting (exit code {child.returncode})"
            raise ServerUnavailable(f"{said}{_log_end(server)}")
        if reason is None:
            return
        if time.monotonic() > deadline:
            said = f"{server.name} did not answer within {server.ready_seconds:.0f} s ({reason})"
            raise ServerUnavailable(f"{said}{_log_end(server)}")
        attempt.pause(POLL_SECONDS)


def _log_end(server: LocalServer) -> str:
    return f"; the end of {server.log}:\n" + "\n".join(last_lines(server.log, LOG_LINES))


def last_lines(log: Path, count: int) -> list[str]:
    with log.open(errors="replace") as lines:
        return [line.rstrip("\n") for line in deque(lines, maxlen=count)]


def _rotate(log: Path) -> None:
    if log.exists() and log.stat().st_size > LOG_BYTES:
        log.replace(log.with_suffix(".log.1"))
