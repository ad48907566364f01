"""Event store, outbox, fences, progress, jobs."""

from streams.migrations.runner import run_sql_file

revision = "0001"
down_revision = None


def upgrade() -> None:
    run_sql_file("0001_foundation.sql")
