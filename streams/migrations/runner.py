"""Applies the migrations, prints them, and tells whether a database has them all."""

from __future__ import annotations

import io
from importlib.resources import files
from pathlib import Path

from alembic import command, op
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.pool import NullPool

from streams.stores.postgres import connect

SCHEMA = "fencepost"
VERSION_TABLE = "migration"


def migrate(database_url: str) -> list[str]:
    """Brings the database to the newest schema and returns the revisions applied; none where it was there already."""
    with _connect(database_url) as connection:
        connection.execute(text(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}"))
        # Two services that start together migrate together: the second waits here and finds nothing left to do.
        connection.execute(text("SELECT pg_advisory_xact_lock(hashtext('fencepost.migrate'))"))
        before = _current(connection)
        command.upgrade(_config(connection=connection), "head")
        connection.commit()
        script = ScriptDirectory.from_config(_config())
        return [step.revision for step in reversed(list(script.iterate_revisions("head", before)))]


def as_sql() -> str:
    """The statements of every migration, for teams that apply their own."""
    output = io.StringIO()
    command.upgrade(_config(output=output), "head", sql=True)
    return output.getvalue()


def run_sql_file(name: str) -> None:
    """Executes one file of ``sql/`` inside the running migration."""
    # SQLAlchemy reads a colon as a bind parameter; the files have none.
    statement = files("streams.migrations").joinpath("sql", name).read_text()
    op.execute(text(statement.replace(":", r"\:")))


def _current(connection: Connection) -> str | None:
    context = MigrationContext.configure(
        connection, opts={"version_table": VERSION_TABLE, "version_table_schema": SCHEMA}
    )
    return context.get_current_revision()


def _connect(database_url: str) -> Connection:
    # A creator, since database_url may be any libpq DSN and SQLAlchemy reads only URLs.
    engine = create_engine("postgresql+psycopg://", creator=lambda: connect(database_url), poolclass=NullPool)
    return engine.connect()


def _config(connection: Connection | None = None, output: io.StringIO | None = None) -> Config:
    config = Config(output_buffer=output)
    config.set_main_option("script_location", str(Path(str(files("streams.migrations")))))
    config.attributes["connection"] = connection
    return config
