"""Debezium's PostgreSQL connector in one process of Kafka Connect, from Maven's jars, in a folder of its own."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import psycopg
from psycopg import conninfo

from streams.dev import ports
from streams.dev.kafka import SHIPPED
from streams.dev.lifecycle import last_lines
from streams.dev.maven import cached, run_maven
from streams.dev.programs import find_java
from streams.dev.server import Attempt
from streams.dev.servers import silent
from streams.settings import Settings
from tests.processes import eventually

HERE = Path(__file__).parent
EVENT_STORE = HERE / "event_store.properties"
OUTBOX = HERE / "outbox.properties"
VERSION = "3.6.1.Final"
# The rest is what Java chooses for the machine; for the heap that would be a quarter of the memory.
HEAP = "-Xmx1g"
READY_SECONDS = 60.0
STOP_SECONDS = 20.0
LOG_LINES = 40

_READER = "SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s AND active"


class Debezium:
    """A process of Kafka Connect with one connector."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.pid = process.pid
        self._process = process
        self._log = log

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """Ends it as a crash would."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Ends it as an operator would, and by force where that takes too long."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    @property
    def output(self) -> str:
        """The end of its log."""
        return "\n".join(last_lines(self._log, LOG_LINES))


@contextlib.contextmanager
def debezium(
    settings: Settings,
    folder: Path,
    text: str,
    changed: Mapping[str, str],
    flush_seconds: float = 1.0,
) -> Iterator[Debezium]:
    """Runs a connector until the block ends; entered once it reads its slot.

    Args:
        folder: configuration, log and offsets; started again in the same folder it goes on from its offsets.
        text: the connector's properties.
        changed: what differs from them, beside the database.
        flush_seconds: how often it writes down how far it is.

    Raises:
        AssertionError: it ended, or does not read its slot in time; the message shows the end of its log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    worker, connector, log = folder / "worker.properties", folder / "connector.properties", folder / "log"
    worker.write_text(_lines(_worker(settings, folder, flush_seconds)))
    # The last of two equal names counts.
    connector.write_text(text + _lines({**_database(settings), **changed}))
    slot = changed["slot.name"]
    with psycopg.connect(settings.database_url, autocommit=True) as connection:

        def is_read() -> bool:
            return connection.execute(_READER, (slot,)).fetchone() is not None

        # The server may take the reader that was just killed for a living one, and so would the wait below.
        eventually(lambda: not is_read(), f"slot {slot} is free")
        running = Debezium(_start(folder, [worker, connector], log), log)
        try:
            eventually(
                lambda: is_read() or not running.is_running,
                lambda: f"Debezium does not read slot {slot}; the end of its log:\n{running.output}",
                READY_SECONDS,
            )
            assert running.is_running, f"Debezium ended; the end of its log:\n{running.output}"
            yield running
        finally:
            running.stop()


def _start(folder: Path, properties: list[Path], log: Path) -> subprocess.Popen[bytes]:
    logging = f"-Dlog4j2.configurationFile={SHIPPED / 'kafka-log4j2.xml'}"
    main = "org.apache.kafka.connect.cli.ConnectStandalone"
    with log.open("ab") as output:
        return subprocess.Popen(
            [str(find_java()), HEAP, logging, "-cp", f"{_jars()}/*", main, *map(str, properties)],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _jars() -> Path:
    attempt = Attempt(silent)

    def fill(folder: Path) -> None:
        pom = shutil.copy(HERE / "pom.xml", folder / "pom.xml")
        goal = ["dependency:copy-dependencies", f"-DoutputDirectory={folder}", "-DincludeScope=runtime"]
        run_maven(["-f", str(pom), *goal], "Debezium", attempt)

    return cached(f"debezium-{VERSION}", "Debezium", attempt, fill)


def _worker(settings: Settings, folder: Path, flush_seconds: float) -> dict[str, object]:
    return {
        "bootstrap.servers": settings.kafka,
        "listeners": f"http://127.0.0.1:{ports.choose(())}",
        "offset.storage.file.filename": folder / "offsets",
        "offset.flush.interval.ms": int(1_000 * flush_seconds),
        # Without its scan of every class; all plugins name themselves.
        "plugin.discovery": "service_load",
        # Connectors name their own; the worker does not start without any.
        "key.converter": "org.apache.kafka.connect.storage.StringConverter",
        "value.converter": "org.apache.kafka.connect.storage.StringConverter",
    }


def _database(settings: Settings) -> dict[str, object]:
    database = conninfo.conninfo_to_dict(settings.database_url)
    parts = {"hostname": "host", "port": "port", "user": "user", "password": "password", "dbname": "dbname"}
    return {f"database.{theirs}": database[ours] for theirs, ours in parts.items() if ours in database}


def _lines(values: Mapping[str, object]) -> str:
    return "".join(f"{name}={value}\n" for name, value in values.items())
