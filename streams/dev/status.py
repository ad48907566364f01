"""What runs, what does not, and where it answers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from streams.dev import containers, lifecycle
from streams.dev.server import LocalServer
from streams.dev.servers import server
from streams.dev.state import ALWAYS, ServerName, configured, read_state


class State(StrEnum):
    RUNNING = "running"
    CONFIGURED = "configured"  # by the environment; whether it answers is not asked
    SILENT = "not answering"
    CRASHED = "crashed"
    STOPPED = "stopped"


WELL = frozenset({State.RUNNING, State.CONFIGURED})


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """One server. ``detail`` says in words what the state leaves open: the process, the variable, the reason."""

    name: ServerName
    state: State
    endpoint: str | None = None
    pid: int | None = None
    detail: str = ""

    @property
    def is_well(self) -> bool:
        return self.state in WELL


def status(directory: Path) -> list[ServerStatus]:
    """Every server's status, asked anew. The registry is left out where nobody ever started it."""
    found = [_status(directory, name) for name in ServerName]
    return [each for each in found if each.name in ALWAYS or each.state is not State.STOPPED]


def _status(directory: Path, name: ServerName) -> ServerStatus:
    outside = configured().get(name)
    if outside is not None:
        return ServerStatus(name, State.CONFIGURED, outside, detail=f"by {name.variable}")
    contained = containers.running(directory).get(name)
    if contained is not None:
        return _asked(server(directory, name), containers.PORTS[name], contained, "container")
    return _process_status(server(directory, name))


def _process_status(local: LocalServer) -> ServerStatus:
    state = read_state(local.home)
    if state.pid is None:
        return ServerStatus(local.name, State.STOPPED)
    if not lifecycle.is_running(local):
        return ServerStatus(local.name, State.CRASHED, detail=f"process {state.pid} is gone")
    port = state.ports["port"]
    return replace(_asked(local, port, local.endpoint(port), f"pid {state.pid}"), pid=state.pid)


def _asked(local: LocalServer, port: int, endpoint: str, where: str) -> ServerStatus:
    problem = local.problem(port)
    if problem is not None:
        return ServerStatus(
            local.name, State.SILENT, endpoint, detail=f"{where}: {' '.join(problem.split())}"
        )
    return ServerStatus(local.name, State.RUNNING, endpoint, detail=where)
