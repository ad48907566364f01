"""The demo's processes: started, killed, and started again when somebody else kills them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from streams.dev import process
from streams.dev.process import Mark
from streams.errors import StreamsError

ROOT = Path(__file__).parent.parent.parent
_STOPPING = ((signal.SIGTERM, 25.0),)
_FAILURES = 3
_LOG_LINES = 15


@dataclass
class Child:
    name: str
    command: list[str]
    environment: Mapping[str, str]
    ends: bool  # by itself, when its work is done
    process: subprocess.Popen[bytes]
    failures: int = 0


@dataclass
class Children:
    """The processes of one run, with their logs in ``folder``.

    They run in that folder, which is how those of a run that was killed are found.
    """

    folder: Path
    environment: Mapping[str, str]
    restarts: int = 0
    _running: dict[str, Child] = field(default_factory=dict)

    def start(
        self,
        name: str,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        ends: bool = False,
    ) -> None:
        """Starts ``python <arguments>``."""
        command = [sys.executable, *arguments]
        merged = {**self.environment, **(environment or {})}
        self._running[name] = Child(name, command, merged, ends, self._spawn(name, command, merged))

    def kill(self, name: str) -> None:
        """Ends it as a power cut would; ``watch`` starts it again."""
        self._running[name].process.kill()
        self._running[name].process.wait()

    def watch(self) -> None:
        """Starts those again that have died.

        Raises:
            StreamsError: one fails again and again; the message has the end of its log.
        """
        for child in list(self._running.values()):
            code = child.process.poll()
            if code is None:
                continue
            if code == 0 and child.ends:
                del self._running[child.name]
                continue
            child.failures += code > 0  # a signal is somebody's doing; an exit status is a failure of its own
            if child.failures > _FAILURES:
                raise StreamsError(
                    f"{child.name} fails again and again; its log ends:\n{self._log_end(child.name)}"
                )
            self.restarts += 1
            child.process = self._spawn(child.name, child.command, child.environment)

    def is_running(self, name: str) -> bool:
        return name in self._running

    def stop(self, names: Iterable[str]) -> None:
        """Asks them to finish, all at once, and waits until they are gone."""
        leaving = [self._running.pop(name) for name in names]
        for child in leaving:
            child.process.terminate()
        until = time.monotonic() + _STOPPING[0][1]
        for child in leaving:
            try:
                child.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()

    def close(self) -> None:
        self.stop(list(self._running))

    def _spawn(
        self, name: str, command: Sequence[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        with self._log(name).open("ab") as log:
            # A session of its own: Ctrl-C is for us, and we end the others in order.
            return subprocess.Popen(
                command,
                cwd=self.folder,
                env={**os.environ, **environment, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _log_end(self, name: str) -> str:
        return "\n".join(self._log(name).read_text(errors="replace").splitlines()[-_LOG_LINES:])


def stop_leftovers(folder: Path) -> None:
    """Stops the processes of an earlier run that was killed before it could do so."""

    def belongs(command: Sequence[str]) -> bool:
        return len(command) > 1 and command[0] == sys.executable

    process.stop(Mark(folder.resolve(), leads=belongs, belongs=belongs), _STOPPING)
