"""``streams demo``."""

from __future__ import annotations

import importlib
import signal
from typing import Annotated, Any

import typer

from streams.cli.common import Json, console, print_json, stderr
from streams.errors import ConfigurationError


def demo(
    events: Annotated[
        int, typer.Option(min=1_000, help="how many events the service appends, at least")
    ] = 20_000,
    seed: Annotated[int, typer.Option(help="the same seed asks for the same events")] = 1,
    keep: Annotated[bool, typer.Option("--keep", help="leave the servers up, to look around")] = False,
    json: Json = False,
) -> None:
    """See it work: a shop under load, failing dependencies, poison, kill -9, and an audit of every row at the end.

    Starts servers of its own, beside those of 'streams dev', and takes them down again. Exits with 1 unless the audit
    finds nothing lost, nothing doubled and nothing out of order.

    \b
    Examples:
      streams demo
      streams demo --keep --seed 7
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends everything in order, as Ctrl-C does
    outcome = _module("run").run(events, seed, keep=keep, console=stderr)
    shown = stderr if json else console
    shown.print()
    shown.print(_module("view").result(outcome.numbers, outcome.audit, restarts=outcome.restarts))
    for problem in outcome.audit.problems:
        shown.print(f"not clean: {problem}", style="red", markup=False)
    shown.print()
    shown.print(
        f"{'clean' if outcome.audit.is_clean else 'NOT clean'}, after {outcome.seconds:.1f} s. Try next:"
    )
    for command in outcome.next_commands:
        shown.print(f"  {command}", markup=False, highlight=False, soft_wrap=True)
    if json:
        print_json(outcome.as_json())
    if not outcome.audit.is_clean:
        raise typer.Exit(1)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(f"processors.demo.{name}")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("processors"):
            raise
        raise ConfigurationError(
            "the demo runs the reference application, which is not installed with the package: "
            "run it from a checkout of the repository, after pip install -e '.[dev]'"
        ) from error
