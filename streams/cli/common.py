"""What the commands share: loading an application, printing tables and JSON, stopping on signals."""

from __future__ import annotations

import difflib
import gc
import importlib
import signal
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.table import Table

from streams.app import App
from streams.errors import ConfigurationError
from streams.migrations import newest
from streams.settings import Settings
from streams.stores.postgres import Connection, connect, require_migrated

Json = Annotated[bool, typer.Option("--json", help="print JSON instead of a table")]
MetricsPort = Annotated[int | None, typer.Option(help="serve Prometheus metrics on this port")]
AppArgument = Annotated[str, typer.Argument(metavar="APP", help="where the application is, as module:name")]

# A pipe or a file has no width to fit into; a table that is broken to 80 columns there can be read by nobody.
console = Console() if sys.stdout.isatty() else Console(width=200)
stderr = Console(stderr=True)


def load_app(where: str) -> App:
    """The application at ``module:name``.

    Raises:
        ConfigurationError: it cannot be imported, or is no App.
    """
    module_name, _, name = where.partition(":")
    # Like 'python -m': the application usually lies in the directory the command is called from.
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"{where}: {error}; give module:name, such as processors.app:app") from error
    found = getattr(module, name or "app", None)
    if isinstance(found, App):
        return found
    apps = [key for key, value in vars(module).items() if isinstance(value, App)]
    close = difflib.get_close_matches(name, apps, n=1) or apps
    hint = f"did you mean {module_name}:{close[0]}?" if close else f"{module_name} holds no App"
    raise ConfigurationError(f"{where} is not an App; {hint}")


def print_json(value: Any) -> None:
    typer.echo(orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS).decode())


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, empty: str) -> None:
    """A table, or a sentence where there is nothing to show. Numbers stand to the right."""
    rows = [list(row) for row in rows]
    if not rows:
        console.print(empty)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        numeric = all(isinstance(row[index], int | float) for row in rows)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(
            *("" if cell is None else f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row)
        )
    console.print(table)


def migrated_database(settings: Settings) -> Connection:
    """A connection that commits each statement, to a database that has the tables of this version.

    Raises:
        ServerUnavailable: it does not answer, or lacks migrations.
    """
    connection = connect(settings.database_url, autocommit=True, seconds=settings.connect_seconds)
    require_migrated(connection, newest())
    return connection


def serve_metrics(port: int | None) -> None:
    """Serves Prometheus metrics from now on, where a port is given.

    Raises:
        ConfigurationError: the port cannot be used.
    """
    if port is None:
        return
    from prometheus_client import start_http_server  # noqa: PLC0415 - only where it is asked for

    try:
        start_http_server(port)
    except OSError as error:
        raise ConfigurationError(f"port {port} cannot be used for metrics: {error.strerror}") from error


def spare_the_collector() -> None:
    """Tells Python's cycle collector that a loop over records makes many objects and hardly a cycle.

    By default it looks at all young objects after every 700 that are made, which took a sixth of the loop's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 50)


def stop_on_signals() -> threading.Event:
    """An event that SIGINT and SIGTERM set; a second signal ends the process at once."""
    stop = threading.Event()

    def handle(number: int, _: FrameType | None) -> None:
        if stop.is_set():
            raise SystemExit(128 + number)
        stop.set()

    signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGTERM, handle)
    return stop
