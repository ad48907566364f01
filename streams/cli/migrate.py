"""``streams migrate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from streams.cli.common import console
from streams.relay import slot
from streams.relay.relay import prepare
from streams.settings import Settings
from streams.stores.postgres import connect


def migrate(
    sql: Annotated[bool, typer.Option("--sql", help="print the statements instead of running them")] = False,
    also: Annotated[
        list[Path] | None,
        typer.Option(help="a file of SQL to run afterwards, such as the tables of your read models"),
    ] = None,
    no_slot: Annotated[
        bool, typer.Option("--no-slot", help="leave the relay's replication slot to somebody else")
    ] = False,
) -> None:
    """Bring the database to the schema this version needs, and make the relay's slot.

    The slot is made here, before the first event can be written, since it sees only what commits after it was made.
    Running it again changes nothing.

    \b
    Examples:
      streams migrate
      streams migrate --also processors/tables.sql
      streams migrate --sql > fencepost.sql
    """
    from streams.migrations import runner  # noqa: PLC0415 - Alembic takes half a second that no other command owes

    if sql:
        typer.echo(runner.as_sql())
        return
    settings = Settings.load()
    if not no_slot and settings.relay_source != "poll":
        with connect(settings.database_url, name="fencepost migrate", autocommit=True) as connection:
            slot.require_rights(connection)  # first, so that nothing is made which cannot go on
    applied = runner.migrate(settings.database_url)
    console.print(f"applied {', '.join(applied)}" if applied else "the database is up to date")
    for path in also or []:
        with connect(settings.database_url, name="fencepost migrate") as connection:
            connection.execute(path.read_bytes())
        console.print(f"ran {path}")
    if not no_slot:
        prepare(settings)
