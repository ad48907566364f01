"""Runs the loops of a process, each in a thread of its own, and brings back the one that falls."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence

from streams.app import Processor
from streams.broker import registry
from streams.consume.retries import RetryWorker
from streams.consume.worker import Worker
from streams.relay.relay import Relay
from streams.settings import Settings

logger = logging.getLogger(__name__)

_FIRST_DELAY_SECONDS = 1.0
_LONGEST_DELAY_SECONDS = 30.0


class Supervisor:
    """Processors, and where wanted a relay, in one process.

    Args:
        stop: set to end all of it.
    """

    def __init__(
        self,
        settings: Settings,
        processors: Sequence[Processor],
        stop: threading.Event,
        *,
        with_relay: bool = False,
    ) -> None:
        self._stop = stop
        name = f"{socket.gethostname()}/{os.getpid()}"
        self.workers = {processor.name: Worker(settings, processor, name, stop) for processor in processors}
        loops: dict[str, Callable[[], None]] = {}
        for processor in processors:
            loops[processor.group] = self.workers[processor.name].run
            loops[f"{processor.group}.retry"] = RetryWorker(settings, processor, name, stop).run
        if with_relay:
            loops["relay"] = Relay(settings, stop, registry.framing(settings, processors[0].catalog)).run
        self._threads = [
            threading.Thread(target=self._keep_running, args=(name, loop), name=name, daemon=True)
            for name, loop in loops.items()
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self, seconds: float) -> list[str]:
        """Waits for all loops to end; answers those that have not by then."""
        deadline = threading.Event()
        timer = threading.Timer(seconds, deadline.set)
        timer.daemon = True
        timer.start()
        for thread in self._threads:
            while thread.is_alive() and not deadline.is_set():
                thread.join(0.05)
        timer.cancel()
        return [thread.name for thread in self._threads if thread.is_alive()]

    def _keep_running(self, name: str, loop: Callable[[], None]) -> None:
        delay = _FIRST_DELAY_SECONDS
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                loop()
            except Exception:  # one loop's end must not be the others'
                if time.monotonic() - began > _LONGEST_DELAY_SECONDS:
                    delay = _FIRST_DELAY_SECONDS
                logger.exception("%s fell; it begins again in %.0f s", name, delay)
                self._stop.wait(delay)
                delay = min(delay * 2, _LONGEST_DELAY_SECONDS)
