"""``streams dev``: the local servers, up and down."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from streams.dev.state import ALWAYS, ServerName
from streams.errors import ConfigurationError
from streams.settings import dev_directory

if TYPE_CHECKING:
    from streams.dev.status import ServerStatus

# The modules that start servers need the dev extra, so commands import them when they run: without the extra the
# other commands of the program still work, and these say what to install.

app = typer.Typer(
    help="Start and stop Kafka, PostgreSQL and Redis for development, without a container engine.",
    no_args_is_help=True,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.command()
def up(
    *,
    registry: Annotated[bool, typer.Option("--registry", help="Start a schema registry too.")] = False,
    containers: Annotated[
        bool,
        typer.Option(help="Use a container engine, if one answers and this folder has a docker-compose.yml."),
    ] = True,
    new_ports: Annotated[
        bool, typer.Option("--new-ports", help="Move a server whose port somebody else has now.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Start the servers that do not run yet, and wait until they answer.

    A server whose endpoint is in the environment (STREAMS_KAFKA, STREAMS_DATABASE_URL, STREAMS_REDIS_URL,
    STREAMS_REGISTRY_URL) is left alone. Other commands find the started servers by themselves.

    \b
    Example:
      streams dev up --registry
    """
    from streams.dev import servers, status  # noqa: PLC0415

    want = (*ALWAYS, ServerName.REGISTRY) if registry else ALWAYS
    directory = dev_directory()
    with _progress() as report, _terminable():
        servers.up(directory, want=want, report=report, use_containers=containers, new_ports=new_ports)
    _show(status.status(directory), as_json=as_json)


@app.command("status")
def show_status(*, as_json: AsJson = False) -> None:
    """Show which servers run and where they answer; exit with 1 unless all do.

    \b
    Example:
      streams dev status --json
    """
    from streams.dev import status  # noqa: PLC0415

    found = status.status(dev_directory())
    _show(found, as_json=as_json)
    if not all(each.is_well for each in found):
        raise typer.Exit(1)


@app.command()
def logs(
    name: Annotated[ServerName, typer.Argument(help="Whose log.", show_default=False)],
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="How many lines from the end.")] = 50,
) -> None:
    """Print the end of a server's log.

    \b
    Example:
      streams dev logs kafka --follow
    """
    from streams.dev import containers, servers  # noqa: PLC0415

    directory = dev_directory()
    if name in containers.running(directory):
        command = containers.log_command(directory, name, lines=lines, follow=follow)
    else:
        log = servers.server(directory, name).log
        if not log.exists():
            raise ConfigurationError(f"{name} has no log yet; start it with: streams dev up")
        command = ["tail", "-n", str(lines), *(["-F"] if follow else []), str(log)]
    _print_output(command)


@app.command()
def down() -> None:
    """Stop every server. Their data and ports stay for the next time.

    \b
    Example:
      streams dev down
    """
    from streams.dev import servers  # noqa: PLC0415

    with _progress() as report:
        stopped = servers.down(dev_directory(), report=report)
    _say_stopped(stopped)


@app.command()
def reset(*, yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False) -> None:
    """Stop every server and delete all topics, tables, keys, ports and logs.

    \b
    Example:
      streams dev reset --yes
    """
    from streams.dev import servers  # noqa: PLC0415

    directory = dev_directory()
    if not yes:
        typer.confirm(f"Delete all data of the local servers in {directory}?", abort=True)
    with _progress() as report:
        stopped = servers.reset(directory, report=report)
    _say_stopped(stopped)
    typer.echo("data deleted")


def _say_stopped(stopped: Sequence[ServerName]) -> None:
    typer.echo(f"stopped {', '.join(stopped)}" if stopped else "nothing was running")


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Reports to stderr: the latest message beside a spinner on a terminal, otherwise a line for each."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda message: console.print(message, markup=False, soft_wrap=True)
        return
    latest: dict[str, str] = {}
    with console.status("") as spinner:

        def report(message: str) -> None:
            latest[message.partition(":")[0]] = message
            spinner.update("\n  ".join(latest.values()))

        yield report


@contextmanager
def _terminable() -> Iterator[None]:
    """Lets SIGTERM end the block as Ctrl-C does, so that nothing stays half started."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _print_output(command: Sequence[str]) -> None:
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as process:
        try:
            for line in process.stdout or ():
                typer.echo(line, nl=False)
        except KeyboardInterrupt:
            process.terminate()


def _show(found: Sequence[ServerStatus], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([asdict(each) for each in found], indent=2))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("server", "state", "endpoint", "detail"):
        table.add_column(heading, overflow="fold")
    for each in found:
        table.add_row(each.name, each.state, each.endpoint or "", each.detail)
    _console().print(table)


def _console() -> Console:
    console = Console(highlight=False)
    # Into a file or a pipe, a row is a line however long.
    return console if console.is_terminal else Console(highlight=False, width=250)
