"""What Alembic runs for ``streams migrate``; the connection comes from the runner."""

from alembic import context
from sqlalchemy import Connection, text

from streams.migrations.runner import SCHEMA, VERSION_TABLE


def _run(connection: Connection | None) -> None:
    context.configure(
        connection=connection,
        dialect_name="postgresql",
        version_table=VERSION_TABLE,
        version_table_schema=SCHEMA,
        literal_binds=connection is None,
        transactional_ddl=True,
    )
    with context.begin_transaction():
        # Alembic keeps its version table inside the schema, so the schema comes first.
        context.execute(text(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}"))
        context.run_migrations()


_run(None if context.is_offline_mode() else context.config.attributes["connection"])
