"""What every local server says about itself; how it starts and stops is the same for all, in ``lifecycle``."""

from __future__ import annotations

import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from streams.dev.process import Launch, Mark, Steps
from streams.dev.state import Report, ServerName


class Cancelled(Exception):
    """The start was called off."""


class Attempt:
    """One run of ``up``: how it reports, and whether it was called off meanwhile."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self._off = threading.Event()

    def call_off(self) -> None:
        self._off.set()

    def pause(self, seconds: float) -> None:
        """Sleeps.

        Raises:
            Cancelled: the attempt was called off, before or during the pause.

        """
        if self._off.wait(seconds):
            raise Cancelled


class LocalServer(ABC):
    """One server in one dev directory."""

    name: ClassVar[ServerName]
    port_names: ClassVar[Sequence[str]] = ("port",)
    stopping: ClassVar[Steps] = ((signal.SIGTERM, 10.0),)
    ready_seconds: ClassVar[float] = 60.0

    def __init__(self, directory: Path) -> None:
        self.home = directory.resolve() / self.name
        self.log = self.home / "server.log"

    @property
    def data(self) -> Path:
        return self.home / "data"

    @property
    def mark(self) -> Mark:
        return Mark(self.home, leads=self.leads, belongs=self.leads)

    @abstractmethod
    def leads(self, command: Sequence[str]) -> bool:
        """Whether the command line is that of this kind of server."""

    @abstractmethod
    def prepare(self, ports: Mapping[str, int], attempt: Attempt) -> Launch:
        """Brings programs, configuration and an initialised data folder into place."""

    @abstractmethod
    def problem(self, port: int) -> str | None:
        """Asks the server something real; None if it answered, otherwise why not."""

    @abstractmethod
    def endpoint(self, port: int) -> str:
        """What a client puts into the server's setting."""
