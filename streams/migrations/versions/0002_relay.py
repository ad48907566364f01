"""What the relay needs beyond the log: row numbers, polling, blocked records, an outbox by days."""

from streams.migrations.runner import run_sql_file

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    run_sql_file("0002_relay.sql")
