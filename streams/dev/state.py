"""What the servers of one directory have on disk: ports and process of each, the endpoints, the lock.

Imports nothing beyond the standard library, so that the command line can name the servers without the dev extra.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

from streams.errors import ConfigurationError

Report = Callable[[str], None]

LOCK_POLL_SECONDS = 0.1


class ServerName(StrEnum):
    """The servers; the value names the folder, the log and the command-line argument."""

    KAFKA = "kafka"
    POSTGRES = "postgres"
    REDIS = "redis"
    REGISTRY = "registry"

    @property
    def setting(self) -> str:
        """The setting that holds the server's endpoint."""
        return SETTINGS[self]

    @property
    def variable(self) -> str:
        """The environment variable that configures the endpoint from outside."""
        return f"STREAMS_{self.setting.upper()}"


SETTINGS = {
    ServerName.KAFKA: "kafka",
    ServerName.POSTGRES: "database_url",
    ServerName.REDIS: "redis_url",
    ServerName.REGISTRY: "registry_url",
}
ALWAYS = (ServerName.KAFKA, ServerName.POSTGRES, ServerName.REDIS)


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where the servers answer; None for one that neither runs here nor is configured."""

    kafka: str | None = None
    database_url: str | None = None
    redis_url: str | None = None
    registry_url: str | None = None

    @classmethod
    def of(cls, by_server: Mapping[ServerName, str]) -> Endpoints:
        return cls(**{name.setting: endpoint for name, endpoint in by_server.items()})


def configured() -> dict[ServerName, str]:
    """The endpoints that the environment gives; those servers are never started here."""
    found = {name: os.environ.get(name.variable, "") for name in ServerName}
    return {name: endpoint for name, endpoint in found.items() if endpoint}


@dataclass(frozen=True, slots=True)
class ServerState:
    """``server.json``: what outlives the command that started a server."""

    ports: dict[str, int] = field(default_factory=dict)
    answered: bool = False  # whether it ever did on these ports: if so, clients may know them
    pid: int | None = None
    created: float | None = None

    def stopped(self) -> ServerState:
        return replace(self, pid=None, created=None)


def read_state(home: Path) -> ServerState:
    found = read_json(home / "server.json")
    return ServerState(**found) if found else ServerState()


def write_state(home: Path, state: ServerState) -> None:
    write_json(home / "server.json", asdict(state))


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file; empty where there is no file.

    Raises:
        ConfigurationError: the file is not what these commands wrote.

    """
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigurationError(f"{path} is damaged ({error}); delete it") from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"{path} is damaged (not an object); delete it")
    return found


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replaces the file in one step: a reader sees the old content or the new, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(content, indent=2) + "\n")
    draft.replace(path)


@contextmanager
def locked(
    path: Path, waiting: Callable[[], None], pause: Callable[[float], None] = time.sleep
) -> Iterator[None]:
    """Holds the lock file for the block; calls ``waiting`` once if somebody else holds it now.

    The kernel drops the lock when its holder dies, so there is no stale lock. The file itself is never deleted:
    a second process that had opened the old one would then hold a lock that nobody else sees.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        if not _take(handle):
            waiting()
            while not _take(handle):
                pause(LOCK_POLL_SECONDS)
        yield


def _take(handle: IO[str]) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
