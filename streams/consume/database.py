"""A loop's connection to the database, and how it waits for one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from streams.settings import Settings
from streams.stores.postgres import Connection, connect

_FIRST_WAIT_SECONDS = 0.1
_LONGEST_WAIT_SECONDS = 3.0


class Database:
    """One connection, made anew when it is lost.

    Raises (on construction):
        ServerUnavailable: the database does not answer.
    """

    def __init__(self, settings: Settings, group: str, stop: threading.Event) -> None:
        self._settings, self._group, self._stop = settings, group, stop
        self._delay = _FIRST_WAIT_SECONDS
        self.connection: Connection = self._connect()

    def ensure(self) -> None:
        """Makes the connection usable.

        Raises:
            ServerUnavailable: the database does not answer.
        """
        if self.connection.closed or self.connection.broken:
            self.connection = self._connect()
        self._delay = _FIRST_WAIT_SECONDS

    def wait(self, meanwhile: Callable[[], object]) -> None:
        """Lets some time pass, more each time, calling ``meanwhile`` again and again."""
        self.connection.close()
        until = time.monotonic() + self._delay
        while time.monotonic() < until and not self._stop.is_set():
            meanwhile()
        self._delay = min(self._delay * 2, _LONGEST_WAIT_SECONDS)

    def close(self) -> None:
        self.connection.close()

    def _connect(self) -> Connection:
        # Autocommit, so that every transaction is one that the code opened, and none is left open by a lone SELECT.
        return connect(
            self._settings.database_url,
            name=f"fencepost {self._group}",
            autocommit=True,
            seconds=self._settings.connect_seconds,
        )
