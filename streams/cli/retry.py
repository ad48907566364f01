"""``streams retry``."""

from __future__ import annotations

from typing import Annotated

import typer

from streams.cli.common import Json, print_json, print_table
from streams.settings import Settings
from streams.stores import overview
from streams.stores.postgres import connect

app = typer.Typer(help="Look at what will be tried again.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    pass


@app.command("list")
def list_retries(
    group: Annotated[
        str | None, typer.Option(help="only this consumer group, such as shop.stock-level")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="how many at most")] = 100,
    json: Json = False,
) -> None:
    """Show the jobs that wait for another attempt, and those that wait behind them; the soonest first.

    \b
    Example:
      streams retry list --group shop.stock-level
    """
    settings = Settings.load()
    with connect(settings.database_url, autocommit=True, seconds=settings.connect_seconds) as connection:
        rows = overview.waiting_jobs(connection, group, limit)
    if json:
        print_json(rows)
        return
    print_table(list(rows[0]) if rows else [], (list(row.values()) for row in rows), empty="nothing waits")
